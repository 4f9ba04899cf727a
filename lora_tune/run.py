# SPDX-License-Identifier: Apache-2.0
"""A whole run: recipe in; run folder, adapter and numbers out."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from lora_tune import (
    __version__,
    build,
    build_answers,
    build_evaluation,
    distributed,
    lockfile,
    run_lock,
)
from lora_tune import recipe as recipes
from lora_tune.build_data import Data
from lora_tune.checkpoint.choice import Chosen, comparable, measured_on, steps_in
from lora_tune.checkpoint.files import Restored
from lora_tune.checkpoint.folder import Checkpoints, read_one
from lora_tune.data import duplicates, messages
from lora_tune.errors import InputError
from lora_tune.export import write
from lora_tune.generation.prompts import stop_ids_of
from lora_tune.hf.adapters import SCALE, A, B
from lora_tune.hf.files import weights_size
from lora_tune.hf.folder import (
    check_companions,
    check_replaceable,
    check_space,
    check_writable,
    replace_file,
    writable_output,
)
from lora_tune.hf.table import bind
from lora_tune.lora.inject import AdapterRow, adapter_table, b_norms
from lora_tune.prepare import Inputs, Training
from lora_tune.proof import certificate
from lora_tune.recipe import schema
from lora_tune.report.ending import End, environment, reported
from lora_tune.training import loop
from lora_tune.training.best import Best, Criterion
from lora_tune.training.metrics import MetricsLog, Unlogged, Writer, lost_rows
from lora_tune.training.report import Terminal
from lora_tune.training.state import Weights, unflatten
from lora_tune.training.writers import make_writer


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run gives back.

    Attributes:
      output_dir: the run folder.
      steps: finished optimizer steps.
      rows: the rows of `metrics.jsonl`, those before a resume included.
      adapter: folder of the PEFT adapter, or None.
      merged: folder of the whole model, or None.
      interrupted: name of the signal that ended the run early, or None.
    """

    output_dir: Path
    steps: int
    rows: list[dict[str, Any]]
    adapter: Path | None
    merged: Path | None
    interrupted: str | None = None

    def evaluations(self) -> list[dict[str, Any]]:
        """The rows of evaluations, first to last."""
        return [row for row in self.rows if "eval_loss" in row]


def train(recipe: str | Path, overrides: Sequence[str] = ()) -> Result:
    """Trains as a recipe says, or goes on where an earlier call with it stopped.

    Args:
      recipe: path of a recipe file, or the name of a shipped one.
      overrides: `key=value` strings that replace keys of the recipe.

    Raises:
      InputError: anything wrong with the recipe, the model, the data or the disk.
      TripwireError: training has gone wrong, e.g. a loss that is not finite.
    """
    loaded = recipes.load(recipe, overrides)
    distributed.join(**dataclasses.asdict(loaded.distributed))
    run_dir = Path(loaded.output_dir)
    with contextlib.ExitStack() as held:
        with distributed.together("prepare the run"):
            _check_folders(loaded)
            wanted = lockfile.find(recipe, run_dir) if loaded.locked else None
            inputs = Inputs.read(loaded)
            lock = lockfile.current(inputs)
            if wanted is not None:
                lockfile.check(wanted, lock)
            if loaded.save.merged and loaded.lora is not None:
                check_space(run_dir, weights_size(inputs.source.folder))
                check_companions(inputs.source.folder)
            if distributed.is_first():
                held.enter_context(run_lock.held(run_dir))
        distributed.check_same(_shared(inputs))
        return _Run(inputs, lock).go()


