"""Where the real tokens of a batch are, for layers that carry a state along time (spec section 7).

Softmax attention hides padding and neighbouring samples behind a mask. A recurrence cannot: a padding token would
decay and write the state, and the convolution would see it as a neighbour. So padding becomes a token that does
nothing (zero write strength, zero log decay), the convolution runs over the real tokens alone, and packed samples
are cut apart.

Shapes: B batch, T time, N sequences, M real tokens.
"""

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class PaddedLayout:
    """One sequence per row; the mask may have holes anywhere. Shapes stay static, so a compiled graph holds for all.

    Attributes:
        mask: `[B, T]` bool, true where a token is real.
        order: `[B, T]` int64: place j of a compacted row comes from place `order[j]`, real tokens first.
        inverse: `[B, T]` int64, the way back.
        lengths: `[B]` int64, real tokens per row.
    """

    mask: torch.Tensor
    order: torch.Tensor
    inverse: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def from_mask(cls, mask: torch.Tensor) -> "PaddedLayout":
        """From a mask `[B, T]`, nonzero where a token is real."""
        mask = mask.bool()
        order = torch.argsort((~mask).to(torch.uint8), dim=-1, stable=True)
        return cls(mask, order, torch.argsort(order, dim=-1), mask.sum(dim=-1))

    def to(self, device: torch.device | int | str) -> "PaddedLayout":
        """On another device, as accelerate asks of what enters a layer that lies there."""
        return PaddedLayout(*(getattr(self, field.name).to(device) for field in fields(self)))

    def compact(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, D]` to `[B, T, D]`, each row's real tokens first, in their order."""
        return x.gather(1, self.order.unsqueeze(-1).expand_as(x))

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """The way back; padding gets zeros, so that nothing of it reaches a state or a gradient."""
        return self.silence(x.gather(1, self.inverse.unsqueeze(-1).expand_as(x)))

    def silence(self, x: torch.Tensor) -> torch.Tensor:
        """`x [B, T, ...]` with zeros at padding."""
        return x.masked_fill(~self.mask.view(*self.mask.shape, *[1] * (x.dim() - 2)), 0.0)


@dataclass(frozen=True)
class PackedLayout:
    """Several sequences per row: all real tokens of the batch in one row `[1, M]` with sequence boundaries.

    Attributes:
        indices: `[M]` int64, places of the real tokens in the flattened batch, or None where all B*T are real.
        cu_seqlens: `[N + 1]` int64, boundaries of the sequences among the M tokens, from 0 to M.
        shape: (B, T).
    """

    indices: torch.Tensor | None
    cu_seqlens: torch.Tensor
    shape: tuple[int, int]

    @classmethod
    def from_sequence_ids(cls, sequence_ids: torch.Tensor, mask: torch.Tensor | None) -> "PackedLayout":
        """
        Args:
            sequence_ids: `[B, T]`, equal for tokens of one sequence, different between neighbours in a row.
            mask: `[B, T]`, nonzero where a token is real, or None.
        """
        batch, time = sequence_ids.shape
        rows = torch.arange(batch, device=sequence_ids.device).unsqueeze(-1).expand_as(sequence_ids)
        keys = torch.stack([rows.flatten(), sequence_ids.flatten()], dim=-1)
        indices = None
        if mask is not None:
            indices = mask.flatten().nonzero().squeeze(-1)
            keys = keys[indices]
        starts = torch.ones(keys.shape[0], dtype=torch.bool, device=keys.device)
        starts[1:] = (keys[1:] != keys[:-1]).any(dim=-1)
        end = torch.tensor([keys.shape[0]], device=keys.device)
        return cls(indices, torch.cat([starts.nonzero().squeeze(-1), end]), (batch, time))

    def to(self, device: torch.device | int | str) -> "PackedLayout":
        """On another device, as accelerate asks of what enters a layer that lies there."""
        indices = None if self.indices is None else self.indices.to(device)
        return PackedLayout(indices, self.cu_seqlens.to(device), self.shape)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, D]` to `[1, M, D]`."""
        x = x.flatten(0, 1)
        return (x if self.indices is None else x[self.indices]).unsqueeze(0)

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """The way back, zeros at padding."""
        x = x.squeeze(0)
        if self.indices is not None:
            x = x.new_zeros(self.shape[0] * self.shape[1], x.shape[-1]).index_copy(0, self.indices, x)
        return x.unflatten(0, self.shape)


SequenceLayout = PaddedLayout | PackedLayout


def find_sequence_ids(position_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Sequence ids `[B, T]` of a packed batch, or None where every row holds a single sequence.

    A new sequence starts at a real token whose position does not follow that of the real token before it, which
    also holds for padded rows (their padding carries arbitrary positions).

    Args:
        position_ids: `[B, T]`.
        mask: `[B, T]`, nonzero where a token is real, or None.
    """
    layout = None if mask is None else PaddedLayout.from_mask(mask)
    if layout is not None:
        position_ids = position_ids.gather(1, layout.order)
    restart = torch.zeros_like(position_ids, dtype=torch.bool)
    restart[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if layout is not None:
        restart &= layout.mask.gather(1, layout.order)
    if not restart.any():
        return None
    sequence_ids = restart.cumsum(dim=-1)
    return sequence_ids if layout is None else sequence_ids.gather(1, layout.inverse)


def position_ids_from_cu_seqlens(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Position ids `[B, T]` that restart at each boundary of a batch flattened to B*T tokens.

    Args:
        cu_seqlens: `[N + 1]` integers from 0 to B*T, as transformers' collators pass `cu_seq_lens_q`.
        shape: (B, T).

    Raises:
        ValueError: if the boundaries do not end at B*T.
    """
    total = shape[0] * shape[1]
    boundaries = cu_seqlens.long()
    if boundaries[0] != 0 or boundaries[-1] != total or (boundaries.diff() < 0).any():
        raise ValueError(
            f"cu_seq_lens_q must rise from 0 to the number of tokens ({total}), but it is {boundaries.tolist()}."
        )
    index = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(boundaries, index, right=True) - 1
    return (index - boundaries[sequence]).view(shape)
