"""Pages and plots: complete, self-contained, and of what the results hold."""

import base64
import json
import re

import pytest

from kimi3_eval.cli import main
from kimi3_eval.memory import cache_bytes

PNG = b"\x89PNG\r\n\x1a\n"
ARGS = ["--depths", "0,1", "--samples", "1", "--device", "cpu"]


def images(page: str) -> list[bytes]:
    return [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]


@pytest.fixture(scope="module")
def runs(golden, tmp_path_factory, request):
    """Two runs of golden checkpoints: a dense one with columns, and one with experts."""
    base = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIMI3_EVAL_CACHE", str(base / "cache"))
        common = ["--tokenizer", "bytes", "--dtype", "float32", *ARGS]
        tasks = ["--tasks", "niah_single_1,stack,loss", "--lengths", "640,768"]
        dense, moe = str(golden("k3-tiny-dense")), str(golden("k3-tiny-text"))
        columns = ["--hold-back", "softmax-window=64"]
        assert main(["run", dense, *common, *tasks, *columns, "--output", str(base / "dense")]) == 0
        assert main(["run", moe, *common, *tasks, "--output", str(base / "moe")]) == 0
    return base


def test_page_is_whole_and_self_contained(runs) -> None:
    page = (runs / "dense" / "report.html").read_text()
    found = images(page)
    assert len(found) == page.count("<img") >= 5 and all(data.startswith(PNG) for data in found)
    assert {path.read_bytes() for path in (runs / "dense" / "plots").glob("*.png")} == set(found)
    assert not re.search(r"(?:src|href)=\"?(?:https?:|/|\.)", page) and "<script" not in page
    for text in ("niah_single_1", "softmax-window=64", "Loss by position", "Attention residuals", "KDA: half-life"):
        assert text in page


def test_mechanisms_of_a_forward_pass_are_recorded(runs, golden) -> None:
    facts = json.loads((runs / "moe" / "results.json").read_text())["mechanisms"]
    assert set(facts) == {"attn_res", "expert_load", "kda_half_life"}
    for row in facts["attn_res"]:
        assert sum(row["weights"]) == pytest.approx(1, abs=1e-3)
    for row in facts["expert_load"]:
        assert sum(row["share"]) / len(row["share"]) == pytest.approx(1, abs=1e-3)
    layers = [row["layer"] for row in facts["kda_half_life"]]
    assert len(set(layers)) == len(layers)
    assert all(tokens > 0 for row in facts["kda_half_life"] for tokens in row["tokens"])


def test_compare_puts_runs_side_by_side(runs, tmp_path, capsys) -> None:
    assert main(["compare", str(runs / "dense"), str(runs / "moe"), "--output", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "dense softmax-window=64" in page and ">moe<" in page and all(d.startswith(PNG) for d in images(page))
    assert "== moe" in capsys.readouterr().out
    assert main(["compare", str(runs), str(runs / "moe"), "--output", str(tmp_path)]) == 2
    assert main(["compare", str(runs / "moe"), str(runs / "moe"), "--output", str(tmp_path)]) == 2


def test_report_is_made_anew(runs) -> None:
    page = runs / "moe" / "report.html"
    before = page.read_text()
    page.unlink()
    assert main(["report", str(runs / "moe")]) == 0
    assert page.read_text() == before


def test_dry_run_prints_the_plan_and_loads_nothing(llama_dir, tmp_path, capsys, monkeypatch) -> None:
    import kimi3_eval.model

    monkeypatch.setattr(kimi3_eval.model.Kimi3LM, "__init__", lambda *a, **k: pytest.fail("the model was loaded"))
    run = ["run", llama_dir, "--tasks", "niah_single_1", "--lengths", "512", *ARGS, "--output", str(tmp_path / "out")]
    assert main([*run, "--dry-run"]) == 0
    error = capsys.readouterr().err
    assert "2 prompts" in error and "memory: weights" in error and not (tmp_path / "out").exists()
    monkeypatch.setattr("kimi3_eval.memory.available_bytes", lambda device: 1000)
    assert main(run) == 2
    assert "1000 B are free" in capsys.readouterr().err


def test_cache_bytes_are_those_of_a_real_cache(small_model, llama_dir) -> None:
    """Counted from the config, against the tensors that a cache holds after a prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = small_model(0)
    ids = torch.randint(3, 60, (2, 40))
    cache = model(input_ids=ids, use_cache=True).cache
    real = 0
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            for held in (layer.conv_states, layer.recurrent_states):
                states = held.values() if isinstance(held, dict) else held
                real += sum(state.nbytes for state in states if state is not None)
        else:
            real += layer.keys.nbytes + layer.values.nbytes
    assert cache_bytes(model.config, 40, batch=2, item=4) == real
    llama = AutoModelForCausalLM.from_pretrained(llama_dir)
    held = llama(input_ids=ids, use_cache=True).cache
    assert cache_bytes(llama.config, 40, batch=2, item=4) == sum(x.keys.nbytes + x.values.nbytes for x in held.layers)
