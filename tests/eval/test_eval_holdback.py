"""Holding a memory back from outside: exact, and undone afterwards."""

import copy

import pytest
import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from kimi3_eval.errors import Refusal
from kimi3_eval.holdback import column, hold_back

T = 48


def native_model():
    """A random native KimiLinear with two KDA layers and one softmax layer."""
    torch.manual_seed(0)
    config = KimiLinearConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        linear_attn_config={
            "num_heads": 2,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 3],
            "full_attn_layers": [2],
        },
        first_k_dense_replace=3,
        num_experts=2,
        num_experts_per_token=1,
        moe_intermediate_size=16,
        num_shared_experts=1,
        pad_token_id=0,
    )
    model = KimiLinearForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.fixture(scope="module", params=["native", "ours"])
def model(request):
    if request.param == "native":
        return native_model()
    return request.getfixturevalue("small_model")(0)


@pytest.fixture(scope="module")
def ids(model):
    return torch.randint(3, 60, (1, T), generator=torch.Generator().manual_seed(1))


def last_logits(model, ids, chunk=None):
    """Logits after the last token, fed in chunks through a cache."""
    with torch.no_grad():
        if chunk is None:
            return model(input_ids=ids).logits[0, -1]
        cache = None
        for start in range(0, ids.shape[1], chunk):
            out = model(input_ids=ids[:, start : start + chunk], use_cache=True, cache=cache)
            cache = out.cache
        return out.logits[0, -1]


def test_a_wide_window_changes_nothing_and_a_narrow_one_does(model, ids) -> None:
    whole = last_logits(model, ids)
    with hold_back(model, column(f"softmax-window={T}")):
        torch.testing.assert_close(last_logits(model, ids), whole, rtol=1e-4, atol=1e-4)
    with hold_back(model, column("softmax-window=4")):
        narrow = last_logits(model, ids)
        step = last_logits(model, ids, chunk=1)
    assert (narrow - whole).abs().max() > 1e-3
    torch.testing.assert_close(step, narrow, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(last_logits(model, ids), whole, rtol=0, atol=0)


def test_softmax_layers_see_the_window_and_nothing_older(model, ids) -> None:
    """With KDA reset at every token too, nothing older than the window reaches the last token's logits."""
    other = ids.clone()
    other[:, : T - 9] = (other[:, : T - 9] + 7) % 57 + 3
    results = []
    for tokens in (ids, other):
        with hold_back(model, column("softmax-window=3")), hold_back(model, column("kda-reset=1")) as holding:
            holding.new_sequence()
            results.append(last_logits(model, tokens, chunk=1))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)


def test_reset_at_the_length_changes_nothing_and_earlier_does(model, ids) -> None:
    whole = last_logits(model, ids, chunk=16)
    with hold_back(model, column(f"kda-reset={T}")) as holding:
        holding.new_sequence()
        torch.testing.assert_close(last_logits(model, ids, chunk=16), whole, rtol=0, atol=0)
    with hold_back(model, column("kda-reset=16")) as holding:
        holding.new_sequence()
        reset = last_logits(model, ids, chunk=16)
        holding.new_sequence()
        torch.testing.assert_close(last_logits(model, ids, chunk=4), reset, rtol=1e-3, atol=1e-3)
        with pytest.raises(ValueError, match="chunks of 16"):
            holding.new_sequence()
            last_logits(model, ids, chunk=17)
    assert (reset - whole).abs().max() > 1e-3
    torch.testing.assert_close(last_logits(model, ids, chunk=16), whole, rtol=0, atol=0)


def test_undone_after_an_exception(model, ids) -> None:
    whole = last_logits(model, ids)
    for name in ("softmax-window=4", "kda-reset=4", "attn-res-newest"):
        with pytest.raises(KeyboardInterrupt), hold_back(model, column(name)):
            raise KeyboardInterrupt
    torch.testing.assert_close(last_logits(model, ids), whole, rtol=0, atol=0)


def test_newest_source_equals_queries_that_see_nothing_else(small_model) -> None:
    """Holding attention residuals back equals a model whose queries put all weight on the last source."""
    model = small_model(0)
    ids = torch.randint(3, 60, (1, 12), generator=torch.Generator().manual_seed(1))
    whole = last_logits(model, ids)
    with hold_back(model, column("attn-res-newest")):
        held = last_logits(model, ids)
        with torch.no_grad():
            weights = model(input_ids=ids, output_attn_res_weights=True).attn_res_weights
    assert all(torch.equal(w[..., -1], torch.ones_like(w[..., -1])) for w in weights)
    assert (held - whole).abs().max() > 1e-3
    assert copy.deepcopy(model) is not model
    torch.testing.assert_close(last_logits(model, ids), whole, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["softmax-window", "softmax-window=0", "kda-reset=x", "mlp=3", ""])
def test_unknown_columns_are_refused(name) -> None:
    with pytest.raises(Refusal, match="softmax-window=W"):
        column(name)
