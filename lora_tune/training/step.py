# SPDX-License-Identifier: Apache-2.0
"""The training step and the evaluation step: pure functions that the loop and the planner compile.

The loss of a step is the sum of negative log-likelihoods of trained tokens divided by their global
count, over all micro-batches and devices: neither accumulation nor the mesh changes it. On a mesh,
loss and gradients run inside one `jax.shard_map` that is manual over all axes but `tensor`, which
the compiler handles. The frozen weights are inputs only.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
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


def token_sums(model: Any, batch: Batch, sources: int = 1) -> tuple[jax.Array, Sums]:
    """Scores a batch `[rows, T]`, of several sources with `sources`, the source of each token.

    Returns:
      The summed negative log-likelihood of trained tokens, and the sums to report; of several
      sources also `source_nll` and `source_tokens`, each `[sources]`.
    """
    nll, correct = _scores(model, batch)
    weights = batch["weights"]
    total = jnp.sum(nll * weights)
    sums = {
        "nll": total,
        "trained_tokens": jnp.sum(weights),
        "correct_tokens": jnp.sum(correct * weights),
        "tokens": jnp.sum(batch["segment_ids"] > 0),
    }
    if sources > 1:
        sums["source_nll"] = _by_source(nll * weights, batch, sources)
        sums["source_tokens"] = _by_source(weights, batch, sources)
    return total, sums


def document_sums(model: Any, batch: Batch, sources: int = 1) -> Sums:
    """Scores a batch `[rows, T]` as `token_sums` does, and counts the documents that it has.

    Returns:
      Sums of each source, `[sources]`: `nll`, `trained_tokens` and `correct_tokens` over trained
      tokens, `documents` with a trained token, and `exact_documents`, those in which the target of
      every trained token is the most likely one.
    """
    nll, correct = _scores(model, batch)
    weights, segments = batch["weights"], batch["segment_ids"]
    trained = weights > 0
    axis = sharding.manual_axis("sequence")
    rows, length = segments.shape
    most = 1 + length * (jax.lax.axis_size(axis) if axis else 1)  # segments of a row, and padding
    places = segments + most * jnp.arange(rows, dtype=segments.dtype)[:, None]
    counts = jnp.stack([trained, trained & ~correct], axis=-1).astype(jnp.int32)
    found = jnp.zeros((rows * most, 2), jnp.int32).at[places].add(counts)
    # Tokens of a document may be spread over devices; its first token stands for it.
    seen, wrong = jnp.moveaxis((jax.lax.psum(found, axis) if axis else found)[places], -1, 0)
    documents = (batch["positions"] == 0) & (segments > 0) & (seen > 0)
    summed = {
        "nll": nll * weights,
        "trained_tokens": weights,
        "correct_tokens": correct * weights,
        "documents": documents.astype(jnp.int32),
        "exact_documents": (documents & (wrong == 0)).astype(jnp.int32),
    }
    return {name: _by_source(values, batch, sources) for name, values in summed.items()}


def _scores(model: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    return model(
        batch["tokens"], batch["segment_ids"], batch["positions"], targets=batch["targets"]
    )


def _by_source(values: jax.Array, batch: Batch, sources: int) -> jax.Array:
    """Sums `[sources]` of values `[rows, T]`.

    Masked sums, not a scatter, whose order of additions some devices leave open.
    """
    if sources == 1:
        return jnp.sum(values)[None]
    each = jnp.arange(sources, dtype=jnp.int32)[:, None, None]
    return jnp.sum(jnp.where(batch["sources"][None] == each, values[None], 0), axis=(1, 2))


def _merged(trainable: Weights, frozen: Weights, graphdef: Any) -> Any:
    return nnx.merge(graphdef, unflatten({**frozen, **trainable}), copy=True)


def _loss(
    trainable: Weights,
    frozen: Weights,
    batch: Batch,
    key: jax.Array | None,
    graphdef: Any,
    sources: int,
) -> tuple[jax.Array, Sums]:
    model = _merged(trainable, frozen, graphdef)
    if key is not None:
        model.set_attributes(qwix_rngs=nnx.Rngs(dropout=key))
    return token_sums(model, batch, sources)


def _accumulate(
    trainable: Weights,
    frozen: Weights,
    batch: Batch,
    key: jax.Array | None,
    graphdef: Any,
    sources: int,
) -> tuple[Weights, Sums]:
    """Sums gradients and reports over the micro-batches of `[A, rows, T]` arrays."""
    loss = functools.partial(_loss, graphdef=graphdef, sources=sources)
    grad = jax.grad(loss, has_aux=True)
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
    sources: Sequence[str] = (),
) -> Callable[..., tuple[Weights, Any, Sums]]:
    """Makes `step(trainable, opt_state, frozen, batch, key)`; jit it donating the first two.

    Args:
      split: the model; its arrays are not captured, only structure and axes.
      optimizer: sees gradients of the mean loss over trained tokens.
      mesh: None for one device.
      dropout: whether adapters drop inputs, from `key` (a typed PRNG key).
      sources: names of the sources that the tokens of a batch come from, if there are several;
        batches then have `sources`, the number of each token's.

    Returns:
      A function of `batch` arrays `[A, rows, T]` that returns the new trainable weights and
      optimizer state and the scalars loss, accuracy, grad_norm, trained_tokens and tokens, and of
      several sources `loss/NAME`, which is NaN where the batch has no trained token of it.
    """
    local = functools.partial(_accumulate, graphdef=split.graphdef, sources=max(len(sources), 1))
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
        if len(sources) > 1:
            means = sums["source_nll"] / sums["source_tokens"]
            metrics |= {f"loss/{name}": means[i] for i, name in enumerate(sources)}
        return cast(Weights, optax.apply_updates(trainable, updates)), opt_state, metrics

    return step


def make_eval_step(
    split: SplitModel, *, mesh: Mesh | None = None, sources: int = 1
) -> Callable[..., Sums]:
    """Makes `eval_step(trainable, frozen, batch)` on `[rows, T]` arrays; no dropout.

    Returns:
      A function that returns the `Sums` of `document_sums` over the whole batch.
    """

    def local(trainable: Weights, frozen: Weights, batch: Batch, key: None) -> Sums:
        return document_sums(_merged(trainable, frozen, split.graphdef), batch, sources)

    if mesh is not None and mesh.size > 1:
        rows = sharding.batch_spec()
        local = _on_mesh(local, split, mesh, rows, grads=False)

    def eval_step(trainable: Weights, frozen: Weights, batch: Batch) -> Sums:
        return local(trainable, frozen, dict(batch), None)

    return eval_step
