"""Bytes of a cache: predicted from a config, measured on the tensors, both the same."""

import pytest
import torch

from modeling_kimi3 import KimiK3Cache, KimiK3Config
from modeling_kimi3.cache_size import cache_size, official_cache_size, transformers_cache_size


def tokens(seed, *shape):
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def fill(model, cache, ids, steps):
    model(ids, cache=cache)
    for _ in range(steps):
        model(ids[:, :1], cache=cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("rollback", [0, 5, 16])
def test_measured_equals_predicted(small_model, dtype, batch, rollback):
    model = small_model().to(dtype)
    cache = KimiK3Cache(model.config, rollback=rollback)
    fill(model, cache, tokens(1, batch, 30), 40)
    measured = cache.summary()
    predicted = cache_size(model.config, 70, batch, dtype, rollback)
    for ours, theirs in zip(measured.layers, predicted.layers, strict=True):
        assert (ours.kind, ours.constant, ours.per_token, ours.tokens, ours.rollback) == (
            theirs.kind,
            theirs.constant,
            theirs.per_token,
            theirs.tokens,
            theirs.rollback,
        )
    assert cache.nbytes == measured.nbytes == predicted.nbytes
    assert measured.spare > 0
    assert predicted.spare == 0


def test_a_window_takes_no_more_than_predicted(small_model):
    model = small_model()
    for length, steps in [(1, 0), (5, 0), (300, 0), (300, 3), (3, 16), (3, 17)]:
        cache = KimiK3Cache(model.config)
        fill(model, cache, tokens(1, 1, length), steps)
        assert cache.summary().rollback <= cache_size(model.config, length, dtype=torch.float32).rollback


def test_spare_capacity_is_what_the_buffer_has_beyond_the_tokens(small_model):
    model = small_model()
    cache = KimiK3Cache(model.config)
    fill(model, cache, tokens(1, 1, 9), 0)
    size = cache.summary().layers[2]
    assert size.spare + size.nbytes == cache.layers[2].joined.untyped_storage().nbytes()


def test_an_empty_cache(small_config):
    cache = KimiK3Cache(small_config())
    assert cache.nbytes == 0
    assert cache.summary().rollback == 0


def test_the_released_model():
    """The figures of the specification: 6.29 MB of state and 3*12288*3 numbers of tail a layer, 576 a token."""
    config = KimiK3Config()
    assert (config.num_hidden_layers, config.num_attention_heads, config.kda_num_heads) == (93, 96, 96)
    size = cache_size(config, 2**20, dtype=torch.bfloat16)
    kda = [layer for layer in size.layers if layer.kind == "linear_attention"]
    mla = [layer for layer in size.layers if layer.kind == "full_attention"]
    assert (len(kda), len(mla)) == (69, 24)
    assert kda[0].constant == 96 * 128 * 128 * 4 + 2 * 3 * 12288 * 3
    assert mla[0].per_token == 576 * 2
    assert size.nbytes == 69 * kda[0].constant + 24 * 2**20 * 1152
    official = official_cache_size(config, 2**20, dtype=torch.bfloat16)
    assert official.per_token == 24 * 30720 * 2
    assert official.per_token / size.per_token == pytest.approx(53.3, abs=0.1)
    assert transformers_cache_size(config, 2**20, dtype=torch.bfloat16).per_token == size.per_token


@pytest.mark.parametrize(
    "wrong", [{"length": -1}, {"length": 1, "rollback": -1}, {"length": 1, "batch_size": 0}], ids=str
)
def test_refusals(small_config, wrong):
    with pytest.raises(ValueError, match="cache_size takes length >= 0"):
        cache_size(small_config(), **wrong)


def test_the_table(small_config):
    text = str(cache_size(small_config(), 100, dtype=torch.float32))
    assert len(text.splitlines()) == 7
    assert text.splitlines()[-1].startswith("all")
