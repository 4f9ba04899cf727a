# SPDX-License-Identifier: Apache-2.0
"""The cast of a weight against numpy's, bit for bit, and its gradient."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lora_tune.layers.weights import cast

rng = np.random.default_rng(0)
VALUES = {
    "any bits": rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32),
    "weights": rng.normal(0, 0.02, 10_000).astype(np.float32),
    "ties": (np.arange(2**16, dtype=np.uint32) << 16 | 0x8000).view(np.float32),
    "ends": np.array([0.0, -0.0, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45], np.float32),
}


@pytest.mark.parametrize("kind", VALUES)
def test_float32_to_bfloat16_is_the_rounding_of_numpy(kind):
    value = VALUES[kind]
    got = np.asarray(jax.jit(lambda x: cast(x, jnp.bfloat16))(value))
    with np.errstate(all="ignore"):
        wanted = value.astype(ml_dtypes.bfloat16)
    number = ~np.isnan(value)
    np.testing.assert_array_equal(got.view(np.uint16)[number], wanted.view(np.uint16)[number])
    assert np.isnan(got[~number].astype(np.float32)).all()


def test_every_number_that_is_none_stays_so():
    value = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(np.asarray(cast(jnp.asarray(value), jnp.bfloat16), np.float32)).all()


def test_the_gradient_is_handed_on():
    x = jnp.asarray(VALUES["weights"])
    g = jnp.asarray(rng.normal(size=x.shape), jnp.bfloat16)
    _, pull = jax.vjp(lambda x: cast(x, jnp.bfloat16), x)
    (dx,) = pull(g)
    assert dx.dtype == jnp.float32
    np.testing.assert_array_equal(dx, g.astype(jnp.float32))


def test_other_types_are_cast_as_ever():
    x = jnp.ones(3, jnp.float32)
    assert cast(x, jnp.float32) is x or (cast(x, jnp.float32) == x).all()
    assert cast(x.astype(jnp.bfloat16), jnp.float32).dtype == jnp.float32
