"""Random names, numbers and words of the RULER tasks (Hsieh et al., 2024), drawn from a given generator."""

import random
import uuid
from functools import cache

from wonderwords import RandomWord


@cache
def _categories() -> tuple[list[str], list[str], list[str]]:
    source = RandomWord()
    nouns, adjectives, verbs = (
        sorted(set(source.filter(include_categories=[kind]))) for kind in ("noun", "adjective", "verb")
    )
    return nouns, adjectives, verbs


@cache
def all_words() -> list[str]:
    """Every noun, adjective and verb of the list once, sorted."""
    nouns, adjectives, verbs = _categories()
    return sorted({*nouns, *adjectives, *verbs})


def word(rng: random.Random) -> str:
    """An adjective and a noun joined by a hyphen."""
    nouns, adjectives, _ = _categories()
    return f"{rng.choice(adjectives)}-{rng.choice(nouns)}"


def number(rng: random.Random) -> str:
    """A number of seven digits."""
    return str(rng.randint(10**6, 10**7 - 1))


def uid(rng: random.Random) -> str:
    """A random UUID, version 4."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


DRAW = {"words": word, "numbers": number, "uuids": uid}


def distinct(kind: str, count: int, rng: random.Random, taken: set[str] | None = None) -> list[str]:
    """Draws `count` values of a kind that differ from each other and from `taken`, which they are added to."""
    taken = set() if taken is None else taken
    found: list[str] = []
    while len(found) < count:
        value = DRAW[kind](rng)
        if value not in taken:
            taken.add(value)
            found.append(value)
    return found


def compounds(count: int, taken: set[str], avoid: list[str]) -> list[str]:
    """Further words where the list is used up: adjective-noun compounds that are not taken and hold none of `avoid`."""
    nouns, adjectives, _ = _categories()
    rng = random.Random(f"compounds|{len(taken)}")
    found: list[str] = []
    while len(found) < count:
        text = f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
        if text not in taken and not any(part.lower() in text.lower() for part in avoid):
            taken.add(text)
            found.append(text)
    return found
