# SPDX-License-Identifier: Apache-2.0
"""The scan engine: which layers repeat, stacks of layers, and the one function that runs them.

A decoder is a list of layer kinds. `plan_layers` finds what repeats in it; `create_stack` builds
layers whose parameters carry a leading (or `scan_axis`-th) stack axis; `apply_stack` runs such a
stack with `jax.lax.scan`. Stacks nest: a block of runs is itself a stacked module whose call runs
inner stacks.

Four properties hold, and everything built on this file relies on them:

* A scan body returns only variables that were **not** fed in. Weights are never scan outputs, so
  they are not stacked a second time; adapters that Qwix creates while the body is traced do leave
  the scan, stacked, and are written back into the stacked module.
* Frozen weights stay whole through all nested scans, and the innermost body takes one layer's part
  by its indices. Sliced level by level, the outer scan would copy a block's weights for the inner.
* Every layer draws from its own random key, and sibling stacks from different ones.
* A stack axis is found by its name in a variable's `axes`, never by position.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import xla_metadata
from jax.experimental.layout import Layout, with_layout_constraint

from lora_tune import sharding

BLOCK = "block"
"""Name of the outer stack axis: one index per repetition of the layer cycle."""
LAYER = "layer"
"""Name of the inner stack axis: one index per layer of a run."""
STACK_AXES = (BLOCK, LAYER)

MIXED = "mixed"
"""`checkpoint_name` of what a mixer's heads put out, before its output projection."""

PROJECTED = "projected"
"""`checkpoint_name` of what a projection puts out, its adapter's share included."""

STATES = "states"
"""`checkpoint_name` of the recurrent states before each chunk of a row."""

ROUTED = "routed"
"""`checkpoint_name` of integers that say which experts a token goes to: small, and kept always."""
_INPUT = "layer_input"
_LANES = 128

_STEPS: ContextVar[Mapping[str, jax.Array]] = ContextVar("steps", default=MappingProxyType({}))
"""In a scan body: the step that each of the scans around it is at, by the name of its axis."""

Call = Callable[[Any, Any, Any], tuple[Any, Any]]
"""`(layer, carry, x) -> (carry, y)`, the body that `apply_stack` runs for each layer."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive layers of one kind; `start` is the index of the first one (in block 0)."""

    kind: Hashable
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """How a list of layers is cut into stacks.

    The layers are, in order: the runs of `prefix`, `blocks` repetitions of the runs of `cycle`,
    and the runs of `suffix`. With `scanned=False` each layer stands alone and `suffix` is unused.
    """

    prefix: tuple[Run, ...]
    cycle: tuple[Run, ...]
    blocks: int
    suffix: tuple[Run, ...]
    scanned: bool = True

    @property
    def cycle_length(self) -> int:
        """Number of layers in one repetition of the cycle."""
        return sum(run.length for run in self.cycle)

    def stacks(self) -> dict[tuple[str | int, ...], np.ndarray]:
        """Module path of every stack -> the index of the decoder layer at each stack position.

        The array has one dimension per stack axis: none for a layer that stands alone, `[layer]`
        for a run outside the cycle, `[block, layer]` for a run inside it.
        """
        if not self.scanned:
            return {("layers", run.start): np.array(run.start) for run in self.prefix}
        starts = np.arange(self.blocks)[:, None] * self.cycle_length
        found: dict[tuple[str | int, ...], np.ndarray] = {}
        for j, run in enumerate(self.prefix):
            found["prefix", j] = run.start + np.arange(run.length)
        for j, run in enumerate(self.cycle):
            found["blocks", "runs", j] = run.start + starts + np.arange(run.length)[None, :]
        for j, run in enumerate(self.suffix):
            found["suffix", j] = run.start + np.arange(run.length)
        return found


def _runs(kinds: Sequence[Hashable], start: int, stop: int) -> tuple[Run, ...]:
    runs: list[Run] = []
    for i in range(start, stop):
        if runs and runs[-1].kind == kinds[i]:
            runs[-1] = dataclasses.replace(runs[-1], length=runs[-1].length + 1)
        else:
            runs.append(Run(kinds[i], i, 1))
    return tuple(runs)


