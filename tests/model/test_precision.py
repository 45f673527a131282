"""What is float32 whatever the model's dtype, float64 from end to end, and weights read through whatever wraps them."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from kimi3_kernels import attn_res_mix_ref, kda_gate, kda_recurrent
from modeling_kimi3 import KimiK3Cache, KimiK3ForCausalLM, attention_kda, attention_mla
from modeling_kimi3.attn_res import AttentionResidualMix
from modeling_kimi3.moe import KimiK3Router
from modeling_kimi3.precision import KeepPrecision, effective_weight

# The first layer has nothing to mix before its mixer, so released models hold these two without use.
UNUSED = ("layers.0.self_attention_res_norm.weight", "layers.0.self_attention_res_proj.weight")
LEAVES = ("A_log", "dt_bias", "e_score_correction_bias", "conv1d.weight", "o_norm.weight")
IDS = torch.arange(2 * 40).view(2, 40) * 7 % 93 + 3


@pytest.fixture
def model(small_model):
    return small_model()


def split(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors of fixed precision, and all others."""
    held = model.state_dict()
    leaves = {name: value for name, value in held.items() if name.endswith(LEAVES)}
    return leaves, {name: value for name, value in held.items() if name not in leaves}


def dtypes(tensors: dict[str, torch.Tensor]) -> set[torch.dtype]:
    return {value.dtype for value in tensors.values()}


def copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in tensors.items()}


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype and torch.equal(actual[name], value), name


# Casts

CASTS = {
    "bfloat16()": lambda model: model.bfloat16(),
    "half()": lambda model: model.half(),
    "to(dtype)": lambda model: model.to(torch.bfloat16),
    "to(dtype=)": lambda model: model.to(dtype=torch.float16),
    "to(device, dtype)": lambda model: model.to("cpu", torch.bfloat16),
    "to(tensor)": lambda model: model.to(torch.zeros(1, dtype=torch.bfloat16)),
    "type()": lambda model: model.type(torch.bfloat16),
    "layer by layer": lambda model: [module.to(torch.bfloat16) for module in model.modules()],
    "deep copy": lambda model: model.load_state_dict(copy.deepcopy(model).bfloat16().state_dict()),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_leaves_survive_casts(model, cast):
    leaves, others = (copies(part) for part in split(model))
    assert len(leaves) == 3 * 6 + 4
    cast(model)
    kept, narrowed = split(model)
    same(kept, leaves)
    if cast is not CASTS["deep copy"]:
        assert dtypes(narrowed) <= {torch.bfloat16, torch.float16}
    for name, value in narrowed.items():
        if name.endswith("o_proj.weight"):
            assert not torch.equal(value.float(), others[name])


def test_gradients_follow_their_leaves(model):
    model(IDS, labels=IDS).loss.backward()
    model.bfloat16()
    for parameter in model.parameters():
        if parameter.grad is not None:
            assert parameter.grad.dtype == parameter.dtype


def test_double_widens_all_and_the_way_back_leaves_float32(model):
    leaves, others = (copies(part) for part in split(model))
    assert dtypes(model.double().state_dict()) == {torch.float64}
    model.float()
    same(split(model)[0], leaves)
    same(split(model)[1], others)
    model.double().bfloat16()
    same(split(model)[0], leaves)
    assert dtypes(split(model)[1]) == {torch.bfloat16}


def test_a_leaf_that_was_given_narrow_is_not_widened_by_a_cast():
    class Module(KeepPrecision):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))

    assert Module().half().weight.dtype == torch.float16
    assert Module().to("cpu").weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_leaves_of_loaded_and_configured_models(model, tmp_path, dtype):
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    same(split(loaded)[0], split(model)[0])
    assert dtypes(split(loaded)[1]) == {dtype}
    built = AutoModelForCausalLM.from_config(model.config, dtype=dtype)
    assert dtypes(split(built)[0]) == {torch.float32}
    assert dtypes(split(built)[1]) == {dtype}
    assert torch.get_default_dtype() == torch.float32


