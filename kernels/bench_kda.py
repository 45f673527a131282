"""Benchmark cases of KDA: prefill, training step and decode step, against transformers' torch forms."""

import itertools

import torch
from torch import Tensor

from bench_frame import Group, Run
from kimi3_kernels import kda_chunk, kda_recurrent, kda_step, l2norm, native

BOUND = -5.0
HEADS, WIDTH = 8, 128


def _inputs(length: int, gate: str, grad: bool) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shape = (1, length, HEADS, WIDTH)
    q, k = l2norm(torch.randn(shape)), l2norm(torch.randn(shape))
    v, beta = torch.randn(shape), torch.rand(shape[:3])
    raw = 3 * torch.randn(shape)
    rate = torch.empty(HEADS, 1).uniform_(1, 16)
    g = BOUND * torch.sigmoid(raw) if gate == "bounded" else -rate * torch.nn.functional.softplus(raw)
    return tuple(x.requires_grad_(grad) for x in (q, k, v, g, beta))


def _prefill(backend: str, length: int, gate: str, grad: bool = False) -> Run:
    from transformers.models.glm5_next import modeling_glm5_next as peer

    q, k, v, g, beta = inputs = _inputs(length, gate, grad)
    bound = BOUND if gate == "bounded" else None
    calls = {
        "transformers chunk": lambda: peer.chunk_kimi_delta_attention(
            q, k, v, g, beta, initial_state=None, output_final_state=True
        ),
        "transformers recurrent": lambda: peer.recurrent_kimi_delta_attention(q, k, v, g, beta, None, True),
        "kda_recurrent": lambda: kda_recurrent(q, k, v, g, beta),
        "kda_chunk": lambda: kda_chunk(q, k, v, g, beta, lower_bound=bound),
    }
    call = calls[backend]
    if not grad:
        return torch.no_grad()(call)
    weight = torch.randn_like(v)

    def forward_backward() -> object:
        out, state = call()
        return torch.autograd.grad((out * weight).sum() + state.sum(), inputs)

    return forward_backward


def _prefill_group(op: str, length: int, gate: str, grad: bool = False) -> Group:
    names = ["transformers chunk", "transformers recurrent", "kda_recurrent", "kda_chunk"]
    backends = {n: (lambda n=n: _prefill(n, length, gate, grad)) for n in names}
    return Group(op, f"T={length} H={HEADS} K=V={WIDTH} {gate} gate", backends)


def plain_step(*args: Tensor) -> Tensor:
    """`kda_step` in plain torch, also once the C++ operator is built."""
    built, native._built = native._built, False
    try:
        return kda_step(*args)
    finally:
        native._built = built


def _step(backend: str, batch: int) -> Run:
    from transformers.models.glm5_next import modeling_glm5_next as peer

    torch.manual_seed(0)
    heads = 96
    # More states than the last-level cache holds, as consecutive layers have.
    states = itertools.cycle([torch.randn(batch, heads, WIDTH, WIDTH) for _ in range(max(2, 16 // batch))])
    q, k = l2norm(torch.randn(batch, heads, WIDTH)), l2norm(torch.randn(batch, heads, WIDTH))
    v, g, beta = torch.randn(batch, heads, WIDTH), -torch.rand(batch, heads, WIDTH), torch.rand(batch, heads)
    q1, k1, v1, g1, beta1 = (x.unsqueeze(1) for x in (q, k, v, g, beta))
    calls = {
        "transformers recurrent": lambda: peer.recurrent_kimi_delta_attention(
            q1, k1, v1, g1, beta1, next(states), True
        ),
        "kda_step": lambda: plain_step(q, k, v, g, beta, next(states)),
        "kda_step, C++": lambda: native.kda_step(q, k, v, g, beta, next(states), WIDTH**-0.5),
        "in-place scale": lambda: next(states).mul_(0.999),
    }
    if backend == "kda_step, C++":
        native.build()
    call = torch.no_grad()(calls[backend])
    return lambda: [call() for _ in range(16)]


def _step_group(batch: int) -> Group:
    names = ["transformers recurrent", "kda_step", "kda_step, C++", "in-place scale"]
    backends = {n: (lambda n=n: _step(n, batch)) for n in names}
    return Group("kda_step x16", f"B={batch} H=96 K=V={WIDTH}", backends, limit="in-place scale", memory=False)


GROUPS = [
    _prefill_group("kda forward", 4096, "bounded"),
    _prefill_group("kda forward", 4096, "softplus"),
    _prefill_group("kda forward+backward", 1024, "bounded", grad=True),
    _prefill_group("kda forward+backward", 1024, "softplus", grad=True),
    *(_step_group(batch) for batch in (1, 2, 4, 8)),
]
