"""RMSNorm and the gated RMSNorm behind KDA (spec sections 3 and 4).

Shapes: D normed width, V value dim of a head.
"""

import torch

from .precision import compute_dtype


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight.

    Args:
        x: `[..., D]`, any floating dtype; statistics and products are float32 (float64 for float64 input).
        weight: `[D]`, or None for the bare norm.

    Returns:
        `[..., D]` in `x`'s dtype.
    """
    wide = x.to(compute_dtype(x, weight))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.to(wide.dtype)).to(x.dtype)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm(x) * weight * sigmoid(gate), all in float32.

    Args:
        x: `[..., V]`.
        gate: `[..., V]`, raw, before the sigmoid.
        weight: `[V]`.

    Returns:
        `[..., V]` in `gate`'s dtype.
    """
    wide = x.to(compute_dtype(x, gate, weight))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype) * gate.to(wide.dtype).sigmoid()).to(gate.dtype)