def _check_folders(recipe: schema.Recipe) -> None:
    """Refuses folders that cannot be written, or read, before anything else is."""
    run_dir = Path(recipe.output_dir)
    check_writable(run_dir)
    checkpoints = run_dir / "checkpoints"
    if os.path.lexists(checkpoints) and not checkpoints.is_dir():
        raise InputError(f"{checkpoints} is no folder; move it away or set another output_dir")
    check_writable(checkpoints)
    begins = not steps_in(checkpoints)
    if begins and recipe.train.resume not in ("auto", "never"):
        checkpoint_of(recipe.train.resume)
    check_replaceable(run_dir / "adapter", kind="adapter")
    check_replaceable(run_dir / "merged", kind="full" if recipe.lora is None else "merged")
    exports = [run_dir / name for name in ("adapter", "merged")]
    left = [str(path) for path in exports if path.exists() and any(path.iterdir())]
    if begins and left:
        raise InputError(
            f"{' and '.join(left)}: left by a run of which no checkpoint is here to go on from; "
            f"set another output_dir, or move {'it' if len(left) == 1 else 'both'} away to train "
            "anew"
        )


def _shared(inputs: Inputs) -> dict[str, Any]:
    """What all processes of a run must have in common."""
    recipe, held_out = dataclasses.asdict(inputs.recipe), inputs.data.held_out
    del recipe["distributed"]
    return {
        "the recipe": recipe,
        "the model": build.fingerprint(inputs.recipe, inputs.source),
        "the training data": inputs.data.train.position(0),
        "the held-out data": held_out and held_out.fingerprint,
        "the version of jax": jax.__version__,
        "the version of lora_tune": __version__,
    }


