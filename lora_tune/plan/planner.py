# SPDX-License-Identifier: Apache-2.0
"""Plans a recipe for slices: what its step needs on each chip, and what it can do at best."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh

from lora_tune import recipe as recipes
from lora_tune import sharding
from lora_tune.errors import InputError
from lora_tune.hf.table import bind
from lora_tune.models.decoder import Decoder
from lora_tune.plan import abstract, measure, roofline
from lora_tune.plan.topologies import Topology
from lora_tune.recipe import Mesh, Recipe


@dataclasses.dataclass(frozen=True)
class Plan:
    """A recipe's step on a topology.

    Attributes:
      recipe: with the mesh and batch that were planned.
      topology: what it was compiled for.
      device_kind: of its devices.
      available: devices of the topology, of which the mesh uses some or all.
      limit: bytes that a program may have on a device.
      layers: depth that was planned.
      program: the traced step, with what it holds on a device.
      compiled: what the compiler said.
      rates: published rates of a device, None where there are none.
      notes: what the reader must know beside the figures.
    """

    recipe: Recipe
    topology: Topology
    device_kind: str
    available: int
    limit: int
    layers: int
    program: abstract.Program
    compiled: measure.Compiled
    rates: roofline.Rates | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether what the step needs at its peak, and its program, fit on each device."""
        memory = self.compiled.memory
        return isinstance(memory, measure.Memory) and memory.needed <= self.limit

    def light(self) -> "Plan":
        """The plan without the traced and the compiled program, which are large."""
        program = dataclasses.replace(self.program, traced=None)
        compiled = dataclasses.replace(self.compiled, text=None)
        return dataclasses.replace(self, program=program, compiled=compiled)

    @property
    def bound(self) -> roofline.Bound | None:
        """The least time of a step by published rates, None where none are known."""
        if self.rates is None or self.compiled.cost is None:
            return None
        return roofline.bound(self.compiled.cost, self.rates)

    @property
    def overrides(self) -> tuple[str, ...]:
        """What makes the recipe the one that was planned."""
        return overrides_of(self.recipe)


