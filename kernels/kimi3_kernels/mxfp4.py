"""MXFP4 as the released files store experts (spec section 6).

Two E2M1 values a byte, the even column in the low nibble, and one E8M0 scale byte per 32 columns.
Shapes: O output rows, I input columns.
"""

import torch

GROUP = 32
# Magnitudes by the low three bits of a code; bit 3 is the sign.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_BIAS = 127
NAN_SCALE = 255


def mxfp4_decode(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`packed [..., O, I/2]` uint8 and `scale [..., O, I/32]` uint8 to values `[..., O, I]` in `dtype`."""
    return mxfp4_decode_ref(packed, scale).to(dtype)


def mxfp4_decode_ref(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The definition, in float64: value of the nibble times 2^(scale - 127); a scale byte of 255 is NaN."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64, device=packed.device)
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).long()
    factor = torch.ldexp(torch.ones_like(scale, dtype=torch.float64), scale.long() - SCALE_BIAS)
    factor = factor.masked_fill(scale == NAN_SCALE, float("nan"))
    return table[codes] * factor.repeat_interleave(GROUP, dim=-1)
