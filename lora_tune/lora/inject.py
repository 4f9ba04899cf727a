# SPDX-License-Identifier: Apache-2.0
"""Injection: the base model in, the same weights with adapters out.

Qwix meets the model in one abstract trace: no forward pass runs and no weight is touched. What the
trace yields is the adapted graph and the shapes, axes and initialisers of the adapters; their
values are then drawn per Hugging Face module, straight to their devices. The base is neither
copied nor re-stacked, and two adapters can share one base.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from lora_tune import distributed
from lora_tune.errors import InputError, listed
from lora_tune.hf.table import STACK_AXES, Leaf, Path, bind, module_name
from lora_tune.lora.config import LoraConfig
from lora_tune.lora.provider import AdapterProvider, LoRAScale
from lora_tune.lora.targets import StackTarget, adaptable_modules, resolve, stack_targets
from lora_tune.models.initial import draw_leaf
from lora_tune.sharding import named_sharding

KERNEL, LORA_A, LORA_B = "kernel", "kernel_lora_a", "kernel_lora_b"
LORA_SCALE = "kernel_lora_scale"


@dataclasses.dataclass(frozen=True, eq=False)
class Adaptation:
    """What `add_lora` leaves on a decoder as `model.adapter`: the configuration, for exports."""

    config: LoraConfig


def adapter_filter(_: Any, node: Any) -> bool:
    """nnx filter for everything that injection adds: A, B and their scale."""
    return isinstance(node, nnx.LoRAParam | LoRAScale)


def add_lora(model: Any, config: LoraConfig, *, seed: int = 0) -> Any:
    """Returns the model with adapters; the arrays of the base are shared, not copied.

    At once after this call the model computes bit for bit what the base computes, since B = 0.

    Args:
      model: a decoder, concrete or abstract; not modified.
      config: which modules, rank, scale, dropout.
      seed: of the A matrices. Every module's A follows from the seed and its name.

    Returns:
      A new decoder of the same shape, whose `nnx.LoRAParam` leaves are the adapters.

    Raises:
      InputError: a target matches nothing, or the model has adapters already.
    """
    if nnx.to_flat_state(nnx.state(model, adapter_filter)):
        raise InputError("add_lora: the model already has adapters; start from the base model")
    leaves = {leaf.path: leaf for leaf in bind(model.family, model)}
    stacks = adapted_stacks(leaves.values(), config)
    graphdef, adapters, base = _inject(model, stacks, config)
    missing = set(stacks) - {(*path[:-1], KERNEL) for path, _ in nnx.to_flat_state(adapters)}
    if missing:
        names = listed(sorted(leaves[path].names.flat[0] for path in missing))
        raise RuntimeError(f"no adapter appeared on {names}, though the table says it can")
    mesh = _mesh_of(base)
    if not isinstance(jax.tree.leaves(base)[0], jax.ShapeDtypeStruct):
        adapters = _draw(adapters, leaves, stacks, seed, mesh)
    adapted = nnx.merge(graphdef, adapters, base, copy=True)
    adapted.adapter = Adaptation(config)
    return adapted


def adapted_stacks(leaves: Iterable[Leaf], config: LoraConfig) -> dict[Path, StackTarget]:
    """The stacked parameters that a configuration adapts, with ranks and scales by layer."""
    leaves = tuple(leaves)
    return stack_targets(leaves, resolve(config, adaptable_modules(leaves)))


def _inject(
    model: Any, stacks: Mapping[Path, StackTarget], config: LoraConfig
) -> tuple[Any, nnx.State, nnx.State]:
    """Runs Qwix; returns the adapted graph, its abstract adapters and the untouched base."""
    rules = [
        qwix.LoraRule(
            module_path=re.escape("/".join(map(str, path[:-1]))),
            rank=stack.r,
            alpha=float(stack.r),  # the scale is a variable of its own, see LoRAScale
            dropout=config.lora_dropout,
        )
        for path, stack in stacks.items()
    ]
    provider = AdapterProvider(rules)
    base_def, base = nnx.split(model)
    traced: list[Any] = []

    def inject(base: nnx.State) -> nnx.State:
        plain = nnx.merge(base_def, base, copy=True)
        tokens = jnp.zeros((1, 1), jnp.int32)
        adapted = qwix.apply_lora_to_model(plain, provider, tokens, rngs=nnx.Rngs(params=0))
        graphdef, adapters, _ = nnx.split(adapted, adapter_filter, ...)
        traced.append(graphdef)
        return adapters

    adapters = jax.eval_shape(inject, base)
    return traced[-1], adapters, base


def _mesh_of(state: nnx.State) -> Mesh | None:
    """The mesh that the weights live on, None if they are not spread over one."""
    for leaf in jax.tree.leaves(state):
        if isinstance(getattr(leaf, "sharding", None), NamedSharding):
            return leaf.sharding.mesh
    return None


def _draw(
    adapters: nnx.State,
    leaves: Mapping[Path, Leaf],
    stacks: Mapping[Path, StackTarget],
    seed: int,
    mesh: Mesh | None,
) -> nnx.State:
    """Draws the adapters and gives every layer its own rank and scale.

    A rank slot or layer that is not wanted gets A = 0 (B is 0 anyway): both gradients are then
    exactly zero, so the slot stays inert under any optimizer.
    """
    drawn = []
    for path, variable in nnx.to_flat_state(adapters):
        kernel = leaves[cast(Path, (*path[:-1], KERNEL))]
        stack = stacks[kernel.path]
        metadata = variable.get_metadata()
        sharding = None if mesh is None else named_sharding(mesh, metadata["axes"])
        if path[-1] == LORA_SCALE:
            value = distributed.put(stack.scales, sharding)
        else:
            leaf = adapter_leaf(kernel, variable)
            value = draw_leaf(leaf, metadata["init"], seed, sharding)
            if path[-1] == LORA_A and (stack.ranks != stack.r).any():
                value = value * _rank_mask(stack, leaf)
        drawn.append((path, variable.replace(value)))
    return nnx.from_flat_state(drawn)


def adapter_leaf(kernel: Leaf, variable: Any) -> Leaf:
    """The leaf of A or B: the kernel's names, with the adapter's shape and axes."""
    axes = variable.get_metadata()["axes"]
    value = variable.get_value()
    return dataclasses.replace(
        kernel,
        shape=tuple(value.shape),
        dtype=np.dtype(value.dtype),
        axes=axes,
        stack_axes=tuple(axes.index(name) for name in STACK_AXES if name in axes),
    )


def _rank_mask(stack: StackTarget, leaf: Leaf) -> np.ndarray:
    """1 where a rank slot of A is used, shaped to multiply A (whose rank axis is the last)."""
    mask = (np.arange(stack.r) < stack.ranks[..., None]).astype(np.float32)  # [*stack, r]
    layer_axes = leaf.stack_axes[: stack.ranks.ndim]
    shape = [n if i in (*layer_axes, len(leaf.shape) - 1) else 1 for i, n in enumerate(leaf.shape)]
    return mask.reshape(shape)


@dataclasses.dataclass(frozen=True)
class AdapterRow:
    """One line of the adapter table: a Hugging Face module (experts together) and its adapter."""

    module: str
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    r: int
    alpha: float
    scale: float
    parameters: int


def adapter_table(model: Any, config: LoraConfig) -> tuple[AdapterRow, ...]:
    """Every adapted tensor of a model, in layer order of each kind, with PEFT's shapes."""
    leaves = bind(model.family, model)
    stacks = adapted_stacks(leaves, config)
    return tuple(row for leaf in leaves if leaf.path in stacks for row in _rows(leaf, stacks))


