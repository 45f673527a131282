"""SiTU-GLU, the activation between the up and down projections of K3's MLPs (spec section 4).

Shapes: I inner width.
"""

import torch

from .precision import compute_dtype


def situ(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float | None) -> torch.Tensor:
    """beta * tanh(gate/beta) * sigmoid(gate) * linear_beta * tanh(up/linear_beta).

    Args:
        gate: `[..., I]`, any floating dtype; computed in float32 (float64 for float64 input).
        up: `[..., I]`.
        linear_beta: None lets `up` enter as it is.

    Returns:
        `[..., I]` in `gate`'s dtype.
    """
    dtype = compute_dtype(gate, up)
    gate_wide, up_wide = gate.to(dtype), up.to(dtype)
    bounded = beta * torch.tanh(gate_wide / beta) * torch.sigmoid(gate_wide)
    if linear_beta is not None:
        up_wide = linear_beta * torch.tanh(up_wide / linear_beta)
    return (bounded * up_wide).to(gate.dtype)
