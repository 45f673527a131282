"""Kimi Delta Attention: a constant-size recurrent state with a forget gate per channel (spec section 4, "KDA").

Shapes: B batch, T time, D hidden size, H heads, K key dim, V value dim (equal to K), W convolution taps.
"""

import torch
from torch import nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from kimi3_kernels import gated_rms_norm, kda_chunk, kda_gate, kda_step, l2norm, short_conv, short_conv_step

from .cache import KimiDeltaLayer
from .configuration_kimi3 import KimiK3Config
from .precision import KeepPrecision, upcast
from .rollback import Checkpoint, KdaWrites, convolution_tail
from .sequence_layout import PackedLayout, PaddedLayout, SequenceLayout


class KimiK3ShortConvolution(KeepPrecision):
    """The taps of one causal depthwise convolution, `weight [H*K, 1, W]`, float32 whatever the model's dtype."""

    def __init__(self, channels: int, kernel_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size, dtype=torch.float32))


class KimiK3GatedRMSNorm(KeepPrecision):
    """RMSNorm over V, times sigmoid(gate), all in float32; the weight `[V]` stays float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """`hidden_states` and raw `gate` of one shape `[..., V]`; the result has `gate`'s dtype."""
        return gated_rms_norm(hidden_states, gate, self.weight, self.eps)


