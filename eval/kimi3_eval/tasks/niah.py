"""Needle in a haystack as RULER publishes it (Hsieh et al., 2024): single, multi-key, multi-value, multi-query.

The strings are the benchmark's. Where a depth is asked, the asked needle stands there and the others at random places;
with several asked needles all places are random and the document says where each one landed.
"""

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from ..build import Recipe
from ..haystack import NOISE, prose
from ..specs import Draft, NoRoom, Spec
from ..tokens import Encoder
from ..words import distinct

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
HEAD = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
HEAD_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
QUESTION = "What are all the special magic {kind} for {query} mentioned in the provided text?"
QUESTION_ONE = "What is the special magic {kind} for {query} mentioned in the provided text?"
PREFIX = "The special magic {kind} for {query} mentioned in the provided text are"
PREFIX_ONE = "The special magic {kind} for {query} mentioned in the provided text is"
LINE_BATCH = 64


@dataclass(frozen=True)
class Niah:
    """One member of the family.

    Attributes:
        haystack: `noise` repeats a fixed sentence, `prose` is running text, `needles` is made of further needles.
        key: Kind of the keys, `words` or `uuids`.
        value: Kind of the values, `numbers` or `uuids`.
        keys: Keys that are hidden.
        values: Values per key.
        queries: Keys that are asked for.
        budget: Tokens the answer may take.
    """

    haystack: Literal["noise", "prose", "needles"]
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    budget: int = 128

    @property
    def has_depth(self) -> bool:
        """Whether a single needle is asked for, so that its depth can be chosen."""
        return self.queries * self.values == 1

    def draft(self, spec: Spec, room: int, encoder: Encoder, source: str | None) -> Draft:
        """Builds one sample.

        Args:
            spec: Which sample.
            room: Tokens that input, separator and answer prefix may take together.
            encoder: Counts tokens.
            source: Text for `prose`, see `haystack.prose`.

        Raises:
            NoRoom: needles and question alone do not fit.
        """
        rng = spec.rng()
        one = self.has_depth
        taken: set[str] = set()
        keys = distinct(self.key, self.keys, rng, taken)
        values = [distinct(self.value, self.values, rng, taken) for _ in keys]
        asked = sorted(rng.sample(range(self.keys), self.queries))
        query = listing([keys[i] for i in asked])
        kind = self.value[:-1] if one else self.value
        head = (HEAD_ONE if one else HEAD).format(kind=kind)
        question = (QUESTION_ONE if one else QUESTION).format(kind=kind, query=query)
        prefix = (PREFIX_ONE if one else PREFIX).format(kind=kind, query=query)
        needles = [
            (i, j, NEEDLE.format(kind=self.value, key=keys[i], value=value))
            for i in range(self.keys)
            for j, value in enumerate(values[i])
        ]
        order = [*range(len(needles))]
        rng.shuffle(order)
        needles = [needles[i] for i in order]
        places = [spec.depth if one and spec.depth is not None and i in asked else rng.random() for i, _, _ in needles]

        fixed = encoder.total([head, question, " " + prefix])
        if self.haystack == "prose":
            body, marks, repeats = self._in_prose(needles, places, room - fixed, encoder, source)
        else:
            body, marks, repeats = self._in_lines(spec, taken, needles, places, room - fixed, encoder)
        outputs = [value for i in asked for value in values[i]]
        where = {(i, j): 1 + mark for (i, j, _), mark in zip(needles, marks)}
        return Draft(
            pieces=[head, *body, question],
            outputs=outputs,
            gen_prefix=prefix,
            marks=[where[i, j] for i in asked for j in range(self.values)],
            extra={
                "haystack": {"noise": "noise", "needles": "needles"}.get(self.haystack) or prose(source).name,
                "haystack_passes": repeats,
            },
        )

    def _in_lines(
        self, spec: Spec, taken: set[str], needles: list, places: list[float], room: int, encoder: Encoder
    ) -> tuple[list[str], list[int], int]:
        lines = [text + "\n" for _, _, text in needles]
        room -= require(room, encoder.total(lines))
        if self.haystack == "noise":
            units = [NOISE + "\n"] * (room // encoder.count([NOISE + "\n"])[0])
        else:
            units = self._needle_lines(spec.rng("haystack"), taken, room, encoder)
        slots = [round(place * len(units)) for place in places]
        body, marks = insert(units, lines, slots)
        return body, marks, 1

    def _needle_lines(self, rng: random.Random, taken: set[str], room: int, encoder: Encoder) -> list[str]:
        """Needles nobody asks for, with keys and values of their own, until the room is full."""
        units: list[str] = []
        while True:
            keys = distinct(self.key, LINE_BATCH, rng, taken)
            values = distinct(self.value, LINE_BATCH, rng, taken)
            lines = [NEEDLE.format(kind=self.value, key=k, value=v) + "\n" for k, v in zip(keys, values)]
            for line, tokens in zip(lines, encoder.count(lines)):
                if tokens > room:
                    return units
                units.append(line)
                room -= tokens

    def _in_prose(
        self, needles: list, places: list[float], room: int, encoder: Encoder, source: str | None
    ) -> tuple[list[str], list[int], int]:
        texts = [text for _, _, text in needles]
        newline = 1
        spaced = encoder.total([" " + text for text in texts]) + newline
        sentences, passes = prose(source).fill(room - require(room, spaced), encoder)
        while True:
            sizes = encoder.count([" " + s for s in sentences])
            ends = list(accumulate(sizes, initial=0))
            slots = [_nearest(ends, place * ends[-1]) for place in places]
            body, marks = insert(sentences, texts, slots)
            body = [(" " if i else "") + text for i, text in enumerate(body)]
            body[-1] += "\n"
            # The first piece lost its space and the last one gained a newline: both can cost a token more.
            if not sentences or encoder.total(body) <= room:
                return body, marks, passes
            shorter = sentences[-1].rpartition(" ")[0]
            sentences = [*sentences[:-1], shorter] if shorter else sentences[:-1]


def require(room: int, tokens: int) -> int:
    """Returns `tokens`, after making sure that they fit the room.

    Raises:
        NoRoom: they do not.
    """
    if tokens > room:
        raise NoRoom(tokens - room)
    return tokens


def _nearest(ends: list[int], target: float) -> int:
    """Index of the boundary that lies nearest to a token position."""
    right = min(bisect_left(ends, target), len(ends) - 1)
    left = max(right - 1, 0)
    return left if target - ends[left] < ends[right] - target else right


def insert(units: Sequence[str], needles: Sequence[str], slots: Sequence[int]) -> tuple[list[str], list[int]]:
    """Puts needle n before unit `slots[n]`; returns the sequence and the index of each needle in it."""
    order = sorted(range(len(needles)), key=lambda n: slots[n])
    body: list[str] = []
    marks = [0] * len(needles)
    done = 0
    for n in order:
        body += units[done : slots[n]]
        done = slots[n]
        marks[n] = len(body)
        body.append(needles[n])
    body += units[done:]
    return body, marks


def listing(names: list[str]) -> str:
    """Names joined as RULER writes them: `a`, `a, and b`, `a, b, and c`."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]


NIAH: dict[str, Recipe] = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah("prose"),
    "niah_single_3": Niah("prose", value="uuids"),
    "niah_multikey_1": Niah("prose", keys=4),
    "niah_multikey_2": Niah("needles"),
    "niah_multikey_3": Niah("needles", key="uuids", value="uuids"),
    "niah_multivalue": Niah("prose", values=4),
    "niah_multiquery": Niah("prose", keys=4, queries=4),
}
