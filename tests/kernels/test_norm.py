"""RMSNorm and gated RMSNorm: by hand, operator and plain form alike, gradients, precision, what is kept."""

import math

import pytest
import torch

from kimi3_kernels import blocks, gated_rms_norm, rms_norm
from kimi3_kernels import norm as module

EPS = 1e-5


@pytest.fixture(params=["operator", "plain"])
def path(request, monkeypatch):
    """The operator in blocks of three rows, so that small inputs have several, and the plain form."""
    monkeypatch.setattr(module, "SMALL", 0 if request.param == "operator" else 2**40)
    monkeypatch.setattr(blocks, "CPU_ELEMENTS", 3 * 8)
    return request.param


def make(shape=(2, 5, 8), dtype=torch.float64, scale=3.0):
    """x, gate, weight."""
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(shape, generator=generator, dtype=torch.float64) * s for s in (scale, 2.0))
    weight = 1 + 0.3 * torch.randn(shape[-1], generator=generator, dtype=torch.float64)
    return x.to(dtype), gate.to(dtype), weight.to(dtype)


def by_hand(row, gates, weights):
    scale = 1 / math.sqrt(sum(v * v for v in row) / len(row) + EPS)
    return [v * scale * w / (1 + math.exp(-g)) for v, g, w in zip(row, gates, weights)]


def test_values(path):
    x, gate, weight = make()
    rows, gates = x.flatten(0, 1).tolist(), gate.flatten(0, 1).tolist()
    expected = torch.tensor([by_hand(r, g, weight.tolist()) for r, g in zip(rows, gates)], dtype=torch.float64)
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, EPS).flatten(0, 1), expected, rtol=1e-13, atol=1e-14)
    ungated = torch.tensor([by_hand(r, [math.inf] * 8, weight.tolist()) for r in rows], dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, weight, EPS).flatten(0, 1), ungated, rtol=1e-13, atol=1e-14)
    bare = torch.tensor([by_hand(r, [math.inf] * 8, [1.0] * 8) for r in rows], dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, None, EPS).flatten(0, 1), bare, rtol=1e-13, atol=1e-14)


def test_gradcheck(path):
    x, gate, weight = (t.requires_grad_() for t in make())
    assert torch.autograd.gradcheck(lambda *a: rms_norm(*a, EPS), (x, weight))
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, None, EPS), (x,))
    assert torch.autograd.gradcheck(lambda *a: gated_rms_norm(*a, EPS), (x, gate, weight))


@pytest.mark.parametrize("subset", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_requires_grad_subsets(path, subset):
    tensors = make()
    inputs = [tensors[index].requires_grad_() for index in subset]
    grads = torch.autograd.grad(gated_rms_norm(*tensors, EPS).square().sum(), inputs)
    expected = torch.autograd.grad(module.gated_rms_norm_ref(*tensors, EPS).square().sum(), inputs)
    for grad, want in zip(grads, expected):
        torch.testing.assert_close(grad, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("width", [128, 7168])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision(path, monkeypatch, width, dtype):
    """Float32 inside: about ten of its roundings per value; half precision adds half a unit of the result."""
    monkeypatch.setattr(blocks, "CPU_ELEMENTS", 3 * width)
    x, gate, weight = make((20, width), dtype)
    weight = weight.float()
    half = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    wide = (x.double(), gate.double(), weight.double())
    pairs = [
        (rms_norm(x, weight, EPS), module.rms_norm_ref(wide[0], wide[2], EPS)),
        (gated_rms_norm(x, gate, weight, EPS), module.gated_rms_norm_ref(*wide, EPS)),
    ]
    for value, exact in pairs:
        assert value.dtype == dtype
        subnormal = 0.0 if dtype == torch.float32 else torch.finfo(dtype).smallest_normal
        assert ((value.double() - exact).abs() <= (half + 8e-7) * exact.abs() + subnormal).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_precision(path, dtype):
    tensors = [t.requires_grad_() for t in make((300, 8), dtype)]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    upstream = make((300, 8), dtype)[1].detach().flip(0)
    grads = torch.autograd.grad(gated_rms_norm(*tensors, EPS), tensors, upstream)
    expected = torch.autograd.grad(module.gated_rms_norm_ref(*wide, EPS), wide, upstream.double())
    bound = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    for grad, want in zip(grads, expected):
        assert grad.dtype == dtype
        assert (grad.double() - want).norm() <= bound * want.norm()


def test_result_dtypes(path):
    """rms_norm gives x's dtype, the gated norm its gate's, whatever the weight's; float64 anywhere computes in it."""
    x, gate, weight = make()
    assert rms_norm(x.bfloat16(), weight.float(), EPS).dtype == torch.bfloat16
    assert gated_rms_norm(x.float(), gate.bfloat16(), weight.float(), EPS).dtype == torch.bfloat16
    exact = rms_norm(x.float().double(), weight, EPS)
    assert torch.equal(rms_norm(x.float(), weight, EPS), exact.float())


def test_all_zero_rows(path):
    x, gate, weight = make()
    x[0, 2] = 0
    inputs = [t.requires_grad_() for t in (x, gate, weight)]
    y = gated_rms_norm(*inputs, EPS)
    assert (y[0, 2] == 0).all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.sum(), inputs))


def test_autocast_changes_nothing(path):
    x, gate, weight = make(dtype=torch.float32)
    plain = rms_norm(x, weight, EPS), gated_rms_norm(x, gate, weight, EPS)
    with torch.autocast("cpu", torch.bfloat16):
        cast = rms_norm(x, weight, EPS), gated_rms_norm(x, gate, weight, EPS)
    assert all(torch.equal(value, want) for value, want in zip(cast, plain))


def test_strided_input(path):
    x, gate, weight = make((6, 16))
    left, gates, weights = x[::2, ::2], gate[::2, 8:], weight[:8]
    expected = module.gated_rms_norm_ref(left.contiguous(), gates.contiguous(), weights, EPS)
    torch.testing.assert_close(gated_rms_norm(left, gates, weights, EPS), expected, rtol=1e-13, atol=1e-14)


def test_backward_keeps_inputs_and_one_number_per_row(monkeypatch):
    monkeypatch.setattr(module, "SMALL", 0)
    x, gate, weight = (t.requires_grad_() for t in make((40, 64), torch.bfloat16))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gated_rms_norm(x, gate, weight, EPS)
    own = {t.data_ptr() for t in (x, gate, weight)}
    assert sum(t.numel() for t in kept if t.data_ptr() not in own) == 40


def test_compiles_whole(path):
    inputs = [t.requires_grad_() for t in make(dtype=torch.float32)]

    def both(x, gate, weight):
        return rms_norm(x, weight, EPS) + gated_rms_norm(x, gate, weight, EPS)

    compiled, expected = torch.compile(both, fullgraph=True, backend="aot_eager")(*inputs), both(*inputs)
    grads = torch.autograd.grad(compiled.square().sum(), inputs)
    for value, want in zip((compiled, *grads), (expected, *torch.autograd.grad(expected.square().sum(), inputs))):
        torch.testing.assert_close(value, want)


def test_operator_passes_opcheck():
    x, gate, weight = (t.requires_grad_() for t in make())
    torch.library.opcheck(torch.ops.kimi3_kernels.rms_norm, (x, gate, weight, EPS))
    torch.library.opcheck(torch.ops.kimi3_kernels.rms_norm, (x, None, None, EPS))


def test_refuses():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="weight has shape"):
        rms_norm(x, torch.ones(4), EPS)
    with pytest.raises(ValueError, match="gate has shape"):
        gated_rms_norm(x, torch.zeros(2, 4), torch.ones(8), EPS)