def plan_layers(kinds: Sequence[Hashable], *, scan: bool = True) -> LayerPlan:
    """Cuts a list of layer kinds into prefix, repeated cycle and suffix.

    Among all ways to write the list as `prefix + blocks * cycle + suffix` with at least two
    blocks, takes the one with the fewest runs, since each run is traced and compiled once; a list
    in which nothing repeats becomes runs alone. Ties go to the shorter prefix, then to the
    shorter cycle.

    Args:
      kinds: one hashable per layer; equal kinds have equal parameter trees.
      scan: False gives every layer a stack of its own, run by a Python loop.
    """
    kinds = tuple(kinds)
    n = len(kinds)
    if not scan:
        return LayerPlan(tuple(Run(k, i, 1) for i, k in enumerate(kinds)), (), 0, (), False)
    changes = np.cumsum([0, *(a != b for a, b in itertools.pairwise(kinds))]).tolist()

    def count(start: int, stop: int) -> int:
        return 0 if start == stop else 1 + changes[stop - 1] - changes[start]

    best, fewest = (0, 0, 0), count(0, n)
    for start in range(n):
        for length in range(1, (n - start) // 2 + 1):
            # The cheapest test first: even without what follows it would have too many runs.
            inside = count(0, start) + count(start, start + length)
            if inside >= fewest or kinds[start] != kinds[start + length]:
                continue
            cycle = kinds[start : start + length]
            blocks = 1
            while kinds[start + blocks * length : start + (blocks + 1) * length] == cycle:
                blocks += 1
            runs = inside + count(start + blocks * length, n)
            if blocks > 1 and runs < fewest:
                best, fewest = (start, length, blocks), runs
    start, length, blocks = best
    end = start + blocks * length
    if not blocks:
        return LayerPlan(_runs(kinds, 0, n), (), 0, ())
    cycle_runs = _runs(kinds, start, start + length)
    return LayerPlan(_runs(kinds, 0, start), cycle_runs, blocks, _runs(kinds, end, n))


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _map_variables(f: Callable[[nnx.Variable], nnx.Variable], state: nnx.State) -> nnx.State:
    return jax.tree.map(f, state, is_leaf=_is_variable)


def _push_axis(variable: nnx.Variable, name: str, scan_axis: int) -> nnx.Variable:
    """Names the leading axis of a freshly stacked variable and moves it to its place.

    Its place is in front of the stack axes already there, or else `scan_axis` (at most the rank).
    """
    axes = variable.get_metadata().get("axes", ())
    inner = [i for i, axis in enumerate(axes) if axis in STACK_AXES]
    place = inner[0] if inner else min(scan_axis, len(axes))
    value = variable.get_value()
    if isinstance(value, jax.ShapeDtypeStruct):
        shape = (*value.shape[1 : place + 1], value.shape[0], *value.shape[place + 1 :])
        value = jax.ShapeDtypeStruct(shape, value.dtype)
    else:
        value = jnp.moveaxis(value, 0, place)
    return variable.replace(value, axes=(*axes[:place], name, *axes[place:]))


def _pop_axis(variable: nnx.Variable, name: str) -> nnx.Variable:
    """Moves the axis called `name` to the front, for `scan` to slice, and drops its name."""
    axes = variable.get_metadata()["axes"]
    place = axes.index(name)
    value = variable[...]
    if place:
        value = jnp.moveaxis(value, place, 0)
    return variable.replace(value, axes=(*axes[:place], *axes[place + 1 :]))


def create_stack(module: Any, *, length: int, axis: str, scan_axis: int = 0) -> Any:
    """Makes a module of abstract weights into a stack of `length` such modules.

    Args:
      module: one layer, or a block of stacks; its variables are abstract.
      length: number of modules in the stack.
      axis: name of the new stack axis, inserted into every variable's `axes`.
      scan_axis: position of the axis in each array (clipped to the array's rank).

    Returns:
      A module of the same structure with stacked variables. It is not callable as it stands:
      `apply_stack` is what runs it.
    """

    def stacked(variable: nnx.Variable) -> nnx.Variable:
        value = variable.get_value()
        value = jax.ShapeDtypeStruct((length, *value.shape), value.dtype)
        return _push_axis(variable.replace(value), axis, scan_axis)

    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, _map_variables(stacked, state))


def _is_stacked(axis: str | None) -> Callable[[Any, Any], bool]:
    """Filter for variables that carry the stack axis (all of them when there is none)."""
    return lambda _, node: (
        _is_variable(node) and (axis is None or axis in node.get_metadata().get("axes", ()))
    )


