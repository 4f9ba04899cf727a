# SPDX-License-Identifier: Apache-2.0
"""The best evaluation of a run, and when to stop looking for a better one.

Names and rules are those of transformers: `metric_for_best_model` with a `greater_is_better` that
follows from it, and the patience and threshold of its `EarlyStoppingCallback`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


def is_better(metric: str, value: float, than: float) -> bool:
    """Whether a figure is better than another: a loss if it is lower, any other if it is higher."""
    return value < than if metric.endswith("loss") else value > than


@dataclass(frozen=True)
class Best:
    """The best evaluation so far.

    Attributes:
      metric: the figure that decides.
      value: of it.
      step: finished steps before that evaluation.
      stale: evaluations in a row, up to the newest, that were not better by the threshold.
    """

    metric: str
    value: float
    step: int
    stale: int = 0

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Best":
        """From the record in a checkpoint; of one of another version, what is known here."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in record.items() if name in known})


@dataclass(frozen=True)
class Criterion:
    """What makes an evaluation the best, and a run end early.

    Attributes:
      metric: the figure that decides.
      patience: evaluations in a row without a better one after which the run ends; None never.
      threshold: by how much an evaluation has to be better to end such a row.
      keep: whether every evaluation that is the best so far is worth a checkpoint.
    """

    metric: str = "eval_loss"
    patience: int | None = None
    threshold: float = 0.0
    keep: bool = False

    def judge(self, best: Best | None, step: int, figures: Mapping[str, float]) -> Best:
        """The best evaluation once that after `step` is in; the first of equal ones stays."""
        value = figures[self.metric]
        if best is None or best.metric != self.metric:
            return Best(self.metric, value, step)
        better = is_better(self.metric, value, best.value)
        enough = better and abs(value - best.value) > self.threshold
        stale = 0 if enough else best.stale + 1
        value, step = (value, step) if better else (best.value, best.step)
        return Best(self.metric, value, step, stale)

    def ends(self, best: Best | None) -> bool:
        """Whether the run ends early."""
        if best is None or best.metric != self.metric or self.patience is None:
            return False
        return best.stale >= self.patience
