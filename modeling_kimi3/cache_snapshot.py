"""Going back to a moment of a cache, within a process (`CacheSnapshot`) or through a file (safetensors)."""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .cache_layers import DeltaSnapshot
from .cache_rows import Mark
from .cache_size import geometry
from .configuration_kimi3 import KimiK3Config

_FORMAT = "kimi3-cache-1"

# Beyond the shapes in the cache, what makes the same numbers mean something else.
_MEANING = ("vocab_size", "hidden_size", "num_attention_heads", "qk_nope_head_dim", "v_head_dim", "gate_lower_bound")


@dataclass(frozen=True)
class CacheSnapshot:
    """One entry per layer: copies of the constant states, places in the buffers of latents."""

    fingerprint: dict[str, object]
    layers: tuple[DeltaSnapshot | Mark | None, ...]

    def __len__(self) -> int:
        """Tokens per row."""
        first = self.layers[0]
        if first is None:
            return 0
        return first.seen_tokens if isinstance(first, DeltaSnapshot) else first.length


def fingerprint(config: KimiK3Config) -> dict[str, object]:
    """The fields of a config by which a stored cache is told from another model's, as JSON holds them."""
    fields = geometry(config) | {name: getattr(config, name) for name in _MEANING}
    return json.loads(json.dumps(fields))


def require_same(stored: dict[str, object], config: KimiK3Config, what: str) -> None:
    """
    Raises:
        ValueError: `stored` is not the fingerprint of `config`; the differing fields are named with both values.
    """
    own = fingerprint(config)
    different = [name for name in sorted(own.keys() | stored.keys()) if stored.get(name) != own.get(name)]
    if different:
        sides = "; ".join(f"{name}: {stored.get(name)} there, {own.get(name)} in this config" for name in different)
        raise ValueError(f"{what} belongs to another model. {sides}.")


def write_cache(path: str | os.PathLike, layers: list, config: KimiK3Config) -> None:
    """Writes the layers' content beside `path` and renames it there, so that `path` is whole or as it was."""
    path = Path(path)
    tensors = {
        f"{index}.{name}": tensor.detach().contiguous().clone()
        for index, layer in enumerate(layers)
        for name, tensor in layer.export().items()
    }
    metadata = {
        "format": _FORMAT,
        "fingerprint": json.dumps(fingerprint(config)),
        "seen_tokens": json.dumps([layer.get_seq_length() for layer in layers]),
    }
    handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    try:
        save_file(tensors, beside, metadata)
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def read_cache(path: str | os.PathLike, layers: list, config: KimiK3Config, device: torch.device | str) -> None:
    """Fills fresh layers from a file of `write_cache`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: no file of a cache, a damaged one, or one of another model.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no cache file {path}.")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError(
                    f"{path} is not a file of KimiK3Cache.save: its format is {metadata.get('format')!r}, "
                    f"expected {_FORMAT!r}."
                )
            require_same(json.loads(metadata["fingerprint"]), config, f"The cache in {path}")
            seen = json.loads(metadata["seen_tokens"])
            parts: list[dict[str, torch.Tensor]] = [{} for _ in layers]
            for key in file.keys():
                index, name = key.split(".")
                parts[int(index)][name] = file.get_tensor(key)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
    for layer, tensors, tokens in zip(layers, parts, seen, strict=True):
        layer.load(tensors, tokens)
