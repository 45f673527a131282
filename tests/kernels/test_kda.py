"""KDA: the token loop against its definition, and the chunked form against the token loop.

Tolerances in float64 are a few hundred roundings (1e-12 of the largest value): a wrong term would be at 1e-2. In
float32 they are 2e-6 of the largest value against the token loop in float64; the token loop itself, in float32,
reaches 2e-6 on slow decays.
"""

import itertools
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi3_kernels import kda_chunk, kda_forward, kda_gate, kda_layout, kda_recurrent, kda_step, l2norm

REGIMES = ("mixed", "slow", "bound", "tied", "unbounded")
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def make(batch, length, heads, width, depth, regime="mixed", dtype=torch.float64, sequences=None, seed=0):
    """q, k, v, g, beta and an initial state."""
    gen = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(*shape, generator=gen, dtype=torch.float64)

    def randn(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    shape = (batch, length, heads, width)
    q, k, v, beta = l2norm(randn(*shape)), l2norm(randn(*shape)), randn(*shape[:3], depth), rand(*shape[:3])
    if regime == "mixed":
        g = -5 * torch.sigmoid(3 * randn(*shape))
    elif regime in ("slow", "tied"):
        g = -1e-3 * rand(*shape)
    elif regime == "bound":
        g = torch.full(shape, -5.0, dtype=torch.float64)
    else:
        g = -torch.exp(-9 + 20 * rand(*shape))  # from -1e-4 down to -60000
    if regime == "tied":
        k, beta = l2norm(k[:, :1] + 0.01 * k), 0.9 + 0.1 * beta
    state = randn(sequences or batch, heads, width, depth)
    return tuple(x.to(dtype) for x in (q, k, v, g, beta, state))


def run(function, inputs, seed=1, **kwargs):
    """Outputs of a KDA form and gradients of a fixed random function of both of them, in float64."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out, state = function(*inputs, **kwargs)
    gen = torch.Generator().manual_seed(seed)
    weights = [torch.randn(x.shape, generator=gen, dtype=torch.float64).to(x.dtype) for x in (out, state)]
    grads = torch.autograd.grad((out * weights[0]).sum() + (state * weights[1]).sum(), inputs)
    return [x.detach().double() for x in (out, state, *grads)]


def assert_close(got, expected, tolerance, label=""):
    """Every tensor within `tolerance` of its largest expected value."""
    for name, a, b in zip(("out", "state", *("d" + n for n in NAMES)), got, expected):
        if b.numel():
            error, largest = (a - b).abs().max().item(), b.abs().max().item()
            # The floor: behind decays of exp(-60000) every gradient of g is zero, where the chunked form has exp(-170).
            assert error <= tolerance * largest + 1e-60, f"{label} {name}: {error} of {largest}"


def by_hand(q, k, v, g, beta, state):
    """The update of one head, written out with outer products."""
    outs = []
    for t in range(len(k)):
        state = g[t].exp().diag() @ state
        state = state + beta[t] * torch.outer(k[t], v[t] - state.T @ k[t])
        outs.append(state.T @ q[t] * k.shape[1] ** -0.5)
    return torch.stack(outs), state


def test_recurrent_is_the_definition():
    q, k, v, g, beta, state = make(2, 5, 3, 4, 6)
    out, final = kda_recurrent(q, k, v, g, beta, state)
    for b, h in itertools.product(range(2), range(3)):
        expected = by_hand(*(x[b, :, h] for x in (q, k, v, g, beta)), state[b, h])
        torch.testing.assert_close(out[b, :, h], expected[0], rtol=0, atol=1e-13)
        torch.testing.assert_close(final[b, h], expected[1], rtol=0, atol=1e-13)


def test_recurrent_equals_transformers():
    peer = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    inputs = make(2, 9, 3, 16, 24, dtype=torch.float32)
    expected = peer.recurrent_kimi_delta_attention(*inputs, True)
    for got, want in zip(kda_recurrent(*inputs), expected):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 1000])
@pytest.mark.parametrize("regime", ["bound", "slow"])
def test_chunk_equals_recurrent_at_both_gate_extremes(length, regime):
    inputs = make(1, length, 2, 12, 20, regime)
    expected = run(kda_recurrent, inputs)
    for lower_bound in (-5.0, -8.0, None):
        assert_close(run(kda_chunk, inputs, lower_bound=lower_bound), expected, 1e-12, f"bound {lower_bound}")


@pytest.mark.parametrize(
    "regime,lower_bound", [*itertools.product(REGIMES[:4], (-5.0, -10.0, None)), ("unbounded", None)]
)
def test_float32_accuracy(regime, lower_bound):
    inputs = make(1, 700, 2, 64, 48, regime, torch.float32)
    expected = run(kda_recurrent, [x.double() for x in inputs])
    assert_close(run(kda_chunk, inputs, lower_bound=lower_bound), expected, 2e-6, regime)


def test_float32_decay_gradient_at_the_bound():
    # Without an initial state nothing but exp(-5) and smaller reaches dg; parts of size one must not cancel into it.
    *inputs, _ = make(1, 300, 2, 64, 64, "bound", torch.float32)

    def gradient(function, inputs, **kwargs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        out, _ = function(*inputs, **kwargs)
        return torch.autograd.grad(out.square().sum(), inputs[3])[0].double()

    expected = gradient(kda_recurrent, [x.double() for x in inputs])
    for lower_bound in (-5.0, None):
        error = (gradient(kda_chunk, inputs, lower_bound=lower_bound) - expected).abs().max()
        assert error <= 2e-6 * expected.abs().max()


@pytest.mark.parametrize("factor", [1e-12, 1e-6, 65536.0])
def test_gradients_of_any_size(factor):
    # Inside a chunk exp(+-80) meets the gradient: its size must not push products out of float32.
    inputs = make(1, 96, 2, 32, 32, "bound", torch.float32)

    def gradients(scale):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out, state = kda_chunk(*leaves, lower_bound=-5.0)
        return torch.autograd.grad((out.sum() + state.sum()) * scale, leaves)

    for name, scaled, plain in zip(NAMES, gradients(factor), gradients(1.0)):
        assert (scaled / factor - plain).abs().max() <= 2e-6 * plain.abs().max(), name


def test_squaring_would_fail_here():
    # The regime that rules out an inverse by repeated squaring really does: its powers reach 1e6 before they cancel.
    _, k, _, _, beta, _ = make(1, 32, 1, 64, 8, "tied")
    system = (beta[0, :, 0, None] * (k[0, :, 0] @ k[0, :, 0].T)).tril(-1)
    assert torch.linalg.matrix_power(system, 8).abs().max() > 1e4


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 150),
    heads=st.integers(1, 4),
    width=st.integers(1, 20),
    depth=st.integers(1, 20),
    regime=st.sampled_from(REGIMES),
    lower_bound=st.sampled_from([-5.0, -7.0, None]),
    seed=st.integers(0, 99),
)
def test_chunk_equals_recurrent_on_any_shape(batch, length, heads, width, depth, regime, lower_bound, seed):
    inputs = make(batch, length, heads, width, depth, regime, seed=seed)
    lower_bound = None if regime == "unbounded" else lower_bound
    assert_close(run(kda_chunk, inputs, lower_bound=lower_bound), run(kda_recurrent, inputs), 1e-11)


@pytest.mark.parametrize("lengths", [[40, 1, 0, 64, 33], [0, 5], [3, 0], [32, 32, 200, 1, 1, 1, 7]])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_packed_sequences(lengths, lower_bound):
    borders = torch.tensor([0, *itertools.accumulate(lengths)])
    inputs = make(1, sum(lengths), 2, 12, 20, sequences=len(lengths))
    expected = run(kda_recurrent, inputs, cu_seqlens=borders)
    assert_close(run(kda_chunk, inputs, cu_seqlens=borders, lower_bound=lower_bound), expected, 1e-12)
    # Each sequence alone, without its neighbours.
    out, states = kda_chunk(*inputs, cu_seqlens=borders, lower_bound=lower_bound)
    for n, (start, stop) in enumerate(itertools.pairwise(borders.tolist())):
        alone = [x[:, start:stop] for x in inputs[:5]]
        alone_out, alone_state = kda_chunk(*alone, inputs[5][n : n + 1], lower_bound=lower_bound)
        torch.testing.assert_close(out[:, start:stop], alone_out, rtol=0, atol=1e-12)
        torch.testing.assert_close(states[n : n + 1], alone_state, rtol=0, atol=1e-12)
    none = kda_chunk(*inputs[:5], cu_seqlens=borders, lower_bound=lower_bound)
    zero = kda_chunk(*inputs[:5], torch.zeros_like(inputs[5]), cu_seqlens=borders, lower_bound=lower_bound)
    assert_close(none, zero, 0.0)


def test_no_tokens():
    inputs = make(2, 0, 2, 4, 6)
    out, state = kda_recurrent(*inputs)
    assert out.shape == (2, 0, 2, 6) and torch.equal(state, inputs[5])
    out, state, *grads = run(kda_chunk, inputs)
    assert out.shape == (2, 0, 2, 6) and torch.equal(state, inputs[5])
    assert grads[5].abs().min() > 0


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_identity_tokens_change_nothing(lower_bound):
    q, k, v, g, beta, state = make(1, 90, 2, 12, 20)
    keep = torch.rand(90, generator=torch.Generator().manual_seed(3)) < 0.6
    blank = ~keep[None, :, None]
    padded = (q, k, v, g.masked_fill(blank[..., None], 0), beta.masked_fill(blank, 0), state)
    out, final = kda_chunk(*padded, lower_bound=lower_bound)
    expected, expected_final = kda_chunk(*(x[:, keep] for x in padded[:5]), state, lower_bound=lower_bound)
    torch.testing.assert_close(out[:, keep], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(final, expected_final, rtol=0, atol=1e-12)
    blank_everywhere = (q, k, v, torch.zeros_like(g), torch.zeros_like(beta), state)
    assert torch.equal(kda_chunk(*blank_everywhere, lower_bound=lower_bound)[1], state)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_all_zero_inputs_have_finite_gradients(lower_bound):
    inputs = [torch.zeros_like(x) for x in make(1, 40, 2, 8, 8, dtype=torch.float32)]
    for x in run(kda_chunk, inputs, lower_bound=lower_bound):
        assert x.isfinite().all()


@pytest.mark.parametrize("splits", [[1, 31, 33, 35], [50, 50], [99, 1]])
def test_continues_from_a_state(splits):
    *inputs, state = make(2, 100, 2, 12, 20)
    whole, final = kda_chunk(*inputs, state, lower_bound=-5.0)
    parts = []
    for part in zip(*(x.split(splits, dim=1) for x in inputs)):
        out, state = kda_chunk(*part, state, lower_bound=-5.0)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=0, atol=1e-12)


def test_blocks_of_heads_do_not_matter(monkeypatch):
    inputs = make(3, 70, 5, 8, 12)
    expected = run(kda_chunk, inputs, lower_bound=-5.0)
    for states_per_block in (1, 2, 4, 7):
        monkeypatch.setattr(kda_layout, "STATE_CACHE", states_per_block * 8 * 12 * 8)
        assert_close(run(kda_chunk, inputs, lower_bound=-5.0), expected, 1e-13, f"{states_per_block} states")


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("borders", [None, [0, 3, 3, 5]])
def test_gradcheck(lower_bound, borders):
    cu_seqlens = None if borders is None else torch.tensor(borders)
    inputs = make(1, 5, 2, 3, 2, sequences=None if borders is None else 3)
    inputs = [x.requires_grad_() for x in inputs]

    def function(*inputs):
        return kda_chunk(*inputs, lower_bound=lower_bound, cu_seqlens=cu_seqlens, scale=0.7)

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("wanted", [("v",), ("g", "initial_state"), ("q", "beta")])
def test_gradients_of_some_inputs(wanted):
    inputs = dict(zip(NAMES, make(1, 40, 2, 8, 8)))
    full = dict(zip(NAMES, run(kda_chunk, tuple(inputs.values()))[2:]))
    leaves = {n: x.clone().requires_grad_(n in wanted) for n, x in inputs.items()}
    out, state = kda_chunk(*leaves.values())
    gen = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=gen, dtype=torch.float64) for x in (out, state)]
    ((out * weights[0]).sum() + (state * weights[1]).sum()).backward()
    for name, leaf in leaves.items():
        if name in wanted:
            torch.testing.assert_close(leaf.grad, full[name], rtol=0, atol=1e-12)
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("output", [0, 1])
def test_gradients_through_one_output(output):
    inputs = [x.requires_grad_() for x in make(1, 40, 2, 8, 8)]
    expected = torch.autograd.grad(kda_recurrent(*inputs)[output].sin().sum(), inputs, allow_unused=True)
    got = torch.autograd.grad(kda_chunk(*inputs)[output].sin().sum(), inputs)
    for name, a, b in zip(NAMES, got, expected):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=0, atol=1e-12, msg=name)


def test_inference_saves_nothing(monkeypatch):
    inputs = [x.requires_grad_() for x in make(1, 40, 2, 8, 8)]

    def fail(*_):
        raise AssertionError("states were saved")

    monkeypatch.setattr(kda_forward, "segment_limit", fail)
    with torch.no_grad():
        assert not kda_chunk(*inputs)[0].requires_grad
    with torch.inference_mode():
        kda_chunk(*inputs)
    with pytest.raises(AssertionError, match="states were saved"):
        kda_chunk(*inputs)


def test_training_saves_inputs_and_one_state_per_segment():
    inputs = [x.requires_grad_() for x in make(1, 1024, 2, 16, 16, dtype=torch.float32)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x, lambda x: x):
        kda_chunk(*inputs)
    segments = 1024 // (kda_layout.CHUNK * kda_layout.SEGMENT) + 1
    assert sum(saved) <= sum(x.nbytes for x in inputs) + segments * inputs[5].nbytes


def test_backward_is_linear_in_length():
    def seconds(length):
        inputs = [x.requires_grad_() for x in make(1, length, 2, 32, 32, dtype=torch.float32)]
        out, _ = kda_chunk(*inputs, lower_bound=-5.0)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            torch.autograd.grad(out.sum(), inputs, retain_graph=True, allow_unused=True)
            times.append(time.perf_counter() - start)
        return min(times)

    seconds(512)
    assert seconds(16384) < 3 * 16 * seconds(1024)  # quadratic would be 256 times


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(dtype):
    inputs = make(2, 70, 2, 16, 24, dtype=torch.float32)
    half = [x.to(dtype) for x in inputs[:5]]
    for function in (kda_recurrent, kda_chunk):
        out, state = function(*half, inputs[5])
        exact_out, exact_state = function(*(x.float() for x in half), inputs[5])
        assert out.dtype == dtype and state.dtype == torch.float32
        assert torch.equal(out, exact_out.to(dtype)) and torch.equal(state, exact_state)
    leaves = [x.requires_grad_() for x in half]
    grads = torch.autograd.grad(kda_chunk(*leaves)[0].float().sum(), leaves)
    wide = [x.detach().float().requires_grad_() for x in half]
    expected = torch.autograd.grad(kda_chunk(*wide)[0].sum(), wide)
    for name, grad, want in zip(NAMES, grads, expected):
        assert grad.dtype == dtype
        # one rounding of the result
        torch.testing.assert_close(grad.float(), want, rtol=2**-8, atol=1e-5, msg=name)


def test_float64_anywhere_computes_in_float64():
    q, k, v, g, beta, state = make(1, 40, 2, 8, 8, dtype=torch.float32)
    assert kda_chunk(q, k, v, g, beta, state.double())[1].dtype == torch.float64
    assert kda_chunk(q, k, v, g.double(), beta)[1].dtype == torch.float64
    out, state32 = kda_chunk(q, k, v, g, beta)
    assert out.dtype == state32.dtype == torch.float32


def test_inputs_need_not_be_contiguous():
    q, k, v, g, beta, state = make(2, 70, 3, 8, 12)

    def shuffled(x):
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    expected = run(kda_chunk, (q, k, v, g, beta, state))
    out, final = kda_chunk(*(shuffled(x) for x in (q, k, v, g, beta, state)))
    torch.testing.assert_close(out, expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(final, expected[1], rtol=0, atol=1e-12)
    one = torch.ones((), dtype=torch.float64).expand(2, 70, 3)
    assert torch.equal(kda_chunk(q, k, v, g, one)[0], kda_chunk(q, k, v, g, one.contiguous())[0])


def test_a_decay_of_minus_infinity_forgets():
    *inputs, state = make(1, 40, 2, 8, 8, dtype=torch.float32)
    inputs[3][:, 17] = -torch.inf
    out, final = kda_chunk(*inputs, state)
    want, want_final = kda_recurrent(*(x.double() for x in inputs), state.double())
    assert (out - want).abs().max() <= 2e-6 * want.abs().max()
    assert (final - want_final).abs().max() <= 2e-6 * want_final.abs().max()


def test_autocast_does_not_lower_the_precision():
    inputs = make(1, 70, 2, 16, 16, dtype=torch.float32)
    token = [x[:, 0] for x in inputs[:5]]
    expected, expected_chunk = kda_recurrent(*inputs), run(kda_chunk, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(kda_recurrent(*inputs), expected, 0.0, "recurrent")
        assert_close(run(kda_chunk, inputs), expected_chunk, 0.0, "chunk")
    states = [inputs[5].clone() for _ in range(2)]
    expected = kda_step(*token, states[0])
    with torch.autocast("cpu", torch.bfloat16):
        got = kda_step(*token, states[1])
    assert torch.equal(got, expected) and torch.equal(*states)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph(dynamic):
    def loss(q, k, v, g, beta, state):
        out, final = kda_chunk(l2norm(q), l2norm(k), v * 2, g, beta, state, lower_bound=-5.0)
        return out.sin().sum() + final.cos().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (70, 33):
        inputs = [x.requires_grad_() for x in make(2, length, 2, 8, 12)]
        got = torch.autograd.grad(compiled(*inputs), inputs)
        for name, a, b in zip(NAMES, got, torch.autograd.grad(loss(*inputs), inputs)):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=name)


def test_operator_registration():
    inputs = [x.requires_grad_() for x in make(1, 40, 2, 8, 12)]
    operator = torch.ops.kimi3_kernels.kda_chunk.default
    torch.library.opcheck(operator, (*inputs, None, 0.3, 32, True))
    borders = torch.tensor([0, 7, 40])
    state = torch.cat([inputs[5].detach()] * 2)
    torch.library.opcheck(operator, (*inputs[:5], state, borders, 0.3, 8, True))


def test_step_equals_recurrent():
    q, k, v, g, beta, state = make(3, 6, 2, 8, 12)
    expected, final = kda_recurrent(q, k, v, g, beta, state, scale=0.3)
    address = state.data_ptr()
    for t in range(6):
        out = kda_step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state, scale=0.3)
        torch.testing.assert_close(out, expected[:, t], rtol=0, atol=1e-13)
    torch.testing.assert_close(state, final, rtol=0, atol=1e-13)
    assert state.data_ptr() == address


def test_step_keeps_the_state_in_float32():
    q, k, v, g, beta, state = make(2, 1, 2, 8, 12, dtype=torch.float32)
    inputs = [x[:, 0].bfloat16() for x in (q, k, v)]
    expected, final = kda_recurrent(*(x[:, None].float() for x in inputs), g, beta, state)
    out = kda_step(*inputs, g[:, 0], beta[:, 0], state)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected[:, 0].bfloat16(), rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(state, final, rtol=0, atol=1e-6)


@pytest.mark.parametrize("states_per_block", [1, 4, 100])
def test_step_in_blocks_of_states(states_per_block, monkeypatch):
    module = sys.modules["kimi3_kernels.kda"]
    monkeypatch.setattr(module, "STEP_CACHE", states_per_block * 8 * 12 * 4)
    monkeypatch.setattr(module, "LOOKUP_BYTES", 0)
    q, k, v, g, beta, state = make(3, 1, 2, 8, 12, dtype=torch.float32)
    expected, final = kda_recurrent(*(x.double() for x in (q, k, v, g, beta, state)))
    out = kda_step(*(x[:, 0] for x in (q, k, v, g, beta)), state)
    torch.testing.assert_close(out.double(), expected[:, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(state.double(), final, rtol=0, atol=1e-6)


def test_step_compiles_in_one_graph():
    q, k, v, g, beta, state = make(2, 1, 2, 8, 12)
    token = [x[:, 0] for x in (q, k, v, g, beta)]
    expected_state = state.clone()
    expected = kda_step(*token, expected_state)
    out = torch.compile(kda_step, fullgraph=True, backend="aot_eager")(*token, state)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(state, expected_state)


def test_gate_formulas():
    gen = torch.Generator().manual_seed(0)
    raw = torch.randn(2, 5, 3, 4, generator=gen, dtype=torch.float64) * 4
    a_log = torch.randn(3, generator=gen, dtype=torch.float64)
    bias = torch.randn(12, generator=gen, dtype=torch.float64)
    drive = raw + bias.reshape(3, 4)
    rate = a_log.exp()[:, None]
    expected = -5 / (1 + torch.exp(-rate * drive))
    torch.testing.assert_close(kda_gate(raw, a_log, bias, -5.0), expected)
    torch.testing.assert_close(kda_gate(raw, a_log, bias, None), -rate * torch.log1p(drive.exp()))
    torch.testing.assert_close(kda_gate(raw, a_log, None, None), -rate * torch.log1p(raw.exp()))
    half = kda_gate(raw.bfloat16(), a_log.float(), bias.float(), -5.0)
    assert half.dtype == torch.float32 and half.min() >= -5 and half.max() <= 0
    torch.testing.assert_close(half, kda_gate(raw.bfloat16().double(), a_log, bias, -5.0).float(), rtol=1e-5, atol=1e-6)


def test_gate_gradients():
    gen = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=gen, dtype=torch.float64).requires_grad_() for s in ((3, 2, 4), (2,), (8,))]
    for bound in (-5.0, None):
        assert torch.autograd.gradcheck(lambda *x, bound=bound: kda_gate(*x, bound), inputs)


def test_l2norm_of_zero_has_a_finite_gradient():
    x = torch.zeros(2, 4, requires_grad=True)
    y = l2norm(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, torch.zeros(2, 4))
    torch.testing.assert_close(grad, torch.full((2, 4), 1e3))  # 1 / sqrt(eps)
    unit = l2norm(torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16))
    assert unit.dtype == torch.float32
    torch.testing.assert_close(unit, torch.tensor([[0.6, 0.8]]))


@pytest.mark.parametrize("function", [kda_recurrent, kda_chunk])
def test_errors_name_the_argument(function):
    q, k, v, g, beta, state = make(2, 6, 2, 4, 3)
    with pytest.raises(ValueError, match=r"beta has shape \(2, 6\), expected \(2, 6, 2\)"):
        function(q, k, v, g, beta[..., 0], state)
    with pytest.raises(ValueError, match="g has shape"):
        function(q, k, v, g[..., :3], beta, state)
    with pytest.raises(ValueError, match=r"initial_state has shape .*expected \(2, 2, 4, 3\)"):
        function(q, k, v, g, beta, state.transpose(2, 3))
    with pytest.raises(ValueError, match="expected B = 1"):
        function(q, k, v, g, beta, cu_seqlens=torch.tensor([0, 6]))
    one = [x[:1] for x in (q, k, v, g, beta)]
    for borders in ([0, 5], [1, 6], [0, 4, 3, 6]):
        with pytest.raises(ValueError, match="from 0 to T = 6"):
            function(*one, cu_seqlens=torch.tensor(borders))


def test_more_errors():
    q, k, v, g, beta, state = make(2, 6, 2, 4, 3)
    with pytest.raises(ValueError, match="lower_bound is 5"):
        kda_chunk(q, k, v, g, beta, lower_bound=5.0)
    with pytest.raises(ValueError, match="state has shape"):
        kda_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state.transpose(2, 3).contiguous().transpose(2, 3))
    with pytest.raises(ValueError, match="A_log has shape"):
        kda_gate(g, torch.zeros(3))
    with pytest.raises(ValueError, match="dt_bias has 3 elements"):
        kda_gate(g, torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="lower_bound is 1"):
        kda_gate(g, torch.zeros(2), None, 1.0)
