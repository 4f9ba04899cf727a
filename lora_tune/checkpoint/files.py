# SPDX-License-Identifier: Apache-2.0
"""One checkpoint: adapters, optimizer state and position; never the frozen base.

A checkpoint is one folder, `RUN/checkpoints/STEP`, that Orbax writes beside and renames when it is
whole, so a run killed at any moment leaves a checkpoint or none. Its three items are `trainable`
and `opt_state` (arrays under their dotted tree paths, so that every kind of pytree node survives)
and `meta` (JSON: what `Meta` holds, and shape, dtype and checksum of every array).
"""

import errno
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from lora_tune.distributed import is_first
from lora_tune.errors import InputError
from lora_tune.hf.folder import replace_file

_FORMAT = 1
# Of reading: reasons that lie not in the checkpoint.
_NOT_NOW = re.compile(
    "Permission denied|Too many open files|Input/output error|Stale file|Cannot allocate|"
    "RESOURCE_EXHAUSTED"
)
_ITEMS = ("trainable", "opt_state")
# Names, shapes and chunk tables, and files that fill whole blocks.
_ROOM_PER_ARRAY, _ROOM_PER_CHECKPOINT = 2 * 1024, 160 * 1024


@dataclass(frozen=True)
class Meta:
    """What a checkpoint knows besides its arrays.

    Attributes:
      step: finished optimizer steps.
      position: where the data goes on, as the data pipeline describes it.
      counts: running totals of the run, such as tokens.
      fingerprint: what must not change between a run and its continuation (seed, model, data, …).
      evaluation: figures of the evaluation at this very step, if there was one.
      best: the best evaluation up to here, as `lora_tune.training.best.Best` has it.
      measured: what these two were measured on, as of `lora_tune.checkpoint.choice.measured_on`.
      total_steps: of the whole run as it was then; the learning rates follow from it.
      since: the step from which on it was that many.
    """

    step: int
    position: Mapping[str, Any]
    counts: Mapping[str, int]
    fingerprint: Mapping[str, Any]
    evaluation: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int = 0
    since: int = 0


@dataclass(frozen=True)
class Restored:
    """A checkpoint read back: the state in the structure that was asked for, and its `Meta`."""

    trainable: Any
    opt_state: Any
    meta: Meta


class Damaged(Exception):  # noqa: N818  what it says of the checkpoint
    """A checkpoint cannot be read; its text is the reason in a few words."""


def start_writing(path: Path, state: tuple[Any, Any], meta: Meta) -> Any:
    """Begins to write a checkpoint; the state may be donated or changed once this returns.

    Returns:
      A writer; the checkpoint is there, whole, when its `wait_until_finished()` has returned. It is
      then to be closed.

    Raises:
      OSError, ValueError: the disk does not take it.
    """
    import orbax.checkpoint as ocp

    if is_first():
        _reserve(path.parent, jax.tree.leaves(state))
    flat = {item: _flat(tree) for item, tree in zip(_ITEMS, state, strict=True)}
    record = {
        "format": _FORMAT,
        "meta": asdict(meta),
        "leaves": {item: _describe(leaves) for item, leaves in flat.items()},
    }
    arrays = {item: ocp.args.StandardSave(leaves) for item, leaves in flat.items()}
    writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
    try:
        writer.save(
            path.absolute(), args=ocp.args.Composite(meta=ocp.args.JsonSave(record), **arrays)
        )
    except BaseException:
        writer.close()
        raise
    return writer


def read(
    path: Path, abstract: tuple[Any, Any], fingerprint: Mapping[str, Any] | None = None
) -> Restored:
    """Reads a checkpoint, and changes nothing on disk.

    Args:
      path: the folder of one checkpoint.
      abstract: (trainable, opt_state) as arrays or `jax.ShapeDtypeStruct`; each leaf says the
        shape, dtype and sharding to restore to. The sharding may differ from the saved one.
      fingerprint: what the checkpoint must have been written with.

    Raises:
      Damaged: it cannot be read.
      InputError: it belongs to another run (fingerprint, or other adapters).
    """
    record = _read_record(path)
    wanted = {item: _flat(tree) for item, tree in zip(_ITEMS, abstract, strict=True)}
    _check_same_run(path, record, wanted, fingerprint or {})
    arrays = _read_arrays(path, wanted, record["leaves"])
    trainable, opt_state = (
        _like(tree, arrays[item]) for item, tree in zip(_ITEMS, abstract, strict=True)
    )
    return Restored(trainable, opt_state, _meta(record))


