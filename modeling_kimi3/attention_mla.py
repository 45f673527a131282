"""Gated multi-head latent attention without positions: the periodic softmax retrieval (spec section 4, "MLA").

Only a latent of r numbers and a key part of p numbers shared by all heads are cached per token. Prefill expands
them into keys and values; a short query against a long cache is folded into the latent space instead.

Shapes: B batch, T query time, S key time, D hidden size, H heads, n "nope" key dim, p "rope" key dim (never rotated
in this family), v value dim, r latent rank.
"""

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_tracing

from .configuration_kimi3 import KimiK3Config
from .mlp import KimiK3RMSNorm
from .precision import effective_weight, upcast

# The official code leaves the two latent norms at its RMSNorm's default, which is not `rms_norm_eps`.
LATENT_NORM_EPS = 1e-6

# Bytes of keys and values that prefill expands at once where no gradient is wanted.
_EXPANSION_BUDGET = 64 * 2**20


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention with the weights at hand: query `[B, H, T, n+p]`, key `[B, H, S, n+p]`, value `[B, H, S, v]`.

    Returns the output `[B, T, H, v]` and the weights `[B, H, T, S]`.
    """
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    weights = masked_softmax(scores, attention_mask).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2), weights


def masked_softmax(scores: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Float32 softmax over the last dim of `scores [B, H, T, S]` under a boolean or additive mask `[B, 1, T, S]`."""
    scores = upcast(scores)
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
    return scores.softmax(dim=-1)


