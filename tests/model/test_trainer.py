"""transformers' Trainer on a model with experts: resuming, the best checkpoint, evaluation, accumulation, autocast."""

import functools
import math

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from modeling_kimi3 import KimiK3ForCausalLM


def samples(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences in which every token is the one before it plus a step of the sequence's own."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(3, 96, (count, 1), generator=generator)
    step = torch.randint(1, 4, (count, 1), generator=generator)
    ids = (start + step * torch.arange(16)) % 93 + 3
    labels = ids.clone()
    for row in range(count):
        # Unequal numbers of labels, so that a mean of means is not the mean.
        labels[row, : row % 7] = -100
    return [{"input_ids": ids[row], "labels": labels[row]} for row in range(count)]


TRAIN, EVAL = samples(24, 0), samples(6, 1)


class ScoringTrainer(Trainer):
    """Adds a score to each evaluation, so that a test decides which one is the best."""

    scores = iter(())

    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        metrics["eval_score"] = next(self.scores, 0.0)
        # What the base class has passed on already lacks the score.
        self.log({"eval_score": metrics["eval_score"]})
        return metrics


@pytest.fixture
def trainer(tmp_path):
    """A trainer of six steps on the CPU that saves every second one."""

    def make(model, name="run", **settings):
        settings = {
            "max_steps": 6,
            "save_steps": 2,
            "per_device_train_batch_size": 4,
            "learning_rate": 3e-3,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "seed": 0,
            **settings,
        }
        arguments = TrainingArguments(output_dir=str(tmp_path / name), **settings)
        return ScoringTrainer(model=model, args=arguments, train_dataset=TRAIN, eval_dataset=EVAL)

    return make


def losses(trainer: Trainer) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def same_weights(actual: nn.Module, expected: nn.Module) -> None:
    actual, expected = actual.state_dict(), expected.state_dict()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def mark_biases(model: nn.Module) -> None:
    """Training leaves the router's bias alone, so it is moved by hand: a restored one can be told from a new one."""
    for name, value in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            value.add_(0.1)


@pytest.mark.parametrize("shards", [False, True], ids=["one-file", "sharded"])
def test_resuming_goes_on_as_if_never_interrupted(small_model, trainer, monkeypatch, tmp_path, shards):
    if shards:
        save = functools.partialmethod(KimiK3ForCausalLM.save_pretrained, max_shard_size="60KB")
        monkeypatch.setattr(KimiK3ForCausalLM, "save_pretrained", save)
    whole = trainer(small_model(seed=0))
    mark_biases(whole.model)
    whole.train()
    assert len(losses(whole)) == 6 and losses(whole)[6] < losses(whole)[1]
    files = list((tmp_path / "run" / "checkpoint-4").glob("model*.safetensors"))
    assert (len(files) > 1) == shards

    # From other weights, so that whatever is not restored is seen.
    resumed = trainer(small_model(seed=9), "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    for step in (5, 6):
        assert losses(resumed)[step] == losses(whole)[step]
    same_weights(resumed.model, whole.model)


def test_the_best_checkpoint_comes_back_at_the_end(small_model, trainer, tmp_path):
    run = trainer(
        small_model(),
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
    )
    mark_biases(run.model)
    run.scores = iter([1.0, 3.0, 2.0])
    run.train()
    best, last = (tmp_path / "run" / f"checkpoint-{step}" for step in (4, 6))
    assert run.state.best_model_checkpoint == str(best)
    same_weights(run.model, KimiK3ForCausalLM.from_pretrained(best))
    assert not torch.equal(run.model.lm_head.weight, KimiK3ForCausalLM.from_pretrained(last).lm_head.weight)


def test_evaluation(small_model, trainer):
    model = small_model()
    found = trainer(model, per_device_eval_batch_size=6).evaluate()["eval_loss"]
    ids, labels = (torch.stack([sample[key] for sample in EVAL]) for key in ("input_ids", "labels"))
    with torch.no_grad():
        logits = model(ids).logits
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    assert math.isclose(found, expected.item(), rel_tol=1e-5)


def test_accumulated_batches_equal_a_large_one(small_model, trainer, relative_error):
    large, small = small_model(), small_model()
    settings = {"max_steps": 1, "save_strategy": "no", "optim": "sgd", "learning_rate": 0.1}
    one = trainer(large, **settings)
    one.train()
    four = trainer(small, **settings | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4})
    four.train()
    assert math.isclose(losses(one)[1], losses(four)[1], rel_tol=1e-5)
    start = small_model().state_dict()
    for name, value in large.state_dict().items():
        if not torch.equal(value, start[name]):
            assert relative_error(small.state_dict()[name] - start[name], value - start[name]) < 1e-3, name


@pytest.mark.parametrize(
    "settings", [{"gradient_checkpointing": True}, {"bf16": True}], ids=lambda each: next(iter(each))
)
def test_other_ways_to_train_give_the_same_losses(small_model, trainer, settings):
    plain = trainer(small_model(), save_strategy="no")
    plain.train()
    other = trainer(small_model(), save_strategy="no", **settings)
    other.train()
    # bf16 has three digits.
    tolerance = 2e-2 if "bf16" in settings else 1e-5
    for step, loss in losses(plain).items():
        assert math.isclose(losses(other)[step], loss, rel_tol=tolerance)
