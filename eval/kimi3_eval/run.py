"""Runs a plan: model, lm-eval, results on disk."""

import datetime
import json
import logging
import os
import platform
import sys
import time
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable
from transformers import PreTrainedModel

from . import __version__
from .build import write_text
from .errors import Refusal
from .haystack import prose
from .holdback import FULL
from .plan import Plan
from .probe import mechanisms
from .results import loss_results, task_results
from .store import AnswerStore, ResumableLM, model_fingerprint
from .tasks import PREFIX, TASK_DIR
from .tasks.loss import LOSS
from .tokens import encoder

SCHEMA = 1
RUN_FILE = "run.json"
PACKAGES = ("torch", "transformers", "lm_eval", "datasets", "wonderwords", "modeling-kimi3")


def versions() -> dict[str, str]:
    """Versions of everything that decides results."""
    found = {"kimi3_eval": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def open_directory(output: Path, plan: Plan) -> None:
    """Makes the run's directory, or takes up the run that is in it.

    Raises:
        Refusal: the directory belongs to another run or holds other files, or cannot be written.
    """
    identity = json.loads(json.dumps(plan.as_dict()))
    record = output / RUN_FILE
    if record.is_file():
        known = json.loads(record.read_text(encoding="utf-8"))["plan"]
        changed = [key for key in identity if known.get(key) != identity[key]]
        if changed:
            details = ", ".join(f"{key} {known.get(key)} there, {identity[key]} here" for key in changed)
            raise Refusal(f"{output} belongs to another run ({details}): choose another --output.")
        return
    if output.is_dir() and any(output.iterdir()):
        raise Refusal(f"{output} holds other files and no run: choose an empty or new --output.")
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_text(record, json.dumps({"schema": SCHEMA, "plan": identity, "versions": versions()}, indent=1))
    except OSError as error:
        raise Refusal(f"--output {output} cannot be written ({error.strerror}).") from error


def execute(plan: Plan, output: Path, lm: LM, command: list[str] | None = None) -> dict | None:
    """Runs every task of a plan and writes `results.json`, the samples of each task, and the answers.

    Args:
        plan: A checked plan.
        output: The run's directory, made by `open_directory`.
        lm: The model, any lm-eval model.
        command: What the user typed, for the record.

    Returns:
        The results, or None in processes other than the first.
    """
    started = time.perf_counter()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    fingerprint = model_fingerprint(Path(plan.model))
    manager = TaskManager(
        include_path=str(TASK_DIR), include_defaults=bool(plan.foreign), metadata=plan.metadata if plan.tasks else {}
    )
    tasks = list(manager.load([PREFIX + task for task in plan.tasks] + list(plan.foreign))["tasks"].values())
    columns: dict[str, dict] = {}
    reused = 0
    model_seconds = 0.0
    record: dict = {}
    for column in plan.columns:
        mark = json.dumps([fingerprint, plan.dtype, plan.prefill_chunk_size, versions(), column.name], sort_keys=True)
        store = AnswerStore(output / "answers", mark, lm.rank)
        resumable = ResumableLM(lm, store)
        with nullcontext() if column.name == FULL else lm.hold_back(column):  # type: ignore[attr-defined]
            evaluated = simple_evaluate(
                model=resumable,
                tasks=tasks,
                task_manager=manager,
                bootstrap_iters=0,
                log_samples=True,
                apply_chat_template=plan.chat,
                random_seed=plan.seed,
                numpy_random_seed=plan.seed,
                torch_random_seed=plan.seed,
                fewshot_random_seed=plan.seed,
            )
        store.close()
        reused += resumable.reused
        model_seconds += resumable.model_seconds
        if evaluated is not None:
            columns[column.name] = _column_results(plan, column.name, evaluated, output)
            record = record or evaluated
    if lm.rank != 0:
        return None
    seconds = time.perf_counter() - started
    model = getattr(lm, "model", None)
    facts = mechanisms(model, _first_prompt(record, lm)) if isinstance(model, PreTrainedModel) and plan.tasks else {}
    results = {
        "schema": SCHEMA,
        "versions": versions(),
        "command": command or sys.argv,
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "plan": plan.as_dict(),
        "model": {"fingerprint": fingerprint, "class": type(lm).__name__, **_model_facts(lm)},
        "tokenizer": {"name": plan.tokenizer, "fingerprint": encoder(plan.tokenizer).fingerprint},
        "haystack": {"name": prose(plan.haystack).name, "fingerprint": prose(plan.haystack).fingerprint},
        "columns": columns,
        "mechanisms": facts,
        "time": {
            "seconds": round(seconds, 3),
            "model_seconds": round(model_seconds, 3),
            "overhead": round(1 - model_seconds / seconds, 4),
            "answers_reused": reused,
            "processes": lm.world_size,
        },
        "lm_eval": {key: record[key] for key in ("results", "configs", "versions", "n-samples", "config")},
    }
    write_text(output / "results.json", json.dumps(results, indent=1, default=handle_non_serializable))
    return json.loads((output / "results.json").read_text(encoding="utf-8"))


def _column_results(plan: Plan, column: str, evaluated: dict, output: Path) -> dict:
    """Writes the samples of one column and makes its results."""
    samples = evaluated.pop("samples")
    prompts = [row["arguments"][0][0] for rows in samples.values() for row in rows]
    evaluated["longest_prompt"] = max(prompts, key=len)
    suffix = "" if column == FULL else "__" + column.replace("=", "-")
    for name, rows in samples.items():
        rows.sort(key=lambda row: row["doc_id"])
        lines = (json.dumps(row, default=handle_non_serializable, ensure_ascii=False) for row in rows)
        write_text(output / f"samples_{name}{suffix}.jsonl", "".join(line + "\n" for line in lines))
    lengths, depths = list(plan.lengths), list(plan.depths)
    own = {task: task_results(samples[PREFIX + task], lengths, depths) for task in plan.tasks if task not in LOSS}
    loss = {"loss": loss_results(samples[PREFIX + "loss"], lengths)} if "loss" in plan.tasks else {}
    others = {name: _numbers(evaluated["results"].get(name, {})) for name in plan.foreign}
    return {"tasks": own, "lm_eval_tasks": others, **loss}


def _first_prompt(evaluated: dict, lm: LM) -> np.ndarray:
    """Ids of the longest prompt of the run, for the pass that looks into the model."""
    return lm.prompt_ids(evaluated["longest_prompt"])  # type: ignore[attr-defined]


def _numbers(metrics: dict) -> dict[str, float]:
    return {key.split(",")[0]: value for key, value in metrics.items() if isinstance(value, float)}


def _model_facts(lm: LM) -> dict:
    model = getattr(lm, "model", None)
    if model is None or not hasattr(model, "num_parameters"):
        return {}
    return {
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype),
        "type": model.config.model_type,
        "device": str(lm.device),
    }


def process_index() -> int:
    """Number of this process among those of `accelerate launch`, before anything of it is set up."""
    return int(os.environ.get("RANK", "0"))
