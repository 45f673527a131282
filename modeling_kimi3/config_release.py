"""Released `config.json` files read into the keyword arguments of `KimiK3Config`, and written back.

Three forms exist (spec section 1): the composite one (`text_config` inside), the flat one (`model_type` kimi_linear,
with or without K3 keys) and transformers' own way of saving Kimi-Linear (`layer_types` in place of the lists). In all
of them a missing key means that the mechanism is absent, while `KimiK3Config()` is the released K3. Reading therefore
names every field; the file itself is kept word for word, and writing changes in it only what has changed since.
"""

import copy
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from .config_quantization import released_quantization
from .config_validation import refuse_unimplemented

if TYPE_CHECKING:
    from .configuration_kimi3 import KimiK3Config

logger = logging.get_logger(__name__)

# Other spellings of our fields, as transformers and older members of the family use them.
ALIASES = {
    "model_max_length": "max_position_embeddings",
    "num_experts_per_tok": "num_experts_per_token",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "scoring_func": "moe_router_activation_func",
}

# What a missing key of a released file means.
ABSENT_MOE: dict[str, Any] = {
    "num_experts": None,
    "num_experts_per_token": None,
    "num_shared_experts": 0,
    "moe_intermediate_size": None,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": None,
    "routed_scaling_factor": 1.0,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
}
ABSENT: dict[str, Any] = {
    **ABSENT_MOE,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "activation_situ_beta": None,
    "activation_situ_linear_beta": None,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1048576,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_res_block_size": None,
    "q_lora_rank": None,
    "kv_lora_rank": None,
    "qk_nope_head_dim": None,
    "qk_rope_head_dim": None,
    "v_head_dim": None,
    "mla_use_nope": True,
    "mla_use_output_gate": False,
    "num_nextn_predict_layers": 0,
    "attention_dropout": 0.0,
}
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
)

# Keys that a composite file has both outside and inside; the outer one is what its own model class reads.
SHARED_KEYS = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
# How transformers' native Kimi-Linear config spells `linear_attn_config` and the dense layers.
NATIVE_KEYS = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
# About the file, the running process or other keys, not about the model: these stay in the kept file only.
NOT_HOISTED = (
    "architectures",
    "auto_map",
    "model_type",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "transformers_version",
    *NATIVE_KEYS,
)
# Keys of released files that are no fields here because nothing is computed from them.
WITHOUT_EFFECT = (
    "attention_bias",
    "dtype",
    "head_dim",
    "output_router_logits",
    "pretraining_tp",
    "qk_head_dim",
    "rope_theta",
    "torch_dtype",
)


def is_release_dict(raw: Mapping[str, Any]) -> bool:
    """True for a composite file or a flat `kimi_linear` one, False for what `KimiK3Config` itself saves."""
    return "text_config" in raw or raw.get("model_type") == "kimi_linear"


def has_k3_keys(raw: Mapping[str, Any]) -> bool:
    """Does a flat `kimi_linear` dict ask for anything that transformers' own KimiLinear would ignore or reject?"""
    linear = raw.get("linear_attn_config")
    linear = linear if isinstance(linear, Mapping) else {}
    return (
        any(raw.get(key) is not None for key in ("attn_res_block_size", "routed_expert_hidden_size", "dsa_config"))
        or any(raw.get(key) for key in ("latent_moe_use_norm", "mla_use_output_gate"))
        or raw.get("hidden_act") == "situ"
        or linear.get("gate_lower_bound") is not None
        or bool(linear.get("use_full_rank_gate"))
        # A dense model, or a router or layer pattern that the native class does not know.
        or ("num_experts" in raw and raw["num_experts"] is None)
        or raw.get("moe_router_activation_func", "sigmoid") != "sigmoid"
        or raw.get("moe_layer_freq", 1) != 1
    )


