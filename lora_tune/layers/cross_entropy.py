# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over a large vocabulary, a part of the vocabulary at a time, with its own backward.

Logits of all tokens against all of the vocabulary never exist. The forward pass keeps a running
maximum and a running sum of exponentials (Milakov and Gimelshein, "Online normalizer calculation
for softmax", arXiv 1805.02867). The backward pass computes each part's logits once more; with the
logarithm of the whole sum known, their gradient is softmax less one-hot, so nothing is kept but
one number a token. A sharded head is gathered a part at a time, and its gradient scattered so.

Shapes: n tokens, D width, V vocabulary, C entries of a part.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
from flax import nnx

from lora_tune import scan, sharding

VOCAB = "vocab"
"""Logical axis of the head's weights that is cut into parts."""

Axes = tuple[str | None, ...]


class _Parts(NamedTuple):
    """How a vocabulary is cut. Every device of the `tensor` axis holds an equal range of it, and a
    part takes as much from each. The last part overlaps with the one before where C does not divide
    V: its entries from there count once.
    """

    shards: int  # of the tensor axis
    share: int  # entries of each shard
    width: int  # of those, in one part: C / shards
    count: int  # of parts

    def start(self, i: jax.Array) -> jax.Array:
        return jnp.minimum(i * self.width, self.share - self.width)

    def entries(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Vocabulary indices `[C]` of a part, and which of them are new."""
        within = self.start(i) + jnp.arange(self.width, dtype=jnp.int32)
        first = jnp.arange(self.shards, dtype=jnp.int32) * self.share
        ids = (first[:, None] + within[None, :]).reshape(-1)
        return ids, jnp.tile(within >= i * self.width, self.shards)

    def take(self, weight: jax.Array, axes: Axes, i: jax.Array) -> jax.Array:
        """A part of a weight; the whole of one without a vocabulary axis."""
        if VOCAB not in axes:
            return weight
        dim, viewed = axes.index(VOCAB), self._viewed(weight, axes)
        part = jax.lax.dynamic_slice_in_dim(viewed, self.start(i), self.width, dim + 1)
        return part.reshape(*weight.shape[:dim], -1, *weight.shape[dim + 1 :])

    def add(self, total: jax.Array, part: jax.Array, axes: Axes, i: jax.Array) -> jax.Array:
        """Adds a part's gradient to that of the weight."""
        if VOCAB not in axes:
            return total + part
        dim, viewed = axes.index(VOCAB), self._viewed(total, axes)
        before = jax.lax.dynamic_slice_in_dim(viewed, self.start(i), self.width, dim + 1)
        after = before + part.reshape(before.shape)
        viewed = jax.lax.dynamic_update_slice_in_dim(viewed, after, self.start(i), dim + 1)
        return viewed.reshape(total.shape)

    def _viewed(self, weight: jax.Array, axes: Axes) -> jax.Array:
        dim = axes.index(VOCAB)
        return weight.reshape(
            *weight.shape[:dim], self.shards, self.share, *weight.shape[dim + 1 :]
        )


def _cut(size: int, chunk: int) -> _Parts:
    shards = sharding.automatic_size("tensor")
    share = size // shards
    width = min(share, max(1, chunk // shards))
    return _Parts(shards, share, width, -(-share // width))


def cross_entropy(
    head: nnx.Module,
    project: Callable[[Any, jax.Array], jax.Array],
    h: jax.Array,
    targets: jax.Array,
    *,
    vocab_size: int,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Scores one target a token.

    Args:
      head: the module of the output projection; its weights name the vocabulary axis `vocab`.
      project: `(head, [n, D]) -> logits [n, C]` of a head that holds C entries of the vocabulary.
      h: `[n, D]`.
      targets: int32 `[n]`.
      vocab_size: V.
      chunk_size: C.

    Returns:
      Negative log-likelihoods, float32 `[n]`, and whether the target is the most likely token,
      bool `[n]`; of equally likely ones the first counts.
    """
    rngs, keys = scan.take_keys(head)
    graphdef, parameters, rest = nnx.split(head, nnx.Param, ...)
    axes = [variable.get_metadata()["axes"] for _, variable in nnx.to_flat_state(parameters)]
    weights = [variable.get_value() for _, variable in nnx.to_flat_state(parameters)]
    constants = jax.tree.leaves((rest, keys))
    parts = _cut(vocab_size, chunk_size)
    # Of the region that the forward pass is traced in; the backward pass may be traced outside.
    over = [sharding.manual_axes(a) for a in axes]

    def logits(weights: Sequence[jax.Array], constants: Sequence[jax.Array], h: jax.Array) -> Any:
        paths = [path for path, _ in nnx.to_flat_state(parameters)]
        state = nnx.from_flat_state(zip(paths, weights, strict=True))
        others, keys_again = jax.tree.unflatten(jax.tree.structure((rest, keys)), constants)
        module = nnx.merge(graphdef, state, others, copy=True)
        if keys_again is not None:  # the same for all parts: they share the inputs that it drops
            module.set_attributes(qwix_rngs=nnx.Rngs(**keys_again))
        return project(module, h).astype(jnp.float32)

    first = jnp.int32(0)
    shown = [
        jax.eval_shape(lambda w, a=a, o=o: sharding.gather(parts.take(w, a, first), o), weight)
        for weight, a, o in zip(weights, axes, over, strict=True)
    ]
    # Adapters act by interception, which is over when the backward pass is traced: what is traced
    # now holds them.
    program = jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(logits)(shown, constants, h))
    if rngs is not None:
        head.set_attributes(qwix_rngs=rngs)

    def part_logits(i: jax.Array, pieces: Sequence, constants: Sequence, h: jax.Array) -> jax.Array:
        whole = [sharding.gather(piece, o) for piece, o in zip(pieces, over, strict=True)]
        return program(*whole, *constants, h)[0]

    return _scored(part_logits, parts, axes)(weights, constants, h, targets)


def _scored(part_logits: Callable, parts: _Parts, axes: Sequence[Axes]) -> Callable:
    """Makes the differentiable `(weights, constants, h, targets) -> (nll, correct)`."""

    def pieces_of(weights: Sequence[jax.Array | None], i: jax.Array) -> list[jax.Array | None]:
        return [
            None if weight is None else parts.take(weight, a, i)
            for weight, a in zip(weights, axes, strict=True)
        ]

    @jax.custom_vjp
    def score(weights: Any, constants: Any, h: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
        nll, correct, _ = forward_pass(weights, constants, h, targets)
        return nll, correct

    def forward_pass(weights: Any, constants: Any, h: Any, targets: Any) -> tuple:
        def one(running: _Running, i: jax.Array) -> tuple[_Running, None]:
            logits = part_logits(i, pieces_of(weights, i), constants, h)
            return _absorb(running, logits, *parts.entries(i), targets), None

        running, _ = jax.lax.scan(one, _nothing(targets), jnp.arange(parts.count))
        total = running.most + jnp.log(running.sum)
        return total - running.picked, running.best == targets, total

    def forward(weights: Any, *rest: Any) -> tuple:
        trained = [weight.value if weight.perturbed else None for weight in weights]
        frozen = [None if weight.perturbed else weight.value for weight in weights]
        rest = jax.tree.map(lambda primal: primal.value, rest)
        nll, correct, total = forward_pass([weight.value for weight in weights], *rest)
        return (nll, correct), (trained, frozen, *rest, total)

    def backward(kept: tuple, cotangents: tuple) -> tuple:
        trained, frozen, constants, h, targets, total = kept
        dnll, _ = cotangents

        def one(carry: tuple, i: jax.Array) -> tuple[tuple, None]:
            dtrained, dh = carry

            def logits_of(pieces: Sequence[jax.Array | None], h: jax.Array) -> jax.Array:
                pieces = [b if a is None else a for a, b in zip(pieces, fixed, strict=True)]
                return part_logits(i, pieces, constants, h)

            fixed = pieces_of(frozen, i)
            logits, pull = jax.vjp(logits_of, pieces_of(trained, i), h)
            ids, new = parts.entries(i)
            likely = jnp.where(new[None, :], jnp.exp(logits - total[:, None]), 0)
            hit = (ids[None, :] == targets[:, None]) & new[None, :]
            dpieces, more = pull(jnp.where(hit, likely - 1, likely) * dnll[:, None])
            dtrained = [
                None if total is None else parts.add(total, piece, a, i)
                for total, piece, a in zip(dtrained, dpieces, axes, strict=True)
            ]
            return (dtrained, dh + more.astype(jnp.float32)), None

        start = (jax.tree.map(jnp.zeros_like, trained), jnp.zeros(h.shape, jnp.float32))
        (dtrained, dh), _ = jax.lax.scan(one, start, jnp.arange(parts.count))
        return dtrained, None, dh.astype(h.dtype), None

    score.defvjp(forward, backward, symbolic_zeros=True)
    return score


class _Running(NamedTuple):
    """What is known of each token `[n]` after some parts of the vocabulary."""

    most: jax.Array  # the largest logit
    sum: jax.Array  # of exponentials, relative to it
    picked: jax.Array  # the target's logit
    best: jax.Array  # the entry with the largest logit


def _nothing(targets: jax.Array) -> _Running:
    zero = jnp.zeros(targets.shape, jnp.float32)
    return _Running(zero - jnp.inf, zero, zero, jnp.full(targets.shape, -1, jnp.int32))


def _absorb(
    running: _Running, logits: jax.Array, ids: jax.Array, new: jax.Array, targets: jax.Array
) -> _Running:
    logits = jnp.where(new[None, :], logits, -jnp.inf)
    most = jnp.max(logits, axis=1)
    best = ids[jnp.argmax(logits, axis=1)]
    better = (most > running.most) | ((most == running.most) & (best < running.best))
    largest = jnp.maximum(most, running.most)
    added = jnp.sum(jnp.exp(logits - largest[:, None]), axis=1)
    hit = (ids[None, :] == targets[:, None]) & new[None, :]
    return _Running(
        largest,
        running.sum * jnp.exp(running.most - largest) + added,
        running.picked + jnp.sum(jnp.where(hit, logits, 0), axis=1),
        jnp.where(better, best, running.best),
    )
