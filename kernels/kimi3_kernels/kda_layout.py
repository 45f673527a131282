"""What every form of KDA needs around its arithmetic: checks, and how a token stream is cut into chunks.

Shapes: B batch, T time, H heads, K key dim, V value dim, N sequences (B, or the packed sequences of `cu_seqlens`),
C tokens of a chunk, n chunks of a segment.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 32
SEGMENT = 8  # chunks: their temporaries fit the last-level cache
STATE_CACHE = 2**19  # bytes of states per thread that are worked on at once: half of a core's cache
MOST_STATES = 32


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raises ValueError, naming the argument, where the shapes of a KDA call do not fit each other."""
    if k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"k and v must be [B, T, H, K] and [B, T, H, V], got {tuple(k.shape)} and {tuple(v.shape)}")
    batch, _, heads, width = k.shape
    expected = {"q": k.shape, "g": k.shape, "v": (*k.shape[:3], v.shape[3]), "beta": k.shape[:3]}
    for name, value in (("q", q), ("g", g), ("v", v), ("beta", beta)):
        if value.shape != expected[name]:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {tuple(expected[name])}")
    sequences = batch
    if cu_seqlens is not None:
        if batch != 1 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            raise ValueError(
                f"cu_seqlens packs sequences in one row: expected B = 1 and cu_seqlens [N + 1], "
                f"got B = {batch} and cu_seqlens {tuple(cu_seqlens.shape)}"
            )
        sequences = cu_seqlens.shape[0] - 1
    state_shape = (sequences, heads, width, v.shape[3])
    if initial_state is not None and initial_state.shape != state_shape:
        raise ValueError(f"initial_state has shape {tuple(initial_state.shape)}, expected {state_shape}")


def sequence_bounds(cu_seqlens: Tensor, length: int) -> list[int]:
    """cu_seqlens [N + 1] as Python integers; ValueError unless it rises from 0 to `length`."""
    bounds = [int(b) for b in cu_seqlens.tolist()]
    if bounds[0] != 0 or bounds[-1] != length or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"cu_seqlens is {bounds}, expected non-decreasing values from 0 to T = {length}")
    return bounds


@dataclass(frozen=True)
class Segment:
    """Consecutive chunks that are worked on together, so that temporaries stay in cache and do not grow with T.

    Attributes:
        chunks: number of chunks n.
        start: first token, where the n * C slots are tokens in a row.
        slots, tokens: [filled] where they are not: slot `slots[i]` holds token `tokens[i]`, the others are empty.
        opens, closes: per chunk, the sequence that begins or ends with it, or None.
    """

    chunks: int
    start: int
    slots: Tensor | None
    tokens: Tensor | None
    opens: tuple[int | None, ...]
    closes: tuple[int | None, ...]

    def take(self, x: Tensor, buffer: Tensor) -> Tensor:
        """Copies the segment's part of x [B, T, ...] into buffer [B, n * C, ...]; empty slots become zero.

        Zeros make an empty slot an identity. The copy reads memory in order (and converts the dtype), which costs less
        than reading it head by head, in rows a few kilobytes apart.
        """
        if self.tokens is None or self.slots is None:
            return buffer.copy_(x[:, self.start : self.start + self.chunks * CHUNK])
        buffer.zero_()
        return buffer.index_copy_(1, self.slots, x.index_select(1, self.tokens).to(buffer.dtype))

    def room(self, x: Tensor) -> Tensor:
        """Where to write this segment's part of x [B, T, ...]; `give` then brings it home."""
        if self.tokens is None:
            return x[:, self.start : self.start + self.chunks * CHUNK]
        return x.new_empty(x.shape[0], self.chunks * CHUNK, *x.shape[2:])

    def give(self, x: Tensor, room: Tensor) -> None:
        """Copies what was written into `room(x)` to x, where room was not a view of it."""
        if self.tokens is not None and self.slots is not None:
            x.index_copy_(1, self.tokens, room.index_select(1, self.slots))


def segments(bounds: list[int], device: torch.device) -> Iterator[Segment]:
    """Cuts sequences [bounds[i], bounds[i + 1]) into chunks that hold tokens of one sequence, and groups these."""
    pieces = [
        (start, min(start + CHUNK, stop), n if start == first else None, n if start + CHUNK >= stop else None)
        for n, (first, stop) in enumerate(itertools.pairwise(bounds))
        for start in range(first, stop, CHUNK)
    ]
    for first in range(0, len(pieces), SEGMENT):
        starts, stops, opens, closes = zip(*pieces[first : first + SEGMENT])
        slots = tokens = None
        if any(stop - start < CHUNK for start, stop in zip(starts, stops)):
            spans = [torch.arange(start, stop, device=device) for start, stop in zip(starts, stops)]
            tokens = torch.cat(spans)
            slots = torch.cat([span - span[:1] + i * CHUNK for i, span in enumerate(spans)])
        yield Segment(len(starts), starts[0], slots, tokens, opens, closes)


class Workspace:
    """Named buffers that one call reuses from segment to segment.

    Fresh memory of this size comes from the system each time, and its page faults cost more than the arithmetic.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Uninitialised contiguous tensor of this shape; it overwrites the previous one of this name."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=self.dtype, device=self.device)
        return self._buffers[name][:size].view(shape)


def take_inputs(part: Segment, inputs: list[Tensor], space: Workspace) -> list[Tensor]:
    """A segment's part of q, k, v, g and beta, each [B, n * C, ...] in `space`, and in its dtype."""
    return [
        part.take(x, space(f"input {i}", x.shape[0], part.chunks * CHUNK, *x.shape[2:])) for i, x in enumerate(inputs)
    ]


def segment_limit(length: int, sequences: int) -> int:
    """An upper bound of the number of segments, from sizes alone (`sequences` = 1 unless they are packed)."""
    return (length // CHUNK + sequences + SEGMENT - 1) // SEGMENT


def head_blocks(batch: int, heads: int, state_bytes: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Blocks of rows and heads, which are independent, whose states stay in a CPU's caches through all chunks.

    The threads share the products of a block, so a block has as many states as all of their caches hold.
    """
    if device.type != "cpu":
        yield slice(None), slice(None)
        return
    count = max(1, min(STATE_CACHE // state_bytes, MOST_STATES)) * torch.get_num_threads()
    row_step, head_step = max(1, count // heads), math.ceil(heads / math.ceil(heads / count))
    for row in range(0, batch, row_step):
        for head in range(0, heads, head_step):
            yield slice(row, row + row_step), slice(head, head + head_step)