def test_the_routers_bias_is_no_parameter(model, tmp_path):
    """It gets no gradient, and what loads parameters would make it ask for one."""
    model.save_pretrained(tmp_path)
    for candidate in (model, KimiK3ForCausalLM.from_pretrained(tmp_path)):
        assert not any("correction_bias" in name for name, _ in candidate.named_parameters())
        assert all(parameter.requires_grad for parameter in candidate.parameters())


# What is computed in float32


def snapshot(values: tuple) -> list:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


class Recorder:
    """Inputs and outputs of the parts of a forward pass that are float32 by the spec."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch):
        self.routers, self.mixes, self.gates, self.scans, self.steps, self.softmaxes = [], [], [], [], [], []
        for module in model.modules():
            if isinstance(module, KimiK3Router):
                module.register_forward_hook(lambda m, args, output: self.routers.append((m, args[0], output)))
            if isinstance(module, AttentionResidualMix):
                module.register_forward_hook(lambda m, args, output: self.mixes.append((args, output)))
        for owner, name, calls in (
            (attention_kda, "kda_gate", self.gates),
            (attention_kda, "kda_chunk", self.scans),
            (attention_kda, "kda_step", self.steps),
            (attention_mla, "masked_softmax", self.softmaxes),
        ):
            original = getattr(owner, name)

            def wrapped(*args, original=original, calls=calls, **kwargs):
                # Decode steps change the state where it lies, that of the prompt too.
                before, output = snapshot(args), original(*args, **kwargs)
                kept = snapshot(output) if isinstance(output, tuple) else output
                calls.append((before, kept, snapshot(args)))
                return output

            monkeypatch.setattr(owner, name, wrapped)

    def check(self, relative_error, tolerance: float) -> None:
        """All of it is float32 and as near to float64 as float32 is; bf16 products would be 1e-3 away."""
        assert self.routers and self.mixes and self.gates and self.scans and self.steps and self.softmaxes
        assert {weights.dtype for _, weights, _ in self.softmaxes} == {torch.float32}
        for router, hidden, (logits, weights, _) in self.routers:
            assert logits.dtype == weights.dtype == torch.float32
            assert relative_error(logits, hidden.double() @ router.weight.double().T) < tolerance
        for (sources, weight, *_), (_, probabilities) in self.mixes:
            assert weight.dtype == probabilities.dtype == torch.float32
            _, expected = attn_res_mix_ref([source.double() for source in sources], weight.double())
            assert relative_error(probabilities, expected) < tolerance
        for (raw, a_log, dt_bias, bound), g, _ in self.gates:
            assert g.dtype == torch.float32
            expected = kda_gate(raw.double(), a_log.double(), dt_bias.double(), bound)
            assert relative_error(g, expected) < tolerance
        for args, (_, state), _ in self.scans:
            q, k, _, g, beta = args[:5]
            assert {x.dtype for x in (q, k, g, beta, state)} == {torch.float32}
            _, expected = kda_recurrent(*(x.double() for x in args if x is not None))
            assert relative_error(state, expected) < tolerance
        for before, _, (*_, state) in self.steps:
            assert {x.dtype for x in (*before[:2], *before[3:5], state)} == {torch.float32}
            q, k, v, g, beta, old = (x.double() for x in before)
            _, expected = kda_recurrent(*(x.unsqueeze(1) for x in (q, k, v, g, beta)), old)
            assert relative_error(state, expected) < tolerance


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_parts_that_stay_in_float32(model, monkeypatch, relative_error, how):
    if how == "bfloat16":
        model.bfloat16()
    recorder = Recorder(model, monkeypatch)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"), torch.no_grad():
        cache = KimiK3Cache(model.config)
        model(IDS[:, :38], cache=cache)
        assert recorder.scans and not recorder.steps
        for step in (38, 39):
            model(IDS[:, step : step + 1], cache=cache)
    assert len(recorder.steps) == 6
    recorder.check(relative_error, 1e-5)
    for layer, kind in enumerate(model.config.layer_types):
        if kind == "linear_attention":
            assert cache.get_recurrent_state(layer).dtype == torch.float32


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_narrow_logits_are_near_and_the_cache_agrees(model, relative_error, how):
    with torch.no_grad():
        expected = model(IDS).logits
        if how == "bfloat16":
            model.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            whole = model(IDS).logits
            output = model(IDS[:, :37], use_cache=True)
            steps = [output.logits]
            for step in (37, 38, 39):
                steps.append(model(IDS[:, step : step + 1], cache=output.cache).logits)
    # Routers near a tie choose otherwise, which moves single tokens by much: the median token counts.
    distance = (whole - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert distance.median() < 0.05
    distance = (torch.cat(steps, dim=1) - whole).float().norm(dim=-1) / whole.float().norm(dim=-1)
    assert distance.median() < 0.05


def test_gradients_under_autocast(model, relative_error):
    model.train()
    model(IDS, labels=IDS).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if not name.endswith(UNUSED)}
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(IDS, labels=IDS).loss
    assert loss.dtype == torch.float32
    loss.backward()
    actual = {name: p.grad for name, p in model.named_parameters() if not name.endswith(UNUSED)}
    for name, gradient in actual.items():
        assert gradient.dtype == torch.float32 and gradient.isfinite().all(), name
    whole = [torch.cat([gradient.flatten() for gradient in each.values()]) for each in (actual, expected)]
    assert relative_error(*whole) < 0.2


def test_bfloat16_model_generates(model):
    model.bfloat16()
    out = model.generate(
        IDS, max_new_tokens=8, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True
    )
    assert out.sequences.shape == (2, 48)
    assert torch.stack(out.logits).isfinite().all()


# float64


def test_float64_gradients_are_the_slope_of_the_loss(model):
    model = model.double()
    output = model(IDS, labels=IDS)
    assert output.logits.dtype == torch.float64
    output.loss.backward()
    parameters = [parameter for name, parameter in model.named_parameters() if not name.endswith(UNUSED)]
    assert all(parameter.grad.dtype == torch.float64 for parameter in parameters)
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(p.shape, generator=generator, dtype=torch.float64) * p.detach().std() for p in parameters]
    slope = sum((parameter.grad * way).sum() for parameter, way in zip(parameters, direction))

    # transformers takes logits to float32 before the loss, which is too coarse for a difference.
    def loss() -> torch.Tensor:
        logits = model(IDS).logits[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, IDS[:, 1:].flatten())

    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            for parameter, way in zip(parameters, direction):
                parameter.add_(way, alpha=sign * 1e-6)
            losses.append(loss())
            for parameter, way in zip(parameters, direction):
                parameter.sub_(way, alpha=sign * 1e-6)
    assert abs((losses[0] - losses[1]) / 2e-6 / slope - 1) < 1e-5


def test_float64_survives_saving_and_loading(model, tmp_path):
    model = model.double()
    with torch.no_grad():
        for value in model.state_dict().values():
            value.mul_(1 + 1e-12)
    for original in (False, True):
        model.save_pretrained(tmp_path / str(original), save_original_format=original)
        loaded = KimiK3ForCausalLM.from_pretrained(tmp_path / str(original))
        same(dict(loaded.state_dict()), dict(model.state_dict()))
        narrow = KimiK3ForCausalLM.from_pretrained(tmp_path / str(original), dtype=torch.float32)
        assert dtypes(narrow.state_dict()) == {torch.float32}


def test_float64_experts_where_they_run_together(model, monkeypatch, relative_error):
    model = model.double()
    experts = model.model.layers[1].block_sparse_moe.experts
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 32, dtype=torch.float64, generator=generator)
    choice = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(40)])
    weights = torch.rand(40, 3, dtype=torch.float64, generator=generator)
    expected = experts(hidden, choice, weights)
    # As in a compiled graph, where transformers' own functions take over.
    monkeypatch.setattr("modeling_kimi3.moe.is_tracing", lambda *args: True)
    assert relative_error(experts(hidden, choice, weights), expected) < 1e-12


# Weights read from modules


class LowRank(nn.Module):
    """A linear layer with an adapter, as adapter libraries wrap it: no `weight` of its own."""

    def __init__(self, base: nn.Linear, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base_layer = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.down = nn.Parameter(torch.randn(2, base.in_features, generator=generator) * base.in_features**-0.5)
        self.up = nn.Parameter(torch.randn(base.out_features, 2, generator=generator))

    def forward(self, x):
        return self.base_layer(x) + x @ self.down.T @ self.up.T

    def merged(self):
        result = nn.Linear(self.in_features, self.out_features, bias=False)
        result.weight.data = self.base_layer.weight.data + self.up.data @ self.down.data
        return result


class Coded(torch.Tensor):
    """A weight that stands for twice what it holds, as quantised tensors stand for something else."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return function(args[0], 2 * args[1].as_subclass(torch.Tensor))
        return super().__torch_function__(function, types, args, kwargs)


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(6, 4, bias=False)