class _Run:
    """The parts of one run, and the order in which they act."""

    def __init__(self, inputs: Inputs, lock: lockfile.Lock):
        recipe = inputs.recipe
        self.recipe, self.source, self.mesh = recipe, inputs.source, inputs.mesh
        self.tokenizer, self.data, self.total_steps = (
            inputs.tokenizer,
            inputs.data,
            inputs.total_steps,
        )
        self.training = Training.build(inputs)
        model, self.split = self.training.model, self.training.split
        assert model.origin is not None  # build gave it one
        self.run_dir, self.lock = Path(recipe.output_dir), lock
        self.leaves = bind(model.family, model)
        self.family, self.origin = model.family, model.origin
        self.table = () if recipe.lora is None else adapter_table(model, model.adapter.config)
        self.lora = None if recipe.lora is None else model.adapter.config
        self.fingerprint = build.fingerprint(recipe, self.source)
        self.adapter_norms = None if self.lora is None else b_norms(model, self.lora)
        self.measured = _measured(inputs)

    def go(self) -> Result:
        recipe = self.recipe
        checkpoints = Checkpoints(
            self.run_dir / "checkpoints",
            keep=recipe.save.keep,
            every=recipe.save.every,
            fingerprint=self.fingerprint,
            metric=recipe.train.metric_for_best_model,
            measured=self.measured,
            total_steps=self.total_steps,
        )
        trainable, opt_state, frozen = self.training.state
        restored, start = self._restore(checkpoints, (trainable, opt_state)), 0
        if restored is not None:
            trainable, opt_state, start = restored.trainable, restored.opt_state, restored.meta.step
        distributed.check_same({"the checkpoint to go on from": start})
        changed = lockfile.changed_packages(self.run_dir) if start else None
        lost = None
        # A log that another run began need not have a row of a step before its first checkpoint.
        if distributed.is_first() and recipe.train.resume in ("auto", "never"):
            lost = lost_rows(self.run_dir, start)
        with distributed.together("write to the run folder"):
            if distributed.is_first():
                self._describe(start)
            log = self._metrics(restored)
        with log as metrics, self._reported(metrics) as end:
            if changed is not None:
                metrics.note(changed)
            if lost is not None:
                metrics.note(lost)
            self._introduce(metrics, start)
            outcome = self._train(checkpoints, metrics, (trainable, opt_state, frozen), restored)
            adapter, merged = self._finish(outcome, checkpoints, metrics, end)
            end.interrupted, end.step = outcome.interrupted, outcome.step
        return Result(
            self.run_dir, outcome.step, metrics.rows(), adapter, merged, outcome.interrupted
        )

    def _train(
        self,
        checkpoints: Checkpoints,
        metrics: MetricsLog,
        state: loop.State,
        restored: Restored | None,
    ) -> loop.Outcome:
        recipe = self.recipe
        stop_ids = stop_ids_of(self.origin.folder, self.tokenizer, chat=True)
        return loop.run(
            **self.training.fixed,
            state=state,
            checkpoints=checkpoints,
            metrics=metrics,
            total_steps=self.total_steps,
            start_step=0 if restored is None else restored.meta.step,
            counts=None if restored is None else restored.meta.counts,
            eval_fn=build_evaluation.make_evaluation(
                recipe, self.split, self.data, self.mesh, stop_ids=stop_ids
            ),
            eval_every=recipe.eval.every,
            criterion=_criterion(recipe.train),
            best=self._best_of(restored, metrics),
            sample_fn=build_answers.make_sampler(
                recipe.eval, self.split, self.data, self.tokenizer, stop_ids=stop_ids
            ),
            sample_every=recipe.eval.samples_every,
            adapter_norms=self.adapter_norms,
        )

    def _finish(
        self, outcome: loop.Outcome, checkpoints: Checkpoints, metrics: MetricsLog, end: End
    ) -> tuple[Path | None, Path | None]:
        """Exports what a run that is at its end has trained; returns the folders."""
        if outcome.interrupted is not None:
            return None, None
        chosen = self._chosen(outcome, checkpoints)
        end.said = _told(outcome, chosen, self.recipe.train.exported_by())
        if end.said:
            metrics.note(end.said)
        weights, adapter, merged = self._on_host(chosen.weights), None, None
        with distributed.together("write what was trained"):
            if distributed.is_first():
                adapter, merged = self._export(weights, metrics, chosen)
        return adapter, merged

    def _describe(self, start: int) -> None:
        """Writes what the run is, once it is known that the folder is this run's to write."""
        with writable_output(self.run_dir):
            recipes.save(self.recipe, self.run_dir / "recipe.yaml")
            if self.table:
                _write_table(self.table, self.run_dir / "adapters.tsv")
            # Of a run that only exports again, the lock says what it was trained with.
            if start < self.total_steps or not (self.run_dir / lockfile.NAME).exists():
                lockfile.write(self.run_dir, self.lock)

    def _reported(self, metrics: MetricsLog) -> contextlib.AbstractContextManager[End]:
        if not distributed.is_first():
            return contextlib.nullcontext(End())
        return reported(self.run_dir, self._summary(), metrics)

    def _summary(self) -> dict[str, Any]:
        """What the report says besides the log."""
        train = self.data.train
        sources = [dataclasses.asdict(report) for report in train.examples.sources]
        return {
            "total_steps": self.total_steps,
            "parameters": self.split.sizes(),
            "data": dataclasses.asdict(train.report) | {"sources": sources},
            "environment": environment(self.mesh),
        }

    def _restore(self, checkpoints: Checkpoints, state: tuple[Any, Any]) -> Restored | None:
        resume = self.recipe.train.resume
        if resume == "never" and checkpoints.steps():
            raise InputError(
                f"train.resume=never, but {checkpoints.folder} holds a checkpoint of step "
                f"{checkpoints.latest()}; set another output_dir or train.resume=auto"
            )
        restored = checkpoints.restore(state)
        if restored is None and resume not in ("auto", "never"):
            restored = read_one(checkpoint_of(resume), state, self.fingerprint)
        if restored is not None:
            self.data.train.check(dict(restored.meta.position))
            if restored.meta.step > self.total_steps:
                own = bool(checkpoints.steps())
                instead = "set another output_dir" if own else "name an earlier one"
                raise InputError(
                    f"{checkpoints.folder if own else f'train.resume={resume}'} holds a checkpoint "
                    f"of step {restored.meta.step}, but the recipe asks for {self.total_steps} "
                    f"steps; {instead} or set train.max_steps={restored.meta.step}"
                )
        return restored

    def _metrics(self, restored: Restored | None) -> MetricsLog:
        if not distributed.is_first():
            return Unlogged(self.run_dir)
        start = 0 if restored is None else restored.meta.step
        writers: list[Writer] = []
        log = self.recipe.log
        resume_step = None if restored is None else start
        options = {"project": log.wandb_project, "mode": log.wandb_mode}
        config = dataclasses.asdict(self.recipe)
        for name in log.reporters():
            writers.append(
                make_writer(name, self.run_dir, config=config, resume_step=resume_step, **options)
            )
        # Last, since its live line must be ended by whoever begins it.
        writers.insert(0, Terminal(total_steps=self.total_steps, start_step=start))
        return MetricsLog(self.run_dir, resume_step=resume_step, writers=writers)

    def _introduce(self, metrics: MetricsLog, start: int) -> None:
        report = self.data.train.report
        for line in _table_lines(self.table):
            metrics.note(line)
        sizes = self.split.sizes()
        metrics.note(f"{sizes['trained']:,} parameters are trained, {sizes['frozen']:,} are frozen")
        drops = ", ".join(f"{count} {reason}" for reason, count in report.drops.items()) or "none"
        metrics.note(
            f"{report.examples:,} examples of {report.rows:,} rows, {report.tokens:,} tokens, "
            f"{report.trained_tokens:,} of them trained; truncated {report.truncated}, "
            f"dropped {drops}; rows are {report.packing_efficiency:.0%} full"
        )
        if start < self.total_steps and (warning := _overlap(self.data)):
            metrics.note(warning)
        used = 1 if self.mesh is None else self.mesh.size
        if used < jax.device_count():
            metrics.note(f"{used} of {jax.device_count()} devices are used; mesh.* uses more")
        if start:
            left = "" if start < self.total_steps else ", the last: nothing is left to train"
            metrics.note(f"going on after step {start}{left}")
        else:
            metrics.note(f"first example, trained parts in «»: {self._first_example()}")

    def _first_example(self) -> str:
        pieces = messages.preview(self.data.first, self.tokenizer)
        return " ".join("".join(f"«{t}»" if trained else t for t, trained in pieces).split())[:600]

    def _best_of(self, restored: Restored | None, metrics: MetricsLog) -> Best | None:
        """The best evaluation before a resume, if those to come can be compared with it."""
        if restored is None or restored.meta.best is None:
            return None
        best, meta = Best.of(restored.meta.best), restored.meta
        if comparable(best.metric, meta.measured, self.measured):
            return best
        metrics.note(
            f"evaluations up to step {meta.step} were made on other held-out rows or questions: "
            "they count neither for the best checkpoint nor for early stopping"
        )
        return None

    def _chosen(self, outcome: loop.Outcome, checkpoints: Checkpoints) -> Chosen:
        """What is to be exported: the best checkpoint, or the last state."""
        if self.recipe.train.exported_by() is None:
            return Chosen(outcome.step, outcome.state[0])
        return checkpoints.read_best(outcome.state[0])

    def _card(self, chosen: Chosen) -> str:
        """What the model card says of the choice between checkpoints."""
        metric = self.recipe.train.exported_by()
        if metric is None:
            return ""
        which = "the best" if chosen.metric else "the newest, as none was evaluated"
        return f"## Training\n\nStep {chosen.step}, {which} by `{metric}`.\n"

    def _on_host(self, trainable: Weights) -> dict[str, Any]:
        """What exports are made of, in every process: of several, none has all of it."""
        weights = {**self.split.frozen, **trainable}
        if jax.process_count() == 1:
            return weights
        # In this order in every process. The base is read from its files, not from the devices.
        lora = [name for name in weights if name.rpartition("/")[2] in (A, B, SCALE)]
        return {name: distributed.fetch(weights[name]) for name in lora or weights}

    def _export(
        self, weights: Mapping[str, Any], metrics: MetricsLog, chosen: Chosen
    ) -> tuple[Path | None, Path | None]:
        recipe, adapter, merged = self.recipe, None, None
        state, card = unflatten(weights), self._card(chosen)
        lora = self.lora if recipe.save.adapter else None
        as_merged = self.lora is None or recipe.save.merged
        if lora is not None or as_merged:
            with writable_output(self.run_dir):
                if certificate.remove_outdated(self.run_dir, chosen.step):
                    metrics.note("removed the certificate, which is of another step's files")
        if lora is not None:
            adapter = self.run_dir / "adapter"
            write.adapter(state, self.leaves, lora, self.origin, adapter, notes=card)
        if as_merged:
            merged = self.run_dir / "merged"
            parts = {"recipe": recipe, "source": self.source}
            for note in write.whole(state, self.leaves, self.family, self.origin, merged, **parts):
                metrics.note(note)
        for path in (adapter, merged):
            if path is not None:
                metrics.note(f"wrote {path}")
        return adapter, merged


