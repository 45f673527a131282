"""The synthetic tasks on bare symbols, for training small models: `input_ids` and `labels` in a `datasets.Dataset`.

Ids: 0 padding, 1 start, 2 delimiter (question or answer begins), 3 push, 4 pop, 5 and up symbols. Labels are -100 but
at answers. L sequence length, which every row has, padded at its end.
"""

import random
from collections.abc import Callable

import datasets

PAD, START, DELIMITER, PUSH, POP, FIRST = range(6)
IGNORE = -100
Row = tuple[list[int], list[bool]]


def mqar(rng: random.Random, length: int, symbols: int, pairs: int | None = None) -> Row:
    """Multi-query associative recall: key-value pairs, then every key again, each followed by its value.

    Keys are drawn from the lower half of the symbols, values from the upper half. Arora et al., 2023.
    """
    pairs = (length - 2) // 4 if pairs is None else pairs
    half = symbols // 2
    if pairs > half:
        raise ValueError(f"pairs is {pairs}, but there are only {half} keys (half of {symbols} symbols)")
    keys = rng.sample(range(FIRST, FIRST + half), pairs)
    value = {key: rng.randrange(FIRST + half, FIRST + symbols) for key in keys}
    ids = [START, *(token for key in keys for token in (key, value[key])), DELIMITER]
    asked = [False] * len(ids)
    for key in rng.sample(keys, pairs):
        ids += [key, value[key]]
        asked += [False, True]
    return ids, asked


def copying(rng: random.Random, length: int, symbols: int, reverse: bool = False) -> Row:
    """Symbols, the delimiter, and the symbols again."""
    count = (length - 2) // 2
    items = [rng.randrange(FIRST, FIRST + symbols) for _ in range(count)]
    answer = items[::-1] if reverse else items
    return [START, *items, DELIMITER, *answer], [False] * (count + 2) + [True] * count


def palindrome(rng: random.Random, length: int, symbols: int) -> Row:
    """Symbols, the delimiter, and the symbols in reverse order. Kimi Linear, 2025."""
    return copying(rng, length, symbols, reverse=True)


def stack(rng: random.Random, length: int, symbols: int, stacks: int = 4) -> Row:
    """Pushes and pops on several stacks; what each pop gives is the answer. Kimi Linear, 2025.

    An operation is three tokens: push or pop, the stack (one of the first symbols), the value.
    """
    held: list[list[int]] = [[] for _ in range(stacks)]
    ids, asked = [START], [False]
    while len(ids) + 3 <= length:
        which = rng.randrange(stacks)
        if held[which] and rng.random() < 0.5:
            ids += [POP, FIRST + which, held[which].pop()]
            asked += [False, False, True]
        else:
            value = rng.randrange(FIRST + stacks, FIRST + symbols)
            held[which].append(value)
            ids += [PUSH, FIRST + which, value]
            asked += [False, False, False]
    return ids, asked


KINDS: dict[str, Callable[..., Row]] = {"mqar": mqar, "copying": copying, "palindrome": palindrome, "stack": stack}


def sequences(
    kind: str, samples: int, length: int, symbols: int = 64, seed: int = 0, **options: int
) -> datasets.Dataset:
    """Makes a training or test set.

    Args:
        kind: `mqar`, `copying`, `palindrome` or `stack`.
        samples: Rows.
        length: Tokens of a row.
        symbols: Symbols beside the five special ids; the vocabulary is `symbols + 5`.
        seed: Changes all content; a row depends on it, the kind, the length and its own number only.
        **options: Of the kind: `pairs` of mqar, `stacks` of stack.

    Returns:
        Columns `input_ids` and `labels`, each `[L]` per row.

    Raises:
        ValueError: unknown kind, or a length too short for one question.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")
    rows = []
    for index in range(samples):
        ids, asked = KINDS[kind](random.Random(f"{kind}|{length}|{index}|{seed}"), length, symbols, **options)
        if len(ids) > length or not any(asked):
            raise ValueError(f"length is {length}, but {kind} with {options} needs {len(ids)} or more")
        rest = length - len(ids)
        labels = [token if answer else IGNORE for token, answer in zip(ids, asked)]
        rows.append({"input_ids": ids + [PAD] * rest, "labels": labels + [IGNORE] * rest})
    return datasets.Dataset.from_list(rows)
