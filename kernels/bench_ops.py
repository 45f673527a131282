"""Benchmark cases of the operations beside KDA: attention-residual mix, short convolution, MXFP4, SiTU, norms."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from bench_frame import Group, Run
from kimi3_kernels import attn_res_mix, inv_rms

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


GROUPS = [
    _mix_group(2048, 9, 7168, torch.float32),
    _mix_group(2048, 9, 7168, torch.bfloat16),
    _mix_group(4096, 9, 512, torch.float32),
    _mix_group(1024, 9, 2048, torch.float32, grad=True),
    *(_mix_group(rows, 9, 7168, dtype) for rows in (1, 16) for dtype in (torch.float32, torch.bfloat16)),
]
