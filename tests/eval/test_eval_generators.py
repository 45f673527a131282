"""Every generator: exact lengths, needles where they were asked for, answers found once and by nothing else."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from kimi3_eval.build import join, remembered_ids
from kimi3_eval.errors import Refusal
from kimi3_eval.tasks import TASKS, documents, found
from kimi3_eval.tokens import encoder

KINDS = ["byte", "bpe", "bpe-bos", "metaspace"]
NIAH = [task for task in TASKS if task.startswith("niah_")]

UNITS = {
    "niah_single_1": "noise",
    "niah_multikey_2": "line",
    "niah_multikey_3": "line",
    "vt": "noise",
    "fwe": "step",
    "mqar": "step",
    "stack": "step",
}


def prompt_of(doc: dict) -> str:
    return join(doc["input"], doc["gen_prefix"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", list(TASKS))
def test_prompt_and_answer_fit_exactly(task: str, kind: str, tokenizer_dir) -> None:
    """Counted by the whole prompt through the tokenizer; what is left over is less than one haystack unit."""
    tools = encoder(tokenizer_dir(kind))
    for length in (2200, 2600):
        docs = documents(task, [length], [0.0, 1.0], 2, 0, tokenizer_dir(kind))
        assert len(docs) == 4
        for doc in docs:
            ids = tools.whole(prompt_of(doc), special=True)
            assert len(ids) == doc["prompt_tokens"]
            assert doc["length"] == len(ids) + doc["budget"] <= length
            unit = UNITS.get(task, "word")
            bytes_of_unit = {"noise": 95, "line": 130, "word": 30, "step": 60}[unit]
            slack = length - doc["length"]
            assert slack <= bytes_of_unit, f"{slack} tokens left unused"


@pytest.mark.parametrize("kind", ["byte", "bpe", "bpe-bos"])
@pytest.mark.parametrize("task", list(TASKS))
def test_ids_of_pieces_are_the_ids_of_the_prompt(task: str, kind: str, tokenizer_dir) -> None:
    """The builder's ids, which the model gets, are what the tokenizer makes of the finished text."""
    tools = encoder(tokenizer_dir(kind))
    for doc in documents(task, [2000], [0.3, 0.7], 5, 1, tokenizer_dir(kind)):
        ids = remembered_ids(prompt_of(doc))
        assert ids is not None
        assert ids.tolist() == tools.whole(prompt_of(doc), special=True).tolist()


@pytest.mark.parametrize("task", NIAH)
def test_needles_stand_at_the_asked_depth(task: str, tokenizer_dir) -> None:
    """The asked needle starts at the recorded token, and depths are shares of the haystack."""
    tools = encoder(tokenizer_dir("bpe"))
    for doc in documents(task, [2048], [0.0, 0.5, 1.0], 3, 0, tokenizer_dir("bpe")):
        ids = tools.whole(prompt_of(doc), special=True)
        context = doc["input"].split("afterwards.\n", 1)[1].rsplit("\nWhat ", 1)[0]
        for value, position in zip(doc["outputs"], doc["positions"]):
            after = tools.tokenizer.decode(ids[position : position + 150].tolist()).lstrip()
            assert after.startswith("One of the special magic") and f" is: {value}." in after
            if doc["depth"] is not None:
                start = context.rindex("One of the special magic", 0, context.index(value))
                share = start / (len(context) - len(after[: after.index(value)]) - len(value) - 1)
                assert share == pytest.approx(doc["depth"], abs=0.08)


@pytest.mark.parametrize("kind", ["bpe", "metaspace"])
@pytest.mark.parametrize("task", NIAH)
def test_answers_stand_once_and_nothing_else_scores(task: str, kind: str, tokenizer_dir) -> None:
    for doc in documents(task, [1536], [0.5], 4, 3, tokenizer_dir(kind)):
        for value in doc["outputs"]:
            assert doc["input"].count(value) == 1
            assert found(f"it is {value.upper()}.", [value]) == [True]
            rest = prompt_of(doc).replace(value, "")
            assert found(rest, [value]) == [False]
        assert len(set(doc["outputs"])) == len(doc["outputs"])


