"""Snapshots, forks and files: whatever is done to a cache, it answers as a fresh pass over its sequence does.

Bounds are 1e-4 relative in float32: rounding is about 1e-6, a wrong past about 1.
"""

import json

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from modeling_kimi3 import KimiK3Cache
from modeling_kimi3.prefix import answer_many, read_document

TOLERANCE = 1e-4
# Shrinking runs the model some hundred times more and takes minutes; the failing actions are in the message.
PROPERTY = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)


@pytest.fixture(scope="module")
def model(small_model):
    return small_model(seed=5)


def tokens(seed, *shape):
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(model, cache, ids, mask=None):
    return model(ids, cache=cache, attention_mask=mask).logits


class Twin:
    """A cache and the tokens and mask that it must be equal to."""

    def __init__(self, model, cache, ids, mask):
        self.model, self.cache, self.ids, self.mask = model, cache, ids, mask

    def feed(self, ids, mask):
        self.ids, self.mask = torch.cat([self.ids, ids], dim=1), torch.cat([self.mask, mask], dim=1)
        return feed(self.model, self.cache, ids, self.mask)

    def croppable(self):
        return min(layer.croppable_tokens for layer in self.cache.layers if hasattr(layer, "window"))

    def error(self, relative_error):
        probe = tokens(99, self.ids.shape[0], 2)
        logits = self.feed(probe, torch.ones_like(probe))
        worst = 0.0
        for row, real in enumerate(self.mask.bool()):
            with torch.no_grad():
                alone = self.model(self.ids[row, real][None], use_cache=False).logits[0, -2:]
            worst = max(worst, relative_error(logits[row], alone))
        return worst


ACTIONS = ["chunk", "padded", "step", "crop", "snapshot", "restore", "fork", "save", "select"]


