# SPDX-License-Identifier: Apache-2.0
"""The mixer in chunks against the functions it consists of, each run over all tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_tune.layers.conv import causal_conv
from lora_tune.layers.delta_mixer import Heads, gated_delta_mixer
from lora_tune.layers.delta_net import recurrent_gated_delta_rule
from lora_tune.layers.norms import gated_rms_normalise

HEADS = Heads(key_heads=2, groups=2, key_dim=8, value_dim=6)
EPS = 1e-6
# These tests spend their time in the compiler, not in the maths.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Boundaries right at and around those of chunks of 16, where the window reaches across.
IDS = {
    "none": None,
    "packed": [[1] * 15 + [2] * 2 + [3] * 16 + [4] * 37, [1] * 18 + [2] * 1 + [3] * 51],
    "padded": [[0] * 14 + [1] * 40 + [0] * 16, [1] * 30 + [0] * 3 + [1] * 20 + [0] * 5 + [2] * 12],
}


def make(rng, time, dtype, batch=2):
    keys, values = HEADS.key_heads, HEADS.key_heads * HEADS.groups
    width = HEADS.inner + HEADS.groups * HEADS.value_dim
    arrays = {
        "packed": rng.normal(size=(batch, time, keys * width)),
        "g": -0.2 * rng.uniform(size=(batch, time, values)),
        "beta": rng.uniform(size=(batch, time, values)),
        "kernel": rng.normal(size=(4, keys * HEADS.inner)),
        "norm_weight": 1 + 0.1 * rng.normal(size=(HEADS.value_dim,)),
    }
    return {
        name: jnp.asarray(x, jnp.float32 if name == "g" else dtype) for name, x in arrays.items()
    }


def in_chunks(arrays, ids):
    arrays = dict(arrays)
    rows = [arrays.pop(name) for name in ("packed", "g", "beta")]
    return gated_delta_mixer(
        *rows, heads=HEADS, eps=EPS, segment_ids=ids, chunk_size=16, **arrays
    ).astype(jnp.float32)


def one_by_one(arrays, ids):
    """Convolution, step loop, norm and gate, with channels in the order of a checkpoint."""
    packed = arrays["packed"]
    lead, (keys, groups, key_dim, value_dim) = packed.shape[:2], HEADS
    by_head = packed.reshape(*lead, keys, -1)
    q, k, v, z = jnp.split(by_head, [key_dim, 2 * key_dim, HEADS.inner], axis=-1)
    channels = jnp.concatenate([x.reshape(*lead, -1) for x in (q, k, v)], axis=-1)
    mixed, _ = causal_conv(channels, arrays["kernel"], segment_ids=ids)
    q, k, v = jnp.split(jax.nn.silu(mixed), [keys * key_dim, 2 * keys * key_dim], axis=-1)
    out, _ = recurrent_gated_delta_rule(
        q.reshape(*lead, keys, key_dim),
        k.reshape(*lead, keys, key_dim),
        v.reshape(*lead, keys * groups, value_dim),
        arrays["g"],
        arrays["beta"],
        segment_ids=ids,
    )
    y = gated_rms_normalise(out, z.reshape(out.shape), arrays["norm_weight"], eps=EPS)
    return y.reshape(*lead, -1).astype(jnp.float32)


def with_gradients(rule, arrays, ids, weights):
    def loss(arrays):
        y = rule(arrays, ids)
        return jnp.sum(y * weights), y

    step = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)
    (_, y), grads = step(arrays)
    return {"y": y, **grads}


@pytest.mark.parametrize(
    ("ids", "time"), [("none", 1), ("none", 33), ("packed", 70), ("padded", 70)]
)
def test_equals_its_parts(ids, time):
    rng = np.random.default_rng(time)
    arrays = make(rng, time, jnp.float32)
    ids = IDS[ids] if IDS[ids] is None else jnp.asarray(IDS[ids])
    weights = jnp.asarray(rng.normal(size=(2, time, 4 * HEADS.value_dim)), jnp.float32)
    got = with_gradients(in_chunks, arrays, ids, weights)
    expected = with_gradients(one_by_one, arrays, ids, weights)
    for name, value in expected.items():
        bound = 1e-5 * max(1.0, float(jnp.abs(value).max()))
        assert jnp.abs(got[name] - value).max() <= bound, name


def test_bfloat16_loses_only_rounding():
    """Against float32 on the same numbers: four roundings to eight bits forward, more back."""
    rng = np.random.default_rng(5)
    arrays, ids = make(rng, 70, jnp.bfloat16), jnp.asarray(IDS["packed"])
    weights = jnp.asarray(rng.normal(size=(2, 70, 4 * HEADS.value_dim)), jnp.float32)
    got = with_gradients(in_chunks, arrays, ids, weights)
    wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    for name, value in with_gradients(one_by_one, wide, ids, weights).items():
        assert got[name].dtype == (jnp.float32 if name == "y" else arrays[name].dtype)
        bound = (2.0**-6 if name == "y" else 2.0**-4) * float(jnp.abs(value).max())
        assert jnp.abs(got[name].astype(jnp.float32) - value).max() <= bound, name


def test_padding_may_hold_anything():
    rng = np.random.default_rng(6)
    arrays, ids = make(rng, 70, jnp.float32), jnp.asarray(IDS["padded"])
    weights = jnp.ones((2, 70, 4 * HEADS.value_dim))
    expected = with_gradients(in_chunks, arrays, ids, weights)
    real = (ids != 0)[..., None]
    spoilt = {name: arrays[name] for name in ("kernel", "norm_weight")}
    spoilt |= {name: jnp.where(real, arrays[name], jnp.nan) for name in ("packed", "g", "beta")}
    got = with_gradients(in_chunks, spoilt, ids, weights)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, name)
    for name in ("y", "packed", "g", "beta"):
        assert not np.any(np.asarray(got[name])[~np.asarray(real[..., 0])])
