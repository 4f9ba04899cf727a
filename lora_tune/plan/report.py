# SPDX-License-Identifier: Apache-2.0
"""A plan as a table for the terminal and as plain values for a file."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from lora_tune.console import Console
from lora_tune.hf.folder import replace_file
from lora_tune.plan.measure import Memory, TooLarge
from lora_tune.plan.planner import Plan, overrides_of, rows_of
from lora_tune.plan.search import Found, Trial
from lora_tune.recipe import Recipe

_RESOURCES = {
    "compute": "matrix products",
    "memory": "memory traffic",
    "links": "links between chips",
    "between": "network between slices",
}


def values(plan: Plan) -> dict[str, Any]:
    """All figures of a plan as JSON values; bytes, operations and rows are of one device."""
    memory, recipe, topology = plan.compiled.memory, plan.recipe, plan.topology
    return {
        "topology": topology.title,
        "device_kind": plan.device_kind,
        "devices": plan.program.mesh.size,
        "devices_available": plan.available,
        "chips": None if topology.generation is None else topology.chips,
        "hosts": None if topology.generation is None else topology.hosts,
        "slices": topology.slices,
        "model": recipe.model.path,
        "layers": plan.layers,
        "mesh": dataclasses.asdict(recipe.mesh),
        "rows": rows_of(recipe),
        "batch_size": recipe.train.batch_size,
        "gradient_accumulation_steps": recipe.train.gradient_accumulation_steps,
        "max_length": recipe.data.max_length,
        "remat": recipe.model.remat,
        "base_bytes": plan.program.held["base"],
        "adapter_bytes": plan.program.held["adapters"],
        "optimizer_bytes": plan.program.held["optimizer"],
        "batch_bytes": plan.program.held["batch"],
        **_memory(memory),
        "hbm_bytes": plan.limit,
        "fits": plan.fits,
        "compile_seconds": round(plan.compiled.seconds, 1),
        **_work(plan),
        "overrides": list(plan.overrides),
        "notes": list(plan.notes),
        "versions": {name: _version(name) for name in ("jax", "libtpu")},
    }


def _memory(memory: Memory | TooLarge) -> dict[str, int | None]:
    if isinstance(memory, TooLarge):
        names = ("argument", "output", "alias", "temp", "code", "peak", "host_temp")
        unknown = dict.fromkeys(f"{name}_bytes" for name in names)
        return {**unknown, "total_bytes": memory.needed, "needed_bytes": memory.needed}
    parts = {f"{name}_bytes": size for name, size in dataclasses.asdict(memory).items()}
    return {**parts, "total_bytes": memory.total, "needed_bytes": memory.needed}


def _work(plan: Plan) -> dict[str, Any]:
    cost, bound = plan.compiled.cost, plan.bound
    seconds = None if bound is None else bound.seconds
    return {
        "flops": cost and cost.flops,
        "accessed_bytes": cost and cost.bytes,
        "collectives": None
        if cost is None
        else {kind: dataclasses.asdict(traffic) for kind, traffic in sorted(cost.traffic.items())},
        "dynamic_loops": None if cost is None else cost.dynamic,
        "kernels": None if cost is None else cost.kernels,
        "bound_seconds": seconds,
        "bound_by": None if bound is None else {**dataclasses.asdict(bound), "limit": bound.limit},
        "tokens_per_step": plan.program.tokens,
        "bound_tokens_per_second": plan.program.tokens / seconds if seconds else None,
    }


def _version(name: str) -> str | None:
    if name == "jax":
        return jax.__version__
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def write(found: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Writes the values of one plan as an object, of several as a list of objects.

    Raises:
      OSError: the file cannot be written.
    """
    text = json.dumps(found[0] if len(found) == 1 else found, indent=2)
    replace_file(Path(path), text + "\n")


def search_values(found: Found) -> dict[str, Any]:
    """What a search found as JSON values."""
    return {
        "largest_batch": trial_values(found.largest),
        "longest": trial_values(found.longest),
        "trials": [trial_values(trial) for trial in found.trials],
    }


def trial_values(trial: Trial) -> dict[str, Any]:
    """A compiled program of a search as JSON values."""
    recipe = trial.recipe
    return {
        "mesh": dataclasses.asdict(recipe.mesh),
        "rows": rows_of(recipe),
        "max_length": recipe.data.max_length,
        "remat": recipe.model.remat,
        "argument_bytes": trial.held,
        "needed_bytes": trial.needed,
        "fits": trial.fits,
        "bound_seconds": trial.seconds,
        "overrides": list(overrides_of(recipe)),
    }


def trial_line(trial: Trial) -> str:
    """A compiled program of a search as a line."""
    recipe = trial.recipe
    bound = "" if trial.seconds is None else f", at least {seconds_text(trial.seconds)} a step"
    return (
        f"{mesh_text(recipe)}, remat {recipe.model.remat}, {rows_of(recipe)} x "
        f"{recipe.data.max_length} tokens: needs {_gigabytes(trial.needed)} GB"
        f"{bound if trial.fits else ', too much'}"
    )


