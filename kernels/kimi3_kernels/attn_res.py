"""Attention-residual mix: a softmax over depth sources, for each token by itself (spec section 3).

The forward reads the sources in blocks of rows that stay in the cache between the pass that scores and the pass that
mixes. It never stacks or casts whole sources: its extra memory is a few blocks. The backward is hand-written and keeps
the sources by reference. Both are custom operators, so that torch.compile takes them as they are.

Shapes: D hidden size, S sources, R rows (all leading dims flattened), b rows of a block.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .blocks import block_elements, spans
from .precision import compute_dtype, no_autocast

# A matrix-vector product adds up its columns in turn: over 7168 of them that alone is 1e-6 of the score.
SCORE_COLUMNS = 2**11
# Up to this many elements of one source (nine rows of 7168) the stacked form is as fast or faster.
FEW_ELEMENTS = 2**16


def inv_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dim. A finished block's never changes, so it can be kept.

    Args:
        x: `[..., D]`, any floating dtype.

    Returns:
        `[...]` in float32 (float64 for float64 input).
    """
    norm = torch.linalg.vector_norm(x, dim=-1, dtype=compute_dtype(x))
    return torch.rsqrt(norm.square() / x.shape[-1] + eps)


def attn_res_mix_ref(sources: Sequence[Tensor], weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """The definition: stack, norm, score, softmax, weighted sum. Arguments and results as `attn_res_mix`."""
    stacked = torch.stack([source.to(compute_dtype(*sources, weight)) for source in sources], dim=-2)
    normed = stacked * torch.rsqrt(stacked.square().mean(dim=-1, keepdim=True) + eps)
    probs = (normed * weight.to(stacked.dtype)).sum(dim=-1).softmax(dim=-1)
    return (probs.unsqueeze(-1) * stacked).sum(dim=-2).to(sources[0].dtype), probs


def attn_res_mix(
    sources: Sequence[Tensor],
    weight: Tensor,
    eps: float = 1e-5,
    *,
    inv_rms: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Mix of the sources by a softmax over the scores sum(rmsnorm(source) * weight).

    Everything is computed in float32 (float64 if a source or the weight is), also under autocast.

    Args:
        sources: S >= 1 tensors `[..., D]` of one shape and dtype.
        weight: `[D]`, the norm's weight times the pseudo-query.
        inv_rms: per source its `inv_rms(source, eps)` `[...]` where known, else None. It is taken as a known value,
            not as an input: gradients are those of the definition, with or without it.

    Returns:
        The mix `[..., D]` in the sources' dtype, the weights `[..., S]` in the compute dtype. Both are differentiable
        with respect to sources and weight, once.

    Raises:
        ValueError: no sources, sources of several shapes or dtypes, or a weight or `inv_rms` that does not fit them.
    """
    _check(sources, weight, inv_rms)
    save = torch.is_grad_enabled() and any(x.requires_grad for x in (*sources, weight))
    if not save and sources[0].numel() <= FEW_ELEMENTS:
        return _mix_few(sources, weight, eps)
    unknown = weight.new_empty(0)
    known = [unknown if values is None else values.detach() for values in inv_rms or [None] * len(sources)]
    mixed, probs, _, _ = _mix(list(sources), weight, known, eps)
    return mixed, probs


def _check(sources: Sequence[Tensor], weight: Tensor, inv_rms: Sequence[Tensor | None] | None) -> None:
    if not sources:
        raise ValueError("sources is empty, expected at least one tensor")
    shape, dtype = sources[0].shape, sources[0].dtype
    for index, source in enumerate(sources):
        if source.shape != shape or source.dtype != dtype:
            raise ValueError(
                f"sources[{index}] is {tuple(source.shape)} {source.dtype}, "
                f"expected {tuple(shape)} {dtype} as sources[0]"
            )
    if weight.shape != shape[-1:]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected {tuple(shape[-1:])}")
    if inv_rms is None:
        return
    if len(inv_rms) != len(sources):
        raise ValueError(f"inv_rms has {len(inv_rms)} entries, expected one for each of {len(sources)} sources")
    for index, known in enumerate(inv_rms):
        if known is not None and known.shape != shape[:-1]:
            raise ValueError(f"inv_rms[{index}] has shape {tuple(known.shape)}, expected {tuple(shape[:-1])}")


def _mix_few(sources: Sequence[Tensor], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The definition in the fewest operations, for decoding: no gradients."""
    dtype = compute_dtype(sources[0], weight)
    with no_autocast(weight.device.type):
        stacked = torch.stack(list(sources), dim=-2).to(dtype)
        probs = (torch.matmul(stacked, weight.to(dtype)) * inv_rms(stacked, eps)).softmax(dim=-1)
        mixed = torch.matmul(probs.unsqueeze(-2), stacked).squeeze(-2)
    return mixed.to(sources[0].dtype), probs


def _scores(block: Tensor, query: Tensor) -> Tensor:
    first, *others = zip(block.split(SCORE_COLUMNS, dim=-1), query.split(SCORE_COLUMNS))
    scores = first[0].mv(first[1])
    for columns, part in others:
        scores.addmv_(columns, part)
    return scores


def _row_blocks(rows: Tensor) -> Iterator[slice]:
    count, width = rows.shape
    return spans(count, block_elements(rows.device.type) // max(1, width))


class _Upcast:
    """Blocks of rows in the compute dtype: views where they have it already, else copies into kept buffers."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.buffers: dict[int, Tensor] = {}

    def __call__(self, name: int, block: Tensor) -> Tensor:
        return block if block.dtype == self.dtype else self.room(name, block).copy_(block)

    def room(self, name: int, like: Tensor) -> Tensor:
        if name not in self.buffers:
            self.buffers[name] = like.new_empty(like.shape, dtype=self.dtype)
        return self.buffers[name][: like.shape[0]]


@torch.library.custom_op("kimi3_kernels::attn_res_mix", mutates_args=())
def _mix(
    sources: Sequence[Tensor], weight: Tensor, known: Sequence[Tensor], eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mix `[..., D]`; then, all `[..., S]` in the compute dtype: weights, scores and 1/rms.

    `known` has an empty tensor for each 1/rms that is not known: autograd for operators takes lists of tensors, but
    not lists with a None among them.
    """
    with no_autocast(weight.device.type):
        mixed, probs, scores, scales = _results(sources, weight)
        width, dtype = weight.shape[0], probs.dtype
        rows = [source.reshape(-1, width) for source in sources]
        out, flat_probs, flat_scores, flat_scales = (t.view(-1, t.shape[-1]) for t in (mixed, probs, scores, scales))
        query = weight.to(dtype)
        for index, values in enumerate(known):
            if values.numel():
                flat_scales[:, index] = values.reshape(-1)
        upcast = _Upcast(dtype)
        for span in _row_blocks(out):
            blocks = [upcast(index, source[span]) for index, source in enumerate(rows)]
            for index, block in enumerate(blocks):
                if not known[index].numel():
                    flat_scales[span, index] = inv_rms(block, eps)
            part = torch.stack([_scores(block, query) for block in blocks], dim=-1).mul_(flat_scales[span])
            flat_scores[span] = part
            shares = part.softmax(dim=-1)
            flat_probs[span] = shares
            total = out[span] if out.dtype == dtype else upcast.room(-1, out[span])
            torch.mul(blocks[0], shares[:, :1], out=total)
            for index in range(1, len(blocks)):
                total.addcmul_(blocks[index], shares[:, index : index + 1])
            if out.dtype != dtype:
                out[span] = total
        return mixed, probs, scores, scales


def _results(sources: Sequence[Tensor], weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    first, dtype = sources[0], compute_dtype(sources[0], weight)
    small = [first.new_empty(*first.shape[:-1], len(sources), dtype=dtype) for _ in range(3)]
    return first.new_empty(first.shape), small[0], small[1], small[2]


@_mix.register_fake
def _(sources, weight, known, eps):
    return _results(sources, weight)


@torch.library.custom_op("kimi3_kernels::attn_res_mix_backward", mutates_args=())
def _mix_backward(
    sources: Sequence[Tensor],
    weight: Tensor,
    probs: Tensor,
    scores: Tensor,
    scales: Tensor,
    d_mixed: Tensor | None,
    d_probs: Tensor | None,
    needed: Sequence[bool],
    weight_needed: bool,
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the sources and of the weight; empty ones where they are not needed.

    With score = r (x . w), r the 1/rms, and e its gradient: dx = p d_mixed + e r w - e score r^2 / D x.
    """
    with no_autocast(weight.device.type):
        grads, d_weight = _gradients(sources, weight, needed, weight_needed)
        width, count, dtype = weight.shape[0], len(sources), probs.dtype
        rows = [source.reshape(-1, width) for source in sources]
        outs = [grad.view(-1, width) if need else grad for grad, need in zip(grads, needed)]
        query, total = weight.to(dtype), torch.zeros(width, dtype=dtype, device=weight.device)
        probs, scores, scales = (t.reshape(-1, count) for t in (probs, scores, scales))
        upstream = None if d_mixed is None else d_mixed.reshape(-1, width)
        d_shares = None if d_probs is None else d_probs.reshape(-1, count)
        upcast = _Upcast(dtype)
        for span in _row_blocks(rows[0]):
            blocks = [upcast(index, source[span]) for index, source in enumerate(rows)]
            shares, room = probs[span], upcast.room(-1, rows[0][span])
            gain = torch.zeros_like(shares) if d_shares is None else d_shares[span]
            if upstream is not None:
                above = upcast(-2, upstream[span])
                dots = [torch.mul(block, above, out=room).sum(dim=-1) for block in blocks]
                gain = gain + torch.stack(dots, dim=-1)
            d_scores = shares * (gain - (shares * gain).sum(dim=-1, keepdim=True))
            to_query = d_scores * scales[span]
            to_self = to_query * scales[span] * scores[span] / -width
            for index, block in enumerate(blocks):
                pick = slice(index, index + 1)
                if weight_needed:
                    total.addmv_(block.t(), to_query[:, index])
                if not needed[index]:
                    continue
                out = outs[index][span]
                grad = out if out.dtype == dtype else room
                torch.mul(block, to_self[:, pick], out=grad)
                grad.addcmul_(query, to_query[:, pick])
                if upstream is not None:
                    grad.addcmul_(above, shares[:, pick])
                if out.dtype != dtype:
                    out.copy_(grad)
        if weight_needed:
            d_weight.copy_(total)
        return grads, d_weight


def _gradients(
    sources: Sequence[Tensor], weight: Tensor, needed: Sequence[bool], weight_needed: bool
) -> tuple[list[Tensor], Tensor]:
    grads = [source.new_empty(source.shape if need else 0) for source, need in zip(sources, needed)]
    return grads, weight.new_empty(weight.shape if weight_needed else 0)


@_mix_backward.register_fake
def _(sources, weight, probs, scores, scales, d_mixed, d_probs, needed, weight_needed):
    return _gradients(sources, weight, needed, weight_needed)


def _save_for_backward(ctx, inputs, output) -> None:
    sources, weight, known, _ = inputs
    ctx.save_for_backward(*sources, weight, *output[1:])
    ctx.known = len(known)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _backward(ctx, d_mixed: Tensor | None, d_probs: Tensor | None, *_: None):
    *sources, weight, probs, scores, scales = ctx.saved_tensors
    needed, weight_needed = list(ctx.needs_input_grad[0]), ctx.needs_input_grad[1]
    if d_mixed is None and d_probs is None:
        return [None] * len(sources), None, [None] * ctx.known, None
    grads, d_weight = _mix_backward(sources, weight, probs, scores, scales, d_mixed, d_probs, needed, weight_needed)
    d_sources = [grad if need else None for grad, need in zip(grads, needed)]
    return d_sources, d_weight if weight_needed else None, [None] * ctx.known, None


_mix.register_autograd(_backward, setup_context=_save_for_backward)
