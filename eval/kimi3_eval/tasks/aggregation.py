"""RULER's tasks that gather over the whole context: variable tracking, common words, frequent words.

Strings and parameters are the benchmark's (Hsieh et al., 2024). None of them has a single needle, so none has a depth.
"""

import random
import string
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.special import zeta

from ..build import Recipe
from ..haystack import NOISE
from ..specs import Draft, NoRoom, Spec
from ..tokens import Encoder
from ..words import all_words, compounds
from .niah import insert, require

VT_HEAD = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
VT_QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
VT_PREFIX = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are: "
)
VT_EXAMPLE_TOKENS = 500
CWE_HEAD = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
CWE_QUESTION = "Question: What are the 10 most common words in the above list?"
CWE_PREFIX = "Answer: The top 10 words that appear most often in the list are:"
FWE_HEAD = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words."
)
FWE_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
FWE_PREFIX = "Answer: According to the coded text above, the three most frequently appeared words are:"


def _letters(rng: random.Random, alphabet: str, size: int, count: int, taken: set[str]) -> list[str]:
    """Distinct random strings that are not in `taken`, which they are added to."""
    found: list[str] = []
    while len(found) < count:
        text = "".join(rng.choices(alphabet, k=size))
        if text not in taken:
            taken.add(text)
            found.append(text)
    return found


