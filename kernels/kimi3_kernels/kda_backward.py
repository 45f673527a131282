"""Backward of chunked KDA, written out: linear in T, and one segment's temporaries beyond the gradients.

The forward leaves the state before each segment. Per segment, from the last to the first: the chunks are replayed
from that state; a loop from the last chunk back carries the state's gradient; everything else is batched products.
The gradient of a log decay is never formed per pair: a key or query that enters with exp(G_i) adds (itself times its
gradient) to dG_i, one that enters with exp(-G_j) subtracts it, and g_t collects dG over the rest of its chunk.

Shapes: B batch, T time, H heads, K key dim, V value dim, N sequences, C chunk, L leaf, m = C/L, n chunks of a segment,
R = n * B * H. Rows are ordered [leaf, key or query, token], as in `kda_intra`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .kda_intra import Intra, by_head, by_leaf, intra_chunk, leaf_scores, node_scores, solve
from .kda_layout import (
    CHUNK,
    Segment,
    Workspace,
    head_blocks,
    segments,
    sequence_bounds,
    take_inputs,
)
from .precision import compute_dtype


@torch.library.custom_op("kimi3_kernels::kda_chunk_backward", mutates_args=())
def kda_chunk_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Tensor,
    d_out: Tensor | None,
    d_final: Tensor | None,
    scale: float,
    leaf: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta and the initial state (empty if there was none), each in its input's dtype.

    Args:
        saved: [segments, B, H, K, V], the state before each segment, from the forward.
        d_out: [B, T, H, V] or None for zeros.
        d_final: [N, H, K, V] or None for zeros.
    """
    dtype = compute_dtype(q, k, v, g, beta, initial_state)
    batch, length, heads, _ = k.shape
    bounds = [0, length] if cu_seqlens is None else sequence_bounds(cu_seqlens, length)
    plan = list(segments(bounds, k.device))
    inputs = [q, k, v, g, beta]
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
    by_sequence = (len(bounds) - 1, batch, *saved.shape[2:])
    initial = saved.new_zeros(()).expand(by_sequence) if initial_state is None else initial_state.view(by_sequence)
    d_initial = saved.new_zeros(by_sequence)
    if d_final is not None:
        d_initial.copy_(d_final.view(by_sequence))
    space = Workspace(dtype, k.device)
    state_bytes = d_initial[0, 0, 0].nbytes
    with torch.autocast(k.device.type, enabled=False):
        for row, head in head_blocks(batch, heads, state_bytes, k.device):
            _backward_block(
                plan,
                [x[row, :, head] for x in inputs],
                initial[:, row, head],
                saved[:, row, head],
                None if d_out is None else d_out[row, :, head],
                d_initial[:, row, head],
                [x[row, :, head] for x in grads],
                scale,
                leaf,
                space,
            )
    if initial_state is None:
        d_initial = d_initial.new_empty(0)
    else:
        d_initial = d_initial.view(initial_state.shape).to(initial_state.dtype)
    return grads[0], grads[1], grads[2], grads[3], grads[4], d_initial


