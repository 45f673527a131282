"""Chunked KDA: matrix products inside chunks, one pass over the chunks for the state, constant extra memory.

Per chunk, with S the state before it, kg and qg the keys and queries decayed from the chunk's start, ke the keys
decayed to its end, A and Q the scores (`kda_intra`): x = (I + A)^-1 beta (v - kg S) are the values that are really
written, o = scale (qg S + Q x), and S becomes exp(G_end) S + ke^T x.

Registered as a custom operator, so that torch.compile takes it as it is; its backward is in `kda_backward.py`.

Shapes: B batch, T time, H heads, K key dim, V value dim, N sequences, C chunk, L leaf, m = C/L, n chunks of a segment.
"""

import torch
from torch import Tensor

from .kda_backward import kda_chunk_backward
from .kda_intra import by_head, by_leaf, intra_chunk, leaf_size, solve
from .kda_layout import (
    CHUNK,
    Segment,
    Workspace,
    check_inputs,
    head_blocks,
    segment_limit,
    segments,
    sequence_bounds,
    take_inputs,
)
from .precision import compute_dtype


def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    scale: float | None = None,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """KDA over whole sequences, with the results and gradients of `kda_recurrent`.

    Tokens with beta = 0 and g = 0 leave the state exactly as it is: that is how padding is expressed.

    Args:
        q, k: [B, T, H, K], already normalised (entries beyond about 1 shrink the range of float32 inside a chunk).
        v: [B, T, H, V].
        g: [B, T, H, K], log decay, <= 0.
        beta: [B, T, H].
        initial_state: [N, H, K, V] or None for zeros.
        scale: factor on the output, K**-0.5 by default.
        lower_bound: a promise that every g >= lower_bound, which makes the computation faster from about -10 up, and
            again from about -5 up. It is not checked: a broken promise can overflow. None: any g, also -50000.
        cu_seqlens: [N + 1] integer borders of packed sequences (B must be 1); the state restarts at each.

    Returns:
        o [B, T, H, V] in v's dtype, final state [N, H, K, V] in the compute dtype (float64 if any input is float64,
        else float32). Both are differentiable with respect to every float input, once.

    Raises:
        ValueError: shapes that do not fit each other, borders that do not rise from 0 to T, or a positive bound.
    """
    check_inputs(q, k, v, g, beta, initial_state, cu_seqlens)
    if lower_bound is not None and lower_bound > 0:
        raise ValueError(f"lower_bound is {lower_bound}, expected a negative number or None")
    inputs = (q, k, v, g, beta, initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    out, final_state, _ = _kda_chunk(*inputs, cu_seqlens, scale, leaf_size(lower_bound), save)
    return out, final_state


@torch.library.custom_op("kimi3_kernels::kda_chunk", mutates_args=())
def _kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    leaf: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """o, final state, and (if `save`) the state before each segment, [segments, B, H, K, V]."""
    dtype = compute_dtype(q, k, v, g, beta, initial_state)
    batch, length, heads, _ = k.shape
    plan = list(segments([0, length] if cu_seqlens is None else sequence_bounds(cu_seqlens, length), k.device))
    out, final, saved = _outputs(k, v, initial_state, cu_seqlens, dtype, save)
    if initial_state is None:
        final.zero_()
    else:
        final.copy_(initial_state)
    space = Workspace(dtype, k.device)
    states = final.unflatten(0, (-1, batch))
    with torch.autocast(k.device.type, enabled=False):
        for row, head in head_blocks(batch, heads, final[0, 0].nbytes, k.device):
            inputs = [x[row, :, head] for x in (q, k, v, g, beta)]
            outputs = (out[row, :, head], states[:, row, head], saved[:, row, head])
            _forward_block(plan, inputs, *outputs, scale, leaf, space)
    return out, final, saved


def _forward_block(
    plan: list[Segment],
    inputs: list[Tensor],
    out: Tensor,
    states: Tensor,
    saved: Tensor,
    scale: float,
    leaf: int,
    space: Workspace,
) -> None:
    """The forward of some rows and heads.

    Args:
        inputs: q, k, v, g, beta.
        out: [B, T, H, V], written.
        states: [N or 1, B, H, K, V], initial states, overwritten by the final ones.
        saved: [segments or 0, B, H, K, V], written unless it is empty.
    """
    batch, _, heads, depth = out.shape
    width, total = states.shape[3], batch * heads
    state = space("state", total, width, depth)
    reads, writes = space("reads", total, 2 * CHUNK, depth), space("writes", total, 2 * CHUNK, depth)
    per_token = (batch, heads, CHUNK // leaf, leaf, depth)
    key_reads, query_reads = reads.view(*per_token[:3], 2, leaf, depth).unbind(3)
    wanted = space("wanted", *per_token)
    written, within = writes[:, :CHUNK], writes[:, CHUNK:].view(per_token)
    for index, part in enumerate(plan):
        q, k, v, g, beta = take_inputs(part, inputs, space)
        intra = intra_chunk(q, k, g, leaf, space, keep=False)
        rows = intra.rows.unflatten(0, (part.chunks, total))
        ends = intra.ends.unflatten(0, (part.chunks, total)).transpose(2, 3)
        decay = intra.decay.unflatten(0, (part.chunks, total))
        mix = _mix(intra.scores, by_head(beta, part.chunks), scale, space)
        values = by_leaf(v, part.chunks, leaf)
        room = part.room(out)
        outputs = by_leaf(room, part.chunks, leaf)
        for i in range(part.chunks):
            if part.opens[i] is not None:
                state.view(states.shape[1:]).copy_(states[part.opens[i]])
            if i == 0 and len(saved):
                saved[index].copy_(state.view(states.shape[1:]))
            torch.bmm(rows[i], state, out=reads)
            torch.sub(values[i], key_reads, out=wanted)
            torch.bmm(mix[i], wanted.view(total, CHUNK, depth), out=writes)
            torch.add(within, query_reads, alpha=scale, out=outputs[i])
            state.mul_(decay[i]).baddbmm_(ends[i], written)
            if part.closes[i] is not None:
                states[part.closes[i]].copy_(state.view(states.shape[1:]))
        part.give(out, room)


def _mix(scores: Tensor, beta: Tensor, scale: float, space: Workspace) -> Tensor:
    """[X beta; scale Q X beta] with X = (I + A)^-1: wanted values -> written values and output, [n, B * H, 2C, C]."""
    chunks = beta.shape[0]
    beta = beta.reshape(-1, CHUNK)
    written = torch.mul(
        solve(scores, beta, space), beta.unsqueeze(1), out=space("written", beta.shape[0], CHUNK, CHUNK)
    )
    queries = scores[:, :, 1].reshape(-1, CHUNK, CHUNK)
    within = torch.bmm(queries, written, out=space("within", *written.shape))
    mix = space("mix", beta.shape[0], 2 * CHUNK, CHUNK)
    mix[:, :CHUNK] = written
    torch.mul(within, scale, out=mix[:, CHUNK:])
    return mix.unflatten(0, (chunks, -1))


def _outputs(
    k: Tensor, v: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, dtype: torch.dtype, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, heads, width = k.shape
    packed = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    sequences = batch if cu_seqlens is None else packed
    out = v.new_empty(v.shape)
    final = k.new_empty(sequences, heads, width, v.shape[3], dtype=dtype)
    count = segment_limit(length, packed) if save else 0
    return out, final, k.new_empty(count, batch, heads, width, v.shape[3], dtype=dtype)


@_kda_chunk.register_fake
def _(q, k, v, g, beta, initial_state, cu_seqlens, scale, leaf, save):
    dtype = compute_dtype(q, k, v, g, beta, initial_state)
    return _outputs(k, v, initial_state, cu_seqlens, dtype, save)


def _save_for_backward(ctx, inputs, output) -> None:
    *tensors, scale, leaf, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.scale, ctx.leaf = scale, leaf
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out: Tensor | None, d_final: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    none = (None,) * 4
    if d_out is None and d_final is None:
        return (None,) * 6 + none
    grads = kda_chunk_backward(*ctx.saved_tensors, d_out, d_final, ctx.scale, ctx.leaf)
    return tuple(x if needed else None for x, needed in zip(grads, ctx.needs_input_grad)) + none


_kda_chunk.register_autograd(_backward, setup_context=_save_for_backward)
