"""The contract: logits at real tokens depend on the sequence alone (issue: padding, packing, chunking, caching).

All in float32 on a random model with every mechanism; bounds are 1e-4 relative, far above rounding (about 1e-6) and
far below what a leaking neighbour does (about 1).
"""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DataCollatorWithFlattening, DynamicCache

from modeling_kimi3 import KimiK3Cache

TOLERANCE = 1e-4
PROPERTY = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module", params=["bounded", "softplus"])
def model(request, small_model):
    if request.param == "bounded":
        return small_model()
    linear = {"gate_lower_bound": None, "use_full_rank_gate": False}
    return small_model(linear=linear, mla_use_output_gate=False, q_lora_rank=None)


@pytest.fixture(scope="module")
def close(relative_error):
    def check(actual, expected, what=""):
        error = relative_error(actual, expected)
        assert error < TOLERANCE, f"{what} relative error {error:.2e}"

    return check


def tokens(seed, *shape):
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(seed))


def logits_of(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def padded_batch(sequences, left):
    """ids and mask of sequences padded with `left[i]` tokens before and the rest after."""
    width = max(before + sequence.numel() for before, sequence in zip(left, sequences))
    ids = torch.full((len(sequences), width), 7)
    mask = torch.zeros_like(ids)
    for row, (before, sequence) in enumerate(zip(left, sequences)):
        ids[row, before : before + sequence.numel()] = sequence
        mask[row, before : before + sequence.numel()] = 1
    return ids, mask


class TestPadding:
    @pytest.mark.parametrize("left", [(5,), (0, 3), (4, 0, 9)], ids=str)
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_any_side_and_batch_of_one(self, model, close, left, implementation):
        model.set_attn_implementation(implementation)
        sequences = [tokens(i, 17 + 2 * i) for i in range(len(left))]
        ids, mask = padded_batch(sequences, left)
        # Two more columns, so that every row is padded on the right too.
        ids = torch.nn.functional.pad(ids, (0, 2), value=5)
        mask = torch.nn.functional.pad(mask, (0, 2))
        logits = logits_of(model, ids, attention_mask=mask)
        for row, sequence in enumerate(sequences):
            close(logits[row][mask[row].bool()], logits_of(model, sequence[None])[0], f"row {row}")
        model.set_attn_implementation("sdpa")

    @PROPERTY
    @given(data=st.data())
    def test_holes_anywhere(self, model, close, data):
        length = data.draw(st.integers(1, 20))
        mask = torch.tensor([data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))])
        if mask.sum() == 0:
            return
        ids = tokens(length, 1, length)
        logits = logits_of(model, ids, attention_mask=mask)
        close(logits[mask.bool()], logits_of(model, ids[mask.bool()][None])[0])

    def test_neighbours_do_not_matter(self, model, close):
        ids = tokens(0, 3, 21)
        together = logits_of(model, ids)
        for row in range(3):
            close(together[row], logits_of(model, ids[row : row + 1])[0])

    def test_a_row_of_padding_alone_stays_finite(self, model, close):
        ids = tokens(0, 2, 9)
        mask = torch.tensor([[0] * 9, [1] * 9])
        logits = logits_of(model, ids, attention_mask=mask)
        assert torch.isfinite(logits).all()
        close(logits[1], logits_of(model, ids[1:])[0])


