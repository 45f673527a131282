"""`generate` in the ways it is used, each held to a loop that recomputes the whole sequence at every step."""

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from modeling_kimi3 import KimiK3Cache


@pytest.fixture(scope="module")
def model(small_model):
    return small_model(seed=3)


def tokens(seed, *shape):
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(seed))


def greedy_reference(model, ids, count):
    """Greedy continuation `[count]` of `ids [T]` without any cache."""
    for _ in range(count):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids[None], use_cache=False).logits[0, -1:].argmax(-1)])
    return ids[-count:].tolist()


def generate(model, ids, count=12, **kwargs):
    out = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, **kwargs)
    sequences = out if isinstance(out, torch.Tensor) else out.sequences
    return sequences[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("length", [1, 2, 5, 33])
def test_greedy(model, length):
    ids = tokens(length, 1, length)
    assert generate(model, ids)[0] == greedy_reference(model, ids[0], 12)


def test_one_new_token(model):
    ids = tokens(1, 1, 9)
    assert generate(model, ids, 1)[0] == greedy_reference(model, ids[0], 1)


def test_prompts_of_unequal_length(model):
    prompts = [tokens(1, 9), tokens(2, 4), tokens(3, 1)]
    width = max(prompt.numel() for prompt in prompts)
    ids = torch.stack([torch.nn.functional.pad(prompt, (width - prompt.numel(), 0)) for prompt in prompts])
    mask = torch.stack([(torch.arange(width) >= width - prompt.numel()).long() for prompt in prompts])
    continued = generate(model, ids, attention_mask=mask)
    for row, prompt in enumerate(prompts):
        assert continued[row] == greedy_reference(model, prompt, 12)


def test_rows_that_finish_at_different_times(model):
    prompts = tokens(4, 3, 6)
    references = [greedy_reference(model, prompt, 12) for prompt in prompts]
    # The third token of row 0 ends it; the others go on until they meet it or the limit.
    stop = references[0][2]
    out = model.generate(prompts, max_new_tokens=12, do_sample=False, eos_token_id=stop, pad_token_id=0)[:, 6:]
    for row, reference in enumerate(references):
        end = reference.index(stop) + 1 if stop in reference else 12
        assert out[row, :end].tolist() == reference[:end]
        assert not out[row, end:].any()


@pytest.mark.parametrize("cache", ["ours", "dynamic", "none"])
def test_caches(model, cache):
    ids = tokens(5, 2, 7)
    kwargs = {
        "ours": lambda: {"cache": KimiK3Cache(model.config)},
        "dynamic": lambda: {"cache": DynamicCache(config=model.config)},
        "none": lambda: {"use_cache": False},
    }[cache]()
    continued = generate(model, ids, **kwargs)
    assert continued == [greedy_reference(model, row, 12) for row in ids]


def test_generate_hands_out_our_cache(model):
    out = model.generate(tokens(1, 1, 4), max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    assert type(out.cache) is KimiK3Cache


def test_continuing_from_a_returned_cache(model):
    ids = tokens(6, 1, 8)
    first = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    second = model.generate(first.sequences, cache=first.cache, max_new_tokens=7, do_sample=False, eos_token_id=None)
    assert second[0, 8:].tolist() == greedy_reference(model, ids[0], 12)


def test_continuing_after_the_last_tokens_were_cut(model):
    ids = tokens(7, 1, 8)
    first = model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    # The cache holds all but the last token; six less leaves eleven.
    first.cache.crop(-6)
    kept = torch.cat([first.sequences[:, :11], tokens(8, 1, 2)], dim=1)
    second = model.generate(kept, cache=first.cache, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert second[0, 13:].tolist() == greedy_reference(model, kept[0], 6)


def test_chunked_prefill(model):
    ids = tokens(9, 2, 29)
    assert generate(model, ids, prefill_chunk_size=8) == generate(model, ids)


def test_sampling_repeats_with_its_seed(model):
    ids = tokens(10, 2, 5)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        runs.append(model.generate(ids, max_new_tokens=8, do_sample=True, top_k=20, eos_token_id=None).tolist())
    assert runs[0] == runs[1]
    torch.manual_seed(1)
    assert model.generate(ids, max_new_tokens=8, do_sample=True, top_k=20, eos_token_id=None).tolist() != runs[0]


def sequence_score(model, prompt_length, sequence):
    with torch.no_grad():
        logprobs = model(sequence[None], use_cache=False).logits[0].log_softmax(-1)
    return sum(logprobs[t - 1, sequence[t]].item() for t in range(prompt_length, sequence.numel()))


def test_beam_search_reorders_the_cache(model):
    ids = tokens(11, 2, 6)
    kwargs = {"max_new_tokens": 6, "num_beams": 4, "do_sample": False, "eos_token_id": None, "length_penalty": 0.0}
    beams = model.generate(ids, **kwargs, return_dict_in_generate=True, output_scores=True)
    assert beams.sequences.tolist() == model.generate(ids, **kwargs, use_cache=False).tolist()
    for row in range(2):
        score = sequence_score(model, 6, beams.sequences[row])
        assert beams.sequences_scores[row].item() == pytest.approx(score, abs=1e-3)


def test_num_return_sequences(model):
    ids = tokens(12, 1, 6)
    torch.manual_seed(0)
    out = model.generate(ids, max_new_tokens=5, do_sample=True, num_return_sequences=3, eos_token_id=None)
    assert out.shape == (3, 11)


class Collect(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_streaming(model):
    ids = tokens(13, 1, 5)
    streamer = Collect()
    generate(model, ids, streamer=streamer)
    assert streamer.ended
    assert streamer.tokens == ids[0].tolist() + greedy_reference(model, ids[0], 12)


class TestAssisted:
    @pytest.mark.parametrize("seed", range(4))
    def test_with_a_smaller_model(self, model, small_model, seed):
        assistant = small_model(seed=3, num_hidden_layers=2, linear={"kda_layers": [1], "full_attn_layers": [2]})
        ids = tokens(seed, 1, 4 + 7 * seed)
        assert generate(model, ids, 20, assistant_model=assistant)[0] == greedy_reference(model, ids[0], 20)

    def test_long_drafts_that_are_all_turned_down(self, model, small_model):
        assistant = small_model(seed=99, num_hidden_layers=2, linear={"kda_layers": [1], "full_attn_layers": [2]})
        assistant.generation_config.assistant_confidence_threshold = 0.0
        assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
        ids = tokens(22, 1, 9)
        assert generate(model, ids, 30, assistant_model=assistant)[0] == greedy_reference(model, ids[0], 30)

    def test_with_itself_accepts_everything(self, model):
        ids = tokens(20, 1, 9)
        assert generate(model, ids, 30, assistant_model=model)[0] == greedy_reference(model, ids[0], 30)

    @pytest.mark.parametrize("count", [3, 10, 24])
    def test_prompt_lookup(self, model, count):
        ids = tokens(21, 1, 6).repeat(1, 5)
        continued = generate(model, ids, 25, prompt_lookup_num_tokens=count)[0]
        assert continued == greedy_reference(model, ids[0], 25)
