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
    Workspace,
    check_inputs,
    segment_chunks,
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
    """o, final state, and (if `save`) the state before each segment, [segments, B * H, K, V]."""
    dtype = compute_dtype(q, k, v, g, beta, initial_state)
    batch, length, heads, width = k.shape
    depth, leaves = v.shape[3], CHUNK // leaf
    bounds = [0, length] if cu_seqlens is None else sequence_bounds(cu_seqlens, length)
    out, final, saved = _outputs(k, v, initial_state, cu_seqlens, dtype, save)
    if initial_state is None:
        final.zero_()
    else:
        final.copy_(initial_state)
    states = final.view(-1, batch * heads, width, depth)
    state = torch.empty_like(states[0])
    reads = state.new_empty(batch * heads, 2 * CHUNK, depth)
    writes = torch.empty_like(reads)
    key_reads, query_reads = reads.view(batch, heads, leaves, 2, leaf, depth).unbind(3)
    written, within = writes[:, :CHUNK], writes[:, CHUNK:].view(batch, heads, leaves, leaf, depth)
    wanted = torch.empty(key_reads.shape, dtype=dtype, device=k.device)

    space = Workspace(dtype, k.device)
    for index, part in enumerate(segments(bounds, segment_chunks(batch * heads), k.device)):
        q_part, k_part, v_part, g_part, beta_part = take_inputs(part, q, k, v, g, beta, space)
        intra = intra_chunk(q_part, k_part, g_part, leaf, space, keep=False)
        rows = intra.rows.unflatten(0, (part.chunks, -1))
        ends = intra.ends.unflatten(0, (part.chunks, -1)).transpose(2, 3)
        decay = intra.decay.unflatten(0, (part.chunks, -1))
        mix = _mix(intra.scores, by_head(beta_part, part.chunks), scale, space)
        values = by_leaf(v_part, part.chunks, leaf)
        room = part.room(out)
        outputs = by_leaf(room, part.chunks, leaf)
        for i in range(part.chunks):
            if part.opens[i] is not None:
                state.copy_(states[part.opens[i]])
            if i == 0 and save:
                saved[index].copy_(state)
            torch.bmm(rows[i], state, out=reads)
            torch.sub(values[i], key_reads, out=wanted)
            torch.bmm(mix[i], wanted.view(-1, CHUNK, depth), out=writes)
            torch.add(within, query_reads, alpha=scale, out=outputs[i])
            state.mul_(decay[i]).baddbmm_(ends[i], written)
            if part.closes[i] is not None:
                states[part.closes[i]].copy_(state)
        part.give(out, room)
    return out, final, saved


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
    count = segment_limit(length, packed, batch * heads) if save else 0
    return out, final, k.new_empty(count, batch * heads, width, v.shape[3], dtype=dtype)


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
