"""The lm-eval model class of this package, `kimi3-hf`: any causal model that AutoModel loads.

B batch, T prompt length.

What it does beyond lm-eval's own: never cuts a prompt (too long is an error), takes ids that the builder already has,
feeds long prompts in chunks, copes with tokenizers without eos or pad token, and splits work over all processes of
`accelerate launch`, on CPUs too.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from .build import remembered_ids
from .holdback import Column, Holding, hold_back
from .tasks.loss import buckets
from .tokens import Encoder, load_tokenizer

CONTEXT_KEYS = ("n_positions", "max_position_embeddings", "n_ctx", "model_max_length")
LOSS_CHUNK = 1024
NO_LIMIT = 2**31 - 1


def context_limit(config: PretrainedConfig) -> int | None:
    """Tokens that a model is made for, as its config says; None where it says nothing."""
    text = getattr(config, "text_config", None) or config
    for key in CONTEXT_KEYS:
        value = getattr(text, key, None)
        if value is not None:
            return int(value)
    return None


@register_model("kimi3-hf")
class Kimi3LM(HFLM):
    """A causal model for lm-eval.

    Args:
        pretrained: A checkpoint directory, or a loaded model.
        tokenizer: `bytes`, a directory, or a tokenizer; None for the checkpoint's own.
        dtype: Name of a dtype, or `auto` for the checkpoint's.
        device: Where to run; None takes an accelerator if there is one.
        prefill_chunk_size: Tokens of a prompt that go through the model at once; None for all.
        **options: Further arguments of lm-eval's HFLM.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | None = None,
        prefill_chunk_size: int | None = None,
        **options: Any,
    ) -> None:
        import modeling_kimi3  # noqa: F401

        accelerator = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import Accelerator

            accelerator = Accelerator(cpu=device == "cpu")
        if accelerator is not None:
            place = accelerator.device
        else:
            place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        name = pretrained if isinstance(pretrained, str) else pretrained.name_or_path
        if isinstance(pretrained, str):
            model = AutoModelForCausalLM.from_pretrained(pretrained, dtype=dtype).to(place)
        else:
            model = pretrained
        if tokenizer is None or isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer or name)
        _ensure_pad(tokenizer)
        options.setdefault("max_length", context_limit(model.config) or NO_LIMIT)
        super().__init__(pretrained=model, tokenizer=tokenizer, **options)
        self.pretrained = name
        self.prefill_chunk_size = prefill_chunk_size
        self._encoder = Encoder(tokenizer)
        self._holding = Holding()
        if accelerator is not None:
            self.accelerator = accelerator
            self._rank = accelerator.process_index
            self._world_size = accelerator.num_processes

    @contextmanager
    def hold_back(self, column: Column) -> Iterator[None]:
        """Runs the model with a mechanism held back for the time of a `with` block, see `holdback`."""
        with hold_back(self.model, column) as self._holding:
            try:
                yield
            finally:
                self._holding = Holding()

    def prompt_ids(self, prompt: str) -> np.ndarray:
        """Ids of a prompt, int32 `[T]`: the builder's where it made this prompt, the tokenizer's otherwise."""
        known = remembered_ids(prompt)
        if known is not None:
            return known
        bos = self.tokenizer.bos_token
        return self._encoder.whole(prompt, special=not (bos and prompt.startswith(bos)))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers of all requests, longest prompts first.

        Raises:
            ValueError: prompt and answer budget exceed the model's context.
        """
        groups: dict[str, list[tuple[int, np.ndarray]]] = {}
        for number, request in enumerate(requests):
            prompt, kwargs = request.args
            groups.setdefault(repr(sorted(kwargs.items())), []).append((number, self.prompt_ids(prompt)))
        answers: list[str | None] = [None] * len(requests)
        tokens = sum(len(ids) for group in groups.values() for _, ids in group)
        bar = tqdm(
            total=tokens, desc="answers", unit="tok", unit_scale=True, disable=disable_tqdm or self.rank != 0, delay=0.5
        )
        size = 1 if self._holding.single else int(self.batch_size)
        for group in groups.values():
            group.sort(key=lambda row: -len(row[1]))
            for start in range(0, len(group), size):
                batch = group[start : start + size]
                kwargs = requests[batch[0][0]].args[1]
                for (number, ids), answer in zip(batch, self._answer([ids for _, ids in batch], kwargs)):
                    answers[number] = answer
                    self.cache_hook.add_partial("generate_until", requests[number].args, answer)
                    bar.update(len(ids))
        bar.close()
        return answers  # type: ignore[return-value]

    def token_losses(self, requests: list[Instance]) -> list[list[list[float]]]:
        """Loss of each text by position.

        Returns:
            For each request the sum of the losses in nats and their count, for each of `loss.buckets`. Position is the
            index of the token that is predicted.
        """
        found = []
        bar = tqdm(requests, desc="losses", unit="text", disable=self.rank != 0, delay=0.5)
        for request in bar:
            losses = self._losses(self.prompt_ids(request.args[0]))
            sums = [losses[start - 1 : end - 1] for start, end in buckets(len(losses) + 1)]
            answer = [[float(part.sum()), float(len(part))] for part in sums]
            self.cache_hook.add_partial("token_losses", request.args, answer)
            found.append(answer)
        return found

    @torch.inference_mode()
    def _losses(self, prompt: np.ndarray) -> torch.Tensor:
        """Loss in nats of every token but the first, float64 `[T - 1]`, computed in chunks through the cache."""
        if len(prompt) > self.max_length:
            raise ValueError(f"text of {len(prompt)} tokens exceeds the model's context of {self.max_length}")
        ids = torch.from_numpy(prompt.astype(np.int64)).to(self.device)
        size = self._holding.chunk or self.prefill_chunk_size or LOSS_CHUNK
        self._holding.new_sequence()
        cache, losses = None, []
        for start in range(0, len(ids) - 1, size):
            end = min(start + size, len(ids) - 1)
            out = self.model(input_ids=ids[None, start:end], use_cache=True, cache=cache)
            cache = out.cache
            targets = ids[start + 1 : end + 1]
            losses.append(torch.nn.functional.cross_entropy(out.logits[0].float(), targets, reduction="none"))
        return torch.cat(losses).double().cpu()

    def _answer(self, prompts: Sequence[np.ndarray], kwargs: dict) -> list[str]:
        """Generates for one batch with one set of generation arguments."""
        options = normalize_gen_kwargs(kwargs, self.max_gen_toks)
        budget = options.pop("max_gen_toks")
        until = [text for text in options.pop("until", None) or [] if text]
        if not options.get("do_sample"):
            options = {k: v for k, v in options.items() if k not in ("temperature", "top_p", "top_k")}
        width = max(len(ids) for ids in prompts)
        if width + budget > self.max_length:
            raise ValueError(
                f"prompt of {width} tokens and {budget} answer tokens exceed the model's context of {self.max_length}"
            )
        pad = self.tokenizer.pad_token_id
        input_ids = torch.full((len(prompts), width), pad, dtype=torch.long)
        mask = torch.zeros((len(prompts), width), dtype=torch.long)
        for row, ids in enumerate(prompts):
            input_ids[row, width - len(ids) :] = torch.from_numpy(ids.astype(np.int64))
            mask[row, width - len(ids) :] = 1
        input_ids, mask = input_ids.to(self.device), mask.to(self.device)
        chunk = self._holding.chunk or self.prefill_chunk_size
        if chunk:
            options["prefill_chunk_size"] = chunk
        self._holding.new_sequence()
        if until:
            options["stopping_criteria"] = StoppingCriteriaList([_StopAt(until, self._decode, width)])
        ends = self._end_ids()
        if ends:
            options.setdefault("eos_token_id", ends)
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=input_ids, attention_mask=mask, max_new_tokens=budget, pad_token_id=pad, **options
            )
        return [_until(self._decode(row), until) for row in output[:, width:].tolist()]

    def _end_ids(self) -> list[int]:
        """Tokens that end an answer: the tokenizer's eos and those of the model's generation config."""
        own = getattr(self.model.generation_config, "eos_token_id", None)
        found = [self.tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
        return sorted({token for token in found if token is not None})

    def _decode(self, ids: list[int]) -> str:
        """Text of an answer up to its end token; ids the tokenizer lacks (embeddings are often larger) are left out."""
        known, ends = len(self.tokenizer), self._end_ids()
        end = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        return self.tokenizer.decode([token for token in ids[:end] if token < known], skip_special_tokens=True)


class _StopAt(StoppingCriteria):
    """Ends each row once one of the texts stands in its answer."""

    def __init__(self, until: list[str], decode: Callable[[list[int]], str], start: int) -> None:
        self.until = until
        self.decode = decode
        self.start = start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        answers = (self.decode(row) for row in input_ids[:, self.start :].tolist())
        done = [any(text in answer for text in self.until) for answer in answers]
        return torch.tensor(done, device=input_ids.device)


def _until(answer: str, until: list[str]) -> str:
    for text in until:
        answer = answer.split(text)[0]
    return answer


def _ensure_pad(tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives a tokenizer without a pad token one that it already has: a new one would lie beyond the embedding."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