@PROPERTY
@given(
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(1, 20)), min_size=3, max_size=12),
    rows=st.integers(1, 2),
)
def test_any_interleaving(model, relative_error, tmp_path_factory, actions, rows):
    path = tmp_path_factory.mktemp("cache") / "cache.safetensors"
    empty = torch.zeros(rows, 0, dtype=torch.long)
    twin, snapshots = Twin(model, KimiK3Cache(model.config), empty, empty), []
    for number, (action, count) in enumerate(actions):
        rows = twin.ids.shape[0]
        if action in ("chunk", "padded"):
            mask = torch.ones(rows, count, dtype=torch.long)
            if action == "padded":
                mask[-1, (count + 1) // 2 :] = 0
            twin.feed(tokens(number, rows, count), mask)
        elif action == "step":
            for step in range(count % 5):
                twin.feed(tokens(number + step, rows, 1), torch.ones(rows, 1, dtype=torch.long))
        elif action == "crop":
            count = min(count, twin.croppable())
            twin.cache.crop(-count)
            kept = twin.ids.shape[1] - count
            twin.ids, twin.mask = twin.ids[:, :kept], twin.mask[:, :kept]
        elif action == "snapshot":
            snapshots.append((twin.cache.snapshot(), twin.ids, twin.mask))
            assert len(snapshots[-1][0]) == twin.ids.shape[1]
        elif action == "restore" and snapshots:
            snapshot, twin.ids, twin.mask = snapshots[count % len(snapshots)]
            twin.cache.restore(snapshot)
        elif action == "fork" and rows <= 2:
            twin.cache = twin.cache.fork(2)
            twin.ids, twin.mask = twin.ids.repeat_interleave(2, 0), twin.mask.repeat_interleave(2, 0)
        elif action == "save":
            twin.cache.save(path)
            twin.cache = KimiK3Cache.load(path, model.config)
        elif action == "select" and rows > 1 and twin.ids.shape[1]:
            order = torch.arange(rows).roll(1)[: max(1, rows - count % 2)]
            twin.cache.batch_select_indices(order)
            twin.ids, twin.mask = twin.ids[order], twin.mask[order]
        assert twin.cache.get_seq_length() == twin.ids.shape[1]
    others = [Twin(model, KimiK3Cache(model.config), ids, mask) for _, ids, mask in snapshots]
    assert twin.error(relative_error) < TOLERANCE, actions
    # The snapshots still hold what they held, in the cache that took them and in a new one.
    for (snapshot, ids, mask), other in zip(snapshots, others):
        twin.cache.restore(snapshot)
        twin.ids, twin.mask = ids, mask
        assert twin.error(relative_error) < TOLERANCE, actions
        other.cache.restore(snapshot)
        assert other.error(relative_error) < TOLERANCE, actions


class TestSnapshots:
    def test_latents_are_not_copied(self, model):
        cache = KimiK3Cache(model.config)
        feed(model, cache, tokens(1, 1, 30))
        snapshot = cache.snapshot()
        before = cache.layers[2].joined.data_ptr()
        for seed in range(3):
            feed(model, cache, tokens(seed, 1, 7))
            cache.restore(snapshot)
        assert cache.layers[2].joined.data_ptr() == before

    def test_growing_does_not_start_over_at_each_restore(self, model):
        cache = KimiK3Cache(model.config)
        feed(model, cache, tokens(1, 1, 30))
        snapshot = cache.snapshot()
        feed(model, cache, tokens(2, 1, 400))
        grown = cache.layers[2].joined.data_ptr()
        cache.restore(snapshot)
        feed(model, cache, tokens(3, 1, 350))
        assert cache.layers[2].joined.data_ptr() == grown

    def test_tokens_before_the_snapshot_can_be_taken_back_after_a_restore(self, model, relative_error):
        cache = KimiK3Cache(model.config)
        ids = tokens(1, 1, 30)
        feed(model, cache, ids)
        snapshot = cache.snapshot()
        for _ in range(2):
            feed(model, cache, tokens(2, 1, 40))
            cache.restore(snapshot)
            cache.crop(-10)
            logits = feed(model, cache, tokens(3, 1, 4))
            with torch.no_grad():
                whole = model(torch.cat([ids[:, :20], tokens(3, 1, 4)], dim=1), use_cache=False).logits[:, -4:]
            assert relative_error(logits, whole) < TOLERANCE

    def test_of_another_model(self, model, small_config):
        cache = KimiK3Cache(model.config)
        feed(model, cache, tokens(1, 1, 3))
        with pytest.raises(ValueError, match="kv_lora_rank: 20 there, 24 in this config"):
            KimiK3Cache(small_config(kv_lora_rank=24)).restore(cache.snapshot())

    def test_a_fork_is_independent(self, model, relative_error):
        cache = KimiK3Cache(model.config)
        feed(model, cache, tokens(1, 1, 9))
        forked = cache.fork(3)
        assert forked.batch_size == 3
        feed(model, forked, tokens(2, 3, 5))
        logits = feed(model, cache, tokens(3, 1, 2))
        with torch.no_grad():
            whole = model(torch.cat([tokens(1, 1, 9), tokens(3, 1, 2)], dim=1), use_cache=False).logits[:, -2:]
        assert relative_error(logits, whole) < TOLERANCE

    def test_a_fork_into_nothing(self, model):
        with pytest.raises(ValueError, match="fork takes a count of at least 1, got 0"):
            KimiK3Cache(model.config).fork(0)


class TestFiles:
    @pytest.fixture
    def saved(self, model, tmp_path):
        cache = KimiK3Cache(model.config)
        feed(model, cache, tokens(1, 2, 12))
        cache.save(tmp_path / "cache.safetensors")
        return tmp_path / "cache.safetensors"

    def test_dtypes_survive(self, small_model, tmp_path):
        model = small_model().to(torch.bfloat16)
        cache = KimiK3Cache(model.config)
        feed(model, cache, tokens(1, 1, 12))
        cache.save(tmp_path / "c")
        loaded = KimiK3Cache.load(tmp_path / "c", model.config)
        for ours, theirs in zip(cache.layers, loaded.layers):
            for name, tensor in ours.export().items():
                assert theirs.export()[name].dtype == tensor.dtype
                assert torch.equal(theirs.export()[name], tensor)

    def test_of_another_model(self, saved, small_config):
        with pytest.raises(ValueError, match=r"cache.safetensors belongs to another model. hidden_size: 48 there, 32"):
            KimiK3Cache.load(saved, small_config(hidden_size=32))

    def test_nothing_there(self, model, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"There is no cache file .*none"):
            KimiK3Cache.load(tmp_path / "none", model.config)

    @pytest.mark.parametrize("keep", [0, 5, 300, -40])
    def test_a_cut_file(self, model, saved, keep):
        content = saved.read_bytes()
        saved.write_bytes(content[:keep])
        with pytest.raises(ValueError, match=r"cache.safetensors is damaged or no safetensors file"):
            KimiK3Cache.load(saved, model.config)

    def test_another_safetensors_file(self, model, tmp_path):
        save_file({"x": torch.zeros(2)}, tmp_path / "weights.safetensors")
        with pytest.raises(ValueError, match=r"weights.safetensors is not a file of KimiK3Cache.save"):
            KimiK3Cache.load(tmp_path / "weights.safetensors", model.config)

    def test_a_write_that_fails_leaves_the_old_file(self, model, saved, monkeypatch):
        before = saved.read_bytes()

        def half(tensors, path, metadata):
            with open(path, "wb") as file:
                file.write(b"half")
            raise OSError("No space left on device")

        monkeypatch.setattr("modeling_kimi3.cache_snapshot.save_file", half)
        cache = KimiK3Cache(model.config)
        feed(model, cache, tokens(2, 1, 3))
        with pytest.raises(OSError, match="No space left"):
            cache.save(saved)
        assert saved.read_bytes() == before
        assert [path.name for path in saved.parent.iterdir()] == [saved.name]

    def test_the_fingerprint_survives_json(self, model):
        from modeling_kimi3.cache_snapshot import fingerprint

        assert json.loads(json.dumps(fingerprint(model.config))) == fingerprint(model.config)


class TestManyQuestions:
    def test_answers_are_those_of_reading_anew(self, model):
        document = tokens(1, 1, 50)
        questions = [tokens(2, 1, 4), tokens(3, 1, 1), tokens(4, 1, 9)]
        kwargs = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        for question, answer in zip(questions, answer_many(model, document, questions, **kwargs), strict=True):
            ids = torch.cat([document, question], dim=1)
            assert answer.tolist() == model.generate(ids, **kwargs)[:, ids.shape[1] :].tolist()

    def test_the_document_is_read_once(self, model, monkeypatch):
        seen = []
        forward = model.model.forward
        monkeypatch.setattr(
            model.model, "forward", lambda **kwargs: seen.append(kwargs["input_ids"].shape[1]) or forward(**kwargs)
        )
        list(answer_many(model, tokens(1, 1, 50), [tokens(2, 1, 4)] * 3, max_new_tokens=1, do_sample=False))
        assert seen == [50, 4, 4, 4]

    def test_with_a_cache_of_ones_own(self, model):
        document = tokens(1, 1, 20)
        cache = read_document(model, document, chunk=7)
        assert len(list(answer_many(model, document, [tokens(2, 1, 3)], cache, max_new_tokens=2))) == 1
        with pytest.raises(ValueError, match=r"holds 2[0-9] tokens, but the document has 19"):
            next(answer_many(model, document[:, :19], [tokens(2, 1, 3)], cache))

    def test_refusals(self, model):
        with pytest.raises(ValueError, match=r"token ids of shape \[1, T\]"):
            read_document(model, tokens(1, 2, 5))
        with pytest.raises(ValueError, match="at least one token"):
            next(answer_many(model, tokens(1, 1, 5), [tokens(1, 1, 0)]))
