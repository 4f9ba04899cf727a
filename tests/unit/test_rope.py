# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding against transformers, and its own invariances."""

import jax.numpy as jnp
import numpy as np
import pytest

from lora_tune.layers.rope import apply_rope, rope_frequencies


@pytest.mark.parity
@pytest.mark.parametrize("partial", [0.25, 0.5, 1.0])
def test_equals_transformers(partial):
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = modeling.Qwen3NextConfig(
        head_dim=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": partial,
        },
    )
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 9, 4, 16)).astype(np.float32)
    k = rng.normal(size=(2, 9, 2, 16)).astype(np.float32)
    positions = rng.integers(0, 5000, size=(2, 9))
    table = modeling.Qwen3NextRotaryEmbedding(config)
    cos, sin = table(torch.tensor(q), torch.tensor(positions))
    theirs = modeling.apply_rotary_pos_emb(
        torch.tensor(q), torch.tensor(k), cos, sin, unsqueeze_dim=2
    )
    inv_freq = rope_frequencies(int(16 * partial), 1e6)
    np.testing.assert_allclose(inv_freq, table.inv_freq, rtol=1e-6)
    for x, expected in zip((q, k), theirs, strict=True):
        # The tables differ by one rounding of inv_freq, which the position multiplies.
        got = apply_rope(jnp.asarray(x), jnp.asarray(positions), table.inv_freq.numpy())
        np.testing.assert_allclose(got, expected, atol=1e-5)
        got = apply_rope(jnp.asarray(x), jnp.asarray(positions), inv_freq)
        np.testing.assert_allclose(got, expected, atol=2e-3)


def test_equals_complex_rotation():
    """Hand-written: pair (i, i + R/2) is a complex number turned by position * theta^(-2i/R)."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1, 3, 2, 10)).astype(np.float32)
    positions = np.array([[0, 1, 7]])
    got = np.asarray(apply_rope(jnp.asarray(x), jnp.asarray(positions), rope_frequencies(6, 100.0)))
    angle = positions[..., None] * 100.0 ** (-np.array([0, 2, 4]) / 6)
    turned = (x[..., :3] + 1j * x[..., 3:6]) * np.exp(1j * angle)[:, :, None]
    np.testing.assert_allclose(got[..., :3], turned.real, atol=1e-6)
    np.testing.assert_allclose(got[..., 3:6], turned.imag, atol=1e-6)
    np.testing.assert_array_equal(got[..., 6:], x[..., 6:])


def test_bfloat16_heads_keep_float32_angles():
    """A bfloat16 angle at position 100003 would be off by radians."""
    x = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
    positions = jnp.asarray([[100003]])
    got = apply_rope(x, positions, rope_frequencies(8, 1e4))
    exact = apply_rope(x.astype(jnp.float32), positions, rope_frequencies(8, 1e4))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), exact, atol=2.0**-8 * 1.5)


@pytest.mark.parametrize("rotary_dim", [7, 0, -2])
def test_odd_rotary_dim_is_refused(rotary_dim):
    with pytest.raises(ValueError, match="must be even and positive"):
        rope_frequencies(rotary_dim, 1e4)
