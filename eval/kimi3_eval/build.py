"""Turns specifications into documents: sizes prompts exactly, remembers their ids, keeps samples on disk.

Where the tokenizer is additive (see `tokens`), a prompt is never tokenised as a whole except the first of each length,
which proves it; the ids of its pieces are handed to the model class, so that the model does not tokenise it either.
Otherwise every finished prompt is measured and rebuilt with less haystack while it is too long.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from . import __version__
from .errors import Refusal
from .haystack import prose
from .specs import Draft, NoRoom, Spec
from .tokens import Encoder, encoder

MARGIN = 4
IDS_KEPT = 2**26


class _IdMemory:
    """Ids of the prompts that this process built, up to a fixed number of tokens."""

    def __init__(self) -> None:
        self._ids: dict[bytes, np.ndarray] = {}
        self._tokens = 0

    @staticmethod
    def _key(prompt: str) -> bytes:
        return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()

    def keep(self, prompt: str, ids: np.ndarray) -> None:
        if self._tokens + len(ids) <= IDS_KEPT:
            self._ids[self._key(prompt)] = ids
            self._tokens += len(ids)

    def get(self, prompt: str) -> np.ndarray | None:
        return self._ids.get(self._key(prompt))


_memory = _IdMemory()


class Recipe(Protocol):
    """What a task must offer."""

    @property
    def budget(self) -> int:
        """Tokens the answer may take."""
        ...

    @property
    def has_depth(self) -> bool:
        """Whether the asked needle's depth can be chosen."""
        ...

    def draft(self, spec: Spec, room: int, encoder: Encoder, source: str | None) -> Draft:
        """Builds one sample whose input, separator and answer prefix take at most `room` tokens."""
        ...


def join(text: str, prefix: str) -> str:
    """Input and answer prefix as lm-eval joins them: one space unless either brings white space."""
    if not prefix:
        return text
    return text + ("" if text[-1].isspace() or prefix[0].isspace() else " ") + prefix


class Frame:
    """What a chat template puts around one user message and the start of the answer; nothing without a template."""

    def __init__(self, encoder: Encoder, chat: bool) -> None:
        self.encoder = encoder
        self.chat = chat

    def pieces(self, draft: Draft) -> list[str]:
        """The pieces of the finished prompt."""
        text = "".join(draft.pieces)
        if not self.chat:
            tail = join(text, draft.gen_prefix)[len(text) :]
            return [*draft.pieces, *([tail] if tail else [])]
        whole = self.render(text, draft.gen_prefix)
        start = whole.find(text)
        if start < 0:
            raise Refusal("The chat template changes the message's text, so prompts cannot be sized: run without it.")
        return [whole[:start], *draft.pieces, whole[start + len(text) :]]

    def render(self, text: str, prefix: str) -> str:
        """The prompt lm-eval sends for an input and an answer prefix."""
        if not self.chat:
            return join(text, prefix)
        messages = [{"role": "user", "content": text}]
        if prefix:
            messages.append({"role": "assistant", "content": prefix})
        rendered = self.encoder.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not prefix, continue_final_message=bool(prefix)
        )
        return str(rendered)

    def special(self, prompt: str) -> bool:
        """Whether the tokenizer's own special tokens come on top: not when the template wrote the BOS itself."""
        bos = self.encoder.tokenizer.bos_token
        return not (bos and prompt.startswith(bos))


def remembered_ids(prompt: str) -> np.ndarray | None:
    """Ids of a prompt that this process built, int32 `[T]`, or None."""
    return _memory.get(prompt)


