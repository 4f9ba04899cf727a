# SPDX-License-Identifier: Apache-2.0
"""Several processes, one a host, as one run: joining, agreeing, and arrays that span them.

Every process runs the same command. Each builds the rows of its own devices, all compute, and
process 0 alone writes: logs, exports and the marks of the run folder. Checkpoints are written by
all, each its own shards, so the run folder must be one that every host sees.
"""

import contextlib
import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lora_tune.errors import InputError

HEARTBEAT = 40
"""Seconds without a sign of life after which a process counts as dead and the others end."""
_MANY = {  # variable of an environment -> whether its value speaks of several processes
    "JAX_COORDINATOR_ADDRESS": lambda _: True,
    "MEGASCALE_COORDINATOR_ADDRESS": lambda _: True,
    "TPU_WORKER_HOSTNAMES": lambda value: "," in value,
    "OMPI_COMM_WORLD_SIZE": lambda value: value != "1",
    "SLURM_STEP_NUM_TASKS": lambda value: value != "1",
}


def join(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: int = 300,
    detect: bool | None = None,
) -> None:
    """Joins the other processes of a run, or does nothing where there are none.

    Must come before anything else of jax that needs a device.

    Args:
      coordinator_address: `HOST:PORT` of process 0, the same in every process.
      num_processes: how many there are.
      process_id: the number of this one, from 0.
      timeout: seconds to wait for the others.
      detect: where the three above are None, whether jax finds them in the environment: a TPU
        slice, Slurm or Open MPI. None does so if variables there speak of several processes.

    Raises:
      InputError: some of the three are missing, or the others do not come.
    """
    given = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    missing = [f"distributed.{name}" for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise InputError(
            f"{' and '.join(missing)} must be set too: all three say how processes join"
        )
    if missing:
        spoken = any(test(os.environ[name]) for name, test in _MANY.items() if name in os.environ)
        if detect is False or not (detect or spoken):
            return
    elif not 0 <= (process_id or 0) < (num_processes or 0):
        raise InputError(
            f"distributed.process_id is {process_id}, expected 0 to {(num_processes or 0) - 1} "
            f"for distributed.num_processes={num_processes}"
        )
    if jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize(
            **given, initialization_timeout=timeout, heartbeat_timeout_seconds=HEARTBEAT
        )
    except (RuntimeError, ValueError, TypeError) as error:
        raise InputError(
            f"the processes of the run could not join ({str(error).splitlines()[0][:200]}); start "
            "the same command on every host with one distributed.coordinator_address, that of "
            "process 0, or set distributed.detect=false for this host alone"
        ) from error


def is_first() -> bool:
    """Whether this is the process that writes."""
    return jax.process_index() == 0


def is_left_alone(error: Exception) -> bool:
    """Whether an error of the devices says that another process is gone."""
    words = ("gloo", "connection", "peer", "unavailable", "heartbeat", "barrier", "coordination")
    return (
        isinstance(error, jax.errors.JaxRuntimeError)
        and jax.process_count() > 1
        and any(word in str(error).lower() for word in words)
    )


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Around work that every process does: where one of them fails, all stop.

    Args:
      what: the work, as it follows "could not".

    Raises:
      InputError: another process failed; what was raised inside goes on as it is.
    """
    try:
        yield
    except Exception as error:
        _gather(True)
        _agreed(error)
        raise
    failed = np.flatnonzero(_gather(False))
    if failed.size:
        raise _agreed(
            InputError(
                f"process {failed[0]} could not {what}, so no process goes on; its own output says "
                "why"
            )
        )


def fails_alone(error: BaseException) -> bool:
    """Whether the others do not know of an error that ends this process.

    They wait for it then, and it must not wait for them: not at exit either, as jax would.
    """
    return (
        jax.distributed.is_initialized()
        and jax.process_count() > 1
        and not getattr(error, "agreed", False)
    )


def _agreed(error: Exception) -> Exception:
    """The error, marked as one that every process knows of."""
    error.agreed = True  # pyright: ignore[reportAttributeAccessIssue]
    return error


def from_first(value: Any) -> Any:
    """What process 0 has, as JSON values, in every process."""
    if jax.process_count() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    padded = np.zeros(int(_gather(np.int64(text.size)).max()), np.uint8)
    padded[: text.size] = text
    found = _gather(padded)[0].tobytes().rstrip(b"\0")
    return json.loads(found)


def arrays_of_first(arrays: Any) -> Any:
    """A pytree of arrays as process 0 has it, in every process; shapes and types must agree."""
    if jax.process_count() == 1:
        return arrays
    return jax.tree.map(lambda array: _gather(array)[0], arrays)


def any_of(flag: bool) -> bool:
    """Whether it is true in a process."""
    return bool(_gather(flag).any())


def check_same(values: Mapping[str, Any]) -> None:
    """Checks that what processes must have in common is the same in each.

    Raises:
      InputError: naming the first that differs from that of process 0.
    """
    for name, value in values.items():
        text = json.dumps(value, sort_keys=True, default=str)
        digests = _gather(np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8))
        other = np.flatnonzero((digests != digests[:1]).any(axis=-1))
        if other.size:
            raise _agreed(
                InputError(
                    f"{name} of process {other[0]} is not that of process 0; give every host the "
                    "same command, files and versions"
                )
            )


def _gather(value: Any) -> np.ndarray:
    """A value of every process, `[processes, ...]`."""
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return np.asarray(value)[None]
    return np.asarray(multihost_utils.process_allgather(np.asarray(value)))


def put(tree: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """Puts host arrays, the same in every process where they are read, on the devices."""
    if jax.process_count() == 1 or sharding is None:
        return jax.device_put(tree, sharding)

    def make(array: np.ndarray) -> jax.Array:
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    return jax.tree.map(make, tree)


def fetch(array: Any) -> np.ndarray:
    """A whole array, on the host of every process; all must ask for the same ones in one order."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def local_rows(sharding: NamedSharding, shape: tuple[int, int, int]) -> np.ndarray | None:
    """The rows of a batch that this process puts on its devices, None where it is all of them.

    Args:
      sharding: of the arrays `[accumulation, rows / accumulation, T]`.
      shape: theirs.

    Returns:
      bool `[rows]`, in the order of the batch.
    """
    if jax.process_count() == 1:
        return None
    wanted = np.zeros(shape[:2], bool)
    for index in sharding.addressable_devices_indices_map(shape).values():
        wanted[index[:2] if index is not None else ...] = True
    return wanted.ravel()


class StopTogether:
    """Lets processes stop after the same step, where a signal reached but some of them.

    What a process says at one step counts at the next: then it is known without waiting for it.
    """

    def __init__(self) -> None:
        self._pending: jax.Array | None = None
        devices = np.array(jax.devices())
        self._everywhere = NamedSharding(Mesh(devices, ("all",)), PartitionSpec("all"))
        self._largest: Callable[[jax.Array], jax.Array] = jax.jit(jax.numpy.max)

    def ask(self, name: str | None) -> str | None:
        """Takes the signal that reached this process; returns the one that ends the run now."""
        if jax.process_count() == 1:
            return name
        number = 0 if name is None else int(signal.Signals[name])
        mine = np.full(jax.local_device_count(), number, np.int32)
        said = self._pending
        self._pending = self._largest(
            jax.make_array_from_process_local_data(self._everywhere, mine)
        )
        agreed = 0 if said is None else int(said)
        return signal.Signals(agreed).name if agreed else None
