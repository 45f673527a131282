"""The attention-residual mix against its definition: values, gradients, exactness, memory kept for the backward."""

import pytest
import torch

from kimi3_kernels import attn_res as module
from kimi3_kernels import attn_res_mix, attn_res_mix_ref, blocks, inv_rms

EPS = 1e-5


@pytest.fixture(params=["operator", "few"])
def path(request, monkeypatch):
    """Both ways to compute it (with gradients it is always the operator), in blocks of three rows: several of them."""
    monkeypatch.setattr(module, "FEW_ELEMENTS", 0 if request.param == "operator" else 2**40)
    monkeypatch.setattr(blocks, "CPU_ELEMENTS", 3 * 16)
    return request.param


@pytest.fixture
def operator(monkeypatch):
    monkeypatch.setattr(module, "FEW_ELEMENTS", 0)
    monkeypatch.setattr(blocks, "CPU_ELEMENTS", 3 * 16)


def make(count=4, shape=(2, 5, 16), dtype=torch.float64, seed=0):
    """Sources of unlike sizes (so that 1/rms matters) and a query strong enough for weights far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    sources = [torch.randn(shape, generator=generator, dtype=torch.float64) * 3.0**s for s in range(-1, count - 1)]
    weight = torch.randn(shape[-1], generator=generator, dtype=torch.float64) * 3 * shape[-1] ** -0.5
    return [source.to(dtype) for source in sources], weight.to(torch.promote_types(dtype, torch.float32))


def scales(sources, known):
    return [inv_rms(s.detach(), EPS) if index in known else None for index, s in enumerate(sources)]


def test_definition_by_hand():
    # The rms of (3, 4) is 5 / sqrt 2 and of (1, 1) it is 1, so the query (1, 0) scores 3 sqrt 2 / 5 and 1.
    sources = [torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 1.0]])]
    scores = torch.tensor([3 * 2**0.5 / 5, 1.0])
    share = scores.softmax(0)
    for form in (attn_res_mix, attn_res_mix_ref):
        mixed, probs = form(sources, torch.tensor([1.0, 0.0]), 0.0)
        torch.testing.assert_close(probs, share[None])
        torch.testing.assert_close(mixed, (share[0] * sources[0] + share[1] * sources[1]))


@pytest.mark.parametrize("shape", [(16,), (1, 1, 16), (7, 16), (2, 5, 16), (3, 3, 16)])
@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("known", [(), (0,), tuple(range(8))])
def test_values(path, shape, count, known):
    sources, weight = make(count, shape)
    mixed, probs = attn_res_mix(sources, weight, EPS, inv_rms=scales(sources, known))
    expected, expected_probs = attn_res_mix_ref(sources, weight, EPS)
    assert mixed.shape == shape and probs.shape == (*shape[:-1], count)
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(probs, expected_probs, rtol=1e-12, atol=1e-12)


def test_known_inv_rms_is_used_for_its_own_source(operator):
    sources, weight = make()
    wrong = [inv_rms(source, EPS) for source in sources]
    wrong[1] = wrong[1] * 2
    assert not torch.allclose(attn_res_mix(sources, weight, EPS, inv_rms=wrong)[1], attn_res_mix(sources, weight)[1])


@pytest.mark.parametrize("known", [(), (0, 2), (0, 1, 2, 3)])
def test_gradcheck(operator, known):
    sources, weight = make()
    inputs = [x.requires_grad_() for x in (*sources, weight)]
    assert torch.autograd.gradcheck(
        lambda *xs: attn_res_mix(xs[:-1], xs[-1], EPS, inv_rms=scales(xs[:-1], known)), inputs
    )


@pytest.mark.parametrize("output", ["mixed", "probs"])
def test_gradient_of_one_output(operator, output):
    sources, weight = make()
    inputs = [x.requires_grad_() for x in (*sources, weight)]
    pick = 0 if output == "mixed" else 1
    shape = attn_res_mix(sources, weight, EPS)[pick].shape
    (upstream,), _ = make(1, shape, seed=1)
    grads = torch.autograd.grad(attn_res_mix(sources, weight, EPS)[pick], inputs, upstream)
    expected = torch.autograd.grad(attn_res_mix_ref(sources, weight, EPS)[pick], inputs, upstream)
    for grad, want in zip(grads, expected):
        torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("subset", [(0,), (3,), (4,), (1, 4), (0, 1, 2, 3)])
def test_requires_grad_subsets(operator, subset):
    sources, weight = make()
    inputs = [*sources, weight]
    for index in subset:
        inputs[index].requires_grad_()
    chosen = [inputs[index] for index in subset]
    attn_res_mix(sources, weight, EPS)[0].square().sum().backward()
    expected = torch.autograd.grad(attn_res_mix_ref(sources, weight, EPS)[0].square().sum(), chosen)
    for tensor, want in zip(chosen, expected):
        torch.testing.assert_close(tensor.grad, want, rtol=1e-10, atol=1e-12)
    assert all(x.grad is None for index, x in enumerate(inputs) if index not in subset)


def test_one_tensor_as_two_sources(operator):
    (source,), weight = make(1)
    source.requires_grad_()
    (grad,) = torch.autograd.grad(attn_res_mix([source, source], weight)[0].square().sum(), source)
    (expected,) = torch.autograd.grad(attn_res_mix_ref([source, source], weight)[0].square().sum(), source)
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)


def test_all_zero_rows_have_finite_gradients(operator):
    sources, weight = make()
    for source in sources:
        source[0, 1] = 0
        source.requires_grad_()
    mixed, _ = attn_res_mix(sources, weight.requires_grad_(), EPS)
    mixed.sum().backward()
    assert (mixed[0, 1] == 0).all()
    assert all(x.grad.isfinite().all() for x in (*sources, weight))


@pytest.mark.parametrize("width", [512, 7168])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exactness(width, dtype):
    """Float32 inside: 1e-6 of the norm for float32 sources, one rounding of the result for half precision.

    Weights move by the error of a score, which grows with its size: the query gives scores of about 3.
    """
    sources, weight = make(9, (40 if width == 7168 else 300, width), dtype)
    sources = [source / 3.0**index for index, source in enumerate(sources)]
    assert sources[0].numel() > module.FEW_ELEMENTS
    mixed, probs = attn_res_mix(sources, weight, EPS)
    expected, expected_probs = attn_res_mix_ref([s.double() for s in sources], weight.double(), EPS)
    assert mixed.dtype == dtype and probs.dtype == torch.float32
    bound = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    assert (mixed.double() - expected).norm() <= bound * expected.norm()
    assert (probs.double() - expected_probs).norm() <= 1e-6 * expected_probs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_exactness(dtype):
    sources, weight = make(5, (150, 512), dtype)
    sources = [(source / 3.0**index).requires_grad_() for index, source in enumerate(sources)]
    weight.requires_grad_()
    (upstream,), _ = make(1, (150, 512), dtype, seed=1)
    grads = torch.autograd.grad(attn_res_mix(sources, weight, EPS)[0], [*sources, weight], upstream)
    wide = [x.detach().double().requires_grad_() for x in (*sources, weight)]
    expected = torch.autograd.grad(attn_res_mix_ref(wide[:-1], wide[-1], EPS)[0], wide, upstream.double())
    for grad, want in zip(grads, expected):
        bound = 2e-6 if grad.dtype == torch.float32 else torch.finfo(dtype).eps / 2
        assert (grad.double() - want).norm() <= bound * want.norm()


def test_autocast_changes_nothing(path):
    sources, weight = make(4, (2, 40, 16), torch.float32)
    inputs = [x.clone().requires_grad_() for x in (*sources, weight)]

    def values():
        trained = attn_res_mix(inputs[:-1], inputs[-1], EPS)
        grads = torch.autograd.grad(trained[0].square().sum(), inputs)
        return *attn_res_mix(sources, weight, EPS), *trained, *grads

    plain = values()
    with torch.autocast("cpu", torch.bfloat16):
        cast = values()
    for value, expected in zip(cast, plain):
        assert value.dtype == torch.float32 and torch.equal(value, expected)


def test_rows_do_not_meet(path):
    """A row's mix is the same bits whatever the other rows hold: nothing crosses tokens."""
    sources, weight = make(4, (11, 16), torch.float32)
    mixed = attn_res_mix(sources, weight, EPS)[0]
    others = [torch.cat([source[:4], torch.full_like(source[4:], 1e3)]) for source in sources]
    assert torch.equal(attn_res_mix(others, weight, EPS)[0][:4], mixed[:4])


