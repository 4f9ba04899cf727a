# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over a large vocabulary, a part of the vocabulary at a time, with its own backward.

Logits of all tokens against all of the vocabulary never exist. The forward pass keeps a running
maximum and a running sum of exponentials (Milakov and Gimelshein, "Online normalizer calculation
for softmax", arXiv 1805.02867).

The gradient of logits is softmax less one-hot. Where the head is frozen and whole on a device, the
forward pass adds up at once what that makes of the tokens' own gradient, scaled anew whenever the
maximum rises, as FlashAttention does with its output: two products a part, and `[n, D]` numbers
kept. The logits of a head that is trained or sharded are computed once more in the backward pass,
with the logarithm of the whole sum known; one number a token is kept. A sharded head is gathered a
part at a time, and its gradient scattered so.

Shapes: n tokens, D width, V vocabulary, C entries of a part.
"""

import math
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

    def entries(self, i: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Vocabulary indices `[C]` of a part, and which of them are new; None for all."""
        within = self.start(i) + jnp.arange(self.width, dtype=jnp.int32)
        first = jnp.arange(self.shards, dtype=jnp.int32) * self.share
        ids = (first[:, None] + within[None, :]).reshape(-1)
        if self.count * self.width == self.share:
            return ids, None
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

    def trace(*arguments: Any) -> Callable:
        # Adapters act by interception, which is over when the backward pass is traced: what is
        # traced now holds them.
        return jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(logits)(*arguments))

    program = trace(shown, constants, h)
    whole = parts.shards == 1 and not any(dim for o in over for dim in o)
    single = trace(_one_entry(weights, axes), constants, h[:1]) if whole else None
    if rngs is not None:
        head.set_attributes(qwix_rngs=rngs)

    def part_logits(i: jax.Array, pieces: Sequence, constants: Sequence, h: jax.Array) -> jax.Array:
        gathered = [sharding.gather(piece, o) for piece, o in zip(pieces, over, strict=True)]
        return program(*gathered, *constants, h)[0]

    return _scored(_Head(part_logits, single, parts, axes))(weights, constants, h, targets)


class _Head(NamedTuple):
    """The head as the passes see it.

    Attributes:
      part_logits: `(i, pieces, constants, h) -> [n, C]`.
      single: the same of a head with one entry, without `i`; None for a sharded head.
      parts: how the vocabulary is cut.
      axes: of each weight.
    """

    part_logits: Callable
    single: Callable | None
    parts: _Parts
    axes: Sequence[Axes]

    def pieces(self, weights: Sequence[jax.Array | None], i: jax.Array) -> list[jax.Array | None]:
        """Part `i` of each weight; None of None."""
        return [
            None if weight is None else self.parts.take(weight, a, i)
            for weight, a in zip(weights, self.axes, strict=True)
        ]


