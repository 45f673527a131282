"""Benchmark cases of the operations beside KDA: attention-residual mix, short convolution, MXFP4, SiTU, norms."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from bench_frame import Group, Run
from kimi3_kernels import (
    attn_res_mix,
    gated_rms_norm,
    inv_rms,
    mxfp4_decode,
    mxfp4_encode,
    rms_norm,
    short_conv,
    short_conv_step,
    situ,
)
from kimi3_kernels.activation import situ_ref
from kimi3_kernels.norm import gated_rms_norm_ref, rms_norm_ref

EPS = 1e-5


def _mix_concatenated(sources: list[Tensor], norm: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """The mix as modules write it: concatenate, cast, norm, project, weighted sum."""
    stacked = torch.cat([source.unsqueeze(-2) for source in sources], dim=-2).float()
    normed = stacked * torch.rsqrt(stacked.pow(2).mean(-1, keepdim=True) + EPS)
    probs = F.linear(norm * normed, query[None]).softmax(dim=-2).transpose(-1, -2)
    return torch.matmul(probs, stacked).squeeze(-2).to(sources[0].dtype), probs.squeeze(-2)


def _mix(backend: str, rows: int, count: int, width: int, dtype: torch.dtype, grad: bool) -> Run:
    torch.manual_seed(0)
    sources = [torch.randn(rows, width).to(dtype).requires_grad_(grad) for _ in range(count)]
    norm, query = 1 + 0.1 * torch.randn(width), torch.randn(width) * width**-0.5
    weight = (norm * query).requires_grad_(grad)
    norm.requires_grad_(grad)
    finished = [inv_rms(source.detach(), EPS) for source in sources[:-1]]
    calls: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "concatenated": lambda: _mix_concatenated(sources, norm, query),
        "attn_res_mix": lambda: attn_res_mix(sources, weight, EPS),
        "attn_res_mix, inv_rms kept": lambda: attn_res_mix(sources, weight, EPS, inv_rms=[*finished, None]),
        "one read": lambda: ([source.sum() for source in sources], None),
    }
    call = calls[backend]
    if not grad:
        return torch.no_grad()(call)
    upstream = torch.randn(rows, width).to(dtype)
    inputs = [*sources, norm if backend == "concatenated" else weight]
    return lambda: torch.autograd.grad(call()[0], inputs, upstream)


def _mix_group(rows: int, count: int, width: int, dtype: torch.dtype, grad: bool = False) -> Group:
    names = ["concatenated", "attn_res_mix", "attn_res_mix, inv_rms kept", *([] if grad else ["one read"])]
    backends = {n: (lambda n=n: _mix(n, rows, count, width, dtype, grad)) for n in names}
    op = "attn_res mix forward+backward" if grad else "attn_res mix"
    shape = f"[{rows}, {count}, {width}] {str(dtype).removeprefix('torch.')}"
    return Group(op, shape, backends, limit=None if grad else "one read", memory=rows > 64)


def _conv(backend: str, length: int, channels: int, dtype: torch.dtype, grad: bool) -> Run:
    from transformers.models.glm5_next import modeling_glm5_next as peer

    torch.manual_seed(0)
    x = torch.randn(1, length, channels).to(dtype).requires_grad_(grad)
    weight = torch.randn(channels, 1, 4).requires_grad_(grad)
    borders = torch.arange(0, length + 1, 128)
    calls: dict[str, Callable[[], Tensor]] = {
        "transformers": lambda: peer.causal_conv1d_fn(x.transpose(1, 2), weight[:, 0], activation="silu").transpose(
            1, 2
        ),
        "short_conv": lambda: short_conv(x, weight)[0],
        "short_conv, packed by 128": lambda: short_conv(x, weight, cu_seqlens=borders)[0],
        "copy": lambda: x.clone(),
    }
    call = calls[backend]
    if not grad:
        return torch.no_grad()(call)
    upstream = torch.randn_like(x)
    return lambda: torch.autograd.grad(call(), [x, weight], upstream)


def _conv_group(length: int, channels: int, dtype: torch.dtype, grad: bool = False) -> Group:
    names = ["transformers", "short_conv", "short_conv, packed by 128", *([] if grad else ["copy"])]
    backends = {n: (lambda n=n: _conv(n, length, channels, dtype, grad)) for n in names}
    op = "short_conv forward+backward" if grad else "short_conv"
    shape = f"[1, {length}, {channels}] W=4 {str(dtype).removeprefix('torch.')}"
    return Group(op, shape, backends, limit=None if grad else "copy")


def _conv_step(backend: str, batch: int, channels: int, dtype: torch.dtype) -> Run:
    from transformers.models.glm5_next import modeling_glm5_next as peer

    torch.manual_seed(0)
    x, weight = torch.randn(batch, channels).to(dtype), torch.randn(channels, 4).to(dtype)
    state = torch.zeros(batch, channels, 3, dtype=dtype)
    calls = {
        "transformers": lambda: peer.causal_conv1d_update(x.unsqueeze(-1), state, weight, None, "silu"),
        "short_conv_step": lambda: short_conv_step(x, weight, state),
    }
    call = torch.no_grad()(calls[backend])
    return lambda: [call() for _ in range(16)]


def _conv_step_group(batch: int, channels: int, dtype: torch.dtype) -> Group:
    backends = {n: (lambda n=n: _conv_step(n, batch, channels, dtype)) for n in ("transformers", "short_conv_step")}
    shape = f"[{batch}, {channels}] W=4 {str(dtype).removeprefix('torch.')}"
    return Group("short_conv_step x16", shape, backends, memory=False)


def _mxfp4(backend: str, dtype: torch.dtype) -> Run:
    """One matrix of a released expert; a whole expert has three."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    rows, columns = 3072, 3584
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scale = torch.randint(110, 130, (rows, columns // 32), dtype=torch.uint8)
    blocks, scales = packed.view(1, rows, columns // 32, 16), scale.unsqueeze(0)
    buffer = torch.empty(rows, columns, dtype=dtype)
    calls: dict[str, Run] = {
        "transformers": lambda: convert_moe_packed_tensors(blocks, scales, dtype=dtype),
        "mxfp4_decode": lambda: mxfp4_decode(packed, scale, dtype),
        "mxfp4_decode, kept out": lambda: mxfp4_decode(packed, scale, dtype, out=buffer),
        "fill": lambda: torch.empty_like(buffer).fill_(1),
    }
    return calls[backend]


def _mxfp4_group(dtype: torch.dtype) -> Group:
    names = ["transformers", "mxfp4_decode", "mxfp4_decode, kept out", "fill"]
    backends = {n: (lambda n=n: _mxfp4(n, dtype)) for n in names}
    return Group("mxfp4", f"[3072, 3584] {str(dtype).removeprefix('torch.')}", backends, limit="fill")


def _pointwise(op: str, backend: str, rows: int, width: int, dtype: torch.dtype, grad: bool) -> Run:
    torch.manual_seed(0)
    x, y = (torch.randn(rows, width).to(dtype).requires_grad_(grad) for _ in range(2))
    weight = torch.ones(width, requires_grad=grad)
    forms: dict[str, tuple[Run, Run, list[Tensor]]] = {
        "situ": (lambda: situ_ref(x, y, 4.0, 25.0), lambda: situ(x, y, 4.0, 25.0), [x, y]),
        "rms_norm": (lambda: rms_norm_ref(x, weight, EPS), lambda: rms_norm(x, weight, EPS), [x, weight]),
        "gated_rms_norm": (
            lambda: gated_rms_norm_ref(x, y, weight, EPS),
            lambda: gated_rms_norm(x, y, weight, EPS),
            [x, y, weight],
        ),
    }
    plain, own, inputs = forms[op]
    call = plain if backend == "plain torch" else own
    if not grad:
        return torch.no_grad()(call)
    upstream = torch.randn_like(x)
    return lambda: torch.autograd.grad(call(), inputs, upstream)


def _pointwise_group(op: str, rows: int, width: int, dtype: torch.dtype, grad: bool) -> Group:
    backends = {n: (lambda n=n: _pointwise(op, n, rows, width, dtype, grad)) for n in ("plain torch", op)}
    shape = f"[{rows}, {width}] {str(dtype).removeprefix('torch.')}"
    return Group(f"{op} forward+backward" if grad else op, shape, backends)


def _mxfp4_encode() -> Run:
    weight = torch.randn(3072, 3584, generator=torch.Generator().manual_seed(0)).bfloat16()
    return lambda: mxfp4_encode(weight)


POINTWISE = {"situ": (2048, 3072), "rms_norm": (2048, 7168), "gated_rms_norm": (2048 * 16, 128)}

GROUPS = [
    _mix_group(2048, 9, 7168, torch.float32),
    _mix_group(2048, 9, 7168, torch.bfloat16),
    _mix_group(4096, 9, 512, torch.float32),
    _mix_group(1024, 9, 2048, torch.float32, grad=True),
    *(_mix_group(rows, 9, 7168, dtype) for rows in (1, 16) for dtype in (torch.float32, torch.bfloat16)),
    *(_conv_group(2048, 12288, dtype) for dtype in (torch.float32, torch.bfloat16)),
    _conv_group(2048, 512, torch.float32),
    _conv_group(1024, 4096, torch.float32, grad=True),
    *(_conv_step_group(1, 36864, dtype) for dtype in (torch.float32, torch.bfloat16)),
    _conv_step_group(1, 1536, torch.float32),
    *(_mxfp4_group(dtype) for dtype in (torch.bfloat16, torch.float32)),
    Group("mxfp4 encode", "[3072, 3584] bfloat16", {"mxfp4_encode": _mxfp4_encode}),
    *(
        _pointwise_group(op, *shape, dtype, grad)
        for op, shape in POINTWISE.items()
        for grad in (False, True)
        for dtype in (torch.float32, torch.bfloat16)
    ),
]
