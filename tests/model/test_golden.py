"""Logits, hidden states, routing, states and greedy continuations against the golden checkpoints.

The expected values were made with other people's implementations (see each set's README); tolerances are theirs.
"""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from modeling_kimi3 import KimiK3Cache, KimiK3ForCausalLM

TRACED = ["k3-tiny-text", "k3-tiny-dense", "k3-tiny-vision", "kimi-linear-tiny"]
ALL = [*TRACED, "k3-moe-bf16"]


@pytest.fixture(scope="module")
def loaded(golden):
    """Model in float32 and expected values by name, each loaded once."""
    cache = {}

    def load(name):
        if name not in cache:
            path = golden(name)
            # A plain Kimi-Linear directory stays native under AutoModel; our class takes it when asked.
            loader = KimiK3ForCausalLM if name == "kimi-linear-tiny" else AutoModelForCausalLM
            model = loader.from_pretrained(path, dtype=torch.float32)
            assert type(model) is KimiK3ForCausalLM
            cache[name] = model, load_file(path / "expected.safetensors")
        return cache[name]

    return load


@pytest.mark.parametrize("prompt", ["a", "b"])
@pytest.mark.parametrize("name", ALL)
def test_logits(loaded, relative_error, name, prompt):
    model, expected = loaded(name)
    with torch.no_grad():
        logits = model(expected[f"{prompt}.ids"][None]).logits[0]
    assert relative_error(logits, expected[f"{prompt}.logits"]) < 1e-4
    if name != "k3-moe-bf16":
        assert (logits - expected[f"{prompt}.logits"]).abs().max() < 3e-3


