"""Symbol sequences for training: answers follow from what stands before them, labels stand at answers only."""

import pytest

from kimi3_eval.tasks import sequences
from kimi3_eval.tasks.sequences import DELIMITER, IGNORE, KINDS, PAD, POP, PUSH, START


@pytest.mark.parametrize("kind", list(KINDS))
def test_rows_have_the_length_and_depend_on_their_number_only(kind) -> None:
    few, many = sequences(kind, 2, 40, 32, seed=1), sequences(kind, 5, 40, 32, seed=1)
    assert many.to_list()[:2] == few.to_list()
    assert sequences(kind, 2, 40, 32, seed=2).to_list() != few.to_list()
    for row in many.to_list():
        assert len(row["input_ids"]) == len(row["labels"]) == 40 and row["input_ids"][0] == START
        assert all(label in (IGNORE, token) for token, label in zip(row["input_ids"], row["labels"]))
        assert any(label != IGNORE for label in row["labels"]) and max(row["input_ids"]) < 32 + 5
        assert all(label == IGNORE for token, label in zip(row["input_ids"], row["labels"]) if token == PAD)


def test_recall_answers_are_the_values_of_the_keys() -> None:
    for row in sequences("mqar", 3, 34, 32).to_list():
        ids, labels = row["input_ids"], row["labels"]
        cut = ids.index(DELIMITER)
        value = dict(zip(ids[1:cut:2], ids[2:cut:2]))
        asked = [i for i, label in enumerate(labels) if label != IGNORE]
        assert len(asked) == len(value) == 8
        assert all(labels[i] == value[ids[i - 1]] for i in asked)


@pytest.mark.parametrize(("kind", "step"), [("copying", 1), ("palindrome", -1)])
def test_lists_come_back_in_order(kind, step) -> None:
    for row in sequences(kind, 3, 21, 16).to_list():
        cut = row["input_ids"].index(DELIMITER)
        items = row["input_ids"][1:cut]
        assert [label for label in row["labels"] if label != IGNORE] == items[::step] and len(items) == 9


def test_pops_give_what_was_pushed_last() -> None:
    for row in sequences("stack", 3, 91, 16, stacks=2).to_list():
        ids, labels = row["input_ids"], row["labels"]
        held: dict[int, list[int]] = {}
        for i in range(1, 91, 3):
            operation, which, value = ids[i : i + 3]
            if operation == PUSH:
                held.setdefault(which, []).append(value)
                assert labels[i : i + 3] == [IGNORE] * 3
            else:
                assert operation == POP and labels[i : i + 3] == [IGNORE, IGNORE, held[which].pop()]
        assert set(labels) != {IGNORE}


def test_impossible_requests_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="kind is 'sorting'"):
        sequences("sorting", 1, 10)
    with pytest.raises(ValueError, match="only 4 keys"):
        sequences("mqar", 1, 60, 8)
    with pytest.raises(ValueError, match="length is 10"):
        sequences("mqar", 1, 10, 32, pairs=8)
