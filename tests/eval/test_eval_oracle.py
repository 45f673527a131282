"""Scripted models through the whole harness: the plumbing gives 1, 0, and the step where the window ends."""

import json
from pathlib import Path

import pytest

from kimi3_eval.plan import Plan
from kimi3_eval.run import execute, open_directory
from kimi3_eval.tasks import TASKS

RULER = tuple(task for task in TASKS if task != "loss")


@pytest.fixture
def make_plan(llama_dir):
    def make(**changes) -> Plan:
        values = {
            "model": llama_dir,
            "tokenizer": llama_dir,
            "tasks": ("niah_single_1",),
            "foreign": (),
            "lengths": (1024,),
            "depths": (0.0, 0.5, 1.0),
            "samples": 2,
            "seed": 0,
        }
        return Plan(**{**values, **changes})

    return make


def run(plan: Plan, output: Path, lm) -> dict:
    open_directory(output, plan)
    results = execute(plan, output, lm)
    assert results is not None
    return results


@pytest.mark.parametrize(("right", "expected"), [(True, 1.0), (False, 0.0)])
def test_right_and_wrong_answers_score_one_and_zero(right, expected, make_plan, oracle, tmp_path) -> None:
    plan = make_plan(tasks=RULER, lengths=(1536, 2048), depths=(0.0, 1.0))
    results = run(plan, tmp_path / "run", oracle(plan.tokenizer, right=right))
    tasks = results["columns"]["full"]["tasks"]
    assert list(tasks) == list(RULER)
    for row in tasks.values():
        assert row["score"] == expected and row["n"] == 8
        assert [(cell["length"], cell["score"], cell["n"]) for cell in row["by_length"]] == [
            (1536, expected, 4),
            (2048, expected, 4),
        ]
        assert all(cell["score"] == expected for cell in row["by_depth"] if cell["n"])
        low, high = row["interval"]
        assert low <= expected <= high and high - low < 0.4
    lm_eval = results["lm_eval"]["results"]
    assert {name: lm_eval[f"kimi3_{name}"]["score,none"] for name in RULER} == dict.fromkeys(RULER, expected)


def test_a_window_gives_a_step(make_plan, oracle, tmp_path) -> None:
    """A model that sees the last W tokens finds exactly the needles that begin there."""
    window = 600
    plan = make_plan(lengths=(512, 1024), depths=tuple(i / 10 for i in range(11)), samples=1)
    results = run(plan, tmp_path / "run", oracle(plan.tokenizer, window=window))
    row = results["columns"]["full"]["tasks"]["niah_single_1"]
    docs = [json.loads(line)["doc"] for line in open(tmp_path / "run" / "samples_kimi3_niah_single_1.jsonl")]
    expected = {
        (doc["max_length"], doc["depth"]): float(doc["prompt_tokens"] - doc["positions"][0] <= window) for doc in docs
    }
    assert {(cell["length"], cell["depth"]): cell["score"] for cell in row["cells"]} == expected
    assert row["by_length"][0]["score"] == 1.0
    long = [cell["score"] for cell in row["cells"] if cell["length"] == 1024]
    assert long == sorted(long) and long[0] == 0.0 and long[-1] == 1.0


def test_columns_stand_side_by_side(make_plan, oracle, tmp_path) -> None:
    """Each column runs the same prompts, has answers of its own in the store, and resumes."""
    plan = make_plan(depths=(0.0, 1.0), hold_back=("softmax-window=500",))
    lm = oracle(plan.tokenizer)
    results = run(plan, tmp_path / "run", lm)
    assert list(results["columns"]) == ["full", "softmax-window=500"]
    scores = [
        [cell["score"] for cell in results["columns"][name]["tasks"]["niah_single_1"]["by_depth"]]
        for name in results["columns"]
    ]
    assert scores == [[1.0, 1.0], [0.0, 1.0]]
    assert len(lm.answered) == 8 and lm.window is None
    again = oracle(plan.tokenizer)
    assert run(plan, tmp_path / "run", again)["columns"] == results["columns"] and again.answered == []
    assert (tmp_path / "run" / "samples_kimi3_niah_single_1__softmax-window-500.jsonl").is_file()


def test_interrupted_run_resumes_without_asking_again(make_plan, oracle, tmp_path) -> None:
    """Killed after seven answers, then resumed: the rest is asked once, results equal an uninterrupted run's."""
    plan = make_plan(tasks=("niah_single_1", "niah_multiquery"), depths=(0.0, 0.5, 1.0), samples=3)
    output = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(plan, output, oracle(plan.tokenizer, window=700, fail_after=7))
    with (output / "answers" / "rank0.jsonl").open("a") as handle:
        handle.write('{"key": "torn')
    second = oracle(plan.tokenizer, window=700)
    resumed = run(plan, output, second)
    assert len(second.answered) == 18 - 7 and resumed["time"]["answers_reused"] == 7
    whole = run(plan, tmp_path / "whole", oracle(plan.tokenizer, window=700))
    assert resumed["columns"] == whole["columns"]
    third = oracle(plan.tokenizer)
    assert run(plan, output, third)["columns"] == whole["columns"]
    assert third.answered == []


def test_another_model_does_not_get_these_answers(make_plan, oracle, llama_dir, tmp_path) -> None:
    import shutil

    plan = make_plan()
    run(plan, tmp_path / "run", oracle(plan.tokenizer))
    other = tmp_path / "other"
    shutil.copytree(llama_dir, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    record = tmp_path / "run" / "run.json"
    content = json.loads(record.read_text())
    content["plan"]["model"] = str(other)
    record.write_text(json.dumps(content))
    lm = oracle(plan.tokenizer, right=False)
    results = run(make_plan(model=str(other)), tmp_path / "run", lm)
    assert len(lm.answered) == 6
    assert results["columns"]["full"]["tasks"]["niah_single_1"]["score"] == 0.0


def test_results_record_what_made_them(make_plan, oracle, tmp_path) -> None:
    plan = make_plan(tasks=("niah_single_2",))
    results = run(plan, tmp_path / "run", oracle(plan.tokenizer))
    assert results["schema"] == 1
    assert results["haystack"]["name"] == "moby-dick"
    assert {"torch", "transformers", "lm_eval", "kimi3_eval"} <= set(results["versions"])
    assert results["plan"]["seed"] == 0 and results["model"]["fingerprint"] and results["tokenizer"]["fingerprint"]
    assert not list((tmp_path / "run").glob("*.tmp"))
    (sample, *_) = [json.loads(line) for line in open(tmp_path / "run" / "samples_kimi3_niah_single_2.jsonl")]
    assert sample["arguments"][0][0].endswith(sample["doc"]["gen_prefix"]) and sample["resps"]
