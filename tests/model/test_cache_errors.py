"""A cache that does not fit is refused before any layer of it moves."""

import pytest
import torch

from modeling_kimi3 import KimiK3Cache


@pytest.fixture(scope="module")
def model(small_model):
    return small_model(seed=5)


def tokens(seed, *shape):
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(model, cache, ids):
    return model(ids, cache=cache).logits


def filled(model, *shape):
    cache = KimiK3Cache(model.config)
    feed(model, cache, tokens(1, *shape))
    return cache


def contents(cache):
    return [tensor.clone() for layer in cache.layers for tensor in layer.export().values()]


def assert_unchanged(cache, before):
    assert all(torch.equal(now, then) for now, then in zip(contents(cache), before, strict=True))


def test_another_batch_size(model):
    cache = filled(model, 2, 5)
    before = contents(cache)
    with pytest.raises(ValueError, match="holds a batch of 2 rows, but the input has 3"):
        feed(model, cache, tokens(1, 3, 1))
    assert_unchanged(cache, before)
    assert [layer.get_seq_length() for layer in cache.layers] == [5] * 5
    feed(model, cache, tokens(2, 2, 1))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"kv_lora_rank": 24}, "kv_lora_rank=20, but the model has kv_lora_rank=24"),
        ({"linear": {"num_heads": 3}}, "kda_num_heads=2, but the model has kda_num_heads=3"),
        ({"linear": {"kda_layers": [1, 2, 3, 4], "full_attn_layers": [5]}}, "layer_types="),
    ],
)
def test_another_config(model, small_model, overrides, message):
    cache = filled(model, 1, 5)
    before = contents(cache)
    with pytest.raises(ValueError, match=message):
        feed(small_model(**overrides), cache, tokens(2, 1, 1))
    assert_unchanged(cache, before)


def test_an_equal_config_is_accepted(model, small_model):
    feed(small_model(seed=6), filled(model, 1, 5), tokens(2, 1, 1))


def test_another_device(model):
    cache = filled(model, 1, 5)
    with pytest.raises(ValueError, match="holds tensors on cpu, but the model is on cuda:1"):
        cache.begin_forward(model.config, 1, torch.device("cuda:1"))
    feed(model, cache, tokens(2, 1, 1))


def test_a_pass_that_raised_half_way(model, monkeypatch, relative_error):
    cache = filled(model, 1, 20)
    snapshot = cache.snapshot()

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[3], "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            feed(model, cache, tokens(2, 1, 2))
    for use in (lambda: feed(model, cache, tokens(3, 1, 1)), lambda: cache.crop(-1), cache.snapshot):
        with pytest.raises(ValueError, match="left this cache half advanced"):
            use()
    cache.restore(snapshot)
    whole = model(torch.cat([tokens(1, 1, 20), tokens(3, 1, 2)], dim=1), use_cache=False).logits[:, -2:]
    assert relative_error(feed(model, cache, tokens(3, 1, 2)), whole) < 1e-4
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[4], "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            feed(model, cache, tokens(2, 1, 2))
    cache.reset()
    feed(model, cache, tokens(3, 1, 4))


def test_a_wrong_mask_leaves_the_cache_usable(model):
    cache = filled(model, 1, 5)
    with pytest.raises(ValueError, match="attention_mask must cover"):
        model(tokens(2, 1, 1), cache=cache, attention_mask=torch.ones(1, 3))
    feed(model, cache, tokens(2, 1, 1))
