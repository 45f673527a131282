"""What KimiK3Config refuses, with messages that name field, value and expectation; quantisation formats."""

import copy
import json

import pytest
from transformers import AutoConfig

from modeling_kimi3 import KimiK3Config
from modeling_kimi3.config_quantization import RELEASED_QUANTIZATION, released_quantization
from modeling_kimi3.configuration_kimi3 import PRESETS


@pytest.fixture
def raw(golden):
    return lambda name: json.loads((golden(name) / "config.json").read_text())


def flat(released):
    return {**released["text_config"]}


# Quantisation


def test_released_quantization_becomes_ours_and_comes_back(golden, raw):
    config = KimiK3Config.from_pretrained(golden("k3-tiny-text"))
    assert config.quantization_config == {"quant_method": "kimi_mxfp4"}
    original = raw("k3-tiny-text")["text_config"]["quantization_config"]
    assert released_quantization(config) == original == RELEASED_QUANTIZATION
    assert not hasattr(KimiK3Config.from_pretrained(golden("k3-moe-bf16")), "quantization_config")


def test_dense_weights_are_written_without_quantization(golden, raw):
    config = KimiK3Config.from_pretrained(golden("k3-tiny-text"))
    del config.quantization_config
    expected = raw("k3-tiny-text")
    del expected["text_config"]["quantization_config"]
    assert config.to_release_dict() == expected


def test_packed_weights_from_no_released_file_get_the_released_description():
    config = KimiK3Config.from_preset("tiny-1m", quantization_config={"quant_method": "kimi_mxfp4"})
    assert config.to_release_dict()["text_config"]["quantization_config"] == RELEASED_QUANTIZATION


def changed(path, value):
    quantization = copy.deepcopy(RELEASED_QUANTIZATION)
    inner = quantization
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return quantization


WEIGHTS = ("config_groups", "group_0", "weights")


@pytest.mark.parametrize(
    "quantization, message",
    [
        (changed(("format",), "nvfp4-pack-quantized"), r"quantization_config\.format is 'nvfp4-pack-quantized'"),
        (changed(("quant_method",), "fp8"), r"quantization_config\.quant_method is 'fp8'"),
        (changed(("quant_method",), "mxfp4"), r"quantization_config\.quant_method is 'mxfp4'"),
        (changed((*WEIGHTS, "group_size"), 16), r"weights\.group_size is 16: expected 32"),
        (changed((*WEIGHTS, "num_bits"), 8), r"weights\.num_bits is 8: expected 4"),
        (changed((*WEIGHTS, "type"), "int"), r"weights\.type is 'int'"),
        (changed((*WEIGHTS, "symmetric"), False), r"weights\.symmetric is False"),
        (changed(("config_groups", "group_0", "input_activations"), {"num_bits": 8}), r"input_activations is"),
        (changed(("config_groups", "group_0", "format"), "int-quantized"), r"group_0\.format is 'int-quantized'"),
        (changed(("kv_cache_scheme",), {"num_bits": 8}), r"kv_cache_scheme is"),
        ({"bits": 4}, r"expected a dict with quant_method"),
    ],
)
def test_other_quantization_is_refused(released, quantization, message):
    released["text_config"]["quantization_config"] = quantization
    with pytest.raises(ValueError, match=message):
        KimiK3Config(**released)


@pytest.mark.parametrize("groups", [None, {}, {"group_0": {}}, {"group_0": {"weights": {"num_bits": 4}}}])
def test_a_shorter_description_of_the_same_format_is_understood(released, groups):
    quantization = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": groups}
    released["text_config"]["quantization_config"] = quantization
    config = KimiK3Config(**released)
    assert config.quantization_config == {"quant_method": "kimi_mxfp4"}
    assert config.to_release_dict() == released


def test_a_quantisation_without_a_released_form_is_not_written():
    config = KimiK3Config.from_preset("tiny-1m", quantization_config={"quant_method": "bitsandbytes"})
    assert config.quantization_config == {"quant_method": "bitsandbytes"}
    with pytest.raises(ValueError, match=r"quantization_config\.quant_method is 'bitsandbytes': expected 'kimi_mxfp4'"):
        config.to_release_dict()


def test_packed_experts_need_whole_groups(released):
    released["text_config"] |= {"quantization_config": RELEASED_QUANTIZATION, "moe_intermediate_size": 40}
    with pytest.raises(ValueError, match="moe_intermediate_size is 40: expected a multiple of 32"):
        KimiK3Config(**released)