def overrides_of(recipe: Recipe) -> tuple[str, ...]:
    """The `key=value` words for the mesh, batch, length and remat of a recipe."""
    # All axes: the file may ask for more of one than was planned.
    sizes = dataclasses.asdict(recipe.mesh)
    words = {
        **{f"mesh.{name}": size for name, size in sizes.items()},
        "train.batch_size": recipe.train.batch_size,
        "data.max_length": recipe.data.max_length,
        "model.remat": recipe.model.remat,
    }
    if recipe.train.gradient_accumulation_steps > 1:
        words["train.gradient_accumulation_steps"] = recipe.train.gradient_accumulation_steps
    return tuple(f"{name}={value}" for name, value in words.items())


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe, whose data need not be there: a plan does not read it."""
    return recipes.load(recipe, [*overrides, "data.sources=[]", "data.path=not-read"])


def plan(
    recipe: Recipe,
    topology: Topology,
    *,
    layers: int | None = None,
    keep_mesh: bool = False,
) -> Plan:
    """Compiles a recipe's step for a topology.

    Args:
      recipe: from `load`.
      topology: from `lora_tune.plan.topologies.parse`.
      layers: a depth to plan for instead of the model's.
      keep_mesh: plan for the recipe's mesh even if it leaves devices idle. Otherwise such a mesh,
        and one that reaches over slices, is replaced by one over all, with as many rows on each.

    Raises:
      InputError: what is asked for cannot be had; see `lora_tune.plan.abstract`.
    """
    config, note = abstract.model_config(recipe, layers=layers)
    devices = abstract.devices_of(topology)
    model = abstract.make_model(recipe, config)
    suits = ways(recipe.mesh) == len(devices) and recipe.mesh.data % topology.slices == 0
    if not keep_mesh and not suits:
        recipe = over_all(recipe, model, len(devices), topology.slices)
    mesh = sharding.make_mesh(**dataclasses.asdict(recipe.mesh), devices=devices)
    program = abstract.trace(recipe, model, mesh)
    compiled = measure.compile_step(program.traced, mesh, slices=topology.slices)
    return Plan(
        recipe=recipe,
        topology=topology,
        device_kind=devices[0].device_kind,
        available=len(devices),
        limit=measure.memory_limit(topology, devices[0]),
        layers=config["num_hidden_layers"],
        program=program,
        compiled=compiled,
        rates=roofline.rates_of(topology, devices[0].device_kind),
        notes=tuple(filter(None, (note, _shortened(layers), *_notes(recipe, topology, compiled)))),
    )


def _shortened(layers: int | None) -> str | None:
    if layers is None:
        return None
    return f"these are figures of {layers} layers; what runs is the whole model, which needs more"


def _notes(recipe: Recipe, topology: Topology, compiled: measure.Compiled) -> Iterator[str]:
    if topology.generation is not None and topology.hosts > 1:
        yield (
            f"{topology.title} has {topology.hosts} hosts, and a run uses the devices of one: "
            "this says what the step would need"
        )
    if recipe.eval.every or recipe.eval.num_samples:
        yield "evaluation and sample answers run programs of their own, which are not counted here"
    cost = compiled.cost
    if cost is not None and cost.dynamic:
        yield (
            f"{len(cost.dynamic)} loops run as often as data tells; each is counted once "
            f"({', '.join(cost.dynamic[:3])})"
        )
    if cost is not None and cost.kernels:
        names = ", ".join(f"{name} x {times}" for name, times in cost.kernels.items())
        yield (
            f"the operations of these kernels are counted in the traced step, blocks that a mask "
            f"leaves out included: {names}"
        )


def ways(mesh: Mesh) -> int:
    """Devices that a mesh uses."""
    return math.prod(dataclasses.asdict(mesh).values())


def row_ways(mesh: Mesh) -> int:
    """Devices that take rows of their own."""
    return mesh.data * mesh.fsdp * mesh.expert


def rows_of(recipe: Recipe) -> int:
    """Rows of one accumulation step on each device."""
    parts = recipe.train.gradient_accumulation_steps * row_ways(recipe.mesh)
    return max(1, recipe.train.batch_size // parts)


def with_mesh(recipe: Recipe, mesh: Mesh, *, rows: int) -> Recipe:
    """The recipe on another mesh, with `rows` rows on each device."""
    size = rows * row_ways(mesh) * recipe.train.gradient_accumulation_steps
    train = dataclasses.replace(recipe.train, batch_size=size)
    return dataclasses.replace(recipe, mesh=mesh, train=train)


def over_all(recipe: Recipe, model: Decoder, devices: int, slices: int) -> Recipe:
    """The recipe on a mesh of all devices: each slice holds the model once, spread over it.

    Experts are spread first, since tokens that travel to them cost less than gathering them.
    """
    rows = rows_of(recipe)
    for mesh in meshes(model, devices, slices):
        if mesh.tensor == recipe.mesh.tensor and mesh.data == slices:
            return with_mesh(recipe, mesh, rows=rows)
    raise InputError(
        f"mesh: no mesh.fsdp x mesh.expert over {devices // slices} devices divides every weight "
        f"of {recipe.model.path}; give mesh.data, mesh.fsdp, mesh.expert and mesh.tensor"
    )


def meshes(model: Decoder, devices: int, slices: int) -> Iterator[Mesh]:
    """Every mesh over all devices that divides the weights; more experts come first."""
    leaves = {leaf.dotted: (leaf.shape, leaf.axes) for leaf in bind(model.family, model)}
    experts = any("expert" in axes for _, axes in leaves.values())
    each = devices // slices
    sizes = [n for n in range(1, each + 1) if each % n == 0]
    for expert in reversed(sizes if experts else [1]):
        for fsdp in reversed([n for n in sizes if (each // expert) % n == 0]):
            rest = each // (expert * fsdp)
            for tensor in [n for n in sizes if rest % n == 0]:
                mesh = Mesh(data=slices * rest // tensor, fsdp=fsdp, tensor=tensor, expert=expert)
                if _divides(leaves, mesh):
                    yield mesh


def _divides(leaves: Any, mesh: Mesh) -> bool:
    try:
        sharding.check_divides(leaves, abstract_mesh(mesh))
    except InputError:
        return False
    return True


def abstract_mesh(mesh: Mesh) -> Any:
    """The mesh of a recipe without devices."""
    sizes = dataclasses.asdict(mesh)
    return AbstractMesh(tuple(sizes[axis] for axis in sharding.MESH_AXES), sharding.MESH_AXES)
