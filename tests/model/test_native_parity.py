"""Against transformers' own KimiLinearForCausalLM: the same random weights in both, by way of saved directories."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear as native
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

from modeling_kimi3 import KimiK3ForCausalLM

CONFIG = {
    "vocab_size": 80,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_attn_config": {
        "num_heads": 2,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3],
    },
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.446,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class WideTorch:
    """torch with float64 where the native code says float32, so that both models can be compared in float64."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def in_float64(monkeypatch):
    """Makes the native model's casts to float32, and the loss's, casts to float64, once a model is built."""

    def start():
        monkeypatch.setattr(native, "torch", WideTorch())
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)

    return start


@pytest.fixture
def pair(tmp_path, randomize):
    """The native model in training mode with random weights, and ours with the same ones, loaded from its directory."""

    def make(dtype=torch.float32, attn_implementation="sdpa", **overrides):
        config = KimiLinearConfig(**{**CONFIG, **overrides})
        config._attn_implementation = attn_implementation
        # Its default knows no float64.
        config._experts_implementation = "eager"
        theirs = native.KimiLinearForCausalLM(config)
        randomize(theirs, 0)
        theirs.save_pretrained(tmp_path / "native")
        ours = KimiK3ForCausalLM.from_pretrained(tmp_path / "native", attn_implementation=attn_implementation)
        assert ours.config.release_layout == "kimi_linear"
        return theirs.to(dtype), ours.to(dtype).train()

    return make


def named_like_ours(tensors: dict[str, torch.Tensor], config: KimiLinearConfig) -> dict[str, torch.Tensor]:
    """Tensors of the native model's parameters under our names and in our shapes."""
    result = {}
    for name, tensor in tensors.items():
        name = name.replace("forget_gate.", "")
        if ".mlp." in name and config.mlp_layer_types[int(name.split(".")[2])] == "sparse":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith("A_log"):
            tensor = tensor.flatten()
        if name.endswith(".conv1d.weight"):
            for kind, part in zip("qkv", tensor.chunk(3)):
                result[name.replace(".conv1d", f".{kind}_conv1d")] = part
        else:
            result[name] = tensor
    return result


def compare(theirs, ours, relative_error, tolerance):
    generator = torch.Generator().manual_seed(1)
    # Longer than a chunk of the native code (64) and of ours.
    ids = torch.randint(3, 80, (2, 70), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.1, -100)
    expected, actual = theirs(ids, labels=labels), ours(ids, labels=labels)
    assert relative_error(actual.logits, expected.logits) < tolerance
    assert relative_error(actual.loss, expected.loss) < tolerance
    expected.loss.backward()
    actual.loss.backward()
    gradients = named_like_ours({name: p.grad for name, p in theirs.named_parameters()}, theirs.config)
    trained = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    assert trained.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.norm() > 0, name
        assert relative_error(trained[name], gradient) < tolerance, name


GROUPS = {"num_expert_group": 4, "topk_group": 2}


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("overrides", [{}, GROUPS], ids=["plain", "groups"])
def test_float64(pair, in_float64, relative_error, attn_implementation, overrides):
    theirs, ours = pair(torch.float64, attn_implementation, **overrides)
    in_float64()
    compare(theirs, ours, relative_error, 1e-8)


@pytest.mark.parametrize("overrides", [{}, GROUPS], ids=["plain", "groups"])
def test_float32(pair, relative_error, overrides):
    compare(*pair(**overrides), relative_error, 1e-4)


def test_directories_are_read_both_ways(pair, tmp_path):
    theirs, ours = pair()
    weights = named_like_ours(dict(theirs.state_dict()), theirs.config)
    assert weights.keys() == ours.state_dict().keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, weights[name]), name

    ours.save_pretrained(tmp_path / "ours", save_original_format=True)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("native", "ours")]
    # transformers saves its dense layers under the experts' name; the released files have them as `mlp`.
    dense = "model.layers.0.block_sparse_moe."
    files[0] = {name.replace(dense, "model.layers.0.mlp."): value for name, value in files[0].items()}
    assert files[0].keys() == files[1].keys()
    for name, value in files[0].items():
        assert value.dtype == files[1][name].dtype and torch.equal(value, files[1][name]), name

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is native.KimiLinearForCausalLM
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_greedy_continuation(pair):
    theirs, ours = (model.eval() for model in pair())
    ids = torch.arange(2 * 9).view(2, 9) % 77 + 3
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    assert ours.generate(ids, **settings).tolist() == theirs.generate(ids, **settings).tolist()
