"""RMSNorm and the gated RMSNorm behind KDA (spec sections 3 and 4).

On large eager tensors both are one operator that works on blocks in the cache and keeps its inputs and one number per
row for the backward. Small tensors, and compiled graphs (where the compiler fuses the plain form), go without it.

Shapes: D normed width, V value dim of a head, R rows (all leading dims flattened).
"""

import torch
from torch import Tensor

from .blocks import SMALL, block_elements, spans
from .precision import compute_dtype


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight.

    Args:
        x: `[..., D]`, any floating dtype; statistics and products are float32 (float64 if an argument is).
        weight: `[D]`, or None for the bare norm.
        eps: added to the mean square.

    Returns:
        `[..., D]` in `x`'s dtype.

    Raises:
        ValueError: a weight of another shape.
    """
    _check(x, weight)
    if x.numel() <= SMALL or torch.compiler.is_compiling():
        return rms_norm_ref(x, weight, eps)
    return _norm(x, None, weight, eps)[0]


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * weight * sigmoid(gate), all in float32 (float64 if an argument is).

    Args:
        x: `[..., V]`.
        gate: `[..., V]`, raw, before the sigmoid.
        weight: `[V]`.
        eps: added to the mean square.

    Returns:
        `[..., V]` in `gate`'s dtype.

    Raises:
        ValueError: a gate or a weight of another shape.
    """
    _check(x, weight)
    if gate.shape != x.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, expected {tuple(x.shape)} as x")
    if x.numel() <= SMALL or torch.compiler.is_compiling():
        return gated_rms_norm_ref(x, gate, weight, eps)
    return _norm(x, gate, weight, eps)[0]


def rms_norm_ref(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The definition of `rms_norm`."""
    wide = x.to(compute_dtype(x, weight))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.to(wide.dtype)).to(x.dtype)


def gated_rms_norm_ref(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition of `gated_rms_norm`."""
    wide = x.to(compute_dtype(x, gate, weight))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype) * gate.to(wide.dtype).sigmoid()).to(gate.dtype)


def _check(x: Tensor, weight: Tensor | None) -> None:
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected {tuple(x.shape[-1:])} for x's last dim")


@torch.library.custom_op("kimi3_kernels::rms_norm", mutates_args=())
def _norm(x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The normed and gated x, and 1/rms `[..., 1]` in the compute dtype."""
    y, scales = _results(x, gate, weight)
    width, dtype = x.shape[-1], scales.dtype
    rows, outs, row_scales = (t.reshape(-1, t.shape[-1]) for t in (x, y, scales))
    gates = None if gate is None else gate.reshape(-1, width)
    factor = None if weight is None else weight.to(dtype)
    for span in spans(rows.shape[0], block_elements(x.device.type) // width):
        block = rows[span].to(dtype)
        norms = torch.linalg.vector_norm(block, dim=-1, keepdim=True)
        scale = torch.rsqrt(norms.square() / width + eps)
        row_scales[span] = scale
        out = outs[span]
        room = out if out.dtype == dtype else torch.empty_like(block)
        torch.mul(block, scale, out=room)
        if factor is not None:
            room.mul_(factor)
        if gates is not None:
            room.mul_(gates[span].to(dtype).sigmoid())
        if room is not out:
            out.copy_(room)
    return y, scales


def _results(x: Tensor, gate: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=x.dtype if gate is None else gate.dtype)
    return y, x.new_empty((*x.shape[:-1], 1), dtype=compute_dtype(x, gate, weight))


@_norm.register_fake
def _(x, gate, weight, eps):
    return _results(x, gate, weight)


@torch.library.custom_op("kimi3_kernels::rms_norm_backward", mutates_args=())
def _norm_backward(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, scales: Tensor, d_y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gate and weight, empty for what is None.

    With n = x / rms and e the gradient of n: dx = (e - n mean(e n)) / rms.
    """
    d_x, d_gate, d_weight = _gradients(x, gate, weight)
    width, dtype = x.shape[-1], scales.dtype
    rows, ups, row_scales, d_rows, d_gates = (t.reshape(-1, t.shape[-1]) for t in (x, d_y, scales, d_x, d_gate))
    gates = None if gate is None else gate.reshape(-1, width)
    factor = None if weight is None else weight.to(dtype)
    total = torch.zeros(width, dtype=dtype, device=x.device)
    for span in spans(rows.shape[0], block_elements(x.device.type) // width):
        scale, grad = row_scales[span], ups[span].to(dtype)
        normed = rows[span].to(dtype) * scale
        if gates is not None:
            opening = gates[span].to(dtype).sigmoid()
            product = normed * grad if factor is None else (normed * grad).mul_(factor)
            d_gates[span] = product.mul_(opening).mul_(1 - opening)
            grad = grad * opening
        if factor is not None:
            total += (grad * normed).sum(dim=0)
            grad = grad * factor
        shared = (grad * normed).sum(dim=-1, keepdim=True) / -width
        d_rows[span] = torch.addcmul(grad, normed, shared).mul_(scale)
    if weight is not None:
        d_weight.copy_(total)
    return d_x, d_gate, d_weight


def _gradients(x: Tensor, gate: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    d_gate, d_weight = (x.new_empty(0, 1) if t is None else t.new_empty(t.shape) for t in (gate, weight))
    return x.new_empty(x.shape), d_gate, d_weight


@_norm_backward.register_fake
def _(x, gate, weight, scales, d_y):
    return _gradients(x, gate, weight)


def _save_for_backward(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_y: Tensor | None, _: None):
    if d_y is None:
        return None, None, None, None
    x, gate, weight, scales = ctx.saved_tensors
    d_x, d_gate, d_weight = _norm_backward(x, gate, weight, scales, d_y)
    return d_x, None if gate is None else d_gate, None if weight is None else d_weight, None


_norm.register_autograd(_differentiate, setup_context=_save_for_backward)
