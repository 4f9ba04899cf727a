# SPDX-License-Identifier: Apache-2.0
"""The training step of a recipe from shapes alone: no weights, no data, no devices.

Model, optimizer, shardings and step come from `build`, as in a run; what is made here are shapes in
the place of arrays.
"""

import dataclasses
import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lora_tune import assets, build, sharding
from lora_tune.errors import InputError
from lora_tune.hf.files import read_json
from lora_tune.hf.table import bind
from lora_tune.layers import sequence
from lora_tune.lora.inject import add_lora
from lora_tune.models.decoder import Decoder
from lora_tune.plan.topologies import Topology
from lora_tune.recipe import Recipe
from lora_tune.training.state import SplitModel, Weights, split_model

_CONFIGS = Path(assets.__file__).parent / "configs"
KNOWN = {
    **{
        f"Qwen/Qwen3-Next-80B-A3B-{kind}": _CONFIGS / "qwen3-next-80b-a3b.json"
        for kind in ("Instruct", "Thinking")
    },
    "HuggingFaceTB/SmolLM2-135M-Instruct": _CONFIGS / "smollm2-135m.json",
}
"""Hub models whose shapes are shipped, for machines that cannot reach the hub."""
_STEPS = 1000
"""Steps of a run whose data is not read; the schedule's length is a constant in its program."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced step, ready to compile.

    Attributes:
      traced: what `jax.stages` calls a traced function.
      mesh: over the devices it is for.
      held: bytes on one device of base, adapters, optimizer and batch, by their shardings.
      tokens: tokens of a step, over all devices.
    """

    traced: Any
    mesh: Mesh
    held: Mapping[str, int]
    tokens: int


def model_config(recipe: Recipe, *, layers: int | None = None) -> tuple[dict[str, Any], str | None]:
    """The `config.json` of a recipe's model, and where it came from if that is worth saying.

    Args:
      recipe: its `model.path` may be a hub id that cannot be reached, if its shapes are shipped.
      layers: a depth to plan for instead of the model's.

    Raises:
      InputError: there is no such model, or it has fewer layers.
    """
    path, note = recipe.model.path, None
    try:
        with build.said_of("model.path"):
            source = build.find_source(path, revision=recipe.model.revision, weights=False)
        config = read_json(source.folder / "config.json")
    except InputError:
        if path not in KNOWN:
            raise
        config = json.loads(KNOWN[path].read_text(encoding="utf-8"))
        note = f"{path} is not here and the hub cannot be reached: its shapes are those shipped"
    if layers is not None:
        config = _of_depth(config, layers)
    return config, note