class KimiDeltaAttention(KeepPrecision):
    """One KDA mixer.

    Both decay gates (bounded where `gate_lower_bound` is set, softplus otherwise) and both output gates (full rank
    or low rank) are chosen by the config. The decay parameters stay float32.
    """

    _kept_parameters = ("A_log", "dt_bias")

    def __init__(self, config: KimiK3Config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.kda_num_heads
        self.head_dim = config.kda_head_dim
        self.lower_bound = config.gate_lower_bound
        inner = self.num_heads * self.head_dim

        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.q_conv1d = KimiK3ShortConvolution(inner, config.conv_kernel_size)
        self.k_conv1d = KimiK3ShortConvolution(inner, config.conv_kernel_size)
        self.v_conv1d = KimiK3ShortConvolution(inner, config.conv_kernel_size)

        self.f_a_proj = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, inner, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(inner, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        self.b_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)

        if config.use_full_rank_gate:
            self.g_proj = nn.Linear(config.hidden_size, inner, bias=False)
        else:
            self.g_a_proj = nn.Linear(config.hidden_size, self.head_dim, bias=False)
            self.g_b_proj = nn.Linear(self.head_dim, inner, bias=False)
        self.o_norm = KimiK3GatedRMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def output_gate(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Raw output gate `[B, T, H*V]` (before the sigmoid)."""
        if self.config.use_full_rank_gate:
            return self.g_proj(hidden_states)
        return self.g_b_proj(self.g_a_proj(hidden_states))

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: SequenceLayout | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """
        Args:
            hidden_states: `[B, T, D]`, normed.
            layout: where the real tokens are, or None where every token of every row is real.
            cache: its layer `layer_idx` holds the convolutions' tail `[B, 3*H*K, W-1]` and the state `[B, H, K, V]`,
                and is moved on by these tokens.

        Returns:
            `[B, T, D]`, zeros at padding.
        """
        packed = isinstance(layout, PackedLayout)
        if packed and cache is not None:
            raise ValueError(
                "cache must be None for packed sequences: it holds one state per row, and a packed row has several "
                "sequences. Pass use_cache=False, or one sequence per row."
            )
        x = layout.gather(hidden_states) if packed else hidden_states
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        g = kda_gate(self._heads(self.f_b_proj(self.f_a_proj(x))), self.A_log, self.dt_bias, self.lower_bound)
        beta = upcast(self.b_proj(x)).sigmoid()
        if isinstance(layout, PaddedLayout):
            g, beta = layout.silence(g), layout.silence(beta)

        if cache is None:
            o, _, _ = self._scan(qkv, g, beta, layout)
        else:
            o = self._advance(qkv, g, beta, layout, cache)

        output = self.o_proj(self.o_norm(o, self._heads(self.output_gate(x))).flatten(-2))
        return layout.scatter(output) if packed else output

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim))

    def _taps(self) -> torch.Tensor:
        """The three convolutions' taps as one depthwise convolution, `[3*H*K, 1, W]`."""
        return torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Convolved `[..., 3*H*K]` to normalised q and k (float32) and v, each `[..., H, K]`."""
        q, k, v = (self._heads(part) for part in qkv.chunk(3, dim=-1))
        return l2norm(q), l2norm(k), v

    def _advance(
        self, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, layout: PaddedLayout | None, cache: Cache
    ) -> torch.Tensor:
        """Outputs `[B, T, H, V]`; moves the cache's tail and state on by these tokens."""
        tail, state = cache.get_conv_state(self.layer_idx), cache.get_recurrent_state(self.layer_idx)
        layer = cache.layers[self.layer_idx]
        # The in-place step has no backward, and nothing to update before the first token.
        if qkv.shape[1] == 1 and layout is None and state is not None and not torch.is_grad_enabled():
            return self._step(qkv, g, beta, tail, state, layer)
        o, tail, state = self._scan(qkv, g, beta, layout, tail, state, layer)
        cache.update_conv_state(tail, self.layer_idx, conv_kernel_size=tail.shape[-1])
        cache.update_recurrent_state(state, self.layer_idx)
        return o

    def _step(
        self,
        qkv: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        tail: torch.Tensor,
        state: torch.Tensor,
        layer: LinearAttentionLayer,
    ) -> torch.Tensor:
        """One token per row, tail and state updated where they lie. Returns `[B, 1, H, V]`."""
        recording = isinstance(layer, KimiDeltaLayer) and layer.begin(1, tail.shape[-1]) is not None
        mixed = short_conv_step(qkv.squeeze(1), self._taps(), tail)
        q, k, v = self._split(mixed)
        if recording:
            mask = torch.ones(qkv.shape[:2], dtype=torch.bool, device=qkv.device)
            layer.window.record(KdaWrites(qkv, k.unsqueeze(1), v.unsqueeze(1), g, beta, mask))
        return kda_step(q, k, v, g.squeeze(1), beta.squeeze(1), state).unsqueeze(1)

    def _scan(
        self,
        qkv: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        layout: SequenceLayout | None,
        tail: torch.Tensor | None = None,
        state: torch.Tensor | None = None,
        layer: LinearAttentionLayer | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Many tokens: outputs `[B, T, H, V]`, the convolutions' new tail `[B, 3*H*K, W-1]`, the new state."""
        cut = (
            layer.begin(qkv.shape[1], self.q_conv1d.weight.shape[-1] - 1) if isinstance(layer, KimiDeltaLayer) else None
        )
        old_tail = tail
        cu_seqlens = layout.cu_seqlens if isinstance(layout, PackedLayout) else None
        if isinstance(layout, PaddedLayout):
            mixed, tail = short_conv(layout.compact(qkv), self._taps(), old_tail, lengths=layout.lengths)
            mixed = layout.spread(mixed)
        else:
            mixed, tail = short_conv(qkv, self._taps(), old_tail, cu_seqlens=cu_seqlens)
        inputs = (*self._split(mixed), g, beta)

        def scan(start: int, end: int, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            part = (tensor[:, start:end] for tensor in inputs)
            return kda_chunk(*part, state, lower_bound=self.lower_bound, cu_seqlens=cu_seqlens)

        if cut is None:
            o, state = kda_chunk(*inputs, state, lower_bound=self.lower_bound, cu_seqlens=cu_seqlens)
            return o, tail, state

        mask = layout.mask if layout is not None else torch.ones(qkv.shape[:2], dtype=torch.bool, device=qkv.device)
        outputs = []
        if cut:
            before, state = scan(0, cut, state)
            outputs.append(before)
            middle = convolution_tail(old_tail, qkv[:, :cut], mask[:, :cut], tail.shape[-1])
            layer.window.restart(Checkpoint(middle.detach(), state.detach()))
        writes = KdaWrites(qkv, *inputs[1:], mask)
        layer.window.record(writes.between(cut, qkv.shape[1]))
        after, state = scan(cut, qkv.shape[1], state)
        return torch.cat([*outputs, after], dim=1), tail, state
