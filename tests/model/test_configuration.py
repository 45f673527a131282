"""KimiK3Config: reading the three released forms, round trips of our own, defaults and presets."""

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, KimiLinearConfig
from transformers.models.auto import configuration_auto

from modeling_kimi3 import KimiK3Config
from modeling_kimi3.configuration_kimi3 import PRESETS, register_configs

GOLDEN = ["k3-tiny-text", "k3-tiny-dense", "k3-tiny-vision", "k3-moe-bf16", "kimi-linear-tiny"]
LAYOUTS = {"k3-tiny-dense": "flat", "kimi-linear-tiny": "kimi_linear"}


@pytest.fixture
def raw(golden):
    return lambda name: json.loads((golden(name) / "config.json").read_text())


def flat(released):
    return {**released["text_config"]}


# The released forms


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_is_written_back_equal(golden, raw, name, tmp_path):
    config = KimiK3Config.from_pretrained(golden(name))
    assert config.release_layout == LAYOUTS.get(name, "composite")
    assert config.to_release_dict() == raw(name)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is KimiK3Config and again == config
    assert again.to_release_dict() == raw(name)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values_are_hoisted(golden, raw, name):
    config = KimiK3Config.from_pretrained(golden(name))
    source = raw(name).get("text_config", raw(name))
    for key, value in source.items():
        if key in ("model_type", "architectures", "auto_map", "transformers_version", "_name_or_path"):
            continue
        if key in ("rope_scaling", "quantization_config"):
            continue
        found = getattr(config, key)
        assert (str(found).removeprefix("torch.") if key == "dtype" else found) == value, key
    assert config.model_type == "kimi_k3"


@pytest.mark.parametrize("name", GOLDEN)
def test_reading_leaves_the_dict_alone_and_every_entry_point_agrees(golden, raw, name):
    source = raw(name)
    before = copy.deepcopy(source)
    config = KimiK3Config.from_dict(source)
    assert source == before
    assert config == KimiK3Config(**source)
    assert config == KimiK3Config.from_json_file(golden(name) / "config.json")
    source.get("text_config", source)["linear_attn_config"]["kda_layers"].append(99)
    assert config == KimiK3Config.from_pretrained(golden(name))


@pytest.mark.parametrize("name", GOLDEN)
def test_auto_config(golden, name):
    config = AutoConfig.from_pretrained(golden(name))
    assert type(config) is (KimiLinearConfig if name == "kimi-linear-tiny" else KimiK3Config)


