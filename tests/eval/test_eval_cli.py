"""The command line on a real (tiny, random) checkpoint, and every refusal."""

import json
from pathlib import Path

import pytest

from kimi3_eval.cli import main

SMALL = ["--tasks", "niah_single_1", "--lengths", "512,1024", "--depths", "0,1", "--samples", "1", "--device", "cpu"]


def test_run_writes_results(llama_dir, tmp_path, capsys) -> None:
    output = tmp_path / "out"
    assert main(["run", llama_dir, *SMALL, "--output", str(output), "--batch-size", "2"]) == 0
    results = json.loads((output / "results.json").read_text())
    row = results["columns"]["full"]["tasks"]["niah_single_1"]
    assert row["n"] == 4 and 0 <= row["score"] <= 1
    assert results["model"]["type"] == "llama" and results["model"]["parameters"] > 0
    assert "niah_single_1" in capsys.readouterr().out


@pytest.mark.parametrize("checkpoint", ["k3-tiny-dense"])
def test_every_column_runs_on_a_real_k3(checkpoint, golden, tmp_path, capsys) -> None:
    output = tmp_path / "out"
    args = ["--tasks", "niah_single_1", "--lengths", "640", "--depths", "0.5", "--samples", "1", "--tokenizer", "bytes"]
    columns = "softmax-window=64,kda-reset=128,attn-res-newest"
    run = ["run", str(golden(checkpoint)), *args, "--output", str(output), "--dtype", "float32", "--device", "cpu"]
    assert main([*run, "--hold-back", columns]) == 0
    results = json.loads((output / "results.json").read_text())
    assert list(results["columns"]) == ["full", *columns.split(",")]
    answers = [
        json.loads(path.read_text())["resps"][0][0] for path in sorted(output.glob("samples_kimi3_niah_single_1*"))
    ]
    assert len(answers) == 4 and len(set(answers)) > 1
    assert "[kda-reset=128]" in capsys.readouterr().out


def test_chunked_prefill_and_batches_give_the_same_answers(llama_dir, tmp_path) -> None:
    answers = []
    for extra in (["--batch-size", "1"], ["--batch-size", "3", "--prefill-chunk-size", "100"]):
        output = tmp_path / f"out{len(answers)}"
        assert main(["run", llama_dir, *SMALL, "--output", str(output), *extra]) == 0
        rows = [json.loads(line) for line in open(output / "samples_kimi3_niah_single_1.jsonl")]
        answers.append([row["resps"] for row in rows])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("checkpoint", ["k3-tiny-dense", "k3-tiny-text", "k3-moe-bf16", "kimi-linear-tiny"])
def test_golden_checkpoints_run_with_bytes(checkpoint, golden, tmp_path) -> None:
    """Checkpoints in the released layout without a tokenizer run end to end."""
    path = golden(checkpoint)
    output = tmp_path / "out"
    args = ["--tasks", "niah_single_1", "--lengths", "640", "--depths", "0.5", "--samples", "1"]
    assert main(["run", str(path), "--tokenizer", "bytes", *args, "--output", str(output), "--dtype", "float32"]) == 0
    assert json.loads((output / "results.json").read_text())["columns"]["full"]["tasks"]["niah_single_1"]["n"] == 1


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--tasks", "niah_singel_1"], "no task niah_singel_1; near it: niah_single_1"),
        (["--lengths", "8192"], "beyond the model's context of 4096"),
        (["--lengths", "64"], "needs? [0-9]+"),
        (["--lengths", "none"], "--lengths none"),
        (["--depths", "2.5"], "--depths 2.5"),
        (["--depths", "0.5,0.5"], "--depths 0.5,0.5"),
        (["--samples", "0"], "--samples 0"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--dtype", "int3"], "--dtype int3"),
        (["--prefill-chunk-size", "0"], "--prefill-chunk-size 0"),
        (["--haystack", "missing.pdf"], "--haystack missing.pdf"),
        (["--hold-back", "softmax-windows=3"], "--hold-back softmax-windows=3 must be"),
        (["--hold-back", "attn-res-newest"], "has no such mechanism"),
    ],
)
def test_bad_input_is_refused_before_the_model_loads(extra, message, llama_dir, tmp_path, capsys, monkeypatch) -> None:
    import re

    import kimi3_eval.model

    monkeypatch.setattr(kimi3_eval.model.Kimi3LM, "__init__", lambda *a, **k: pytest.fail("the model was loaded"))
    tasks = ["--tasks", "niah_single_2"] if "--haystack" in extra else []
    assert main(["run", llama_dir, *SMALL, *tasks, "--output", str(tmp_path / "out"), *extra]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("kimi3-eval: ") and "\n" not in error
    assert re.search(message, error)
    assert not (tmp_path / "out").exists()


def test_directories_are_refused(llama_dir, tmp_path, capsys) -> None:
    """No checkpoint, no tokenizer, a directory with other files, another run's directory."""
    (tmp_path / "empty").mkdir()
    assert main(["run", str(tmp_path / "empty"), *SMALL]) == 2
    assert "no config.json" in capsys.readouterr().err
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((Path(llama_dir) / "config.json").read_text())
    assert main(["run", str(tmp_path / "bare"), *SMALL]) == 2
    assert "holds no tokenizer" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    assert main(["run", llama_dir, *SMALL, "--output", str(tmp_path / "full")]) == 2
    assert "holds other files" in capsys.readouterr().err
    assert main(["run", llama_dir, *SMALL, "--output", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["run", llama_dir, *SMALL, "--output", str(tmp_path / "run"), "--seed", "3"]) == 2
    assert "belongs to another run (seed 0 there, 3 here)" in capsys.readouterr().err


def test_a_tokenizer_beyond_the_embedding_is_refused(llama_dir, tokenizer_dir, tmp_path, capsys) -> None:
    extra = ["--tokenizer", tokenizer_dir("metaspace")]
    assert main(["run", llama_dir, *SMALL, "--lengths", "1024", *extra, "--output", str(tmp_path / "out")]) == 2
    assert "the model knows only 1300" in capsys.readouterr().err
