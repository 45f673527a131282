"""The tasks: generators, scoring, and the functions that the task files name.

`TASKS` maps short names to recipes. lm-eval knows a task as `kimi3_` plus the short name, so that its own port of RULER
stays reachable under its own names.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import datasets

from ..build import Recipe, cell
from .aggregation import AGGREGATION
from .loss import LOSS
from .niah import NIAH
from .sequences import sequences
from .synthetic import SYNTHETIC

TASK_DIR = Path(__file__).parent
PREFIX = "kimi3_"
DEFAULT_LENGTHS = (4096,)
DEFAULT_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DEFAULT_SAMPLES = 20

TASKS: dict[str, Recipe] = {**NIAH, **AGGREGATION, **SYNTHETIC, **LOSS}


def documents(
    kind: str,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    depths: Sequence[float] = DEFAULT_DEPTHS,
    samples: int = DEFAULT_SAMPLES,
    seed: int = 0,
    tokenizer: str | None = None,
    haystack: str | None = None,
    chat: bool = False,
    cache: bool = True,
) -> list[dict]:
    """All documents of a task, length by length.

    Args:
        kind: Short name of the task.
        lengths: Tokens of prompt and answer budget together.
        depths: Where the asked needle stands, each between 0 and 1.
        samples: Samples for each length and depth.
        seed: Changes all content.
        tokenizer: `bytes` or a directory.
        haystack: Text instead of the shipped one, see `haystack.prose`.
        chat: Whether the prompt goes through the tokenizer's chat template.
        cache: Whether built samples are kept on disk and read again.
    """
    if tokenizer is None:
        raise ValueError(f"{kind}: lengths are in tokens, so the task needs tokenizer='bytes' or a directory")
    rows: list[dict] = []
    for length in lengths:
        rows += cell(
            kind, TASKS[kind], length, [float(d) for d in depths], samples, seed, tokenizer, haystack, chat, cache
        )
    return rows


def dataset(
    kind: str, tokenizer: str | None = None, pretrained: str | None = None, model: str | None = None, **options
) -> dict[str, datasets.Dataset]:
    """What the task files call: the documents as lm-eval's `test` split.

    Options are those of `documents`; lm-eval adds its own metadata, which is passed over. Without a tokenizer the
    model's own directory is used.
    """
    known = {"lengths", "depths", "samples", "seed", "haystack", "chat", "cache"}
    chosen = {name: value for name, value in options.items() if name in known}
    rows = documents(kind, tokenizer=tokenizer or pretrained or model, **chosen)
    return {"test": datasets.Dataset.from_list(rows, split=datasets.Split.TEST)}


def found(answer: str, references: Sequence[str]) -> list[bool]:
    """Which references stand in the answer, whatever the case: RULER's `string_match_all` before it averages."""
    text = re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()
    return [reference.lower() in text for reference in references]


def hits(doc: dict, answer: str) -> list[bool]:
    """Which references an answer gives: anywhere in it, or in their order where the document asks for that."""
    if doc.get("ordered"):
        words = answer.split()
        return [i < len(words) and words[i].lower() == ref.lower() for i, ref in enumerate(doc["outputs"])]
    return found(answer, doc["outputs"])


def score(doc: dict, results: Sequence[str]) -> dict[str, float]:
    """Share of the references that the answer gives."""
    right = hits(doc, results[0])
    return {"score": sum(right) / len(right)}


def loss_score(doc: dict, results: Sequence[list[list[float]]]) -> dict[str, float]:
    """Mean loss of a text's tokens, from the sum and count of each bucket."""
    total, count = (sum(column) for column in zip(*results[0]))
    return {"loss": total / count}


__all__ = ["TASKS", "TASK_DIR", "dataset", "documents", "found", "hits", "loss_score", "score", "sequences"]
