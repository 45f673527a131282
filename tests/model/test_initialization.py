"""Models built from a config: nothing is left as the memory was, and what is set is what the spec's section 5 says."""

import math

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from modeling_kimi3 import KimiK3Config, KimiK3ForCausalLM
from modeling_kimi3.presets import PRESETS

VARIANTS = {
    "all mechanisms": {},
    "dense, tied": {"num_experts": None, "tie_word_embeddings": True},
    "softplus, low rank": {"linear": {"gate_lower_bound": None, "use_full_rank_gate": False}},
    "plain residuals, no compression": {"attn_res_block_size": None, "q_lora_rank": None, "mla_use_output_gate": False},
    "no latent": {"routed_expert_hidden_size": None, "latent_moe_use_norm": False},
    "KDA only": {"linear": {"kda_layers": [1, 2, 3, 4, 5], "full_attn_layers": []}},
    "MLA only": {"linear": {"kda_layers": [], "full_attn_layers": [1, 2, 3, 4, 5]}},
}


@pytest.fixture
def nan_memory():
    """Every tensor that is made without values holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4).isnan().all() and torch.empty(4, dtype=torch.bfloat16).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def directly(config):
    return KimiK3ForCausalLM(config)


def by_auto_class(config):
    return AutoModelForCausalLM.from_config(config)


def in_bfloat16(config):
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def bare(config):
    return AutoModel.from_config(config)


def from_meta(config):
    with torch.device("meta"):
        model = KimiK3ForCausalLM(config)
    model.to_empty(device="cpu")
    assert all(value.isnan().all() for value in model.state_dict().values())
    model.init_weights()
    return model


def kind(name: str) -> str:
    """Which line of the spec a tensor falls under."""
    last = name.rpartition(".")[2]
    if last in ("A_log", "dt_bias", "e_score_correction_bias"):
        return last
    if name.endswith("norm.weight"):
        return "norm"
    if name.endswith("res_proj.weight"):
        return "residual query"
    return "convolution" if "conv1d" in name else "matrix"


def uniform_distance(values: torch.Tensor) -> float:
    """Kolmogorov's distance of values from the uniform distribution on (0, 1), times the root of their number."""
    values = values.double().flatten().sort().values
    steps = torch.arange(1, values.numel() + 1) / values.numel()
    gap = torch.maximum((steps - values).abs(), (steps - 1 / values.numel() - values).abs())
    return gap.max().item() * values.numel() ** 0.5


# Above this lies one of a million samples of the right distribution.
UNUSUAL = 2.7


