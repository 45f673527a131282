"""A buffer of rows that grows at one end, and marks in it that can be gone back to for the price of a number.

Shapes: B batch, S held rows, w numbers per row.
"""

from __future__ import annotations

from weakref import WeakSet

import torch

# Free places that a growing buffer gets at least, so that short generations reallocate once.
_MIN_SPARE = 256


class Mark:
    """A length of a `GrowingRows` to go back to. `saved` is None as long as the buffer still has those rows; `tag`
    is for whoever set the mark."""

    def __init__(self, rows: GrowingRows, length: int, tag: int):
        self.rows, self.length, self.tag = rows, length, tag
        self.saved: torch.Tensor | None = None

    @property
    def held(self) -> torch.Tensor:
        """The marked rows `[B, S, w]`."""
        return (self.rows.data if self.saved is None else self.saved)[:, : self.length]


class GrowingRows:
    """Rows `[B, S, w]` at the start of a buffer `[B, capacity, w]`.

    The buffer grows geometrically: appending copies what is appended, and over a whole generation each older row a
    bounded number of times. A mark costs nothing until rows before it are about to be overwritten: then the mark
    keeps the old buffer and the rows move to a new one.
    """

    def __init__(self, held: torch.Tensor):
        self.data, self.length = held, held.shape[1]
        self._marks: WeakSet[Mark] = WeakSet()

    @property
    def held(self) -> torch.Tensor:
        return self.data[:, : self.length]

    @property
    def nbytes(self) -> int:
        return self.held.nbytes

    @property
    def spare_nbytes(self) -> int:
        return self.data.nbytes - self.nbytes

    def append(self, count: int) -> torch.Tensor:
        """Makes room for `count` more rows and returns it, `[B, count, w]`, to be written at once."""
        end = self.length + count
        endangered = [mark for mark in self._marks if mark.saved is None and mark.length > self.length]
        if endangered or end > self.data.shape[1]:
            capacity = end + max(_MIN_SPARE, end // 2)
            data = self.data.new_empty(self.data.shape[0], capacity, self.data.shape[2])
            data[:, : self.length] = self.held
            self._keep(endangered)
            self.data = data
        room = self.data[:, self.length : end]
        self.length = end
        return room

    def truncate(self, length: int) -> None:
        self.length = length

    def replace(self, held: torch.Tensor) -> None:
        """Puts `held [B', S', w]` in place of everything."""
        self._keep([mark for mark in self._marks if mark.saved is None])
        self.data, self.length = held, held.shape[1]

    def mark(self, tag: int = 0) -> Mark:
        """Remembers the present rows, as long as the mark is referred to."""
        mark = Mark(self, self.length, tag)
        self._marks.add(mark)
        return mark

    def rewind(self, mark: Mark) -> None:
        """Goes back to a mark of this very object, any number of times."""
        if mark.saved is not None:
            data = mark.saved
            self._keep([other for other in self._marks if other.saved is None])
            for other in self._marks:
                if other.saved is data:
                    other.saved = None
            self.data = data
        self.length = mark.length

    def move(self, device: torch.device | str) -> None:
        self.data = self.data.to(device, non_blocking=True)

    def _keep(self, marks: list[Mark]) -> None:
        for mark in marks:
            mark.saved = self.data
