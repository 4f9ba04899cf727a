# SPDX-License-Identifier: Apache-2.0
"""What a run shows: a live line in a terminal, plain lines where there is none."""

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lora_tune.console import Console
from lora_tune.progress import clock
from lora_tune.training.metrics import columns_of

_BAR = (
    TextColumn("step"),
    MofNCompleteColumn(),
    BarColumn(bar_width=None),
    TextColumn("{task.description}"),
    TextColumn("ETA"),
    TimeRemainingColumn(elapsed_when_finished=True, compact=True),
)


class Terminal:
    """Shows rows of `MetricsLog` as progress, loss, tokens per second and time left.

    Args:
      total_steps: the last step of the run.
      start_step: the step that the run goes on from; 0 for a new one.
      stream: where to write. Unless it is a terminal, each row becomes one line of plain text.
    """

    def __init__(
        self, *, total_steps: int, start_step: int = 0, stream: TextIO | None = None
    ) -> None:
        self._console = Console(stream or sys.stdout)
        self._total = total_steps
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(*_BAR, console=self._console)
            self._task = self._bar.add_task("compiling", total=total_steps, completed=start_step)
            self._bar.start()

    def write(self, row: Mapping[str, Any]) -> None:
        """Shows the row of a training step, of an evaluation or of sample answers."""
        if "samples" in row:
            for line in describe_samples(row, total_steps=self._total):
                self.note(line)
        elif "eval_loss" in row:
            self.note(describe(row, total_steps=self._total))
        elif self._bar is None:
            self._print(describe(row, total_steps=self._total))
        else:
            speed = f"loss {row['loss']:.4f}, {_speed(row)}"
            self._bar.update(self._task, completed=row["step"], description=speed)

    def note(self, sentence: str) -> None:
        """Prints one sentence, above the live line where there is one."""
        self._print(sentence)

    def close(self) -> None:
        """Leaves the live line as it stands."""
        if self._bar is not None:
            self._bar.stop()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, emoji=False)


def describe(row: Mapping[str, Any], *, total_steps: int) -> str:
    """One line of plain text for a row, e.g. `step 10/200  loss 1.2345  …`."""
    words = [f"step {row['step']}/{total_steps}"]
    if "eval_loss" in row:
        words.append(f"eval loss {row['eval_loss']:.4f}{_parts(row, 'eval_loss')}")
        accuracy = row.get("eval_accuracy")
        words += [] if accuracy is None else [f"eval accuracy {100 * accuracy:.2f} %"]
        exact = row.get("eval_exact_match")
        words += [] if exact is None else [f"exact match {100 * exact:.2f} %"]
        return "  ".join(words)
    words += [
        f"loss {row['loss']:.4f}{_parts(row, 'loss')}",
        f"grad norm {row['grad_norm']:.3g}",
        f"learning rate {row['learning_rate']:.3g}",
        _speed(row),
    ]
    if row["step"] < total_steps:
        left = (total_steps - row["step"]) * row["seconds_per_step"]
        words.append(f"ETA {clock(left)}")
    if "compile_seconds" in row:
        words.append(f"(compiled in {row['compile_seconds']:.1f} s)")
    return "  ".join(words)


def _parts(row: Mapping[str, Any], figure: str) -> str:
    """The figure of each set and source, e.g. ` (chats 1.2345, facts 0.9876)`; "" without any."""
    told = [f"{name} {row[key]:.4f}" for key, name in columns_of(figure, row).items()]
    return f" ({', '.join(told)})" if told else ""


def describe_samples(row: Mapping[str, Any], *, total_steps: int) -> list[str]:
    """A line for each sample answer, e.g. `before training | prompt | answer: … | …`."""
    step = row["step"]
    when = {0: "before training", total_steps: "after training"}.get(step, f"after step {step}")
    return [
        " | ".join(
            [when, " ".join(sample["prompt"].split())]
            + [f"{name}: {text!r}" for name, text in sample.items() if name != "prompt"]
        )
        for sample in row["samples"]
    ]


def _speed(row: Mapping[str, Any]) -> str:
    return f"{row['tokens_per_second']:,.0f} tokens/s"
