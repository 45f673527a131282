"""What a cache costs, from a config and a length alone, in the terms in which `KimiK3Cache.summary` measures it.

Shapes: H heads, K key dim, V value dim (equal to K), W convolution taps, r latent rank, p shared key width,
n and v the other key and value widths of an MLA head.
"""

from dataclasses import dataclass

import torch

from .configuration_kimi3 import KimiK3Config

# What decides the shapes in a cache.
_GEOMETRY = ("layer_types", "kv_lora_rank", "qk_rope_head_dim", "kda_num_heads", "kda_head_dim", "conv_kernel_size")


def geometry(config: KimiK3Config) -> dict[str, object]:
    """The config's fields that decide the shapes in a cache, by name."""
    return {name: getattr(config, name) for name in _GEOMETRY}


@dataclass(frozen=True)
class LayerSize:
    """Bytes of one layer, for the whole batch.

    Args:
        kind: "linear_attention" (KDA) or "full_attention" (MLA).
        constant: held whatever the number of tokens.
        per_token: held for each token.
        tokens: how many tokens.
        spare: allocated for tokens to come.
        rollback: kept so that the last tokens can be taken back.
    """

    kind: str
    constant: int
    per_token: int
    tokens: int
    spare: int = 0
    rollback: int = 0

    @property
    def nbytes(self) -> int:
        """What the held tokens take, without `spare` and `rollback`."""
        return self.constant + self.tokens * self.per_token


@dataclass(frozen=True)
class CacheSize:
    """Bytes of a cache, layer by layer; printed as a table."""

    layers: tuple[LayerSize, ...]

    @property
    def nbytes(self) -> int:
        """What the held tokens take, without `spare` and `rollback`."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def constant(self) -> int:
        return sum(layer.constant for layer in self.layers)

    @property
    def per_token(self) -> int:
        return sum(layer.per_token for layer in self.layers)

    @property
    def spare(self) -> int:
        return sum(layer.spare for layer in self.layers)

    @property
    def rollback(self) -> int:
        return sum(layer.rollback for layer in self.layers)

    def __str__(self) -> str:
        lines = ["layer  kind               constant    per token         held        spare     rollback"]
        rows = [(str(i), layer.kind, layer) for i, layer in enumerate(self.layers)] + [("all", "", self)]
        for name, kind, size in rows:
            figures = (size.constant, size.per_token, size.nbytes, size.spare, size.rollback)
            lines.append(f"{name:<5}  {kind:<16}" + " ".join(f"{figure:>12}" for figure in figures))
        return "\n".join(lines)


def cache_size(
    config: KimiK3Config,
    length: int,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    rollback: int = 16,
) -> CacheSize:
    """What `KimiK3Cache(config, rollback)` takes after `length` tokens; nothing is allocated.

    Args:
        length: tokens per row.
        dtype: the model's, taken from the config where None. KDA's states are float32 in any case.
        rollback: the window. Its bytes are those reached once more single steps were taken than it has tokens: two
            checkpoints and a log of four windows.

    Raises:
        ValueError: a negative length or window, or a batch of no rows.
    """
    if length < 0 or rollback < 0 or batch_size < 1:
        raise ValueError(
            "cache_size takes length >= 0, rollback >= 0 and batch_size >= 1, "
            f"got length={length}, rollback={rollback}, batch_size={batch_size}."
        )
    width = _element_size(config, dtype)
    latent = batch_size * (config.kv_lora_rank + config.qk_rope_head_dim) * width
    state = batch_size * _kda_bytes(config, width, config.conv_kernel_size - 1)
    window = 0
    if rollback:
        window = 2 * state + batch_size * 4 * rollback * _log_bytes(config, width)
    return _by_layer(config, length, state, latent, window)


def official_cache_size(
    config: KimiK3Config, length: int, batch_size: int = 1, dtype: torch.dtype | None = None
) -> CacheSize:
    """The same for the official remote code, which caches the expanded keys and values of all heads."""
    width = _element_size(config, dtype)
    expanded = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim) * width
    state = _kda_bytes(config, width, config.conv_kernel_size)
    return _by_layer(config, length, batch_size * state, batch_size * expanded, 0)


def transformers_cache_size(
    config: KimiK3Config, length: int, batch_size: int = 1, dtype: torch.dtype | None = None
) -> CacheSize:
    """The same for transformers' own KimiLinear: latents too, and one more column of each convolution."""
    width = _element_size(config, dtype)
    latent = (config.kv_lora_rank + config.qk_rope_head_dim) * width
    state = _kda_bytes(config, width, config.conv_kernel_size)
    return _by_layer(config, length, batch_size * state, batch_size * latent, 0)


def _by_layer(config: KimiK3Config, length: int, state: int, per_token: int, window: int) -> CacheSize:
    kda = LayerSize("linear_attention", state, 0, length, rollback=window)
    mla = LayerSize("full_attention", 0, per_token, length)
    return CacheSize(tuple(kda if kind == kda.kind else mla for kind in config.layer_types))


def _element_size(config: KimiK3Config, dtype: torch.dtype | None) -> int:
    chosen = dtype or config.dtype or torch.float32
    return (getattr(torch, chosen) if isinstance(chosen, str) else chosen).itemsize


def _kda_bytes(config: KimiK3Config, width: int, columns: int) -> int:
    """State `[H, K, V]` in float32 and convolution inputs `[3*H*K, columns]`."""
    inner = config.kda_num_heads * config.kda_head_dim
    return 4 * inner * config.kda_head_dim + width * 3 * inner * columns


def _log_bytes(config: KimiK3Config, width: int) -> int:
    """One logged token: qkv and v in the model's dtype, k, g and beta in float32, a flag."""
    inner = config.kda_num_heads * config.kda_head_dim
    return width * 4 * inner + 4 * (2 * inner + config.kda_num_heads) + 1
