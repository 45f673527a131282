"""The short convolution: against a sum written out, cut anywhere, padded, packed; gradients; the one-token step."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from kimi3_kernels import blocks, short_conv, short_conv_step

CHANNELS = 3
PROPERTY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of eight tokens, so that short sequences cross block borders."""
    monkeypatch.setattr(blocks, "CPU_ELEMENTS", 8 * CHANNELS)


def by_hand(x, weight, state=None, activation="silu"):
    """The sum of the definition, one token and one tap at a time, on one sequence `[T, C]`; state `[C, W-1]`."""
    channels, width = weight.shape[0], weight.shape[-1] - 1
    past = x.new_zeros(channels, width) if state is None else state
    line = [*past.unbind(-1), *x.unbind(0)]
    taps = weight.reshape(channels, -1)
    rows = [sum(taps[:, width - j] * line[width + t - j] for j in range(width + 1)) for t in range(len(x))]
    y = torch.stack(rows) if rows else x.new_zeros(0, channels)
    end = torch.stack(line[len(line) - width :], dim=-1) if width else past
    return (F.silu(y) if activation == "silu" else y), end


def make(batch, time, taps=4, seed=0, state=True, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return (
        random(batch, time, CHANNELS),
        random(CHANNELS, taps),
        random(batch, CHANNELS, taps - 1) if state else None,
    )


def gradients(outputs, inputs, seed=1):
    """Of a random weighting of all outputs."""
    generator = torch.Generator().manual_seed(seed)
    loss = sum((o * torch.randn(o.shape, generator=generator, dtype=o.dtype)).sum() for o in outputs)
    loss = loss + sum(0 * x.sum() for x in inputs)  # outputs of no tokens have no graph
    return torch.autograd.grad(loss, inputs)


def assert_same(actual, expected):
    for value, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("time", [0, 1, 2, 3, 8, 9, 21])
@pytest.mark.parametrize("with_state", [True, False])
def test_values_and_gradients(activation, taps, time, with_state):
    x, weight, state = make(2, time, taps, state=with_state)
    inputs = [t for t in (x, weight, state) if t is not None]
    outputs = short_conv(x, weight, state, activation=activation)
    rows = [by_hand(x[b], weight, None if state is None else state[b], activation) for b in range(2)]
    expected = [torch.stack(parts) for parts in zip(*rows)]
    assert_same(outputs, expected)
    assert_same(gradients(outputs, inputs), gradients(expected, inputs))


def test_is_torchs_convolution():
    x, weight, _ = make(2, 13, state=False)
    y, _ = short_conv(x, weight, activation=None)
    conv = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weight.unsqueeze(1), groups=CHANNELS)
    assert_same([y], [conv.transpose(1, 2)])


@pytest.mark.parametrize("activation", ["silu", None])
def test_gradcheck(activation):
    assert torch.autograd.gradcheck(lambda *a: short_conv(*a, activation=activation), make(2, 11))
    x, weight, state = make(2, 11)
    lengths = torch.tensor([2, 11])
    assert torch.autograd.gradcheck(lambda *a: short_conv(*a, lengths=lengths), (x, weight, state))
    borders = torch.tensor([0, 0, 5, 6, 6, 8, 11])
    packed = (x[:1].detach().requires_grad_(), weight, make(6, 1)[2])
    assert torch.autograd.gradcheck(lambda *a: short_conv(*a, cu_seqlens=borders), packed)


@pytest.mark.parametrize("subset", [(0,), (1,), (2,), (0, 2)])
def test_requires_grad_subsets(subset):
    tensors = [t.detach() for t in make(2, 11)]
    inputs = [tensors[index].requires_grad_() for index in subset]
    actual = gradients(short_conv(*tensors), inputs)
    rows = [by_hand(tensors[0][b], tensors[1], tensors[2][b]) for b in range(2)]
    assert_same(actual, gradients([torch.stack(parts) for parts in zip(*rows)], inputs))


