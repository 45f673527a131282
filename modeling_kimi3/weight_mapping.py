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

import re

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
from transformers.modeling_utils import PreTrainedModel

from .configuration_kimi3 import KimiK3Config

# The released files pad A_log to a multiple of this many heads.
A_LOG_MULTIPLE = 128


# Parameters that stay float32 in a narrower model; files hold them as float32 or in the model's dtype.
WIDE = (
    "self_attn.A_log",
    "self_attn.dt_bias",
    "gate.e_score_correction_bias",
    "conv1d.weight",
    "self_attn.o_norm.weight",
)


class _OneToOne(ConversionOps):
    """An operation on a single tensor."""

    def convert(self, input_dict, source_patterns, target_patterns, model=None, full_layer_name=None, **kwargs):
        (value,) = input_dict.values()
        tensor = value[0] if isinstance(value, list) else value
        return {target_patterns[0]: self.apply(tensor, model, full_layer_name)}

    def apply(self, tensor: torch.Tensor, model: PreTrainedModel, name: str) -> torch.Tensor:
        raise NotImplementedError


class LoadWide(_OneToOne):
    """One of the parameters `WIDE` in any form that files hold to the model's."""

    def apply(self, tensor, model, name):
        if name.endswith("A_log"):
            return self._slice(tensor, model.config.kda_num_heads, name)
        # Convolution taps, with or without their middle dimension.
        return tensor.unsqueeze(1) if name.endswith("conv1d.weight") and tensor.dim() == 2 else tensor

    @staticmethod
    def _slice(tensor: torch.Tensor, heads: int, name: str) -> torch.Tensor:
        flat = tensor.reshape(-1)
        if flat.numel() not in (heads, -(-heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but linear_attn_config.num_heads = {heads} asks for "
                f"{heads} values, or that padded to a multiple of {A_LOG_MULTIPLE}."
            )
        return flat[:heads].clone()

    @property
    def reverse_op(self) -> ConversionOps:
        return StoreWide()


class StoreWide(_OneToOne):
    """The way back, to the shape and dtype of the release layout.

    The dtype is that of the files that the model was loaded from, or else what the layout has: Kimi-Linear the
    model's, K3 float32. Values that it cannot hold, as after training, stay float32.
    """

    def apply(self, tensor, model, name):
        layout = model.config.release_layout
        kind = next(kind for kind in WIDE if name.endswith(kind))
        default = model.dtype if layout == "kimi_linear" and name.endswith(".weight") else tensor.dtype
        dtype = getattr(model, "_stored_dtypes", {}).get(kind, default)
        if dtype.itemsize < tensor.dtype.itemsize and model.dtype.itemsize <= dtype.itemsize:
            narrow = tensor.to(dtype)
            tensor = narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor
        if kind == "self_attn.A_log" and layout == "kimi_linear":
            return tensor.reshape(1, 1, -1, 1)
        if kind == "self_attn.A_log" and layout == "composite":
            return nn.functional.pad(tensor, (0, -tensor.numel() % A_LOG_MULTIPLE))
        return tensor

    @property
    def reverse_op(self) -> ConversionOps:
        return LoadWide()


# Of one expert matrix, dense or packed (spec section 6), and the part of `in` that each stored column stands for.
_DENSE = {"weight": 1}
_PACKED = {"weight_packed": 2, "weight_scale": 32}


class ExpertsConverter(WeightConverter):
    """One tensor per expert and projection to a stacked parameter, or back.

    Stacking goes by the order of what is there, so a checkpoint with a gap in it would fill the wrong experts. Each
    expert's tensors are looked for by name first, and an error names the one that is missing or has another shape.
    """

    def convert(self, layer_name, model=None, config=None, hf_quantizer=None, loading_info=None):
        if loading_info is not None:
            names = self._check_names(layer_name, config)
            parameter = model.get_parameter(layer_name)
            # Of a parameter that is sharded over processes each one holds a part of the experts.
            if not hasattr(parameter, "placements"):
                self._check_shapes(names, parameter.shape)
        return super().convert(layer_name, model, config, hf_quantizer, loading_info)

    def _projections(self) -> list[str]:
        """Which of w1, w2 and w3 the parameter is made of."""
        found = (re.search(r"\bw[123]\b", pattern) for pattern in self.source_patterns)
        return sorted({match.group() for match in found if match})

    def _check_names(self, layer_name: str, config: KimiK3Config) -> dict[str, tuple[int, str]]:
        """Expert and part (`weight`, …) of each stored name; raises where one is missing, or is there in two forms."""
        found = {}
        for name in self.layer_targets[layer_name]:
            stem, _, part = name.rpartition(".")
            head, expert, projection = stem.rsplit(".", 2)
            found[name] = (head, int(expert), projection, part)
        head = next(iter(found.values()))[0]
        parts = {part for *_, part in found.values()}
        wanted = _PACKED if parts & _PACKED.keys() else _DENSE
        expected = {
            f"{head}.{expert}.{projection}.{part}"
            for expert in range(config.num_experts)
            for projection in self._projections()
            for part in wanted
        }
        problems = [
            f"{word} {', '.join(sorted(names)[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
            for word, names in (("missing", expected - found.keys()), ("unexpected", found.keys() - expected))
            if names
        ]
        if problems:
            raise ValueError(
                f"The experts of {layer_name} do not fit num_experts = {config.num_experts}: {'; '.join(problems)}."
            )
        return {name: (expert, part) for name, (_, expert, _, part) in found.items()}

    def _check_shapes(self, names: dict[str, tuple[int, str]], stacked: torch.Size) -> None:
        """Raises where a stored tensor is not its expert's share of a parameter `stacked` `[E, O, I]`."""
        rows, columns = stacked[1] // len(self._projections()), stacked[2]
        # Left where they were found: whoever stacks them takes loaded tensors as well as promises of them.
        self.collected_tensors.update(self.materialize_tensors())
        ordered = sorted(names, key=lambda name: names[name][0])
        for pattern, tensors in self.collected_tensors.items():
            suffix = pattern.rpartition("*")[2]
            for name, tensor in zip([name for name in ordered if name.endswith(suffix)], tensors):
                expected = (rows, columns // {**_DENSE, **_PACKED}[names[name][1]])
                if tuple(tensor.shape) != expected:
                    raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(expected)}.")


def weight_conversions(prefix: str = "language_model") -> list[WeightTransform]:
    """A fresh list of the transforms above, released to ours, where the released names start with `prefix`."""
    return [
        PrefixChange(prefix_to_remove=prefix),
        # transformers' native Kimi-Linear saves its dense layers under the experts' name.
        WeightRenaming(r"block_sparse_moe\.(gate_proj|up_proj|down_proj)\.", r"mlp.\1."),
        *(WeightConverter(kind, kind, [LoadWide()]) for kind in WIDE),
        ExpertsConverter(
            [r"\.experts.*.w1.weight", r"\.experts.*.w3.weight"],
            r"\.experts.gate_up_proj",
            [MergeModulelist(0), Concatenate(1)],
        ),
        ExpertsConverter(r"\.experts.*.w2.weight", r"\.experts.down_proj", [MergeModulelist(0)]),
    ]


def release_conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """The transforms whose inverse writes `model` in its config's layout (composite where that came from no file)."""
    prefix = ["language_model"] if model.config.release_layout == "composite" else []
    # The bare decoder lacks the first part of the names that the released files have.
    prefix += [] if hasattr(model, model.base_model_prefix) else [model.base_model_prefix]
    return [
        entry
        for entry in weight_conversions(".".join(prefix))
        if isinstance(entry, WeightConverter) or (prefix and isinstance(entry, PrefixChange))
    ]


def register_weight_mapping() -> None:
    """Makes `from_pretrained` of every K3 model apply the list."""
    register_checkpoint_conversion_mapping("kimi_k3", weight_conversions(), overwrite=True)
