# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: adapters, optimizer state and position; never the frozen base.

A checkpoint is one folder, `RUN/checkpoints/STEP`, that Orbax writes beside and renames when it is
whole, so a run killed at any moment leaves a checkpoint or none. Its three items are `trainable`
and `opt_state` (arrays under their dotted tree paths, so that every kind of pytree node survives)
and `meta` (JSON: what `Meta` holds, and shape, dtype and checksum of every array).
"""

import errno
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lora_tune.errors import InputError

_FORMAT = 1
_ITEMS = ("trainable", "opt_state")
# Names, shapes and chunk tables, and files that fill whole blocks.
_ROOM_PER_ARRAY, _ROOM_PER_CHECKPOINT = 2 * 1024, 160 * 1024
_LEFTOVER = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|removed)$")
_OS_REASON = re.compile(
    "No space left on device|File too large|Disk quota exceeded|Permission denied|"
    "Read-only file system|Input/output error"
)


@dataclass(frozen=True)
class Meta:
    """What a checkpoint knows besides its arrays.

    Attributes:
      step: finished optimizer steps.
      position: where the data goes on, as the data pipeline describes it.
      counts: running totals of the run, such as tokens.
      fingerprint: what must not change between a run and its continuation (seed, model, data, …).
      eval_loss: of the evaluation at this very step, if there was one.
    """

    step: int
    position: Mapping[str, Any]
    counts: Mapping[str, int]
    fingerprint: Mapping[str, Any]
    eval_loss: float | None = None


@dataclass(frozen=True)
class Restored:
    """A checkpoint read back: the state in the structure that was asked for, and its `Meta`."""

    trainable: Any
    opt_state: Any
    meta: Meta


class Checkpoints:
    """The checkpoints of one run folder.

    Opening the folder removes what a killed save or a killed removal left there.

    Args:
      folder: `RUN/checkpoints`; made if it does not exist.
      keep: how many of the newest to keep. The one with the lowest `eval_loss` is kept besides.
      every: save after every so many steps; 0 saves only where the caller asks.
      fingerprint: plain JSON values that a continued run must share with the checkpoint.
      warn: receives one sentence whenever a checkpoint has to be passed over.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep: int,
        every: int,
        fingerprint: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        if keep < 1 or every < 0:
            raise InputError(
                f"section save needs keep >= 1 and every >= 0, got keep = {keep}, every = {every}"
            )
        self.folder = Path(folder).absolute()
        self.every = every
        self._keep = keep
        self._fingerprint = json.loads(json.dumps(dict(fingerprint or {})))
        self._warn = warn or _to_stderr
        if jax.process_index() == 0:
            self._open()

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after this step."""
        return self.every > 0 and step % self.every == 0

    def steps(self) -> list[int]:
        """The steps of all checkpoints in the folder, ascending."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal())

    def latest(self) -> int | None:
        """The newest step, or None in a new run."""
        return max(self.steps(), default=None)

    def save(
        self,
        step: int,
        state: tuple[Any, Any],
        *,
        position: Mapping[str, Any],
        counts: Mapping[str, int] | None = None,
        eval_loss: float | None = None,
    ) -> Path:
        """Writes (trainable, opt_state) after `step` and returns the checkpoint's folder.

        Returns when everything is on disk, so the caller may donate the state right after.

        Raises:
          InputError: if the disk does not take it; earlier checkpoints are untouched.
        """
        path = self.folder / str(step)
        meta = Meta(step, dict(position), dict(counts or {}), self._fingerprint, eval_loss)
        try:
            if jax.process_index() == 0:
                _reserve(self.folder, jax.tree.leaves(state))
            _write(path, dict(zip(_ITEMS, state, strict=True)), meta)
        except Exception as error:
            reason = _refusal(error)
            if reason is None:
                raise
            self._sweep()
            raise InputError(
                f"the checkpoint of step {step} could not be written to {path}: {reason}; "
                "free space there or set another output_dir, then run the same command again"
            ) from error
        self._prune()
        return path

    def restore(self, abstract: tuple[Any, Any]) -> Restored | None:
        """Reads the newest valid checkpoint, or returns None if the folder holds none.

        A damaged checkpoint is reported, renamed to `STEP.corrupt` and passed over.

        Args:
          abstract: (trainable, opt_state) as arrays or `jax.ShapeDtypeStruct`; each leaf says the
            shape, dtype and sharding to restore to. The sharding may differ from the saved one.

        Raises:
          InputError: if the checkpoint belongs to another run (fingerprint, or other adapters), or
            if all checkpoints are damaged.
        """
        wanted = {item: _flat(tree) for item, tree in zip(_ITEMS, abstract, strict=True)}
        found = self.steps()
        for step in reversed(found):
            path = self.folder / str(step)
            try:
                record = _read_meta(path)
            except Exception as error:
                self._set_aside(path, error)
                continue
            self._check_same_run(path, record, wanted)
            try:
                arrays = _read_arrays(path, wanted, record["leaves"])
            except jax.errors.JaxRuntimeError:
                raise
            except Exception as error:
                self._set_aside(path, error)
                continue
            trainable, opt_state = (
                _like(tree, arrays[item]) for item, tree in zip(_ITEMS, abstract, strict=True)
            )
            return Restored(trainable, opt_state, Meta(**record["meta"]))
        if found:
            raise InputError(
                f"no checkpoint in {self.folder} can be read (steps {found}, now named "
                "STEP.corrupt); remove that folder to start from the beginning"
            )
        return None

    def _open(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
        except OSError as error:
            raise InputError(
                f"the checkpoint folder {self.folder} cannot be used: {_first_line(error)}; "
                "set another output_dir"
            ) from error

    def _sweep(self) -> None:
        for path in self.folder.iterdir():
            if _LEFTOVER.match(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _prune(self) -> None:
        if jax.process_index() != 0:
            return
        steps = self.steps()
        old = steps[: -self._keep]
        best = _best([self.folder / str(step) for step in steps]) if old else None
        for step in old:
            if step != best:
                # A removal cut short must not leave half a checkpoint under its name.
                doomed = (self.folder / str(step)).rename(self.folder / f"{step}.removed")
                shutil.rmtree(doomed)

    def _set_aside(self, path: Path, error: Exception) -> None:
        aside = path.with_name(f"{path.name}.corrupt")
        self._warn(
            f"warning: checkpoint {path} is damaged ({_first_line(error)}); it is passed over and "
            f"renamed to {aside.name}"
        )
        if jax.process_index() == 0:
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)

    def _check_same_run(
        self, path: Path, record: Mapping[str, Any], wanted: Mapping[str, Mapping[str, Any]]
    ) -> None:
        saved = record["meta"]["fingerprint"]
        problems = [
            f"{key} was {_shown(saved.get(key))}, is {_shown(self._fingerprint.get(key))}"
            for key in sorted({*saved, *self._fingerprint})
            if saved.get(key) != self._fingerprint.get(key)
        ]
        for item in _ITEMS:
            if problems:
                # What follows: arrays from the recipe, optimizer state from the parameters.
                break
            problems = _differences(record["leaves"][item], wanted[item])
        if problems:
            raise InputError(
                "set another output_dir for this run, or undo the change to go on with the one "
                f"there: {path} is a checkpoint of another run, in which "
                f"{_shortened(problems, most=4)}"
            )


def read_trained(folder: Path | str, abstract: Any) -> tuple[int, Any] | None:
    """Reads what was trained from the newest checkpoint, and changes nothing on disk.

    Args:
      folder: `RUN/checkpoints`.
      abstract: the trained weights as for `Checkpoints.restore`.

    Returns:
      The step and the weights, None where there is no checkpoint.

    Raises:
      InputError: the newest checkpoint is damaged or has other weights.
    """
    folder = Path(folder).absolute()
    found = folder.iterdir() if folder.is_dir() else ()
    steps = [int(path.name) for path in found if path.name.isdecimal()]
    if not steps:
        return None
    path = folder / str(max(steps))
    wanted = {"trainable": _flat(abstract)}
    try:
        leaves = _read_meta(path)["leaves"]
        problems = _differences(leaves["trainable"], wanted["trainable"])
        arrays = {} if problems else _read_arrays(path, wanted, leaves)
    except jax.errors.JaxRuntimeError:
        raise
    except Exception as error:
        raise InputError(
            f"checkpoint {path} is damaged ({_first_line(error)}); give the command that trained "
            "again, which goes on from the one before"
        ) from error
    if problems:
        raise InputError(
            f"{path} is a checkpoint of another run than its recipe, in which "
            f"{_shortened(problems, most=4)}"
        )
    return max(steps), _like(abstract, arrays["trainable"])


def _flat(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(flat) != len(leaves):
        raise ValueError("two leaves of the state share one dotted path")
    return flat


def _like(tree: Any, flat: Mapping[str, Any]) -> Any:
    """Puts restored arrays into the structure of `tree`; the order of a dict is not kept."""
    return jax.tree.unflatten(jax.tree.structure(tree), [flat[path] for path in _flat(tree)])


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    """A 32-bit sum over hashes of bits and position, the same under every sharding.

    The hash (MurmurHash3's 32-bit finaliser) is one to one, so that any single changed element
    changes the sum.
    """
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    unsigned = jnp.dtype(f"uint{8 * min(array.dtype.itemsize, 4)}")
    mixed = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    position = jnp.zeros(mixed.shape, jnp.uint32)
    for axis, size in enumerate(mixed.shape):
        index = jax.lax.broadcasted_iota(jnp.uint32, mixed.shape, axis)
        position = position * jnp.uint32(size) + index
    mixed = mixed ^ (position * jnp.uint32(0x9E3779B9))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _describe(flat: Mapping[str, jax.Array]) -> dict[str, Any]:
    sums = jax.device_get({path: _checksum(leaf) for path, leaf in flat.items()})
    return {
        path: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "checksum": int(sums[path])}
        for path, leaf in flat.items()
    }


def _reserve(folder: Path, arrays: list[jax.Array]) -> None:
    """Claims the room for arrays on the disk and gives it back.

    So a disk that is too full is one error before anything is written. When Orbax meets it, every
    part that fails is logged with its traceback.

    Raises:
      OSError: there is not enough room.
    """
    room = sum(array.nbytes + _ROOM_PER_ARRAY for array in arrays) + _ROOM_PER_CHECKPOINT
    allocate = getattr(os, "posix_fallocate", None)
    if allocate is None:
        return
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            allocate(file.fileno(), 0, room)
        except OSError as error:
            # Not every file system can do this.
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise


def _write(path: Path, items: Mapping[str, Any], meta: Meta) -> None:
    import orbax.checkpoint as ocp

    flat = {item: _flat(tree) for item, tree in items.items()}
    record = {
        "format": _FORMAT,
        "meta": asdict(meta),
        "leaves": {item: _describe(leaves) for item, leaves in flat.items()},
    }
    arrays = {item: ocp.args.StandardSave(leaves) for item, leaves in flat.items()}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        writer.save(path, args=ocp.args.Composite(meta=ocp.args.JsonSave(record), **arrays))


def _read_meta(path: Path) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        record = reader.restore(path, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
    if (
        record is None
        or record.get("format") != _FORMAT
        or record["meta"]["step"] != int(path.name)
    ):
        raise ValueError("its meta item is not one of ours")
    return record


def _read_arrays(
    path: Path, wanted: Mapping[str, Mapping[str, Any]], saved: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    abstract = {
        item: {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(leaf))
            for name, leaf in leaves.items()
        }
        for item, leaves in wanted.items()
    }
    args = {item: ocp.args.StandardRestore(leaves) for item, leaves in abstract.items()}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        arrays = dict(reader.restore(path, args=ocp.args.Composite(**args)).items())
    for item in wanted:
        changed = [
            name for name, now in _describe(arrays[item]).items() if now != saved[item][name]
        ]
        if changed:
            raise ValueError(f"checksum of {item} {_shortened(changed)} is wrong")
    return arrays


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    given = getattr(leaf, "sharding", None)
    return given or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    problems = []
    for path in sorted({*saved, *wanted}):
        if path not in wanted:
            problems.append(f"{path} is in the checkpoint only")
        elif path not in saved:
            problems.append(f"{path} is not in the checkpoint")
        else:
            then = f"{saved[path]['dtype']}{saved[path]['shape']}"
            now = f"{wanted[path].dtype}{list(wanted[path].shape)}"
            problems += [f"{path} was {then}, is {now}"] if then != now else []
    return problems


def _best(paths: list[Path]) -> int | None:
    losses = {int(path.name): _eval_loss(path) for path in paths}
    known = {step: loss for step, loss in losses.items() if loss is not None}
    return min(known, key=lambda step: (known[step], step)) if known else None


def _eval_loss(path: Path) -> float | None:
    try:
        return _read_meta(path)["meta"]["eval_loss"]
    except (OSError, ValueError, KeyError):
        # Damaged since it was written: not a candidate for the best one.
        return None


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _shortened(problems: list[str], *, most: int = 8) -> str:
    more = f", and {len(problems) - most} more" if len(problems) > most else ""
    return ", ".join(problems[:most]) + more


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _refusal(error: Exception) -> str | None:
    """Why the operating system did not take a file; tensorstore hides that in a long ValueError."""
    found = _OS_REASON.search(str(error))
    if found:
        return found[0]
    return _first_line(error) if isinstance(error, OSError) else None


def _to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
