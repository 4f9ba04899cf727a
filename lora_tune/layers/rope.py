# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding on the first dimensions of each head (half-split convention).

Su et al., "RoFormer", arXiv 2104.09864, with the pairing of transformers' `rotate_half`:
dimension i turns together with dimension i + R/2.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rope_frequencies(rotary_dim: int, theta: float) -> Float[np.ndarray, " half"]:
    """Return theta ** (-2i / rotary_dim) in radians per position, float32, [rotary_dim / 2].

    rotary_dim is the even number of leading head dimensions that turn (head_dim times the partial
    rotary factor). Raises ValueError when it is odd or not positive.
    """
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rope: rotary_dim is {rotary_dim}, it must be even and positive")
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    return (1.0 / theta**exponent).astype(np.float32)


def scale_llama3(
    inv_freq: Float[np.ndarray, " half"],
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Float[np.ndarray, " half"]:
    """Stretch slow rotations for longer contexts, as Llama 3.1 does (rope type `llama3`).

    A dimension that turns more than high_freq_factor times within the original context keeps its
    frequency, one that turns less than low_freq_factor times has it divided by factor, and between
    the two the frequency is interpolated linearly in the number of turns. float32, the same shape.
    """
    turns = original_max_position_embeddings * inv_freq.astype(np.float64) / (2 * np.pi)
    kept = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return (inv_freq * (kept + (1.0 - kept) / factor)).astype(np.float32)


def apply_rope(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    inv_freq: Float[Array | np.ndarray, " half"],
) -> Float[Array, "B T N H"]:
    """Turn the first 2 * len(inv_freq) dimensions of each head by its position; keep the rest.

    Angles, their sine and cosine and the rotation are float32 whatever x is (a bfloat16 table
    loses whole radians at long range); the result has x's dtype.
    """
    half = inv_freq.shape[0]
    inv_freq = jnp.asarray(inv_freq, jnp.float32)
    angle = positions.astype(jnp.float32)[..., None, None] * inv_freq[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)  # [B, T, 1, R/2]
    turned = x[..., : 2 * half].astype(jnp.float32)
    first, second = turned[..., :half], turned[..., half:]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], axis=-1)