@dataclass(frozen=True)
class VariableTracking:
    """One chain of assignments among noise, after one worked example.

    Attributes:
        hops: Assignments after the first.
        budget: Tokens the answer may take.
    """

    hops: int = 4
    budget: int = 30
    has_depth: bool = False

    def draft(self, spec: Spec, room: int, encoder: Encoder, source: str | None) -> Draft:
        """See `Recipe.draft`. The worked example takes up to 500 tokens, a quarter of the room in short prompts."""
        rng = spec.rng()
        taken: set[str] = set()
        example, _, names, prefix = self._text(rng, 3, taken, min(VT_EXAMPLE_TOKENS, room // 4), encoder, True)
        shown = ["".join(example) + " " + prefix + " " + " ".join(names) + "\n\n", "\n\n"]
        body, marks, names, prefix = self._text(rng, 5, taken, room - encoder.total(shown), encoder, False)
        return Draft([*shown, *body], names, prefix, [len(shown) + mark for mark in marks], {"haystack": "noise"})

    def _text(
        self, rng: random.Random, letters: int, taken: set[str], room: int, encoder: Encoder, example: bool
    ) -> tuple[list[str], list[int], list[str], str]:
        """Pieces of one text, where the assignments stand in them, the variables, and the start of the answer."""
        names = _letters(rng, string.ascii_uppercase, letters, self.hops + 1, taken)
        value = str(rng.randint(10000, 99998))
        chain = [f"VAR {names[0]} = {value}\n"]
        chain += [f"VAR {new} = VAR {old} \n" for old, new in pairwise(names)]
        places = sorted(rng.random() for _ in chain)
        question = VT_QUESTION.format(value=value)
        prefix = VT_PREFIX.format(value=value, count=self.hops + 1)
        fixed = encoder.total([VT_HEAD, *chain, question, " " + prefix])
        if example:
            room = max(room, fixed)
        noise = [NOISE + "\n"] * ((room - require(room, fixed)) // encoder.count([NOISE + "\n"])[0])
        body, marks = insert(noise, chain, [round(place * len(noise)) for place in places])
        return [VT_HEAD, *body, question], [1 + mark for mark in marks], names, prefix


@dataclass(frozen=True)
class CommonWords:
    """Ten words that appear more often than all others in a numbered list, after one worked example.

    Attributes:
        common: Words to be named.
        budget: Tokens the answer may take.
    """

    common: int = 10
    budget: int = 120
    has_depth: bool = False

    def draft(self, spec: Spec, room: int, encoder: Encoder, source: str | None) -> Draft:
        """See `Recipe.draft`. Repeats are 30 and 3, in prompts under 4096 tokens 6 and 1, as published."""
        rng = spec.rng()
        short = spec.length < 4096
        example, answer = self._list(rng, *((20, 3, 1) if short else (40, 10, 3)))
        shown = [
            CWE_HEAD,
            *example,
            f"{CWE_QUESTION} {CWE_PREFIX}" + " ".join(f"{i + 1}. {word}" for i, word in enumerate(answer)) + "\n",
        ]
        often, seldom = (6, 1) if short else (30, 3)
        fixed = encoder.total([*shown, CWE_HEAD, CWE_QUESTION, " " + CWE_PREFIX])
        room -= require(room, fixed)
        pool, common = self._pool(rng)
        others = self._fitting(pool, common, often, seldom, room, encoder)
        while True:
            body = self._numbered(spec.rng("order"), common * often + pool[:others] * seldom)
            over = encoder.total(body) - room
            if over <= 0:
                break
            if others == 0:
                raise NoRoom(over)
            others -= 1
        pieces = [*shown, CWE_HEAD, *body, CWE_QUESTION]
        return Draft(pieces, common, CWE_PREFIX, [None] * len(common), {"haystack": "words"})

    def _pool(self, rng: random.Random) -> tuple[list[str], list[str]]:
        """All words in random order, and the common ones, none of which is part of another word of the pool."""
        words = all_words()
        order = rng.sample(words, len(words))
        common: list[str] = []
        for word in order:
            if len(common) == self.common:
                break
            if not any(word.lower() in other.lower() or other.lower() in word.lower() for other in common):
                common.append(word)
        return [word for word in order if not any(c.lower() in word.lower() for c in common)], common

    def _fitting(self, pool: list[str], common: list[str], often: int, seldom: int, room: int, encoder: Encoder) -> int:
        """How many words beside the common ones fit; the pool grows by compounds where the list is too short."""
        taken = often * encoder.total([" " + word for word in common])
        entries = often * len(common)
        taken += encoder.total([f" {i + 1}." for i in range(entries)])
        fits = 0
        while taken <= room:
            if fits == len(pool):
                pool += compounds(len(pool), set(pool), common)
            block = pool[fits : fits + 256]
            words = encoder.count([" " + word for word in block])
            numbers = encoder.count([f" {entries + i + 1}." for i in range(seldom * len(block))])
            for i, size in enumerate(words):
                taken += seldom * size + sum(numbers[i * seldom : (i + 1) * seldom])
                if taken > room:
                    return fits
                fits += 1
            entries += seldom * len(block)
        return fits

    def _list(self, rng: random.Random, count: int, often: int, seldom: int) -> tuple[list[str], list[str]]:
        pool, common = self._pool(rng)
        return self._numbered(rng, common * often + pool[: count - self.common] * seldom), common

    @staticmethod
    def _numbered(rng: random.Random, words: list[str]) -> list[str]:
        """The shuffled words with their numbers, as pieces that end in a newline."""
        rng.shuffle(words)
        pieces = [text for i, word in enumerate(words) for text in (f" {i + 1}.", f" {word}")]
        pieces[0] = pieces[0][1:]
        pieces[-1] += "\n"
        return pieces


@dataclass(frozen=True)
class FrequentWords:
    """The three most frequent words of a coded text whose frequencies follow a zeta distribution.

    Attributes:
        alpha: Exponent of the distribution.
        letters: Letters of a coded word.
        budget: Tokens the answer may take.
    """

    alpha: float = 2.0
    letters: int = 6
    budget: int = 50
    has_depth: bool = False

    def draft(self, spec: Spec, room: int, encoder: Encoder, source: str | None) -> Draft:
        """See `Recipe.draft`. A fiftieth of the length is the vocabulary; the most frequent entry is three dots."""
        rng = spec.rng()
        size = max(spec.length // 50, 5)
        vocabulary = ["...", *_letters(rng, string.ascii_lowercase, self.letters, size - 1, set())]
        share = np.arange(1, size + 1) ** -self.alpha / zeta(self.alpha)
        tokens = np.array(encoder.count([" " + word for word in vocabulary]))
        newline = 1
        fixed = encoder.total([FWE_HEAD, FWE_QUESTION, " " + FWE_PREFIX]) + newline
        room -= fixed
        least = next(n for n in range(1, 10**4) if np.all(np.diff((n * share[1:5]).astype(int)) < 0))
        if self._tokens(least, share, tokens) > room:
            raise NoRoom(self._tokens(least, share, tokens) - room)
        low, high = least, 2 * least
        while self._tokens(high, share, tokens) <= room:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._tokens(middle, share, tokens) <= room else (low, middle)
        counts = (low * share).astype(int)
        words = [word for word, count in zip(vocabulary, counts) for _ in range(count)]
        spec.rng("order").shuffle(words)
        body = [" " + word for word in words]
        body[-1] += "\n"
        return Draft(
            [FWE_HEAD, *body, FWE_QUESTION], vocabulary[1:4], FWE_PREFIX, [None] * 3, {"haystack": "coded words"}
        )

    @staticmethod
    def _tokens(words: int, share: np.ndarray, tokens: np.ndarray) -> int:
        return int(((words * share).astype(int) * tokens).sum())


AGGREGATION: dict[str, Recipe] = {"vt": VariableTracking(), "cwe": CommonWords(), "fwe": FrequentWords()}
