"""MXFP4 as the released files store experts (spec section 6; OCP Microscaling Formats 1.0).

Two E2M1 values a byte, the even column in the low nibble, and one E8M0 scale byte per 32 columns.
Shapes: O output rows, I input columns, R rows (all leading dims flattened).
"""

import functools
import itertools

import torch
from torch import Tensor

from .blocks import block_elements, spans
from .precision import compute_dtype

GROUP = 32
# Magnitudes by the low three bits of a code; bit 3 is the sign.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_BIAS = 127
NAN_SCALE = 255
# Scale bytes 0 to 254 are the exponents -127 to 127.
LOWEST = -SCALE_BIAS
# Exponent of the largest magnitude, 6 = 1.5 * 2^2.
LARGEST_EXPONENT = 2


def mxfp4_decode(packed: Tensor, scale: Tensor, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Values of packed weights.

    Exact in bfloat16, float32 and float64 wherever the value is in their range (6 * 2^127 is infinite in the first
    two); float16 has fewer exponents, and gets the exact value rounded once. No gradients: bytes have none.

    Args:
        packed: `[..., O, I/2]` uint8, any leading dims.
        scale: `[..., O, I/32]` uint8 (or float8_e8m0fnu). 0 stands for 2^-127, and 255 makes its 32 values NaN.
        dtype: float16, bfloat16, float32 or float64.
        out: contiguous `[..., O, I]` in `dtype` to write into. A buffer that is used again is worth having: most of
            the time into a new one goes to the system handing out its memory.

    Returns:
        `[..., O, I]` in `dtype`: `out` where it was given.

    Raises:
        TypeError: `packed` or `scale` are not bytes, or `dtype` is none of the four.
        ValueError: shapes that do not fit each other, or an `out` of another shape or dtype, or not contiguous.
    """
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    for name, tensor in (("packed", packed), ("scale", scale)):
        if tensor.dtype != torch.uint8:
            raise TypeError(f"{name} is {tensor.dtype}, expected torch.uint8")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"dtype is {dtype}, expected float16, bfloat16, float32 or float64")
    columns = 2 * packed.shape[-1]
    if packed.shape[:-1] != scale.shape[:-1] or columns != GROUP * scale.shape[-1]:
        raise ValueError(
            f"scale has shape {tuple(scale.shape)}, expected one byte for each {GROUP // 2} of packed "
            f"{tuple(packed.shape)}"
        )
    shape = (*packed.shape[:-1], columns)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=packed.device)
    elif out.shape != shape or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} with strides {out.stride()}, expected contiguous {shape} {dtype}"
        )
    _decode(packed, scale, out)
    return out


def mxfp4_decode_ref(packed: Tensor, scale: Tensor) -> Tensor:
    """The definition, in float64: value of the nibble times 2^(scale - 127); a scale byte of 255 is NaN."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64, device=packed.device)
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).long()
    factor = torch.ldexp(torch.ones_like(scale, dtype=torch.float64), scale.long() - SCALE_BIAS)
    factor = factor.masked_fill(scale == NAN_SCALE, float("nan"))
    return table[codes] * factor.repeat_interleave(GROUP, dim=-1)


def mxfp4_encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packs weights, each value to the nearest that its group's scale allows, ties to the even code.

    The scale is the format's own rule: 2^(floor(log2(largest magnitude of the group)) - 2), so that the largest lies
    in [4, 8) scaled; what lies above 6 becomes 6. The byte stays within 0 to 254. A group of zeros gets byte 0, and
    one with a NaN or an infinity becomes NaN as a whole (byte 255). Signs are kept, also of zeros.

    Values that came from MXFP4 come back exactly, though not always as the same bytes: a group whose largest code is
    below 4 gets a smaller scale and larger codes.

    Args:
        weight: `[..., O, I]`, any floating dtype, I a multiple of 32.

    Returns:
        packed `[..., O, I/2]` and scale `[..., O, I/32]`, both uint8. No gradients.

    Raises:
        TypeError: `weight` is not floating.
        ValueError: I is not a multiple of 32.
    """
    if not weight.is_floating_point():
        raise TypeError(f"weight is {weight.dtype}, expected a floating dtype")
    if weight.dim() == 0 or weight.shape[-1] % GROUP:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected a multiple of {GROUP} columns")
    packed, scale = _encode(weight.detach())
    return packed, scale


@functools.cache
def _tables(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both values of each byte, as one element of twice the size; the value of each scale byte."""
    byte = torch.arange(256, device=device)
    values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=dtype, device=device)
    pairs = torch.stack([values[byte & 0xF], values[byte >> 4]], dim=-1)
    scales = torch.ldexp(torch.ones(256, dtype=torch.float64, device=device), byte - SCALE_BIAS)
    scales[NAN_SCALE] = float("nan")
    return pairs.view(_PAIR[dtype]).squeeze(-1), scales.to(dtype)


