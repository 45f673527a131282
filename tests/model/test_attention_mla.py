"""The forms in which MLA is computed give one result: expanded, in head groups, absorbed, and every implementation."""

import pytest
import torch

from modeling_kimi3 import KimiK3Cache, attention_mla


@pytest.fixture(scope="module")
def model(small_model):
    return small_model(seed=7)


def tokens(seed, *shape):
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(seed))


def forms(model, monkeypatch, absorb):
    """Forces the absorbed form (or forbids it) in every MLA layer."""
    monkeypatch.setattr(attention_mla.KimiMLAttention, "_absorbs", lambda self, *args: absorb)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_absorbed_equals_expanded(model, monkeypatch, relative_error, implementation, new, padded):
    model.set_attn_implementation(implementation)
    ids, more = tokens(1, 2, 37), tokens(2, 2, new)
    mask = torch.ones(2, 37 + new, dtype=torch.long)
    if padded:
        mask[0, :5] = 0
    logits = []
    for absorb in (False, True):
        cache = KimiK3Cache(model.config)
        with torch.no_grad():
            model(ids, cache=cache, attention_mask=mask[:, :37])
            with monkeypatch.context() as patch:
                forms(model, patch, absorb)
                logits.append(model(more, cache=cache, attention_mask=mask).logits)
    model.set_attn_implementation("sdpa")
    assert relative_error(logits[1], logits[0]) < 1e-5


def test_absorbed_attention_weights(model, monkeypatch, relative_error):
    model.set_attn_implementation("eager")
    weights = []
    for absorb in (False, True):
        cache = KimiK3Cache(model.config)
        with torch.no_grad():
            model(tokens(1, 1, 20), cache=cache)
            with monkeypatch.context() as patch:
                forms(model, patch, absorb)
                weights.append(model(tokens(2, 1, 1), cache=cache, output_attentions=True).attentions)
    model.set_attn_implementation("sdpa")
    assert len(weights[0]) == 2
    for absorbed, expanded in zip(weights[1], weights[0]):
        assert expanded.shape == (1, 3, 1, 21)
        assert relative_error(absorbed, expanded) < 1e-5


@pytest.mark.parametrize("budget", [1, 12_000])
def test_head_groups(model, monkeypatch, relative_error, budget):
    """A budget of one byte makes groups of one head, the other one groups of two and one."""
    ids = tokens(1, 1, 40)
    with torch.no_grad():
        expected = model(ids).logits
        monkeypatch.setattr(attention_mla, "_EXPANSION_BUDGET", budget)
        assert relative_error(model(ids).logits, expected) < 1e-5


def test_absorbed_gradients(model, monkeypatch, relative_error):
    """Folding the queries is differentiable too: same gradients as the expanded form."""
    ids = tokens(1, 1, 12)
    gradients = []
    model.set_attn_implementation("eager")
    for absorb in (False, True):
        with monkeypatch.context() as patch:
            forms(model, patch, absorb)
            model.zero_grad()
            model(ids, labels=ids, use_cache=False, attention_mask=torch.ones(1, 12)).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if "kv_b_proj" in name})
    model.set_attn_implementation("sdpa")
    assert gradients[0]
    for name, gradient in gradients[1].items():
        assert relative_error(gradient, gradients[0][name]) < 1e-4, name


def test_short_queries_absorb_and_long_ones_expand(model):
    layer = next(m for m in model.modules() if isinstance(m, attention_mla.KimiMLAttention))
    assert layer._absorbs(1, 1000, None)
    assert not layer._absorbs(1000, 1000, None)
    # A mask that is no 4D tensor (flash's 2D one, flex's blocks) belongs to its own implementation.
    assert not layer._absorbs(1, 1000, torch.ones(1, 1000))


def test_flex_attention(model, relative_error):
    ids = tokens(1, 2, 23)
    mask = torch.ones(2, 23, dtype=torch.long)
    mask[1, :6] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        model.set_attn_implementation("flex_attention")
        try:
            logits = model(ids, attention_mask=mask).logits
        finally:
            model.set_attn_implementation("sdpa")
    assert relative_error(logits[mask.bool()], expected[mask.bool()]) < 1e-4