def test_strided_sources(path):
    sources, weight = make(3, (2, 6, 32))
    sources = [source[:, 1:, ::2] for source in sources]
    mixed, probs = attn_res_mix(sources, weight[:16], EPS)
    expected, expected_probs = attn_res_mix_ref(sources, weight[:16], EPS)
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(probs, expected_probs, rtol=1e-12, atol=1e-12)


def test_keeps_sources_by_reference(operator):
    """The backward keeps the sources themselves and [R, S] numbers, no copy of a source."""
    sources, weight = make(9, (50, 64), torch.float32)
    for source in sources:
        source.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        attn_res_mix(sources, weight, EPS)
    own = {source.data_ptr() for source in (*sources, weight)}
    extra = sum(t.nbytes for t in kept if t.data_ptr() not in own)
    assert 0 < extra <= 3 * 50 * 9 * 4


def test_compiles_whole_with_backward(operator):
    sources, weight = make(4, (7, 16), torch.float32)
    inputs = [x.requires_grad_() for x in (*sources, weight)]

    def loss(sources, weight, known):
        mixed, probs = attn_res_mix(sources, weight, EPS, inv_rms=known)
        return mixed.square().sum() + probs[:, 0].sum()

    known = scales(sources, (0, 1, 2))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    grads = torch.autograd.grad(compiled(sources, weight, known), inputs)
    expected = torch.autograd.grad(loss(sources, weight, known), inputs)
    for grad, want in zip(grads, expected):
        torch.testing.assert_close(grad, want)


