# SPDX-License-Identifier: Apache-2.0
"""Compiling a traced step, and what the compiler and its program say about it."""

import dataclasses
import os
import re
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from lora_tune.plan import cost, hlo
from lora_tune.plan.environment import no_cache
from lora_tune.plan.kernels import kernel_flops
from lora_tune.plan.topologies import Topology

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "": 1}
_AMOUNT = r"\(?([\d.]+)([KMGT]?)\)?"
_NEEDED = re.compile(
    rf"(?:required for HLO temporaries|[Uu]sed) {_AMOUNT} (?:exceeds available HBM|of) {_AMOUNT}"
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """The compiler's figures, bytes on one device.

    Attributes:
      argument: weights, optimizer state and batch.
      output: results, those in the place of arguments included.
      alias: results in the place of arguments.
      temp: what the program takes beside them.
      code: the program itself.
      peak: the most in use at one time, arguments included; None where no compiler says so.
      host_temp: what it keeps in the memory of the host.
    """

    argument: int
    output: int
    alias: int
    temp: int
    code: int
    peak: int | None
    host_temp: int

    @property
    def total(self) -> int:
        """All of it together, as if none of it gave way to another."""
        return self.argument + self.output - self.alias + self.temp + self.code

    @property
    def needed(self) -> int:
        """What must fit: the peak and the program, or the total where no peak is known."""
        return self.total if self.peak is None else self.peak + self.code


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """The compiler's refusal of a program: what it needs and what there is, None if unsaid."""

    needed: int | None
    available: int | None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step: its memory or the refusal, its cost, and the time it took to compile."""

    memory: Memory | TooLarge
    cost: cost.Cost | None
    text: str | None
    seconds: float


def compile_step(traced: Any, mesh: Mesh, *, slices: int = 1) -> Compiled:
    """Lowers and compiles a traced step for a mesh over slices, without the persistent cache."""
    started = time.perf_counter()
    with no_cache():
        try:
            compiled = traced.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            refusal = refusal_of(str(error))
            if refusal is None:
                raise
            return Compiled(refusal, None, None, time.perf_counter() - started)
    seconds = time.perf_counter() - started
    text = compiled.as_text()
    counted = cost.count(hlo.parse(text), devices=mesh.size, slice_devices=mesh.size // slices)
    if counted.kernels:
        counted.flops += kernel_flops(traced.jaxpr.jaxpr)
    return Compiled(memory_of(compiled, mesh.devices.flat[0].platform), counted, text, seconds)


def memory_of(compiled: Any, platform: str) -> Memory:
    """The compiler's figures of a compiled program."""
    stats = compiled.memory_analysis()
    # Only libtpu's peak counts what the program takes; it is also what libtpu compares with the
    # memory of the chip when it refuses a program.
    peak = stats.peak_memory_in_bytes if platform == "tpu" else None
    return Memory(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.generated_code_size_in_bytes,
        peak,
        stats.host_temp_size_in_bytes,
    )


def refusal_of(message: str) -> TooLarge | None:
    """What the compiler's error says of memory; None if it is about something else."""
    if "RESOURCE_EXHAUSTED" not in message and "out of memory" not in message.lower():
        return None
    found = _NEEDED.search(message)
    if found is None:
        return TooLarge(None, None)
    needed, available = (
        int(float(number) * _UNITS[unit]) for number, unit in (found.group(1, 2), found.group(3, 4))
    )
    return TooLarge(needed, available)


def memory_limit(topology: Topology, device: Any) -> int:
    """Bytes that a program may have on a device; of a CPU the machine's memory.

    Devices that share the machine's memory each have all of it: fake ones are for tests.
    """
    if topology.generation is not None:
        return topology.facts.hbm // topology.facts.devices
    stats: Mapping[str, int] = device.memory_stats() or {}
    return stats.get("bytes_limit", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
