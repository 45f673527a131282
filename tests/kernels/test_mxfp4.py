"""MXFP4: every code with every scale, bit for bit; the encoder against a search for the nearest value; real files."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from kimi3_kernels import blocks, mxfp4_decode, mxfp4_decode_ref, mxfp4_encode

# The sixteen values, written out here on their own.
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def every_code_and_scale():
    """`[256, 16]` bytes and `[256, 1]` scales: row s holds all sixteen codes twice, in both nibbles, at scale s."""
    code = torch.arange(16, dtype=torch.uint8)
    return (code | (code.flip(0) << 4)).expand(256, 16).contiguous(), torch.arange(256).to(torch.uint8).unsqueeze(1)


def exact(scale_byte):
    """The row of `every_code_and_scale` in float64, by Python's own arithmetic."""
    if scale_byte == 255:
        return torch.full((32,), float("nan"), dtype=torch.float64)
    size = 2.0 ** (scale_byte - 127)
    pairs = [(VALUES[code] * size, VALUES[15 - code] * size) for code in range(16)]
    return torch.tensor(pairs, dtype=torch.float64).flatten()


def random_packed(*shape, seed=0, scales=(0, 255)):
    generator = torch.Generator().manual_seed(seed)
    *leading, columns = shape
    packed = torch.randint(0, 256, (*leading, columns // 2), generator=generator).to(torch.uint8)
    return packed, torch.randint(*scales, (*leading, columns // 32), generator=generator).to(torch.uint8)


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    bits = BITS[actual.dtype]
    assert torch.equal(actual.view(bits).masked_fill(nan, 0), expected.view(bits).masked_fill(nan, 0))


def test_reference_is_the_definition():
    assert_same_bits(mxfp4_decode_ref(*every_code_and_scale()), torch.stack([exact(s) for s in range(256)]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_and_scale(dtype):
    """Also what is subnormal in the result (scale bytes 0 and 1), beyond its range, a negative zero, or NaN."""
    packed, scale = every_code_and_scale()
    decoded = mxfp4_decode(packed, scale, dtype)
    assert_same_bits(decoded, torch.stack([exact(s) for s in range(256)]).to(dtype))
    if dtype in (torch.float32, torch.bfloat16):
        assert decoded[0, 2] == 2.0**-128 and decoded[255].isnan().all()
        in_range = decoded[:253].double()  # 6 * 2^125 is the largest that these two hold
        assert torch.equal(in_range, mxfp4_decode_ref(packed, scale)[:253])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(32,), (1, 32), (5, 64), (2, 3, 7, 96), (0, 64), (3, 0)])
def test_shapes_in_several_blocks(monkeypatch, dtype, shape):
    monkeypatch.setattr(blocks, "CPU_ELEMENTS", 2 * 96)
    packed, scale = random_packed(*shape)
    assert_same_bits(mxfp4_decode(packed, scale, dtype), mxfp4_decode_ref(packed, scale).to(dtype))


def test_low_nibble_is_the_even_column():
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 1] = 0x2 | (0x7 << 4)
    decoded = mxfp4_decode(packed, torch.tensor([[128]], dtype=torch.uint8), torch.float32)
    assert decoded[0, 2] == 2.0 and decoded[0, 3] == 12.0
    assert decoded.count_nonzero() == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_into_out(dtype):
    packed, scale = random_packed(4, 64)
    buffer = torch.full((3, 4, 64), 7.0, dtype=dtype)
    assert mxfp4_decode(packed, scale, dtype, out=buffer[1]) is not None
    assert_same_bits(buffer[1], mxfp4_decode(packed, scale, dtype))
    assert (buffer[0] == 7).all() and (buffer[2] == 7).all()


def test_out_may_begin_at_an_odd_place():
    packed, scale = random_packed(2, 32)
    out = torch.empty(65, dtype=torch.float32)[1:].view(2, 32)
    assert_same_bits(mxfp4_decode(packed, scale, torch.float32, out=out), mxfp4_decode(packed, scale, torch.float32))


def test_reads_strided_and_e8m0_input():
    packed, scale = random_packed(6, 64)
    expected = mxfp4_decode(packed, scale, torch.float32)
    wide = torch.stack([packed, packed + 1], dim=-1)[..., 0]
    assert not wide.is_contiguous()
    assert_same_bits(mxfp4_decode(wide, scale.view(torch.float8_e8m0fnu), torch.float32), expected)


def test_golden_experts(golden):
    """Every packed tensor of a directory in the released layout, against the reference in float64."""
    tensors = {}
    for shard in golden("k3-tiny-text").glob("model-*.safetensors"):
        tensors.update(load_file(shard))
    names = [name for name in tensors if name.endswith("weight_packed")]
    assert len(names) > 100
    for name in names:
        packed, scale = tensors[name], tensors[name.removesuffix("packed") + "scale"]
        exact_values = mxfp4_decode_ref(packed, scale)
        for dtype in (torch.bfloat16, torch.float32):
            assert torch.equal(mxfp4_decode(packed, scale, dtype).double(), exact_values)
        assert torch.equal(mxfp4_decode_ref(*mxfp4_encode(exact_values)), exact_values)


def nearest(values, scale_byte):
    """Nearest of the sixteen values at a scale, by search; of two as near, the one with the even code."""
    size = 2.0 ** (scale_byte - 127)
    grid = torch.tensor(VALUES[:8], dtype=torch.float64) * size
    distance = (values.abs().unsqueeze(-1) - grid).abs()
    least = distance.amin(dim=-1, keepdim=True)
    codes = torch.arange(8)
    # Odd codes lose ties: at most two neighbours are as near, and one of them is even.
    code = torch.where(distance == least, codes % 2 * 8 + codes, 99).amin(dim=-1) % 8
    return torch.copysign(grid[code], values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 2.0**-10, 3.7, 2.0**13])
def test_encode_rounds_to_nearest_even(dtype, size):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(50, 64, generator=generator) * size).to(dtype)
    packed, scale = mxfp4_encode(weight)
    groups = weight.double().unflatten(-1, (-1, 32))
    expected_scale = groups.abs().amax(-1).log2().floor().long() - 2 + 127
    assert torch.equal(scale.long(), expected_scale)
    expected = torch.stack([nearest(g, int(s)) for g, s in zip(groups.flatten(0, 1), scale.flatten())])
    assert_same_bits(mxfp4_decode_ref(packed, scale), expected.view(50, 64))


def test_encode_ties_and_saturation():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9]
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    weight = torch.tensor([*ties, *(-t for t in ties), *[0.0] * 16])
    packed, scale = mxfp4_encode(weight)
    assert scale.tolist() == [127]
    assert mxfp4_decode(packed, scale, torch.float32)[:16].tolist() == [*even, *(-e for e in even)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.integers(0, 254))
