# SPDX-License-Identifier: Apache-2.0
"""The TPU kernel of attention, interpreted on CPU, against the reference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lora_tune import sharding
from lora_tune.layers import splash
from lora_tune.layers.attention import attention

IDS = [[1] * 100 + [2] * 1 + [3] * 60 + [0] * 25 + [4] * 70, [0] * 30 + [1] * 200 + [0] * 26]


def make(rng, *, time=256, heads=4, kv_heads=2, dim=256, dtype=jnp.bfloat16):
    shapes = [(2, time, heads, dim), (2, time, kv_heads, dim), (2, time, kv_heads, dim)]
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def with_gradients(attend, arrays, weights):
    def loss(*arrays):
        out = attend(*arrays)
        return jnp.sum(out.astype(jnp.float32) * weights), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    return out, *grads


@pytest.mark.parametrize(
    ("dim", "kv_heads", "window"), [(256, 2, None), (64, 4, 40), (128, 1, 2)], ids=str
)
def test_kernel_equals_reference(dim, kv_heads, window):
    """In bfloat16, against the reference in float32 on the same numbers."""
    rng = np.random.default_rng(dim)
    arrays = make(rng, dim=dim, kv_heads=kv_heads)
    weights = rng.normal(size=arrays[0].shape).astype(np.float32)
    kwargs = {"segment_ids": jnp.asarray(IDS), "scale": dim**-0.5, "sliding_window": window}
    got = with_gradients(
        partial(splash.splash_attention, interpret=True, **kwargs), arrays, weights
    )
    exact = with_gradients(
        partial(attention, **kwargs), tuple(x.astype(jnp.float32) for x in arrays), weights
    )
    for name, a, b in zip("oqkv", got, exact, strict=True):
        # Operands of eight bits: three roundings forward, two more in the gradients.
        bound = 2.0**-7 * float(jnp.abs(b).max())
        assert a.dtype == jnp.bfloat16
        assert jnp.abs(a.astype(jnp.float32) - b).max() <= bound, name
        if name != "o":
            assert not np.any(np.asarray(a, np.float32)[np.asarray(IDS) == 0]), name
    assert not np.any(np.asarray(got[0], np.float32)[np.asarray(IDS) == 0])


def test_heads_are_shared_out_over_the_tensor_axis(monkeypatch):
    """Two devices for one kv head, inside a region that is manual over the other axes.

    The kernel is the reference here: XLA cannot compile an interpreted one in such a region.
    """
    monkeypatch.setattr(splash, "_kernel", kernel_by_reference)
    rng = np.random.default_rng(3)
    arrays = make(rng, time=128, dim=64, kv_heads=1, dtype=jnp.float32)
    ids = jnp.asarray(IDS)[:, :128]
    run = partial(splash.splash_attention, scale=0.1, sliding_window=None)
    weights = rng.normal(size=arrays[0].shape).astype(np.float32)
    expected = with_gradients(partial(run, segment_ids=ids), arrays, weights)
    rows = PartitionSpec("data")

    def local(q, k, v, ids):
        half = tuple(x.astype(jnp.bfloat16) for x in (q, k, v))
        assert splash.splash_fits(*half)
        return run(q, k, v, ids)

    on_mesh = jax.shard_map(
        local,
        mesh=sharding.make_mesh(data=2, tensor=2),
        in_specs=(rows,) * 4,
        out_specs=rows,
        axis_names=set(sharding.MANUAL_AXES),
        check_vma=False,
    )
    got = with_gradients(lambda *x: on_mesh(*x, ids), arrays, weights)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def kernel_by_reference(q, k, v, ids, *, scale, sliding_window, interpret):
    assert not interpret
    return attention(q, k, v, segment_ids=ids, scale=scale, sliding_window=sliding_window)


def test_what_does_not_fit(monkeypatch):
    q, k, v = (jnp.zeros(x.shape, x.dtype) for x in make(np.random.default_rng(0), dim=64))
    assert not splash.splash_fits(q, k, v)  # eight devices, and no mesh to say how they are used
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert splash.splash_fits(q, k, v)
    assert not splash.splash_fits(*(x.astype(jnp.float32) for x in (q, k, v)))
    assert not splash.splash_fits(*(x[:, :200] for x in (q, k, v)))
    assert not splash.splash_fits(q[:, :128], k, v)


def test_one_program_takes_the_reference_on_cpu(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    rng = np.random.default_rng(4)
    arrays = make(rng, dim=64)
    weights = rng.normal(size=arrays[0].shape).astype(np.float32)
    run = partial(attention, scale=0.1, segment_ids=jnp.asarray(IDS))
    assert "pallas_call" in str(jax.make_jaxpr(run)(*arrays))
    got = with_gradients(run, arrays, weights)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    expected = with_gradients(lambda *x: run(*x), arrays, weights)
    for a, b in zip(got, expected, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=2.0**-8 * np.abs(b).max())