# Refusals: every message has the field, the value and what is expected


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"hidden_size": 0}, r"hidden_size is 0: expected a positive integer"),
        ({"hidden_size": 64.0}, r"hidden_size is 64\.0: expected a positive integer"),
        ({"hidden_size": "64"}, r"hidden_size is '64'"),
        ({"num_hidden_layers": True}, r"num_hidden_layers is True"),
        ({"vocab_size": -1, "bos_token_id": 0}, r"vocab_size is -1"),
        ({"vocab_size": "256"}, r"vocab_size is '256'"),
        ({"kda_layers": [1, 2, 3, 5, 7]}, r"linear_attn_config\.kda_layers has \[7\]"),
        ({"linear_attn_config": [], "gate_lower_bound": -3.0}, r"linear_attn_config is \[\]: expected a dict"),
        ({"intermediate_size": None}, r"intermediate_size is None"),
        ({"num_attention_heads": 0}, r"num_attention_heads is 0"),
        ({"rms_norm_eps": 0}, r"rms_norm_eps is 0: expected a positive number"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps is nan"),
        ({"initializer_range": -0.1}, r"initializer_range is -0\.1"),
        ({"attention_dropout": 1.0}, r"attention_dropout is 1\.0: expected a number in \[0, 1\)"),
        ({"initializer_range": "0.02"}, r"initializer_range is '0\.02'"),
        ({"attention_dropout": None}, r"attention_dropout is None"),
        ({"max_position_embeddings": 0}, r"max_position_embeddings is 0: expected a positive integer"),
        ({"tie_word_embeddings": "no"}, r"tie_word_embeddings is 'no': expected true or false"),
        ({"num_key_value_heads": 1}, r"num_key_value_heads is 1: expected num_attention_heads \(3\)"),
        ({"mla_use_nope": False}, r"mla_use_nope is False: expected true"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu': expected one of situ, silu"),
        ({"activation_situ_beta": None}, r"activation_situ_beta is None: expected a positive number"),
        ({"activation_situ_linear_beta": 0.0}, r"activation_situ_linear_beta is 0\.0"),
        ({"attn_res_block_size": 0}, r"attn_res_block_size is 0: expected a positive integer"),
        ({"num_nextn_predict_layers": 1}, r"num_nextn_predict_layers is 1: expected 0"),
        ({"kv_lora_rank": None}, r"kv_lora_rank is None: expected a positive integer since full_attn_layers"),
        ({"q_lora_rank": 0}, r"q_lora_rank is 0"),
        ({"v_head_dim": -2}, r"v_head_dim is -2"),
        ({"qk_rope_head_dim": 0}, r"qk_rope_head_dim is 0"),
        ({"qk_head_dim": 99}, r"qk_head_dim is 99: expected 48"),
        ({"num_experts": 0}, r"num_experts is 0: expected a positive integer or null for a dense model"),
        ({"num_experts_per_token": 9}, r"num_experts_per_token is 9: expected at most num_experts \(8\)"),
        ({"num_experts_per_token": 0}, r"num_experts_per_token is 0"),
        ({"num_shared_experts": -1}, r"num_shared_experts is -1"),
        ({"num_shared_experts": 1.0}, r"num_shared_experts is 1\.0: expected an integer of at least 0"),
        ({"moe_intermediate_size": None}, r"moe_intermediate_size is None"),
        ({"routed_expert_hidden_size": None}, r"latent_moe_use_norm is True, but routed_expert_hidden_size is None"),
        ({"routed_expert_hidden_size": 0}, r"routed_expert_hidden_size is 0"),
        ({"moe_router_activation_func": "tanh"}, r"moe_router_activation_func is 'tanh': expected one of sigmoid"),
        ({"topk_method": "greedy"}, r"topk_method is 'greedy': expected 'noaux_tc' or null"),
        ({"routed_scaling_factor": 0}, r"routed_scaling_factor is 0"),
        ({"first_k_dense_replace": 7}, r"first_k_dense_replace is 7: expected an integer from 0 to num_hidden_layers"),
        ({"first_k_dense_replace": 1.0}, r"first_k_dense_replace is 1\.0"),
        ({"moe_renormalize": "yes"}, r"moe_renormalize is 'yes': expected true or false"),
        ({"moe_layer_freq": 0}, r"moe_layer_freq is 0"),
        ({"routed_scaling_factor": "1"}, r"routed_scaling_factor is '1': expected a number"),
        ({"routed_scaling_factor": True}, r"routed_scaling_factor is True"),
        ({"num_expert_group": 0}, r"num_expert_group is 0: expected a positive integer"),
        ({"topk_group": 0}, r"topk_group is 0: expected a positive integer"),
        ({"num_expert_group": 3}, r"num_expert_group is 3: expected a divisor of num_experts \(8\)"),
        ({"num_expert_group": 2, "topk_group": 3}, r"topk_group is 3: expected at most num_expert_group \(2\)"),
        ({"num_expert_group": 8}, r"num_experts_per_token is 2: expected at most 1, the experts in the topk_group"),
        ({"num_expert_group": 2, "use_grouped_topk": False}, r"use_grouped_topk is False, but num_expert_group is 2"),
        ({"bos_token_id": 256}, r"bos_token_id is 256: expected ids from 0 to 255"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id is \[2, -1\]"),
        ({"bos_token_id": [1]}, r"bos_token_id is \[1\]"),
        ({"pad_token_id": "0"}, r"pad_token_id is '0'"),
    ],
)
def test_contradictions_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        KimiK3Config.from_preset("tiny-1m", **overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_experts_per_token": 8},
        {"num_expert_group": 8, "topk_group": 8},
        {"num_expert_group": 4, "topk_group": 1},
        {"use_grouped_topk": False},
        {"num_shared_experts": 0},
        {"first_k_dense_replace": 0},
        {"first_k_dense_replace": 6},
        {"routed_expert_hidden_size": None, "latent_moe_use_norm": False},
        {"routed_scaling_factor": -1},
        {"activation_situ_linear_beta": None},
        {"hidden_act": "silu", "activation_situ_beta": None},
        {"initializer_range": 0.0},
        {"attention_dropout": 0},
        {"attn_res_block_size": 99},
        {"num_nextn_predict_layers": None},
        {"eos_token_id": [0, 255]},
        {"pad_token_id": None},
        {"quantization_config": {"quant_method": "bitsandbytes"}, "moe_intermediate_size": 40},
    ],
)
def test_what_only_looks_wrong_is_accepted(overrides):
    config = KimiK3Config.from_preset("tiny-1m", **overrides)
    assert {name: getattr(config, name) for name in overrides} == overrides


