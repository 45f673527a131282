"""SiTU-GLU, the activation between the up and down projections of K3's MLPs (spec section 4).

On large eager tensors it is an operator that works on blocks in the cache and keeps gate and up alone for the
backward. Small tensors, and compiled graphs (where the compiler fuses the plain form), go without it.

Shapes: I inner width, R rows (all leading dims flattened).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .blocks import SMALL, block_elements, spans
from .precision import compute_dtype

# exp of it is finite in float32, and beside it 2 is nothing even in float64: tanh is 1.
SATURATED = 40.0


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """beta * tanh(gate/beta) * sigmoid(gate) * linear_beta * tanh(up/linear_beta).

    Args:
        gate: `[..., I]`, any floating dtype; computed in float32 (float64 for float64 input).
        up: `[..., I]`.
        beta: bound of the gate.
        linear_beta: bound of `up`; None lets it enter as it is.

    Returns:
        `[..., I]` in `gate`'s dtype.

    Raises:
        ValueError: gate and up of different shapes.
    """
    if gate.shape != up.shape:
        raise ValueError(f"up has shape {tuple(up.shape)}, expected {tuple(gate.shape)} as gate")
    if gate.numel() <= SMALL or torch.compiler.is_compiling():
        return situ_ref(gate, up, beta, linear_beta)
    return _situ(gate, up, beta, linear_beta)


def situ_ref(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """The definition of `situ`."""
    dtype = compute_dtype(gate, up)
    gate_wide, up_wide = gate.to(dtype), up.to(dtype)
    bounded = beta * torch.tanh(gate_wide / beta) * torch.sigmoid(gate_wide)
    if linear_beta is not None:
        up_wide = linear_beta * torch.tanh(up_wide / linear_beta)
    return (bounded * up_wide).to(gate.dtype)


def _blocks(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Blocks of rows of tensors of one shape, as views."""
    width = tensors[0].shape[-1]
    rows = [tensor.reshape(-1, width) for tensor in tensors]
    for span in spans(rows[0].shape[0], block_elements(rows[0].device.type) // width):
        yield [tensor[span] for tensor in rows]


def _tanh(x: Tensor, bound: float) -> Tensor:
    """tanh(x / bound). Torch's own takes two thirds of SiTU's time; expm1 is as exact and more than twice as fast."""
    power = torch.mul(x, 2 / bound).clamp_(max=SATURATED).expm1_()
    return power.div_(power + 2)


@torch.library.custom_op("kimi3_kernels::situ", mutates_args=())
def _situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    dtype = compute_dtype(gate, up)
    y = gate.new_empty(gate.shape)
    for gates, ups, out in _blocks(gate, up, y):
        wide = gates.to(dtype)
        room = _tanh(wide, beta).mul_(wide.sigmoid()).mul_(beta)
        if linear_beta is None:
            room.mul_(ups)
        else:
            room.mul_(_tanh(ups.to(dtype), linear_beta)).mul_(linear_beta)
        out.copy_(room)
    return y


@_situ.register_fake
def _(gate, up, beta, linear_beta):
    return gate.new_empty(gate.shape)


@torch.library.custom_op("kimi3_kernels::situ_backward", mutates_args=())
def _situ_backward(
    gate: Tensor, up: Tensor, d_y: Tensor, beta: float, linear_beta: float | None
) -> tuple[Tensor, Tensor]:
    """With t = tanh(gate/beta), s = sigmoid(gate), u = tanh(up/linear_beta): the gate's factor beta t s has the slope
    s ((1 - t^2) + beta t (1 - s)), up's factor linear_beta u has the slope 1 - u^2."""
    dtype = compute_dtype(gate, up)
    d_gate, d_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    for gates, ups, grads, d_gates, d_ups in _blocks(gate, up, d_y, d_gate, d_up):
        wide, grad = gates.to(dtype), grads.to(dtype)
        tanh, sigmoid = _tanh(wide, beta), wide.sigmoid()
        grad = grad * sigmoid
        slope = (1 - sigmoid).mul_(tanh).mul_(beta).add_(1).addcmul_(tanh, tanh, value=-1)
        if linear_beta is None:
            factor, d_factor = ups.to(dtype), grad * tanh
        else:
            bounded = _tanh(ups.to(dtype), linear_beta)
            d_factor = (1 - bounded.square()).mul_(grad).mul_(tanh)
            factor = bounded.mul_(linear_beta)
        d_ups.copy_(d_factor.mul_(beta))
        d_gates.copy_(slope.mul_(factor).mul_(grad))
    return d_gate, d_up


@_situ_backward.register_fake
def _(gate, up, d_y, beta, linear_beta):
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save_for_backward(ctx, inputs, output) -> None:
    gate, up, ctx.beta, ctx.linear_beta = inputs
    ctx.save_for_backward(gate, up)


def _differentiate(ctx, d_y: Tensor):
    gate, up = ctx.saved_tensors
    d_gate, d_up = _situ_backward(gate, up, d_y, ctx.beta, ctx.linear_beta)
    return d_gate, d_up, None, None


_situ.register_autograd(_differentiate, setup_context=_save_for_backward)
