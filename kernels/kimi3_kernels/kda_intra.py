"""Inside one chunk of KDA: decayed keys and queries, their scores, and the triangular solve. No [C, C, K] tensor.

With G the cumulative log decay of a chunk, the scores are sum over K of (k_i or q_i) exp(G_i - G_j) k_j for j <= i.
exp(G_i) and exp(-G_j) taken apart overflow, so the chunk is a binary tree. Its leaves of L tokens take exponents
relative to the leaf's middle, at most L/2 decays in either direction. Above the leaves every factor is <= 1: the
later half of a node, decayed from the node's middle, against the earlier half, decayed to it. How far one decay may
go decides L: with a promised bound of -5 the whole chunk is one leaf. With no bound L = 8, and log decays are clamped
where exp() is below the rounding of the dtype.

Shapes: B batch, H heads, K key dim, C chunk, L leaf, m = C/L leaves, n chunks of a segment, R = n * B * H.
"Rows" are the 2C rows of keys and queries of a chunk, ordered [leaf, key or query, token].

Sources: Kimi Linear (arXiv 2510.26692); the tree and the leaves are this project's own.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .kda_layout import CHUNK, Workspace

SMALLEST_LEAF = 8


def exponent_limit(dtype: torch.dtype) -> float:
    """Largest exponent a leaf may use: exp() of it, summed over a chunk of numbers up to 1, is still finite."""
    return math.log(torch.finfo(dtype).max) - math.log(CHUNK) - 1.0


def leaf_size(lower_bound: float | None) -> int:
    """Tokens per leaf for log decays promised to be >= lower_bound (None: no promise).

    The same for every dtype, so that float64 tests see the arithmetic that float32 runs.
    """
    if lower_bound is None:
        return SMALLEST_LEAF
    leaf = CHUNK
    while leaf > SMALLEST_LEAF and leaf // 2 * -lower_bound > exponent_limit(torch.float32):
        leaf //= 2
    return leaf


def by_head(x: Tensor, chunks: int) -> Tensor:
    """View of [B, n * C, H, ...] as [n, B, H, C, ...]."""
    return x.unflatten(1, (chunks, CHUNK)).transpose(2, 3).transpose(0, 1)


def by_leaf(x: Tensor, chunks: int, leaf: int) -> Tensor:
    """View of [B, n * C, H, W] as [n, B, H, m, L, W]."""
    return x.unflatten(1, (chunks, CHUNK // leaf, leaf)).permute(1, 0, 4, 2, 3, 5)


@dataclass
class Node:
    """Operands of one tree level of size h (two halves), kept for the backward. R' = R * C / (2h).

    Attributes:
        later: [R', 2h, K] rows of the later halves, decayed from the middle.
        earlier: [R', h, K] keys of the earlier halves, decayed to the middle.
        totals: [R', 2, 1, K] exp of the whole log decay of each half.
    """

    later: Tensor
    earlier: Tensor
    totals: Tensor


@dataclass
class Intra:
    """A segment's chunks, ready for the loop over states.

    Attributes:
        rows: [R, 2C, K], keys and queries decayed from the chunk's start.
        ends: [R, C, K], keys decayed to the chunk's end.
        decay: [R, K, 1], exp of the chunk's whole log decay.
        scores: [R, m, 2, L, C]; keys' part right below the diagonal only, queries' part zero above it.
        grown, shrunk: [R * m, L, K], exp of the exponents in a leaf and its reciprocal.
        start, end: [R * m, 1, K], exp of the log decay of a leaf's first half and of its second half.
        leaf_rows, leaf_keys: [R * m, 2L, K], [R * m, L, K], rows and keys relative to the leaf's middle.
        nodes: the levels above the leaves, smallest first; empty unless kept for the backward.
    """

    rows: Tensor
    ends: Tensor
    decay: Tensor
    scores: Tensor
    grown: Tensor
    shrunk: Tensor
    start: Tensor
    end: Tensor
    leaf_rows: Tensor
    leaf_keys: Tensor
    nodes: list[Node]


def _multiply_up_(factors: Tensor, reverse: bool) -> None:
    """Replaces factors [..., h, K] by their products from the first to each (reverse: from each to the last), h = 2^s.

    Products of exp(g), not exp of sums: the rounding of a sum of 80 alone would cost an error of 4e-6. In s steps.
    """
    size, step = factors.shape[-2], 1
    while step < size:
        first, second = factors.unflatten(-2, (size // (2 * step), 2, step)).unbind(-3)
        if reverse:
            first.mul_(second[..., :1, :])
        else:
            second.mul_(first[..., -1:, :])
        step *= 2


def _leaf_factors(g: Tensor, chunks: int, leaf: int, space: Workspace) -> tuple[Tensor, Tensor, Tensor]:
    """exp of the log decay from a leaf's middle to each token, its reciprocal, and exp of the first half's log decay.

    g [B, n * C, H, K] -> two [R * m, L, K] and one [R * m, 1, K].
    """
    g, half, width = by_leaf(g, chunks, leaf), leaf // 2, g.shape[-1]
    grown, shrunk = space("grown", *g.shape), space("shrunk", *g.shape)
    torch.exp(g[..., 1:half, :], out=shrunk[..., : half - 1, :])
    torch.exp(g[..., half:, :], out=grown[..., half:, :])
    first = g[..., :1, :].exp().reshape(-1, 1, width)
    grown, shrunk = grown.view(-1, leaf, width), shrunk.view(-1, leaf, width)
    shrunk[:, half - 1] = 1
    _multiply_up_(shrunk[:, :half], reverse=True)
    _multiply_up_(grown[:, half:], reverse=False)
    torch.reciprocal(shrunk[:, :half], out=grown[:, :half])
    torch.reciprocal(grown[:, half:], out=shrunk[:, half:])
    return grown, shrunk, first.mul_(shrunk[:, :1])


def node_scores(scores: Tensor, half: int) -> Tensor:
    """View of a level's part of [R, m, 2, L, C] scores as [R, h/L, 2, L, h, C/(2h)] (node last)."""
    total, leaves, _, leaf, _ = scores.shape
    nodes = CHUNK // (2 * half)
    tree = scores.view(total, nodes, 2, leaves // (2 * nodes), 2, leaf, nodes, 2, half)
    return tree[:, :, 1, :, :, :, :, 0].diagonal(dim1=1, dim2=5)


def leaf_scores(scores: Tensor) -> Tensor:
    """View of the leaves' part of [R, m, 2, L, C] scores as [R, 2, L, L, m]."""
    return scores.unflatten(4, (scores.shape[1], scores.shape[3])).diagonal(dim1=1, dim2=4)


def intra_chunk(q: Tensor, k: Tensor, g: Tensor, leaf: int, space: Workspace, keep: bool) -> Intra:
    """Decays and scores of a segment, q, k and g each [B, n * C, H, K]; `keep` holds on to what the backward needs.

    g may be changed. The result lives in `space`, until the next segment.
    """
    batch, slots, heads, width = k.shape
    chunks, leaves = slots // CHUNK, CHUNK // leaf
    total = chunks * batch * heads
    decay = g.unflatten(1, (chunks, CHUNK)).sum(2).exp_().transpose(0, 1).reshape(total, width, 1)
    if leaf == SMALLEST_LEAF:
        g = g.clamp_min_(-exponent_limit(space.dtype) / (leaf // 2))
    grown, shrunk, start = _leaf_factors(g, chunks, leaf, space)
    end = grown[:, -1:]
    shape = (chunks, batch, heads, leaves, leaf, width)
    rows, keys = space("rows", chunks, batch, heads, leaves, 2, leaf, width), space("keys", *shape)
    torch.mul(by_leaf(k, chunks, leaf), grown.view(shape), out=rows[..., 0, :, :])
    torch.mul(by_leaf(q, chunks, leaf), grown.view(shape), out=rows[..., 1, :, :])
    torch.mul(by_leaf(k, chunks, leaf), shrunk.view(shape), out=keys)
    rows, keys = rows.view(total * leaves, 2 * leaf, width), keys.view(total * leaves, leaf, width)

    block = torch.bmm(rows, keys.transpose(1, 2), out=space("block", total * leaves, 2 * leaf, leaf))
    block.view(-1, 2, leaf, leaf)[:, 1].tril_()  # above the diagonal may be inf: written over, not multiplied by a mask
    scores = block = block.view(total, leaves, 2, leaf, leaf)
    if leaves > 1:
        scores = space("scores", total, leaves, 2, leaf, CHUNK).zero_()
        leaf_scores(scores).copy_(block.permute(0, 2, 3, 4, 1))

    leaf_rows, leaf_keys = rows, keys
    if keep:
        rows = torch.mul(rows, start, out=space("decayed rows", *rows.shape))
        keys = torch.mul(keys, end, out=space("decayed keys", *keys.shape))
    else:
        rows, keys = rows.mul_(start), keys.mul_(end)
    totals, nodes = start * end, []
    half = leaf
    while half < CHUNK:
        totals = totals.view(-1, 2, 1, width)
        later = rows.view(-1, 2, 2 * half, width)[:, 1]
        earlier = keys.view(-1, 2, half, width)[:, 0]
        block = torch.bmm(later, earlier.transpose(1, 2), out=space("block", later.shape[0], 2 * half, half))
        node_scores(scores, half).copy_(block.view(total, -1, half // leaf, 2, leaf, half).permute(0, 2, 3, 4, 5, 1))
        if keep:
            later_kept, earlier_kept = space(f"later {half}", *later.shape), space(f"earlier {half}", *earlier.shape)
            nodes.append(Node(later_kept.copy_(later), earlier_kept.copy_(earlier), totals))
        later.mul_(totals[:, 0])
        earlier.mul_(totals[:, 1])
        totals = totals[:, 0] * totals[:, 1]
        half *= 2
    return Intra(
        rows.view(total, 2 * CHUNK, width),
        keys.view(total, CHUNK, width),
        decay,
        scores,
        grown,
        shrunk,
        start,
        end,
        leaf_rows,
        leaf_keys,
        nodes,
    )


def solve(scores: Tensor, beta: Tensor, space: Workspace) -> Tensor:
    """(I + A)^-1 with A = strictly lower part of beta_i * (key scores), [R, m, 2, L, C] and [R, C] -> [R, C, C].

    By substitution. The inverse by repeated squaring loses everything when keys repeat and beta is near one.
    """
    shape = (beta.shape[0], scores.shape[1], scores.shape[3], CHUNK)
    system = torch.mul(scores[:, :, 0], beta.view(*shape[:3], 1), out=space("system", *shape)).view(-1, CHUNK, CHUNK)
    identity = torch.eye(CHUNK, dtype=system.dtype, device=system.device).expand_as(system)
    # A row-major `out` spares several copies.
    solved = space("solved", *system.shape)
    return torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True, out=solved)