@pytest.mark.parametrize(
    "linear, message",
    [
        ({"kda_layers": [1, 2, 3, 4, 5]}, r"kda_layers and full_attn_layers both have \[4\]"),
        ({"kda_layers": [2, 3, 5]}, r"kda_layers and full_attn_layers leave out \[1\]"),
        ({"kda_layers": [1, 2, 3]}, r"kda_layers and full_attn_layers leave out \[5\]"),
        ({"full_attn_layers": [4, 6, 7]}, r"full_attn_layers has \[7\]: expected layer numbers from 1 to .* \(6\)"),
        ({"kda_layers": [0, 1, 2, 3, 5]}, r"kda_layers has \[0\]"),
        ({"kda_layers": [1, 2, 3, 5, 5]}, r"kda_layers is \[1, 2, 3, 5, 5\]: expected every layer number once"),
        ({"kda_layers": None}, r"kda_layers is None: expected a list of 1-based layer numbers"),
        ({"kda_layers": [1, 2, 3, "5"]}, r"kda_layers is \[1, 2, 3, '5'\]"),
        ({"num_heads": 0}, r"linear_attn_config\.num_heads is 0"),
        ({"head_dim": None}, r"linear_attn_config\.head_dim is None"),
        ({"short_conv_kernel_size": 0}, r"linear_attn_config\.short_conv_kernel_size is 0"),
        ({"gate_lower_bound": 0.0}, r"gate_lower_bound is 0\.0: expected a negative number"),
        ({"gate_lower_bound": 5}, r"gate_lower_bound is 5: expected a negative number"),
        ({"gate_lower_bound": "-5"}, r"gate_lower_bound is '-5': expected a negative number"),
        ({"use_full_rank_gate": "yes"}, r"use_full_rank_gate is 'yes'"),
        ({"expand_v": 2}, r"linear_attn_config\.expand_v is 2: not implemented"),
    ],
)
def test_contradictions_in_linear_attn_config_are_refused(linear, message):
    base = PRESETS["tiny-1m"]["linear_attn_config"]
    with pytest.raises(ValueError, match=message):
        KimiK3Config.from_preset("tiny-1m", linear_attn_config=base | linear)


