"""Recognises the quantisation formats that the family is released in (spec section 6).

Released K3 experts are MXFP4: two E2M1 values a byte and one E8M0 scale per 32 columns, described in the vocabulary of
the compressed-tensors package. That description is replaced by a method of our own, so that transformers does not ask
for the package; the original stays in the config's `release_config`.
"""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .configuration_kimi3 import KimiK3Config

QUANTIZATION_METHOD = "kimi_mxfp4"
GROUP_SIZE = 32

# Methods of transformers that only replace nn.Linear modules; the stacked experts are left as they are.
LINEAR_METHODS = ("bitsandbytes", "torchao")

# What the released files say; written where a packed model has no released file to take it from.
RELEASED_QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": GROUP_SIZE,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def quantization_method(quantization: Any) -> str:
    """The method's name, of a dict as in `config.json` or of one of transformers' quantisation config objects."""
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization.quant_method
    return str(getattr(method, "value", method))


def rewrite_quantization(quantization: Any) -> Any:
    """Replaces the released description of MXFP4 experts by our own method and lets nothing else pass unseen.

    Args:
        quantization: a `quantization_config`: dict, or an object that transformers made of one.

    Returns:
        `{"quant_method": "kimi_mxfp4"}` for the released format; what is ours or acts on linear layers only, unchanged.

    Raises:
        ValueError: the format is not understood.
    """
    if not isinstance(quantization, Mapping):
        return quantization
    if "quant_method" not in quantization:
        raise ValueError(f"quantization_config is {quantization!r}: expected a dict with quant_method.")
    method = quantization_method(quantization)
    if method == QUANTIZATION_METHOD or method in LINEAR_METHODS:
        return quantization
    if method != "compressed-tensors":
        raise ValueError(
            f"quantization_config.quant_method is {method!r}: expected 'compressed-tensors' with format "
            f"'mxfp4-pack-quantized', '{QUANTIZATION_METHOD}', or one of {', '.join(LINEAR_METHODS)}."
        )
    _check_released(quantization)
    return {"quant_method": QUANTIZATION_METHOD}


def _check_released(quantization: Mapping[str, Any]) -> None:
    form = quantization.get("format")
    if form != "mxfp4-pack-quantized":
        raise ValueError(f"quantization_config.format is {form!r}: expected 'mxfp4-pack-quantized'.")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if quantization.get(key):
            raise ValueError(f"quantization_config.{key} is {quantization[key]!r}: not implemented, expected null.")
    for group_name, group in (quantization.get("config_groups") or {}).items():
        where = f"quantization_config.config_groups.{group_name}"
        if group.get("format") not in (None, form):
            raise ValueError(f"{where}.format is {group['format']!r}: expected {form!r}.")
        for key in ("input_activations", "output_activations"):
            if group.get(key):
                raise ValueError(f"{where}.{key} is {group[key]!r}: activations are not quantised here, expected null.")
        expected = {"num_bits": 4, "group_size": GROUP_SIZE, "type": "float", "symmetric": True}
        weights = group.get("weights") or {}
        for key, value in expected.items():
            if key in weights and weights[key] != value:
                raise ValueError(f"{where}.weights.{key} is {weights[key]!r}: expected {value!r}.")


def released_quantization(config: "KimiK3Config") -> dict[str, Any] | None:
    """The `quantization_config` that belongs into a released file of `config`'s model, None for dense weights.

    Raises:
        ValueError: the model is quantised by a method that no released file has.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is None or getattr(quantization, "dequantize", False):
        return None
    method = quantization_method(quantization)
    if method != QUANTIZATION_METHOD:
        raise ValueError(
            f"quantization_config.quant_method is {method!r}: expected '{QUANTIZATION_METHOD}' or none, since the "
            "released layout has no other format."
        )
    source = config.release_config or {}
    original = source.get("text_config", source).get("quantization_config", source.get("quantization_config"))
    return copy.deepcopy(original if original is not None else RELEASED_QUANTIZATION)
