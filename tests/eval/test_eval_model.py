"""The model class: losses by position, and lm-eval's own command line reaching model and tasks."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance

from kimi3_eval.cli import main
from kimi3_eval.model import Kimi3LM
from kimi3_eval.tasks import TASK_DIR
from kimi3_eval.tasks.loss import buckets


def test_buckets_cover_every_position_once() -> None:
    for length in (2, 63, 64, 65, 1000):
        spans = buckets(length)
        assert [p for start, end in spans for p in range(start, end)] == list(range(1, length))


def test_losses_equal_the_model_s_own(llama_dir) -> None:
    """Chunk by chunk through the cache gives the loss of one whole pass."""
    lm = Kimi3LM(llama_dir, device="cpu", prefill_chunk_size=50)
    text = "Call me Ishmael. Some years ago, never mind how long precisely. " * 12
    ids = torch.from_numpy(lm.prompt_ids(text).astype(np.int64))[None]
    request = Instance(request_type="token_losses", doc={}, arguments=(text,), idx=0, metadata=("loss", 0, 1))
    (parts,) = lm.token_losses([request])
    with torch.no_grad():
        logits = lm.model(input_ids=ids).logits[0, :-1].double()
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    expected = [[losses[a - 1 : b - 1].sum().item(), float(b - a)] for a, b in buckets(ids.shape[1])]
    assert np.allclose(parts, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="exceeds the model's context"):
        lm.token_losses([Instance("token_losses", {}, (text * 20,), 0, metadata=("loss", 0, 1))])


def test_loss_task_runs_beside_others(llama_dir, tmp_path, capsys) -> None:
    output = tmp_path / "out"
    run = ["run", llama_dir, "--tasks", "loss,stack", "--lengths", "512", "--depths", "0.5", "--samples", "2"]
    assert main([*run, "--device", "cpu", "--output", str(output)]) == 0
    column = json.loads((output / "results.json").read_text())["columns"]["full"]
    (row,) = column["loss"]["by_length"]
    assert row["n"] == 2 and [part["start"] for part in row["by_position"]] == [1, 64, 128, 256]
    assert row["loss"] == pytest.approx(np.log(1300), rel=0.05)
    assert list(column["tasks"]) == ["stack"]
    assert "loss in nats at 512" in capsys.readouterr().out


def test_lm_eval_s_own_command_line_runs_the_tasks(llama_dir, tmp_path) -> None:
    """Stock model class and stock command, given a task file and the sizes as metadata."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={llama_dir}"]
    command += ["--tasks", str(TASK_DIR / "niah_single_1.yaml"), "--device", "cpu", "--output_path", str(tmp_path)]
    metadata = {"lengths": [512], "depths": [0.5], "samples": 1}
    done = subprocess.run(
        [*command, "--metadata", json.dumps(metadata)], capture_output=True, text=True, env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "kimi3_niah_single_1" in done.stdout
    (written,) = tmp_path.glob("**/results_*.json")
    assert json.loads(written.read_text())["n-samples"]["kimi3_niah_single_1"]["effective"] == 1