def b_norms(model: Any, config: LoraConfig) -> Callable[[Mapping[str, Any]], dict[str, float]]:
    """Measures how far adapters have moved: `weights by path -> {module of a layer: norm of B}`.

    Every layer counts on its own, so that one that learns nothing cannot hide in its stack; the
    experts of a layer count together, since rare ones may wait long for their first token.
    """
    leaves = {leaf.path: leaf for leaf in bind(model.family, model)}
    adapters = dict(nnx.to_flat_state(nnx.state(model, adapter_filter)))
    kept: dict[str, tuple[int, ...]] = {}
    modules: dict[tuple[str, tuple[int, ...]], str] = {}
    for path, stack in adapted_stacks(leaves.values(), config).items():
        b_path = (*path[:-1], LORA_B)
        name = "/".join(map(str, b_path))
        kept[name] = adapter_leaf(leaves[path], adapters[b_path]).stack_axes[: stack.ranks.ndim]
        for cell in filter(stack.ranks.__getitem__, np.ndindex(stack.ranks.shape)):
            modules[name, cell] = module_name(np.atleast_1d(leaves[path].names[cell])[0])

    def measure(weights: Mapping[str, Any]) -> dict[str, float]:
        norms = {}
        for name, axes in kept.items():
            others = tuple(i for i in range(weights[name].ndim) if i not in axes)
            norms[name] = jnp.sqrt(jnp.sum(jnp.square(weights[name]), axis=others))
        norms = jax.device_get(norms)
        return {module: float(norms[name][cell]) for (name, cell), module in modules.items()}

    return measure


def _rows(leaf: Leaf, stacks: Mapping[Path, StackTarget]) -> Iterable[AdapterRow]:
    stack = stacks[leaf.path]
    outer, inner = leaf.hf_shape
    for cell in np.ndindex(stack.ranks.shape):
        r = int(stack.ranks[cell])
        if not r:
            continue
        names = np.atleast_1d(leaf.names[cell])
        module, experts = module_name(names[0]), len(names)
        if experts > 1:
            module = module.replace(".experts.0.", f".experts.{{0..{experts - 1}}}.")
        yield AdapterRow(
            module,
            (r, inner),
            (outer, r),
            r,
            float(stack.alphas[cell]),
            float(stack.scales[cell]),
            experts * r * (inner + outer),
        )
