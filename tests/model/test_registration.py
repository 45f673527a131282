"""What `import modeling_kimi3` registers: Auto classes and pipelines in a fresh process, on every kind of directory.

Each case runs in a process of its own that nothing was imported into before, with no input to answer a prompt from.
"""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from modeling_kimi3 import KimiK3ByteTokenizer, KimiK3Config, KimiK3ForCausalLM

ROOT = Path(__file__).parents[2]

LOAD = """
import importlib, json, sys
import modeling_kimi3
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

path, reference = sys.argv[1], load_file(sys.argv[2])

def name(thing):
    return type(thing).__module__.split(".")[0] + "." + type(thing).__name__

def distance(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()

found = {}
for trust in json.loads(sys.argv[3]):
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    base = AutoModel.from_pretrained(path, dtype=torch.float32, trust_remote_code=trust)
    causal = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=trust)
    found.setdefault("names", []).append([name(config), name(base), name(causal), name(tokenizer)])

ids = reference["ids"][None]
with torch.no_grad():
    logits = causal(ids).logits[0]
    found["logits"] = distance(logits, reference["logits"])
    found["base"] = distance(causal.lm_head(base(ids).last_hidden_state)[0], logits)
    ours = modeling_kimi3.KimiK3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    found["ours"] = distance(ours(ids).logits[0], logits)

prompt = "abc de ab"
generator = pipeline("text-generation", model=path, dtype=torch.float32, device="cpu")
settings = {"max_new_tokens": 6, "do_sample": False}
tokens = generator(prompt, return_tensors=True, **settings)[0]["generated_token_ids"]
inputs = tokenizer(prompt, return_tensors="pt")
expected = causal.generate(**inputs, **settings)[0].tolist()
found["pipeline"] = [name(generator.model), name(generator.tokenizer), tokens == expected]
found["new"] = len(expected) - inputs.input_ids.shape[1]
found["text"] = generator(prompt, **settings)[0]["generated_text"].startswith(prompt)

importlib.reload(modeling_kimi3)
found["again"] = name(AutoConfig.from_pretrained(path))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def run():
    """Runs a script in a new interpreter, away from the repository; returns its process."""

    def start(script, *arguments):
        roots = [ROOT, ROOT / "kernels", ROOT / "conversion", ROOT / "eval"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(map(str, roots))}
        return subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)],
            cwd=os.path.sep,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return start


@pytest.fixture
def linked(golden, tmp_path):
    """A directory with a golden checkpoint's files, to which a tokenizer can be added, and its reference values."""

    def make(name):
        path = tmp_path / "checkpoint"
        path.mkdir()
        for file in golden(name).iterdir():
            (path / file.name).symlink_to(file)
        expected = load_file(golden(name) / "expected.safetensors")
        save_file({"ids": expected["a.ids"], "logits": expected["a.logits"]}, tmp_path / "reference.safetensors")
        return path

    return make


@pytest.fixture
def saved(tmp_path, randomize):
    """A small model written by this package, in its own layout or in the released one, and its reference values."""

    def make(original):
        path = tmp_path / "checkpoint"
        model = KimiK3ForCausalLM(KimiK3Config.from_preset("tiny-1m")).eval()
        randomize(model, 0)
        model.save_pretrained(path, save_original_format=original)
        ids = torch.arange(40) * 7 % 256
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        save_file({"ids": ids, "logits": logits.contiguous()}, tmp_path / "reference.safetensors")
        return path

    return make


def add_released_tokenizer(path, special_id):
    """256 single bytes and 256 special ids, with a file that points to remote code as the released one does."""
    lines = [base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)]
    (path / "tiktoken.model").write_bytes(b"".join(lines))
    settings = {
        "added_tokens_decoder": {str(special_id): {"content": "[EOS]", "special": True}},
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "eos_token": "[EOS]",
        "tokenizer_class": "TikTokenTokenizer",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def add_plain_tokenizer(path):
    characters = Tokenizer(models.WordLevel({character: index for index, character in enumerate("?abcde ")}, "?"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=characters).save_pretrained(path)


def load(run, path, trust=(None, False, True)):
    process = run(LOAD, path, path.parent / "reference.safetensors", json.dumps(trust))
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1]), process.stderr


def check(found, stderr, tokenizer):
    """What holds wherever our classes are chosen."""
    names = ["modeling_kimi3.KimiK3Config", "modeling_kimi3.KimiK3Model", "modeling_kimi3.KimiK3ForCausalLM", tokenizer]
    assert found["names"] == [names] * 3
    assert found["pipeline"] == [names[2], tokenizer, True]
    assert found["new"] > 0
    assert found["again"] == names[0]
    assert found["logits"] < 1e-4
    assert found["base"] == found["ours"] == 0
    for complaint in ("UNEXPECTED", "MISSING", "trust_remote_code", "not supported", "do not match"):
        assert complaint not in stderr


