"""Assisted and prompt-lookup decoding on fifty random prompts: greedy, token for token. The rates are printed."""

import pytest
import torch

COUNT = 10


@pytest.fixture(scope="module")
def model(small_model):
    return small_model(seed=3)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(7)
    parts = [torch.randint(3, 96, (1, 3 + i % 6), generator=generator) for i in range(50)]
    return [part.repeat(1, 1 + i % 3) for i, part in enumerate(parts)]


def greedy(model, ids, **kwargs):
    return model.generate(ids, max_new_tokens=COUNT, do_sample=False, eos_token_id=None, **kwargs)[0, ids.shape[1] :]


@pytest.mark.parametrize("way", ["assistant", "lookup"])
def test_fifty_prompts(model, small_model, prompts, way):
    if way == "assistant":
        # The same random numbers in front, so that some drafts are right.
        assistant = small_model(seed=3, num_hidden_layers=2, linear={"kda_layers": [1], "full_attn_layers": [2]})
        kwargs = {"assistant_model": assistant}
    else:
        kwargs = {"prompt_lookup_num_tokens": 4}
    passes = []
    handle = model.model.register_forward_hook(lambda *_: passes.append(1))
    sequences = [greedy(model, ids, **kwargs) for ids in prompts]
    handle.remove()
    # Each pass gives one token of its own and the accepted ones of its draft.
    accepted = 1 - len(passes) / (COUNT * len(prompts))
    print(f"{way}: {accepted:.1%} of {COUNT * len(prompts)} tokens came from accepted drafts")
    for ids, sequence in zip(prompts, sequences):
        assert sequence.tolist() == greedy(model, ids).tolist()


def test_bfloat16_differs_at_ties_only(small_model, prompts):
    """Where the ways part, the two best logits lie within eight roundings of the largest (2^-8 each)."""
    model = small_model(seed=3).to(torch.bfloat16)
    for ids in prompts[:15]:
        plain, assisted = greedy(model, ids), greedy(model, ids, prompt_lookup_num_tokens=4)
        different = (plain != assisted).nonzero()
        if len(different):
            at = different[0, 0]
            with torch.no_grad():
                logits = model(torch.cat([ids, plain[None, :at]], dim=1), use_cache=False).logits[0, -1].float()
            gap = (logits[plain[at]] - logits[assisted[at]]).abs()
            assert gap <= 8 * 2**-8 * logits.abs().max()
