"""Loss by position on long running text: does context that lies further back still help?"""

from dataclasses import dataclass

from ..build import Recipe
from ..haystack import prose
from ..specs import Draft, Spec
from ..tokens import Encoder

FIRST_BUCKET = 64


def buckets(length: int) -> list[tuple[int, int]]:
    """Stretches of positions that a loss is averaged over: 1 to 63, then each twice as long as all before it."""
    edges = [1]
    step = FIRST_BUCKET
    while step < length:
        edges.append(step)
        step *= 2
    return list(zip(edges, [*edges[1:], length]))


@dataclass(frozen=True)
class Loss:
    """Running text that fills the length, from another place of the source for each sample.

    Attributes:
        budget: 0, nothing is generated.
    """

    budget: int = 0
    has_depth: bool = False

    def draft(self, spec: Spec, room: int, encoder: Encoder, source: str | None) -> Draft:
        """See `Recipe.draft`."""
        text = prose(source)
        sentences, passes = text.fill(room, encoder, start=spec.rng().randrange(len(text.sentences)))
        pieces = [sentences[0], *(" " + sentence for sentence in sentences[1:])] if sentences else ["."]
        while len(pieces) > 1 and encoder.total(pieces) > room:
            pieces.pop()
        return Draft(pieces, [], "", [], {"haystack": text.name, "haystack_passes": passes})


LOSS: dict[str, Recipe] = {"loss": Loss()}
