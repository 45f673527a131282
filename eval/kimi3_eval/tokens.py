"""Tokenizers by name, and token counts of texts that are built from pieces.

A prompt is a list of pieces whose ids, put one after another, are the ids of the whole text. That holds for byte-level
BPE when a piece starts at a space before a word or ends with its newline, since those tokenizers split there before
they merge. It saves tokenising a haystack again for every sample. `Encoder.additive` says whether it holds for a
tokenizer; where it does not, callers measure the finished text.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .errors import Refusal

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tiktoken.model", "tokenizer.model", "vocab.json")
MEMO_MAX_PIECE = 4096


@cache
def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Loads a tokenizer once per process.

    Args:
        name: `bytes` for the byte-level tokenizer of `modeling_kimi3`, otherwise a directory that AutoTokenizer reads.

    Raises:
        Refusal: the directory holds no tokenizer, or what it holds encodes text to nothing.
    """
    import modeling_kimi3

    if name == "bytes":
        return modeling_kimi3.KimiK3ByteTokenizer()
    path = Path(name)
    if path.is_dir() and not any((path / file).is_file() for file in TOKENIZER_FILES):
        raise Refusal(f"{name} holds no tokenizer: give one with --tokenizer DIR, or --tokenizer bytes.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Refusal(f"--tokenizer {name} cannot be loaded ({first_line}).") from error
    if not tokenizer("The quick brown fox.", add_special_tokens=False)["input_ids"]:
        raise Refusal(f"The tokenizer in {name} encodes text to no tokens, so lengths cannot be measured.")
    return tokenizer


class Encoder:
    """Counts and encodes pieces of text with one tokenizer.

    Attributes:
        tokenizer: The tokenizer.
        prefix: Ids that the tokenizer puts before every text by default, such as a BOS token.
        suffix: Ids that it puts after every text by default.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._memo: dict[str, np.ndarray] = {}
        bare = self.whole("a", special=False)
        dressed = self.whole("a", special=True)
        start = next(i for i in range(len(dressed)) if dressed[i : i + len(bare)].tolist() == bare.tolist())
        self.prefix = dressed[:start]
        self.suffix = dressed[start + len(bare) :]

    def whole(self, text: str, special: bool) -> np.ndarray:
        """Ids of one text, int32 `[T]`, with or without the tokenizer's own special tokens around it."""
        ids = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int32)

    def pieces(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each piece without special tokens; each distinct short piece is tokenised once per process."""
        missing = list(dict.fromkeys(text for text in texts if text not in self._memo))
        if missing:
            batch = self.tokenizer(missing, add_special_tokens=False, verbose=False)["input_ids"]
            found = {text: np.asarray(ids, dtype=np.int32) for text, ids in zip(missing, batch)}
            self._memo.update((text, ids) for text, ids in found.items() if len(text) <= MEMO_MAX_PIECE)
            return [found[text] if text in found else self._memo[text] for text in texts]
        return [self._memo[text] for text in texts]

    def count(self, texts: Sequence[str]) -> list[int]:
        """Token count of each piece without special tokens."""
        return [len(ids) for ids in self.pieces(texts)]

    def total(self, texts: Sequence[str]) -> int:
        """Sum of the token counts of the pieces."""
        return sum(self.count(texts))

    @property
    def fingerprint(self) -> str:
        """A hash that changes when the tokenizer does: its definition where it has one, and the ids of a probe text."""
        digest = hashlib.sha256(type(self.tokenizer).__name__.encode())
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            digest.update(backend.to_str().encode())
        probe = "The grass is green.\n1234567 tall-tree 3f2504e0-4f89-41d3 VAR AB = VAR CD \n 42. naïve “quotes”"
        digest.update(self.whole(probe, special=True).tobytes())
        digest.update(str(len(self.tokenizer)).encode())
        return digest.hexdigest()[:16]


@cache
def encoder(name: str) -> Encoder:
    """The encoder of `load_tokenizer(name)`, one per process."""
    return Encoder(load_tokenizer(name))