def test_same_seed_same_bytes_in_another_process_and_order(tokenizer_dir, tmp_path) -> None:
    """Content depends on the specification alone: not on the process's hash seed, tasks or lengths built before."""
    name = tokenizer_dir("bpe")
    tasks = list(TASKS)

    def digest(order: list[str], lengths: list[int]) -> dict[str, str]:
        code = (
            "import sys, json, hashlib\n"
            "from kimi3_eval.tasks import documents\n"
            f"out = {{}}\n"
            f"for task in {order!r}:\n"
            f"    docs = [d for d in documents(task, {lengths!r}, [0.0, 0.5], 2, 7, {name!r}, cache=False)"
            " if d['max_length'] == 1536]\n"
            "    out[task] = hashlib.sha256(json.dumps(docs).encode()).hexdigest()\n"
            "print(json.dumps(out))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "HF_HUB_OFFLINE": "1"}
    here = {
        task: hashlib.sha256(
            json.dumps(documents(task, [1536], [0.0, 0.5], 2, 7, name, cache=False)).encode()
        ).hexdigest()
        for task in tasks
    }
    env["PYTHONHASHSEED"] = "5"
    assert digest(tasks[::-1], [2048, 1536]) == here


def test_seed_and_index_change_the_content(tokenizer_dir) -> None:
    name = tokenizer_dir("bpe")
    for task in TASKS:
        docs = documents(task, [2000], [0.5], 3, 0, name) + documents(task, [2000], [0.5], 3, 1, name)
        assert len({doc["input"] for doc in docs}) == 6


@pytest.mark.parametrize("task", NIAH)
def test_more_depths_leave_the_others_as_they_are(task: str, tokenizer_dir) -> None:
    name = tokenizer_dir("metaspace")
    few = documents(task, [1536], [0.5], 2, 0, name)
    many = documents(task, [1024 + 512, 2048], [0.0, 0.5, 1.0], 2, 0, name)
    assert {doc["input"] for doc in few} <= {doc["input"] for doc in many}


@pytest.mark.parametrize("task", [task for task in TASKS if task != "loss"])
def test_too_short_is_refused_with_the_length_that_does(task: str, tokenizer_dir) -> None:
    name = tokenizer_dir("bpe")
    with pytest.raises(Refusal, match="answer tokens need") as refusal:
        documents(task, [40], [0.5], 2, 0, name)
    enough = int(str(refusal.value).split("need ")[1].split(";")[0])
    assert 40 < enough < 1200
    assert len(documents(task, [enough], [0.5], 2, 0, name)) == 2


def test_second_build_comes_from_disk(tokenizer_dir, monkeypatch) -> None:
    """A second build calls no generator, gives the same documents, and other parameters do not hit the cache."""
    name = tokenizer_dir("bpe")
    first = documents("niah_single_2", [1024], [0.5], 2, 0, name)
    recipe = TASKS["niah_single_2"]
    calls = []
    original = type(recipe).draft
    monkeypatch.setattr(type(recipe), "draft", lambda self, *a: calls.append(a) or original(self, *a))
    assert documents("niah_single_2", [1024], [0.5], 2, 0, name) == first
    assert calls == []
    documents("niah_single_2", [1024], [0.5], 2, 1, name)
    assert calls


def test_each_finished_prompt_is_tokenised_at_most_once(tokenizer_dir, monkeypatch) -> None:
    """With an additive tokenizer only one whole prompt per task and length is tokenised, to prove that it is."""
    tools = encoder(tokenizer_dir("bpe"))
    whole = []
    original = type(tools).whole
    monkeypatch.setattr(type(tools), "whole", lambda self, *a, **k: whole.append(a) or original(self, *a, **k))
    documents("niah_multikey_2", [2048], [0.0, 0.5, 1.0], 4, 11, tokenizer_dir("bpe"), cache=False)
    assert len([a for a in whole if len(a[0]) > 1000]) == 1


def test_own_haystack_is_used_and_named(tokenizer_dir, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("Alpha sentence one. Beta sentence two. " * 3, encoding="utf-8")
    (doc,) = documents("niah_single_2", [1024], [0.5], 1, 0, tokenizer_dir("bpe"), haystack=str(tmp_path))
    assert "Alpha sentence one." in doc["input"] and "Ishmael" not in doc["input"]
    assert doc["haystack"] == str(tmp_path) and doc["haystack_passes"] > 1
    with pytest.raises(Refusal, match="neither a directory"):
        documents("niah_single_2", [1024], [0.5], 1, 0, tokenizer_dir("bpe"), haystack=str(tmp_path / "b.pdf"))