def _overlap(data: Data) -> str | None:
    """What to say where held-out rows are trained on: their figures then tell nothing."""
    if data.held_out is None or not distributed.is_first():
        return None
    same = duplicates.seen_in_training(data.train.examples, data.held_out)
    if not same:
        return None
    return (
        f"warning: {same:,} of {len(data.held_out):,} held-out examples are training examples too, "
        "of which evaluations say nothing; take them out of one of the two (`lora-tune data "
        "recipe=…` counts them)"
    )


def _criterion(train: schema.Train) -> Criterion:
    return Criterion(
        train.metric_for_best_model,
        train.early_stopping_patience,
        train.early_stopping_threshold,
        keep=train.load_best_model_at_end,
    )


def _measured(inputs: Inputs) -> dict[str, Any]:
    data, asked = inputs.data, inputs.recipe.eval.num_exact_match
    if data.held_out is None:
        return {}
    return measured_on(data.held_out.fingerprint, data.eval_sets, asked)


def _told(outcome: loop.Outcome, chosen: Chosen, metric: str | None) -> str:
    """What the report says of a run that ended early, or whose last state is not exported."""
    said = [outcome.stopped_early] if outcome.stopped_early else []
    if metric is not None and chosen.metric is None:
        said.append(f"no checkpoint has {metric}: the newest is exported, not the best")
    elif chosen.step != outcome.step:
        said.append(f"what is exported is of step {chosen.step}, the best by {metric}")
    return "; ".join(said)


