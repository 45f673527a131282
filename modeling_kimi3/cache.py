"""KimiK3Cache: a constant state per KDA layer, a small latent per token and MLA layer (spec section 4, "Cache").

Shapes: B batch, S held tokens, H heads, K key dim, V value dim, W convolution taps, C = 3*H*K convolved channels,
r latent rank, p width of the shared key part.
"""

from collections.abc import Callable

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from .configuration_kimi3 import KimiK3Config
from .rollback import Checkpoint, RollbackWindow

# Free places that a growing buffer gets at least, so that short generations reallocate once.
_MIN_SPARE = 256

# The longest multi-token step that is taken for a draft under verification and kept whole.
_LONGEST_DRAFT = 256


class KimiLatentLayer(CacheLayerMixin):
    """One MLA layer: latents and shared key parts side by side in one buffer `[B, capacity, r+p]`.

    The buffer grows geometrically: appending a token copies that token, and over a whole generation each older one
    a bounded number of times. `keys [B, 1, S, r]` and `values [B, 1, S, p]` are views of the held tokens.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._buffer: torch.Tensor | None = None
        self._length = 0
        self._rank = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device, self.dtype = key_states.device, key_states.dtype
        self._rank = key_states.shape[-1]
        width = self._rank + value_states.shape[-1]
        self._buffer = key_states.new_empty(key_states.shape[0], 0, width)
        self.is_initialized = True
        self._publish()

    def _publish(self) -> None:
        held = self._buffer[:, None, : self._length]
        self.keys, self.values = held[..., : self._rank], held[..., self._rank :]

    def _set(self, held: torch.Tensor) -> None:
        """Replaces the content by `held [B, S, r+p]`."""
        self._buffer, self._length = held, held.shape[1]
        self._publish()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends latents `[B, 1, T, r]` and shared keys `[B, 1, T, p]`; returns all that are held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self._buffer.shape[0]:
            raise ValueError(
                f"The cache holds a batch of {self._buffer.shape[0]} rows, but the input has {key_states.shape[0]}. "
                "Use a new cache, or batch_repeat_interleave / batch_select_indices to change its rows."
            )
        if torch.is_grad_enabled() and (key_states.requires_grad or self._buffer.requires_grad):
            # Writing into the buffer would overwrite what the backward of an earlier step still needs.
            self._set(torch.cat([self.joined, torch.cat([key_states, value_states], dim=-1).squeeze(1)], dim=1))
            return self.keys, self.values
        end = self._length + key_states.shape[2]
        if end > self._buffer.shape[1]:
            self._grow(end)
        new = self._buffer[:, self._length : end]
        new[..., : self._rank] = key_states.squeeze(1)
        new[..., self._rank :] = value_states.squeeze(1)
        self._length = end
        self._publish()
        return self.keys, self.values

    @property
    def joined(self) -> torch.Tensor:
        """Latents and shared keys side by side, `[B, S, r+p]`: one contiguous run per row."""
        return self._buffer[:, : self._length]

    def _grow(self, needed: int) -> None:
        capacity = needed + max(_MIN_SPARE, needed // 2)
        buffer = self._buffer.new_empty(self._buffer.shape[0], capacity, self._buffer.shape[-1])
        buffer[:, : self._length] = self.joined
        self._buffer = buffer

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    @property
    def batch_size(self) -> int:
        return -1 if self._buffer is None else self._buffer.shape[0]

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `-tokens_to_remove` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes zero or a negative count of tokens to remove, got {tokens_to_remove}.")
        if -tokens_to_remove > self._length:
            raise ValueError(f"Cannot crop {-tokens_to_remove} tokens: the cache holds {self._length}.")
        if self.is_initialized:
            self._length += tokens_to_remove
            self._publish()

    def reset(self) -> None:
        self._length = 0
        if self.is_initialized:
            self._publish()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            self._set(self.joined[indices.to(self._buffer.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._set(self.joined.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        if self.is_initialized:
            self._buffer = self._buffer.to("cpu", non_blocking=True)
            self._publish()

    def prefetch(self) -> None:
        if self.is_initialized and self._buffer.device != self.device:
            self._buffer = self._buffer.to(self.device, non_blocking=True)
            self._publish()


class KimiDeltaLayer(LinearAttentionLayer):
    """One KDA layer: the convolutions' tail `[B, C, W-1]` and the state `[B, H, K, V]` in float32.

    Adds to transformers' linear layer a token count, batch operations, and a window of tokens that can be taken back
    (see `rollback.py` for how, and for what it costs).

    Args:
        rollback: tokens in that window; 0 records nothing.
    """

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
        if self.window is None:
            self.window = RollbackWindow(self.rollback, width)
        # A draft that is to be verified may be longer than the window; a prompt must never be kept whole.
        draft = self.record_past and self.has_previous_state[0] and tokens <= _LONGEST_DRAFT
        present = Checkpoint(None, None)
        if self.has_previous_state[0]:
            present = Checkpoint(self.conv_states[0], self.recurrent_states[0])
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

    def reset(self) -> None:
        super().reset()
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


class KimiK3Cache(Cache):
    """The cache of one batch, one layer object per decoder layer.

    Args:
        config: the model's config; its layer lists decide which layer holds what.
        rollback: how many of the last tokens `crop` can take back. 0 saves the memory that this takes.
    """

    def __init__(self, config: KimiK3Config, rollback: int = 16):
        if rollback < 0:
            raise ValueError(f"rollback must be at least 0, got {rollback}.")
        super().__init__(
            layers=[
                KimiDeltaLayer(rollback) if layer_type == "linear_attention" else KimiLatentLayer()
                for layer_type in config.layer_types
            ]
        )

    def widen_rollback(self, tokens: int) -> None:
        """Makes `crop` able to take back at least `tokens` of the tokens seen from now on."""
        for layer in self.layers:
            if isinstance(layer, KimiDeltaLayer):
                layer.widen(tokens)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included. Unlike transformers' caches also for models without a softmax layer."""
        layer = self.layers[layer_idx]
        if isinstance(layer, KimiDeltaLayer):
            return layer.seen_tokens
        return layer.get_seq_length()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens, as if they had never been seen.

        Raises:
            ValueError: a positive count, or more tokens than the rollback window holds; nothing is changed then.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes a negative count of tokens to remove (or 0), got {tokens_to_remove}: the length to keep "
                "is not accepted."
            )
        seen = self.get_seq_length()
        if -tokens_to_remove > seen:
            raise ValueError(f"crop({tokens_to_remove}): the cache holds {seen} tokens only.")
        limits = [layer.croppable_tokens for layer in self.layers if isinstance(layer, KimiDeltaLayer)]
        if limits and -tokens_to_remove > min(limits):
            raise ValueError(
                f"crop({tokens_to_remove}): the rollback window holds the last {min(limits)} tokens. Make the cache "
                f"with KimiK3Cache(config, rollback={-tokens_to_remove}) or more, or restore an earlier snapshot."
            )
        super().crop(tokens_to_remove)