def _is_frozen(axis: str | None) -> Callable[[Any, Any], bool]:
    """Filter for stacked variables that are not adapters, which alone are trained beside them."""
    stacked = _is_stacked(axis)
    return lambda path, node: (
        axis is not None and stacked(path, node) and not isinstance(node, nnx.LoRAParam)
    )


def _at_step(variable: nnx.Variable, steps: Mapping[str, jax.Array]) -> nnx.Variable:
    """The part of a whole variable at the given steps; the variable itself between two scans."""
    axes = variable.get_metadata()["axes"]
    if any(axis in STACK_AXES and axis not in steps for axis in axes):
        return variable
    value = variable[...]
    part = jax.lax.dynamic_slice(
        value,
        [steps.get(axis, np.int32(0)) for axis in axes],
        [1 if axis in steps else size for axis, size in zip(axes, value.shape, strict=True)],
        allow_negative_indices=False,
    )
    part = jax.lax.squeeze(part, [i for i, axis in enumerate(axes) if axis in steps])
    # Where a product wants another layout, XLA would otherwise give it to the whole stack, which
    # takes a copy of the weights of all layers ahead of the loops. Of matrices narrower than the
    # lanes of a TPU, it is the stack itself whose layout differs.
    if part.ndim > 1 and part.shape[-1] >= _LANES:
        part = with_layout_constraint(part, Layout(tuple(range(part.ndim))))
    return variable.replace(part, axes=tuple(axis for axis in axes if axis not in steps))


def take_keys(module: nnx.Module, length: int | None = None) -> tuple[Any, Any]:
    """Draws one key per stream and layer from a module's live `qwix_rngs`, then detaches them.

    Returns the streams and the keys, both None where the module has no streams.
    Drawing outside the scan advances the live streams, so sibling stacks get different keys.
    """
    rngs = getattr(module, "qwix_rngs", None)
    if rngs is None:
        return None, None
    keys = {name: stream() for name, stream in rngs.items()}
    if length is not None:
        keys = {name: jax.random.split(key, length) for name, key in keys.items()}
    module.set_attributes(qwix_rngs=None)
    return rngs, keys


@contextlib.contextmanager
def _inside(steps: Mapping[str, jax.Array]) -> Iterator[None]:
    token = _STEPS.set(steps)
    try:
        yield
    finally:
        _STEPS.reset(token)


@contextlib.contextmanager
def _barrier(length: int | None) -> Iterator[None]:
    """Keeps a scan of one step a loop in the compiled program, as a scheduling barrier."""
    if length == 1:
        with xla_metadata.set_xla_metadata(**{"skip-simplify-while-loops_trip-count-one": "true"}):
            yield
    else:
        yield


_WEIGHTS_AGAIN = frozenset(
    (
        "dynamic_slice",
        "squeeze",
        "layout_constraint",
        "all_gather",
        "reduce_precision",
        "convert_element_type",
    )
)


def _activations(primitive: Any, *_: Any, **__: Any) -> bool:
    """Policy: keep everything but what takes a layer's weights from their stack, gathers and casts.

    Kept, those would be a second copy of all weights, and a copy without shards. Activations that
    are cast cost little to cast again.
    """
    return primitive.name not in _WEIGHTS_AGAIN


