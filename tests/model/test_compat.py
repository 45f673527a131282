"""Version check, and the tables of transformers internals that the package relies on."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer
from transformers.generation import GenerationConfig
from transformers.integrations.moe import use_experts_implementation

import modeling_kimi3
from modeling_kimi3 import KimiK3Config, compat

ROOT = Path(__file__).parents[2]
PACKAGES = ("modeling_kimi3", "kernels/kimi3_kernels", "conversion/kimi3_conversion", "eval/kimi3_eval")


def resolve(dotted):
    """The object that a dotted name stands for: its longest importable prefix, then attributes."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(dotted)


# transformers' internals


@pytest.mark.parametrize("name", compat.TRANSFORMERS_INTERNALS)
def test_internal_exists(name):
    resolve(name)


def test_resolve_notices_a_moved_name():
    with pytest.raises(AttributeError):
        resolve("transformers.cache_utils.Cache.no_such_method")


def test_list_of_imports_is_complete():
    used = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                # Names of the top module are transformers' documented API.
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers."):
                    used.update(f"{node.module}.{alias.name}" for alias in node.names)
    listed = set(compat.IMPORTED_INTERNALS)
    assert not used - listed, "add to modeling_kimi3.compat.IMPORTED_INTERNALS"
    assert not listed - used, "no longer imported: remove from modeling_kimi3.compat.IMPORTED_INTERNALS"


# Written by Python for every class.
GENERATED = {
    "__module__",
    "__doc__",
    "__dict__",
    "__weakref__",
    "__init__",
    "__eq__",
    "__hash__",
    "__repr__",
    "__annotations__",
}
GENERATED |= {
    "__abstractmethods__",
    "__slotnames__",
    "_abc_impl",
    "__dataclass_fields__",
    "__dataclass_params__",
    "__match_args__",
}


def test_list_of_overridden_members_is_complete():
    listed = {(resolve(owner), member) for owner, members in compat.OVERRIDDEN_MEMBERS.items() for member in members}
    unused, missing = set(listed), set()
    for info in pkgutil.iter_modules(modeling_kimi3.__path__, "modeling_kimi3."):
        for ours in vars(importlib.import_module(info.name)).values():
            if not inspect.isclass(ours) or ours.__module__ != info.name:
                continue
            theirs = [base for base in ours.__mro__ if base.__module__.startswith("transformers.")]
            # A mixin before them overrides as well.
            mixed_in = [
                base for base in ours.__mro__ if theirs and base.__module__.startswith(modeling_kimi3.__name__ + ".")
            ]
            for member in {name for base in mixed_in for name in vars(base)} - GENERATED:
                if not any(member in vars(base) for base in theirs):
                    continue
                matching = {entry for entry in listed if entry[1] == member and entry[0] in theirs}
                unused -= matching
                if not matching:
                    missing.add(f"{ours.__qualname__}.{member}")
    assert not missing, "add to modeling_kimi3.compat.OVERRIDDEN_MEMBERS"
    assert not unused, "no longer overridden: remove from modeling_kimi3.compat.OVERRIDDEN_MEMBERS"


@pytest.mark.parametrize("name, parameters", compat.PARAMETERS.items())
def test_parameters_have_their_names(name, parameters):
    known = inspect.signature(resolve(name)).parameters
    # **kwargs would swallow a renamed one without a word.
    assert set(parameters) <= set(known)


def test_attributes_of_cache_layers():
    layer = LinearAttentionLayer()
    for name in ("conv_states", "recurrent_states", "has_previous_state"):
        assert list(getattr(layer, name)) == [0]
    assert not layer.is_conv_states_initialized[0] and not layer.is_recurrent_states_initialized[0]
    assert layer.record_past is False
    layer.activate_past_recording()
    assert layer.record_past is True
    # Abstract in transformers: what a layer of our own must bring.
    assert CacheLayerMixin.__abstractmethods__ <= {"lazy_initialization", "update", "get_mask_sizes"} | {
        "get_seq_length",
        "get_max_length",
    }


def test_attributes_of_generation_configs():
    config = GenerationConfig()
    for name in ("cache_implementation", "use_cache", "is_assistant", "prompt_lookup_num_tokens", "max_new_tokens"):
        assert hasattr(config, name)
    assert GenerationConfig._get_default_generation_params()["num_assistant_tokens"] > 0


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_experts_implementations_call_our_gate(implementation):
    @use_experts_implementation
    class Experts(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = 2
            self.gate_up_proj = torch.nn.Parameter(torch.randn(2, 16, 8))
            self.down_proj = torch.nn.Parameter(torch.randn(2, 8, 8))

        def _apply_gate(self, gate_up):
            called.append(tuple(gate_up.shape))
            return gate_up[..., :8] * 0.5

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise AssertionError("the eager form was not asked for")

    called = []
    torch.manual_seed(0)
    experts = Experts(SimpleNamespace(_experts_implementation=implementation))
    x, index, weights = torch.randn(3, 8), torch.tensor([[0], [1], [1]]), torch.tensor([[1.0], [0.5], [2.0]])
    out = experts(x, index, weights)
    assert called == [(3, 16)]
    for token in range(3):
        chosen = index[token, 0]
        inner = 0.5 * (experts.gate_up_proj[chosen, :8] @ x[token])
        expected = weights[token, 0] * (experts.down_proj[chosen] @ inner)
        torch.testing.assert_close(out[token], expected, rtol=1e-5, atol=1e-5)


def test_recorded_outputs_are_asked_for_by_keyword():
    model = AutoModel.from_config(KimiK3Config.from_preset("tiny-1m"), attn_implementation="eager").eval()
    ids = torch.arange(4)[None]
    with torch.no_grad():
        assert model(ids).router_logits is None
        for name in model._can_record_outputs:
            assert model(ids, **{f"output_{name}": True})[name], name


# Versions


def versions(monkeypatch, **installed):
    def version(name):
        if installed[name] is None:
            raise compat.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(compat, "version", version)


@pytest.mark.parametrize("transformers", ["5.24.0", "5.25.0.dev0", "5.99.1"])
def test_supported_versions_pass(monkeypatch, transformers):
    versions(monkeypatch, torch="2.9.0+cpu", transformers=transformers)
    compat.check_versions()


@pytest.mark.parametrize(
    "installed, complaint",
    [
        ({"torch": "2.13.0", "transformers": "5.23.1"}, "transformers 5.23.1 is installed"),
        ({"torch": "2.13.0", "transformers": "6.0.0"}, "transformers 6.0.0 is installed"),
        ({"torch": "2.13.0", "transformers": "6.0.0.dev0"}, "transformers 6.0.0.dev0 is installed"),
        ({"torch": "2.8.1", "transformers": "5.24.0"}, "torch 2.8.1 is installed"),
        ({"torch": None, "transformers": "5.24.0"}, "torch is not installed"),
        ({"torch": "2.13.0", "transformers": None}, "transformers is not installed"),
    ],
)
def test_other_versions_stop_the_import_with_one_sentence(monkeypatch, installed, complaint):
    versions(monkeypatch, **installed)
    with pytest.raises(ImportError) as caught:
        compat.check_versions()
    message = str(caught.value)
    assert complaint in message
    assert "transformers >=5.24,<6" in message and "torch >=2.9" in message
    assert message.endswith(".") and message.count(". ") == 0 and "\n" not in message


def test_old_python_is_refused(monkeypatch):
    monkeypatch.setattr(compat.sys, "version_info", (3, 10, 4))
    with pytest.raises(ImportError, match=r"works with Python >=3\.11"):
        compat.check_versions()
