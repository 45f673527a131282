"""How released tensors become parameters, and back (spec section 2).

| released | here |
| --- | --- |
| `language_model.` prefix (composite layout) | none |
| `self_attn.A_log` `[H]`, zero-padded to a multiple of 128, or `[1, 1, H, 1]` | `[H]` |
| `self_attn.{q,k,v}_conv1d.weight` `[H*K, 1, W]` or `[H*K, W]` | `[H*K, 1, W]` |
| `block_sparse_moe.experts.E.{w1,w3}.weight` `[I, L]` | `block_sparse_moe.experts.gate_up_proj` `[E, 2I, L]` |
| `block_sparse_moe.experts.E.w2.weight` `[L, I]` | `block_sparse_moe.experts.down_proj` `[E, L, I]` |

All other names are the released ones. Transformers applies the list in `from_pretrained` and its inverse in
`save_pretrained(save_original_format=True)`; loading what this package saved passes through it unchanged.
"""

import torch
from torch import nn
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

from .configuration_kimi3 import KimiK3Config

# The released files pad A_log to a multiple of this many heads.
A_LOG_MULTIPLE = 128


class _OneToOne(ConversionOps):
    """An operation on a single tensor."""

    def convert(self, input_dict, source_patterns, target_patterns, config=None, full_layer_name=None, **kwargs):
        (value,) = input_dict.values()
        tensor = value[0] if isinstance(value, list) else value
        return {target_patterns[0]: self.apply(tensor, config, full_layer_name)}

    def apply(self, tensor: torch.Tensor, config: KimiK3Config, name: str) -> torch.Tensor:
        raise NotImplementedError


class SliceHeads(_OneToOne):
    """`A_log` of any stored shape to `[H]`."""

    def apply(self, tensor, config, name):
        heads = config.kda_num_heads
        flat = tensor.reshape(-1)
        if flat.numel() not in (heads, -(-heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but linear_attn_config.num_heads = {heads} asks for "
                f"{heads} values, or that padded to a multiple of {A_LOG_MULTIPLE}."
            )
        return flat[:heads].clone()

    @property
    def reverse_op(self) -> ConversionOps:
        return PadHeads()


class PadHeads(_OneToOne):
    """`A_log [H]` to the shape that the release layout stores."""

    def apply(self, tensor, config, name):
        if config.release_layout == "kimi_linear":
            return tensor.reshape(1, 1, -1, 1)
        if config.release_layout == "flat":
            return tensor
        return nn.functional.pad(tensor, (0, -tensor.numel() % A_LOG_MULTIPLE))

    @property
    def reverse_op(self) -> ConversionOps:
        return SliceHeads()


class LoadWide(_OneToOne):
    """Parameters held in float32: convolution taps (with or without their middle dimension) and `o_norm`."""

    def apply(self, tensor, config, name):
        return tensor.unsqueeze(1) if name.endswith("conv1d.weight") and tensor.dim() == 2 else tensor

    @property
    def reverse_op(self) -> ConversionOps:
        return StoreWide()


class StoreWide(_OneToOne):
    """Kimi-Linear stores these in the model's dtype, K3 in float32."""

    def apply(self, tensor, config, name):
        if config.release_layout == "kimi_linear" and config.dtype is not None:
            dtype = config.dtype if isinstance(config.dtype, torch.dtype) else getattr(torch, config.dtype)
            return tensor.to(dtype)
        return tensor

    @property
    def reverse_op(self) -> ConversionOps:
        return LoadWide()


def weight_conversions() -> list[WeightTransform]:
    """A fresh list of the transforms above, released to ours."""
    return [
        PrefixChange(prefix_to_remove="language_model"),
        # transformers' native Kimi-Linear saves its dense layers under the experts' name.
        WeightRenaming(r"block_sparse_moe\.(gate_proj|up_proj|down_proj)\.", r"mlp.\1."),
        WeightConverter(r"self_attn.A_log", r"self_attn.A_log", [SliceHeads()]),
        WeightConverter(r"conv1d.weight", r"conv1d.weight", [LoadWide()]),
        WeightConverter(r"self_attn.o_norm.weight", r"self_attn.o_norm.weight", [LoadWide()]),
        WeightConverter(
            [r"\.experts.*.w1.weight", r"\.experts.*.w3.weight"],
            r"\.experts.gate_up_proj",
            [MergeModulelist(0), Concatenate(1)],
        ),
        WeightConverter(r"\.experts.*.w2.weight", r"\.experts.down_proj", [MergeModulelist(0)]),
    ]


def release_conversions(config: KimiK3Config) -> list[WeightTransform]:
    """The transforms whose inverse writes the layout that `config` came from (composite where it came from none)."""
    composite = config.release_layout == "composite"
    return [
        entry
        for entry in weight_conversions()
        if isinstance(entry, WeightConverter) or (composite and isinstance(entry, PrefixChange))
    ]


def register_weight_mapping() -> None:
    """Makes `from_pretrained` of every K3 model apply the list."""
    register_checkpoint_conversion_mapping("kimi_k3", weight_conversions(), overwrite=True)
