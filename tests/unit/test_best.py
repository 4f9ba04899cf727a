# SPDX-License-Identifier: Apache-2.0
"""The best evaluation and the end of a run without a better one, over resumes as well."""

import dataclasses
import os
import shutil
import signal

import numpy as np
import pytest
from toy_problem import ToyData, train

from lora_tune.checkpoint.files import read_meta
from lora_tune.errors import InputError
from lora_tune.training.best import Best, Criterion
from lora_tune.training.metrics import read_rows

VALUES = [0.9, 0.8, 0.85, 0.8, 0.79, 0.81, 0.82, 0.83, 0.7, 0.6]


def judged(criterion, values):
    best, found = None, []
    for step, value in enumerate(values, start=1):
        best = criterion.judge(best, step, {criterion.metric: value, "eval_other": -value})
        found.append((best, criterion.ends(best)))
    return found


@pytest.mark.parity
@pytest.mark.parametrize("metric", ["eval_loss", "eval_a_accuracy"])
@pytest.mark.parametrize("threshold", [0.0, 0.15])
@pytest.mark.parametrize("seed", range(4))
def test_it_ends_when_the_callback_of_transformers_does(metric, threshold, seed):
    transformers = pytest.importorskip("transformers")
    values = np.random.default_rng(seed).random(40).round(2).tolist()
    callback = transformers.EarlyStoppingCallback(3, threshold)
    greater = not metric.endswith("loss")
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    arguments = transformers.TrainingArguments(
        "unused", metric_for_best_model=metric, greater_is_better=greater, use_cpu=True
    )
    expected = []
    for value in values:
        # In this order in its Trainer as well: the callback, then the state.
        callback.on_evaluate(arguments, state, control, metrics={metric: value})
        best = state.best_metric
        if best is None or (value > best if greater else value < best):
            state.best_metric = value
        expected.append((state.best_metric, control.should_training_stop))
    # That flag stays up.
    found = judged(Criterion(metric, 3, threshold), values)
    ended = np.maximum.accumulate([ends for _, ends in found]).tolist()
    assert list(zip([best.value for best, _ in found], ended, strict=True)) == expected
    assert True in ended


def test_the_first_of_equal_ones_stays_the_best():
    *_, (best, _) = judged(Criterion("eval_loss"), [0.5, 0.4, 0.4, 0.6])
    assert best == Best("eval_loss", 0.4, 2, stale=2)


def test_another_figure_begins_anew():
    before = Best("eval_loss", 0.1, 7, stale=9)
    criterion = Criterion("eval_accuracy", patience=2)
    assert not criterion.ends(before)
    assert criterion.judge(before, 8, {"eval_accuracy": 0.3}) == Best("eval_accuracy", 0.3, 8)