_PAIR = {torch.bfloat16: torch.int32, torch.float32: torch.int64, torch.float64: torch.complex128}


@torch.library.custom_op("kimi3_kernels::mxfp4_decode", mutates_args=("out",))
def _decode(packed: Tensor, scale: Tensor, out: Tensor) -> None:
    """Byte to pair by one gather, then the scales in place while the block is in the cache."""
    if out.numel() == 0:
        return
    # Scale and value can both be out of float16's range where their product is not.
    dtype = torch.float32 if out.dtype == torch.float16 else out.dtype
    pairs, scales = _tables(dtype, out.device)
    columns = out.shape[-1]
    out, packed, scale = (x.reshape(-1, x.shape[-1]) for x in (out, packed, scale))
    for rows in spans(out.shape[0], block_elements(out.device.type) // columns):
        target = out[rows]
        # A pair can only be written where a pair may begin.
        direct = target.dtype == dtype and target.storage_offset() % 2 == 0
        values = target if direct else torch.empty_like(target, dtype=dtype)
        torch.index_select(pairs, 0, packed[rows].reshape(-1).int(), out=values.view(pairs.dtype).view(-1))
        factors = torch.index_select(scales, 0, scale[rows].reshape(-1).int())
        values.view(-1, GROUP).mul_(factors.unsqueeze(-1))
        if not direct:
            target.copy_(values)


@_decode.register_fake
def _(packed, scale, out):
    return None


@torch.library.custom_op("kimi3_kernels::mxfp4_encode", mutates_args=())
def _encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    packed, scale = _encoded(weight)
    if weight.numel() == 0:
        return packed, scale
    rows_in = weight.reshape(-1, weight.shape[-1])
    rows_packed, rows_scale = packed.view(-1, packed.shape[-1]), scale.view(-1, scale.shape[-1])
    dtype = compute_dtype(weight)
    for rows in spans(rows_in.shape[0], block_elements(weight.device.type) // weight.shape[-1]):
        groups = rows_in[rows].to(dtype).view(-1, GROUP)
        size = groups.abs()
        largest = size.amax(dim=-1, keepdim=True)
        exponent = (torch.frexp(largest).exponent - 1 - LARGEST_EXPONENT).clamp(LOWEST, -LOWEST)
        exponent = exponent.masked_fill(largest == 0, LOWEST)
        size *= torch.ldexp(torch.ones_like(largest), -exponent)
        codes = torch.zeros(groups.shape, dtype=torch.uint8, device=groups.device)
        for code, (below, above) in enumerate(itertools.pairwise(MAGNITUDES)):
            # Half way belongs to the even one of the two codes.
            border = (below + above) / 2
            codes += (size >= border if code % 2 else size > border).view(torch.uint8)
        broken = ~largest.isfinite()
        codes *= (~broken).view(torch.uint8)
        codes += groups.signbit().view(torch.uint8) << 3
        pairs = codes.view(-1, 2)
        rows_packed[rows] = (pairs[:, 0] | (pairs[:, 1] << 4)).view_as(rows_packed[rows])
        bytes_ = torch.where(broken, NAN_SCALE, exponent + SCALE_BIAS).to(torch.uint8)
        rows_scale[rows] = bytes_.view_as(rows_scale[rows])
    return packed, scale


def _encoded(weight: Tensor) -> tuple[Tensor, Tensor]:
    *leading, columns = weight.shape
    sizes = (columns // 2, columns // GROUP)
    packed, scale = (weight.new_empty(*leading, size, dtype=torch.uint8) for size in sizes)
    return packed, scale


@_encode.register_fake
def _(weight):
    return _encoded(weight)