def checkpoint_of(resume: str) -> Path:
    """The checkpoint that `train.resume=PATH` means: the folder of one, or a run's newest.

    Raises:
      InputError: there is none.
    """
    path = Path(resume).absolute()
    for folder in (path / "checkpoints", path):
        if steps := steps_in(folder):
            return folder / str(steps[-1])
    if path.name.isdecimal() and path.is_dir():
        return path
    named = path.name.isdecimal() or path.parent.name == "checkpoints"
    if named and (steps := steps_in(path.parent)):
        raise InputError(
            f"train.resume: {path.parent} has no checkpoint {path.name}; it has those of steps "
            f"{', '.join(map(str, steps))}"
        )
    raise InputError(
        f"train.resume: expected auto, never, a run folder with checkpoints, or one checkpoint "
        f"(RUN/checkpoints/STEP), got {resume!r}, which is none of these"
    )


def _write_table(table: Sequence[AdapterRow], path: Path) -> None:
    lines = ["module\tlora_A\tlora_B\tr\tlora_alpha\tscale\tparameters"]
    lines += [
        f"{row.module}\t{_shape(row.a_shape)}\t{_shape(row.b_shape)}\t{row.r}\t{row.alpha:g}\t"
        f"{row.scale:g}\t{row.parameters}"
        for row in table
    ]
    replace_file(path, "\n".join(lines) + "\n")


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _table_lines(table: Sequence[AdapterRow]) -> Iterator[str]:
    """The table for the terminal: one line per kind of module, layers counted."""
    kinds: dict[tuple[str, str, str, int], list[int]] = {}
    for row in table:
        stars = ["*" if part.isdigit() else part for part in row.module.split(".")]
        key = (".".join(stars), _shape(row.a_shape), _shape(row.b_shape), row.r)
        kinds.setdefault(key, []).append(row.parameters)
    if kinds:
        width = max(len(key[0]) for key in kinds)
        yield f"{'adapted module':{width}}  {'lora_A':>10} {'lora_B':>10}  layers  parameters"
        for (name, a, b, _), counts in kinds.items():
            yield f"{name:{width}}  {a:>10} {b:>10}  {len(counts):>6}  {sum(counts):>10,}"