def read_meta(path: Path) -> Meta:
    """What a checkpoint knows besides its arrays.

    Raises:
      Damaged: it cannot be read.
    """
    return _meta(_read_record(path))


def change_meta(path: Path, **changes: Any) -> None:
    """Gives fields of the `Meta` of a checkpoint other values; killed meanwhile, it changes none.

    Raises:
      Damaged: it cannot be read.
      OSError: the disk does not take it.
    """
    record = _read_record(path)
    record["meta"] |= changes
    replace_file(path / "meta" / "metadata", json.dumps(record))


def _meta(record: Mapping[str, Any]) -> Meta:
    """Of a checkpoint of another version, what is known here."""
    known = {each.name for each in fields(Meta)}
    return Meta(**{name: value for name, value in record["meta"].items() if name in known})


def read_trained(path: Path, abstract: Any) -> Any:
    """What was trained, from a checkpoint; nothing on disk is changed.

    Args:
      path: the folder of one checkpoint.
      abstract: the trained weights as for `read`.

    Raises:
      Damaged: it cannot be read.
      InputError: it has other weights.
    """
    leaves, wanted = _read_record(path)["leaves"], _flat(abstract)
    problems = _differences(leaves["trainable"], wanted)
    if problems:
        raise InputError(
            f"{path} is a checkpoint of another run than its recipe, in which "
            f"{_shortened(problems, most=4)}"
        )
    return _like(abstract, _read_arrays(path, {"trainable": wanted}, leaves)["trainable"])


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as they come back from JSON."""
    return json.loads(json.dumps(dict(values)))


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


def _read_record(path: Path) -> dict[str, Any]:
    """The item `meta`, read without Orbax, which would make every process of a run wait for all."""
    try:
        record = json.loads((path / "meta" / "metadata").read_text(encoding="utf-8"))
        if record["format"] != _FORMAT or record["meta"]["step"] != int(path.name):
            raise ValueError("its meta item is not one of ours")
    except Exception as error:
        _raise_unread(path, error)
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
    _LateWords.install()
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            found = reader.restore(path.absolute(), args=ocp.args.Composite(**args))
        arrays = dict(found.items())
        for item in wanted:
            described = _describe(arrays[item])
            changed = [name for name, now in described.items() if now != saved[item][name]]
            if changed:
                raise ValueError(f"checksum of {item} {_shortened(changed)} is wrong")
    except Exception as error:
        _raise_unread(path, error)
    return arrays


class _LateWords:
    """In the place of `sys.unraisablehook` from the first read by Orbax on.

    Where one array cannot be read, others cannot either, and nobody asks for their errors; or they
    end later, when their event loop is closed. Python would print a traceback of each beside our
    sentence.
    """

    def __init__(self, shown: Callable[[Any], None]) -> None:
        self._shown = shown

    def __call__(self, unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        of_orbax = code is not None and "orbax" in code.co_filename
        if not of_orbax and str(unraisable.exc_value) != "Event loop is closed":
            self._shown(unraisable)

    @classmethod
    def install(cls) -> None:
        """Puts it there, once."""
        if not isinstance(sys.unraisablehook, cls):
            sys.unraisablehook = cls(sys.unraisablehook)


def _raise_unread(path: Path, error: Exception) -> NoReturn:
    """Raises what keeps a checkpoint from being read: it is damaged, or cannot be had just now."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    for each in chain:
        if isinstance(each, (MemoryError, jax.errors.JaxRuntimeError)):
            raise each  # of the host or the devices, not of the files
    said = first_line(chain[-1])  # Orbax tells where, the storage tells what
    if any(_NOT_NOW.search(str(each)) for each in chain):
        raise InputError(
            f"checkpoint {path} cannot be read now ({said}); see to that, then run the same "
            "command again"
        ) from error
    raise Damaged(said) from error


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    given = getattr(leaf, "sharding", None)
    return given or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _check_same_run(
    path: Path,
    record: Mapping[str, Any],
    wanted: Mapping[str, Mapping[str, Any]],
    fingerprint: Mapping[str, Any],
) -> None:
    saved = record["meta"]["fingerprint"]
    problems = [
        f"{key} was {_shown(saved.get(key))}, is {_shown(fingerprint.get(key))}"
        for key in sorted({*saved, *fingerprint})
        if saved.get(key) != fingerprint.get(key)
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


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _shortened(problems: list[str], *, most: int = 8) -> str:
    more = f", and {len(problems) - most} more" if len(problems) > most else ""
    return ", ".join(problems[:most]) + more


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its kind."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