def test_encode_returns_what_was_decoded(seed, scale):
    packed, _ = random_packed(3, 64, seed=seed)
    scales = torch.full((3, 2), scale, dtype=torch.uint8)
    scales[1] = max(scale - 1, 0)
    values = mxfp4_decode_ref(packed, scales)
    assert_same_bits(mxfp4_decode_ref(*mxfp4_encode(values)), values)
    if scale < 253:
        for dtype in (torch.float32, torch.bfloat16):
            assert_same_bits(mxfp4_decode(*mxfp4_encode(values.to(dtype)), dtype), values.to(dtype))


def test_encode_every_code_and_scale():
    values = mxfp4_decode_ref(*every_code_and_scale())
    packed, scale = mxfp4_encode(values)
    assert_same_bits(mxfp4_decode_ref(packed, scale), values)
    # Each row has the code of 6, so here the bytes come back as well.
    assert torch.equal(scale, every_code_and_scale()[1])
    assert torch.equal(packed[:255], every_code_and_scale()[0][:255])


def test_encode_extremes():
    weight = torch.zeros(5, 32, dtype=torch.float64)
    weight[1, 3] = float("nan")
    weight[2, 4] = float("-inf")
    weight[3, 5] = 2.0**200
    weight[4, 6] = -(2.0**-140)
    packed, scale = mxfp4_encode(weight)
    assert scale.flatten().tolist() == [0, 255, 255, 254, 0]
    decoded = mxfp4_decode_ref(packed, scale)
    assert (decoded[0] == 0).all() and decoded[1].isnan().all() and decoded[2].isnan().all()
    assert decoded[3, 5] == 6 * 2.0**127 and decoded[4, 6] == 0 and decoded[4, 6].signbit()