def check(model: nn.Module) -> None:
    """Each tensor against the spec; pooled by kind where a distribution is asked for."""
    pools: dict[str, list[torch.Tensor]] = {}
    for name, value in model.state_dict().items():
        value = value.float()
        assert value.isfinite().all(), name
        pools.setdefault(kind(name), []).append(value.flatten())
        if kind(name) == "matrix":
            assert 0.018 < value.std() < 0.022, name
            assert value.mean().abs() < 5 * 0.02 * value.numel() ** -0.5, name
    if "norm" in pools:
        assert (torch.cat(pools["norm"]) == 1).all()
    for zero in ("residual query", "e_score_correction_bias"):
        assert not torch.cat(pools.get(zero, [torch.zeros(1)])).any()
    normal = torch.cat(pools["matrix"])
    normal = normal[:: normal.numel() // 20000 + 1]
    assert uniform_distance(torch.special.ndtr(normal.double() / 0.02)) < UNUSUAL
    if "A_log" in pools:
        rate = torch.cat(pools["A_log"]).double().exp()
        assert uniform_distance((rate - 1) / 15) < UNUSUAL
        step = torch.cat(pools["dt_bias"]).double().exp().log1p()
        assert uniform_distance((step.log() - math.log(1e-3)) / math.log(100)) < UNUSUAL
        taps = torch.cat(pools["convolution"])
        assert uniform_distance(taps + 0.5) < UNUSUAL


@pytest.mark.parametrize("build", [directly, by_auto_class, from_meta], ids=lambda build: build.__name__)
@pytest.mark.parametrize("preset", PRESETS)
def test_presets(nan_memory, build, preset):
    torch.manual_seed(0)
    check(build(KimiK3Config.from_preset(preset)))


@pytest.mark.parametrize(
    "build", [directly, by_auto_class, in_bfloat16, bare, from_meta], ids=lambda build: build.__name__
)
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_variants(nan_memory, small_config, build, overrides):
    torch.manual_seed(0)
    model = build(small_config(**overrides))
    # Few numbers per tensor: their spread says little here.
    for name, value in model.state_dict().items():
        assert value.isfinite().all(), name
        bound = {"norm": (1, 1), "residual query": (0, 0), "e_score_correction_bias": (0, 0), "matrix": (-0.13, 0.13)}
        bound |= {"A_log": (0, math.log(16)), "dt_bias": (-6.91, -2.25), "convolution": (-0.5, 0.5)}
        low, high = bound[kind(name)]
        assert low <= value.min() and value.max() <= high, name
        assert kind(name) in ("norm", "residual query", "e_score_correction_bias") or value.unique().numel() > 1, name
    if overrides.get("tie_word_embeddings") and hasattr(model, "lm_head"):
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_many_heads_have_the_decays_of_the_spec(nan_memory, small_config):
    torch.manual_seed(0)
    check(KimiK3ForCausalLM(small_config(hidden_size=128, linear={"num_heads": 200, "head_dim": 4})))


def test_initializer_range_is_heeded(small_config):
    torch.manual_seed(0)
    model = KimiK3ForCausalLM(small_config(initializer_range=0.1))
    for name, value in model.state_dict().items():
        if kind(name) == "matrix":
            assert 0.085 < value.std() < 0.115, name


def test_what_a_load_replaces_is_set_as_well(nan_memory, small_model, small_config, tmp_path):
    small_model().save_pretrained(tmp_path)
    model = KimiK3ForCausalLM.from_pretrained(
        tmp_path, config=small_config(vocab_size=160), ignore_mismatched_sizes=True
    )
    for value in (model.lm_head.weight, model.model.embed_tokens.weight):
        assert value.shape == (160, 48) and 0.019 < value.std() < 0.021


@pytest.mark.parametrize("preset", PRESETS)
def test_first_loss_is_that_of_a_uniform_guess(preset):
    torch.manual_seed(0)
    config = KimiK3Config.from_preset(preset)
    model = KimiK3ForCausalLM(config).eval()
    ids = torch.randint(0, 250, (4, 64))
    with torch.no_grad():
        output = model(ids, labels=ids, output_attn_res_weights=True)
    # Logits of a normed state have the variance 0.02^2 * D, half of which is what chance adds to the loss.
    assert abs(output.loss - math.log(config.vocab_size) - 0.5 * 0.02**2 * config.hidden_size) < 0.03
    for weights in output.attn_res_weights:
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / weights.shape[-1]))


def test_an_initial_model_learns():
    torch.manual_seed(0)
    model = KimiK3ForCausalLM(KimiK3Config.from_preset("tiny-1m")).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    # Each token follows from the one before it by one fixed permutation.
    follow = torch.randperm(64)
    ids = torch.randint(0, 64, (8, 1))
    while ids.shape[1] < 32:
        ids = torch.cat([ids, follow[ids[:, -1:]]], dim=1)
    losses = []
    for _ in range(20):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 0.99 * math.log(256)
    assert losses[-1] < 0.5 * losses[0]
    # Nothing is stuck at its initial value but what the first layer has no use for.
    for name, parameter in model.named_parameters():
        assert "layers.0.self_attention_res" in name or not torch.equal(parameter, before[name]), name