def test_no_prompt_and_no_remote_code_for_auto_map(golden, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked about remote code"))
    for trust in (None, True, False):
        config = AutoConfig.from_pretrained(golden("k3-tiny-text"), trust_remote_code=trust)
        assert type(config) is KimiK3Config


def test_missing_keys_of_a_released_file_mean_absent(released):
    for source in (released, flat(released)):
        config = KimiK3Config(**source)
        assert config.gate_lower_bound is None
        assert not config.use_full_rank_gate
        assert config.attn_res_block_size is None
        assert config.q_lora_rank is None
        assert config.mla_use_output_gate is False
        assert config.routed_expert_hidden_size is None
        assert config.latent_moe_use_norm is False
        assert config.activation_situ_linear_beta is None
        assert config.num_shared_experts == 0
        assert config.num_key_value_heads == 2
        assert config.bos_token_id is None
        assert config.moe_renormalize is True
        assert config.use_grouped_topk is True
        assert config.use_cache is True
        assert config.tie_word_embeddings is False
        assert config.max_position_embeddings == 1048576


def test_kimi_linear_keeps_what_nothing_is_computed_from(golden):
    config = KimiK3Config.from_pretrained(golden("kimi-linear-tiny"))
    assert config.max_position_embeddings == config.model_max_length == 1048576
    assert config.head_dim == 24
    assert config.rope_theta == 10000.0
    assert config.hidden_act == "silu"


def test_a_kimi_linear_file_without_k3_keys_is_read_without_warning(golden, caplog):
    KimiK3Config.from_pretrained(golden("kimi-linear-tiny"))
    assert not caplog.records


def test_an_unknown_key_is_kept_and_named_once(released, caplog):
    released["text_config"]["brand_new_key_17"] = [1, 2]
    config = KimiK3Config(**released)
    assert config.brand_new_key_17 == [1, 2]
    assert config.to_release_dict() == released
    assert any("brand_new_key_17" in record.message for record in caplog.records)


def test_outer_ids_are_the_truth(released):
    released["eos_token_id"] = [2, 7]
    config = KimiK3Config(**released)
    assert config.eos_token_id == [2, 7]
    assert config.to_release_dict() == released


def test_aliases_of_other_readers(released):
    text = released["text_config"]
    for name, alias in (("num_experts", "n_routed_experts"), ("num_experts_per_token", "num_experts_per_tok")):
        text[alias] = text.pop(name)
    config = KimiK3Config(**released)
    assert (config.num_experts, config.num_experts_per_token, config.num_local_experts) == (4, 2, 4)
    assert config.to_release_dict() == released
    config.num_experts_per_token = 3
    assert config.to_release_dict()["text_config"]["num_experts_per_tok"] == 3
    text["num_experts"] = 5
    with pytest.raises(ValueError, match=r"n_routed_experts is 4, but num_experts is 5"):
        KimiK3Config(**released)


def test_native_spelling_of_kimi_linear(tmp_path):
    native = KimiLinearConfig(
        num_hidden_layers=6,
        layer_types=["linear_attention", "full_attention", "linear_attention"] * 2,
        mlp_layer_types=["dense", "dense", "sparse", "sparse", "sparse", "sparse"],
        linear_num_heads=3,
        linear_head_dim=16,
    )
    native.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is KimiLinearConfig
    config = KimiK3Config.from_pretrained(tmp_path)
    assert config.layer_types == native.layer_types
    assert (config.kda_num_heads, config.kda_head_dim, config.conv_kernel_size) == (3, 16, 4)
    assert config.first_k_dense_replace == 2
    assert config.qk_head_dim == native.qk_head_dim
    assert config.routed_scaling_factor == native.routed_scaling_factor
    written = config.to_release_dict()
    assert "layer_types" not in written and written["linear_attn_config"]["full_attn_layers"] == [2, 5]
    assert KimiK3Config(**written).layer_types == native.layer_types


def test_native_keys_that_disagree_with_the_lists(released):
    text = flat(released)
    with pytest.raises(ValueError, match=r"linear_attn_config\.kda_layers is \[1, 2\], but layer_types"):
        KimiK3Config(**text, layer_types=["linear_attention", "full_attention", "full_attention"])
    for kinds in (["dense", "sparse", "dense"], ["dense", "dense", "sparse"], ["sparse"] * 3):
        with pytest.raises(ValueError, match=r"mlp_layer_types is .*: expected first_k_dense_replace \(1\)"):
            KimiK3Config(**text, mlp_layer_types=kinds)
    with pytest.raises(ValueError, match="linear_attn_config is 'kda'"):
        KimiK3Config(**{**text, "linear_attn_config": "kda"}, layer_types=["full_attention"] * 3)


def test_native_keys_that_agree_with_the_lists(released):
    text = flat(released)
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    config = KimiK3Config(**text, layer_types=kinds, mlp_layer_types=["dense", "sparse", "sparse"])
    assert (config.layer_types, config.kda_num_heads, config.first_k_dense_replace) == (kinds, 3, 1)
    del text["first_k_dense_replace"]
    assert KimiK3Config(**text, mlp_layer_types=["dense"] * 3).first_k_dense_replace == 3


def test_what_is_about_the_file_is_not_taken_for_the_model(released):
    released["text_config"] |= {"_name_or_path": "elsewhere", "transformers_version": "4.56.2"}
    config = KimiK3Config(**released)
    assert config.name_or_path == ""
    assert config.to_release_dict() == released


def test_the_older_name_of_the_context_length_may_differ(released):
    released["text_config"] |= {"max_position_embeddings": 4096, "model_max_length": 1048576}
    assert KimiK3Config(**released).max_position_embeddings == 4096


@pytest.mark.parametrize(
    "key, value",
    [
        ("attn_res_block_size", 2),
        ("mla_use_output_gate", True),
        ("hidden_act", "situ"),
        ("routed_expert_hidden_size", 16),
        ("moe_router_activation_func", "softmax"),
        ("num_experts", None),
        ("moe_layer_freq", 2),
        ("gate_lower_bound", -5.0),
        ("use_full_rank_gate", True),
    ],
)
def test_each_k3_key_in_a_kimi_linear_directory_builds_ours(released, tmp_path, key, value):
    text = flat(released)
    text["hidden_act"] = "silu"
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert type(AutoConfig.from_pretrained(tmp_path)) is KimiLinearConfig
    (text["linear_attn_config"] if key in ("gate_lower_bound", "use_full_rank_gate") else text)[key] = value
    (tmp_path / "config.json").write_text(json.dumps(text))
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is KimiK3Config
    assert getattr(config, key) == value
    assert type(AutoConfig.for_model(**text)) is KimiK3Config


def test_a_kimi_linear_config_from_auto_config_builds_the_native_model(golden):
    config = AutoConfig.from_pretrained(golden("kimi-linear-tiny"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model).__module__.startswith("transformers.")
    assert type(AutoConfig.for_model("kimi_linear")) is KimiLinearConfig


# Round trips of our own form


def test_saved_file_names_every_field_none_included(tmp_path):
    config = KimiK3Config.from_preset("tiny-1m", q_lora_rank=None, attn_res_block_size=None, num_experts=None)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "kimi_k3"
    assert saved["q_lora_rank"] is None and saved["attn_res_block_size"] is None and saved["num_experts"] is None
    fields = set(KimiK3Config.__annotations__) - {"keys_to_ignore_at_inference", "tokenizer_class"}
    assert fields <= set(saved)
    assert KimiK3Config.from_pretrained(tmp_path) == config == AutoConfig.from_pretrained(tmp_path)


def test_equality_notices_a_difference():
    assert KimiK3Config() == KimiK3Config()
    assert KimiK3Config() != KimiK3Config(rms_norm_eps=1e-6)
    assert KimiK3Config() != KimiLinearConfig()


def test_copies_share_nothing(released):
    config = KimiK3Config(**released)
    other = copy.deepcopy(config)
    other.linear_attn_config["num_heads"] = 1
    other.release_config["vision_config"]["depth"] = 0
    assert config.kda_num_heads == 3
    assert config.to_release_dict() == released
    given = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 1, "head_dim": 8, "short_conv_kernel_size": 2}
    config = KimiK3Config.from_preset("tiny-1m", num_hidden_layers=2, linear_attn_config=given)
    given["kda_layers"].append(7)
    assert config.kda_layers == [1]
    preset = copy.deepcopy(PRESETS)
    KimiK3Config.from_preset("tiny-1m").linear_attn_config["kda_layers"].append(7)
    assert preset == PRESETS


def test_keyword_overrides_are_set_together_and_validated(golden):
    path = golden("k3-tiny-text")
    config, unused = KimiK3Config.from_pretrained(
        path, num_experts_per_tok=2, gate_lower_bound=-3.0, dtype="float32", not_ours=1, return_unused_kwargs=True
    )
    assert (config.num_experts_per_token, config.gate_lower_bound, config.dtype) == (2, -3.0, torch.float32)
    assert unused == {"not_ours": 1}
    config = AutoConfig.from_pretrained(path, layer_types=["full_attention"] * 8)
    assert config.full_attn_layers == list(range(1, 9)) and config.kda_layers == []
    with pytest.raises(ValueError, match=r"num_hidden_layers \(5\)"):
        AutoConfig.from_pretrained(path, num_hidden_layers=5)
    with pytest.raises(ValueError, match=r"quantization_config\.quant_method is 'fp8'"):
        KimiK3Config.from_pretrained(path, quantization_config={"quant_method": "fp8"})
    assert KimiK3Config.from_pretrained(path, dtype="auto").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="num_experts_per_token is 99"):
        KimiK3Config.from_pretrained(path, num_experts_per_token=99)