def scripted(values, start=0):
    """Evaluations with these losses, after every second step; the first is that of step 0."""
    told = iter([9.0, *values] if not start else values[start // 2 :])
    return lambda *_: {"eval_loss": next(told)}


def run(folder, *, start=0, patience=3, threshold=0.0, keep=True, **options):
    return train(
        folder,
        total_steps=20,
        eval_every=2,
        eval_fn=scripted(VALUES, start),
        criterion=Criterion("eval_loss", patience, threshold, keep),
        **options,
    )


def rows_of(folder):
    clock = ("seconds", "tokens_per", "mfu", "input_bound", "bytes")
    return [
        {key: value for key, value in row.items() if not any(word in key for word in clock)}
        for row in read_rows(folder / "metrics.jsonl")
    ]


def test_a_run_ends_and_goes_no_further_when_started_again(tmp_path):
    outcome = run(tmp_path)
    assert (outcome.step, outcome.interrupted) == (16, None)
    assert outcome.stopped_early == (
        "3 evaluations in a row were no better in eval_loss, which was best after step 10: 0.7900"
    )
    steps = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert steps == [10, 16], "the best, written because it was, and the last"
    assert read_meta(outcome.checkpoint).best == dataclasses.asdict(
        Best("eval_loss", 0.79, 10, stale=3)
    )
    before = rows_of(tmp_path)
    again = run(tmp_path, start=16)
    assert (again.step, again.checkpoint, rows_of(tmp_path)) == (16, None, before)
    assert again.stopped_early == outcome.stopped_early
    # With more patience it goes on, and the better ones that come count.
    assert run(tmp_path, start=16, patience=4).step == 20
    assert rows_of(tmp_path)[: len(before)] == before


@pytest.mark.parametrize("crash", [5, 11, 13, 15])
def test_a_killed_run_ends_where_it_would_have(tmp_path, crash):
    whole = run(tmp_path / "whole", save_every=3)
    with pytest.raises(InputError, match="the data ended after step"):
        run(tmp_path / "killed", save_every=3, stop_after=crash)
    saved = max(int(path.name) for path in (tmp_path / "killed" / "checkpoints").iterdir())
    outcome = run(tmp_path / "killed", save_every=3, start=saved)
    assert (outcome.step, outcome.stopped_early) == (whole.step, whole.stopped_early)
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")
    assert read_meta(outcome.checkpoint) == read_meta(whole.checkpoint)


def test_patience_is_counted_by_the_threshold_and_null_never_ends(tmp_path):
    assert run(tmp_path / "a", threshold=0.2).step == 8
    outcome = run(tmp_path / "b", patience=None, keep=False)
    assert (outcome.step, outcome.stopped_early) == (20, None)
    assert [path.name for path in (tmp_path / "b" / "checkpoints").iterdir()] == ["20"]


def test_what_is_kept_is_the_best_of_what_is_there(tmp_path):
    """The best checkpoint is gone, as after a resume from another folder: the next is kept."""
    with pytest.raises(InputError, match="the data ended after step"):
        run(tmp_path, save_every=3, stop_after=13, keep=True)
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [10, 12]
    shutil.rmtree(tmp_path / "checkpoints" / "10")
    told = iter([0.82, 0.805, 0.9, 0.95])
    outcome = train(
        tmp_path,
        total_steps=20,
        eval_every=2,
        eval_fn=lambda *_: {"eval_loss": next(told)},
        criterion=Criterion("eval_loss", 9, keep=True),
    )
    steps = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert steps == [16, 20], "0.805 is better than 0.81 of step 12, which was the best left"
    best = Best.of(read_meta(outcome.checkpoint).best)
    assert best == Best("eval_loss", 0.79, 10, stale=5), "patience goes on from the best of all"


def test_a_record_of_another_version_is_read_as_far_as_it_is_known():
    record = {"metric": "eval_loss", "value": 0.5, "step": 3, "stale": 1, "unknown": 2}
    assert Best.of(record) == Best("eval_loss", 0.5, 3, 1)


def test_a_run_that_makes_all_its_steps_is_not_called_short(tmp_path):
    """Patience ends with the last evaluation; started again, nothing else is said."""
    values = [0.5, *[0.9] * 9]
    for start in (0, 20):
        outcome = train(
            tmp_path,
            total_steps=20,
            eval_every=2,
            eval_fn=scripted(values, start),
            criterion=Criterion("eval_loss", 9),
        )
        assert (outcome.step, outcome.stopped_early) == (20, None)


def test_the_last_step_of_a_run_that_ends_early_is_logged(tmp_path):
    assert run(tmp_path, log_every=5).step == 16
    logged = [row["step"] for row in rows_of(tmp_path) if "loss" in row]
    assert logged == [1, 5, 10, 15, 16]


def test_at_a_signal_the_checkpoint_is_written_before_the_evaluation(tmp_path):
    class Interrupted(ToyData):
        def batch(self, step):
            if step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().batch(step)

    def evaluate(*_):
        seen.append(any(tmp_path.glob("checkpoints/*")))
        return {"eval_loss": [9.0, 0.9, 0.8][len(seen) - 1]}

    seen: list[bool] = []
    options = {"total_steps": 20, "eval_every": 2, "criterion": Criterion("eval_loss", 3)}
    outcome = train(tmp_path, eval_fn=evaluate, data=Interrupted(), **options)
    assert (outcome.step, outcome.interrupted) == (4, "SIGTERM")
    assert seen == [False, False, True]
    meta = read_meta(outcome.checkpoint)
    assert meta.evaluation == {"eval_loss": 0.8}
    assert Best.of(meta.best) == Best("eval_loss", 0.8, 4)
    # What was added is part of a checkpoint that can be read.
    assert run(tmp_path, start=4).step == 16
