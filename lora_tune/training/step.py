# SPDX-License-Identifier: Apache-2.0
"""The training step and the evaluation step: pure functions that the loop and the planner compile.

The loss of a step is the sum of negative log-likelihoods of trained tokens divided by their global
count, over all micro-batches and devices: neither accumulation nor the mesh changes it. On a mesh,
loss and gradients run inside one `jax.shard_map` that is manual over all axes but `tensor`, which
the compiler handles. The frozen weights are inputs only.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from lora_tune import sharding
from lora_tune.training.state import SplitModel, Weights, unflatten

Batch = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]
"""Sums over tokens, to be divided once all parts of a batch are in."""


def token_sums(model: Any, batch: Batch) -> tuple[jax.Array, Sums]:
    """Scores a batch `[rows, T]`.

    Returns:
      The summed negative log-likelihood of trained tokens, and the sums to report.
    """
    nll, correct = model(
        batch["tokens"], batch["segment_ids"], batch["positions"], targets=batch["targets"]
    )
    weights = batch["weights"]
    trained = weights > 0
    total = jnp.sum(nll * weights)
    # Of a row whose tokens are spread over devices, the first device counts what all found.
    axis = sharding.manual_axis("sequence")
    counts = jnp.stack([jnp.sum(trained, axis=1), jnp.sum(trained & ~correct, axis=1)])
    seen, wrong = jax.lax.psum(counts, axis) if axis else counts
    first = jax.lax.axis_index(axis) == 0 if axis else True
    answered = (seen > 0) & first
    return total, {
        "nll": total,
        "trained_tokens": jnp.sum(weights),
        "correct_tokens": jnp.sum(correct * weights),
        "tokens": jnp.sum(batch["segment_ids"] > 0),
        "exact_rows": jnp.sum(answered & (wrong == 0)),
        "rows": jnp.sum(answered),
    }


def _loss(
    trainable: Weights, frozen: Weights, batch: Batch, key: jax.Array | None, graphdef: Any
) -> tuple[jax.Array, Sums]:
    model = nnx.merge(graphdef, unflatten({**frozen, **trainable}), copy=True)
    if key is not None:
        model.set_attributes(qwix_rngs=nnx.Rngs(dropout=key))
    return token_sums(model, batch)


def _accumulate(
    trainable: Weights, frozen: Weights, batch: Batch, key: jax.Array | None, graphdef: Any
) -> tuple[Weights, Sums]:
    """Sums gradients and reports over the micro-batches of `[A, rows, T]` arrays."""
    grad = jax.grad(functools.partial(_loss, graphdef=graphdef), has_aux=True)
    count = batch["tokens"].shape[0]

    def one(i: Any, part: Batch) -> tuple[Weights, Sums]:
        return grad(trainable, frozen, part, None if key is None else jax.random.fold_in(key, i))

    if count == 1:
        return one(0, jax.tree.map(lambda x: x[0], dict(batch)))

    def add(total: Any, numbered: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(*numbered)), None

    shapes = jax.eval_shape(one, 0, jax.tree.map(lambda x: x[0], dict(batch)))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(add, zeros, (jnp.arange(count), dict(batch)))[0]


def _on_mesh(
    local: Callable, split: SplitModel, mesh: Mesh, batch_spec: PartitionSpec, *, grads: bool
) -> Callable:
    """Runs `local(trainable, frozen, batch, key)` in a manual region and sums over devices."""
    trainable_specs = split.specs(split.trainable)
    # XLA refuses a sum over one device in a program that it also partitions.
    several = tuple(axis for axis in sharding.MANUAL_AXES if mesh.shape[axis] > 1)

    def reduce_grad(grad: jax.Array, spec: PartitionSpec) -> jax.Array:
        # A gathered axis was summed by the transpose of its gather; the others are still partial.
        gathered = {
            axis for dim in spec if dim for axis in ([dim] if isinstance(dim, str) else dim)
        }
        missing = tuple(axis for axis in several if axis not in gathered)
        return jax.lax.psum(grad, missing) if missing else grad

    def run(trainable: Weights, frozen: Weights, batch: Batch, key: Any) -> Any:
        with sharding.manual(mesh):
            if key is not None:
                for axis in sharding.MANUAL_AXES:
                    key = jax.random.fold_in(key, jax.lax.axis_index(axis))
            out = local(trainable, frozen, batch, key)
        gradients, sums = out if grads else (None, out)
        sums = jax.lax.psum(sums, several) if several else sums
        if not grads:
            return sums
        return {n: reduce_grad(g, trainable_specs[n]) for n, g in gradients.items()}, sums

    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(trainable_specs, split.specs(split.frozen), batch_spec, PartitionSpec()),
        out_specs=(trainable_specs, PartitionSpec()) if grads else PartitionSpec(),
        axis_names=set(sharding.MANUAL_AXES),
        check_vma=False,
    )


def make_step(
    split: SplitModel,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    dropout: bool = False,
) -> Callable[..., tuple[Weights, Any, Sums]]:
    """Makes `step(trainable, opt_state, frozen, batch, key)`; jit it donating the first two.

    Args:
      split: the model; its arrays are not captured, only structure and axes.
      optimizer: sees gradients of the mean loss over trained tokens.
      mesh: None for one device.
      dropout: whether adapters drop inputs, from `key` (a typed PRNG key).

    Returns:
      A function of `batch` arrays `[A, rows, T]` that returns the new trainable weights and
      optimizer state and the scalars loss, accuracy, grad_norm, trained_tokens and tokens.
    """
    local = functools.partial(_accumulate, graphdef=split.graphdef)
    if mesh is not None and mesh.size > 1:
        rows = sharding.batch_spec(None)
        local = _on_mesh(local, split, mesh, rows, grads=True)

    def step(
        trainable: Weights, opt_state: Any, frozen: Weights, batch: Batch, key: jax.Array
    ) -> tuple[Weights, Any, Sums]:
        grads, sums = local(trainable, frozen, dict(batch), key if dropout else None)
        count = jnp.maximum(sums["trained_tokens"], 1.0)
        grads = jax.tree.map(lambda g: g / count, grads)
        updates, opt_state = optimizer.update(grads, opt_state, trainable)
        metrics = {
            "loss": sums["nll"] / count,
            "accuracy": sums["correct_tokens"] / count,
            "grad_norm": optax.tree.norm(grads),
            "trained_tokens": sums["trained_tokens"],
            "tokens": sums["tokens"],
        }
        return cast(Weights, optax.apply_updates(trainable, updates)), opt_state, metrics

    return step


def make_eval_step(split: SplitModel, *, mesh: Mesh | None = None) -> Callable[..., Sums]:
    """Makes `eval_step(trainable, frozen, batch)` on `[rows, T]` arrays; no dropout.

    Returns:
      A function that returns the `Sums` of `token_sums` over the whole batch.
    """

    def local(trainable: Weights, frozen: Weights, batch: Batch, key: None) -> Sums:
        return _loss(trainable, frozen, batch, key, split.graphdef)[1]

    if mesh is not None and mesh.size > 1:
        rows = sharding.batch_spec()
        local = _on_mesh(local, split, mesh, rows, grads=False)

    def eval_step(trainable: Weights, frozen: Weights, batch: Batch) -> Sums:
        return local(trainable, frozen, dict(batch), None)

    return eval_step