@PROPERTY
@given(
    time=st.integers(0, 30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    taps=st.integers(2, 5),
    seed=st.integers(0, 99),
)
def test_split_anywhere_equals_whole(time, cuts, taps, seed):
    x, weight, state = make(2, time, taps, seed)
    whole = short_conv(x, weight, state)
    parts, running = [], state
    edges = [0, *sorted(min(cut, time) for cut in cuts), time]
    for start, stop in itertools.pairwise(edges):
        y, running = short_conv(x[:, start:stop], weight, running)
        parts.append(y)
    outputs = (torch.cat(parts, dim=1), running)
    assert_same(outputs, whole)
    assert_same(gradients(outputs, (x, weight, state)), gradients(whole, (x, weight, state)))


@PROPERTY
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4), pad=st.integers(0, 5), seed=st.integers(0, 99))
def test_right_padding_changes_nothing(lengths, pad, seed):
    time = max(lengths) + pad
    x, weight, state = make(len(lengths), time, seed=seed)
    y, new_state = short_conv(x, weight, state, lengths=torch.tensor(lengths))
    outputs = [*(y[b, :n] for b, n in enumerate(lengths)), *new_state]
    rows = [short_conv(x[b : b + 1, :n], weight, state[b : b + 1]) for b, n in enumerate(lengths)]
    expected = [*(row[0][0] for row in rows), *(row[1][0] for row in rows)]
    assert_same(outputs, expected)
    actual, wanted = gradients(outputs, (x, weight, state)), gradients(expected, (x, weight, state))
    assert_same(actual, wanted)
    assert all((actual[0][b, n:] == 0).all() for b, n in enumerate(lengths))


@PROPERTY
@given(
    lengths=st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 4, 7, 17]), min_size=1, max_size=7),
    with_state=st.booleans(),
    seed=st.integers(0, 99),
)
def test_packed_equals_separate(lengths, with_state, seed):
    x, weight, _ = make(1, sum(lengths), seed=seed)
    state = make(len(lengths), 1, seed=seed + 1)[2] if with_state else None
    inputs = [t for t in (x, weight, state) if t is not None]
    edges = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    outputs = short_conv(x, weight, state, cu_seqlens=torch.tensor(edges, dtype=torch.int32))
    rows = [
        short_conv(x[:, start:stop], weight, None if state is None else state[n : n + 1])
        for n, (start, stop) in enumerate(itertools.pairwise(edges))
    ]
    expected = [torch.cat([row[0] for row in rows], dim=1), torch.cat([row[1] for row in rows])]
    assert_same(outputs, expected)
    assert_same(gradients(outputs, inputs), gradients(expected, inputs))


@PROPERTY
@given(
    batch=st.integers(1, 3), time=st.integers(1, 9), taps=st.integers(1, 5), activation=st.sampled_from(["silu", None])
)
def test_steps_equal_whole(batch, time, taps, activation):
    x, weight, state = (t.detach() for t in make(batch, time, taps))
    y, new_state = short_conv(x, weight, state, activation=activation)
    running = state.clone()
    steps = [short_conv_step(token, weight, running, activation) for token in x.unbind(1)]
    assert_same([torch.stack(steps, dim=1), running], [y, new_state])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    """Float32 inside: one rounding of the result is all that half precision adds, with float32 taps unrounded."""
    x, weight, state = make(2, 50, dtype=dtype)
    weight = weight.detach().float() * 1.01
    y, new_state = short_conv(x, weight, state)
    step = short_conv_step(x[:, 0].detach(), weight, state.detach().clone())
    exact, _ = short_conv(x.double(), weight.double(), state.double())
    assert y.dtype == new_state.dtype == step.dtype == dtype
    # Four products and SiLU in float32 come to a few of its roundings; half precision adds half a unit of its own.
    bound = 4e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2 * 1.01
    error = (y.double() - exact).abs() / exact.abs().clamp_min(1e-2)
    assert error.max() <= bound
    assert ((step.double() - exact[:, 0]).abs() / exact[:, 0].abs().clamp_min(1e-2)).max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_precision(dtype):
    x, weight, state = make(2, 300, dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, state)]
    upstream = make(2, 300, seed=1, dtype=dtype)[0].detach()
    grads = torch.autograd.grad(short_conv(x, weight, state)[0], (x, weight, state), upstream)
    expected = torch.autograd.grad(short_conv(*wide)[0], wide, upstream.double())
    for grad, want in zip(grads, expected):
        bound = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
        assert grad.dtype == dtype
        assert (grad.double() - want).norm() <= bound * want.norm()


