"""What a forward pass can hand out besides logits, and the losses."""

import pytest
import torch


@pytest.fixture(scope="module")
def model(small_model):
    return small_model(seed=11)


def tokens(seed, *shape):
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(seed))


def test_nothing_is_recorded_unasked(model):
    out = model(tokens(1, 1, 5))
    assert out.hidden_states is None and out.attentions is None
    assert out.router_logits is None and out.attn_res_weights is None


def test_hidden_states(model):
    out = model.model(tokens(1, 2, 7), output_hidden_states=True)
    assert [tuple(h.shape) for h in out.hidden_states] == [(2, 7, 48)] * 6
    torch.testing.assert_close(out.hidden_states[0], model.get_input_embeddings()(tokens(1, 2, 7)))
    assert out.hidden_states[-1] is out.last_hidden_state


def test_attention_weights(model):
    model.set_attn_implementation("eager")
    out = model(tokens(1, 2, 7), output_attentions=True)
    model.set_attn_implementation("sdpa")
    # One per softmax layer; each row sums to one and sees no later token.
    assert len(out.attentions) == 2
    for weights in out.attentions:
        assert weights.shape == (2, 3, 7, 7)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 7))
        assert not weights.triu(1).any()


def test_router_logits(model):
    out = model(tokens(1, 2, 7), output_router_logits=True)
    assert [tuple(logits.shape) for logits in out.router_logits] == [(14, 8)] * 4
    assert all(logits.dtype == torch.float32 for logits in out.router_logits)


def test_attention_residual_weights(model):
    weights = model(tokens(1, 2, 7), output_attn_res_weights=True).attn_res_weights
    # Blocks of two layers: a layer that starts one still mixes before its mixer over the blocks so far.
    assert [w.shape[-1] for w in weights] == [2, 2, 2, 2, 3, 3, 3, 3, 4, 4]
    for w in weights:
        torch.testing.assert_close(w.sum(-1), torch.ones(2, 7))


def test_plain_residuals_have_no_such_weights(small_model):
    model = small_model(attn_res_block_size=None)
    assert model(tokens(1, 1, 5), output_attn_res_weights=True).attn_res_weights == ()


def test_loss_is_the_shifted_cross_entropy(model):
    ids = tokens(2, 2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    out = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)


def test_loss_with_a_count_of_the_whole_batch(model):
    ids = tokens(2, 2, 9)
    mean = model(ids, labels=ids).loss
    torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=64).loss, mean * 16 / 64)


def test_tuples(model):
    logits = model(tokens(1, 1, 5), return_dict=False, use_cache=False)[0]
    torch.testing.assert_close(logits, model(tokens(1, 1, 5)).logits)


def test_ids_and_embeddings_exclude_each_other(model):
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(tokens(1, 1, 5), inputs_embeds=torch.zeros(1, 5, 48))
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()


@pytest.mark.parametrize("router", ["sigmoid", "softmax"])
@pytest.mark.parametrize("groups", [1, 4])
def test_router_choice(small_model, router, groups):
    """Spec section 4 in a loop over tokens, against the router."""
    model = small_model(
        moe_router_activation_func=router,
        num_expert_group=groups,
        topk_group=min(groups, 2),
        routed_scaling_factor=2.5,
    )
    gate = model.model.layers[1].block_sparse_moe.gate
    x = torch.randn(20, 48, generator=torch.Generator().manual_seed(0))
    _, weights, choice = gate(x)
    for row in range(20):
        logits = gate.weight.double() @ x[row].double()
        scores = logits.sigmoid() if router == "sigmoid" else logits.softmax(0)
        biased = scores + gate.e_score_correction_bias.double()
        if groups > 1:
            best = sorted(range(groups), key=lambda g: -biased.view(groups, -1)[g].sort().values[-2:].sum())[:2]
            kept = {expert for g in best for expert in range(g * 8 // groups, (g + 1) * 8 // groups)}
        else:
            kept = set(range(8))
        expected = sorted(kept, key=lambda e: -biased[e])[:3]
        assert sorted(choice[row].tolist()) == sorted(expected)
        total = sum(scores[e] for e in expected)
        for weight, expert in zip(weights[row], choice[row]):
            assert weight.item() == pytest.approx((2.5 * scores[expert] / total).item(), rel=1e-5)
