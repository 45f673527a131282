"""What lets a recurrent state go back a few tokens: checkpoints and a log of what recent tokens wrote.

A recurrence cannot be run backwards. A `RollbackWindow` keeps the state from before the last tokens together with
what those tokens wrote, and replays the ones that stay. Two checkpoints leapfrog, so that a long generation copies
the state once every `window` tokens; memory is three states instead of one, plus the log of fewer than four windows.

Shapes: B batch, n logged tokens, C convolved channels, H heads, K key dim, V value dim, W convolution taps.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kimi3_kernels import kda_chunk

from .sequence_layout import PaddedLayout


def convolution_tail(tail: torch.Tensor | None, qkv: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
    """The last `width` real inputs of a convolution, `[B, C, width]`.

    Args:
        tail: those before `qkv`, `[B, C, width]`, or None for zeros.
        qkv: the inputs that followed, `[B, n, C]`.
        mask: `[B, n]`, true at real tokens.
    """
    layout = PaddedLayout.from_mask(mask)
    if tail is None:
        tail = qkv.new_zeros(qkv.shape[0], qkv.shape[-1], width)
    inputs = torch.cat([tail.to(qkv.dtype), layout.compact(qkv).transpose(1, 2)], dim=-1)
    places = layout.lengths[:, None] + torch.arange(width, device=qkv.device)
    return inputs.gather(-1, places[:, None].expand(-1, inputs.shape[1], -1))


@dataclass
class KdaWrites:
    """What tokens write, `[B, n, ...]` each: the convolutions' inputs qkv `[B, n, C]`, key k and value v, log decay g
    `[B, n, H, K or V]`, beta `[B, n, H]`, mask `[B, n]` (true at real tokens; the others have zero g and beta)."""

    qkv: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    mask: torch.Tensor

    def __len__(self) -> int:
        return self.qkv.shape[1]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.qkv, self.k, self.v, self.g, self.beta, self.mask

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> "KdaWrites":
        return KdaWrites(*(fn(tensor) for tensor in self.tensors()))

    def between(self, start: int, end: int) -> "KdaWrites":
        return self.map(lambda tensor: tensor[:, start:end])


@dataclass(frozen=True)
class Checkpoint:
    """Tail `[B, C, W-1]` and state `[B, H, K, V]` before a logged token; None both for an empty past."""

    tail: torch.Tensor | None
    state: torch.Tensor | None

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> "Checkpoint":
        if self.tail is None or self.state is None:
            return self
        return Checkpoint(fn(self.tail), fn(self.state))

    def advanced(self, writes: KdaWrites, width: int) -> "Checkpoint":
        """The checkpoint after `writes`, from the same equations that the forward pass uses."""
        if len(writes) == 0:
            return self.map(torch.clone)
        tail = convolution_tail(self.tail, writes.qkv, writes.mask, width)
        _, state = kda_chunk(writes.k, writes.k, writes.v, writes.g, writes.beta, self.state)
        return Checkpoint(tail, state)


class RollbackWindow:
    """The recent past of one KDA layer.

    Args:
        window: how many of the last tokens can always be taken back (fewer only where fewer were seen).
        width: W-1, the columns of a convolution's tail.
    """

    def __init__(self, window: int, width: int):
        self.window, self.width = window, width
        self._oldest = Checkpoint(None, None)
        self._newer: Checkpoint | None = None
        self._newer_at = 0
        self._log: KdaWrites | None = None
        self._length = 0
        self._limit = window

    @property
    def available(self) -> int:
        """How many of the last tokens can be taken back now."""
        return min(self._length, self._limit)

    def prepare(self, tokens: int, whole: bool, present: Checkpoint) -> int:
        """Announces new tokens, before anything of the layer moves.

        Args:
            tokens: how many.
            whole: keep all of them, whatever the window (a draft to be verified).
            present: where the layer stands; cloned where it is kept.

        Returns:
            How many of them fall out of the window at once. If not 0, `restart` with a checkpoint there must follow.
        """
        self._limit = max(self.window, tokens) if whole else self.window
        if tokens >= self._limit:
            self.restart(present.map(torch.clone))
            return tokens - self._limit
        if self._newer is not None and self._length - self._newer_at >= self.window:
            self._oldest, self._newer = self._newer, None
            self._drop_first(self._newer_at)
        if self._newer is None and self._length > 0:
            self._newer, self._newer_at = present.map(torch.clone), self._length
        return 0

    def restart(self, checkpoint: Checkpoint) -> None:
        """Forgets everything before `checkpoint`."""
        self._oldest, self._newer, self._length = checkpoint, None, 0

    def record(self, writes: KdaWrites) -> None:
        """Logs what the announced tokens (those that did not fall out) write."""
        end = self._length + len(writes)
        if self._log is None or end > len(self._log):
            capacity = max(end, 4 * self.window)
            grown = writes.map(lambda t: t.new_empty(t.shape[0], capacity, *t.shape[2:]))
            if self._log is not None:
                for new, old in zip(grown.tensors(), self._log.tensors()):
                    new[:, : self._length] = old[:, : self._length]
            self._log = grown
        for held, new in zip(self._log.tensors(), writes.tensors()):
            held[:, self._length : end] = new.detach()
        self._length = end

    def rewind(self, tokens: int) -> Checkpoint:
        """Takes the last `tokens` back and returns the checkpoint from before them."""
        kept = self._length - tokens
        if self._newer is not None and kept >= self._newer_at:
            checkpoint = self._newer.advanced(self._log.between(self._newer_at, kept), self.width)
        else:
            self._newer = None
            checkpoint = self._oldest.advanced(self._log.between(0, kept), self.width)
        self._length = kept
        return checkpoint

    def clone(self) -> "RollbackWindow":
        """An independent copy."""
        other = copy.copy(self)
        other.map(torch.clone)
        return other

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Applies `fn` to every tensor held (batch selection, moves)."""
        self._oldest = self._oldest.map(fn)
        self._newer = None if self._newer is None else self._newer.map(fn)
        self._log = None if self._log is None else self._log.map(fn)

    def nbytes(self) -> int:
        """Bytes of all tensors held."""
        held = [t for c in (self._oldest, self._newer) if c is not None for t in (c.tail, c.state) if t is not None]
        held += [] if self._log is None else self._log.tensors()
        return sum(tensor.nbytes for tensor in held)

    def _drop_first(self, tokens: int) -> None:
        for held in self._log.tensors():
            held[:, : self._length - tokens] = held[:, tokens : self._length].clone()
        self._length -= tokens
