"""What each kind of mixer needs to know about padding and packing, worked out once per forward pass.

Shapes: B batch, T time, S key time.
"""

import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.utils.generic import is_tracing

from .configuration_kimi3 import KimiK3Config
from .sequence_layout import (
    PackedLayout,
    PaddedLayout,
    SequenceLayout,
    find_sequence_ids,
    position_ids_from_cu_seqlens,
)


def _is_all_real(mask: torch.Tensor) -> bool:
    """Whether a mask hides nothing. Never looks at values while tracing: a compiled graph must hold for any mask."""
    return not is_tracing(mask) and bool(mask.all())


def _same_sequence(sequence_ids: torch.Tensor):
    """A mask function that lets a token see its own sample only."""

    def mask(batch: int, head: int, query: int, key: int) -> torch.Tensor:
        return sequence_ids[batch, query] == sequence_ids[batch, key]

    return mask


def build_masks(
    config: KimiK3Config,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | dict | None,
    position_ids: torch.Tensor | None,
    cache: Cache | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[object, SequenceLayout | None, bool]:
    """
    Args:
        inputs_embeds: `[B, T, D]`.
        attention_mask: `[B, S]`, nonzero at real tokens (it may span the cached tokens too), or a prepared 4D mask,
            or the dict that `generate` prepares for compiled steps, or None.
        position_ids: `[B, T]` or `[1, T]`; a restart marks a packed sample. Ignored after a cached prefix.
        cache: the cache to be continued, or None.
        cu_seqlens: `[N + 1]` boundaries in the flattened batch, or None.

    Returns:
        The softmax layers' mask as the attention implementation wants it, the KDA layers' layout, and whether the
        batch is packed.
    """
    batch, time = inputs_embeds.shape[:2]
    prepared = attention_mask if isinstance(attention_mask, dict) else None
    padding = prepared["linear_attention"] if prepared is not None else attention_mask
    if padding is not None and padding.dim() != 2:
        padding = None
    held = 0 if cache is None else cache.get_seq_length()
    if padding is not None and prepared is None and not is_tracing(padding) and padding.shape[1] != held + time:
        raise ValueError(
            f"attention_mask must cover the {held} cached and the {time} new tokens ({held + time} columns), "
            f"but its shape is {tuple(padding.shape)}."
        )
    local = None if padding is None else padding[:, -time:]
    if local is not None and _is_all_real(local):
        local = None

    sequence_ids = None
    if cu_seqlens is not None:
        position_ids = position_ids_from_cu_seqlens(cu_seqlens, (batch, time))
    if position_ids is not None and held == 0 and prepared is None and not is_tracing(position_ids):
        sequence_ids = find_sequence_ids(position_ids.expand(batch, -1), local)
    if sequence_ids is not None:
        layout: SequenceLayout | None = PackedLayout.from_sequence_ids(sequence_ids, local)
    else:
        layout = None if local is None else PaddedLayout.from_mask(local)

    softmax_mask = None
    if prepared is not None:
        softmax_mask = prepared.get("full_attention")
    elif "full_attention" in config.layer_types:
        softmax_mask = create_causal_mask(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=cache,
            and_mask_function=None if sequence_ids is None else _same_sequence(sequence_ids),
        )
    return softmax_mask, layout, sequence_ids is not None
