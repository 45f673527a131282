"""What a run will do, checked before anything long starts.

A plan is made of a model directory's config and tokenizer only. Making it builds (or finds) every sample, so that a
length that does not fit, a task that does not exist or a token the model lacks is refused before the model loads.
"""

import difflib
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from .errors import Refusal
from .holdback import FULL, Column, check_columns, column
from .model import context_limit
from .tasks import PREFIX, TASKS, documents
from .tokens import TOKENIZER_FILES, encoder


@dataclass(frozen=True)
class Plan:
    """Everything that decides the answers and scores of a run.

    Attributes:
        model: Checkpoint directory.
        tokenizer: `bytes` or a directory.
        tasks: Short names of this package's tasks.
        foreign: Names of other lm-eval tasks to run beside them.
        lengths: Tokens of prompt and answer budget together.
        depths: Where asked needles stand.
        samples: Samples for each length and depth.
        seed: Changes all content.
        haystack: Text instead of the shipped one.
        chat: Whether prompts go through the chat template.
        dtype: Dtype that the model is loaded in.
        prefill_chunk_size: Tokens of a prompt that go through the model at once.
        hold_back: Names of further columns, see `holdback`.
    """

    model: str
    tokenizer: str
    tasks: tuple[str, ...]
    foreign: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int
    seed: int
    haystack: str | None = None
    chat: bool = False
    dtype: str = "auto"
    prefill_chunk_size: int | None = None
    hold_back: tuple[str, ...] = ()

    @property
    def columns(self) -> list[Column]:
        """The whole model first, then the ways in which something of it is held back."""
        return [column(name) for name in dict.fromkeys((FULL, *self.hold_back))]

    @property
    def metadata(self) -> dict:
        """What lm-eval hands to the task files' generator."""
        return {
            "lengths": list(self.lengths),
            "depths": list(self.depths),
            "samples": self.samples,
            "seed": self.seed,
            "tokenizer": self.tokenizer,
            "haystack": self.haystack,
            "chat": self.chat,
        }

    def as_dict(self) -> dict:
        """The plan as JSON holds it."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def depths_of(text: str) -> tuple[float, ...]:
    """Depths from the command line: a comma-separated list within 0 to 1, or a count that is spread evenly.

    Raises:
        Refusal: neither.
    """
    try:
        if "," not in text and "." not in text and int(text) > 0:
            count = int(text)
            return tuple(round(i / (count - 1), 4) for i in range(count)) if count > 1 else (0.5,)
        depths = tuple(float(part) for part in text.split(","))
    except ValueError:
        depths = ()
    if not depths or any(not 0 <= depth <= 1 for depth in depths) or len(set(depths)) < len(depths):
        raise Refusal(f"--depths {text} must be different numbers from 0 to 1, as in 0,0.5,1, or a count such as 5.")
    return depths


def lengths_of(text: str) -> tuple[int, ...]:
    """Lengths from the command line, with `k` for 1024, in rising order.

    Raises:
        Refusal: not a list of positive numbers.
    """
    try:
        lengths = [int(p[:-1]) * 1024 if p[-1:].lower() == "k" else int(p) for p in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise Refusal(f"--lengths {text} must be positive token counts, as in 512,4096 or 4k,32k.")
    return tuple(sorted(set(lengths)))


def split_tasks(names: list[str], others: list[str] | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sorts task names into this package's (short names) and others of lm-eval.

    Args:
        names: What the user asked for; `lm_eval:NAME` asks for lm-eval's own task of a name that this package has too.
        others: Names lm-eval knows; None asks lm-eval, and only when a name is not one of ours.

    Raises:
        Refusal: a name that neither knows, with the nearest ones.
    """
    own: list[str] = []
    foreign: list[str] = []
    for name in dict.fromkeys(names):
        short = name.removeprefix(PREFIX)
        if short in TASKS:
            own.append(short)
            continue
        likely = difflib.get_close_matches(short, list(TASKS), 3, 0.85)
        if likely and not name.startswith("lm_eval:"):
            raise Refusal(
                f"There is no task {name}; near it: {', '.join(likely)} (lm_eval:{name} asks lm-eval for it)."
            )
        if others is None:
            from lm_eval.tasks import TaskManager

            others = TaskManager().all_tasks
        wanted = name.removeprefix("lm_eval:")
        if wanted not in others:
            near = difflib.get_close_matches(short, list(TASKS), 3, 0.5) or difflib.get_close_matches(name, others, 3)
            hint = f"; near it: {', '.join(near)}" if near else f"; known: {', '.join(TASKS)}"
            raise Refusal(f"There is no task {name}{hint}.")
        foreign.append(wanted)
    return tuple(own), tuple(foreign)


def load_config(model: str) -> PretrainedConfig:
    """The config of a checkpoint.

    Raises:
        Refusal: there is none, or it cannot be read.
    """
    import modeling_kimi3  # noqa: F401

    if Path(model).exists() and not (Path(model) / "config.json").is_file():
        raise Refusal(f"{model} is not a checkpoint directory: it has no config.json.")
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Refusal(f"The model {model} cannot be read: {reason}") from error


def tokenizer_of(model: str, tokenizer: str | None) -> str:
    """The tokenizer to use: the one asked for, otherwise the checkpoint's own.

    Raises:
        Refusal: the checkpoint has none and none was asked for.
    """
    if tokenizer is not None:
        return tokenizer
    if Path(model).is_dir() and not any((Path(model) / file).is_file() for file in TOKENIZER_FILES):
        raise Refusal(f"{model} holds no tokenizer: add --tokenizer DIR, or --tokenizer bytes.")
    return model


def check(plan: Plan, config: PretrainedConfig) -> dict[str, list[dict]]:
    """Refuses what cannot run, and builds the samples.

    Returns:
        The documents of each of this package's tasks.

    Raises:
        Refusal: a length beyond the model or too short for a task, a tokenizer that does not match the model.
    """
    limit = context_limit(config)
    if limit is not None and plan.lengths and max(plan.lengths) > limit:
        raise Refusal(
            f"--lengths {max(plan.lengths)} is beyond the model's context of {limit} tokens: ask for at most {limit}."
        )
    check_columns(plan.columns, config)
    if plan.samples < 1:
        raise Refusal(f"--samples {plan.samples} must be at least 1.")
    if plan.chat and not getattr(encoder(plan.tokenizer).tokenizer, "chat_template", None):
        raise Refusal(f"The tokenizer {plan.tokenizer} has no chat template: run without --apply-chat-template.")
    built = {task: documents(task, **plan.metadata) for task in plan.tasks}
    size = (getattr(config, "text_config", None) or config).vocab_size
    largest = max((doc["max_id"] for docs in built.values() for doc in docs), default=0)
    if largest >= size:
        raise Refusal(
            f"The tokenizer {plan.tokenizer} gives token {largest} but the model knows only {size}: give the "
            "model's own with --tokenizer DIR."
        )
    return built