REMAT: Mapping[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.save_only_these_names(ROUTED),
    "dots": jax.checkpoint_policies.save_only_these_names(PROJECTED, MIXED, STATES, ROUTED),
    "save_attention": jax.checkpoint_policies.save_only_these_names(MIXED, ROUTED),
    "none": _activations,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[ROUTED],
        names_which_can_be_offloaded=[_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""What is kept of each layer for the backward pass, by the recipe's name: its input; also what
projections put out, but for routed experts, the mixer's heads, and its states between chunks; also
what the mixer's heads put out; everything but weights; its input, on the host. And always the
choice of experts.
"""


def _rematerialise(body: Callable, remat: str | None, looped: bool) -> Callable:
    if remat is None:
        return body

    def named(carry: Any, inputs: Any) -> Any:
        return body(checkpoint_name(carry, _INPUT) if remat == "offload" else carry, inputs)

    # A loop of several steps keeps XLA from merging the two forward passes, and from running many
    # second ones ahead of the backward pass; otherwise that takes barriers.
    return jax.checkpoint(named, prevent_cse=not looped, policy=REMAT[remat])


def _unroll(body: Callable, carry: Any, inputs: Any) -> tuple[Any, Any]:
    """`jax.lax.scan` as straight-line code."""
    outputs = []
    for i in range(jax.tree.leaves(inputs)[0].shape[0]):
        carry, output = body(carry, jax.tree.map(lambda leaf, i=i: leaf[i], inputs))
        outputs.append(output)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


def _stack_length(stacked: nnx.State, axis: str) -> int:
    for variable in jax.tree.leaves(stacked, is_leaf=_is_variable):
        return variable.shape[variable.get_metadata()["axes"].index(axis)]
    raise ValueError(f"a stack along {axis!r} has no variable with that axis")


def apply_stack(
    stack: nnx.Module,
    carry: Any,
    call: Call,
    *,
    axis: str | None,
    xs: Any = None,
    length: int | None = None,
    remat: str | None = None,
    frozen: bool = False,
    unshard: bool = False,
    scan_axis: int = 0,
) -> tuple[Any, Any]:
    """Runs `carry, y = call(layer, carry, x)` over the layers of a stack.

    Args:
      stack: a module from `create_stack`; or any module, with `axis=None`, to run it once under
        the same rules; or any module with an `axis` that no variable has and a `length`, to run
        the same weights over several `xs`.
      carry: what flows from layer to layer.
      call: the body. It runs on a fresh module that belongs to the trace of the body.
      axis: name of the stack axis to scan over, or None.
      xs: per-layer inputs, leading axis of the stack's length (none when `axis` is None).
      length: number of steps, where no variable carries the axis.
      remat: what is kept of a layer for the backward pass, a name in `REMAT`; None where that is
        decided inside, as for a block of stacks.
      frozen: the variables are not differentiated, but for adapters. Gradients are right in either
        case; those of frozen variables would be added up in arrays of the whole stack's size.
      unshard: where the trace runs inside a `sharding.manual` region, gather sharded weights by
        hand: a layer's inside the rematerialised body, weights that all steps share before it.
      scan_axis: where the stack axis of a variable born inside the body goes.

    Returns:
      The final carry and the stacked `y`s.
    """
    if axis is not None and length is None:
        length = _stack_length(nnx.state(stack, _is_stacked(axis)), axis)
    rngs, keys = take_keys(stack, length)
    whole_filter = _is_frozen(axis) if frozen else nnx.Nothing()
    graphdef, whole, stacked, rest = nnx.split(stack, whole_filter, _is_stacked(axis), ...)
    known = {path for state in (whole, stacked, rest) for path, _ in nnx.to_flat_state(state)}
    if axis is not None:
        stacked = _map_variables(lambda v: _pop_axis(v, axis), stacked)
    if unshard:
        rest = _map_variables(sharding.unshard, rest)

    outer = _STEPS.get()

    def body(carry: Any, inputs: tuple[nnx.State, Any, Any, Any]) -> tuple[Any, Any]:
        weights, keys, x, step = inputs
        steps = outer if step is None else {**outer, axis: step}
        own = _map_variables(lambda v: _at_step(v, steps), whole)
        if unshard:
            weights, own = (_map_variables(sharding.unshard, state) for state in (weights, own))
        # copy: the variables must belong to this trace, not to the caller's.
        layer = nnx.merge(graphdef, own, weights, rest, copy=True)
        if keys is not None:
            layer.set_attributes(qwix_rngs=nnx.Rngs(**keys))
        with _inside(steps):
            carry, y = call(layer, carry, x)
        if keys is not None:
            layer.set_attributes(qwix_rngs=None)
        born = [(p, v) for p, v in nnx.to_flat_state(nnx.state(layer)) if p not in known]
        return carry, (nnx.from_flat_state(born), y)

    # XLA cannot hand from loop to loop what an inner one has stacked in the host's memory.
    unrolled = remat == "offload" and len(outer) > 0
    body = _rematerialise(body, remat, looped=axis is not None and not unrolled and length != 1)
    if axis is None:
        carry, (born, ys) = body(carry, (stacked, keys, xs, None))
    else:
        run = _unroll if unrolled else jax.lax.scan
        inputs = (stacked, keys, xs, jnp.arange(length, dtype=jnp.int32))
        with _barrier(length):
            carry, (born, ys) = run(body, carry, inputs)
        born = _map_variables(lambda v: _push_axis(v, axis, scan_axis), born)
    if jax.tree.leaves(born):
        nnx.update(stack, born)
    if rngs is not None:
        stack.set_attributes(qwix_rngs=rngs)
    return carry, ys