def test_released_directory(run, linked):
    path = linked("k3-tiny-text")
    assert "auto_map" in json.loads((path / "config.json").read_text())
    add_released_tokenizer(path, 258)
    found, stderr = load(run, path)
    check(found, stderr, "modeling_kimi3.KimiK3Tokenizer")
    assert found["text"]


@pytest.mark.parametrize("original", [False, True], ids=["own-layout", "released-layout"])
def test_directory_saved_by_this_package(run, saved, original):
    path = saved(original)
    KimiK3ByteTokenizer().save_pretrained(path)
    found, stderr = load(run, path)
    check(found, stderr, "modeling_kimi3.KimiK3ByteTokenizer")
    assert found["text"]


def test_small_dense_directory(run, linked):
    path = linked("k3-tiny-dense")
    assert json.loads((path / "config.json").read_text())["model_type"] == "kimi_linear"
    add_plain_tokenizer(path)
    found, stderr = load(run, path)
    check(found, stderr, "transformers.TokenizersBackend")


def test_kimi_linear_directory_stays_native(run, linked):
    path = linked("kimi-linear-tiny")
    KimiK3ByteTokenizer().save_pretrained(path)
    # With trust_remote_code=True transformers runs the directory's own code, as for any model that it ships itself.
    found, _ = load(run, path, trust=(None, False))
    names = ["KimiLinearConfig", "KimiLinearModel", "KimiLinearForCausalLM"]
    names = [f"transformers.{name}" for name in names] + ["modeling_kimi3.KimiK3ByteTokenizer"]
    assert found["names"] == [names] * 2
    assert found["pipeline"] == [*names[2:], True]
    assert found["new"] > 0
    assert found["again"] == names[0]
    # Both within what the golden values were confirmed to.
    assert found["logits"] < 1e-4
    assert found["ours"] < 1e-4


NATIVE = """
import sys, types
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.auto import configuration_auto, modeling_auto, tokenization_auto

class KimiK3Config(PreTrainedConfig):
    model_type = "kimi_k3"

class KimiK3ForCausalLM(PreTrainedModel):
    config_class = KimiK3Config

# As if a later transformers had it: the tables name it, and its module is there.
module = types.ModuleType("transformers.models.kimi_k3")
module.KimiK3Config, module.KimiK3ForCausalLM = KimiK3Config, KimiK3ForCausalLM
sys.modules[module.__name__] = module
configuration_auto.CONFIG_MAPPING_NAMES["kimi_k3"] = "KimiK3Config"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["kimi_k3"] = "KimiK3ForCausalLM"
tokenization_auto.TOKENIZER_MAPPING_NAMES["kimi_k3"] = "TokenizersBackend"
register_checkpoint_conversion_mapping("kimi_k3", [WeightRenaming("embed_tokens", "elsewhere")])
path = sys.argv[1]
assert type(AutoConfig.from_pretrained(path)) is KimiK3Config

import importlib
import modeling_kimi3
importlib.reload(modeling_kimi3)
assert type(AutoConfig.from_pretrained(path)) is modeling_kimi3.KimiK3Config
assert type(AutoModelForCausalLM.from_pretrained(path)) is modeling_kimi3.KimiK3ForCausalLM
assert type(AutoTokenizer.from_pretrained(path)) is modeling_kimi3.KimiK3Tokenizer
"""


def test_ours_wins_over_a_native_kimi_k3_with_one_notice(run, saved):
    path = saved(True)
    add_released_tokenizer(path, 258)
    process = run(NATIVE, path)
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("transformers has its own kimi_k3") == 1


VERSIONS = """
import importlib.metadata, sys

found = {"torch": "2.13.0", "transformers": "5.24.0", sys.argv[1]: sys.argv[2]}
importlib.metadata.version = found.__getitem__
# Whatever is wrong with them, nothing of them may be touched before the sentence.
sys.modules["torch"] = sys.modules["transformers"] = None
try:
    import modeling_kimi3
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "package, version", [("transformers", "5.23.0"), ("transformers", "6.0.0"), ("torch", "2.8.0")]
)
def test_an_unsupported_version_stops_the_import(run, package, version):
    process = run(VERSIONS, package, version)
    assert process.returncode == 0, process.stderr
    assert process.stdout == (
        "modeling_kimi3 works with Python >=3.11, torch >=2.9 and transformers >=5.24,<6, "
        f"but {package} {version} is installed.\n"
    )