@pytest.mark.parametrize("name", ALL)
def test_greedy_continuation(loaded, name):
    model, expected = loaded(name)
    generated = model.generate(expected["a.ids"][None], max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert generated[0, expected["a.ids"].numel() :].tolist() == expected["a.greedy"].tolist()


@pytest.mark.parametrize("name", TRACED)
def test_hidden_states(loaded, relative_error, name):
    model, expected = loaded(name)
    with torch.no_grad():
        hidden = model(expected["a.ids"][None], output_hidden_states=True).hidden_states
    assert len(hidden) == model.config.num_hidden_layers + 1
    # The last one is after the final norm, as everywhere in transformers.
    for layer, state in enumerate(hidden[:-1]):
        assert relative_error(state[0], expected["a.hidden_states"][layer]) < 1e-4, f"layer {layer}"
    assert relative_error(hidden[-1][0], expected["a.final_norm_out"]) < 1e-4


def test_hidden_states_and_choices_of_bf16_experts(loaded, relative_error):
    model, expected = loaded("k3-moe-bf16")
    choices = record_choices(model, expected["a.ids"])
    with torch.no_grad():
        hidden = model(expected["a.ids"][None], output_hidden_states=True).hidden_states
    for layer in range(model.config.num_hidden_layers - 1):
        trace = expected[f"a.trace.model.layers.{layer}.out"]
        assert relative_error(hidden[layer + 1][0], trace) < 1e-4, f"layer {layer}"
    assert relative_error(hidden[-1][0], expected["a.trace.final"]) < 1e-4
    for layer, (_, choice) in choices.items():
        reference = expected[f"a.trace.model.layers.{layer}.block_sparse_moe.choice"]
        assert choice.sort(dim=-1).values.tolist() == reference.tolist()


def record_choices(model, ids):
    """Per MoE layer the mixture weights and expert ids of each token."""
    found = {}
    hooks = [
        layer.block_sparse_moe.gate.register_forward_hook(
            lambda module, args, output, index=index: found.__setitem__(index, output[1:])
        )
        for index, layer in enumerate(model.model.layers)
        if layer.is_moe
    ]
    with torch.no_grad():
        model(ids[None])
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", ["k3-tiny-text", "k3-tiny-vision", "kimi-linear-tiny"])
def test_router(loaded, relative_error, name):
    model, expected = loaded(name)
    choices = record_choices(model, expected["a.ids"])
    recorded = {int(key.split(".")[2]) for key in expected if key.startswith("a.router.")}
    assert recorded == set(choices)
    for layer, (weights, choice) in choices.items():
        order = choice.argsort(dim=-1)
        assert choice.gather(-1, order).tolist() == expected[f"a.router.{layer}.experts"].tolist()
        assert relative_error(weights.gather(-1, order), expected[f"a.router.{layer}.weights"]) < 1e-4


@pytest.mark.parametrize("name", TRACED)
def test_kda_state(loaded, relative_error, name):
    model, expected = loaded(name)
    cache = KimiK3Cache(model.config)
    with torch.no_grad():
        model(expected["a.ids"][None], cache=cache)
    layers = sorted({int(key.split(".")[2]) for key in expected if key.startswith("a.kda.")})
    assert layers
    for layer in layers:
        assert relative_error(cache.get_recurrent_state(layer)[0], expected[f"a.kda.{layer}.state"]) < 1e-4
        # [3, channels, 4] of q, k, v; the oldest of the four inputs is not needed by the next step.
        inputs = expected[f"a.kda.{layer}.conv_inputs"][..., 1:].flatten(0, 1)
        assert relative_error(cache.get_conv_state(layer)[0], inputs) < 1e-4


def test_kda_states_of_bf16_experts(loaded, relative_error):
    model, expected = loaded("k3-moe-bf16")
    cache = KimiK3Cache(model.config)
    with torch.no_grad():
        model(expected["a.ids"][None], cache=cache)
    for index, kind in enumerate(model.config.layer_types):
        if kind == "linear_attention":
            prefix = f"a.trace.model.layers.{index}.self_attn"
            assert relative_error(cache.get_recurrent_state(index)[0], expected[f"{prefix}.state"]) < 1e-4
            tail = expected[f"{prefix}.conv"].transpose(1, 2).flatten(0, 1)
            assert relative_error(cache.get_conv_state(index)[0], tail) < 1e-4


@pytest.mark.parametrize("name", ["k3-tiny-text", "k3-tiny-dense", "k3-tiny-vision"])
def test_attention_residual_weights(loaded, relative_error, name):
    model, expected = loaded(name)
    with torch.no_grad():
        weights = model(expected["a.ids"][None], output_attn_res_weights=True).attn_res_weights
    # Layer 0 has one mix, every later layer two, and the output one.
    assert len(weights) == 2 * model.config.num_hidden_layers
    for layer in range(model.config.num_hidden_layers):
        assert relative_error(weights[2 * layer][0], expected[f"a.attn_res.{layer}.mlp_probs"]) < 1e-4
    assert relative_error(weights[-1][0], expected["a.attn_res.output_probs"]) < 1e-4


def test_multimodal_embeddings(loaded, relative_error):
    model, expected = loaded("k3-tiny-vision")
    with torch.no_grad():
        logits = model(inputs_embeds=expected["mm.inputs_embeds"][None]).logits[0]
    assert relative_error(logits, expected["mm.logits"]) < 1e-4


@pytest.mark.parametrize("name", ALL)
def test_bare_decoder(golden, loaded, relative_error, name):
    _, expected = loaded(name)
    if name == "kimi-linear-tiny":
        pytest.skip("AutoModel leaves a plain Kimi-Linear directory to transformers")
    model = AutoModel.from_pretrained(golden(name), dtype=torch.float32)
    with torch.no_grad():
        final = model(expected["a.ids"][None]).last_hidden_state[0]
    reference = expected["a.trace.final" if name == "k3-moe-bf16" else "a.final_norm_out"]
    assert relative_error(final, reference) < 1e-4


@pytest.mark.parametrize("name", ALL)
def test_bfloat16_is_near(golden, loaded, relative_error, name):
    """A sanity bound only: the official code is 0.04 to 0.24 away itself."""
    _, expected = loaded(name)
    model = KimiK3ForCausalLM.from_pretrained(golden(name), dtype=torch.bfloat16)
    with torch.no_grad():
        logits = model(expected["a.ids"][None]).logits[0]
    assert relative_error(logits, expected["a.logits"]) < 0.5
