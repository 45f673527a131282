"""Causal depthwise convolution of a few taps, with the state that carries it across calls (spec section 4, "KDA").

Shapes: B batch, T time, C channels, W taps, N sequences.
"""

import torch
from torch.nn import functional as F

from .precision import compute_dtype


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    lengths: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    activation: str | None = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """y[t] = activation(sum over j of weight[W-1-j] * x[t-j]), each channel by itself.

    Args:
        x: `[B, T, C]`, any floating dtype; computed in float32 (float64 for float64 input).
        weight: `[C, W]` or `[C, 1, W]`, oldest tap first.
        state: `[B, C, W-1]` (`[N, C, W-1]` with `cu_seqlens`), the inputs before `x`, oldest first; None for zeros.
        lengths: `[B]`, real tokens per row where rows are right-padded: the new state ends at the last real token.
        cu_seqlens: `[N+1]`, boundaries of packed sequences; B is 1 then, and each sequence starts afresh.
        activation: "silu" or None.

    Returns:
        y `[B, T, C]` in `x`'s dtype and the new state, of `state`'s shape, in `x`'s dtype.

    Raises:
        ValueError: an unknown activation, a packed batch of more than one row, `lengths` with `cu_seqlens`.
    """
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}.")
    if cu_seqlens is not None:
        if x.shape[0] != 1 or lengths is not None:
            raise ValueError(f"cu_seqlens takes a batch of one without lengths, got a batch of {x.shape[0]}.")
        return _packed(x, weight, state, cu_seqlens, activation)
    taps = weight.reshape(weight.shape[0], -1)
    width = taps.shape[-1] - 1
    if state is None:
        state = x.new_zeros(x.shape[0], x.shape[2], width)
    inputs = torch.cat([state.to(x.dtype).transpose(1, 2), x], dim=1)
    y = _convolve(inputs, taps, x.shape[1])
    return _activate(y, activation).to(x.dtype), _tail(inputs, lengths, width)


def short_conv_step(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, activation: str | None = "silu"
) -> torch.Tensor:
    """One token per row. No backward.

    Args:
        x: `[B, C]`.
        weight: `[C, W]` or `[C, 1, W]`.
        state: `[B, C, W-1]`, moved on in place.

    Returns:
        y `[B, C]` in `x`'s dtype.
    """
    taps = weight.reshape(weight.shape[0], -1)
    dtype = compute_dtype(x, weight)
    window = torch.cat([state, x.to(state.dtype).unsqueeze(-1)], dim=-1)
    y = (window.to(dtype) * taps.to(dtype)).sum(dim=-1)
    state.copy_(window[..., 1:])
    return _activate(y, activation).to(x.dtype)


def _activate(y: torch.Tensor, activation: str | None) -> torch.Tensor:
    return F.silu(y) if activation == "silu" else y


def _convolve(inputs: torch.Tensor, taps: torch.Tensor, time: int) -> torch.Tensor:
    """Shifted multiply-adds over `inputs [B, W-1+T, C]`: a depthwise kernel of few taps is bound by memory anyway."""
    dtype = compute_dtype(inputs, taps)
    inputs, taps = inputs.to(dtype), taps.to(dtype)
    y = inputs[:, :time] * taps[:, 0]
    for tap in range(1, taps.shape[-1]):
        y = torch.addcmul(y, inputs[:, tap : tap + time], taps[:, tap])
    return y


def _tail(inputs: torch.Tensor, lengths: torch.Tensor | None, width: int) -> torch.Tensor:
    """The last W-1 real inputs of `[B, W-1+T, C]`, as `[B, C, W-1]`."""
    if lengths is None:
        return inputs[:, inputs.shape[1] - width :].transpose(1, 2).contiguous()
    places = lengths[:, None] + torch.arange(width, device=inputs.device)
    return inputs.gather(1, places[..., None].expand(-1, -1, inputs.shape[2])).transpose(1, 2).contiguous()


def _packed(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor | None, cu_seqlens: torch.Tensor, activation: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """All sequences of one row at once: a token looks back at its own sequence, or into that sequence's state."""
    taps = weight.reshape(weight.shape[0], -1)
    width = taps.shape[-1] - 1
    dtype = compute_dtype(x, weight)
    row, bounds = x[0], cu_seqlens.to(device=x.device, dtype=torch.int64)
    count = bounds.numel() - 1
    if state is None:
        state = x.new_zeros(count, x.shape[2], width)
    # One line of inputs in which sequence n, at bounds[n] + n * width, is preceded by its own state.
    index = torch.arange(row.shape[0], device=x.device)
    sequence = torch.searchsorted(bounds, index, right=True) - 1
    places = index + (sequence + 1) * width
    heads = (bounds[:-1] + torch.arange(count, device=x.device) * width)[:, None] + torch.arange(width, device=x.device)
    inputs = x.new_zeros(row.shape[0] + count * width, x.shape[2])
    inputs = inputs.index_copy(0, heads.flatten(), state.to(x.dtype).transpose(1, 2).flatten(0, 1))
    inputs = inputs.index_copy(0, places, row)
    y = _convolve(inputs[None], taps.to(dtype), inputs.shape[0] - width)[0, places - width]
    ends = heads + (bounds[1:] - bounds[:-1])[:, None]
    return _activate(y, activation)[None].to(x.dtype), inputs[ends].transpose(1, 2).contiguous()