def _backward_block(
    plan: list[Segment],
    inputs: list[Tensor],
    initial: Tensor,
    saved: Tensor,
    d_out: Tensor | None,
    d_states: Tensor,
    grads: list[Tensor],
    scale: float,
    leaf: int,
    space: Workspace,
) -> None:
    """The backward of some rows and heads; shapes as in the operator, with B and H of the block.

    Args:
        inputs, grads: q, k, v, g, beta, and their gradients, which are written.
        initial: [N or 1, B, H, K, V].
        d_states: [N or 1, B, H, K, V], gradients of the final states, overwritten by those of the initial ones.
    """
    batch, _, heads, depth = inputs[2].shape
    d_state = space("d state", *d_states.shape[1:])
    for index, part in reversed(list(enumerate(plan))):
        taken = take_inputs(part, inputs, space)
        replay = _replay(part, taken, saved[index], initial, leaf, space)
        d_rows = space("d rows", part.chunks, batch, heads, CHUNK // leaf, 2, leaf, depth)
        if d_out is None:
            d_rows.zero_()
        else:
            d_out_part = part.take(d_out, space("d out", batch, part.chunks * CHUNK, heads, depth))
            torch.mul(by_leaf(d_out_part, part.chunks, leaf), scale, out=d_rows[..., 1, :, :])
        loop = _loop_backward(part, replay, d_rows, d_states, d_state, space)
        _input_gradients(part, taken, replay, d_rows, loop, grads, space)


@kda_chunk_backward.register_fake
def _(q, k, v, g, beta, initial_state, cu_seqlens, saved, d_out, d_final, scale, leaf):
    grads = tuple(x.new_empty(x.shape) for x in (q, k, v, g, beta))
    return *grads, (saved.new_empty(0) if initial_state is None else initial_state.new_empty(initial_state.shape))


@dataclass
class _Replay:
    """A segment's forward, with the names of `kda_forward.py`.

    Attributes:
        intra: decays and scores.
        beta: [n, B, H, C].
        inverse: [n, B * H, C, C], X = (I + A)^-1.
        before: [n, B * H, K, V], state before each chunk.
        wanted: [n, B * H, C, V], v - kg S.
        written: [n, B * H, C, V], x = X beta (v - kg S).
    """

    intra: Intra
    beta: Tensor
    inverse: Tensor
    before: Tensor
    wanted: Tensor
    written: Tensor


def _replay(
    part: Segment, inputs: list[Tensor], state: Tensor, initial: Tensor, leaf: int, space: Workspace
) -> _Replay:
    q, k, v, g, beta = inputs
    chunks, depth = part.chunks, v.shape[3]
    intra = intra_chunk(q, k, g, leaf, space, keep=True)
    total, width = intra.decay.shape[:2]
    per_chunk = (chunks, total // chunks)
    beta = by_head(beta, chunks).contiguous()
    inverse = solve(intra.scores, beta.view(total, CHUNK), space)
    weighted = torch.mul(inverse, beta.view(total, 1, CHUNK), out=space("weighted", *inverse.shape))
    keys = space("start keys", total, CHUNK // leaf, leaf, width)
    keys.copy_(intra.rows.view(total, -1, 2, leaf, width)[:, :, 0])
    keys, weighted = keys.view(*per_chunk, CHUNK, width), weighted.view(*per_chunk, CHUNK, CHUNK)
    ends = intra.ends.view(*per_chunk, CHUNK, width).transpose(2, 3)
    decay = intra.decay.view(*per_chunk, width, 1)
    before = space("before", *per_chunk, width, depth)
    wanted, written = space("wanted", *per_chunk, CHUNK, depth), space("written", *per_chunk, CHUNK, depth)
    wanted.view(by_head(v, chunks).shape).copy_(by_head(v, chunks))
    before[0].view(state.shape).copy_(state)
    for i in range(chunks):
        wanted[i].baddbmm_(keys[i], before[i], alpha=-1)
        torch.bmm(weighted[i], wanted[i], out=written[i])
        if i + 1 == chunks:
            break
        if part.opens[i + 1] is None:
            torch.mul(before[i], decay[i], out=before[i + 1]).baddbmm_(ends[i], written[i])
        else:
            before[i + 1].view(state.shape).copy_(initial[part.opens[i + 1]])
    return _Replay(intra, beta, inverse.view(*per_chunk, CHUNK, CHUNK), before, wanted, written)


@dataclass
class _Loop:
    """What the loop over chunks gives.

    Attributes:
        d_solved: [n, B * H, C, V], gradient of the solve's right side beta (v - kg S).
        d_start: [n, B * H, 2C, K], gradient of the rows decayed from the chunk's start.
        d_end: [n, B * H, C, K], gradient of the keys decayed to the chunk's end.
        d_total: [n, B * H, K], sum over V of the state before a chunk times the gradient of the state after it.
    """

    d_solved: Tensor
    d_start: Tensor
    d_end: Tensor
    d_total: Tensor


def _loop_backward(
    part: Segment, replay: _Replay, d_rows: Tensor, d_states: Tensor, d_state: Tensor, space: Workspace
) -> _Loop:
    """Carries the state's gradient `d_state` [B, H, K, V] from a segment's end to its start, in place.

    Fills the keys' part of d_rows [n, B, H, m, 2, L, V] (the gradient of what rows read from the state; the queries'
    part is given) and, where sequences open, d_states. Overwrites `replay.before`.
    """
    intra, before, written = replay.intra, replay.before, replay.written
    chunks, total, width, depth = before.shape
    leaf = d_rows.shape[-2]
    queries = intra.scores[:, :, 1].reshape(-1, CHUNK, CHUNK).transpose(1, 2)
    d_written = space("d written", *written.shape)
    torch.bmm(queries, d_rows[..., 1, :, :].reshape(-1, CHUNK, depth), out=d_written.view(-1, CHUNK, depth))
    d_solved, d_end = space("d solved", *written.shape), space("d end", chunks, total, CHUNK, width)
    d_start, d_total = space("d start", chunks, total, 2 * CHUNK, width), space("d total", chunks, total, width)
    loop = _Loop(d_solved, d_start, d_end, d_total)
    minus_beta = -replay.beta.view(*d_rows.shape[:4], leaf, 1)
    ends = intra.ends.view(chunks, total, CHUNK, width)
    decay = intra.decay.view(chunks, total, width, 1)
    rows = intra.rows.view(chunks, total, 2 * CHUNK, width).transpose(2, 3)
    transposed = replay.inverse.transpose(2, 3)
    d_flat = d_state.view(total, width, depth)
    for i in reversed(range(chunks)):
        if part.closes[i] is not None:
            d_state.copy_(d_states[part.closes[i]])
        torch.bmm(written[i], d_flat.transpose(1, 2), out=d_end[i])
        d_written[i].baddbmm_(ends[i], d_flat)
        torch.bmm(transposed[i], d_written[i], out=d_solved[i])
        torch.mul(d_solved[i].view(*d_rows.shape[1:4], leaf, depth), minus_beta[i], out=d_rows[i][..., 0, :, :])
        d_rows_flat = d_rows[i].view(total, 2 * CHUNK, depth)
        torch.bmm(d_rows_flat, before[i].transpose(1, 2), out=d_start[i])
        torch.sum(before[i].mul_(d_flat), -1, out=d_total[i])
        d_flat.mul_(decay[i]).baddbmm_(rows[i], d_rows_flat)
        if part.opens[i] is not None:
            d_states[part.opens[i]].copy_(d_state)
    return loop


def _input_gradients(
    part: Segment,
    inputs: list[Tensor],
    replay: _Replay,
    d_rows: Tensor,
    loop: _Loop,
    grads: list[Tensor],
    space: Workspace,
) -> None:
    """Writes a segment's gradients of q, k, v, g and beta into `grads`."""
    intra = replay.intra
    chunks, batch, heads, leaves, _, leaf, depth = d_rows.shape
    total, width = intra.decay.shape[:2]
    rooms = [part.room(x) for x in grads]
    dq, dk, dv, dg = (by_leaf(x, chunks, leaf) for x in rooms[:4])
    q, k = (by_leaf(x, chunks, leaf) for x in inputs[:2])
    torch.mul(d_rows[..., 0, :, :], -1, out=dv)

    written, wanted = replay.written.view(total, CHUNK, depth), replay.wanted.view(total, CHUNK, depth)
    lower = space("lower", total, leaves, leaf, CHUNK).copy_(intra.scores[:, :, 0]).view(total, CHUNK, CHUNK).tril_(-1)
    unweighted = wanted.baddbmm_(lower, written, alpha=-1)  # x / beta, also where beta is zero
    d_beta = loop.d_solved.view(total, CHUNK, depth).mul_(unweighted).sum(-1)
    by_head(rooms[4], chunks).copy_(d_beta.view(chunks, batch, heads, CHUNK))

    d_scores = space("d scores", total, 2 * CHUNK, CHUNK)
    torch.bmm(d_rows.view(total, 2 * CHUNK, depth), written.transpose(1, 2), out=d_scores)
    d_scores = d_scores.view(total, leaves, 2, leaf, CHUNK)
    later, earlier, to_end = _key_gradients(intra, d_scores, loop.d_start.view(total, 2 * CHUNK, width), space)

    shape = (chunks, batch, heads, leaves, leaf, width)
    later_k, later_q = later.view(*shape[:4], 2, leaf, width).unbind(4)
    earlier, to_end, d_end = earlier.view(shape), to_end.view(shape), loop.d_end.view(shape)
    diagonal = leaf_scores(d_scores)[:, 1].diagonal(dim1=1, dim2=2).reshape(*shape[:-1], 1)
    # [dG inside the chunk; what keys decayed to the chunk's end owe each later g]. Kept apart, and without the
    # diagonal scores, because large parts would cancel in the sum over the rest of the chunk.
    d_sums = space("d sums", chunks, batch, heads, 2, leaves, leaf, width)
    torch.sub(later_k, earlier, out=d_sums[:, :, :, 0]).mul_(k).addcmul_(q, later_q)
    torch.mul(intra.ends.view(shape), d_end, out=d_sums[:, :, :, 1])
    ones = d_sums.new_ones(CHUNK, CHUNK)
    collect = torch.cat([ones.triu(), ones.tril(-1)], dim=1).expand(total, -1, -1)
    d_log = torch.bmm(collect, d_sums.view(total, 2 * CHUNK, width), out=space("d log", total, CHUNK, width))
    d_total = loop.d_total.view(total, width).mul_(intra.decay.squeeze(-1))
    torch.add(d_log.view(shape), d_total.view(*shape[:3], 1, 1, width), out=dg)
    torch.addcmul(later_q, diagonal, k, out=dq)
    torch.addcmul(later_k.add_(earlier).addcmul_(d_end, to_end), diagonal, q, out=dk)
    for grad, room in zip(grads, rooms):
        part.give(grad, room)


def _key_gradients(intra: Intra, d_scores: Tensor, d_start: Tensor, space: Workspace) -> tuple[Tensor, Tensor, Tensor]:
    """From scores to keys and queries, down the tree; diagonal scores are left out.

    Args:
        d_scores: [R, m, 2, L, C].
        d_start: [R, 2C, K], gradient of the rows decayed from the chunk's start; overwritten.

    Returns:
        later [R * m, 2L, K]: gradient of keys and queries as rows; earlier [R * m, L, K]: of keys as columns;
        to_end [R * m, L, K]: exp of the log decay from each token to the chunk's end.
    """
    total, leaves, _, leaf, _ = d_scores.shape
    width = d_start.shape[-1]
    later, earlier = d_start, space("d earlier", total, CHUNK, width)
    if intra.nodes:
        earlier.zero_()
    half = CHUNK // 2
    for node in reversed(intra.nodes):
        upper, lower = later.view(-1, 2, 2 * half, width)[:, 1], earlier.view(-1, 2, half, width)[:, 0]
        upper.mul_(node.totals[:, 0])
        lower.mul_(node.totals[:, 1])
        count = upper.shape[0]
        block = space("d block", total, count // total, half // leaf, 2, leaf, half)
        block = block.copy_(node_scores(d_scores, half).permute(0, 5, 1, 2, 3, 4)).view(count, 2 * half, half)
        upper.add_(torch.bmm(block, node.earlier, out=space("product", *node.later.shape)))
        lower.add_(torch.bmm(block.transpose(1, 2), node.later, out=space("product", *node.earlier.shape)))
        half //= 2

    block = space("d block", total, leaves, 2, leaf, leaf).copy_(leaf_scores(d_scores).permute(0, 4, 1, 2, 3))
    block.view(-1, leaf, leaf).tril_(-1)
    block = block.view(-1, 2 * leaf, leaf)
    # exp() up to 1e36 on one side and down to 1e-37 on the other leave no room for the size of the gradient.
    size = block.abs().amax((1, 2), keepdim=True).clamp_min_(torch.finfo(block.dtype).tiny)
    block.div_(size)
    rows = torch.bmm(block, intra.leaf_keys, out=space("product", *intra.leaf_rows.shape))
    rows.view(-1, 2, leaf, width).mul_(intra.grown.unsqueeze(1))
    keys = torch.bmm(block.transpose(1, 2), intra.leaf_rows, out=space("key product", *intra.leaf_keys.shape))
    keys.mul_(intra.shrunk)
    from_start = torch.mul(intra.grown, intra.start, out=space("from start", *intra.grown.shape))
    to_end = torch.mul(intra.shrunk, intra.end, out=space("to end", *intra.shrunk.shape))
    later, earlier = later.view(-1, 2 * leaf, width), earlier.view(-1, leaf, width)
    later.view(-1, 2, leaf, width).mul_(from_start.unsqueeze(1))
    later.addcmul_(rows, size)
    if intra.nodes:
        earlier.mul_(to_end).addcmul_(keys, size)
    else:
        torch.mul(keys, size, out=earlier)
    half = leaf
    for node in intra.nodes:
        to_end.view(-1, 2, half, width)[:, 0].mul_(node.totals[:, 1])
        half *= 2
    return later, earlier, to_end