def _scored(head: _Head) -> Callable:
    """Makes the differentiable `(weights, constants, h, targets) -> (nll, correct)`."""

    @jax.custom_vjp
    def score(weights: Any, constants: Any, h: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
        return _run(head, weights, constants, h, targets).outcome(targets)

    def forward(weights: Any, *rest: Any) -> tuple:
        trained = [weight.value if weight.perturbed else None for weight in weights]
        frozen = [None if weight.perturbed else weight.value for weight in weights]
        constants, h, targets = jax.tree.map(lambda primal: primal.value, rest)
        values, slopes = [weight.value for weight in weights], None
        if head.single is None or jax.tree.leaves(trained):
            running = _run(head, values, constants, h, targets)
        else:
            running, slopes = _run_with_slopes(head, values, constants, h, targets)
        kept = (trained, frozen, constants, h, targets, running.total(), slopes)
        return running.outcome(targets), kept

    def backward(kept: tuple, cotangents: tuple) -> tuple:
        trained, frozen, constants, h, targets, total, slopes = kept
        dnll, _ = cotangents
        if slopes is None:
            again = (trained, frozen, constants, h, targets)
            dtrained, dh = _run_backward(head, *again, total, dnll)
        else:
            dtrained, dh = trained, slopes * dnll[:, None]
        return dtrained, None, dh.astype(h.dtype), None

    score.defvjp(forward, backward, symbolic_zeros=True)
    return score


def _run(head: _Head, weights: Any, constants: Any, h: jax.Array, targets: jax.Array) -> "_Running":
    """Goes over all parts."""

    def one(running: _Running, i: jax.Array) -> tuple[_Running, None]:
        logits = head.part_logits(i, head.pieces(weights, i), constants, h)
        return _absorb(running, logits, *head.parts.entries(i), targets)[0], None

    return jax.lax.scan(one, _nothing(targets), jnp.arange(head.parts.count))[0]


def _run_with_slopes(
    head: _Head, weights: Any, constants: Any, h: jax.Array, targets: jax.Array
) -> "tuple[_Running, jax.Array]":
    """Goes over all parts and finds the gradients of the likelihoods by `h`, float32 `[n, D]`."""

    def one(carry: tuple, i: jax.Array) -> tuple[tuple, None]:
        before, slopes = carry
        pieces = head.pieces(weights, i)
        logits, pull = jax.vjp(lambda h: head.part_logits(i, pieces, constants, h), h)
        running, others = _absorb(before, logits, *head.parts.entries(i), targets)
        (more,) = pull(others)
        kept = jnp.exp(before.most - running.most)[:, None]
        return (running, slopes * kept + more.astype(jnp.float32)), None

    start = (_nothing(targets), jnp.zeros(h.shape, jnp.float32))
    (running, slopes), _ = jax.lax.scan(one, start, jnp.arange(head.parts.count))
    # The target's share stands apart: the slope of its logit times its probability less one, which
    # would lose its digits where that probability is close to one.
    own = _target_slopes(head, weights, constants, h, targets).astype(jnp.float32)
    return running, (slopes - running.others[:, None] * own) / running.sum()[:, None]


def _one_entry(weights: Sequence[jax.Array], axes: Sequence[Axes]) -> list[jax.ShapeDtypeStruct]:
    """Shapes of the weights of a head with one entry."""
    return [
        jax.ShapeDtypeStruct(
            [1 if axis == VOCAB else size for axis, size in zip(a, weight.shape, strict=True)],
            weight.dtype,
        )
        for weight, a in zip(weights, axes, strict=True)
    ]


def _target_slopes(
    head: _Head, weights: Any, constants: Any, h: jax.Array, targets: jax.Array
) -> jax.Array:
    """Gradients `[n, D]` of each target's logit by `h`, from a head of that entry alone."""
    single, dims = head.single, [a.index(VOCAB) if VOCAB in a else None for a in head.axes]
    assert single is not None
    own = [
        weight if dim is None else jnp.take(weight, targets, axis=dim, mode="clip")
        for weight, dim in zip(weights, dims, strict=True)
    ]

    def logit(own: Sequence[jax.Array], h: jax.Array) -> jax.Array:
        entry = [
            weight if dim is None else jnp.expand_dims(weight, dim)
            for weight, dim in zip(own, dims, strict=True)
        ]
        return single(*entry, *constants, h[None, :])[0][0, 0]

    return jax.vmap(jax.grad(logit, argnums=1), in_axes=(dims, 0))(own, h)


def _run_backward(
    head: _Head,
    trained: Any,
    frozen: Any,
    constants: Any,
    h: jax.Array,
    targets: jax.Array,
    total: jax.Array,
    dnll: jax.Array,
) -> tuple[Any, jax.Array]:
    """Goes over all parts once more: gradients of the trained weights, and of `h` in float32."""

    def one(carry: tuple, i: jax.Array) -> tuple[tuple, None]:
        dtrained, dh = carry

        def logits_of(pieces: Sequence[jax.Array | None], h: jax.Array) -> jax.Array:
            pieces = [b if a is None else a for a, b in zip(pieces, fixed, strict=True)]
            return head.part_logits(i, pieces, constants, h)

        fixed = head.pieces(frozen, i)
        logits, pull = jax.vjp(logits_of, head.pieces(trained, i), h)
        ids, new = head.parts.entries(i)
        likely = _only(new, jnp.exp(logits - total[:, None]), 0)
        hit = _only(new, ids[None, :] == targets[:, None], False)
        dpieces, more = pull(jnp.where(hit, likely - 1, likely) * dnll[:, None])
        dtrained = [
            None if total is None else head.parts.add(total, piece, a, i)
            for total, piece, a in zip(dtrained, dpieces, head.axes, strict=True)
        ]
        return (dtrained, dh + more.astype(jnp.float32)), None

    start = (jax.tree.map(jnp.zeros_like, trained), jnp.zeros(h.shape, jnp.float32))
    return jax.lax.scan(one, start, jnp.arange(head.parts.count))[0]


class _Running(NamedTuple):
    """What is known of each token `[n]` after some parts of the vocabulary."""

    most: jax.Array  # the largest logit
    others: jax.Array  # sum of exponentials relative to it, without the target's
    picked: jax.Array  # the target's logit, -inf before it is met
    best: jax.Array  # the entry with the largest logit

    def sum(self) -> jax.Array:
        """Sum of the exponentials of all logits, relative to the largest."""
        return self.others + jnp.exp(self.picked - self.most)

    def total(self) -> jax.Array:
        """Logarithm of the sum of exponentials."""
        return self.most + jnp.log(self.sum())

    def outcome(self, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Negative log-likelihoods, and whether the target is the most likely token."""
        return self.total() - self.picked, self.best == targets


def _nothing(targets: jax.Array) -> _Running:
    zero = jnp.zeros(targets.shape, jnp.float32)
    low = zero + jnp.finfo(jnp.float32).min
    return _Running(low, zero, zero - jnp.inf, jnp.full(targets.shape, -1, jnp.int32))


def _absorb(
    running: _Running, logits: jax.Array, ids: jax.Array, new: jax.Array | None, targets: jax.Array
) -> tuple[_Running, jax.Array]:
    """Adds a part's logits; also returns their exponentials `[n, C]`, 0 for the target's."""
    logits = _only(new, logits, -jnp.inf)
    most, place = jax.lax.platform_dependent(logits, cpu=_largest_by_blocks, default=_largest)
    best = ids[place]
    better = (most > running.most) | ((most == running.most) & (best < running.best))
    largest = jnp.maximum(most, running.most)
    hit = _only(new, ids[None, :] == targets[:, None], False)
    others = jnp.where(hit, 0, jnp.exp(logits - largest[:, None]))
    after = _Running(
        largest,
        running.others * jnp.exp(running.most - largest) + jnp.sum(others, axis=1),
        jnp.maximum(running.picked, jnp.max(jnp.where(hit, logits, -jnp.inf), axis=1)),
        jnp.where(better, best, running.best),
    )
    return after, others


def _only(new: jax.Array | None, x: jax.Array, otherwise: float) -> jax.Array:
    """`[n, C]` with what is not new replaced."""
    return x if new is None else jnp.where(new[None, :], x, otherwise)


def _largest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest of each row of `[n, C]`, and the first place that has it, int32."""
    return jnp.max(logits, axis=1), jnp.argmax(logits, axis=1).astype(jnp.int32)


def _largest_by_blocks(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same for a CPU, which looks for a maximum 30 times as fast as for its place."""
    rows, size = logits.shape
    width = math.gcd(size, 128)
    blocks = logits.reshape(rows, size // width, width)
    most, block = _largest(jnp.max(blocks, axis=2))
    within = jnp.argmax(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], axis=1)
    return most, block * width + within.astype(jnp.int32)
