"""Kimi Delta Attention: a constant-size recurrent state with a forget gate per channel (spec section 4, "KDA").

Shapes: B batch, T time, D hidden size, H heads, K key dim, V value dim (equal to K), W convolution taps.
"""

import torch
from torch import nn
from transformers.cache_utils import Cache, LinearAttentionLayer
from transformers.utils.generic import is_tracing

from kimi3_kernels import gated_rms_norm, kda_chunk, kda_gate, kda_step, l2norm, short_conv, short_conv_step

from .cache import KimiDeltaLayer
from .configuration_kimi3 import KimiK3Config
from .precision import KeepPrecision, upcast, wide_dtype
from .rollback import Checkpoint, KdaWrites, convolution_tail
from .sequence_layout import PackedLayout, PaddedLayout, SequenceLayout

# Without gradients, longer inputs go through in pieces: what a layer holds at once then does not grow with the input.
_SEGMENT = 1024

# Projected queries, keys and values `[B, T, H*K]`, before their convolutions.
Projections = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class KimiK3ShortConvolution(KeepPrecision):
    """The taps of one causal depthwise convolution, `weight [H*K, 1, W]`, float32 whatever the model's dtype.

    Calling it gives them: an offloaded module has its weight only while it is called.
    """

    def __init__(self, channels: int, kernel_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size, dtype=wide_dtype()))

    def forward(self) -> torch.Tensor:
        return self.weight


class KimiK3GatedRMSNorm(KeepPrecision):
    """RMSNorm over V, times sigmoid(gate), all in float32; the weight `[V]` stays float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=wide_dtype()))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """`hidden_states` and raw `gate` of one shape `[..., V]`; the result has `gate`'s dtype."""
        return gated_rms_norm(hidden_states, gate, self.weight, self.eps)


