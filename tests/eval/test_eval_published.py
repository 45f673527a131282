"""Agreement with lm-eval's port of RULER: same instruction, question and answer start, same scores for same answers.

Where the port departs from the published benchmark, the published form is expected here.
"""

import re

import pytest

from kimi3_eval.build import join
from kimi3_eval.tasks import documents, score


@pytest.fixture(scope="module")
def port():
    """lm-eval's RULER modules; their needle module wants nltk, whose download on import is not needed here."""
    nltk = pytest.importorskip("nltk")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk, "download", lambda *a, **k: False)
        from lm_eval.tasks.ruler import common_utils, cwe_utils, fwe_utils, niah_utils, vt_utils
    return {"niah": niah_utils, "vt": vt_utils, "cwe": cwe_utils, "fwe": fwe_utils, "score": common_utils}


def singular(template: str) -> str:
    """What the port does to its template when one needle is asked for."""
    for old, new in (("Some", "A"), ("are all", "is"), ("are", "is")):
        template = template.replace(old, new)
    return template


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("niah_single_1", "number"),
        ("niah_single_3", "uuid"),
        ("niah_multikey_1", "number"),
        ("niah_multikey_3", "uuid"),
        ("niah_multivalue", "numbers"),
        ("niah_multiquery", "numbers"),
    ],
)
def test_needle_prompts_follow_the_port(task, kind, port, tokenizer_dir) -> None:
    doc = documents(task, [1536], [0.5], 1, 0, tokenizer_dir("bpe"))[0]
    one = not kind.endswith("s")
    template = singular(port["niah"].TEMPLATE) if one else port["niah"].TEMPLATE
    verb = "is" if one else "are"
    context = doc["input"].split("afterwards.\n", 1)[1].rsplit("\nWhat ", 1)[0]
    query = re.search(r" for (.+) mentioned in the provided text\?$", doc["input"])[1]
    assert doc["input"] == template.format(type_needle_v=kind, context=context, query=query)
    assert doc["gen_prefix"] == f"The special magic {kind} for {query} mentioned in the provided text {verb}"


def test_variable_tracking_follows_the_published_form(port, tokenizer_dir) -> None:
    """The port misspells 'assigned' and drops the space after the colon."""
    doc = documents("vt", [2048], [0.5], 1, 0, tokenizer_dir("bpe"))[0]
    config = port["vt"].CONFIG["variable_tracking"]
    prompt = join(doc["input"], doc["gen_prefix"])
    main = "Memorize and track" + prompt.rsplit("Memorize and track", 1)[1]
    value = re.search(r"assigned the value (\d+), they are: $", main)[1]
    context = main.split("following text.\n\n", 1)[1].split("\nQuestion", 1)[0]
    expected = config["template"] + config["answer_prefix"].replace("assgined", "assigned")
    assert main == expected.format(context=context, query=value, num_v=5)
    assert re.search(r"they are:  (?:[A-Z]{3} ){4}[A-Z]{3}\n\n\n\nMemorize", prompt)


@pytest.mark.parametrize("task", ["cwe", "fwe"])
def test_word_tasks_follow_the_port(task, port, tokenizer_dir) -> None:
    doc = documents(task, [2048], [0.5], 1, 0, tokenizer_dir("bpe"))[0]
    config = port[task].CONFIG
    prompt = join(doc["input"], doc["gen_prefix"])
    start = config["template"].split("{context}")[0]
    main = start + prompt.rsplit(start, 1)[1]
    context = main[len(start) :].split("\nQuestion", 1)[0]
    assert main == (config["template"] + config["answer_prefix"]).format(context=context, query="")
    if task == "cwe":
        example = prompt[: -len(main)]
        assert example.startswith(start) and example.endswith("\n") and config["answer_prefix"] + "1. " in example


def test_scores_agree_on_the_same_answers(port) -> None:
    references = ["1234567", "tall-Tree", "9f"]
    for answer in ("1234567", "TALL-tree and\x0b 9F", "none", "1234567, tall-tree, 9f", " \n"):
        doc = {"outputs": references, "max_length": 4096}
        expected = port["score"].process_results(doc, [answer])["4096"]
        assert score(doc, [answer])["score"] == pytest.approx(expected, abs=1e-12)
