"""Quantised latents: how far they are from what was given, and that everything else of the cache still holds."""

import pytest
import torch

from modeling_kimi3 import KimiK3Cache
from modeling_kimi3.cache_quantized import GroupQuantizer, KimiK3QuantizedCache


@pytest.fixture(scope="module")
def model(small_model):
    return small_model(seed=5)


def tokens(seed, *shape):
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(model, cache, ids):
    return model(ids, cache=cache).logits


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [1, 28, 64, 100, 576])
def test_within_half_a_step(bits, width):
    quantizer = GroupQuantizer(bits, 32)
    x = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0))
    back = quantizer.unpack(quantizer.pack(x), width, torch.float32)
    ranges = torch.nn.functional.pad(x, (0, -width % 32)).unflatten(-1, (-1, 32))
    step = (ranges.amax(-1) - ranges.amin(-1)) / (2**bits - 1)
    bound = step.repeat_interleave(32, dim=-1)[..., :width] / 2
    assert ((back - x).abs() <= bound * (1 + 1e-4) + 1e-6).all()


def test_constant_groups_are_exact():
    quantizer = GroupQuantizer(4, 32)
    x = torch.full((1, 3, 32), 0.7)
    assert torch.equal(quantizer.unpack(quantizer.pack(x), 32, torch.float32), x)


def test_bytes_at_the_released_width():
    """576 numbers a token: 1152 bytes in bfloat16, 576 + 9 * 8 with 8 bits, 288 + 9 * 8 with 4."""
    x = torch.zeros(1, 1, 576)
    assert GroupQuantizer(8).pack(x).shape[-1] == 648
    assert GroupQuantizer(4).pack(x).shape[-1] == 360


@pytest.mark.parametrize(("bits", "tolerance"), [(8, 1e-2), (4, 1e-1)])
def test_logits_are_near(small_model, relative_error, bits, tolerance):
    """Rounding by 1/510 and 1/30 of a group's range, through two softmax layers; another past would be near 1.

    With all experts chosen, as a router near a tie may choose another expert after any rounding.
    """
    model = small_model(seed=5, num_experts_per_token=8)
    ids = tokens(1, 2, 90)
    cache = KimiK3QuantizedCache(model.config, bits=bits, recent=8)
    feed(model, cache, ids[:, :80])
    logits = torch.cat([feed(model, cache, ids[:, t : t + 1]) for t in range(80, 90)], dim=1)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[:, 80:]
    error = relative_error(logits, whole)
    assert 1e-6 < error < tolerance


def test_recent_tokens_are_exact(model, relative_error):
    ids = tokens(1, 1, 60)
    quantised, plain = KimiK3QuantizedCache(model.config, recent=32), KimiK3Cache(model.config)
    assert relative_error(feed(model, quantised, ids), feed(model, plain, ids)) < 1e-6
    assert torch.equal(quantised.layers[2].joined, plain.layers[2].joined)


def test_rollback_snapshots_and_forks(model, relative_error):
    ids = tokens(1, 1, 80)
    cache = KimiK3QuantizedCache(model.config, recent=8)
    feed(model, cache, ids)
    snapshot = cache.snapshot()
    expected = feed(model, cache, tokens(2, 1, 3))
    cache.crop(-3)
    assert cache.get_seq_length() == 80
    assert relative_error(feed(model, cache, tokens(2, 1, 3)), expected) < 1e-4
    cache.restore(snapshot)
    forked = cache.fork(2)
    assert relative_error(feed(model, forked, tokens(2, 1, 3).repeat(2, 1))[1:], expected) < 1e-4
    assert relative_error(feed(model, cache, tokens(2, 1, 3)), expected) < 1e-4
    cache.restore(snapshot)
    cache.crop(-16)
    assert cache.get_seq_length() == 64


def test_generate(model):
    ids = tokens(1, 2, 40)
    kwargs = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    out = model.generate(ids, cache_implementation="quantized", cache_config={"bits": 8, "recent": 16}, **kwargs)
    assert type(out.cache) is KimiK3QuantizedCache
    assert out.cache.layers[2].recent == 16
    assert out.cache.get_seq_length() == 43
    beams = model.generate(ids, cache_implementation="quantized", num_beams=2, **kwargs)
    assert beams.sequences.shape == (2, 44)


def test_refusals(model, tmp_path):
    with pytest.raises(ValueError, match="bits must be 4 or 8, got 3"):
        KimiK3QuantizedCache(model.config, bits=3)
    with pytest.raises(ValueError, match="group must be an even number"):
        KimiK3QuantizedCache(model.config, group=7)
    with pytest.raises(ValueError, match="recent must be at least 1"):
        KimiK3QuantizedCache(model.config, recent=0)
    cache = KimiK3QuantizedCache(model.config)
    feed(model, cache, tokens(1, 1, 3))
    with pytest.raises(ValueError, match="quantised cache cannot be saved"):
        cache.save(tmp_path / "c")
    with pytest.raises(ValueError, match="cache_config"):
        model.generate(tokens(1, 1, 3), cache_implementation="quantized", cache_config={"nbits": 4}, max_new_tokens=1)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="offloaded' needs an accelerator"):
            model.generate(tokens(1, 1, 3), cache_implementation="offloaded", max_new_tokens=1)
