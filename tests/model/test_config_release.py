"""KimiK3Config.to_release_dict: the file it was read from with what has changed since, or a composite one."""

import copy
import json

import pytest
import torch

from modeling_kimi3 import KimiK3Config
from modeling_kimi3.config_quantization import RELEASED_QUANTIZATION


def test_changes_reach_the_released_file_and_nothing_else_does(released):
    config = KimiK3Config(**released)
    config.num_experts_per_token = 3
    config.eos_token_id = 9
    config.gate_lower_bound = -4.0
    config.dtype = torch.float32
    written = config.to_release_dict()
    expected = copy.deepcopy(released)
    expected["eos_token_id"] = expected["text_config"]["eos_token_id"] = 9
    expected["dtype"] = expected["text_config"]["dtype"] = "float32"
    expected["text_config"]["num_experts_per_token"] = 3
    expected["text_config"]["linear_attn_config"]["gate_lower_bound"] = -4.0
    assert written == expected
    again = KimiK3Config(**written)
    assert again.to_dict() | {"release_config": None} == config.to_dict() | {"release_config": None}


@pytest.mark.parametrize("overrides", [{}, {"num_experts": None}, {"q_lora_rank": None, "attn_res_block_size": None}])
def test_a_config_from_no_file_is_written_as_a_composite_one(overrides):
    config = KimiK3Config.from_preset("tiny-1m", **overrides)
    written = json.loads(json.dumps(config.to_release_dict()))
    assert written["architectures"] == ["KimiK3ForConditionalGeneration"]
    assert written["text_config"]["model_type"] == "kimi_linear"
    again = KimiK3Config(**written)
    ignored = {"release_config": None, "max_position_embeddings": None}
    if config.num_experts is None:
        ignored |= dict.fromkeys(("num_experts_per_token", "moe_intermediate_size", "routed_expert_hidden_size"))
        ignored |= dict.fromkeys(("num_shared_experts", "latent_moe_use_norm", "topk_method", "first_k_dense_replace"))
    assert again.to_dict() | ignored == config.to_dict() | ignored


def test_release_layout_follows_the_mechanisms(released):
    text = released["text_config"] | {"hidden_act": "silu"}
    config = KimiK3Config(**text)
    assert config.release_layout == "kimi_linear"
    config.attn_res_block_size = 2
    assert config.release_layout == "flat"
    assert KimiK3Config(**released).release_layout == "composite"
    assert KimiK3Config().release_layout == "composite"


def test_a_composed_file_has_the_keys_of_a_released_one(golden):
    released = json.loads((golden("k3-tiny-text") / "config.json").read_text())
    config = KimiK3Config.from_preset("tiny-1m", dtype="bfloat16", quantization_config={"quant_method": "kimi_mxfp4"})
    written = config.to_release_dict()
    about_the_file = {"_name_or_path", "auto_map", "transformers_version"}
    assert set(written["text_config"]) == set(released["text_config"]) - about_the_file
    assert set(written["text_config"]["linear_attn_config"]) == set(released["text_config"]["linear_attn_config"])
    of_the_vision_model = {"auto_map", "ignore_index", "media_placeholder_token_id", "vision_config"}
    assert set(written) == set(released) - of_the_vision_model
    assert written["dtype"] == written["text_config"]["dtype"] == "bfloat16"
    config.attention_dropout = 0.25
    assert config.to_release_dict()["text_config"]["attention_dropout"] == 0.25


def test_a_composed_dense_file_says_so_and_has_no_other_expert_keys():
    text = KimiK3Config.from_preset("tiny-1m", num_experts=None, q_lora_rank=None).to_release_dict()["text_config"]
    assert text["num_experts"] is None and text["q_lora_rank"] is None
    assert not [key for key in text if "moe" in key or ("expert" in key and key != "num_experts") or "topk" in key]
    assert "first_k_dense_replace" not in text


def test_quantisation_that_came_later_is_written(released):
    config = KimiK3Config(**released)
    config.quantization_config = {"quant_method": "kimi_mxfp4"}
    expected = copy.deepcopy(released)
    expected["text_config"]["quantization_config"] = RELEASED_QUANTIZATION
    assert config.to_release_dict() == expected


def test_quantisation_outside_the_text_config_stays_there(released):
    outside = {**released, "quantization_config": RELEASED_QUANTIZATION}
    config = KimiK3Config(**outside)
    assert config.quantization_config == {"quant_method": "kimi_mxfp4"}
    assert config.to_release_dict() == outside
    del config.quantization_config
    assert config.to_release_dict() == released


def test_a_changed_dtype_keeps_the_spelling_of_the_file(released):
    released["text_config"]["torch_dtype"] = released["text_config"].pop("dtype")
    del released["dtype"]
    config = KimiK3Config(**released)
    assert config.dtype == torch.bfloat16
    config.dtype = torch.float16
    written = config.to_release_dict()
    assert written["text_config"]["torch_dtype"] == written["dtype"] == "float16"
    assert "dtype" not in written["text_config"]
