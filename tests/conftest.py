"""What test files share: golden checkpoints, small configs, random models with every mechanism away from trivial."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from modeling_kimi3 import KimiK3Config, KimiK3ForCausalLM

# Two sets are carried along, so that released layouts are always checked; the others lie beside the repository.
OWN_GOLDEN = Path(__file__).resolve().parent / "data" / "golden"
GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"

SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_attn_config": {
        "num_heads": 2,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3, 5],
    },
    "attn_res_block_size": 2,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Path]:
    """The directory of a golden checkpoint by name; skips where it is neither carried nor beside the repository."""

    def find(name: str) -> Path:
        path = OWN_GOLDEN / name if (OWN_GOLDEN / name).is_dir() else GOLDEN / name
        if not path.is_dir():
            pytest.skip(f"golden checkpoint {name} not found: {GOLDEN} is not there")
        return path

    return find


@pytest.fixture(scope="session")
def small_config() -> Callable[..., KimiK3Config]:
    """A config of five layers with all mechanisms; `linear` overrides keys of `linear_attn_config`."""

    def make(linear: dict | None = None, **overrides) -> KimiK3Config:
        values = {**SMALL, **overrides}
        values["linear_attn_config"] = {**values["linear_attn_config"], **(linear or {})}
        return KimiK3Config(**values)

    return make


@pytest.fixture(scope="session")
def randomize() -> Callable[[torch.nn.Module, int], None]:
    """Gives all that a checkpoint holds random values of a size at which gates, routers and mixes are not trivial."""

    def fill(model: torch.nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            for name in (name for name in model.state_dict() if name in held):
                parameter = held[name]
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                if name.endswith(("norm.weight", "layernorm.weight")):
                    value = 1 + 0.2 * noise
                elif name.endswith(("A_log", "dt_bias")):
                    value = 0.5 * noise
                elif name.endswith("e_score_correction_bias"):
                    value = 0.1 * noise
                elif name.endswith("conv1d.weight"):
                    value = 0.5 * noise
                elif name.endswith("embed_tokens.weight"):
                    value = noise
                else:
                    value = noise * parameter.shape[-1] ** -0.5
                parameter.copy_(value)

    return fill


@pytest.fixture(scope="session")
def small_model(small_config, randomize) -> Callable[..., KimiK3ForCausalLM]:
    """A random float32 model in eval mode on `small_config(**overrides)`."""

    def make(seed: int = 0, **overrides) -> KimiK3ForCausalLM:
        model = KimiK3ForCausalLM(small_config(**overrides)).eval()
        randomize(model, seed)
        return model

    return make


@pytest.fixture(scope="session")
def relative_error() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """Norm of the difference over the norm of the expectation."""

    def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
        actual, expected = actual.detach().double(), expected.detach().double()
        return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()

    return error