class TestCaching:
    @PROPERTY
    @given(cuts=st.lists(st.integers(1, 40), max_size=4), length=st.integers(1, 41))
    def test_any_chunks(self, model, close, cuts, length):
        ids = tokens(length, 2, length)
        borders = sorted({cut for cut in cuts if cut < length} | {0, length})
        cache = KimiK3Cache(model.config)
        parts = [logits_of(model, ids[:, a:b], cache=cache) for a, b in itertools.pairwise(borders)]
        close(torch.cat(parts, dim=1), logits_of(model, ids), str(borders))

    def test_token_by_token(self, model, close):
        ids = tokens(1, 2, 70)
        cache = KimiK3Cache(model.config)
        parts = [logits_of(model, ids[:, t : t + 1], cache=cache) for t in range(70)]
        close(torch.cat(parts, dim=1), logits_of(model, ids))

    @pytest.mark.parametrize("kind", ["ours", "dynamic"])
    def test_padded_prefill_then_steps_of_several_tokens(self, model, close, kind):
        sequences = [tokens(3, 11), tokens(4, 6)]
        more = tokens(5, 2, 5)
        for left in [(0, 0), (0, 5), (2, 3)]:
            ids, mask = padded_batch(sequences, left)
            cache = KimiK3Cache(model.config) if kind == "ours" else DynamicCache(config=model.config)
            logits_of(model, ids, attention_mask=mask, cache=cache)
            # The mask spans all that was seen, the input only what is new: two tokens at once, then one by one.
            parts, borders = [], [0, 2, 3, 4, 5]
            for start, end in itertools.pairwise(borders):
                mask = torch.cat([mask, torch.ones(2, end - start, dtype=mask.dtype)], dim=1)
                parts.append(logits_of(model, more[:, start:end], attention_mask=mask, cache=cache))
            continued = torch.cat(parts, dim=1)
            for row, sequence in enumerate(sequences):
                alone = logits_of(model, torch.cat([sequence, more[row]])[None])[0, -5:]
                close(continued[row], alone, f"left {left} row {row}")

    def test_one_token_chunks_that_are_padding(self, model, close):
        ids, mask = padded_batch([tokens(6, 4), tokens(7, 9)], (0, 0))
        cache = KimiK3Cache(model.config)
        parts = [
            logits_of(model, ids[:, t : t + 1], attention_mask=mask[:, : t + 1], cache=cache)
            for t in range(ids.shape[1])
        ]
        together = torch.cat(parts, dim=1)
        close(together[0, :4], logits_of(model, ids[:1, :4])[0])
        more = tokens(8, 2, 1)
        mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
        last = logits_of(model, more, attention_mask=mask, cache=cache)
        close(last[0], logits_of(model, torch.cat([ids[:1, :4], more[:1]], dim=1))[0, -1:])


class TestPacking:
    @PROPERTY
    @given(lengths=st.lists(st.integers(1, 19), min_size=1, max_size=5))
    def test_restarting_positions(self, model, close, lengths):
        sequences = [tokens(10 + i, length) for i, length in enumerate(lengths)]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        packed = logits_of(model, torch.cat(sequences)[None], position_ids=positions)[0]
        for part, sequence in zip(packed.split(lengths), sequences):
            close(part, logits_of(model, sequence[None])[0], str(lengths))

    def test_several_packed_rows_with_padding(self, model, close):
        first, second, third = tokens(1, 6), tokens(2, 9), tokens(3, 4)
        ids = torch.stack([torch.cat([first, second]), torch.cat([third, tokens(4, 11)])])
        positions = torch.tensor([[*range(6), *range(9)], [*range(4), *[0] * 11]])
        mask = torch.tensor([[1] * 15, [1] * 4 + [0] * 11])
        logits = logits_of(model, ids, position_ids=positions, attention_mask=mask)
        close(logits[0, :6], logits_of(model, first[None])[0])
        close(logits[0, 6:], logits_of(model, second[None])[0])
        close(logits[1, :4], logits_of(model, third[None])[0])

    def test_flattening_collator(self, model, close):
        sequences = [tokens(1, 7), tokens(2, 1), tokens(3, 12)]
        collator = DataCollatorWithFlattening(return_position_ids=False, return_flash_attn_kwargs=True)
        batch = collator([{"input_ids": sequence.tolist()} for sequence in sequences])
        batch.pop("labels")
        packed = logits_of(model, batch.pop("input_ids"), **batch)[0]
        for part, sequence in zip(packed.split([7, 1, 12]), sequences):
            close(part, logits_of(model, sequence[None])[0])

    def test_a_cache_is_refused(self, model):
        positions = torch.tensor([[0, 1, 2, 0, 1]])
        with pytest.raises(ValueError, match="packed"):
            model(tokens(1, 1, 5), position_ids=positions, cache=KimiK3Cache(model.config))

    def test_left_padded_positions_are_no_packing(self, model, close):
        ids, mask = padded_batch([tokens(1, 8), tokens(2, 5)], (0, 3))
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        logits = logits_of(model, ids, attention_mask=mask, position_ids=positions)
        close(logits[1, 3:], logits_of(model, ids[1:, 3:])[0])

    def test_wrong_boundaries_are_named(self, model):
        with pytest.raises(ValueError, match="cu_seq_lens_q must rise from 0 to the number of tokens"):
            model(tokens(1, 1, 5), cu_seq_lens_q=torch.tensor([0, 3], dtype=torch.int32), use_cache=False)