def test_encode_float32_subnormals():
    weight = torch.zeros(1, 32)
    weight[0, :3] = torch.tensor([2.0**-126, 2.0**-128, -(2.0**-127)])
    assert torch.equal(mxfp4_decode(*mxfp4_encode(weight), torch.float32), weight)


def test_encode_in_several_blocks_of_strided_input(monkeypatch):
    weight = torch.randn(4, 64, 9, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    whole = mxfp4_encode(weight.contiguous())
    monkeypatch.setattr(blocks, "CPU_ELEMENTS", 2 * 64)
    for part, expected in zip(mxfp4_encode(weight), whole):
        assert torch.equal(part, expected)


def test_compiles_whole():
    packed, scale = random_packed(4, 64, scales=(100, 140))

    def product(packed, scale, x, buffer):
        weight = mxfp4_decode(packed, scale, torch.float32)
        mxfp4_decode(packed, scale, torch.float32, out=buffer)
        return x @ weight.t(), mxfp4_encode(weight + 1)

    x, buffer, other = torch.ones(2, 64), torch.empty(4, 64), torch.empty(4, 64)
    actual = torch.compile(product, fullgraph=True, backend="aot_eager")(packed, scale, x, buffer)
    expected = product(packed, scale, x, other)
    assert torch.equal(actual[0], expected[0]) and torch.equal(buffer, other)
    assert all(torch.equal(a, b) for a, b in zip(actual[1], expected[1]))


def test_works_in_inference_mode_and_under_autocast():
    packed, scale = random_packed(2, 32)
    expected = mxfp4_decode_ref(packed, scale).bfloat16()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(mxfp4_decode(packed, scale, torch.bfloat16).clone(), expected)
    assert_same_bits(mxfp4_decode(packed, scale, torch.bfloat16), expected)


BYTES = torch.zeros(2, 16, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((BYTES.int(), BYTES[:, :1], torch.float32), TypeError, "packed is torch.int32"),
        ((BYTES, BYTES[:, :1].float(), torch.float32), TypeError, "scale is torch.float32"),
        ((BYTES, BYTES[:, :1], torch.int32), TypeError, "dtype is torch.int32"),
        ((BYTES, BYTES[:, :2], torch.float32), ValueError, "scale has shape"),
        ((BYTES, BYTES[:1, :1], torch.float32), ValueError, "scale has shape"),
        ((BYTES, BYTES[:, :1], torch.float32, torch.empty(2, 16)), ValueError, "out is"),
        ((BYTES, BYTES[:, :1], torch.float32, torch.empty(2, 32).double()), ValueError, "out is"),
        ((BYTES, BYTES[:, :1], torch.float32, torch.empty(32, 2).t()), ValueError, "out is"),
    ],
)
def test_decode_refuses(arguments, error, message):
    out = arguments[3] if len(arguments) == 4 else None
    with pytest.raises(error, match=message):
        mxfp4_decode(*arguments[:3], out=out)


@pytest.mark.parametrize("weight, error", [(torch.zeros(2, 33), ValueError), (torch.zeros(2, 32).int(), TypeError)])
def test_encode_refuses(weight, error):
    with pytest.raises(error, match="weight "):
        mxfp4_encode(weight)
