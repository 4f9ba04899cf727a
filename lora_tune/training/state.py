# SPDX-License-Identifier: Apache-2.0
"""A model as plain dictionaries of arrays: what is trained, what is frozen, how both are sharded.

The step, the optimizer and the checkpoints see `Weights`, a dict from a parameter's path
("blocks/runs/0/self_attn/q_proj/kernel_lora_a") to its array, and nothing else of the model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lora_tune import sharding

Weights = dict[str, jax.Array]
Axes = Mapping[str, tuple[str | None, ...]]


def _key(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _path(key: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in key.split("/"))


def flatten(state: nnx.State) -> Weights:
    """The arrays of a state by path."""
    return {_key(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}


def unflatten(weights: Mapping[str, Any]) -> nnx.State:
    """The inverse of `flatten`, a state of bare arrays: `nnx.merge` takes it with its graphdef."""
    return nnx.from_flat_state({_path(key): value for key, value in weights.items()})


@dataclasses.dataclass(frozen=True)
class SplitModel:
    """A model split for training.

    Attributes:
      graphdef: the structure, static; joins any weights of the same shapes.
      trainable: the weights that the optimizer changes.
      frozen: all others; inputs of the step, never outputs.
      axes: logical axes of every weight.
    """

    graphdef: Any
    trainable: Weights
    frozen: Weights
    axes: Axes

    def merge(self, trainable: Weights | None = None) -> Any:
        """The model, with its own or the given trainable weights."""
        weights = {**self.frozen, **(self.trainable if trainable is None else trainable)}
        return nnx.merge(self.graphdef, unflatten(weights), copy=True)

    def sizes(self) -> dict[str, int]:
        """Numbers of `trained` and of `frozen` parameters."""
        parts = {"trained": self.trainable, "frozen": self.frozen}
        return {name: sum(array.size for array in part.values()) for name, part in parts.items()}

    def specs(self, names: Mapping[str, Any]) -> dict[str, PartitionSpec]:
        """Partition specs over the manual axes of the step, for the named weights."""
        return {name: sharding.spec(self.axes[name], only=sharding.MANUAL_AXES) for name in names}

    def shardings(self, mesh: Mesh, names: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """Full shardings on `mesh`, for the named weights."""
        return {name: sharding.named_sharding(mesh, self.axes[name]) for name in names}


def split_model(model: Any) -> SplitModel:
    """Splits a model: its adapters are trained, or, if it has none, every parameter."""
    is_lora = bool(jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    graphdef, trainable, frozen = nnx.split(model, nnx.LoRAParam if is_lora else nnx.Param, ...)
    axes = {
        _key(path): tuple(variable.get_metadata().get("axes", ()))
        for state in (trainable, frozen)
        for path, variable in nnx.to_flat_state(state)
    }
    return SplitModel(graphdef, flatten(trainable), flatten(frozen), axes)
