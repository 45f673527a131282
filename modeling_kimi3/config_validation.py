"""What a `KimiK3Config` must satisfy. Every refusal is a ValueError naming the field, its value and what is expected.

A key that would change what the model computes and that nothing here implements is refused, unless its value switches
it off; loading such a checkpoint without the mechanism would give wrong logits and no word about it.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .config_quantization import GROUP_SIZE, QUANTIZATION_METHOD, quantization_method

if TYPE_CHECKING:
    from .configuration_kimi3 import KimiK3Config

HIDDEN_ACTIVATIONS = ("situ", "silu")
ROUTER_ACTIVATIONS = ("sigmoid", "softmax")
TOPK_METHODS = (None, "noaux_tc")

# Mechanisms of neighbouring model families: allowed while switched off (null, false, zero or empty).
UNIMPLEMENTED = {
    "rope_scaling": "positional scaling (the family has no rotary embedding, but scaling also rescales the softmax)",
    "attention_bias": "biases in the attention projections",
    "qkv_bias": "biases in the attention projections",
    "add_qkv_bias": "biases in the attention projections",
    "mlp_bias": "biases in the feed-forward layers",
    "use_bias": "biases",
    "bias": "biases",
    "sliding_window": "windowed attention",
    "use_sliding_window": "windowed attention",
    "attention_chunk_size": "chunked attention",
    "attention_sink": "attention sinks",
    "use_attention_sinks": "attention sinks",
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
    "qk_norm": "a norm on attention queries and keys",
    "use_qk_norm": "a norm on attention queries and keys",
    "qk_layernorm": "a norm on attention queries and keys",
    "mla_scale_q_lora": "rescaled query latents",
    "mla_scale_kv_lora": "rescaled key-value latents",
    "parallel_attn": "parallel attention and feed-forward",
    "use_parallel_residual": "parallel attention and feed-forward",
    "hc_mult": "hyper-connections",
    "swiglu_limit": "clamped gated units",
    "zero_expert_num": "zero-computation experts",
    "router_jitter_noise": "router noise",
    "hidden_dropout": "dropout in the residual stream",
    "hidden_dropout_prob": "dropout in the residual stream",
    "resid_pdrop": "dropout in the residual stream",
    "embd_pdrop": "dropout in the embedding",
    "num_mtp_layers": "multi-token prediction layers",
    "mtp_num_layers": "multi-token prediction layers",
    "mtp_num_hidden_layers": "multi-token prediction layers",
    "num_hash_layers": "hash-routed layers",
    "is_encoder_decoder": "an encoder",
    "add_cross_attention": "cross attention",
    "per_layer_config": "sizes that differ between layers",
}
# Factors on the residual stream, the scores or the logits: allowed where they are 1.
MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "logit_scale",
    "logits_scaling",
    "residual_multiplier",
    "scale_depth",
    "scale_emb",
)
SPARSE_ATTENTION_PREFIXES = ("dsa_", "index_", "indexer")

LINEAR_ATTN_KEYS = (
    "num_heads",
    "head_dim",
    "short_conv_kernel_size",
    "gate_lower_bound",
    "use_full_rank_gate",
    "kda_layers",
    "full_attn_layers",
)


def refuse_unimplemented(keys: Mapping[str, Any], where: str = "") -> None:
    """Raises for a key that asks for something this package does not compute.

    Args:
        keys: config keys with their values.
        where: what to write before the key's name, such as "text_config.".
    """
    for key, value in keys.items():
        if key.startswith(SPARSE_ATTENTION_PREFIXES) and value is not None:
            raise ValueError(
                f"{where}{key} is {value!r}: this is a Kimi K3.1 checkpoint, whose softmax layers select positions "
                "with an indexer (learned sparse attention). That is not implemented, and running it as K3 would give "
                "wrong results beyond the selection's size; expected a config without dsa_config."
            )
        if key in UNIMPLEMENTED and not _is_off(value):
            raise ValueError(f"{where}{key} is {value!r}: {UNIMPLEMENTED[key]} are not implemented; expected null.")
        if key in MULTIPLIERS and value not in (None, 1):
            raise ValueError(f"{where}{key} is {value!r}: such a factor is not implemented; expected 1 or null.")
        if key == "rope_parameters" and not _is_plain_rope(value):
            raise ValueError(f"{where}{key} is {value!r}: the family has no rotary embedding; expected null.")
        if key == "architectures" and any("K31" in str(name) for name in value or ()):
            raise ValueError(
                f"{where}{key} is {value!r}: Kimi K3.1 has learned sparse attention, which is not implemented; "
                "expected KimiK3ForConditionalGeneration, KimiLinearForCausalLM or KimiK3ForCausalLM."
            )


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in (0, "", [], {}, ())


def _is_plain_rope(value: Any) -> bool:
    # transformers writes {"rope_type": "default", "rope_theta": ...} whether or not anything is rotated.
    return _is_off(value) or (isinstance(value, Mapping) and value.get("rope_type", "default") == "default")


def validate_config(config: "KimiK3Config") -> None:
    """Checks every field of `config` against its own range and against the others.

    Raises:
        ValueError: with the field's name, its value and what is expected.
    """
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        _positive_int(name, getattr(config, name))
    _positive_int("max_position_embeddings", config.max_position_embeddings)
    _positive_number("rms_norm_eps", config.rms_norm_eps)
    if not _is_number(config.initializer_range) or config.initializer_range < 0:
        raise ValueError(f"initializer_range is {config.initializer_range!r}: expected a number of at least 0.")
    if not _is_number(config.attention_dropout) or not 0 <= config.attention_dropout < 1:
        raise ValueError(f"attention_dropout is {config.attention_dropout!r}: expected a number in [0, 1).")
    for name in ("use_cache", "tie_word_embeddings", "mla_use_output_gate"):
        _boolean(name, getattr(config, name))

    if config.num_nextn_predict_layers not in (0, None):
        raise ValueError(
            f"num_nextn_predict_layers is {config.num_nextn_predict_layers!r}: expected 0, since multi-token "
            "prediction layers are not implemented."
        )
    if config.attn_res_block_size is not None:
        _positive_int("attn_res_block_size", config.attn_res_block_size, "or null for plain residuals")
    _validate_activation(config)
    _validate_layers(config)
    if config.kda_layers:
        _validate_kda(config)
    if config.full_attn_layers:
        _validate_mla(config)
    if config.num_experts is not None:
        _validate_moe(config)
        _validate_packing(config)
    _validate_token_ids(config)


def _validate_activation(config: "KimiK3Config") -> None:
    if config.hidden_act not in HIDDEN_ACTIVATIONS:
        raise ValueError(f"hidden_act is {config.hidden_act!r}: expected one of {', '.join(HIDDEN_ACTIVATIONS)}.")
    if config.hidden_act == "situ":
        _positive_number("activation_situ_beta", config.activation_situ_beta, "since hidden_act is 'situ'")
        if config.activation_situ_linear_beta is not None:
            _positive_number("activation_situ_linear_beta", config.activation_situ_linear_beta, "or null")


def _validate_layers(config: "KimiK3Config") -> None:
    linear = config.linear_attn_config
    if not isinstance(linear, dict):
        raise ValueError(f"linear_attn_config is {linear!r}: expected a dict with {', '.join(LINEAR_ATTN_KEYS)}.")
    for key, value in linear.items():
        if key not in LINEAR_ATTN_KEYS and not _is_off(value):
            raise ValueError(
                f"linear_attn_config.{key} is {value!r}: not implemented; the keys known are "
                f"{', '.join(LINEAR_ATTN_KEYS)}."
            )
    depth = config.num_hidden_layers
    for name in ("kda_layers", "full_attn_layers"):
        layers = linear.get(name)
        if not isinstance(layers, list) or not all(_is_int(layer) for layer in layers):
            raise ValueError(f"linear_attn_config.{name} is {layers!r}: expected a list of 1-based layer numbers.")
        wrong = [layer for layer in layers if not 1 <= layer <= depth]
        if wrong:
            raise ValueError(
                f"linear_attn_config.{name} has {wrong}: expected layer numbers from 1 to num_hidden_layers ({depth})."
            )
        if len(set(layers)) != len(layers):
            raise ValueError(f"linear_attn_config.{name} is {layers!r}: expected every layer number once.")
    kda, full = set(linear["kda_layers"]), set(linear["full_attn_layers"])
    if kda & full:
        raise ValueError(
            f"linear_attn_config.kda_layers and full_attn_layers both have {sorted(kda & full)}: expected every layer "
            "in one of the two."
        )
    gap = sorted(set(range(1, depth + 1)) - kda - full)
    if gap:
        raise ValueError(
            f"linear_attn_config.kda_layers and full_attn_layers leave out {gap}: expected every layer from 1 to "
            f"num_hidden_layers ({depth}) in one of the two."
        )


def _validate_kda(config: "KimiK3Config") -> None:
    linear = config.linear_attn_config
    for name in ("num_heads", "head_dim", "short_conv_kernel_size"):
        _positive_int(f"linear_attn_config.{name}", linear.get(name))
    bound = linear.get("gate_lower_bound")
    if bound is not None and (not _is_number(bound) or bound >= 0):
        raise ValueError(
            f"linear_attn_config.gate_lower_bound is {bound!r}: expected a negative number (the bound of the log "
            "decay) or null for the softplus gate."
        )
    if linear.get("use_full_rank_gate") is not None:
        _boolean("linear_attn_config.use_full_rank_gate", linear["use_full_rank_gate"])


def _validate_mla(config: "KimiK3Config") -> None:
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        _positive_int(name, getattr(config, name), "since full_attn_layers is not empty")
    if config.q_lora_rank is not None:
        _positive_int("q_lora_rank", config.q_lora_rank, "or null for uncompressed queries")
    if config.num_key_value_heads != config.num_attention_heads:
        raise ValueError(
            f"num_key_value_heads is {config.num_key_value_heads!r}: expected num_attention_heads "
            f"({config.num_attention_heads}), since every MLA head has its own keys and values."
        )
    if config.mla_use_nope is not True:
        raise ValueError(
            f"mla_use_nope is {config.mla_use_nope!r}: expected true; rotary embeddings are not implemented, and no "
            "released model of the family has them."
        )


def _validate_moe(config: "KimiK3Config") -> None:
    experts = _positive_int("num_experts", config.num_experts, "or null for a dense model")
    chosen = _positive_int("num_experts_per_token", config.num_experts_per_token, "since num_experts is set")
    for name in ("moe_intermediate_size", "moe_layer_freq"):
        _positive_int(name, getattr(config, name), "since num_experts is set")
    for name in ("latent_moe_use_norm", "moe_renormalize", "use_grouped_topk"):
        _boolean(name, getattr(config, name))
    if chosen > experts:
        raise ValueError(f"num_experts_per_token is {chosen}: expected at most num_experts ({experts}).")
    if not _is_int(config.num_shared_experts) or config.num_shared_experts < 0:
        raise ValueError(f"num_shared_experts is {config.num_shared_experts!r}: expected an integer of at least 0.")
    first = config.first_k_dense_replace
    if not _is_int(first) or not 0 <= first <= config.num_hidden_layers:
        raise ValueError(
            f"first_k_dense_replace is {first!r}: expected an integer from 0 to num_hidden_layers "
            f"({config.num_hidden_layers})."
        )
    if config.routed_expert_hidden_size is not None:
        _positive_int("routed_expert_hidden_size", config.routed_expert_hidden_size, "or null for full-width experts")
    elif config.latent_moe_use_norm:
        raise ValueError(
            "latent_moe_use_norm is True, but routed_expert_hidden_size is None: expected false, or a latent width for "
            "the norm to act on."
        )
    if config.moe_router_activation_func not in ROUTER_ACTIVATIONS:
        raise ValueError(
            f"moe_router_activation_func is {config.moe_router_activation_func!r}: expected one of "
            f"{', '.join(ROUTER_ACTIVATIONS)}."
        )
    if config.topk_method not in TOPK_METHODS:
        raise ValueError(f"topk_method is {config.topk_method!r}: expected 'noaux_tc' or null.")
    if not _is_number(config.routed_scaling_factor) or config.routed_scaling_factor == 0:
        raise ValueError(f"routed_scaling_factor is {config.routed_scaling_factor!r}: expected a number other than 0.")
    _validate_expert_groups(config, experts, chosen)


def _validate_expert_groups(config: "KimiK3Config", experts: int, chosen: int) -> None:
    groups, kept = config.num_expert_group, config.topk_group
    _positive_int("num_expert_group", groups)
    _positive_int("topk_group", kept)
    if experts % groups:
        raise ValueError(f"num_expert_group is {groups}: expected a divisor of num_experts ({experts}).")
    if kept > groups:
        raise ValueError(f"topk_group is {kept}: expected at most num_expert_group ({groups}).")
    available = kept * (experts // groups)
    if chosen > available:
        raise ValueError(
            f"num_experts_per_token is {chosen}: expected at most {available}, the experts in "
            f"the topk_group ({kept}) groups that stay."
        )
    if groups > 1 and not config.use_grouped_topk:
        raise ValueError(
            f"use_grouped_topk is {config.use_grouped_topk!r}, but num_expert_group is {groups}: expected true, or a "
            "single group."
        )


def _validate_packing(config: "KimiK3Config") -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None or quantization_method(quantization) != QUANTIZATION_METHOD:
        return
    inner = "routed_expert_hidden_size" if config.routed_expert_hidden_size is not None else "hidden_size"
    for name in (inner, "moe_intermediate_size"):
        if getattr(config, name) % GROUP_SIZE:
            raise ValueError(
                f"{name} is {getattr(config, name)}: expected a multiple of {GROUP_SIZE}, the columns that share a "
                "scale in MXFP4 experts."
            )


def _validate_token_ids(config: "KimiK3Config") -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name)
        ids = value if isinstance(value, list | tuple) and name == "eos_token_id" else [value]
        for token in ids:
            if token is not None and not (_is_int(token) and 0 <= token < config.vocab_size):
                raise ValueError(
                    f"{name} is {value!r}: expected ids from 0 to {config.vocab_size - 1} (vocab_size is "
                    f"{config.vocab_size}) or null."
                )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive_int(name: str, value: Any, note: str = "") -> int:
    if not _is_int(value) or value < 1:
        raise ValueError(f"{name} is {value!r}: expected a positive integer{f' {note}' if note else ''}.")
    return value


def _positive_number(name: str, value: Any, note: str = "") -> None:
    if not _is_number(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}: expected a positive number{f' {note}' if note else ''}.")


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: expected true or false.")