def test_validate_sees_what_was_set_later(tmp_path):
    config = KimiK3Config.from_preset("tiny-1m")
    config.num_experts_per_token = 9
    with pytest.raises(ValueError, match="num_experts_per_token is 9"):
        config.validate()
    with pytest.raises(ValueError, match="num_experts_per_token is 9"):
        config.save_pretrained(tmp_path)
    config = KimiK3Config.from_preset("tiny-1m")
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match=r"quantization_config\.quant_method is 'fp8'"):
        config.validate()
    config = KimiK3Config.from_preset("tiny-1m")
    config.sliding_window = 128
    with pytest.raises(ValueError, match="sliding_window is 128"):
        config.validate()


# Defaults, derived values and presets


def test_defaults_are_the_released_k3():
    config = KimiK3Config()
    assert config.num_hidden_layers == 93
    assert config.full_attn_layers == [*range(4, 93, 4), 93]
    assert (len(config.kda_layers), len(config.full_attn_layers)) == (69, 24)
    assert (config.kda_num_heads, config.kda_head_dim, config.conv_kernel_size) == (96, 128, 4)
    assert (config.gate_lower_bound, config.use_full_rank_gate) == (-5.0, True)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (7168, 33792, 163840)
    assert (config.num_experts, config.num_experts_per_token, config.num_shared_experts) == (896, 16, 2)
    assert (config.moe_intermediate_size, config.expert_hidden_size, config.latent_moe_use_norm) == (3072, 3584, True)
    assert (config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank) == (96, 1536, 512)
    assert (config.qk_head_dim, config.v_head_dim, config.mla_use_output_gate) == (192, 128, True)
    assert (config.attn_res_block_size, config.hidden_act) == (12, "situ")
    assert (config.activation_situ_beta, config.activation_situ_linear_beta) == (4.0, 25.0)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (163584, 163586, 163839)
    assert config.max_position_embeddings == 1048576
    assert (config.use_cache, config.tie_word_embeddings, config.moe_renormalize) == (True, False, True)
    assert [config.is_moe_layer(i) for i in range(93)] == [False] + [True] * 92
    assert not any(KimiK3Config(num_experts=None).is_moe_layer(i) for i in range(93))


