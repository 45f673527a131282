"""Loading of released directories and of our own, refusals, and the way back to the released layout.

Released directories are written here tensor by tensor from the spec's table, never by the code under test, and every
weight of a loaded model is compared.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from modeling_kimi3 import KimiK3Config, KimiK3ForCausalLM, KimiK3Model
from modeling_kimi3.config_quantization import RELEASED_QUANTIZATION

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias", "conv1d.weight", "o_norm.weight")
MOE = "language_model.model.layers.1.block_sparse_moe"
IDS = torch.arange(24)[None] * 5 % 96

Tensors = dict[str, torch.Tensor]


def pack(shape: torch.Size, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """Random MXFP4 parts of one `[O, I]` matrix, and its values."""
    rows, columns = shape
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    scale = torch.randint(120, 125, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    values = E2M1[codes.long()] * torch.exp2(scale.float() - 127).repeat_interleave(32, dim=1)
    return {"weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": scale}, values


def released_tensors(model: KimiK3ForCausalLM, packed: bool = False) -> Tensors:
    """What a composite release of `model` holds (spec section 2). The model takes on the values that are stored."""
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for name, held in model.state_dict().items():
        values = held if name.endswith(FLOAT32) else held.bfloat16()
        held.copy_(values)
        name = f"language_model.{name}"
        stem, _, last = name.rpartition(".")
        if last in ("gate_up_proj", "down_proj"):
            for expert, matrix in enumerate(values):
                parts = {"w1": matrix[:32], "w3": matrix[32:]} if last == "gate_up_proj" else {"w2": matrix}
                for projection, part in parts.items():
                    stored = {"weight": part.clone()}
                    if packed:
                        stored, decoded = pack(part.shape, generator)
                        rows = slice(32, None) if projection == "w3" else slice(0, 32)
                        held[expert, rows].copy_(decoded)
                    tensors.update({f"{stem}.{expert}.{projection}.{key}": value for key, value in stored.items()})
        elif last == "A_log":
            tensors[name] = torch.nn.functional.pad(values, (0, 128 - values.numel()))
        else:
            tensors[name] = values.clone()
    tensors["vision_tower.blocks.0.mlp.up_proj.weight"] = torch.zeros(4, 4, dtype=torch.bfloat16)
    tensors["mm_projector.linear_1.weight"] = torch.zeros(4, 4, dtype=torch.bfloat16)
    return tensors


def write(path: Path, config: dict, tensors: Tensors, shards: int = 3) -> Path:
    """A directory of `shards` files; neighbours in `tensors` (an expert's matrices, say) lie in different ones."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:06d}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def composite(config: KimiK3Config, packed: bool = False) -> dict:
    released = {**config.to_release_dict(), "vision_config": {"depth": 1}, "dtype": "bfloat16"}
    if packed:
        released["text_config"]["quantization_config"] = RELEASED_QUANTIZATION
    return released


def stored(path: Path) -> Tensors:
    """All tensors of a directory."""
    return {key: value for file in sorted(path.glob("*.safetensors")) for key, value in load_file(file).items()}


def same(actual: Tensors, expected: Tensors) -> None:
    """Names, shapes, dtypes and bits are equal."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert actual[name].shape == value.shape, name
        assert torch.equal(actual[name].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)), name


def same_weights(actual: torch.nn.Module, expected: torch.nn.Module) -> None:
    same(dict(actual.state_dict()), dict(expected.state_dict()))


@pytest.fixture
def release(small_model, tmp_path) -> Callable[..., tuple[Path, KimiK3ForCausalLM]]:
    """A released directory, its tensors changed by `edit`, and the float32 model it was made from."""

    def make(edit: Callable[[Tensors], None] | None = None, packed: bool = False, **overrides):
        model = small_model(**overrides)
        tensors = released_tensors(model, packed)
        if edit is not None:
            edit(tensors)
        return write(tmp_path / "released", composite(model.config, packed), tensors), model

    return make


# Loading what is released


@pytest.mark.parametrize("packed", [False, True], ids=["bf16-experts", "mxfp4-experts"])
def test_released_directory_loads_exactly(release, packed):
    path, model = release(packed=packed)
    shards = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len({file for name, file in shards.items() if name.startswith(f"{MOE}.experts.3.")}) > 1
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert type(loaded) is KimiK3ForCausalLM
    same_weights(loaded, model)
    narrow = AutoModelForCausalLM.from_pretrained(path)
    assert narrow.dtype == torch.bfloat16
    # The values are those of the files, so the leaves that stay wide are equal bit by bit.
    same_weights(narrow, model.bfloat16())


@pytest.mark.parametrize("layout", ["padded", "flat", "kimi-linear"])
def test_shapes_of_a_log(release, layout):
    def reshape(tensors):
        for name in [name for name in tensors if name.endswith("A_log")]:
            values = tensors[name]
            # The padding holds nothing, whatever its bytes are.
            values[2:] = 7.0
            if layout != "padded":
                tensors[name] = values[:2].clone() if layout == "flat" else values[:2].view(1, 1, 2, 1).clone()

    path, model = release(reshape)
    same_weights(KimiK3ForCausalLM.from_pretrained(path, dtype=torch.float32), model)


def test_convolutions_without_middle_dimension_and_a_narrow_bias(release):
    def reshape(tensors):
        for name in list(tensors):
            if name.endswith("conv1d.weight"):
                tensors[name] = tensors[name].squeeze(1).contiguous()
            if name.endswith("e_score_correction_bias"):
                tensors[name] = tensors[name].bfloat16()

    path, model = release(reshape)
    for name, held in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            held.copy_(held.bfloat16())
    same_weights(KimiK3ForCausalLM.from_pretrained(path, dtype=torch.float32), model)
    assert KimiK3ForCausalLM.from_pretrained(path).model.layers[
        1
    ].block_sparse_moe.gate.e_score_correction_bias.dtype == (torch.float32)


def test_dense_experts_in_spite_of_the_config(release):
    path, model = release()
    config = composite(model.config, packed=True)
    (path / "config.json").write_text(json.dumps(config))
    same_weights(KimiK3ForCausalLM.from_pretrained(path, dtype=torch.float32), model)


def test_more_than_ten_experts_keep_their_order(release):
    path, model = release(num_experts=12)
    same_weights(KimiK3ForCausalLM.from_pretrained(path, dtype=torch.float32), model)


# Refusals


def drop(*names: str) -> Callable[[Tensors], None]:
    def edit(tensors):
        for name in names:
            del tensors[name]

    return edit


def add(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.zeros(4, 4)})


def rename(old: str, new: str) -> Callable[[Tensors], None]:
    def edit(tensors):
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return edit


def reshape(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=tensors[name].dtype)})


LAYER = "language_model.model.layers.1"
SECOND_DOWN = [f"{MOE}.experts.{expert}.w2.weight" for expert in range(8)]
MISSING = {
    "embedding": (drop("language_model.model.embed_tokens.weight"), ["missing", "model.embed_tokens.weight"]),
    "head": (drop("language_model.lm_head.weight"), ["missing", "lm_head.weight"]),
    "norm": (drop(f"{LAYER}.input_layernorm.weight"), ["missing", "layers.1.input_layernorm.weight"]),
    "A_log": (drop(f"{LAYER}.self_attn.A_log"), ["missing", "layers.1.self_attn.A_log"]),
    "dt_bias": (drop(f"{LAYER}.self_attn.dt_bias"), ["missing", "layers.1.self_attn.dt_bias"]),
    "convolution": (drop(f"{LAYER}.self_attn.k_conv1d.weight"), ["missing", "layers.1.self_attn.k_conv1d.weight"]),
    "latent": (
        drop("language_model.model.layers.2.self_attn.kv_a_layernorm.weight"),
        ["missing", "layers.2.self_attn.kv_a_layernorm.weight"],
    ),
    "residual query": (drop(f"{LAYER}.mlp_res_proj.weight"), ["missing", "layers.1.mlp_res_proj.weight"]),
    "router bias": (drop(f"{MOE}.gate.e_score_correction_bias"), ["missing", "gate.e_score_correction_bias"]),
    "gate matrix of one expert": (drop(f"{MOE}.experts.3.w1.weight"), ["missing", f"{MOE}.experts.3.w1.weight"]),
    "down matrix of one expert": (drop(f"{MOE}.experts.7.w2.weight"), ["missing", f"{MOE}.experts.7.w2.weight"]),
    "one expert": (
        drop(*(f"{MOE}.experts.0.w{i}.weight" for i in (1, 2, 3))),
        ["missing", f"{MOE}.experts.0.w1.weight", f"{MOE}.experts.0.w3.weight"],
    ),
    "all down matrices": (drop(*SECOND_DOWN), ["missing", "layers.1.block_sparse_moe.experts.down_proj"]),
    "one expert under another number": (
        rename(f"{MOE}.experts.3.", f"{MOE}.experts.8."),
        [f"missing {MOE}.experts.3.w1.weight", f"unexpected {MOE}.experts.8.w1.weight", "num_experts = 8"],
    ),
}
UNEXPECTED = {
    "tensor": (add(f"{LAYER}.self_attn.rope.weight"), ["unexpected", "layers.1.self_attn.rope.weight"]),
    "layer": (add("language_model.model.layers.5.input_layernorm.weight"), ["unexpected", "layers.5."]),
    "expert": (add(f"{MOE}.experts.8.w1.weight"), ["unexpected", f"{MOE}.experts.8.w1.weight"]),
    "experts of a dense layer": (
        add("language_model.model.layers.0.block_sparse_moe.experts.0.w2.weight"),
        ["unexpected", "layers.0.block_sparse_moe.experts"],
    ),
    "indexer": (
        add("language_model.model.layers.2.self_attn.indexer.wq_b.weight"),
        ["unexpected", "layers.2.self_attn.indexer.wq_b.weight", "K3.1"],
    ),
}
WRONG_SHAPE = {
    "projection": (
        reshape(f"{LAYER}.self_attn.o_proj.weight", 48, 31),
        ["wrong shape", "layers.1.self_attn.o_proj.weight is [48, 31], expected [48, 32]"],
    ),
    "A_log": (reshape(f"{LAYER}.self_attn.A_log", 3), ["layers.1.self_attn.A_log", "(3,)", "num_heads = 2"]),
    "A_log of Kimi-Linear": (reshape(f"{LAYER}.self_attn.A_log", 1, 1, 4, 1), ["self_attn.A_log", "(1, 1, 4, 1)"]),
    "convolution": (
        reshape(f"{LAYER}.self_attn.q_conv1d.weight", 32, 3),
        ["q_conv1d.weight is [32, 1, 3]", "[32, 1, 4]"],
    ),
    "expert": (
        reshape(f"{MOE}.experts.5.w3.weight", 32, 16),
        [f"{MOE}.experts.5.w3.weight has shape [32, 16], expected [32, 32]"],
    ),
    "all experts": (
        lambda tensors: [reshape(f"{MOE}.experts.{i}.w2.weight", 16, 32)(tensors) for i in range(8)],
        [f"{MOE}.experts.0.w2.weight has shape [16, 32], expected [32, 32]"],
    ),
}


@pytest.mark.parametrize(
    "edit, expected",
    [
        pytest.param(*case, id=f"{kind}-{name}".replace(" ", "-"))
        for kind, cases in (("missing", MISSING), ("unexpected", UNEXPECTED), ("shape", WRONG_SHAPE))
        for name, case in cases.items()
    ],
)
def test_tensors_that_do_not_fit_are_named(release, edit, expected):
    path, _ = release(edit)
    with pytest.raises(ValueError) as caught:
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for part in expected:
        assert part in str(caught.value)


def test_the_bare_decoder_refuses_as_well(release):
    path, _ = release(drop(f"{LAYER}.self_attn.A_log"))
    with pytest.raises(ValueError, match=r"do not fit KimiK3Model: missing: layers\.1\.self_attn\.A_log"):
        AutoModel.from_pretrained(path)


@pytest.mark.parametrize(
    "edit, expected",
    [
        (drop(f"{MOE}.experts.3.w2.weight_scale"), f"missing {MOE}.experts.3.w2.weight_scale"),
        (drop(f"{MOE}.experts.3.w3.weight_packed"), f"missing {MOE}.experts.3.w3.weight_packed"),
        (add(f"{MOE}.experts.3.w1.weight"), f"unexpected {MOE}.experts.3.w1.weight"),
        (
            reshape(f"{MOE}.experts.3.w1.weight_packed", 32, 32),
            "w1.weight_packed has shape [32, 32], expected [32, 16]",
        ),
        (reshape(f"{MOE}.experts.3.w2.weight_scale", 32, 2), "w2.weight_scale has shape [32, 2], expected [32, 1]"),
    ],
    ids=["no-scale", "no-codes", "both-forms", "codes", "scale"],
)
def test_packed_tensors_that_do_not_fit_are_named(release, edit, expected):
    path, _ = release(edit, packed=True)
    with pytest.raises(ValueError) as caught:
        KimiK3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert expected in str(caught.value)


def test_packed_experts_that_the_config_does_not_mention(release):
    path, model = release(packed=True)
    (path / "config.json").write_text(json.dumps(composite(model.config)))
    with pytest.raises(ValueError, match=r"experts\.0\.w1\.weight_packed.*no quantization_config"):
        KimiK3ForCausalLM.from_pretrained(path)


def test_damaged_files_are_named(release):
    path, _ = release()
    file = path / "model-00002-of-000003.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-1], whole[:4], b""):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model-00002-of-000003\.safetensors cannot be read"):
            KimiK3ForCausalLM.from_pretrained(path)
    file.unlink()
    with pytest.raises(OSError, match=r"model-00002-of-000003\.safetensors"):
        KimiK3ForCausalLM.from_pretrained(path)


def test_a_shape_may_be_ignored_on_request(release):
    path, model = release(reshape("language_model.lm_head.weight", 50, 48))
    loaded = KimiK3ForCausalLM.from_pretrained(path, dtype=torch.float32, ignore_mismatched_sizes=True)
    assert loaded.lm_head.weight.shape == (96, 48)
    same_weights(loaded.model, model.model)


# Saving


def test_own_layout_round_trip(small_model, tmp_path):
    model = small_model()
    model.save_pretrained(tmp_path)
    assert "model.layers.1.block_sparse_moe.experts.gate_up_proj" in stored(tmp_path)
    for loaded in (AutoModelForCausalLM.from_pretrained(tmp_path), KimiK3ForCausalLM.from_pretrained(tmp_path)):
        assert type(loaded) is KimiK3ForCausalLM and loaded.config == model.config
        same_weights(loaded, model)
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    same(stored(again), stored(tmp_path))


def test_own_layout_keeps_the_wide_leaves_of_a_narrow_model(small_model, tmp_path):
    model = small_model().bfloat16()
    model.save_pretrained(tmp_path)
    same_weights(KimiK3ForCausalLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("original", [False, True], ids=["own", "released"])
def test_sharded_saves(small_model, tmp_path, original):
    model = small_model()
    model.save_pretrained(tmp_path, max_shard_size="50KB", save_original_format=original)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 5
    same_weights(KimiK3ForCausalLM.from_pretrained(tmp_path), model)
    # A later save into the same directory leaves nothing of the first.
    model.save_pretrained(tmp_path, save_original_format=original)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


KIMI_LINEAR = {
    "hidden_act": "silu",
    "attn_res_block_size": None,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False,
    "q_lora_rank": None,
    "mla_use_output_gate": False,
    "routed_scaling_factor": 2.446,
}


def model_in(layout: str, small_config, randomize) -> tuple[KimiK3ForCausalLM, Tensors]:
    """A bf16 model whose config came from a file of that layout (or from none), and the tensors of such a release."""
    linear = {"gate_lower_bound": None, "use_full_rank_gate": False}
    config = small_config(**KIMI_LINEAR, linear=linear) if layout == "kimi_linear" else small_config()
    raw = config.to_release_dict()
    if layout != "scratch":
        config = KimiK3Config(**(raw if layout == "composite" else raw["text_config"]))
    assert config.release_layout == ("composite" if layout == "scratch" else layout)
    model = KimiK3ForCausalLM(config).eval()
    randomize(model, 0)
    if layout == "kimi_linear":
        for name, held in model.state_dict().items():
            if name.endswith(("conv1d.weight", "o_norm.weight")):
                held.copy_(held.bfloat16())
    tensors = {name: value for name, value in released_tensors(model).items() if name.startswith("language_model.")}
    if config.release_layout != "composite":
        tensors = {name.removeprefix("language_model."): value for name, value in tensors.items()}
        for name, value in tensors.items():
            if name.endswith("A_log"):
                tensors[name] = value[:2] if layout == "flat" else value[:2].view(1, 1, 2, 1)
            if layout == "kimi_linear" and name.endswith(("conv1d.weight", "o_norm.weight")):
                tensors[name] = value.bfloat16()
    return model.bfloat16(), tensors


@pytest.mark.parametrize("layout", ["composite", "flat", "kimi_linear", "scratch"])
def test_released_layout_round_trip(small_config, randomize, tmp_path, layout):
    model, tensors = model_in(layout, small_config, randomize)
    model.save_pretrained(tmp_path, save_original_format=True)
    same(stored(tmp_path), tensors)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert ("text_config" in raw) == (layout in ("composite", "scratch"))
    assert raw["model_type"] == ("kimi_k3" if "text_config" in raw else "kimi_linear")
    loaded = KimiK3ForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.release_layout == model.config.release_layout
    assert loaded.config.to_release_dict() == raw
    same_weights(loaded, model)
    # And once more from what was loaded; then in our own layout.
    loaded.save_pretrained(tmp_path / "again", save_original_format=True)
    same(stored(tmp_path / "again"), tensors)
    loaded.save_pretrained(tmp_path / "own")
    same_weights(KimiK3ForCausalLM.from_pretrained(tmp_path / "own"), model)


@pytest.mark.parametrize("name", ["k3-moe-bf16", "k3-tiny-dense", "kimi-linear-tiny", "k3-tiny-text", "k3-tiny-vision"])
def test_golden_directory_is_written_back_as_it_was(golden, tmp_path, name):
    model = KimiK3ForCausalLM.from_pretrained(golden(name))
    model.save_pretrained(tmp_path, save_original_format=True)
    before = {
        key: value
        for file in golden(name).glob("model*.safetensors")
        for key, value in load_file(file).items()
        if not key.startswith(("vision_tower.", "mm_projector."))
    }
    after = stored(tmp_path)
    config, raw = (json.loads((path / "config.json").read_text()) for path in (tmp_path, golden(name)))
    packed = [key for key in before if key.endswith("weight_packed")]
    assert bool(packed) == (name in ("k3-tiny-text", "k3-tiny-vision"))
    if packed:
        # Decoded experts are saved as what they are.
        assert raw["text_config"].pop("quantization_config")
    for key in packed:
        codes, scale = before.pop(key), before.pop(key.replace("packed", "scale"))
        values = torch.stack([E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]], dim=-1).flatten(-2)
        decoded = values * torch.exp2(scale.float() - 127).repeat_interleave(32, dim=1)
        before[key.removesuffix("_packed")] = decoded.bfloat16()
    same(after, before)
    assert config == raw


def test_wide_leaves_go_back_in_the_dtype_they_came_in_where_that_is_exact(release, tmp_path):
    def narrow(tensors):
        for name in tensors:
            if name.endswith(FLOAT32):
                tensors[name] = tensors[name].bfloat16()

    path, _ = release(narrow)
    model = KimiK3ForCausalLM.from_pretrained(path)
    model.save_pretrained(tmp_path / "same", save_original_format=True)
    expected = {name: value for name, value in stored(path).items() if name.startswith("language_model.")}
    same(stored(tmp_path / "same"), expected)
    with torch.no_grad():
        model.model.layers[0].self_attn.dt_bias[0] = 0.1
        model.model.layers[0].self_attn.q_conv1d.weight[0] = 0.1
    model.save_pretrained(tmp_path / "trained", save_original_format=True)
    same_weights(KimiK3ForCausalLM.from_pretrained(tmp_path / "trained"), model)
    # A model in float32 is stored in it throughout.
    KimiK3ForCausalLM.from_pretrained(path, dtype=torch.float32).save_pretrained(
        tmp_path / "wide", save_original_format=True
    )
    assert {value.dtype for value in stored(tmp_path / "wide").values()} == {torch.float32}


def test_decoded_experts_are_saved_without_quantization(release, tmp_path):
    path, model = release(packed=True)
    loaded = KimiK3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert not getattr(loaded, "is_quantized", False)
    for original in (False, True):
        target = tmp_path / str(original)
        loaded.save_pretrained(target, save_original_format=original)
        raw = json.loads((target / "config.json").read_text())
        assert "quantization_config" not in {**raw, **raw.get("text_config", {})}
        again = KimiK3ForCausalLM.from_pretrained(target)
        assert getattr(again.config, "quantization_config", None) is None
        same_weights(again, model)


@pytest.mark.parametrize("original", [False, True], ids=["own", "released"])
def test_bare_decoder_and_causal_model_read_each_other(small_model, tmp_path, original):
    model = small_model()
    model.save_pretrained(tmp_path / "causal", save_original_format=original)
    bare = AutoModel.from_pretrained(tmp_path / "causal")
    assert type(bare) is KimiK3Model
    same_weights(bare, model.model)

    bare.save_pretrained(tmp_path / "bare", save_original_format=original)
    same_weights(AutoModel.from_pretrained(tmp_path / "bare"), model.model)
    if original:
        names = stored(tmp_path / "causal").keys() - {"language_model.lm_head.weight"}
        assert stored(tmp_path / "bare").keys() == names
    with pytest.raises(ValueError, match=r"do not fit KimiK3ForCausalLM: missing: lm_head\.weight\.$"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "bare")


@pytest.mark.parametrize("original", [False, True], ids=["own", "released"])
def test_tied_embeddings(small_model, tmp_path, original):
    model = small_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "causal", save_original_format=original)
    assert not any("lm_head" in name for name in stored(tmp_path / "causal"))
    model.model.save_pretrained(tmp_path / "bare", save_original_format=original)
    for path in (tmp_path / "causal", tmp_path / "bare"):
        loaded = AutoModelForCausalLM.from_pretrained(path)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        same_weights(loaded, model)


def test_a_wrong_head_is_not_overlooked(small_model, tmp_path):
    small_model().save_pretrained(tmp_path)
    tensors = {**stored(tmp_path), "lm_head.bias": torch.zeros(96)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected: lm_head\.bias"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# Saves that do not come to an end


def halve(text: str) -> str:
    return text[: len(text) // 2]


@pytest.mark.parametrize("moment", ["weights", "writing", "renaming"])
def test_an_interrupted_save_leaves_a_whole_config(small_model, tmp_path, monkeypatch, moment):
    model = small_model()
    write_text = Path.write_text

    def interrupt(*args, **kwargs):
        if moment == "writing":
            write_text(args[0], halve(args[1]))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        owner, name = {
            "weights": ("transformers.modeling_utils", "safe_save_file"),
            "writing": ("pathlib.Path", "write_text"),
            "renaming": ("pathlib.Path", "replace"),
        }[moment]
        patch.setattr(f"{owner}.{name}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.save_pretrained(tmp_path, save_original_format=True)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "kimi_k3"
    if moment != "weights":
        same_weights(KimiK3ForCausalLM.from_pretrained(tmp_path), model)
    # Nothing of it is left in the model or, after the next save, in the directory.
    model.save_pretrained(tmp_path)
    assert "model.embed_tokens.weight" in stored(tmp_path)
    model.save_pretrained(tmp_path, save_original_format=True)
    assert "language_model.model.embed_tokens.weight" in stored(tmp_path)
    assert not list(tmp_path.glob("*.partial"))


def test_a_model_that_no_release_can_hold_is_refused_before_anything_is_written(small_model, tmp_path):
    model = small_model()
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(ValueError, match="bitsandbytes"):
        model.save_pretrained(tmp_path / "out", save_original_format=True)
    del model.config.quantization_config
    with pytest.raises(ValueError, match="push_to_hub=True"):
        model.save_pretrained(tmp_path / "out", save_original_format=True, push_to_hub=True)
    assert not (tmp_path / "out").exists()


def test_other_processes_write_nothing(small_model, tmp_path):
    for original in (False, True):
        small_model().save_pretrained(tmp_path, is_main_process=False, save_original_format=original)
    assert not list(tmp_path.iterdir())


# Devices


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}], ids=["auto", "cpu", "dict"])
def test_device_map(release, device_map):
    path, model = release()
    loaded = KimiK3ForCausalLM.from_pretrained(path, dtype=torch.float32, device_map=device_map)
    same_weights(loaded.cpu(), model)


def decode(model: KimiK3ForCausalLM) -> torch.Tensor:
    """Logits of a prompt, then of two cached steps, on the CPU."""
    mask = torch.ones(2, 26, dtype=torch.long)
    mask[1, :5] = 0
    ids = torch.cat([IDS, IDS.flip(-1)])
    with torch.no_grad():
        output = model(ids, attention_mask=mask[:, :24], use_cache=True)
        logits = [output.logits]
        for step in (25, 26):
            output = model(ids[:, step - 25 : step - 24], attention_mask=mask[:, :step], cache=output.cache)
            logits.append(output.logits)
    return torch.cat(logits, dim=1).cpu()


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("layout", ["own", "released", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_disk_offload(release, small_model, tmp_path, relative_error, layout, dtype):
    if layout == "own":
        path = tmp_path / "own"
        small_model().save_pretrained(path)
    else:
        path, _ = release(packed=layout == "mxfp4")
    model = KimiK3ForCausalLM.from_pretrained(path, dtype=dtype)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    offloaded = KimiK3ForCausalLM.from_pretrained(
        path, dtype=dtype, device_map="auto", max_memory={"cpu": size // 2}, offload_folder=tmp_path / "offload"
    )
    places = set(offloaded.hf_device_map.values())
    assert places == {"cpu", "disk"}
    kinds = {type(layer.self_attn) for layer in offloaded.model.layers if is_offloaded(layer)}
    assert len(kinds) == 2, "both kinds of mixers must lie on disk"
    # Equal but for the order of additions where a matrix is read off by its action.
    assert relative_error(decode(offloaded), decode(model)) < (1e-6 if dtype == torch.float32 else 1e-3)

    for original in (False, True):
        target = tmp_path / f"saved-{original}"
        offloaded.save_pretrained(target, save_original_format=original)
        same_weights(KimiK3ForCausalLM.from_pretrained(target), model)


def is_offloaded(module: torch.nn.Module) -> bool:
    return any(parameter.device.type == "meta" for parameter in module.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_layers_on_several_devices(release, relative_error, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    path, _ = release()
    model = KimiK3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = decode(model)
    places = {f"model.layers.{index}": ("cpu", 0)[index % 2] for index in range(5)}
    rest = ("model.embed_tokens", "model.norm", "model.output_attn_res_norm", "model.output_attn_res_proj", "lm_head")
    spread = accelerate.dispatch_model(model, {**places, **dict.fromkeys(rest, 0)}, main_device="cpu")
    assert relative_error(decode(spread), expected) < 1e-5
    part = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) // 3
    offloaded = KimiK3ForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        device_map="auto",
        max_memory={0: part, "cpu": part},
        offload_folder=tmp_path / "offload",
    )
    assert set(offloaded.hf_device_map.values()) == {0, "cpu", "disk"}
    assert relative_error(decode(offloaded), expected) < 1e-5