class KimiMLAttention(nn.Module):
    """One MLA mixer, with or without query compression (`q_lora_rank`) and output gate (`mla_use_output_gate`)."""

    def __init__(self, config: KimiK3Config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.nope_dim = config.qk_nope_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.head_dim = config.qk_head_dim
        self.value_dim = config.v_head_dim
        self.rank = config.kv_lora_rank
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        # Read by transformers' attention functions.
        self.is_causal = True
        self.num_key_value_groups = 1

        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
            self.q_a_layernorm = KimiK3RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, self.num_heads * self.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, self.rank + self.rope_dim, bias=False)
        self.kv_a_layernorm = KimiK3RMSNorm(self.rank, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(self.rank, self.num_heads * (self.nope_dim + self.value_dim), bias=False)
        if config.mla_use_output_gate:
            self.g_proj = nn.Linear(config.hidden_size, self.num_heads * self.value_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.value_dim, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden_states: `[B, T, D]`, normed.
            attention_mask: what transformers prepares for the attention implementation in use.
            cache: its layer `layer_idx` holds latents `[B, 1, S, r]` and shared keys `[B, 1, S, p]`.
            **kwargs: passed to the attention function (`cu_seq_lens_q`, …).

        Returns:
            `[B, T, D]` and the attention weights `[B, H, T, S]`, None where the implementation does not give them.
        """
        batch, time, _ = hidden_states.shape
        if self.config.q_lora_rank is None:
            query = self.q_proj(hidden_states)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.view(batch, time, self.num_heads, self.head_dim).transpose(1, 2)

        latent, shared_key = self.kv_a_proj_with_mqa(hidden_states).split([self.rank, self.rope_dim], dim=-1)
        latent, shared_key = self.kv_a_layernorm(latent).unsqueeze(1), shared_key.unsqueeze(1)
        if cache is not None:
            latent, shared_key = cache.update(latent, shared_key, self.layer_idx)

        if self._absorbs(time, latent.shape[2], attention_mask):
            joined = getattr(cache.layers[self.layer_idx], "joined", None) if cache is not None else None
            if joined is None:
                joined = torch.cat([latent, shared_key], dim=-1).squeeze(1)
            output, weights = self._attend_absorbed(query, joined, attention_mask)
        else:
            output, weights = self._attend_expanded(query, latent, shared_key, attention_mask, **kwargs)

        output = output.reshape(batch, time, -1)
        if self.config.mla_use_output_gate:
            gate = upcast(self.g_proj(hidden_states)).sigmoid()
            output = (output * gate).to(output.dtype)
        return self.o_proj(output), weights

    def _absorbs(self, query_length: int, key_length: int, attention_mask: object) -> bool:
        """Whether folding the query is cheaper than expanding the context, counted in multiplications per head."""
        if not (attention_mask is None or (isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4)):
            return False
        if attention_mask is None and query_length > 1:
            return False
        expansion = self.rank * (self.nope_dim + self.value_dim)
        expanded = key_length * expansion + query_length * key_length * (self.head_dim + self.value_dim)
        absorbed = query_length * expansion + query_length * key_length * (2 * self.rank + self.rope_dim)
        return not self.training and absorbed < expanded

    def _attend_expanded(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        shared_key: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over keys `[B, H, S, n+p]` and values `[B, H, S, v]` from the latents. Output `[B, T, H, v]`.

        Without gradients the heads go through in groups, so that what is expanded at once stays within a budget
        however long the context is.
        """
        per_head = latent.shape[0] * latent.shape[2] * 2 * self.head_dim * latent.element_size()
        group = max(1, _EXPANSION_BUDGET // per_head)
        if torch.is_grad_enabled() or group >= self.num_heads or is_tracing(query):
            expanded = self.kv_b_proj(latent.squeeze(1))
            return self._attend_heads(query, expanded, shared_key, attention_mask, **kwargs)
        up = effective_weight(self.kv_b_proj).to(latent.dtype).unflatten(0, (self.num_heads, -1))
        parts = []
        for start in range(0, self.num_heads, group):
            heads = slice(start, start + group)
            expanded = nn.functional.linear(latent.squeeze(1), up[heads].flatten(0, 1))
            parts.append(self._attend_heads(query[:, heads], expanded, shared_key, attention_mask, **kwargs))
        weights = None if parts[0][1] is None else torch.cat([weights for _, weights in parts], dim=1)
        return torch.cat([output for output, _ in parts], dim=2), weights

    def _attend_heads(
        self,
        query: torch.Tensor,
        expanded: torch.Tensor,
        shared_key: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The heads of `query [B, h, T, n+p]` over their `expanded [B, S, h*(n+v)]`, by transformers' interface."""
        batch, length, _ = expanded.shape
        expanded = expanded.view(batch, length, query.shape[1], -1).transpose(1, 2)
        key, value = expanded.split([self.nope_dim, self.value_dim], dim=-1)
        key = torch.cat([key, shared_key.expand(-1, query.shape[1], -1, -1)], dim=-1)

        implementation = self.config._attn_implementation
        padding = self.head_dim - self.value_dim if self._needs_equal_widths(implementation, query) else 0
        if padding:
            value = nn.functional.pad(value, (0, padding))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return output[..., : self.value_dim], weights

    def _needs_equal_widths(self, implementation: str | None, query: torch.Tensor) -> bool:
        """Flash kernels want values as wide as keys; CPU sdpa otherwise falls to a path that holds all T*S scores."""
        if self.head_dim <= self.value_dim or implementation is None:
            return False
        return "flash" in implementation or (implementation == "sdpa" and query.device.type == "cpu")

    def _attend_absorbed(
        self, query: torch.Tensor, joined: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same attention without expanding the context, against `joined [B, S, r+p]`: latents and shared keys.

        score = (W_k^T q_nope) . latent + q_rope . shared_key, output = W_v (sum of weight * latent).
        """
        batch, heads, time, _ = query.shape
        up = effective_weight(self.kv_b_proj).to(query.dtype).view(heads, self.nope_dim + self.value_dim, self.rank)
        key_up, value_up = up.split([self.nope_dim, self.value_dim], dim=1)
        q_nope, q_rope = (query * self.scaling).split([self.nope_dim, self.rope_dim], dim=-1)

        folded = torch.cat([torch.einsum("bhtn,hnr->bhtr", q_nope, key_up), q_rope], dim=-1).flatten(1, 2)
        scores = _per_row_matmul(folded, joined.transpose(1, 2)).view(batch, heads, time, -1)
        weights = masked_softmax(scores, attention_mask).to(query.dtype)
        # Reading the shared keys along with the latents costs less than a matmul over rows with gaps.
        read = _per_row_matmul(weights.flatten(1, 2), joined).view(batch, heads, time, -1)
        return torch.einsum("bhtr,hvr->bthv", read[..., : self.rank], value_up), weights


def _per_row_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a [B, m, k] @ b [B, k, n]`. On a CPU row by row: torch's batched form copies or walks a long `b` badly there
    (at k = 576 and n = 32768 in bfloat16 it takes seven times as long)."""
    if a.device.type != "cpu" or is_tracing(a):
        return torch.bmm(a, b)
    if a.shape[0] == 1:
        return (a[0] @ b[0]).unsqueeze(0)
    return torch.stack([x @ y for x, y in zip(a, b)])