def test_autocast_changes_nothing():
    inputs = make(2, 20, dtype=torch.float32)

    def values():
        outputs = short_conv(*inputs)
        return *outputs, *gradients(outputs, inputs), short_conv_step(inputs[0][:, 0], inputs[1], inputs[2].clone())

    plain = values()
    with torch.autocast("cpu", torch.bfloat16):
        cast = values()
    assert all(value.dtype == torch.float32 and torch.equal(value, want) for value, want in zip(cast, plain))


def test_backward_keeps_its_inputs_only():
    x, weight, state = make(2, 50, dtype=torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        short_conv(x, weight, state)
    own = {t.untyped_storage().data_ptr() for t in (x, weight, state)}
    assert all(t.untyped_storage().data_ptr() in own for t in kept if t.numel() >= x.numel())


def test_strided_input_and_released_weight_shape():
    x, weight, state = make(2, 26)
    strided = torch.cat([x, x], dim=-1)[:, ::2, CHANNELS:]
    expected = short_conv(x[:, ::2].contiguous(), weight, state)
    assert_same(short_conv(strided, weight.unsqueeze(1), state), expected)


@pytest.mark.parametrize("kind", ["plain", "lengths", "packed"])
def test_compiles_whole_with_backward(kind):
    x, weight, state = make(2, 20, dtype=torch.float32)
    options = {"lengths": {"lengths": torch.tensor([4, 20])}, "packed": {"cu_seqlens": torch.tensor([0, 1, 1, 20])}}
    options = options.get(kind, {})
    if kind == "packed":
        x, state = make(1, 20, dtype=torch.float32)[0], make(3, 1, dtype=torch.float32)[2]

    def call(x, weight, state):
        return short_conv(x, weight, state, **options)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    inputs = (x, weight, state)
    expected = call(*inputs)
    outputs = compiled(*inputs)
    for value, want in zip((*outputs, *gradients(outputs, inputs)), (*expected, *gradients(expected, inputs))):
        torch.testing.assert_close(value, want)


def test_step_compiles_whole():
    x, weight, state = (t.detach() for t in make(2, 1, dtype=torch.float32))
    other = state.clone()
    step = torch.compile(short_conv_step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(x[:, 0], weight, state), short_conv_step(x[:, 0], weight, other))
    torch.testing.assert_close(state, other)


def test_operator_passes_opcheck():
    x, weight, state = make(2, 9)
    torch.library.opcheck(torch.ops.kimi3_kernels.short_conv, (x, weight, state, None, True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "gelu"}, "activation is 'gelu'"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens takes a batch of one"),
        ({"lengths": torch.tensor([5])}, "lengths has shape"),
        ({"state": torch.zeros(2, CHANNELS, 4)}, "state has shape"),
        ({"weight": torch.zeros(CHANNELS + 1, 4)}, "weight has shape"),
        ({"weight": torch.zeros(CHANNELS, 2, 2)}, "weight has shape"),
    ],
)
def test_refuses(change, message):
    arguments = {"x": torch.zeros(2, 5, CHANNELS), "weight": torch.zeros(CHANNELS, 4), **change}
    with pytest.raises(ValueError, match=message):
        short_conv(**arguments)
    if "state" in change or "weight" in change:
        state = arguments.get("state", torch.zeros(2, CHANNELS, 3))
        with pytest.raises(ValueError, match=message):
            short_conv_step(arguments["x"][:, 0], arguments["weight"], state)
