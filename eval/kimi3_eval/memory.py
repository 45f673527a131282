"""Bytes that a model and its cache take, counted from checkpoint and config."""

from pathlib import Path

import psutil
import torch
from transformers import PretrainedConfig

STATE_BYTES = 4
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def item_bytes(config: PretrainedConfig, dtype: str) -> int:
    """Bytes of a number in the dtype a model is loaded in."""
    name = str(config.dtype or "float32").removeprefix("torch.") if dtype == "auto" else dtype
    return ITEM_BYTES.get(name, 4)


def weight_bytes(model: Path, config: PretrainedConfig, dtype: str) -> int:
    """Bytes of a checkpoint's files, scaled where it is loaded in a wider or narrower dtype than it is stored in."""
    stored = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return stored * item_bytes(config, dtype) // item_bytes(config, "auto")


def cache_bytes(config: PretrainedConfig, tokens: int, batch: int = 1, item: int = 2) -> int:
    """Bytes of the cache after `tokens` tokens.

    A KDA layer holds one float32 state `[H, K, V]` and the tail of its convolutions, whatever the length. An MLA layer
    of `modeling_kimi3` holds a latent and the shared key part per token; any other attention holds keys and values of
    every head.
    """
    text = getattr(config, "text_config", None) or config
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    linear = sum(kind == "linear_attention" for kind in kinds)
    softmax = len(kinds) - linear
    total = 0
    if linear:
        kda = getattr(text, "linear_attn_config", None) or {}
        heads = kda.get("num_heads") or text.linear_num_heads
        width = kda.get("head_dim") or text.linear_head_dim
        taps = kda.get("short_conv_kernel_size") or text.linear_conv_kernel_dim
        total += linear * (heads * width * width * STATE_BYTES + 3 * heads * width * (taps - 1) * item)
    if getattr(text, "kv_lora_rank", None):
        total += softmax * tokens * (text.kv_lora_rank + text.qk_rope_head_dim) * item
    else:
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        total += softmax * tokens * 2 * heads * width * item
    return total * batch


def available_bytes(device: str | None) -> int:
    """Bytes that are free on the device a run would use."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.mem_get_info(torch.device(device))[0]
    return psutil.virtual_memory().available


def readable(count: int) -> str:
    """A byte count for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.1f} TiB"