def test_weight_of_a_plain_linear_is_the_parameter_itself(linear):
    class Derived(nn.Linear):
        pass

    assert effective_weight(linear) is linear.weight
    derived = Derived(6, 4, bias=False)
    assert effective_weight(derived) is derived.weight


def test_weight_under_an_adapter(linear):
    wrapped = LowRank(LowRank(linear, 1), 2)
    weight = effective_weight(wrapped)
    expected = linear.weight + wrapped.base_layer.up @ wrapped.base_layer.down + wrapped.up @ wrapped.down
    torch.testing.assert_close(weight, expected)
    weight.square().sum().backward()
    for parameter in wrapped.parameters():
        assert parameter.grad.norm() > 0
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(effective_weight(wrapped), expected)


def test_weight_of_overridden_forwards(linear):
    weight = linear.weight.detach().clone()
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", nn.Tanh())
    torch.testing.assert_close(effective_weight(linear), weight.tanh())
    coded = nn.Linear(6, 4, bias=False)
    coded.weight = nn.Parameter(weight.clone().as_subclass(Coded))
    torch.testing.assert_close(effective_weight(coded), 2 * weight)
    patched = nn.Linear(6, 4, bias=False)
    patched.forward = lambda x: 3 * nn.functional.linear(x, patched.weight)
    torch.testing.assert_close(effective_weight(patched), 3 * patched.weight)


