"""From scored samples to the results of a run: recall by task, length and depth, with counts and intervals."""

from collections.abc import Iterable

from .stats import summary
from .tasks import hits
from .tasks.loss import buckets


def needle_depths(sample: dict) -> list[tuple[float, float]]:
    """Depth and hit (1 or 0) of each needle that a sample asks for.

    A sample with a chosen depth counts at that depth; one whose needles landed at random places counts each needle
    where it landed.
    """
    doc = sample["doc"]
    right = hits(doc, sample["filtered_resps"][0])
    depths = [doc["depth"]] * len(right) if doc["depth"] is not None else doc["depths"]
    return [(depth, float(hit)) for depth, hit in zip(depths, right) if depth is not None]


def _nearest(depth: float, grid: list[float]) -> float:
    return min(grid, key=lambda step: abs(step - depth))


def task_results(samples: Iterable[dict], lengths: list[int], depths: list[float]) -> dict:
    """Results of one task.

    Args:
        samples: lm-eval's logged samples, each with its document and score.
        lengths: Lengths of the run.
        depths: Depths of the run; needles at random depths are counted at the nearest one.

    Returns:
        Overall `score`, `n` and `interval`; the same `by_length`, `by_depth` and for each (length, depth) in `cells`.
        By length the unit is the sample; by depth and in cells it is the needle.
    """
    rows = list(samples)
    needles = [
        (row["doc"]["max_length"], _nearest(depth, depths), hit) for row in rows for depth, hit in needle_depths(row)
    ]
    return {
        **summary([row["score"] for row in rows]),
        "by_length": [
            {"length": n, **summary([row["score"] for row in rows if row["doc"]["max_length"] == n])} for n in lengths
        ],
        "by_depth": [
            {"depth": d, **summary([hit for _, depth, hit in needles if depth == d])} for d in depths if needles
        ],
        "cells": [
            {"length": n, "depth": d, **summary([hit for length, depth, hit in needles if (length, depth) == (n, d)])}
            for n in lengths
            for d in depths
            if needles
        ],
    }


def loss_results(samples: Iterable[dict], lengths: list[int]) -> dict:
    """Results of the loss task.

    Returns:
        For each length the mean loss in nats, the count of texts, and `by_position`: mean loss of the tokens from
        position `start` up to `end`.
    """
    rows = list(samples)
    by_length = []
    for length in lengths:
        texts = [row for row in rows if row["doc"]["max_length"] == length]
        parts = [row["filtered_resps"][0] for row in texts]
        spans = buckets(max(row["doc"]["prompt_tokens"] for row in texts))
        sums = [[sum(part[i][k] for part in parts if i < len(part)) for k in (0, 1)] for i in range(len(spans))]
        by_length.append(
            {
                "length": length,
                "n": len(texts),
                "loss": sum(total for total, _ in sums) / sum(count for _, count in sums),
                "by_position": [
                    {"start": start, "end": end, "loss": total / count}
                    for (start, end), (total, count) in zip(spans, sums)
                    if count
                ],
            }
        )
    return {"by_length": by_length}


def table(results: dict) -> str:
    """Recall by task and length as a plain table."""
    columns = results["columns"]
    lengths = results["plan"]["lengths"]
    lines = []
    for name, column in columns.items():
        if len(columns) > 1:
            lines.append(f"[{name}]")
        lines.append(f"{'task':<20}" + "".join(f"{n:>22}" for n in lengths))
        for task, row in column["tasks"].items():
            cells = {cell["length"]: cell for cell in row["by_length"]}
            text = "".join(_cell(cells[n]) for n in lengths)
            lines.append(f"{task:<20}" + text)
        for row in column.get("loss", {}).get("by_length", []):
            spans = "  ".join(f"{part['start']}-{part['end'] - 1}: {part['loss']:.3f}" for part in row["by_position"])
            lines.append(f"loss in nats at {row['length']}: {row['loss']:.3f}   by position  {spans}")
        for task, metrics in column.get("lm_eval_tasks", {}).items():
            lines.append(f"{task:<20}  " + ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))
    return "\n".join(lines)


def _cell(cell: dict) -> str:
    low, high = cell["interval"]
    text = f"{cell['score']:.2f} [{low:.2f}, {high:.2f}]"
    return f"{text:>22}"