def test_an_unknown_key_in_linear_attn_config_is_kept_while_switched_off(released):
    released["text_config"]["linear_attn_config"]["expand_v"] = None
    assert KimiK3Config(**released).to_release_dict() == released


@pytest.mark.parametrize("value", [None, [], "kda"])
def test_linear_attn_config_must_be_a_dict(released, value):
    released["text_config"]["linear_attn_config"] = value
    with pytest.raises(ValueError, match="linear_attn_config is"):
        KimiK3Config(**released)


UNIMPLEMENTED = {
    "rope_scaling": {"type": "yarn", "factor": 4.0},
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0},
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "qk_norm": True,
    "logit_scale": 0.5,
    "num_mtp_layers": 1,
    "is_encoder_decoder": True,
    "per_layer_config": {0: {"hidden_size": 8}},
    "dsa_config": {"layers": [4]},
    "index_topk": 2048,
}


@pytest.mark.parametrize("key", UNIMPLEMENTED)
def test_keys_of_unimplemented_mechanisms_are_refused_everywhere(released, key):
    value = UNIMPLEMENTED[key]
    with pytest.raises(ValueError, match=f"{key} is "):
        KimiK3Config.from_preset("tiny-1m", **{key: value})
    with pytest.raises(ValueError, match=f"{key} is "):
        KimiK3Config(**{**released, key: value})
    with pytest.raises(ValueError, match=f"{key} is "):
        KimiK3Config(**flat(released), **{key: value})
    released["text_config"][key] = value
    with pytest.raises(ValueError, match=f"text_config.{key} is "):
        KimiK3Config(**released)


@pytest.mark.parametrize("key", [key for key in UNIMPLEMENTED if key != "per_layer_config"])
def test_the_same_keys_are_kept_while_switched_off(released, key):
    for off in (1,) if key == "logit_scale" else (None, False, 0, []):
        # An empty K3.1 key still says that the file is one of K3.1.
        if off is None or not key.startswith(("dsa_", "index_")):
            released["text_config"][key] = off
            assert KimiK3Config(**released).to_release_dict() == released


@pytest.mark.parametrize("value", [None, {}, {"rope_type": "default", "rope_theta": 1e4}, {"rope_theta": 1e4}])
def test_what_transformers_writes_for_a_plain_rotary_embedding_is_kept(released, value):
    released["text_config"]["rope_parameters"] = value
    assert KimiK3Config(**released).to_release_dict() == released


def test_k31_is_refused_by_name(released, tmp_path):
    released["text_config"]["dsa_config"] = {"layers": [3]}
    with pytest.raises(ValueError, match=r"dsa_config .*K3\.1.*not implemented"):
        KimiK3Config(**released)
    del released["text_config"]["dsa_config"]
    released["architectures"] = ["KimiK31ForConditionalGeneration"]
    with pytest.raises(ValueError, match=r"architectures is .*K3\.1"):
        KimiK3Config(**released)
    text = flat(released) | {"hidden_act": "silu", "dsa_config": {"layers": [3]}}
    (tmp_path / "config.json").write_text(json.dumps(text))
    with pytest.raises(ValueError, match=r"K3\.1"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps", "first_k_dense_replace"]
)
def test_a_released_file_without_a_needed_key_is_refused(released, key):
    del released["text_config"][key]
    with pytest.raises(ValueError, match=f"{key} missing from"):
        KimiK3Config(**released)


def test_a_foreign_text_config_is_refused(released):
    released["text_config"]["model_type"] = "deepseek_v3"
    with pytest.raises(ValueError, match=r"text_config\.model_type is 'deepseek_v3'"):
        KimiK3Config(**released)
    with pytest.raises(ValueError, match="text_config is 3"):
        KimiK3Config(text_config=3)


def test_layer_types_outside_the_family_are_refused():
    with pytest.raises(ValueError, match=r"layer_types has \['sliding_attention'\]"):
        KimiK3Config(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    for value in (None, "full_attention"):
        with pytest.raises(ValueError, match=rf"layer_types is {value!r}: expected a list"):
            KimiK3Config(num_hidden_layers=2, layer_types=value)