def test_layer_kinds_come_from_the_lists():
    linear = KimiK3Config().linear_attn_config | {"kda_layers": [2, 5], "full_attn_layers": [4, 1, 3]}
    config = KimiK3Config(num_hidden_layers=5, linear_attn_config=linear, first_k_dense_replace=2, moe_layer_freq=3)
    assert [config.is_kda_layer(i) for i in range(5)] == [False, True, False, False, True]
    assert config.layer_types[:2] == ["full_attention", "linear_attention"]
    assert [config.is_moe_layer(i) for i in range(5)] == [False, False, False, True, False]
    config.layer_types = ["full_attention", "linear_attention", "linear_attention", "full_attention", "full_attention"]
    assert (config.kda_layers, config.full_attn_layers) == ([2, 3], [1, 4, 5])
    assert config.linear_attn_config["num_heads"] == 96


@pytest.mark.parametrize("kind", ["kda_layers", "full_attn_layers"])
def test_one_list_may_be_empty(kind):
    other = "full_attn_layers" if kind == "kda_layers" else "kda_layers"
    linear = KimiK3Config().linear_attn_config | {kind: [1, 2], other: []}
    sizes = (
        dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")) if other[0] == "f" else {}
    )
    config = KimiK3Config(num_hidden_layers=2, linear_attn_config=linear, **sizes)
    assert len(set(config.layer_types)) == 1
    assert config.qk_head_dim == (0 if sizes else 192)
    assert KimiK3Config(**config.to_dict()) == config


def test_ids_beyond_a_small_vocabulary_are_not_made_up():
    config = KimiK3Config(vocab_size=100)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)
    config = KimiK3Config(vocab_size=163839)
    assert (config.bos_token_id, config.pad_token_id) == (163584, None)
    config = KimiK3Config(num_experts=None)
    assert (config.num_experts_per_token, config.num_shared_experts, config.latent_moe_use_norm) == (None, 0, False)


@pytest.mark.parametrize("name, millions", [("tiny-1m", 1), ("small-20m", 20), ("base-150m", 150)])
def test_presets_have_the_size_in_their_name(name, millions):
    config = KimiK3Config.from_preset(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(millions * 1e6, rel=0.1)
    assert config.kda_layers and config.full_attn_layers
    assert config.num_hidden_layers % config.attn_res_block_size
    assert config.q_lora_rank and config.mla_use_output_gate and config.gate_lower_bound
    assert config.latent_moe_use_norm and config.num_shared_experts and not config.is_moe_layer(0)
    assert config.vocab_size == 256
    assert config.expert_hidden_size % 32 == config.moe_intermediate_size % 32 == 0


def test_presets_by_name():
    assert set(PRESETS) == {"tiny-1m", "small-20m", "base-150m"}
    assert KimiK3Config.from_preset("tiny-1m", num_experts=16).num_experts == 16
    with pytest.raises(ValueError, match="preset is 'huge': expected one of tiny-1m"):
        KimiK3Config.from_preset("huge")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_partition_of_the_layers_survives_saving(data):
    depth = data.draw(st.integers(1, 12))
    kinds = data.draw(st.lists(st.sampled_from(["linear_attention", "full_attention"]), min_size=depth, max_size=depth))
    config = KimiK3Config(num_hidden_layers=depth, layer_types=kinds, first_k_dense_replace=0)
    again = KimiK3Config.from_dict(json.loads(config.to_json_string()))
    assert again == config and again.layer_types == kinds
    assert KimiK3Config(**json.loads(json.dumps(config.to_release_dict()))).layer_types == kinds


def test_one_notice_when_transformers_has_its_own(monkeypatch, caplog):
    register_configs()
    assert not caplog.records
    monkeypatch.setitem(configuration_auto.CONFIG_MAPPING_NAMES, "kimi_k3", "KimiK3Config")
    register_configs()
    register_configs()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert configuration_auto.CONFIG_MAPPING["kimi_k3"] is KimiK3Config