def test_compiles_few_rows_under_autocast():
    sources, weight = make(4, (1, 1, 16), torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        compiled = torch.compile(attn_res_mix, fullgraph=True, backend="aot_eager")(sources, weight, EPS)
    for value, expected in zip(compiled, attn_res_mix_ref(sources, weight, EPS)):
        torch.testing.assert_close(value, expected)


def test_operator_passes_opcheck():
    sources, weight = make(3, (4, 16))
    known = [inv_rms(sources[0], EPS), weight.new_empty(0), weight.new_empty(0)]
    inputs = [x.requires_grad_() for x in (*sources, weight)]
    torch.library.opcheck(torch.ops.kimi3_kernels.attn_res_mix, (inputs[:-1], inputs[-1], known, EPS))


def test_inv_rms_is_float32_and_finite_at_zero():
    x = torch.zeros(3, 8, dtype=torch.bfloat16, requires_grad=True)
    value = inv_rms(x, EPS)
    value.sum().backward()
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, torch.full((3,), EPS**-0.5))
    assert (x.grad == 0).all()


@pytest.mark.parametrize(
    ("sources", "weight", "known", "message"),
    [
        ([], torch.ones(4), None, "sources is empty"),
        ([torch.ones(2, 4), torch.ones(3, 4)], torch.ones(4), None, r"sources\[1\]"),
        ([torch.ones(2, 4), torch.ones(2, 4).double()], torch.ones(4), None, r"sources\[1\]"),
        ([torch.ones(2, 4)], torch.ones(1, 4), None, "weight has shape"),
        ([torch.ones(2, 4)], torch.ones(4), [None, None], "inv_rms has 2 entries"),
        ([torch.ones(2, 4)], torch.ones(4), [torch.ones(2, 1)], r"inv_rms\[0\]"),
    ],
)
def test_refuses(sources, weight, known, message):
    with pytest.raises(ValueError, match=message):
        attn_res_mix(sources, weight, EPS, inv_rms=known)