class Builder:
    """Builds the documents of one task at one length with one tokenizer.

    How the tokenizer behaves is found out on one sample that belongs to no run, so that content depends on nothing
    but its specification.
    """

    def __init__(
        self, task: str, recipe: Recipe, length: int, encoder: Encoder, *, source: str | None, chat: bool
    ) -> None:
        self.task = task
        self.recipe = recipe
        self.encoder = encoder
        self.frame = Frame(encoder, chat)
        self.source = source
        self.limit = length - recipe.budget
        self.overhead = len(encoder.prefix) + len(encoder.suffix)
        if chat:
            self.overhead += encoder.total(self.frame.pieces(Draft(["x"], [], "y", [])))
        probe = Spec(task, length, 0.5 if recipe.has_depth else None, -1, 0)
        try:
            draft, pieces = self._draft(probe, 0)
        except NoRoom as lack:
            self.limit += lack.missing
            draft, pieces = self._draft(probe, 0)
        prompt = "".join(pieces)
        special = self.frame.special(prompt)
        whole = encoder.whole(prompt, special)
        self.additive = bool(np.array_equal(self._joined(pieces, special), whole))
        self.slack = 0 if self.additive else len(whole) + (draft.budget or 0) - self.limit + MARGIN
        self.limit = length - recipe.budget

    def document(self, spec: Spec) -> dict:
        """One document.

        Raises:
            NoRoom: it cannot fit the length.
        """
        slack = self.slack
        while True:
            draft, pieces = self._draft(spec, slack)
            prompt = "".join(pieces)
            special = self.frame.special(prompt)
            starts = np.cumsum([0, *self.encoder.count(pieces)])
            if self.additive:
                return self._finish(spec, draft, prompt, self._joined(pieces, special), starts, special)
            ids = self.encoder.whole(prompt, special)
            if len(ids) + (draft.budget or 0) <= self.limit:
                return self._finish(spec, draft, prompt, ids, starts * len(ids) // max(int(starts[-1]), 1), special)
            slack += len(ids) + (draft.budget or 0) - self.limit

    def _joined(self, pieces: list[str], special: bool) -> np.ndarray:
        """Ids of the pieces one after another, with the tokenizer's own special tokens where they belong."""
        parts = self.encoder.pieces(pieces)
        return np.concatenate([self.encoder.prefix, *parts, self.encoder.suffix] if special else parts)

    def _draft(self, spec: Spec, slack: int) -> tuple[Draft, list[str]]:
        draft = self.recipe.draft(spec, self.limit - self.overhead - slack, self.encoder, self.source)
        return draft, self.frame.pieces(draft)

    def _finish(
        self, spec: Spec, draft: Draft, prompt: str, ids: np.ndarray, starts: np.ndarray, special: bool
    ) -> dict:
        _memory.keep(prompt, ids)
        budget = self.recipe.budget if draft.budget is None else draft.budget
        before = (len(self.encoder.prefix) if special else 0, 1 if self.frame.chat else 0)
        positions = [None if mark is None else int(starts[mark + before[1]]) + before[0] for mark in draft.marks]
        return {
            "task": self.task,
            "index": spec.index,
            "input": "".join(draft.pieces),
            "gen_prefix": draft.gen_prefix,
            "outputs": draft.outputs,
            "max_length": spec.length,
            "length": len(ids) + budget,
            "prompt_tokens": len(ids),
            "budget": budget,
            "max_id": int(ids.max()),
            "depth": spec.depth,
            "positions": positions,
            "depths": [None if at is None else round(at / max(len(ids), 1), 4) for at in positions],
            "seed": spec.seed,
            **draft.extra,
        }


def cell(
    task: str,
    recipe: Recipe,
    length: int,
    depths: list[float],
    samples: int,
    seed: int,
    tokenizer: str,
    source: str | None = None,
    chat: bool = False,
    use_cache: bool = True,
) -> list[dict]:
    """All documents of one task at one length.

    A task without depths gets as many samples as one with them, so that counts per length are equal.

    Raises:
        Refusal: a sample cannot fit the length; the message names the shortest length that would do.
    """
    tools = encoder(tokenizer)
    store = _cache_file(
        {
            "task": task,
            "recipe": [type(recipe).__name__, asdict(recipe)],  # type: ignore[call-overload]
            "length": length,
            "depths": depths,
            "samples": samples,
            "seed": seed,
            "tokenizer": tools.fingerprint,
            "haystack": prose(source).fingerprint,
            "chat": getattr(tools.tokenizer, "chat_template", None) if chat else None,
            "versions": [__version__, version("wonderwords")],
        }
    )
    if use_cache and store.is_file():
        return json.loads(store.read_text(encoding="utf-8"))
    try:
        documents = [*_documents(task, recipe, length, depths, samples, seed, tools, source, chat)]
    except NoRoom:
        enough = _enough(task, recipe, length, depths, samples, seed, tools, source, chat)
        raise Refusal(
            f"{task} does not fit {length} tokens with this tokenizer: needles, question and {recipe.budget} answer "
            f"tokens need {enough}; ask for --lengths of at least that."
        ) from None
    if use_cache:
        write_text(store, json.dumps(documents, ensure_ascii=False))
    return documents


def _documents(
    task: str, recipe: Recipe, length: int, depths: list[float], samples: int, seed: int, tools: Encoder, *frame: Any
) -> Iterator[dict]:
    """The documents of a cell in order; `frame` is the haystack source and whether there is a chat template."""
    if recipe.has_depth:
        specs = [Spec(task, length, depth, i, seed) for depth in depths for i in range(samples)]
    else:
        specs = [Spec(task, length, None, i, seed) for i in range(samples * len(depths))]
    source, chat = frame
    builder = Builder(task, recipe, length, tools, source=source, chat=chat)
    yield from map(builder.document, specs)


def _enough(task: str, recipe: Recipe, length: int, *rest: Any) -> int:
    """The next length that every sample fits. Names and numbers differ by length, so each try is a new measurement."""
    while True:
        try:
            for _ in _documents(task, recipe, length, *rest):
                pass
            return length
        except NoRoom as lack:
            length += lack.missing


def _cache_file(parameters: dict) -> Path:
    base = os.environ.get("KIMI3_EVAL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "kimi3-eval"
    name = hashlib.sha256(json.dumps(parameters, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return Path(base).expanduser() / "samples" / f"{name}.json"


def write_text(path: Path, text: str) -> None:
    """Writes a file beside its place and renames it, so that readers never see half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False, suffix=".tmp") as handle:
        handle.write(text)
    os.replace(handle.name, path)
