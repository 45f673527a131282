"""Causal depthwise convolution of a few taps, with the state that carries it across calls (spec section 4, "KDA").

So few taps are bound by memory: the operator works on blocks that stay in the cache through all taps and SiLU, and
its backward computes the sums before SiLU again instead of keeping them. Packed sequences go through as if they were
one; then the first W-1 tokens of each, the only ones that would look across a border, are done over from the states.

Shapes: B batch, T time, C channels, W taps, N sequences, m tokens of a block.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .blocks import block_elements, spans
from .precision import compute_dtype


def short_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str | None = "silu",
) -> tuple[Tensor, Tensor]:
    """y[t] = activation(sum over j of weight[W-1-j] * x[t-j]), each channel by itself.

    Args:
        x: `[B, T, C]`, any floating dtype; computed in float32 (float64 if any argument is).
        weight: `[C, W]` or `[C, 1, W]`, oldest tap first.
        state: `[B, C, W-1]` (`[N, C, W-1]` with `cu_seqlens`), the inputs before `x`, oldest first; None for zeros.
        lengths: `[B]`, real tokens per row where rows are right-padded: the new state ends at the last real token.
        cu_seqlens: `[N+1]`, rising from 0 to T, boundaries of packed sequences; B is 1 then, and each starts afresh.
        activation: "silu" or None.

    Returns:
        y `[B, T, C]` in `x`'s dtype and the new state, of `state`'s shape, in `x`'s dtype. Both are differentiable
        with respect to `x`, `weight` and `state`, once.

    Raises:
        ValueError: an unknown activation, shapes that do not fit each other, a packed batch of more than one row, or
            `lengths` with `cu_seqlens`.
    """
    taps = _taps(x, weight, activation)
    batch, _, channels = x.shape
    width = taps.shape[1] - 1
    if cu_seqlens is not None:
        if batch != 1 or lengths is not None:
            raise ValueError(f"cu_seqlens takes a batch of one without lengths, got a batch of {batch}")
        cu_seqlens = cu_seqlens.to(device=x.device, dtype=torch.int64)
        batch = cu_seqlens.shape[0] - 1
    if lengths is not None and lengths.shape != (batch,):
        raise ValueError(f"lengths has shape {tuple(lengths.shape)}, expected ({batch},)")
    if state is not None and state.shape != (batch, channels, width):
        raise ValueError(f"state has shape {tuple(state.shape)}, expected {(batch, channels, width)}")
    y = _conv(x, taps, state, cu_seqlens, activation == "silu")
    if state is None:
        state = x.new_zeros(batch, channels, width)
    return y, _new_state(x, state.to(x.dtype), lengths, cu_seqlens)


@torch.no_grad()
def short_conv_step(x: Tensor, weight: Tensor, state: Tensor, activation: str | None = "silu") -> Tensor:
    """One token per row. No backward; plain operations, so it can be traced.

    Args:
        x: `[B, C]`.
        weight: `[C, W]` or `[C, 1, W]`.
        state: `[B, C, W-1]`, moved on in place.
        activation: "silu" or None.

    Returns:
        y `[B, C]` in `x`'s dtype.

    Raises:
        ValueError: an unknown activation or shapes that do not fit each other.
    """
    taps = _taps(x, weight, activation)
    width = taps.shape[1] - 1
    if state.shape != (*x.shape, width):
        raise ValueError(f"state has shape {tuple(state.shape)}, expected {(*x.shape, width)}")
    dtype = compute_dtype(x, weight, state)
    taps, past = taps.to(dtype), state.to(dtype)
    y = x.to(dtype) * taps[:, width]
    for tap in range(width):
        y = torch.addcmul(y, past[..., tap], taps[:, tap])
    # Column by column: a state has its few columns innermost, where a whole-tensor operation runs at half the speed.
    for tap in range(width - 1):
        state[..., tap] = state[..., tap + 1]
    if width:
        state[..., width - 1] = x
    return (F.silu(y) if activation == "silu" else y).to(x.dtype)


def _taps(x: Tensor, weight: Tensor, activation: str | None) -> Tensor:
    """The weight as `[C, W]`, after the checks that do not need a state."""
    if activation not in ("silu", None):
        raise ValueError(f"activation is {activation!r}, expected 'silu' or None")
    taps = weight.flatten(1)
    if taps.dim() != 2 or taps.shape[0] != x.shape[-1] or weight.shape[1:-1].numel() != 1:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected [C, W] or [C, 1, W] with C={x.shape[-1]}")
    return taps


def _new_state(x: Tensor, state: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The last W-1 real inputs of each sequence, `[B or N, C, W-1]`; in a short one they begin in the old state."""
    width, time = state.shape[-1], x.shape[1]
    if cu_seqlens is not None:
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    if lengths is None:
        recent = x[:, max(time - width, 0) :].transpose(1, 2)
        return torch.cat([state[..., recent.shape[-1] :], recent], dim=-1)
    columns = torch.arange(width, device=x.device)
    places = lengths.to(x.device).unsqueeze(1) + columns  # in the old state followed by the tokens
    old = state.gather(2, places.clamp(max=width - 1).unsqueeze(1).expand_as(state))
    if time == 0:
        return old
    tokens = (places - width).clamp(min=0)
    if cu_seqlens is None:
        recent = x.gather(1, tokens.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    else:
        recent = x[0, (cu_seqlens[:-1].unsqueeze(1) + tokens).clamp(max=time - 1)]
    return torch.where((places < width).unsqueeze(1), old, recent.transpose(1, 2))


@torch.library.custom_op("kimi3_kernels::short_conv", mutates_args=())
def _conv(x: Tensor, taps: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, silu: bool) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    columns = taps.to(compute_dtype(x, taps, state)).t().contiguous()
    if cu_seqlens is None:
        _forward(x, columns, state, silu, y)
    elif y.numel():
        _forward(x, columns, None, silu, y)
        places, real = _heads(cu_seqlens, columns.shape[0] - 1, x.shape[1])
        first = x[0, places]
        heads = torch.empty_like(first)
        _forward(first, columns, state, silu, heads)
        y[0, places[real]] = heads[real]
    return y


@_conv.register_fake
def _(x, taps, state, cu_seqlens, silu):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("kimi3_kernels::short_conv_backward", mutates_args=())
def _conv_backward(
    x: Tensor, taps: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, silu: bool, d_y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the taps and of the state (empty without a state)."""
    d_x, d_taps, d_state = _gradients(x, taps, state)
    columns = taps.to(compute_dtype(x, taps, state)).t().contiguous()
    total = torch.zeros_like(columns)
    if cu_seqlens is None:
        _backward(x, columns, state, silu, d_y, None, d_x, total, d_state)
    elif x.numel():
        places, real = _heads(cu_seqlens, columns.shape[0] - 1, x.shape[1])
        others = torch.ones(x.shape[1], 1, dtype=columns.dtype, device=x.device)
        others[places[real]] = 0
        _backward(x, columns, None, silu, d_y, others, d_x, total, d_state[:0])
        first = x[0, places]
        d_first = torch.empty_like(first)
        _backward(first, columns, state, silu, d_y[0, places] * real.unsqueeze(-1), None, d_first, total, d_state)
        d_x[0, places[real]] += d_first[real]
    elif state is not None:
        d_state.zero_()
    d_taps.copy_(total.t())
    return d_x, d_taps, d_state


def _gradients(x: Tensor, taps: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    d_state = x.new_empty(0) if state is None else state.new_empty(state.shape)
    return torch.empty_like(x, memory_format=torch.contiguous_format), taps.new_empty(taps.shape), d_state


@_conv_backward.register_fake
def _(x, taps, state, cu_seqlens, silu, d_y):
    return _gradients(x, taps, state)


def _save_for_backward(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.silu = inputs[4]


def _differentiate(ctx, d_y: Tensor):
    x, taps, state, cu_seqlens = ctx.saved_tensors
    d_x, d_taps, d_state = _conv_backward(x, taps, state, cu_seqlens, ctx.silu, d_y)
    return d_x, d_taps, None if state is None else d_state, None, None


_conv.register_autograd(_differentiate, setup_context=_save_for_backward)


def _heads(cu_seqlens: Tensor, width: int, time: int) -> tuple[Tensor, Tensor]:
    """Places `[N, W-1]` of each sequence's first tokens, and which of them are the sequence's own."""
    steps = torch.arange(width, device=cu_seqlens.device)
    places = cu_seqlens[:-1].unsqueeze(1) + steps
    return places.clamp(max=time - 1), places < cu_seqlens[1:].unsqueeze(1)


def _blocks(x: Tensor) -> tuple[list[slice], list[slice]]:
    """Spans of rows and of time; several rows in one span where they are short."""
    batch, time, channels = x.shape
    elements = block_elements(x.device.type)
    rows = min(max(1, elements // max(1, time * channels)), max(1, batch))
    step = max(8, elements // max(1, rows * channels))
    return list(spans(batch, rows)), list(spans(time, step))


def _window(x: Tensor, span: slice, state: Tensor | None, columns: Tensor) -> Tensor:
    """Inputs of the span and the W-1 before it, `[B, W-1+m, C]` in the compute dtype."""
    width = columns.shape[0] - 1
    early = max(span.start - width, 0)
    tokens = x[:, early : span.stop].to(columns.dtype)
    lacking = width - (span.start - early)
    if lacking == 0:
        return tokens
    if state is None:
        return F.pad(tokens, (0, 0, lacking, 0))
    return torch.cat([state[..., width - lacking :].to(columns.dtype).transpose(1, 2), tokens], dim=1)


def _slide(inputs: Tensor, columns: Tensor, out: Tensor) -> Tensor:
    """out[i] = sum over j of columns[j] * inputs[i+j], for `inputs [B, W-1+m, C]` and `out [B, m, C]`."""
    time = out.shape[1]
    torch.mul(inputs[:, :time], columns[0], out=out)
    for tap in range(1, columns.shape[0]):
        out.addcmul_(inputs[:, tap : tap + time], columns[tap])
    return out


def _forward(x: Tensor, columns: Tensor, state: Tensor | None, silu: bool, y: Tensor) -> None:
    row_spans, time_spans = _blocks(x)
    for rows in row_spans:
        for span in time_spans:
            out = y[rows, span]
            room = out if out.dtype == columns.dtype else torch.empty_like(out, dtype=columns.dtype)
            _slide(_window(x[rows], span, None if state is None else state[rows], columns), columns, room)
            if silu:
                F.silu(room, inplace=True)
            if room is not out:
                out.copy_(room)


def _backward(
    x: Tensor,
    columns: Tensor,
    state: Tensor | None,
    silu: bool,
    d_y: Tensor,
    weights: Tensor | None,
    d_x: Tensor,
    d_columns: Tensor,
    d_state: Tensor,
) -> None:
    """From the last block to the first, since a token's gradient comes from itself and the W-1 after it.

    Args:
        weights: `[T, 1]` factors on the tokens' upstream gradients, or None.
        d_x: `[B, T, C]`, written.
        d_columns: `[W, C]`, added to.
        d_state: of `state`'s shape, written; empty without a state.
    """
    width = columns.shape[0] - 1
    flipped = columns.flip(0)
    row_spans, time_spans = _blocks(x)
    if state is not None:
        d_state.zero_()
    for rows in row_spans:
        later: Tensor | None = None
        for span in reversed(time_spans):
            window = _window(x[rows], span, None if state is None else state[rows], columns)
            upstream = d_y[rows, span].to(columns.dtype)
            shape = list(upstream.shape)
            time = shape[1]
            sums = window.new_zeros(shape[0], time + width, shape[2])
            inner = sums[:, :time]
            if silu:
                before = _slide(window, columns, torch.empty_like(upstream))
                torch.ops.aten.silu_backward.grad_input(upstream, before, grad_input=inner)
            else:
                inner.copy_(upstream)
            if weights is not None:
                inner.mul_(weights[span])
            if later is not None:
                sums[:, time:] = later
            for tap in range(width + 1):
                d_columns[tap] += (window[:, tap : tap + time] * inner).sum(dim=(0, 1))
            out = d_x[rows, span]
            if out.dtype == columns.dtype:
                _slide(sums, flipped, out)
            else:
                out.copy_(_slide(sums, flipped, torch.empty_like(out, dtype=columns.dtype)))
            later = sums[:, :width].clone()
        if state is not None and later is not None:
            before = _slide(F.pad(later, (0, 0, width, 0)), flipped, torch.empty_like(later))
            d_state[rows] = before.transpose(1, 2)
