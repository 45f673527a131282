"""KimiK3Cache: a constant state per KDA layer, a small latent per token and MLA layer (spec section 4, "Cache").

The layers are in `cache_layers.py`, what they cost in `cache_size.py`, snapshots and files in `cache_snapshot.py`.
"""

import os

import torch
from transformers.cache_utils import Cache

from .cache_layers import KimiDeltaLayer, KimiLatentLayer
from .cache_size import CacheSize, LayerSize, geometry
from .cache_snapshot import CacheSnapshot, fingerprint, read_cache, require_same, write_cache
from .configuration_kimi3 import KimiK3Config


class KimiK3Cache(Cache):
    """The cache of one batch, one layer object per decoder layer.

    Args:
        config: the model's config; its layer lists decide which layer holds what.
        rollback: how many of the last tokens `crop` can take back. 0 saves the memory that this takes.
    """

    def __init__(self, config: KimiK3Config, rollback: int = 16):
        if rollback < 0:
            raise ValueError(f"rollback must be at least 0, got {rollback}.")
        self.config, self.rollback = config, rollback
        self._unfinished = False
        super().__init__(
            layers=[
                KimiDeltaLayer(rollback) if layer_type == "linear_attention" else self._latent_layer()
                for layer_type in config.layer_types
            ]
        )

    def _latent_layer(self) -> KimiLatentLayer:
        return KimiLatentLayer()

    def begin_forward(self, config: KimiK3Config, batch_size: int, device: torch.device) -> None:
        """Makes sure that a forward pass can continue this cache, before any layer of it moves.

        Args:
            config: the model's.
            batch_size: rows of the input.
            device: where the model's first layer is ("meta" where its weights are offloaded: not compared).

        Raises:
            ValueError: another geometry, batch size or device than the cache holds, or a cache that an earlier pass
                left half advanced.
        """
        self._refuse_unfinished()
        if config is not self.config:
            ours, theirs = geometry(self.config), geometry(config)
            for name, value in ours.items():
                if value != theirs[name]:
                    raise ValueError(
                        f"The cache was made for a config with {name}={value}, but the model has "
                        f"{name}={theirs[name]}. Make it with KimiK3Cache(model.config)."
                    )
        held = self.batch_size
        if held not in (-1, batch_size):
            raise ValueError(
                f"The cache holds a batch of {held} rows, but the input has {batch_size}. Use a new cache, "
                "or batch_repeat_interleave / batch_select_indices / fork to change its rows."
            )
        known = held != -1 and not self.offloading and device.type != "meta"
        if known and self.layers[0].device != device:
            raise ValueError(
                f"The cache holds tensors on {self.layers[0].device}, but the model is on {device}. Use a new cache, "
                "or save it and load it with KimiK3Cache.load(path, config, device=...)."
            )
        self._unfinished = True

    def end_forward(self) -> None:
        """All layers have taken in the tokens of the pass."""
        self._unfinished = False

    def _refuse_unfinished(self) -> None:
        if self._unfinished:
            raise ValueError(
                "A forward pass that raised left this cache half advanced: some of its layers hold its tokens, others "
                "do not. Call restore with an earlier snapshot, or reset and start again."
            )

    @property
    def nbytes(self) -> int:
        """Bytes of what is held; see `summary` for spare capacity and the rollback window."""
        return sum(layer.nbytes for layer in self.layers)

    def summary(self) -> CacheSize:
        """Bytes by layer, measured on the tensors. `cache_size` predicts the same."""
        sizes = []
        for layer in self.layers:
            tokens, constant = layer.get_seq_length(), layer.constant_nbytes
            per_token = (layer.nbytes - constant) // tokens if tokens else 0
            sizes.append(LayerSize(layer.kind, constant, per_token, tokens, layer.spare_nbytes, layer.rollback_nbytes))
        return CacheSize(tuple(sizes))

    def reset(self) -> None:
        super().reset()
        self._unfinished = False

    def snapshot(self) -> CacheSnapshot:
        """A moment to go back to: the constant states are copied, latents remembered by their length.

        The latents are copied too, once, if what follows overwrites them (a `crop` to before the snapshot).
        """
        self._refuse_unfinished()
        return CacheSnapshot(fingerprint(self.config), tuple(layer.snapshot() for layer in self.layers))

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Puts the cache where it was at `snapshot`, as often as wanted, whatever happened since.

        A snapshot of another cache is copied.

        Raises:
            ValueError: the snapshot is of a cache for another config.
        """
        require_same(snapshot.fingerprint, self.config, "The snapshot")
        for layer, saved in zip(self.layers, snapshot.layers):
            layer.restore(saved)
        self._unfinished = False

    def fork(self, n: int) -> "KimiK3Cache":
        """A new cache with each row n times, in the order of `repeat_interleave`; this one stays as it is.

        Raises:
            ValueError: n is below 1.
        """
        if n < 1:
            raise ValueError(f"fork takes a count of at least 1, got {n}.")
        self._refuse_unfinished()
        forked = self._alike()
        for layer, source in zip(forked.layers, self.layers):
            layer.restore(source.snapshot())
            if n > 1:
                layer.batch_repeat_interleave(n)
        return forked

    def _alike(self) -> "KimiK3Cache":
        return type(self)(self.config, rollback=self.rollback)

    def save(self, path: str | os.PathLike) -> None:
        """Writes a safetensors file with a fingerprint of the config; the rollback window is left out."""
        self._refuse_unfinished()
        write_cache(path, self.layers, self.config)

    @classmethod
    def load(
        cls, path: str | os.PathLike, config: KimiK3Config, device: torch.device | str = "cpu", rollback: int = 16
    ) -> "KimiK3Cache":
        """Reads what `save` wrote. `crop` can take back tokens seen from now on.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a damaged file, or one of another model; the differing fields are named.
        """
        cache = cls(config, rollback=rollback)
        read_cache(path, cache.layers, config, device)
        return cache

    def widen_rollback(self, tokens: int) -> None:
        """Makes `crop` able to take back at least `tokens` of the tokens seen from now on."""
        for layer in self.layers:
            if isinstance(layer, KimiDeltaLayer):
                layer.widen(tokens)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included. Unlike transformers' caches also for models without a softmax layer."""
        return self.layers[layer_idx].get_seq_length()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens, as if they had never been seen.

        Raises:
            ValueError: a positive count, or more tokens than the rollback window holds; nothing is changed then.
        """
        self._refuse_unfinished()
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