def test_weight_of_offloaded_modules(linear):
    accelerate = pytest.importorskip("accelerate")
    weight = linear.weight.detach().clone()
    on_device = accelerate.hooks.add_hook_to_module(linear, accelerate.hooks.AlignDevicesHook("cpu"))
    # With its weight at hand it is read, not worked out.
    assert effective_weight(on_device) is on_device.weight
    accelerate.hooks.remove_hook_from_module(linear)
    offloaded = accelerate.cpu_offload(linear, "cpu")
    assert offloaded.weight.device.type == "meta"
    with torch.no_grad():
        torch.testing.assert_close(effective_weight(offloaded), weight, rtol=0, atol=0)
    assert offloaded.weight.device.type == "meta"


@pytest.mark.parametrize("names", [["kv_b_proj"], ["o_proj", "g_proj"], ["f_b_proj", "b_proj"], ["res_proj"]], ids=str)
def test_adapters_act_the_same_in_all_forms(model, relative_error, names):
    adapted, merged = copy.deepcopy(model), model
    for form in (adapted, merged):
        for path, module in list(form.named_modules()):
            if path.endswith(tuple(names)):
                wrapped = LowRank(module, seed=len(path))
                form.set_submodule(path, wrapped if form is adapted else wrapped.merged())
    with torch.no_grad():
        expected = merged(IDS).logits
        assert relative_error(adapted(IDS).logits, expected) < 1e-5
        # One token at a time: the latent is not expanded, and kv_b_proj's matrix itself is needed.
        cache = KimiK3Cache(adapted.config)
        steps = [adapted(IDS[:, i : i + 1], cache=cache).logits for i in range(IDS.shape[1])]
        assert relative_error(torch.cat(steps, dim=1), expected) < 1e-5
    adapted(IDS, labels=IDS).loss.backward()
    for name, parameter in adapted.named_parameters():
        assert ".layers.0.self_attention_res" in name or parameter.grad.norm() > 0, name
