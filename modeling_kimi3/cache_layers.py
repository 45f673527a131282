"""The layers of `KimiK3Cache`: a small latent per token for MLA, a constant state for KDA (spec section 4, "Cache").

Shapes: B batch, S held tokens, H heads, K key dim, V value dim, W convolution taps, C = 3*H*K convolved channels,
r latent rank, p width of the shared key part.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from .cache_rows import GrowingRows, Mark
from .rollback import Checkpoint, RollbackWindow

# The longest multi-token step that is taken for a draft under verification and kept whole.
_LONGEST_DRAFT = 256


class KimiLatentLayer(CacheLayerMixin):
    """One MLA layer: latents and shared key parts side by side in one growing buffer `[B, capacity, r+p]`.

    `keys [B, 1, S, r]` and `values [B, 1, S, p]` are views of the held tokens, `joined [B, S, r+p]` is both.
    """

    is_sliding = False
    is_croppable = True
    kind = "full_attention"

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._rows: GrowingRows | None = None
        self._rank = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        joined = torch.cat([key_states, value_states], dim=-1)[:, 0, :0]
        self._fill(joined, key_states.shape[-1])

    def _fill(self, joined: torch.Tensor, rank: int) -> None:
        """Starts with `joined [B, S, r+p]` as the content."""
        self.device, self.dtype, self._rank = joined.device, joined.dtype, rank
        self._rows = GrowingRows(joined)
        self.is_initialized = True
        self._publish()

    def _publish(self) -> None:
        held = self._rows.held[:, None]
        self.keys, self.values = held[..., : self._rank], held[..., self._rank :]

    def _set(self, held: torch.Tensor) -> None:
        """Replaces the content by `held [B, S, r+p]`."""
        self._rows.replace(held)
        self._publish()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends latents `[B, 1, T, r]` and shared keys `[B, 1, T, p]`; returns all that are held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if torch.is_grad_enabled() and (key_states.requires_grad or self.keys.requires_grad):
            # Writing into the buffer would overwrite what the backward of an earlier step still needs.
            self._set(torch.cat([self.joined, torch.cat([key_states, value_states], dim=-1).squeeze(1)], dim=1))
            return self.keys, self.values
        new = self._rows.append(key_states.shape[2])
        new[..., : self._rank] = key_states.squeeze(1)
        new[..., self._rank :] = value_states.squeeze(1)
        self._publish()
        return self.keys, self.values

    @property
    def joined(self) -> torch.Tensor:
        """Latents and shared keys side by side, `[B, S, r+p]`: one contiguous run per row."""
        return self._rows.held

    def get_seq_length(self) -> int:
        return 0 if self._rows is None else self._rows.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    @property
    def batch_size(self) -> int:
        return -1 if self._rows is None else self._rows.data.shape[0]

    @property
    def constant_nbytes(self) -> int:
        """Bytes that do not depend on the number of tokens."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of the held tokens."""
        return 0 if self._rows is None else self._rows.nbytes

    @property
    def spare_nbytes(self) -> int:
        """Bytes allocated for tokens to come."""
        return 0 if self._rows is None else self._rows.spare_nbytes

    @property
    def rollback_nbytes(self) -> int:
        """Bytes kept for taking tokens back: none, a latent is dropped by its place."""
        return 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `-tokens_to_remove` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes zero or a negative count of tokens to remove, got {tokens_to_remove}.")
        held = self.get_seq_length()
        if -tokens_to_remove > held:
            raise ValueError(f"Cannot crop {-tokens_to_remove} tokens: the cache holds {held}.")
        if self.is_initialized:
            self._rows.truncate(held + tokens_to_remove)
            self._publish()

    def reset(self) -> None:
        """Forgets everything, the number of rows too."""
        self._rows, self.keys, self.values, self.is_initialized = None, None, None, False

    def snapshot(self) -> Mark | None:
        """What `restore` takes: a place in the buffer, no copy."""
        return None if self._rows is None else self._rows.mark(self._rank)

    def restore(self, saved: Mark | None) -> None:
        """Goes back to a snapshot of this layer at no cost, or takes over a copy of another layer's."""
        if saved is None:
            self.reset()
        elif self._rows is not None and saved.rows is self._rows:
            self._rows.rewind(saved)
            self._publish()
        else:
            self._fill(saved.held.clone(), saved.tag)

    def export(self) -> dict[str, torch.Tensor]:
        """The content as named tensors, for a file."""
        return {} if self._rows is None else {"latent": self.keys, "shared_key": self.values}

    def load(self, tensors: dict[str, torch.Tensor], seen_tokens: int) -> None:
        """Takes over what `export` gave."""
        if tensors:
            rank = tensors["latent"].shape[-1]
            self._fill(torch.cat([tensors["latent"], tensors["shared_key"]], dim=-1).squeeze(1), rank)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            self._set(self.joined[indices.to(self.joined.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._set(self.joined.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        self._move("cpu")

    def prefetch(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device | str) -> None:
        if self.is_initialized and self._rows.data.device != torch.device(device):
            self._rows.move(device)
            self._publish()


@dataclass(frozen=True)
class DeltaSnapshot:
    """A copy of one KDA layer: convolutions' tail `[B, C, W-1]`, state `[B, H, K, V]`, tokens seen, window."""

    tail: torch.Tensor
    state: torch.Tensor
    seen_tokens: int
    window: RollbackWindow | None


class KimiDeltaLayer(LinearAttentionLayer):
    """One KDA layer: the convolutions' tail `[B, C, W-1]` and the state `[B, H, K, V]` in float32.

    Adds to transformers' linear layer a token count, batch operations, and a window of tokens that can be taken back
    (see `rollback.py` for how, and for what it costs).

    Args:
        rollback: tokens in that window; 0 records nothing.
    """

    kind = "linear_attention"

    def __init__(self, rollback: int = 0, **kwargs):
        super().__init__(**kwargs)
        self.rollback = rollback
        self.seen_tokens = 0
        self.window: RollbackWindow | None = None

    @property
    def batch_size(self) -> int:
        state = self.recurrent_states[0]
        return -1 if state is None else state.shape[0]

    @property
    def is_croppable(self) -> bool:
        return self.rollback > 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def croppable_tokens(self) -> int:
        """How many of the last tokens can be taken back now."""
        return 0 if self.window is None else self.window.available

    def get_seq_length(self) -> int:
        return self.seen_tokens

    @property
    def constant_nbytes(self) -> int:
        """Bytes of tail and state, whatever the number of tokens."""
        held = (self.conv_states[0], self.recurrent_states[0])
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @property
    def nbytes(self) -> int:
        return self.constant_nbytes

    @property
    def spare_nbytes(self) -> int:
        return 0

    @property
    def rollback_nbytes(self) -> int:
        """Bytes kept for taking tokens back."""
        return 0 if self.window is None else self.window.nbytes()

    def begin(self, tokens: int, width: int) -> int | None:
        """Announces `tokens` new ones, before tail or state move.

        Args:
            width: W-1, columns of the convolutions' tail.

        Returns:
            How many of them fall out of the rollback window at once, or None where nothing is recorded.
        """
        self.seen_tokens += tokens
        if self.rollback == 0:
            return None
        present = Checkpoint(None, None)
        if self.has_previous_state[0]:
            present = Checkpoint(self.conv_states[0], self.recurrent_states[0])
        if self.window is None:
            self.window = RollbackWindow(self.rollback, width)
            self.window.restart(present.map(torch.clone))
        # A draft that is to be verified may be longer than the window; a prompt must never be kept whole.
        draft = self.record_past and self.has_previous_state[0] and tokens <= _LONGEST_DRAFT
        return self.window.prepare(tokens, draft, present)

    def widen(self, rollback: int) -> None:
        """Makes the window hold at least `rollback` tokens from now on."""
        self.rollback = max(self.rollback, rollback)
        if self.window is not None:
            self.window.window = self.rollback

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        """Takes over the convolutions' new tail `[B, C, W-1]`."""
        self.is_conv_states_initialized[state_idx] = True
        self.has_previous_state[state_idx] = True
        return self._take_over(self.conv_states, conv_states, state_idx)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        """Takes over the new state `[B, H, K, V]`."""
        self.is_recurrent_states_initialized[state_idx] = True
        return self._take_over(self.recurrent_states, recurrent_states, state_idx)

    def _take_over(self, held: dict[int, torch.Tensor | None], value: torch.Tensor, index: int) -> torch.Tensor:
        present = held[index]
        if present is None or value.requires_grad or present.requires_grad:
            self.device, self.dtype = value.device, value.dtype
            held[index] = value
        else:
            present.copy_(value)
        return held[index]

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens; the caller has made sure that they are recorded."""
        if tokens_to_remove == 0 or not self.has_previous_state[0]:
            return
        checkpoint = self.window.rewind(-tokens_to_remove)
        self.seen_tokens += tokens_to_remove
        for held, value in ((self.conv_states[0], checkpoint.tail), (self.recurrent_states[0], checkpoint.state)):
            held.zero_() if value is None else held.copy_(value)

    def snapshot(self) -> DeltaSnapshot | None:
        """A copy of everything the layer holds, the rollback window too."""
        if not self.has_previous_state[0]:
            return None
        window = None if self.window is None else self.window.clone()
        return DeltaSnapshot(self.conv_states[0].clone(), self.recurrent_states[0].clone(), self.seen_tokens, window)

    def restore(self, saved: DeltaSnapshot | None) -> None:
        """Takes over a snapshot of this or another layer, which stays as it is."""
        if saved is None:
            self.reset()
        else:
            self._put(saved.tail, saved.state, saved.seen_tokens)
            self.window = None if saved.window is None else saved.window.clone()

    def _put(self, tail: torch.Tensor, state: torch.Tensor, seen_tokens: int) -> None:
        for held, value in ((self.conv_states, tail), (self.recurrent_states, state)):
            if held[0] is not None and held[0].shape == value.shape and not held[0].requires_grad:
                held[0].copy_(value)
            else:
                held[0] = value.clone()
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = True
        self.has_previous_state[0] = True
        self.device, self.dtype, self.seen_tokens = state.device, state.dtype, seen_tokens

    def export(self) -> dict[str, torch.Tensor]:
        """The content as named tensors, for a file; without the rollback window."""
        return {"tail": self.conv_states[0], "state": self.recurrent_states[0]} if self.has_previous_state[0] else {}

    def load(self, tensors: dict[str, torch.Tensor], seen_tokens: int) -> None:
        """Takes over what `export` gave."""
        if tensors:
            self._put(tensors["tail"], tensors["state"], seen_tokens)

    def reset(self) -> None:
        """Forgets everything, the number of rows too."""
        self.conv_states[0] = self.recurrent_states[0] = None
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = False
        self.has_previous_state[0] = False
        self.seen_tokens = 0
        self.window = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def _map_rows(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if not self.has_previous_state[0]:
            return
        self.conv_states[0], self.recurrent_states[0] = fn(self.conv_states[0]), fn(self.recurrent_states[0])
        if self.window is not None:
            self.window.map(fn)
