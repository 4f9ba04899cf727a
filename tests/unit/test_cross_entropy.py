# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy by parts of the vocabulary against the textbook form on whole logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_tune import sharding
from lora_tune.layers import cross_entropy as cross_entropy_module
from lora_tune.layers.cross_entropy import cross_entropy
from lora_tune.layers.linear import Embed, Linear

TOKENS, EMBED, VOCAB = 12, 8, 48


def head_of(kind, dtype=jnp.float32, vocab=VOCAB):
    rng = np.random.default_rng(0)
    if kind == "tied":
        module = Embed(vocab, EMBED, dtype=dtype)
    else:
        module = Linear(EMBED, vocab, axes=("embed", "vocab"), dtype=dtype)
    graphdef, state = nnx.split(module)
    return nnx.merge(
        graphdef, jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype), state)
    )


def project(head, h):
    return head.attend(h) if isinstance(head, Embed) else head(h)


def inputs(dtype=jnp.float32, vocab=VOCAB):
    rng = np.random.default_rng(1)
    h = jnp.asarray(rng.normal(size=(TOKENS, EMBED)), dtype)
    return h, jnp.asarray(rng.integers(0, vocab, TOKENS), jnp.int32)


def textbook(state, h, targets, graphdef, weights):
    logits = project(nnx.merge(graphdef, state), h).astype(jnp.float32)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    return jnp.sum(nll * weights), (nll, jnp.argmax(logits, axis=1) == targets)


def by_parts(state, h, targets, graphdef, weights, *, vocab, chunk):
    head = nnx.merge(graphdef, state, copy=True)
    scores = cross_entropy(head, project, h, targets, vocab_size=vocab, chunk_size=chunk)
    return jnp.sum(scores[0] * weights), scores


WEIGHTS = np.linspace(-1.0, 2.0, TOKENS, dtype=np.float32)


