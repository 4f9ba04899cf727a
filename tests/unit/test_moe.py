# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts against a loop over tokens, on one device and with experts spread."""

import functools

import engine_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from lora_tune import sharding
from lora_tune.layers import grouped
from lora_tune.layers.grouped import grouped_dot
from lora_tune.layers.moe import Experts, SparseMoe, dispatch, route

EMBED, HIDDEN, EXPERTS, TOP_K, TOKENS = 8, 6, 4, 2, 40


def filled(module, seed=0):
    rng = np.random.default_rng(seed)
    graphdef, state = nnx.split(module)
    fill = lambda s: jnp.asarray(0.5 * rng.standard_normal(s.shape), s.dtype)  # noqa: E731
    return nnx.merge(graphdef, jax.tree.map(fill, state))


def silu(x):
    return x / (1 + np.exp(-x))


def mlp(x, gate, up, down):
    return (silu(x @ gate) * (x @ up)) @ down


def by_token(x, weights, chosen, experts):
    """The definition: each token through each of its experts, in float64."""
    gate, up, down = (
        np.asarray(p.kernel[...], np.float64)
        for p in (experts.gate_proj, experts.up_proj, experts.down_proj)
    )
    out = np.zeros(x.shape)
    for n in range(len(x)):
        for weight, e in zip(weights[n], chosen[n], strict=True):
            out[n] += weight * mlp(np.asarray(x[n], np.float64), gate[e], up[e], down[e])
    return out


@functools.cache
def experts():
    return filled(Experts(EXPERTS, EMBED, HIDDEN, dtype=jnp.float32))


def assignments(kind):
    """Which experts each token goes to."""
    rng = np.random.default_rng(1)
    pairs = {
        "even": lambda n: rng.permutation(EXPERTS)[:TOP_K],
        "one pair": lambda n: (3, 2),
        "all but one to one pair": lambda n: (0, 1) if n == 17 else (3, 2),
        "never expert 1": lambda n: rng.permutation([0, 2, 3])[:TOP_K],
    }[kind]
    return np.array([pairs(n) for n in range(TOKENS)], np.int32)


KINDS = ("even", "one pair", "all but one to one pair", "never expert 1")


def inputs(kind):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((TOKENS, EMBED)).astype(np.float32)
    weights = rng.random((TOKENS, TOP_K)).astype(np.float32)
    return x, weights, assignments(kind)


@functools.cache
def single_device():
    graphdef, state = nnx.split(experts())

    def run(state, x, weights, chosen):
        y = dispatch(x, weights, chosen, nnx.merge(graphdef, state, copy=True))
        return jnp.sum(jnp.square(y)), y

    return cases.quick_jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True)), state


