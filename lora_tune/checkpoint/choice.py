# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint of a run folder is the best, and reading what was trained from it."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_tune.checkpoint import files
from lora_tune.checkpoint.files import Damaged, Meta
from lora_tune.distributed import any_of, from_first, together
from lora_tune.errors import InputError
from lora_tune.training.best import is_better

OnDamage = Callable[[Path, Exception], None]
_QUESTIONS = "num_exact_match"


@dataclass(frozen=True)
class Chosen:
    """What was trained, of one checkpoint.

    Attributes:
      step: of the checkpoint.
      weights: in the structure that was asked for.
      metric: the figure by which it is the best; None where it is the newest.
    """

    step: int
    weights: Any
    metric: str | None = None


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints of a folder, ascending; none where there is no such folder."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(path.name) for path in found if path.name.isdecimal())


def measured_on(rows: str, eval_sets: tuple[str, ...], num_exact_match: int) -> dict[str, Any]:
    """What figures of evaluations follow from besides the weights, for `Meta.measured`."""
    return {"rows": rows, "eval_sets": list(eval_sets), _QUESTIONS: num_exact_match}


def comparable(metric: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a figure is of the same held-out rows, and questions if it is of these."""
    if metric.endswith("exact_match"):
        return dict(one) == dict(other)
    return {**one, _QUESTIONS: None} == {**other, _QUESTIONS: None}


def ranked(
    folder: Path,
    metric: str,
    *,
    measured: Mapping[str, Any] | None = None,
    damaged: OnDamage | None = None,
) -> list[tuple[int, float]]:
    """Steps and figures of the evaluated checkpoints, the best first, of equal ones the first.

    Args:
      folder: `RUN/checkpoints`.
      metric: the figure that decides.
      measured: what it must have been measured on; None takes that of the newest checkpoint.
      damaged: told of each checkpoint of which nothing can be read.
    """
    metas: dict[int, Meta] = {}
    for step in steps_in(folder):
        path = folder / str(step)
        try:
            metas[step] = files.read_meta(path)
        except Damaged as error:
            if damaged is not None:
                damaged(path, error)
    if not metas:
        return []
    on = metas[max(metas)].measured if measured is None else measured
    found = [
        (step, meta.evaluation[metric])
        for step, meta in metas.items()
        if metric in meta.evaluation and comparable(metric, meta.measured, on)
    ]
    return sorted(found, key=lambda each: each[1], reverse=is_better(metric, 1.0, 0.0))


def read_trained(
    folder: Path | str,
    abstract: Any,
    *,
    metric: str | None = None,
    damaged: OnDamage | None = None,
) -> Chosen | None:
    """Reads what was trained from one checkpoint, the same one in every process.

    Args:
      folder: `RUN/checkpoints`.
      abstract: the trained weights, as for `lora_tune.checkpoint.files.read`.
      metric: the figure by which the best checkpoint is taken, the next best where that is damaged;
        None takes the newest, as where none has been evaluated.
      damaged: told of each checkpoint that is passed over; the default says so and changes nothing
        on disk.

    Returns:
      None where there is no checkpoint.

    Raises:
      InputError: the newest checkpoint is damaged and was to be taken, all are damaged, or the one
        to be taken has other weights.
    """
    folder, damaged = Path(folder).absolute(), damaged or _say
    best: list[int] = []
    with together("read the checkpoints"):
        if metric is not None:
            best = [step for step, _ in ranked(folder, metric, damaged=damaged)]
        steps = steps_in(folder)
    best, steps = from_first([best, steps])
    if not steps:
        return None
    for step in [*best, *(step for step in reversed(steps) if step not in best)]:
        path = folder / str(step)
        try:
            weights, problem = files.read_trained(path, abstract), None
        except Damaged as error:
            weights, problem = None, error
        if not any_of(problem is not None):
            return Chosen(step, weights, metric if step in best else None)
        problem = problem or Damaged("another process cannot read it")
        if metric is None:
            advice = (
                "give the command that trained again, which goes on from the one before"
                if len(steps) > 1
                else "there is no other: train again, into another output_dir"
            )
            raise InputError(f"checkpoint {path} is damaged ({problem}); {advice}")
        damaged(path, problem)
    raise InputError(
        f"no checkpoint in {folder} can be read (steps {steps}); train again, into another "
        "output_dir"
    )


def _say(path: Path, error: Exception) -> None:
    sentence = f"warning: checkpoint {path} is damaged ({error}); it is passed over"
    print(sentence, file=sys.stderr, flush=True)
