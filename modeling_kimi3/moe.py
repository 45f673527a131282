"""Sparse experts: router, stacked experts, latent projections and shared experts (spec section 4, "MoE").

Shapes: N tokens (batch and time flattened), D hidden size, L latent width (D where there is no latent), E experts,
I expert width, k experts per token, G groups.
"""

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.utils.generic import is_tracing

from .configuration_kimi3 import KimiK3Config
from .mlp import KimiK3MLP, KimiK3RMSNorm, gated_unit
from .precision import KeepPrecision, linear_upcast, wide_dtype


class KimiK3Router(KeepPrecision):
    """Chooses k experts per token by score plus a selection bias, and weighs them by the score alone.

    The bias balances the load and never enters the mixture weights (spec section 8). Logits, scores and choice are
    float32 whatever the model's dtype and under autocast.
    """

    # The weight is stored in the model's dtype and upcast where it is used.
    _kept_tensors = ("e_score_correction_bias",)

    def __init__(self, config: KimiK3Config):
        super().__init__()
        self.top_k = config.num_experts_per_token
        self.num_experts = config.num_experts
        self.score_function = config.moe_router_activation_func
        self.num_groups = config.num_expert_group
        self.topk_group = config.topk_group
        self.renormalize = config.moe_renormalize
        self.scaling_factor = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(self.num_experts, config.hidden_size))
        # A buffer: no gradient, optimizer or sharding may reach it, and loading makes every parameter trainable.
        self.register_buffer("e_score_correction_bias", torch.zeros(self.num_experts, dtype=wide_dtype()))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Args:
            hidden_states: `[N, D]`.

        Returns:
            logits `[N, E]` float32, mixture weights `[N, k]` float32, expert ids `[N, k]` int64.
        """
        logits = linear_upcast(hidden_states, self.weight)
        scores = logits.sigmoid() if self.score_function == "sigmoid" else logits.softmax(dim=-1)
        with torch.no_grad():
            choice = self._choose(scores + self.e_score_correction_bias)
        weights = scores.gather(-1, choice)
        if self.top_k > 1 and self.renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, weights * self.scaling_factor, choice

    def _choose(self, biased: torch.Tensor) -> torch.Tensor:
        """Ids `[N, k]` of the best `biased` scores `[N, E]`, from the best groups only where there are groups."""
        if self.num_groups > 1:
            grouped = biased.unflatten(-1, (self.num_groups, -1))
            group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
            kept = group_scores.topk(self.topk_group, dim=-1, sorted=False).indices
            dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, kept, False)
            biased = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)
        return biased.topk(self.top_k, dim=-1, sorted=False).indices


@use_experts_implementation
class KimiK3Experts(nn.Module):
    """The routed experts, stacked: `gate_up_proj [E, 2I, L]` (gate rows, then up rows) and `down_proj [E, L, I]`.

    transformers' experts interface chooses how they run (`experts_implementation=`, by default "kimi3", see
    `experts_by_device`); `forward` is the eager form, one expert after the other.
    """

    def __init__(self, config: KimiK3Config):
        super().__init__()
        self.num_experts = config.num_experts
        self.hidden_dim = config.expert_hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gated_unit(gate, up, self.config)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """
        Args:
            hidden_states: `[N, L]`.
            top_k_index: expert ids `[N, k]`.
            top_k_weights: mixture weights `[N, k]`.

        Returns:
            `[N, L]`, the weighted sum of the chosen experts' outputs, in `hidden_states`' dtype.
        """
        return _one_by_one(self, hidden_states, top_k_index, top_k_weights)


def _one_by_one(
    experts: KimiK3Experts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    output = torch.zeros_like(hidden_states)
    # Token-expert pairs sorted by expert: each expert then owns one contiguous run of them.
    pairs = top_k_index.flatten().argsort(stable=True)
    counts = torch.bincount(top_k_index.flatten(), minlength=experts.num_experts)[: experts.num_experts].tolist()
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        chosen = pairs[start : start + count]
        start += count
        tokens = chosen // top_k_index.shape[-1]
        inner = experts._apply_gate(nn.functional.linear(hidden_states[tokens], experts.gate_up_proj[expert]))
        contribution = nn.functional.linear(inner, experts.down_proj[expert])
        contribution = contribution * top_k_weights.flatten()[chosen].unsqueeze(-1)
        output.index_add_(0, tokens, contribution.to(output.dtype))
    return output


class KimiK3SparseMoeBlock(nn.Module):
    """Router on the full width, routed experts (in a latent of width L where configured), plus the shared experts."""

    def __init__(self, config: KimiK3Config):
        super().__init__()
        self.gate = KimiK3Router(config)
        self.experts = KimiK3Experts(config)
        latent = config.routed_expert_hidden_size
        self.routed_expert_down_proj: nn.Linear | None = None
        self.routed_expert_up_proj: nn.Linear | None = None
        self.routed_expert_norm: KimiK3RMSNorm | None = None
        if latent is not None:
            self.routed_expert_down_proj = nn.Linear(config.hidden_size, latent, bias=False)
            self.routed_expert_up_proj = nn.Linear(latent, config.hidden_size, bias=False)
            if config.latent_moe_use_norm:
                self.routed_expert_norm = KimiK3RMSNorm(latent, config.rms_norm_eps)
        self.shared_experts: KimiK3MLP | None = None
        if config.num_shared_experts:
            self.shared_experts = KimiK3MLP(config, config.moe_intermediate_size * config.num_shared_experts)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[B, T, D]` to `[B, T, D]`."""
        tokens = hidden_states.flatten(0, -2)
        _, weights, choice = self.gate(tokens)
        routed = tokens if self.routed_expert_down_proj is None else self.routed_expert_down_proj(tokens)
        routed = self.experts(routed, choice, weights)
        if self.routed_expert_norm is not None:
            routed = self.routed_expert_norm(routed)
        if self.routed_expert_up_proj is not None:
            routed = self.routed_expert_up_proj(routed)
        routed = routed.view_as(hidden_states)
        if self.shared_experts is not None:
            routed = routed + self.shared_experts(hidden_states)
        return routed


# Token-expert pairs up to which gathering a copy of each pair's expert beats sorting the pairs, on an accelerator.
_FEW_PAIRS = 64


def experts_by_device(
    self: KimiK3Experts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The default experts implementation, "kimi3"; arguments as `KimiK3Experts.forward`.

    On a CPU the experts run one after the other: nothing of the size of all pairs is held, and no weight is copied.
    On an accelerator, and in a compiled graph, transformers' own `grouped_mm` runs them together, `batched_mm` where
    there are few pairs, as in decoding.
    """
    if hidden_states.device.type == "cpu" and not is_tracing(hidden_states):
        return _one_by_one(self, hidden_states, top_k_index, top_k_weights)
    # grouped_mm has no float64.
    few = top_k_index.numel() <= _FEW_PAIRS or hidden_states.dtype == torch.float64
    return ALL_EXPERTS_FUNCTIONS["batched_mm" if few else "grouped_mm"](self, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register("kimi3", experts_by_device)