def read_release(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `KimiK3Config` for a released file.

    Args:
        raw: the parsed `config.json`; it is not modified.

    Returns:
        Every field of the config, further keys of the text model, and `release_config` with a copy of `raw`.

    Raises:
        ValueError: a required key is missing, two keys contradict each other, or a mechanism is not implemented.
    """
    source = copy.deepcopy(dict(raw))
    text = _text_part(source)
    refuse_unimplemented(source)
    if text is not source:
        refuse_unimplemented(text, "text_config.")

    values = _hoist(text)
    if text is not source:
        values.update({key: source[key] for key in SHARED_KEYS if key in source})
    _read_native_keys(text, values)

    missing = [key for key in REQUIRED if values.get(key) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing from the config: expected a positive number for each.")
    if values.get("num_experts") is not None and values.get("first_k_dense_replace") is None:
        # Published readers take a missing value for 0 or for 1.
        raise ValueError(
            f"first_k_dense_replace missing from a config with num_experts {values['num_experts']!r}: expected the "
            "number of leading dense layers."
        )
    for key, value in ABSENT.items():
        if values.get(key) is None:
            values[key] = value
    if not isinstance(values.get("linear_attn_config"), dict):
        raise ValueError(
            f"linear_attn_config is {values.get('linear_attn_config')!r}: expected a dict with kda_layers and "
            "full_attn_layers (1-based lists that cover all layers; one of them may be empty)."
        )
    quantization = text.get("quantization_config", source.get("quantization_config"))
    if quantization is not None:
        values["quantization_config"] = quantization
    values["release_config"] = source

    unknown = sorted(set(values) - set(ABSENT) - set(REQUIRED) - set(WITHOUT_EFFECT) - _OWN_KEYS)
    if unknown:
        logger.warning_once(
            f"Config keys {', '.join(unknown)} are not known to modeling_kimi3. They are kept, and nothing is computed "
            "from them."
        )
    return values


_OWN_KEYS = {"linear_attn_config", "quantization_config", "release_config"}


def _text_part(raw: dict[str, Any]) -> dict[str, Any]:
    if "text_config" not in raw:
        return raw
    text = raw["text_config"]
    if not isinstance(text, dict):
        raise ValueError(f"text_config is {text!r}: expected a dict.")
    if text.get("model_type", "kimi_linear") not in ("kimi_linear", "kimi_k3"):
        raise ValueError(f"text_config.model_type is {text['model_type']!r}: expected 'kimi_linear'.")
    return text


def _hoist(text: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `text` that describe the model, under our names."""
    values: dict[str, Any] = {}
    for key, value in text.items():
        if key in NOT_HOISTED or key.startswith("_"):
            continue
        name = ALIASES.get(key, key)
        # The context length is only a label, so a second one under the older name does no harm.
        if name in text and text[name] != value and name != "max_position_embeddings":
            raise ValueError(f"{key} is {value!r}, but {name} is {text[name]!r}: expected one value for the two names.")
        values[name] = text.get(name, value)
    return values


def _read_native_keys(text: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Adds to `values` what transformers' native Kimi-Linear config says in its own words."""
    kinds = text.get("layer_types")
    if kinds is not None:
        linear = {
            "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"],
            "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"],
            "num_heads": text.get("linear_num_heads"),
            "head_dim": text.get("linear_head_dim"),
            "short_conv_kernel_size": text.get("linear_conv_kernel_dim"),
        }
        linear = {key: value for key, value in linear.items() if value is not None}
        known = values.setdefault("linear_attn_config", linear)
        for key, value in linear.items():
            if isinstance(known, dict) and known.setdefault(key, value) != value:
                raise ValueError(
                    f"linear_attn_config.{key} is {known[key]!r}, but layer_types and the linear_* keys say {value!r}: "
                    "expected the same."
                )
    feed_forwards = text.get("mlp_layer_types")
    if feed_forwards is not None:
        dense = [kind == "dense" for kind in feed_forwards]
        leading = dense.index(False) if False in dense else len(dense)
        first = values.setdefault("first_k_dense_replace", leading)
        if any(dense[leading:]) or first != leading:
            raise ValueError(
                f"mlp_layer_types is {feed_forwards!r}: expected first_k_dense_replace ({first!r}) layers 'dense', "
                "then 'sparse' ones."
            )


def write_release(config: "KimiK3Config") -> dict[str, Any]:
    """The released `config.json` of `config`: its source with what has changed since, or a composite one.

    A source in transformers' native spelling gets `linear_attn_config` and `first_k_dense_replace` in place of it,
    since that is what other readers of the released layout look for.
    """
    if config.release_config is None:
        return _compose(config)
    raw = copy.deepcopy(config.release_config)
    text = raw.get("text_config", raw)
    if any(key in text for key in NATIVE_KEYS):
        for key in NATIVE_KEYS:
            text.pop(key, None)
        text.setdefault("linear_attn_config", copy.deepcopy(config.linear_attn_config))
        text.setdefault("first_k_dense_replace", config.first_k_dense_replace)

    source = type(config)(**read_release(config.release_config))
    for name in _written_fields(config):
        value = getattr(config, name)
        if value != getattr(source, name):
            spellings = [key for key, field in ALIASES.items() if field == name and key in text]
            for key in spellings or [name]:
                text[key] = copy.deepcopy(value)
            if name in raw:
                raw[name] = copy.deepcopy(value)
    if _dtype_name(config.dtype) != _dtype_name(source.dtype):
        for part in (raw, text):
            keys = [key for key in ("dtype", "torch_dtype") if key in part] or ["dtype"]
            part.update(dict.fromkeys(keys, _dtype_name(config.dtype)))

    quantization = released_quantization(config)
    if quantization is None:
        raw.pop("quantization_config", None)
        text.pop("quantization_config", None)
    elif "quantization_config" not in text and "quantization_config" not in raw:
        text["quantization_config"] = quantization
    return raw


def _compose(config: "KimiK3Config") -> dict[str, Any]:
    text: dict[str, Any] = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
    for name in _written_fields(config):
        value = getattr(config, name)
        # Readers test these two for null; elsewhere a null and a missing key say the same.
        wanted = value is not None or name in ("num_experts", "q_lora_rank")
        if name in ABSENT_MOE and name != "num_experts" and config.num_experts is None:
            wanted = False
        if name == "attention_dropout" and not value:
            wanted = False
        if wanted:
            text[name] = copy.deepcopy(value)
    if config.dtype is not None:
        text["dtype"] = _dtype_name(config.dtype)
    quantization = released_quantization(config)
    if quantization is not None:
        text["quantization_config"] = quantization
    outer = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}
    return {**outer, **{key: text[key] for key in SHARED_KEYS if key in text}}


def _written_fields(config: "KimiK3Config") -> list[str]:
    known = {*ABSENT, *REQUIRED, "linear_attn_config"}
    return [field.name for field in fields(config) if field.name in known]


def _dtype_name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