@functools.cache
def spread():
    """The same with the four experts on four devices, and the tokens in four parts."""
    mesh = sharding.make_mesh(expert=4, devices=jax.devices()[:4])
    graphdef, state = nnx.split(experts())
    specs = jax.tree.map(lambda _: P("expert", None, None), state)
    tokens = P("expert", None)

    def local(state, x, weights, chosen):
        with sharding.manual(mesh):
            return dispatch(x, weights, chosen, nnx.merge(graphdef, state, copy=True))

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, tokens, tokens, tokens),
        out_specs=tokens,
        axis_names=set(sharding.MANUAL_AXES),
        check_vma=False,
    )

    def run(state, x, weights, chosen):
        y = mapped(state, x, weights, chosen)
        return jnp.sum(jnp.square(y)), y

    return cases.quick_jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True)), state


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_is_dropped_however_skewed_the_routing(kind):
    run, state = single_device()
    (_, y), (gradients, *_) = run(state, *inputs(kind))
    np.testing.assert_allclose(y, by_token(*inputs(kind), experts()), atol=1e-5)
    idle = sorted(set(range(EXPERTS)) - set(assignments(kind).ravel().tolist()))
    for gradient in jax.tree.leaves(gradients):
        assert not np.asarray(gradient)[idle].any()
        busy = np.abs(np.delete(np.asarray(gradient), idle, axis=0)).max(axis=(1, 2))
        assert (busy > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_experts_on_four_devices_equal_one_device(kind):
    expected, actual = (
        jax.device_get(run(state, *inputs(kind))) for run, state in (single_device(), spread())
    )
    np.testing.assert_allclose(actual[0][1], expected[0][1], atol=1e-5)
    named = [
        {str(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(gradients)}
        for gradients in (actual[1], expected[1])
    ]
    cases.assert_close(*named, 1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("normalise", [True, False])
def test_routing_is_softmax_then_top_k(normalise):
    logits = np.random.default_rng(3).standard_normal((TOKENS, EXPERTS)).astype(np.float32)
    weights, chosen = route(jnp.asarray(logits), TOP_K, normalise=normalise)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    order = np.argsort(-p, axis=1)[:, :TOP_K]
    np.testing.assert_array_equal(chosen, order)
    expected = np.take_along_axis(p, order, 1)
    if normalise:
        expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_routing_of_bfloat16_is_computed_in_float32():
    logits = jnp.asarray([[1.0, 1.0078125, -4.0, -5.0]], jnp.bfloat16)
    weights, chosen = route(logits, 2, normalise=True)
    assert weights.dtype == jnp.bfloat16
    assert chosen.tolist() == [[1, 0]]


def test_block_is_routed_plus_gated_shared_expert():
    moe = filled(
        SparseMoe(
            EMBED,
            num_experts=EXPERTS,
            top_k=TOP_K,
            hidden=HIDDEN,
            shared_hidden=5,
            normalise=True,
            dtype=jnp.float32,
        )
    )
    x = np.random.default_rng(4).standard_normal((2, 5, EMBED)).astype(np.float32)
    flat = x.reshape(-1, EMBED)
    weights, chosen = route(jnp.asarray(flat @ moe.gate.kernel[...]), TOP_K, normalise=True)
    routed = by_token(flat, np.asarray(weights), np.asarray(chosen), moe.experts)
    shared = moe.shared_expert
    kernels = (shared.gate_proj, shared.up_proj, shared.down_proj)
    gate = 1 / (1 + np.exp(-flat @ np.asarray(moe.shared_expert_gate.kernel[...])))
    expected = routed + gate * mlp(flat, *(np.asarray(k.kernel[...]) for k in kernels))
    actual = cases.quick_jit(lambda x: moe(x))(x)
    np.testing.assert_allclose(actual, expected.reshape(x.shape), atol=1e-5)


def _grouped(x, w, sizes, g, used):
    y = grouped_dot(x, w, sizes)
    return jnp.sum(jnp.where(jnp.arange(len(x))[:, None] < used, y, 0) * g), y


GROUPED = cases.quick_jit(jax.value_and_grad(_grouped, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("sizes", [(0, 70, 0, 3), (1, 1, 1, 1), (33, 0, 32, 31), (0, 0, 0, 0)])
def test_grouped_product_and_its_gradients(sizes):
    """Groups smaller, larger and exactly as large as a block, empty ones, and rows of no group."""
    n = 100
    rng = np.random.default_rng(5)
    x, g = (rng.standard_normal((n, k)).astype(np.float32) for k in (5, 3))
    w = rng.standard_normal((4, 5, 3)).astype(np.float32)
    owner = np.repeat(np.arange(4), sizes)
    used = len(owner)
    g[used:] = 0

    (_, y), (dx, dw) = GROUPED(x, w, jnp.asarray(sizes, jnp.int32), g, used)
    np.testing.assert_allclose(y[:used], np.einsum("nk,nkf->nf", x[:used], w[owner]), atol=1e-5)
    np.testing.assert_allclose(dx[:used], np.einsum("nf,nkf->nk", g[:used], w[owner]), atol=1e-5)
    assert not dx[used:].any()
    for e in range(4):
        mine = np.flatnonzero(owner == e)
        np.testing.assert_allclose(dw[e], x[mine].T @ g[mine], atol=1e-4)


@pytest.mark.parametrize("sizes", [(0, 200, 0, 56), (128, 0, 1, 127), (0, 0, 0, 0), (5, 6, 7, 8)])
def test_the_tpu_kernel_of_the_gradient_of_matrices(sizes):
    """Interpreted here; empty groups give zeros, rows of no group nothing."""
    n = 256
    rng = np.random.default_rng(6)
    x, g = (jnp.asarray(rng.standard_normal((n, k)), jnp.float32) for k in (128, 256))
    with pltpu.force_tpu_interpret_mode():
        dw = grouped._tiled_dw(x, jnp.asarray(sizes, jnp.int32), g)
    ends = np.cumsum(sizes)
    for e, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        mine = slice(end - size, end)
        np.testing.assert_allclose(dw[e], np.asarray(x)[mine].T @ np.asarray(g)[mine], atol=1e-4)
