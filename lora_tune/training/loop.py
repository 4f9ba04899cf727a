# SPDX-License-Identifier: Apache-2.0
"""The training loop: next batch, step, tripwires, log, evaluation, checkpoint, in this order.

The first and the last step are logged, and every `log_every`-th. An evaluation is made before the
first step of a new run, after every `eval_every` steps (0: never between) and at the end, and so
are sample answers, after every `sample_every`. A checkpoint is written when due, at the end, after
the step in progress on SIGINT or SIGTERM and, where the `Criterion` says so, after the best
evaluation so far. A run whose evaluations have not become better for long ends early. At a signal
the checkpoint comes first, and an evaluation that is due is added to it.

Evaluations, samples and checkpoints wait for the device; otherwise the numbers of a step are
fetched, checked and logged while the next one runs. No state is saved before its step, and all
before it, passed the tripwires and stand in the log. A checkpoint is written out while training
goes on.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lora_tune.distributed import StopTogether, from_first
from lora_tune.errors import InputError
from lora_tune.machine import COMPILER
from lora_tune.training import signals, tripwires
from lora_tune.training.best import Best, Criterion, is_better
from lora_tune.training.gauges import Gauges
from lora_tune.training.metrics import Writer

Batch = Mapping[str, Any]
State = tuple[Any, Any, Any]
EvalFn = Callable[[Any, Any], Mapping[str, float]]
SampleFn = Callable[[Any, Any], Sequence[Mapping[str, str]]]


class Data(Protocol):
    """Batches that are a function of the step alone."""

    def batches(self, start_step: int) -> Iterator[Batch]:
        """Yields the batches of step start_step + 1, start_step + 2, …"""
        ...

    def position(self, step: int) -> Mapping[str, Any]:
        """Describes, as JSON values, where the data stands after `step` steps."""
        ...

    def planned(self, step: int) -> Mapping[str, int]:
        """The `tokens` and `trained_tokens` of step `step`, over all devices."""
        ...


class Saver(AbstractContextManager["Saver"], Protocol):
    """What the loop needs of `lora_tune.checkpoint.folder.Checkpoints`.

    Leaving it as a context waits until the checkpoint that is being written is whole.
    """

    stopping: str
    """What a run that is asked to stop does, in words."""

    def due(self, step: int) -> bool:
        """Whether to save after this step."""
        ...

    def best_value(self) -> float | None:
        """The figure of the best evaluation in the folder, the same in every process."""
        ...

    def save(
        self,
        step: int,
        state: tuple[Any, Any],
        *,
        position: Mapping[str, Any],
        counts: Mapping[str, int],
        evaluation: Mapping[str, float],
        best: Best | None,
    ) -> Path:
        """Begins to write a checkpoint and returns its folder; the state may then be donated."""
        ...

    def add_evaluation(self, step: int, evaluation: Mapping[str, float], best: Best | None) -> None:
        """Adds to the newest checkpoint what was evaluated after it."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      state: (trainable, opt_state, frozen) after `step` finished steps.
      step: the last finished step.
      counts: `total_tokens` and `total_trained_tokens` of the whole run.
      interrupted: the name of the signal that ended the run early, or None.
      checkpoint: the folder of the last checkpoint that this call wrote, or None.
      stopped_early: one sentence on why the run ended before its last step, if its evaluations had
        not become better for long.
    """

    state: State
    step: int
    counts: Mapping[str, int]
    interrupted: str | None = None
    checkpoint: Path | None = None
    stopped_early: str | None = None


def run(
    *,
    state: State,
    step_fn: jax.stages.Wrapped,
    data: Data,
    place: Callable[[Batch], Any],
    checkpoints: Saver,
    metrics: Writer,
    schedule: Callable[[Any], jax.Array],
    total_steps: int,
    log_every: int,
    seed: int,
    start_step: int = 0,
    counts: Mapping[str, int] | None = None,
    eval_fn: EvalFn | None = None,
    eval_every: int = 0,
    criterion: Criterion | None = None,
    best: Best | None = None,
    sample_fn: SampleFn | None = None,
    sample_every: int = 0,
    adapter_norms: Callable[[Any], Mapping[str, float]] | None = None,
    gauges: Gauges | None = None,
) -> Outcome:
    """Trains from `start_step` to `total_steps`; the module docstring says what happens when.

    Args:
      state: (trainable, opt_state, frozen) pytrees of arrays; the first two are donated.
      step_fn: jitted `(trainable, opt_state, frozen, batch, key) -> (trainable, opt_state, out)`;
        `out` has scalars loss, grad_norm, tokens, trained_tokens, and any others to log; a
        `loss/NAME` that is NaN is left out.
      place: puts a batch of numpy arrays on the devices; the step itself may not transfer anything.
      schedule: the learning rate after so many finished steps, for the log.
      seed: step n gets the key `fold_in(key(seed), n)`.
      counts: `Outcome.counts` of the checkpoint that the run goes on from.
      eval_fn: `(trainable, frozen) -> {"eval_loss": …, …}` over all held-out rows.
      criterion: which evaluation is the best, and when the run ends early; None for the lowest
        `eval_loss` and never. The evaluation before the first step is none of them.
      best: of the checkpoint that the run goes on from.
      sample_fn: `(trainable, frozen) -> [{"prompt": …, "answer": …, …}]`, answers to look at.
      adapter_norms: `trainable -> {name: norm of B}`, for the tripwires; None without adapters.
      gauges: what rows say of the machine; None for the first device and no figures of the model.

    Raises:
      TripwireError: if training has gone wrong.
      InputError: if the data ends early, or the disk does not take a checkpoint or a log line.
    """
    trainable, opt_state, frozen = state
    tripwires.check_trainable(sum(leaf.size for leaf in jax.tree.leaves(trainable)))
    gauges = gauges or Gauges(jax.local_devices()[:1])
    log = _Log(metrics, schedule, total_steps, log_every, counts or {}, gauges)
    evaluate = _Evaluator(eval_fn, log, criterion or Criterion(), best, checkpoints)
    sample = _sampler(sample_fn, log)
    asked_steps, total_steps = total_steps, start_step if evaluate.ends else total_steps
    key_of, stop_together = _step_keys(seed, opt_state), StopTogether()
    step, saved, stopped = start_step, None, None
    if start_step == 0:
        evaluate.before_training(trainable, frozen)
        sample(0, trainable, frozen)

    numbered = _numbered(data, start_step, total_steps, log)

    def save(step: int, evaluation: Mapping[str, float]) -> Path:
        with log.paused():
            return checkpoints.save(
                step,
                (trainable, opt_state),
                position=data.position(step),
                counts=log.counts,
                evaluation=evaluation,
                best=evaluate.best,
            )

    with signals.heard(checkpoints.stopping) as stop, checkpoints, closing(numbered):
        for step, batch in numbered:
            inputs = place(batch), key_of(step)
            if step == start_step + 1:
                with stop.at_once():
                    compiled = log.compile(step_fn, trainable, opt_state, frozen, *inputs)
            with jax.transfer_guard("disallow"), tripwires.never_compiled_again(step):
                trainable, opt_state, out = compiled(trainable, opt_state, frozen, *inputs)

            last, stopped = step == total_steps, stop_together.ask(stop.name)
            evaluating = last or _every(eval_every, step)
            # Whoever asked the run to stop does not wait for answers.
            sampling = last or (stopped is None and _every(sample_every, step))
            saving = last or stopped is not None or checkpoints.due(step)
            looking = evaluating or saving
            log.add(step, out, data.planned(step))
            log.settle(all_steps=looking or sampling or step == start_step + 1)
            if adapter_norms and (looking or step == tripwires.ADAPTERS_MOVE_BY_STEP):
                tripwires.check_adapters(step, adapter_norms(trainable))
            saved_first = stopped is not None and evaluating
            if saved_first:
                saved = save(step, {})
            found = evaluate(step, trainable, frozen) if evaluating else {}
            if evaluate.ends:
                log.last()
            if sampling or evaluate.ends:
                sample(step, trainable, frozen)
            keeping = evaluate.keeps(found)
            if saved_first:
                checkpoints.add_evaluation(step, found, evaluate.best)
            elif saving or evaluate.ends or keeping:
                saved = save(step, found)
            if stopped or evaluate.ends:
                break
    early = evaluate.why() if evaluate.ends and step < asked_steps else None
    interrupted = stopped if step < total_steps and not early else None
    if interrupted:
        metrics.note(f"{interrupted}: stopped after step {step}, saved in {saved}")
    return Outcome((trainable, opt_state, frozen), step, log.counts, interrupted, saved, early)


class _Log:
    """Fetches the numbers of finished steps, checks them, and writes the rows that are due."""

    def __init__(
        self,
        metrics: Writer,
        schedule: Callable[[Any], jax.Array],
        total_steps: int,
        log_every: int,
        counts: Mapping[str, int],
        gauges: Gauges,
    ) -> None:
        self.metrics, self._gauges = metrics, gauges
        self.counts = {
            name: counts.get(name, 0) for name in ("total_tokens", "total_trained_tokens")
        }
        # All at once and from zero: no small computation waits in the device's queue later, and a
        # continued run logs the very same numbers.
        self._rates = np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(total_steps)))
        self._logged = {1, total_steps}
        self._log_every = log_every
        self._pending: deque[tuple[int, Any, Mapping[str, int]]] = deque()
        self._unlogged: tuple[int, Mapping[str, float]] | None = None
        self._compile_seconds: float | None = None
        self._restart_clock()

    def compile(self, step_fn: jax.stages.Wrapped, *args: Any) -> Callable[..., Any]:
        """Compiles ahead of the first call. The program takes arguments like these and no other."""
        self.metrics.note("compiling the training step; the first time takes a minute or more")
        begin = time.perf_counter()
        compiled = _compile_aside(step_fn.lower(*args))
        self._compile_seconds = time.perf_counter() - begin
        self._restart_clock()
        return compiled

    def add(self, step: int, out: Mapping[str, jax.Array], planned: Mapping[str, int]) -> None:
        """Takes note of a step that was handed to the device, and of the tokens it should count."""
        self._pending.append((step, out, planned))

    def settle(self, *, all_steps: bool) -> None:
        """Waits for all pending steps, or for all but the newest, which may still run."""
        while len(self._pending) > (0 if all_steps else 1):
            step, out, planned = self._pending.popleft()
            values = {name: value.item() for name, value in jax.device_get(dict(out)).items()}
            tripwires.check_step(step, values, planned)
            self.counts["total_tokens"] += int(values["tokens"])
            self.counts["total_trained_tokens"] += int(values["trained_tokens"])
            self._window_tokens += int(values["tokens"])
            self._window_steps += 1
            self._unlogged = step, values
            if step in self._logged or _every(self._log_every, step):
                self.last()

    def last(self) -> None:
        """Logs the last step whose numbers are there, if it is not logged yet."""
        if self._unlogged is not None:
            self.metrics.write(self._row(*self._unlogged))
            self._unlogged = None
            self._restart_clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent in here is no training time."""
        begin = time.perf_counter()
        yield
        self._begin += time.perf_counter() - begin

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around getting the next batch: while the devices still work, nobody waits for it."""
        begin = time.perf_counter()
        yield
        if not self._pending or all(value.is_ready() for value in self._pending[-1][1].values()):
            self._waited += time.perf_counter() - begin

    def _row(self, step: int, values: Mapping[str, float]) -> dict[str, Any]:
        seconds = max(time.perf_counter() - self._begin, 1e-9)
        row: dict[str, Any] = {
            "step": step,
            **{name: value for name, value in values.items() if not _absent(name, value)},
            "learning_rate": float(self._rates[step - 1]),
            **self.counts,
            "tokens_per_second": self._window_tokens / seconds,
            "seconds_per_step": seconds / self._window_steps,
            **self._gauges.read(tokens=self._window_tokens, seconds=seconds, waited=self._waited),
        }
        if self._compile_seconds is not None:
            row["compile_seconds"] = self._compile_seconds
            self._compile_seconds = None
        return row

    def _restart_clock(self) -> None:
        self._begin, self._waited = time.perf_counter(), 0.0
        self._window_tokens, self._window_steps = 0, 0


class _Evaluator:
    """Evaluates, writes what it found, and keeps the best in mind."""

    def __init__(
        self,
        eval_fn: EvalFn | None,
        log: _Log,
        criterion: Criterion,
        best: Best | None,
        checkpoints: Saver,
    ) -> None:
        self._eval_fn, self._log = eval_fn, log
        self._criterion, self.best = criterion, best
        # The best evaluation of the run may be of a checkpoint that is in another folder, or gone.
        self._kept = checkpoints.best_value() if criterion.keep else None

    def before_training(self, trainable: Any, frozen: Any) -> None:
        """Evaluates what no checkpoint will hold."""
        self._found(0, trainable, frozen)

    def __call__(self, step: int, trainable: Any, frozen: Any) -> Mapping[str, float]:
        """Evaluates; nothing without held-out rows."""
        found = self._found(step, trainable, frozen)
        if found:
            self.best = self._criterion.judge(self.best, step, found)
        return found

    def _found(self, step: int, trainable: Any, frozen: Any) -> Mapping[str, float]:
        if self._eval_fn is None:
            return {}
        with self._log.paused():
            figures = self._eval_fn(trainable, frozen)
        # Floats of one process: all must decide alike what is the best, and when to end.
        found = from_first({name: float(value) for name, value in figures.items()})
        tripwires.check_evaluation(step, found)
        self._log.metrics.write({"step": step, **found})
        return found

    @property
    def ends(self) -> bool:
        """Whether evaluations have not become better for long enough to end the run."""
        return self._criterion.ends(self.best)

    def keeps(self, found: Mapping[str, float]) -> bool:
        """Whether a checkpoint is to be written because no other here has a better evaluation."""
        if not self._criterion.keep or not found:
            return False
        metric, kept = self._criterion.metric, self._kept
        if kept is not None and not is_better(metric, found[metric], kept):
            return False
        self._kept = found[metric]
        return True

    def why(self) -> str:
        """Why the run ends early, in half a sentence."""
        assert self.best is not None  # or it would not end
        metric, value, at = self.best.metric, self.best.value, self.best.step
        return (
            f"{self.best.stale} evaluations in a row were no better in {metric}, which was best "
            f"after step {at}: {value:.4f}"
        )


def _sampler(sample_fn: SampleFn | None, log: _Log) -> Callable[[int, Any, Any], None]:
    def sample(step: int, trainable: Any, frozen: Any) -> None:
        if sample_fn is None:
            return
        with log.paused():
            found = [dict(answer) for answer in sample_fn(trainable, frozen)]
        log.metrics.write({"step": step, "samples": found})

    return sample


def _numbered(
    data: Data, start_step: int, total_steps: int, log: _Log
) -> Generator[tuple[int, Batch]]:
    batches = iter(data.batches(start_step))
    for step in range(start_step + 1, total_steps + 1):
        with log.waiting():
            batch = next(batches, None)
        if batch is None:
            raise InputError(
                f"the data ended after step {step - 1} of {total_steps}; "
                "lower train.max_steps or give more examples in data.path"
            )
        yield step, batch


def _step_keys(seed: int, opt_state: Any) -> Callable[[int], jax.Array]:
    """The key of a step, on every device of the mesh that the state lives on."""
    meshes = [
        leaf.sharding.mesh
        for leaf in jax.tree.leaves(opt_state)
        if isinstance(leaf.sharding, jax.sharding.NamedSharding)
    ]
    everywhere = jax.sharding.PartitionSpec()
    place = jax.sharding.NamedSharding(meshes[0], everywhere) if meshes else None
    draw = jax.jit(lambda step: jax.random.fold_in(jax.random.key(seed), step), out_shardings=place)
    return lambda step: draw(np.int32(step))


def _absent(name: str, value: float) -> bool:
    """Whether this is the loss of a source of which a step has no trained token."""
    return name.startswith("loss/") and math.isnan(value)


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0


def _compile_aside(lowered: Any) -> Callable[..., Any]:
    """Compiles in a thread, so that a signal reaches the main one while it waits."""
    compiled, failed = [], list[BaseException]()

    def compile() -> None:
        try:
            compiled.append(lowered.compile())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=compile, name=COMPILER, daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return compiled[0]
