"""`kimi3-convert inspect` against the model that transformers builds from the same directory."""

import shutil

import pytest
import torch

from kimi3_conversion import inspect_checkpoint
from kimi3_conversion.cli import main
from modeling_kimi3 import KimiK3ForCausalLM


@pytest.mark.parametrize("name", ["k3-tiny-vision", "k3-tiny-dense", "k3-moe-bf16", "kimi-linear-tiny"])
def test_counts_the_models_parameters(golden, name):
    found = inspect_checkpoint(golden(name))
    model = KimiK3ForCausalLM.from_pretrained(golden(name), dtype=torch.float32)
    ours = model.num_parameters()
    ours += sum(buffer.numel() for buffer in model.buffers())
    # The released files pad A_log to 128 values a layer.
    padding = 0
    if model.config.release_layout == "composite":
        padding = model.config.layer_types.count("linear_attention") * (128 - model.config.kda_num_heads)
    assert sum(found.parameters.values()) - found.parameters["vision"] == ours + padding
    assert not found.unknown


def test_packed_experts_count_as_values(golden):
    config = KimiK3ForCausalLM.from_pretrained(golden("k3-tiny-vision")).config
    found = inspect_checkpoint(golden("k3-tiny-vision"))
    layers = sum(config.is_moe_layer(i) for i in range(config.num_hidden_layers))
    expert = 3 * config.expert_hidden_size * config.moe_intermediate_size
    assert found.parameters["routed experts"] == layers * config.num_experts * expert


def test_own_layout(small_model, tmp_path):
    model = small_model()
    model.save_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert sum(found.parameters.values()) == model.num_parameters() + sum(b.numel() for b in model.buffers())


def test_command(golden, tmp_path, capsys):
    assert main(["inspect", str(golden("k3-tiny-dense"))]) == 0
    assert "parameters" in capsys.readouterr().out
    shutil.copytree(golden("k3-tiny-vision"), tmp_path / "copy")
    (tmp_path / "copy" / "model-00002-of-000002.safetensors").unlink()
    assert main(["inspect", str(tmp_path / "copy")]) == 2
    assert "model-00002-of-000002.safetensors not found" in capsys.readouterr().err
