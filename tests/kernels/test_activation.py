"""SiTU-GLU: against the formula in Python's arithmetic; operator and plain form alike; gradients; extreme inputs."""

import math

import pytest
import torch

from kimi3_kernels import activation as module
from kimi3_kernels import blocks, situ

BETAS = [(4.0, 25.0), (4.0, None), (1.5, 0.5)]


@pytest.fixture(params=["operator", "plain"])
def path(request, monkeypatch):
    """The operator in blocks of three rows, so that small inputs have several, and the plain form."""
    monkeypatch.setattr(module, "SMALL", 0 if request.param == "operator" else 2**40)
    monkeypatch.setattr(blocks, "CPU_ELEMENTS", 3 * 8)
    return request.param


def make(shape=(2, 5, 8), dtype=torch.float64, scale=4.0):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("beta, linear_beta", BETAS)
def test_values(path, beta, linear_beta):
    gate, up = make()

    def formula(g, u):
        bounded = beta * math.tanh(g / beta) / (1 + math.exp(-g))
        return bounded * (u if linear_beta is None else linear_beta * math.tanh(u / linear_beta))

    expected = [formula(g, u) for g, u in zip(gate.flatten().tolist(), up.flatten().tolist())]
    actual = situ(gate, up, beta, linear_beta)
    torch.testing.assert_close(actual.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("beta, linear_beta", BETAS)
def test_gradcheck(path, beta, linear_beta):
    inputs = [x.requires_grad_() for x in make((7, 8))]
    assert torch.autograd.gradcheck(lambda g, u: situ(g, u, beta, linear_beta), inputs)


@pytest.mark.parametrize("index", [0, 1])
def test_one_input_requires_grad(path, index):
    inputs = make()
    inputs[index].requires_grad_()
    (grad,) = torch.autograd.grad(situ(*inputs, 4.0, 25.0).sum(), inputs[index])
    (expected,) = torch.autograd.grad(module.situ_ref(*inputs, 4.0, 25.0).sum(), inputs[index])
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_precision(path, dtype, scale):
    """Float32 inside, relative to each value: small ones too, where a tanh made of sigmoids would lose digits."""
    gate, up = (x.requires_grad_() for x in make((200, 8), dtype, scale))
    wide = [x.detach().double().requires_grad_() for x in (gate, up)]
    y, exact = situ(gate, up, 4.0, 25.0), module.situ_ref(*wide, 4.0, 25.0)
    upstream = make(y.shape, dtype, 1.0)[1]
    values = [y, *torch.autograd.grad(y, (gate, up), upstream)]
    expected = [exact, *torch.autograd.grad(exact, wide, upstream.double())]
    # A slope is a difference of numbers of about one, times the other factor and the upstream gradient.
    factors = [0.0, 25 * (wide[1] / 25).tanh(), 4 * (wide[0] / 4).tanh() * wide[0].sigmoid()]
    half = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    # Below it float16 has fixed steps, and the sigmoid of a gate below -87 is zero in float32.
    floor = torch.finfo(dtype).smallest_normal if dtype == torch.float16 else 1e-30
    for value, want, factor in zip(values, expected, factors):
        assert value.dtype == dtype
        # About ten float32 roundings; half precision adds half a unit of the result.
        bound = (half + 1e-6) * want.abs() + floor + 5e-7 * (factor * upstream.double()).abs()
        assert ((value.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_inputs(path, dtype):
    extreme = torch.tensor([0.0, -0.0, 90.0, -90.0, 1e4, -1e4, 1e30, -1e30], dtype=dtype)
    gate, up = (x.contiguous().requires_grad_() for x in torch.meshgrid(extreme, extreme, indexing="ij"))
    y = situ(gate, up, 4.0, 25.0)
    expected = module.situ_ref(gate, up, 4.0, 25.0)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-30)
    grads = torch.autograd.grad(y.sum(), (gate, up))
    for grad, want in zip(grads, torch.autograd.grad(expected.sum(), (gate, up))):
        assert grad.isfinite().all()
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-4)
    assert situ(torch.full_like(gate, float("nan")), up, 4.0, 25.0).isnan().all()


def test_autocast_changes_nothing(path):
    gate, up = make(dtype=torch.float32)
    plain = situ(gate, up, 4.0, 25.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(situ(gate, up, 4.0, 25.0), plain)


def test_halves_of_one_projection(path):
    """Strided views, as a fused gate and up projection gives them."""
    gate, up = make((6, 16))[0].chunk(2, dim=-1)
    expected = situ(gate.contiguous(), up.contiguous(), 4.0, 25.0)
    torch.testing.assert_close(situ(gate, up, 4.0, 25.0), expected, rtol=1e-13, atol=1e-15)


def test_mixed_dtypes(path):
    gate, up = make()
    y = situ(gate.float(), up, 4.0, 25.0)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, module.situ_ref(gate.float().double(), up, 4.0, 25.0).float())
    wide = situ(gate, up.bfloat16(), 4.0, None)
    torch.testing.assert_close(wide, module.situ_ref(gate, up.bfloat16().double(), 4.0, None))


def test_backward_keeps_gate_and_up_only(monkeypatch):
    monkeypatch.setattr(module, "SMALL", 0)
    gate, up = (x.requires_grad_() for x in make(dtype=torch.bfloat16))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        situ(gate, up, 4.0, 25.0)
    assert {t.data_ptr() for t in kept} == {gate.data_ptr(), up.data_ptr()}


def test_compiles_whole(path):
    inputs = [x.requires_grad_() for x in make(dtype=torch.float32)]
    compiled = torch.compile(situ, fullgraph=True, backend="aot_eager")(*inputs, 4.0, 25.0)
    expected = module.situ_ref(*inputs, 4.0, 25.0)
    grads = torch.autograd.grad(compiled.sum(), inputs)
    for value, want in zip((compiled, *grads), (expected, *torch.autograd.grad(expected.sum(), inputs))):
        torch.testing.assert_close(value, want)


def test_operator_passes_opcheck():
    inputs = [x.requires_grad_() for x in make()]
    torch.library.opcheck(torch.ops.kimi3_kernels.situ, (*inputs, 4.0, 25.0))


def test_refuses_other_shapes():
    with pytest.raises(ValueError, match="up has shape"):
        situ(torch.zeros(2, 4), torch.zeros(2, 5), 4.0, 25.0)
