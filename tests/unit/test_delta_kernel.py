# SPDX-License-Identifier: Apache-2.0
"""The TPU kernels of the mixer, interpreted, against the loop over chunks that runs elsewhere."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_tune.layers import delta_kernel, delta_mixer
from lora_tune.layers.conv import in_own_run
from lora_tune.layers.delta_matrices import Form, Heads
from lora_tune.layers.delta_net import fill_up, make_marks

HEADS = Heads(key_heads=2, groups=2, key_dim=128, value_dim=128)
CHUNK, TAPS = 16, 4
# Boundaries right at and around those of the chunks, where the window reaches across.
IDS = {
    "whole": [[1] * 70, [1] * 70],
    "packed": [[1] * 15 + [2] * 2 + [3] * 16 + [4] * 37, [1] * 18 + [2] * 1 + [3] * 51],
    "padded": [[0] * 14 + [1] * 40 + [0] * 16, [1] * 30 + [0] * 3 + [1] * 20 + [0] * 5 + [2] * 12],
}


def make(dtype, ids, seed=0, decay=0.2, heads=HEADS, taps=TAPS):
    rng = np.random.default_rng(seed)
    batch, time = ids.shape
    keys, values = heads.key_heads, heads.key_heads * heads.groups
    shapes = [(batch, time, keys * (heads.inner + heads.outer)), *[(batch, time, values)] * 2]
    packed = jnp.asarray(rng.normal(size=shapes[0]), dtype)
    g = jnp.asarray(-decay * rng.uniform(size=shapes[1]), jnp.float32)
    beta = jnp.asarray(rng.uniform(size=shapes[2]), dtype)
    kernel = jnp.asarray(rng.normal(size=(keys, taps, heads.inner)) / 2, dtype)
    norm = jnp.asarray(1 + 0.1 * rng.normal(size=(heads.value_dim,)), dtype)
    d_y = jnp.asarray(rng.normal(size=(batch, time, keys * heads.outer)), dtype)
    marks = make_marks(ids, batch, time, CHUNK)
    rows = tuple(fill_up(x, CHUNK) for x in (packed, g, beta))
    return (kernel, norm), rows, (marks, in_own_run(marks.run, taps)), fill_up(d_y, CHUNK)


@partial(jax.jit, static_argnames=("form", "kernel"))
def both_ways(form, params, rows, marks, d_y, *, kernel):
    """The outputs, and the gradients of params and rows."""
    if kernel:
        y, states = delta_kernel.kernel_forward(
            form, params, rows, marks, keep=True, interpret=True
        )
        pull = partial(delta_kernel.kernel_backward, interpret=True)
        grads = pull(form, params, rows, marks, states, d_y)
    else:
        y, states = delta_mixer._run_loop(form, params, rows, marks, keep=True)
        grads = delta_mixer._pull_loop(form, params, (None, None), rows, marks, states, d_y)
    names = ("y", "states", "taps", "norm", "packed", "g", "beta")
    return dict(zip(names, (y, states, *grads[0], *grads[1]), strict=True))


def form_of(dtype):
    return Form(HEADS, CHUNK, 1e-6, jax.lax.Precision.HIGHEST, dtype)


@pytest.mark.parametrize("ids", IDS)
def test_equals_the_loop(ids):
    given = make(jnp.float32, jnp.asarray(IDS[ids]))
    got = both_ways(form_of(jnp.float32), *given, kernel=True)
    expected = both_ways(form_of(jnp.float32), *given, kernel=False)
    for name, value in expected.items():
        bound = 1e-5 * max(1.0, float(jnp.abs(value).max()))
        assert jnp.abs(got[name] - value).max() <= bound, name


def test_equals_the_loop_in_other_sizes():
    heads = Heads(key_heads=1, groups=3, key_dim=256, value_dim=128)
    form = form_of(jnp.float32)._replace(heads=heads)
    given = make(jnp.float32, jnp.asarray(IDS["packed"]), heads=heads, taps=2)
    got, expected = (both_ways(form, *given, kernel=kernel) for kernel in (True, False))
    for name, value in expected.items():
        bound = 1e-5 * max(1.0, float(jnp.abs(value).max()))
        assert jnp.abs(got[name] - value).max() <= bound, name


def test_what_fits(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # without a mesh there is one device
    form = Form(HEADS, 64, 1e-6, None, jnp.bfloat16)

    def fits(taps=4, chunk=64, **sizes):
        other = form._replace(chunk=chunk, heads=HEADS._replace(**sizes))
        return delta_kernel.kernel_fits(other, taps)

    assert all((fits(), fits(groups=4), fits(key_dim=256), fits(taps=2)))
    assert not any((fits(groups=8), fits(key_dim=256, value_dim=256), fits(taps=1)))
    assert not any((fits(key_dim=64), fits(value_dim=192), fits(chunk=24), fits(taps=6)))
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert not fits()


def test_bfloat16_loses_only_rounding():
    """Kernel and loop round at the same places; both are held to the float32 loop."""
    given = make(jnp.bfloat16, jnp.asarray(IDS["packed"]), seed=5)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, given)
    got = both_ways(form_of(jnp.bfloat16), *given, kernel=True)
    for name, value in both_ways(form_of(jnp.float32), *wide, kernel=False).items():
        bound = (2.0**-6 if name in ("y", "states") else 2.0**-4) * float(jnp.abs(value).max())
        assert jnp.abs(got[name].astype(jnp.float32) - value).max() <= bound, name


def test_padding_may_hold_anything():
    params, rows, marks, d_y = make(jnp.float32, jnp.asarray(IDS["padded"]), seed=6)
    real = marks[0].real[..., None]
    spoilt = tuple(jnp.where(real, x, jnp.nan) for x in rows)
    run = partial(both_ways, form_of(jnp.float32), params, kernel=True)
    got, expected = run(spoilt, marks, d_y), run(rows, marks, d_y)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, name)
    for name in ("y", "packed", "g", "beta"):
        assert not np.any(np.asarray(got[name])[~np.asarray(real[..., 0])]), name


def test_documents_do_not_see_each_other():
    """With next to no decay, what a first document holds would stay in the state for good."""
    ids = jnp.asarray([[1] * 21 + [2] * 49])
    params, rows, marks, d_y = make(jnp.float32, ids, seed=7, decay=1e-3)
    first = (jnp.arange(rows[0].shape[1]) < 21)[None, :, None]
    other = tuple(jnp.where(first, 2 * x, x) for x in rows)
    run = partial(both_ways, form_of(jnp.float32), params, kernel=True)
    got, expected = run(other, marks, d_y), run(rows, marks, d_y)
    for name in ("y", "packed", "g", "beta"):
        np.testing.assert_array_equal(got[name][:, 21:], expected[name][:, 21:], name)
        assert np.any(np.asarray(got[name])[:, :21] != np.asarray(expected[name])[:, :21]), name
