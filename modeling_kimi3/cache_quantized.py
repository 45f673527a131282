"""Latents held as small integers, for contexts at which even latents are much; KDA's states stay as they are.

Shapes: B batch, S quantised tokens, R recent tokens, w = r+p numbers per token, q numbers per group.
"""

from collections.abc import Callable

import torch

from .cache import KimiK3Cache
from .cache_layers import KimiLatentLayer
from .cache_rows import GrowingRows
from .configuration_kimi3 import KimiK3Config


class GroupQuantizer:
    """Asymmetric integers in groups of `group` numbers of one token, packed into one run of bytes per token.

    A group holds its smallest number and a step in float32; each number is within half a step (a 510th of its
    group's range with 8 bits, a 30th with 4) of what was given.

    Args:
        bits: 8 or 4.
        group: numbers that share a step; even.
    """

    def __init__(self, bits: int = 8, group: int = 64):
        if bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, got {bits}.")
        if group < 2 or group % 2:
            raise ValueError(f"group must be an even number of at least 2, got {group}.")
        self.bits, self.group = bits, group

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """`x [B, T, w]` as uint8 `[B, T, bytes]`."""
        groups = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % self.group)).unflatten(-1, (-1, self.group))
        low, high = groups.aminmax(dim=-1, keepdim=True)
        step = ((high - low) / (2**self.bits - 1)).clamp_min(torch.finfo(torch.float32).tiny)
        codes = ((groups - low) / step).round().clamp_(0, 2**self.bits - 1).to(torch.uint8).flatten(-2)
        if self.bits == 4:
            codes = codes[..., ::2] | (codes[..., 1::2] << 4)
        scales = torch.cat([low, step], dim=-1).flatten(-2).contiguous().view(torch.uint8)
        return torch.cat([codes, scales], dim=-1)

    def unpack(self, packed: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The numbers `[B, T, w]` of `packed`."""
        count = -(-width // self.group)
        codes, scales = packed.split([packed.shape[-1] - 8 * count, 8 * count], dim=-1)
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        low, step = scales.contiguous().view(torch.float32).unflatten(-1, (count, 2)).split(1, dim=-1)
        numbers = codes.unflatten(-1, (count, self.group)) * step + low
        return numbers.flatten(-2)[..., :width].to(dtype)


class KimiQuantizedLatentLayer(KimiLatentLayer):
    """One MLA layer whose older tokens are quantised; the last `recent` to `2 * recent` are held as they came.

    Each token has groups of its own: taking back, selecting and repeating do not touch what stays. `update` expands
    the layer's latents for the one call.
    """

    def __init__(self, bits: int = 8, group: int = 64, recent: int = 64, **kwargs):
        super().__init__(**kwargs)
        if recent < 1:
            raise ValueError(f"recent must be at least 1, got {recent}.")
        self.quantizer, self.recent = GroupQuantizer(bits, group), recent
        self._packed: GrowingRows | None = None

    def _fill(self, joined: torch.Tensor, rank: int) -> None:
        super()._fill(joined, rank)
        self._packed = GrowingRows(self.quantizer.pack(joined[:, :0]))
        self._settle()

    def _publish(self) -> None:
        """Nothing is kept expanded."""

    def _settle(self) -> None:
        """Quantises the older of the recent tokens once there are too many."""
        if self._rows.length > 2 * self.recent:
            old = self._rows.length - self.recent
            packed = self.quantizer.pack(self._rows.held[:, :old])
            self._packed.append(old)[:] = packed
            self._rows.replace(self._rows.held[:, old:].clone())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends latents `[B, 1, T, r]` and shared keys `[B, 1, T, p]`; returns all, the older ones rounded."""
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise ValueError("A quantised cache has no backward: run the model under torch.no_grad().")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = torch.cat([key_states, value_states], dim=-1).squeeze(1)
        self._rows.append(new.shape[1])[:] = new
        expanded = self.joined[:, None]
        self._settle()
        return expanded[..., : self._rank], expanded[..., self._rank :]

    @property
    def joined(self) -> torch.Tensor:
        """All held tokens expanded, `[B, S+R, w]`."""
        recent = self._rows.held
        older = self.quantizer.unpack(self._packed.held, recent.shape[-1], recent.dtype)
        return torch.cat([older, recent], dim=1)

    def get_seq_length(self) -> int:
        return 0 if self._rows is None else self._packed.length + self._rows.length

    @property
    def nbytes(self) -> int:
        """Bytes of the held tokens: integers, scales and the recent tokens."""
        return 0 if self._rows is None else self._packed.nbytes + self._rows.nbytes

    @property
    def spare_nbytes(self) -> int:
        return 0 if self._rows is None else self._packed.spare_nbytes + self._rows.spare_nbytes

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `-tokens_to_remove` tokens; those that were rounded stay rounded."""
        kept = self.get_seq_length() + tokens_to_remove
        if tokens_to_remove > 0 or kept < 0:
            raise ValueError(f"Cannot crop {-tokens_to_remove} tokens: the cache holds {self.get_seq_length()}.")
        if self.is_initialized:
            self._packed.truncate(min(kept, self._packed.length))
            self._rows.truncate(kept - self._packed.length)

    def reset(self) -> None:
        super().reset()
        self._packed = None

    def snapshot(self) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """A copy of the integers `[B, S, bytes]` and of the recent tokens `[B, R, w]`, and the rank."""
        if self._rows is None:
            return None
        return self._packed.held.clone(), self._rows.held.clone(), self._rank

    def restore(self, saved: tuple[torch.Tensor, torch.Tensor, int] | None) -> None:
        if saved is None:
            self.reset()
            return
        packed, recent, rank = saved
        self._fill(recent[:, :0].clone(), rank)
        self._packed.replace(packed.clone())
        self._rows.replace(recent.clone())

    def export(self) -> dict[str, torch.Tensor]:
        raise ValueError("A quantised cache cannot be saved: save a plain KimiK3Cache instead.")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def _map_rows(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for rows in (self._packed, self._rows):
            if rows is not None:
                rows.replace(fn(rows.held))

    def _move(self, device: torch.device | str) -> None:
        for rows in (self._packed, self._rows):
            if rows is not None:
                rows.move(device)


class KimiK3QuantizedCache(KimiK3Cache):
    """A `KimiK3Cache` with quantised latents.

    Args:
        config: the model's config.
        rollback: as for `KimiK3Cache`.
        bits: 8 or 4.
        group: numbers of one token that share a step.
        recent: at least so many of the last tokens are held as they came.
    """

    def __init__(self, config: KimiK3Config, rollback: int = 16, bits: int = 8, group: int = 64, recent: int = 64):
        self._quantization = {"bits": bits, "group": group, "recent": recent}
        super().__init__(config, rollback)

    def _latent_layer(self) -> KimiLatentLayer:
        return KimiQuantizedLatentLayer(**self._quantization)

    def _alike(self) -> "KimiK3QuantizedCache":
        return type(self)(self.config, self.rollback, **self._quantization)


def quantized_cache(config: KimiK3Config, options: dict | None) -> KimiK3QuantizedCache:
    """The cache that `generate` makes for `cache_implementation="quantized"` and its `cache_config`.

    Raises:
        ValueError: an unknown option.
    """
    known = {"rollback", "bits", "group", "recent"}
    unknown = sorted(set(options or {}) - known)
    if unknown:
        raise ValueError(f"cache_config has {unknown}, but a quantised KimiK3Cache takes {sorted(known)} only.")
    return KimiK3QuantizedCache(config, **(options or {}))