def show_search(found: Found | None, console: Console | None = None) -> None:
    """Prints what a search found beside the plan of the least bound."""
    console = console or Console()
    if found is None:
        console.print("search: nothing that was compiled fits")
        return
    for title, trial in (
        ("largest batch that fits with remat full", found.largest),
        ("longest rows that fit, one a device", found.longest),
    ):
        console.print(f"{title}: {trial_line(trial)}", markup=False)
        console.print(f"  {' '.join(overrides_of(trial.recipe))}", markup=False)


def show(plan: Plan, console: Console | None = None) -> None:
    """Prints a plan."""
    console = console or Console()
    for line in _head(plan):
        console.print(line, markup=False)
    console.print(_memory_table(plan))
    cost = plan.compiled.cost
    if cost is not None and cost.traffic:
        console.print(_traffic_table(plan))
    for line in _words(plan):
        console.print(line, markup=False)


def _head(plan: Plan) -> Iterator[str]:
    topology, recipe = plan.topology, plan.recipe
    kind = f"{plan.available} devices ({plan.device_kind})"
    if topology.generation is not None:
        grid = "x".join(map(str, topology.grid))
        kind = f"{topology.chips} chips ({plan.device_kind}, {grid})"
        if topology.facts.devices > 1:
            kind += f" of {topology.facts.devices} devices; figures are of a device"
    yield f"{topology.title}: {kind}"
    yield (
        f"{recipe.model.path}, {plan.layers} layers, {recipe.model.dtype}, remat "
        f"{recipe.model.remat}; {mesh_text(recipe)}; {rows_of(recipe)} x {recipe.data.max_length} "
        f"tokens a device, {recipe.train.batch_size} rows a step"
    )


def mesh_text(recipe: Recipe) -> str:
    """The axes of a mesh that have more than one device."""
    used = {k: v for k, v in dataclasses.asdict(recipe.mesh).items() if v > 1}
    return " x ".join(f"{name} {size}" for name, size in used.items()) or "one device"


def seconds_text(seconds: float) -> str:
    """Seconds, or milliseconds below one."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:,.3g} ms"


def _gigabytes(count: float | None) -> str:
    return "unknown" if count is None else f"{count / 1e9:,.3f}"


def _memory_table(plan: Plan) -> Table:
    held, memory = plan.program.held, plan.compiled.memory
    table = Table("memory of a device", title_justify="left", box=None, pad_edge=False)
    table.add_column("GB", justify="right")
    for name in ("base", "adapters", "optimizer", "batch"):
        if held[name]:
            table.add_row(name, _gigabytes(held[name]))
    if isinstance(memory, Memory):
        table.add_row("temp", _gigabytes(memory.temp))
        table.add_row("code", _gigabytes(memory.code))
        table.add_row("total", _gigabytes(memory.total))
        if memory.peak is not None:
            table.add_row("needed at once, with code", _gigabytes(memory.needed))
    else:
        table.add_row("needed", _gigabytes(memory.needed))
    table.add_row("there is", _gigabytes(plan.limit))
    return table


def _traffic_table(plan: Plan) -> Table:
    cost = plan.compiled.cost
    assert cost is not None
    table = Table("communication of a device", box=None, pad_edge=False)
    for name in ("in the program", "a step", "GB"):
        table.add_column(name, justify="right")
    for kind, traffic in sorted(cost.traffic.items()):
        table.add_row(kind, str(traffic.static), str(traffic.executed), _gigabytes(traffic.bytes))
    return table


def _words(plan: Plan) -> Iterator[str]:
    cost, bound, memory = plan.compiled.cost, plan.bound, plan.compiled.memory
    if cost is not None:
        yield (
            f"a step, on each device: {cost.flops / 1e12:,.2f} TFLOP of matrix products, "
            f"{_gigabytes(cost.bytes)} GB of memory traffic (approximate)"
        )
    if bound is not None:
        tokens = plan.program.tokens / bound.seconds
        yield (
            f"bound, not an estimate: a step takes at least {seconds_text(bound.seconds)}, at most "
            f"{tokens:,.0f} tokens/s; limited by {_RESOURCES[bound.limit]} at the published rate"
        )
    elif cost is not None:
        yield f"no rates are published for {plan.device_kind!r}, so there is no bound on the time"
    for note in plan.notes:
        yield f"note: {note}"
    yield f"compiled in {plan.compiled.seconds:,.0f} s"
    needed = memory.needed
    amounts = f"{_gigabytes(needed)} of {_gigabytes(plan.limit)} GB"
    yield f"fits: {amounts}" if plan.fits else f"does not fit: needs {amounts}"
    yield f"to run this: {' '.join(plan.overrides)}"