class KimiDeltaAttention(KeepPrecision):
    """One KDA mixer.

    Both decay gates (bounded where `gate_lower_bound` is set, softplus otherwise) and both output gates (full rank
    or low rank) are chosen by the config. The decay parameters stay float32.
    """

    _kept_tensors = ("A_log", "dt_bias")

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
        self.dt_bias = nn.Parameter(torch.empty(inner, dtype=wide_dtype()))
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=wide_dtype()))
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
        if isinstance(layout, PackedLayout):
            if cache is not None:
                raise ValueError(
                    "cache must be None for packed sequences: it holds one state per row, and a packed row has several "
                    "sequences. Pass use_cache=False, or one sequence per row."
                )
            return layout.scatter(self._mix(layout.gather(hidden_states), layout, None))

        layer = None if cache is None else cache.layers[self.layer_idx]
        time = hidden_states.shape[1]
        if time <= _SEGMENT or torch.is_grad_enabled() or is_tracing(hidden_states):
            return self._mix(hidden_states, layout, layer)
        if layer is None:
            layer = KimiDeltaLayer()
        output = torch.empty_like(hidden_states)
        for start in range(0, time, _SEGMENT):
            part = slice(start, start + _SEGMENT)
            part_layout = None if layout is None else PaddedLayout.from_mask(layout.mask[:, part])
            output[:, part] = self._mix(hidden_states[:, part], part_layout, layer)
        return output

    def _mix(self, x: torch.Tensor, layout: SequenceLayout | None, layer: LinearAttentionLayer | None) -> torch.Tensor:
        """The mixer on `x [B, T, D]`, moving `layer` on where there is one."""
        qkv = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        g = kda_gate(self._heads(self.f_b_proj(self.f_a_proj(x))), self.A_log, self.dt_bias, self.lower_bound)
        beta = upcast(self.b_proj(x)).sigmoid()
        if isinstance(layout, PaddedLayout):
            g, beta = layout.silence(g), layout.silence(beta)
        if layer is None:
            o, _, _ = self._scan(qkv, g, beta, layout)
        else:
            o = self._advance(qkv, g, beta, layout, layer)
        return self.o_proj(self.o_norm(o, self._heads(self.output_gate(x))).flatten(-2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim))

    def _taps(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q_conv1d(), self.k_conv1d(), self.v_conv1d()

    def _advance(
        self,
        qkv: Projections,
        g: torch.Tensor,
        beta: torch.Tensor,
        layout: SequenceLayout | None,
        layer: LinearAttentionLayer,
    ) -> torch.Tensor:
        """Outputs `[B, T, H, V]`; moves the layer's tail and state on by these tokens."""
        tail, state = layer.conv_states[0], layer.recurrent_states[0]
        if not layer.has_previous_state[0]:
            tail, state = None, None
        # The in-place step has no backward, and nothing to update before the first token.
        if beta.shape[1] == 1 and layout is None and state is not None and not torch.is_grad_enabled():
            return self._step(qkv, g, beta, tail, state, layer)
        o, tail, state = self._scan(qkv, g, beta, layout, tail, state, layer)
        layer.update_conv_state(tail, conv_kernel_size=tail.shape[-1])
        layer.update_recurrent_state(state)
        return o

    def _step(
        self,
        qkv: Projections,
        g: torch.Tensor,
        beta: torch.Tensor,
        tail: torch.Tensor,
        state: torch.Tensor,
        layer: LinearAttentionLayer,
    ) -> torch.Tensor:
        """One token per row, tail and state updated where they lie. Returns `[B, 1, H, V]`."""
        recording = isinstance(layer, KimiDeltaLayer) and layer.begin(1, tail.shape[-1]) is not None
        joined = torch.cat(qkv, dim=-1)
        mixed = short_conv_step(joined.squeeze(1), torch.cat(self._taps()), tail)
        q, k, v = (self._heads(part) for part in mixed.chunk(3, dim=-1))
        q, k = l2norm(q), l2norm(k)
        if recording:
            mask = torch.ones(beta.shape[:2], dtype=torch.bool, device=beta.device)
            layer.window.record(KdaWrites(joined, k.unsqueeze(1), v.unsqueeze(1), g, beta, mask))
        return kda_step(q, k, v, g.squeeze(1), beta.squeeze(1), state).unsqueeze(1)

    def _scan(
        self,
        qkv: Projections,
        g: torch.Tensor,
        beta: torch.Tensor,
        layout: SequenceLayout | None,
        tail: torch.Tensor | None = None,
        state: torch.Tensor | None = None,
        layer: LinearAttentionLayer | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Many tokens: outputs `[B, T, H, V]`, the convolutions' new tail `[B, 3*H*K, W-1]`, the new state."""
        time, width = beta.shape[1], self.config.conv_kernel_size - 1
        cut = layer.begin(time, width) if isinstance(layer, KimiDeltaLayer) else None
        old_tail = tail
        q, k, v, tail = self._convolve(qkv, layout, old_tail)
        cu_seqlens = layout.cu_seqlens if isinstance(layout, PackedLayout) else None
        inputs = (q, k, v, g, beta)
        if cut is None:
            o, state = kda_chunk(*inputs, state, lower_bound=self.lower_bound, cu_seqlens=cu_seqlens)
            return o, tail, state

        mask = layout.mask if layout is not None else torch.ones(beta.shape[:2], dtype=torch.bool, device=beta.device)
        outputs = []
        if cut:
            o, state = kda_chunk(*(x[:, :cut] for x in inputs), state, lower_bound=self.lower_bound)
            outputs.append(o)
            # Of the tokens before the window only the last few reach its convolutions, unless some are padding.
            first = 0 if layout is not None else max(0, cut - width)
            middle = torch.cat([x[:, first:cut] for x in qkv], dim=-1)
            middle = convolution_tail(old_tail, middle, mask[:, first:cut], width)
            layer.window.restart(Checkpoint(middle.detach(), state.detach()))
        joined = torch.cat([x[:, cut:] for x in qkv], dim=-1)
        layer.window.record(KdaWrites(joined, *(x[:, cut:] for x in (k, v, g, beta, mask))))
        o, state = kda_chunk(*(x[:, cut:] for x in inputs), state, lower_bound=self.lower_bound)
        return torch.cat([*outputs, o], dim=1), tail, state

    def _convolve(
        self, qkv: Projections, layout: SequenceLayout | None, tail: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalised q and k (float32) and v, each `[B, T, H, K]`, and the new tail `[B, 3*H*K, W-1]`."""
        mixed, tails = [], []
        old_tails = (None,) * 3 if tail is None else tail.chunk(3, dim=1)
        for x, taps, old in zip(qkv, self._taps(), old_tails):
            if isinstance(layout, PaddedLayout):
                y, new = short_conv(layout.compact(x), taps, old, lengths=layout.lengths)
                y = layout.spread(y)
            else:
                y, new = short_conv(x, taps, old, cu_seqlens=getattr(layout, "cu_seqlens", None))
            mixed.append(self._heads(y))
            tails.append(new)
        return l2norm(mixed[0]), l2norm(mixed[1]), mixed[2], torch.cat(tails, dim=1)