def both(kind, chunk, dtype=jnp.float32, vocab=VOCAB):
    graphdef, state = nnx.split(head_of(kind, dtype, vocab))
    h, targets = inputs(dtype, vocab)
    results = []
    for form in (textbook, functools.partial(by_parts, vocab=vocab, chunk=chunk)):
        grad = jax.value_and_grad(form, argnums=(0, 1), has_aux=True)
        (_, (nll, correct)), gradients = jax.jit(grad, static_argnums=3)(
            state, h, targets, graphdef, WEIGHTS
        )
        results.append((nll, correct, *jax.tree.leaves(gradients)))
    return results


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("chunk", [48, 100, 16, 20, 47, 1])
def test_values_and_gradients_for_parts_that_divide_and_that_do_not(kind, chunk):
    expected, actual = both(kind, chunk)
    for wanted, got in zip(expected, actual, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("vocab", [47, 53])
def test_a_vocabulary_of_prime_size(vocab):
    expected, actual = both("untied", 16, vocab=vocab)
    for wanted, got in zip(expected, actual, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-6, rtol=2e-6)


def capped(head, h):
    return 3.0 * jnp.tanh(project(head, h) / 3.0)


@pytest.mark.parametrize(
    ("kind", "chunk", "score"),
    [("tied", 16, project), ("untied", 20, project), ("tied", 47, capped)],
)
def test_a_frozen_head_has_its_gradient_from_the_forward_pass(kind, chunk, score):
    head = head_of(kind)
    h, targets = inputs()

    def whole(h):
        scores = jax.nn.log_softmax(score(head, h))
        return jnp.sum(-jnp.take_along_axis(scores, targets[:, None], axis=1)[:, 0] * WEIGHTS)

    def parts(h):
        nll, _ = cross_entropy(head, score, h, targets, vocab_size=VOCAB, chunk_size=chunk)
        return jnp.sum(nll * WEIGHTS)

    gradient = jax.jit(jax.grad(parts))
    np.testing.assert_allclose(gradient(h), jax.grad(whole)(h), atol=2e-6, rtol=2e-6)
    products = [line for line in str(jax.make_jaxpr(gradient)(h)).split("\n") if "dot_gen" in line]
    assert len([p for p in products if f",{chunk}]" in p]) == 1  # logits, once
    # Rows are likely to have a token with all the probability: its slope less one is all there is.
    sure = gradient(h * 6)
    exact = jax.grad(whole)(h * 6)
    np.testing.assert_allclose(sure, exact, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("size", [384, 640, 47])
def test_the_first_of_the_largest_is_found_by_blocks(size):
    logits = np.random.default_rng(0).integers(0, 3, (40, size)).astype(np.float32)
    logits[0], logits[1] = 0.0, -np.inf
    most, place = jax.jit(cross_entropy_module._largest_by_blocks)(logits)
    np.testing.assert_array_equal(most, logits.max(axis=1))
    np.testing.assert_array_equal(place, logits.argmax(axis=1))


def test_bfloat16_logits_are_summed_in_float32():
    expected, actual = both("untied", 16, jnp.bfloat16)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    np.testing.assert_array_equal(actual[1], expected[1])
    for wanted, got in zip(expected[2:], actual[2:], strict=True):
        assert got.dtype == jnp.bfloat16
        wanted, got = (np.asarray(x, np.float32) for x in (wanted, got))
        np.testing.assert_allclose(got, wanted, atol=2e-2 * np.abs(wanted).max())


def test_of_equally_likely_tokens_the_first_counts():
    head = head_of("untied")
    head.kernel.set_value(jnp.zeros_like(head.kernel[...]))
    h, _ = inputs()
    targets = jnp.arange(TOKENS, dtype=jnp.int32)
    nll, correct = cross_entropy(head, project, h, targets, vocab_size=VOCAB, chunk_size=16)
    np.testing.assert_array_equal(correct, [True] + [False] * (TOKENS - 1))
    np.testing.assert_allclose(nll, np.log(VOCAB), rtol=1e-6)


def test_large_logits_do_not_overflow():
    head = head_of("untied")
    head.kernel.set_value(head.kernel[...] * 1e4)
    graphdef, state = nnx.split(head)
    h, targets = inputs()
    wanted, _ = textbook(state, h, targets, graphdef, WEIGHTS)
    got, _ = by_parts(state, h, targets, graphdef, WEIGHTS, vocab=VOCAB, chunk=16)
    assert np.isfinite(got)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 2, "expert": 2, "tensor": 2}, {"data": 2, "tensor": 4}, {"fsdp": 8}]
)
def test_a_sharded_head_on_a_mesh(sizes):
    mesh = sharding.make_mesh(**sizes)
    graphdef, state = nnx.split(head_of("untied"))
    h, targets = inputs()
    rows = jax.sharding.PartitionSpec(sharding.BATCH_AXES)
    h, targets, weights = (jnp.tile(x, (8, *[1] * (x.ndim - 1))) for x in (h, targets, WEIGHTS))
    kernel = sharding.spec(("embed", "vocab"), only=sharding.MANUAL_AXES)

    def local(state, h, targets, weights):
        with sharding.manual(mesh):
            nll, correct = by_parts(state, h, targets, graphdef, weights, vocab=VOCAB, chunk=20)[1]
        return nll, correct

    def loss(state, h, targets, weights):
        specs = jax.tree.map(lambda _: kernel, state)
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, rows, rows, rows),
            out_specs=(rows, rows),
            axis_names=set(sharding.MANUAL_AXES),
            check_vma=False,
        )
        nll, correct = mapped(state, h, targets, weights)
        return jnp.sum(nll * weights), (nll, correct)

    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    placed = jax.device_put(state, sharding.named_sharding(mesh, ("embed", "vocab")))
    actual = jax.tree.leaves(jax.jit(grad)(placed, h, targets, weights))
    wanted = jax.jit(jax.value_and_grad(textbook, argnums=(0, 1), has_aux=True), static_argnums=3)(
        state, h, targets, graphdef, weights
    )
    for got, want in zip(actual, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)