class TestOtherWaysIn:
    def test_inputs_embeds(self, model, close):
        ids = tokens(1, 2, 13)
        embeds = model.get_input_embeddings()(ids)
        with torch.no_grad():
            close(model(inputs_embeds=embeds).logits, logits_of(model, ids))

    def test_logits_to_keep(self, model, close):
        ids = tokens(1, 2, 13)
        whole = logits_of(model, ids)
        close(logits_of(model, ids, logits_to_keep=3), whole[:, -3:])
        close(logits_of(model, ids, logits_to_keep=torch.tensor([0, 5])), whole[:, [0, 5]])

    @pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
    def test_experts_implementations(self, model, close, implementation):
        ids = tokens(1, 2, 13)
        model.set_experts_implementation("eager")
        expected = logits_of(model, ids)
        model.set_experts_implementation(implementation)
        close(logits_of(model, ids), expected)

    def test_mask_of_the_wrong_length(self, model):
        with pytest.raises(ValueError, match=r"attention_mask must cover the 0 cached and the 5 new tokens"):
            model(tokens(1, 1, 5), attention_mask=torch.ones(1, 7))


class TestGradients:
    @staticmethod
    def gradients(model, ids, **kwargs):
        model.zero_grad()
        model(ids, labels=ids, use_cache=False, **kwargs).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def test_padding_changes_no_gradient(self, model, relative_error):
        sequence = tokens(1, 19)
        expected = self.gradients(model, sequence[None])
        ids, mask = padded_batch([sequence], (4,))
        labels = ids.masked_fill(mask == 0, -100)
        # Nothing comes before the first real token, so padding must not be asked for it either.
        labels[0, 4] = -100
        model.zero_grad()
        model(ids, labels=labels, attention_mask=mask, use_cache=False).loss.backward()
        for name, parameter in model.named_parameters():
            if name in expected:
                assert relative_error(parameter.grad, expected[name]) < 1e-3, name

    def test_packing_changes_no_gradient(self, model, relative_error):
        sequences = [tokens(1, 9), tokens(2, 1), tokens(3, 14)]
        labels = [sequence.clone() for sequence in sequences]
        for label in labels:
            label[0] = -100
        total = sum(sequence.numel() - 1 for sequence in sequences)
        model.zero_grad()
        for sequence, label in zip(sequences, labels):
            model(sequence[None], labels=label[None], use_cache=False, num_items_in_batch=total).loss.backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        positions = torch.cat([torch.arange(s.numel()) for s in sequences])[None]
        model(
            torch.cat(sequences)[None],
            labels=torch.cat(labels)[None],
            position_ids=positions,
            num_items_in_batch=total,
            use_cache=False,
        ).loss.backward()
        for name, parameter in model.named_parameters():
            if name in expected:
                assert relative_error(parameter.grad, expected[name]) < 1e-3, name

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpointing_changes_no_gradient(self, small_model, relative_error, reentrant):
        model = small_model().train()
        ids = tokens(1, 2, 19)
        expected = self.gradients(model, ids)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        actual = self.gradients(model, ids)
        assert actual.keys() == expected.keys()
        for name, gradient in actual.items():
            assert relative_error(gradient, expected[name]) < 1e-4, name

    def test_zero_keys_and_padding_rows_are_finite(self, small_model):
        model = small_model()
        with torch.no_grad():
            for layer in model.model.layers:
                if layer.layer_type == "linear_attention":
                    layer.self_attn.k_proj.weight.zero_()
        ids = tokens(1, 2, 9)
        mask = torch.tensor([[0] * 9, [1] * 9])
        model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name


def test_compiled_equals_eager(small_model, relative_error):
    model = small_model()
    model.set_experts_implementation("batched_mm")
    ids, mask = padded_batch([tokens(1, 12), tokens(2, 7)], (0, 5))
    expected = logits_of(model, ids, attention_mask=mask, use_cache=False)
    compiled = torch.compile(model, backend="aot_eager")
    assert relative_error(logits_of(compiled, ids, attention_mask=mask, use_cache=False), expected) < TOLERANCE
    plain = logits_of(model, ids, use_cache=False)
    assert relative_error(logits_of(compiled, ids, use_cache=False), plain) < TOLERANCE
