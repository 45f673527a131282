"""The synthetic tasks of the linear-attention papers as text that any language model can read.

Multi-query associative recall (Arora et al., 2023), palindrome and stack (Kimi Linear, 2025), and copying. Palindrome
and copying grow with the length on both sides: half the tokens are the list, half the answer. For training small
models on bare symbols see `sequences`.
"""

from dataclasses import dataclass

from ..build import Recipe
from ..specs import Draft, NoRoom, Spec
from ..tokens import Encoder
from ..words import all_words, distinct
from .niah import listing, require

RECALL_HEAD = "Each key below has one value. Memorize them. I will ask for some of the values afterwards.\n"
STACK_HEAD = "A stack starts empty. Each line below pushes a word onto it or pops the last one off.\n"
STACK_QUESTION = "Which word is on top of the stack now?"
STACK_PREFIX = "The word on top is"
LIST_HEADS = {
    "copying": "Repeat the following list of words in the same order.\n",
    "palindrome": "Repeat the following list of words in reverse order.\n",
}
LIST_PREFIXES = {"copying": "The list in the same order:", "palindrome": "The list in reverse order:"}
SLACK = 4


def _short_words() -> list[str]:
    return [word for word in all_words() if len(word) <= 6 and word.isalpha() and word.islower()]


def _equal_words(encoder: Encoder) -> list[str]:
    """The largest set of short words that all cost the same in tokens, so that a stack's lines do too."""
    words = _short_words()
    groups: dict[int, list[str]] = {}
    for word, size in zip(words, encoder.count([f"push {word}\n" for word in words])):
        groups.setdefault(size, []).append(word)
    return max(groups.values(), key=len)


@dataclass(frozen=True)
class Recall:
    """Keys with values until the length is full; a few of the keys are asked for.

    Attributes:
        queries: Keys asked for.
        budget: Tokens the answer may take.
    """

    queries: int = 4
    budget: int = 64
    has_depth: bool = False

    def draft(self, spec: Spec, room: int, encoder: Encoder, source: str | None) -> Draft:
        """See `Recipe.draft`. The asked keys stand at random places."""
        rng = spec.rng()
        taken: set[str] = set()
        asked = distinct("words", self.queries, rng, taken)
        values = [str(rng.randint(1000, 9999)) for _ in asked]
        query = listing(asked)
        question = f"What are the values of {query}?"
        prefix = f"The values of {query} are"
        lines = [f"{key}: {value}\n" for key, value in zip(asked, values)]
        room -= require(room, encoder.total([RECALL_HEAD, *lines, question, " " + prefix]))
        others: list[str] = []
        stream = spec.rng("others")
        while True:
            block = [f"{key}: {stream.randint(1000, 9999)}\n" for key in distinct("words", 32, stream, taken)]
            sizes = encoder.count(block)
            kept = next((i for i in range(len(block)) if sum(sizes[: i + 1]) > room), len(block))
            others += block[:kept]
            room -= sum(sizes[:kept])
            if kept < len(block):
                break
        places = sorted((rng.random(), n) for n in range(len(lines)))
        body = list(others)
        for shift, (place, n) in enumerate(places):
            body.insert(round(place * len(others)) + shift, lines[n])
        marks = [1 + body.index(line) for line in lines]
        return Draft([RECALL_HEAD, *body, question], values, prefix, list(marks), {"haystack": "pairs"})


@dataclass(frozen=True)
class Stack:
    """Pushes and pops; the word on top at the end was pushed at the asked depth, and all after it cancels out.

    Attributes:
        budget: Tokens the answer may take.
    """

    budget: int = 16
    has_depth: bool = True

    def draft(self, spec: Spec, room: int, encoder: Encoder, source: str | None) -> Draft:
        """See `Recipe.draft`."""
        rng = spec.rng()
        words = rng.sample(_equal_words(encoder), 33)
        answer = words.pop()
        room -= require(room, encoder.total([STACK_HEAD, f"push {answer}\n", STACK_QUESTION, " " + STACK_PREFIX]))
        pairs = room // encoder.total([f"push {words[0]}\n", "pop\n"])
        before = round((spec.depth if spec.depth is not None else rng.random()) * pairs)
        head = self._walk(rng, words, before)
        tail = self._walk(rng, words, pairs - before)
        mark = 1 + len(head)
        pieces = [STACK_HEAD, *head, f"push {answer}\n", *tail, STACK_QUESTION]
        return Draft(pieces, [answer], STACK_PREFIX, [mark], {"haystack": "stack"})

    @staticmethod
    def _walk(rng, words: list[str], pairs: int) -> list[str]:
        """`pairs` pushes and as many pops in an order that never pops an empty stack and ends where it began."""
        lines: list[str] = []
        pushed = popped = 0
        while popped < pairs:
            if pushed < pairs and (pushed == popped or rng.random() < 0.5):
                lines.append(f"push {rng.choice(words)}\n")
                pushed += 1
            else:
                lines.append("pop\n")
                popped += 1
        return lines


@dataclass(frozen=True)
class WholeList:
    """A list of words to be written again, in the same or the reverse order. The answer takes half the length.

    Attributes:
        kind: `copying` or `palindrome`.
        budget: 0, since each draft brings its own.
    """

    kind: str
    budget: int = 0
    has_depth: bool = False

    def draft(self, spec: Spec, room: int, encoder: Encoder, source: str | None) -> Draft:
        """See `Recipe.draft`. Words repeat once the word list is used up."""
        rng = spec.rng()
        head, prefix = LIST_HEADS[self.kind], LIST_PREFIXES[self.kind]
        room -= require(room, encoder.total([head, " " + prefix]) + SLACK + 1)
        pool = _short_words()
        words: list[str] = []
        answer_tokens = 0
        while True:
            word = rng.choice(pool)
            (size,) = encoder.count([" " + word])
            if 2 * size > room:
                break
            words.append(word)
            room -= 2 * size
            answer_tokens += size
        if len(words) < 2:
            raise NoRoom(8)
        body = [words[0], *(" " + word for word in words[1:])]
        body[-1] += "\n"
        outputs = words if self.kind == "copying" else words[::-1]
        draft = Draft([head, *body], outputs, prefix, [None] * len(outputs), {"haystack": "list", "ordered": True})
        draft.budget = answer_tokens + SLACK
        return draft


SYNTHETIC: dict[str, Recipe] = {
    "mqar": Recall(),
    "stack": Stack(),
    "copying": WholeList("copying"),
    "palindrome": WholeList("palindrome"),
}
