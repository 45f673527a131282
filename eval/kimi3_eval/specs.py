"""What one sample is: its specification, the draft a generator makes of it, and the document lm-eval runs."""

import random
from dataclasses import dataclass, field


class NoRoom(Exception):
    """A sample whose fixed parts alone are longer than the room for them.

    Attributes:
        missing: Tokens that are lacking.
    """

    def __init__(self, missing: int) -> None:
        super().__init__(f"{missing} tokens do not fit")
        self.missing = missing


@dataclass(frozen=True)
class Spec:
    """One sample by name: everything that decides its content.

    Attributes:
        task: Short task name.
        length: Tokens of prompt and answer budget together.
        depth: Where the asked needle stands, 0 (start of the haystack) to 1 (end); None for tasks without one.
        index: Number of the sample within its task, length and depth.
        seed: Seed of the run.
    """

    task: str
    length: int
    depth: float | None
    index: int
    seed: int

    def rng(self, stream: str = "") -> random.Random:
        """A generator of its own for this sample, so that content never depends on what was built before."""
        return random.Random(f"{self.task}|{self.length}|{self.depth}|{self.index}|{self.seed}|{stream}")


@dataclass
class Draft:
    """A prompt in pieces.

    Attributes:
        pieces: Texts that make up the input in order.
        outputs: The references that the answer must contain.
        gen_prefix: The start of the answer that the prompt ends with.
        marks: For each output, the index of the piece that holds it, or None where it stands in no single place.
        extra: Further fields of the document, the same for all samples of a task.
        budget: Answer tokens of this sample, where they differ from the task's and are part of the room.
    """

    pieces: list[str]
    outputs: list[str]
    gen_prefix: str
    marks: list[int | None]
    extra: dict = field(default_factory=dict)
    budget: int | None = None
