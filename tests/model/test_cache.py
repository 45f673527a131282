"""`KimiK3Cache`: taking tokens back, batch operations, and what it refuses."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modeling_kimi3 import KimiK3Cache

PROPERTY = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def model(small_model):
    return small_model(seed=5)


def tokens(seed, *shape):
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(seed))


def feed(model, cache, ids, mask=None):
    with torch.no_grad():
        return model(ids, cache=cache, attention_mask=mask).logits


def fresh(model, ids):
    cache = KimiK3Cache(model.config)
    feed(model, cache, ids)
    return cache


def assert_same(cache, other, relative_error):
    """Both caches hold the same past."""
    assert cache.get_seq_length() == other.get_seq_length()
    for index, layer in enumerate(cache.layers):
        if hasattr(layer, "window"):
            pairs = [
                (layer.recurrent_states[0], other.layers[index].recurrent_states[0]),
                (layer.conv_states[0], other.layers[index].conv_states[0]),
            ]
        else:
            pairs = [(layer.keys, other.layers[index].keys), (layer.values, other.layers[index].values)]
        for actual, expected in pairs:
            assert relative_error(actual, expected) < 1e-5, f"layer {index}"


class TestRollback:
    @pytest.mark.parametrize("back", [1, 3, 7, 16])
    @pytest.mark.parametrize("length", [16, 17, 33, 40])
    def test_after_a_prefill(self, model, relative_error, length, back):
        ids = tokens(length, 2, length)
        cache = fresh(model, ids)
        cache.crop(-back)
        if length == back:
            assert cache.get_seq_length() == 0
            assert all(not layer.recurrent_states[0].any() for layer in cache.layers if hasattr(layer, "window"))
        else:
            assert_same(cache, fresh(model, ids[:, : length - back]), relative_error)

    @pytest.mark.parametrize("steps", [1, 5, 16, 17, 31, 50])
    def test_after_single_steps(self, model, relative_error, steps):
        ids = tokens(steps, 1, 4 + steps)
        for back in (1, min(steps + 4, 16)):
            cache = fresh(model, ids[:, :4])
            for t in range(4, 4 + steps):
                feed(model, cache, ids[:, t : t + 1])
            cache.crop(-back)
            if back < steps + 4:
                assert_same(cache, fresh(model, ids[:, : 4 + steps - back]), relative_error)

    @PROPERTY
    @given(
        actions=st.lists(
            st.tuples(st.sampled_from(["chunk", "step", "crop"]), st.integers(1, 24)), min_size=1, max_size=10
        )
    )
    def test_any_interleaving(self, model, relative_error, actions):
        cache, ids = KimiK3Cache(model.config), torch.zeros(2, 0, dtype=torch.long)
        for number, (action, count) in enumerate(actions):
            if action == "crop":
                croppable = min(layer.croppable_tokens for layer in cache.layers if hasattr(layer, "window"))
                count = min(count, croppable)
                cache.crop(-count)
                ids = ids[:, : ids.shape[1] - count]
                continue
            for size in [count] if action == "chunk" else [1] * min(count, 6):
                new = tokens(number, 2, size)
                ids = torch.cat([ids, new], dim=1)
                logits = feed(model, cache, new)
        assert cache.get_seq_length() == ids.shape[1]
        probe = tokens(99, 2, 3)
        logits = feed(model, cache, probe)
        with torch.no_grad():
            expected = model(torch.cat([ids, probe], dim=1), use_cache=False).logits[:, -3:]
        assert relative_error(logits, expected) < 1e-4

    def test_right_padded_batch(self, model, relative_error):
        ids = tokens(1, 2, 12)
        mask = torch.tensor([[1] * 12, [1] * 7 + [0] * 5])
        cache = KimiK3Cache(model.config)
        feed(model, cache, ids, mask)
        cache.crop(-6)
        probe = tokens(2, 2, 2)
        logits = feed(model, cache, probe, torch.cat([mask[:, :6], torch.ones(2, 2, dtype=mask.dtype)], dim=1))
        with torch.no_grad():
            expected = model(torch.cat([ids[:, :6], probe], dim=1), use_cache=False).logits[:, -2:]
        assert relative_error(logits, expected) < 1e-4

    def test_at_least_the_window_is_always_there(self, model):
        cache = KimiK3Cache(model.config, rollback=5)
        for t in range(40):
            feed(model, cache, tokens(t, 1, 1 + t % 3))
            seen = cache.get_seq_length()
            assert all(layer.croppable_tokens == min(5, seen) for layer in cache.layers if hasattr(layer, "window"))

    def test_memory_of_the_window_is_bounded(self, model):
        def window_bytes(length):
            cache = KimiK3Cache(model.config)
            feed(model, cache, tokens(1, 1, length))
            for t in range(70):
                feed(model, cache, tokens(t, 1, 1))
            return sum(layer.window.nbytes() for layer in cache.layers if hasattr(layer, "window"))

        assert window_bytes(400) == window_bytes(30)

    def test_beyond_the_window_nothing_changes(self, model, relative_error):
        ids = tokens(1, 1, 30)
        cache = fresh(model, ids)
        with pytest.raises(ValueError, match=r"crop\(-17\): the rollback window holds the last 16 tokens"):
            cache.crop(-17)
        assert_same(cache, fresh(model, ids), relative_error)

    def test_more_than_was_seen(self, model):
        with pytest.raises(ValueError, match="the cache holds 4 tokens only"):
            fresh(model, tokens(1, 1, 4)).crop(-5)

    def test_a_positive_count(self, model):
        with pytest.raises(ValueError, match="negative count"):
            fresh(model, tokens(1, 1, 4)).crop(3)

    def test_switched_off(self, model):
        cache = KimiK3Cache(model.config, rollback=0)
        feed(model, cache, tokens(1, 1, 20))
        assert not cache.is_croppable
        assert all(layer.window is None for layer in cache.layers if hasattr(layer, "window"))
        with pytest.raises(ValueError, match="the last 0 tokens"):
            cache.crop(-1)

    def test_a_negative_window(self, model):
        with pytest.raises(ValueError, match="rollback must be at least 0, got -1"):
            KimiK3Cache(model.config, rollback=-1)


class TestRows:
    def test_repeat_and_select(self, model, relative_error):
        ids = tokens(3, 2, 21)
        cache = fresh(model, ids)
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([0, 4, 5]))
        rows = ids[[0, 1, 1]]
        assert_same(cache, fresh(model, rows), relative_error)
        cache.crop(-9)
        assert_same(cache, fresh(model, rows[:, :12]), relative_error)

    def test_reorder(self, model, relative_error):
        ids = tokens(4, 3, 10)
        cache = fresh(model, ids)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        assert_same(cache, fresh(model, ids[[2, 0, 0]]), relative_error)

    def test_another_batch_size_is_refused(self, model):
        cache = fresh(model, tokens(1, 2, 5))
        with pytest.raises(ValueError, match="holds a batch of 2 rows, but the input has 3"):
            feed(model, cache, tokens(1, 3, 1))


def test_reset(model, relative_error):
    cache = fresh(model, tokens(1, 2, 20))
    cache.reset()
    assert cache.get_seq_length() == 0
    ids = tokens(2, 2, 9)
    feed(model, cache, ids)
    assert_same(cache, fresh(model, ids), relative_error)


def test_bytes_per_token_are_the_latents(model):
    """r + p numbers a token and softmax layer, nothing per token elsewhere."""
    config = model.config
    cache = KimiK3Cache(config, rollback=0)
    feed(model, cache, tokens(1, 1, 50))
    for kind, layer in zip(config.layer_types, cache.layers):
        if kind == "full_attention":
            held = layer.keys.numel() + layer.values.numel()
            assert held == 50 * (config.kv_lora_rank + config.qk_rope_head_dim)
        else:
            assert layer.recurrent_states[0].shape == (
                1,
                config.kda_num_heads,
                config.kda_head_dim,
                config.kda_head_dim,
            )
            assert layer.recurrent_states[0].dtype == torch.float32
            assert layer.conv_states[0].shape == (1, 3 * config.kda_num_heads * config.kda_head_dim, 3)


def test_pure_models(small_model, relative_error):
    """No softmax layer, or no KDA layer: both generate as they compute."""
    for linear in (
        {"kda_layers": [1, 2, 3, 4, 5], "full_attn_layers": []},
        {"kda_layers": [], "full_attn_layers": [1, 2, 3, 4, 5]},
    ):
        model = small_model(linear=linear)
        ids = tokens(1, 1, 6)
        out = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
        for t in range(6, 12):
            with torch.no_grad():
                assert model(out[:, :t], use_cache=False).logits[0, -1].argmax() == out[0, t]