def _of_depth(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The configuration with its first layers only."""
    there = config.get("num_hidden_layers")
    if isinstance(there, int) and not 1 <= layers <= there:
        raise InputError(f"layers={layers}: the model has {there}; give 1 to {there}")
    shorter = {**config, "num_hidden_layers": layers}
    if config.get("layer_types"):
        shorter["layer_types"] = config["layer_types"][:layers]
    return shorter


def make_model(recipe: Recipe, config: Mapping[str, Any]) -> Decoder:
    """The model of a recipe, of shapes, with its adapters."""
    build.check_positions(recipe, config)
    model = build.decoder_of(config, build.decoder_options(recipe), where=recipe.model.path)
    return model if recipe.lora is None else add_lora(model, recipe.lora.config())


def devices_of(topology: Topology) -> list[Any]:
    """The devices of a topology, described by libtpu, or those of this machine.

    Raises:
      InputError: libtpu is missing or does not know the topology, or no such device is here.
    """
    if topology.generation is None:
        try:
            return list(jax.devices(topology.name))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise InputError(
                f"topology={topology.name}: jax finds no such device here ({reason})"
            ) from error
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            f"topology={topology.title}: compiling for TPUs needs libtpu, which works without a "
            "TPU on Linux x86_64; pip install 'jax[tpu]'"
        )
    options: Any = topology.libtpu_options()
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=topology.libtpu_name, **options
        )
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"topology={topology.title}: this libtpu does not know {topology.libtpu_name} "
            f"({reason}); choose another slice, or upgrade it: pip install -U 'jax[tpu]'"
        ) from error
    return list(described.devices)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the step of a recipe takes, as shapes with their places on a mesh."""

    split: SplitModel
    optimizer: Any
    trainable: Mapping[str, jax.ShapeDtypeStruct]
    opt_state: Any
    frozen: Mapping[str, jax.ShapeDtypeStruct]
    batch: Mapping[str, jax.ShapeDtypeStruct]

    def held(self) -> dict[str, int]:
        """Bytes of base, adapters, optimizer and batch on one device."""
        adapted = bool(self.frozen)  # with `lora: null` what is trained is the base
        return {
            "base": bytes_on_device(self.frozen if adapted else self.trainable),
            "adapters": bytes_on_device(self.trainable) if adapted else 0,
            "optimizer": bytes_on_device(self.opt_state),
            "batch": bytes_on_device(self.batch),
        }


def inputs_of(recipe: Recipe, model: Decoder, mesh: Any) -> Inputs:
    """The inputs of a recipe's step on a mesh, which may be without devices.

    Raises:
      InputError: the mesh does not divide a weight.
    """
    leaves = bind(model.family, model)
    sharding.check_divides({leaf.dotted: (leaf.shape, leaf.axes) for leaf in leaves}, mesh)
    split = split_model(model)
    steps = recipe.train.max_steps or _STEPS + recipe.optim.warmup_steps
    optimizer, _ = build.optimizer_of(recipe, steps)
    state, places = build.optimizer_shardings(optimizer, split, mesh)
    return Inputs(
        split,
        optimizer,
        _placed(split, split.trainable, mesh),
        jax.tree.map(_shape_on, state, places),
        _placed(split, split.frozen, mesh),
        batch_shapes(recipe, mesh),
    )


def trace(recipe: Recipe, model: Decoder, mesh: Mesh) -> Program:
    """Traces the step that `lora-tune recipe=…` runs, on a mesh.

    Raises:
      InputError: the mesh does not divide a weight, or a setting does not suit its devices.
    """
    build.check_remat(recipe.model.remat, mesh.devices.flat[0].platform)
    sequence.check_heads(mesh.shape["sequence"], model.config)
    inputs = inputs_of(recipe, model, mesh)
    key = _shape_on(jax.eval_shape(lambda: jax.random.key(0)), NamedSharding(mesh, PartitionSpec()))
    several = mesh if mesh.size > 1 else None  # a run has no mesh on one device
    places = jax.tree.map(lambda leaf: leaf.sharding, inputs.opt_state)
    step = build.jit_step(recipe, inputs.split, inputs.optimizer, places, several)
    traced = step.trace(inputs.trainable, inputs.opt_state, inputs.frozen, inputs.batch, key)
    tokens = recipe.train.batch_size * recipe.data.max_length
    return Program(traced, mesh, inputs.held(), tokens)


def batch_shapes(recipe: Recipe, mesh: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch as the loop puts it on the devices, `[accumulation, rows, T]`."""
    parts = recipe.train.gradient_accumulation_steps
    shape = (parts, recipe.train.batch_size // parts, recipe.data.max_length)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=build.rows_sharding(mesh))
    names = ("tokens", "targets", "weights", "segment_ids", "positions")
    return {n: ids.update(dtype=jnp.float32) if n == "weights" else ids for n in names}


def _placed(split: SplitModel, weights: Weights, mesh: Any) -> dict[str, jax.ShapeDtypeStruct]:
    places = split.shardings(mesh, weights)
    return {name: _shape_on(value, places[name]) for name, value in weights.items()}


def _shape_on(value: Any, place: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=place)


def bytes_on_device(tree: Any) -> int:
    """Bytes of shapes with shardings on one device; a layout's padding is not counted."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
