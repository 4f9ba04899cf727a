# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding on the first dimensions of each head (half-split convention).

Su et al., "RoFormer", arXiv 2104.09864, with the pairing of transformers' `rotate_half`:
dimension i turns together with dimension i + R/2.
"""

import math

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


def proportional_frequencies(
    head_dim: int, theta: float, *, proportion: float, factor: float
) -> Float[np.ndarray, " half"]:
    """Return the frequencies of whole heads for a proportion of their pairs, and 0 for the rest.

    transformers' rope type `proportional`. float32, [head_dim / 2].
    """
    turned = int(proportion * head_dim // 2)
    frequencies = rope_frequencies(head_dim, theta) / np.float32(factor)
    return np.where(np.arange(head_dim // 2) < turned, frequencies, np.float32(0))


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


def yarn_frequencies(
    rotary_dim: int,
    theta: float,
    *,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
    original_max_position_embeddings: float,
) -> Float[np.ndarray, " half"]:
    """Stretch slow rotations for longer contexts as YaRN does (Peng et al., arXiv 2309.00071).

    A pair of dimensions that turns beta_fast times within the original context keeps its frequency,
    one that turns beta_slow times has it divided by factor; in between, the share of the two is
    linear in the pair's number. truncate rounds both ends outwards. float32, [rotary_dim / 2].
    """
    half = rotary_dim // 2
    plain = rope_frequencies(rotary_dim, theta).astype(np.float64)

    def pair_with(turns: float) -> float:
        wavelength = original_max_position_embeddings / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = pair_with(beta_fast), pair_with(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first or 0.001
    stretched = np.clip((np.arange(half) - first) / width, 0.0, 1.0)
    return (plain * (1.0 - stretched) + plain / factor * stretched).astype(np.float32)


def yarn_magnitude(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """What YaRN multiplies queries and keys by: 1 + mscale * ln(factor) / 10, or a ratio of two."""

    def grown(share: float) -> float:
        return 1.0 if factor <= 1 else 1.0 + 0.1 * share * math.log(factor)

    if mscale and mscale_all_dim:
        return grown(mscale) / grown(mscale_all_dim)
    return grown(1.0)


def dynamic_frequencies(
    rotary_dim: int,
    theta: float,
    lengths: Int[Array, "B T"],
    *,
    factor: float,
    max_position_embeddings: int,
) -> Float[Array, "B T half"]:
    """Frequencies of tokens in texts of these lengths, by a base that grows with them (NTK).

    Up to max_position_embeddings they are those of `rope_frequencies`. transformers' rope type
    `dynamic`, which takes the longest text of a batch; here each text has its own.
    """
    longest = jnp.maximum(lengths, max_position_embeddings).astype(jnp.float32)
    grown = factor * longest / max_position_embeddings - (factor - 1.0)
    exponent = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    plain = jnp.asarray(rope_frequencies(rotary_dim, theta))[None, None, :]
    power = exponent[None, None, :] * (rotary_dim / (rotary_dim - 2))
    return plain * grown[..., None] ** -power


def apply_rope(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    inv_freq: Float[Array | np.ndarray, "*BT half"],
    magnitude: float = 1.0,
) -> Float[Array, "B T N H"]:
    """Turn the first 2 * half dimensions of each head by its position; keep the rest.

    inv_freq are the frequencies of all tokens, `[half]`, or of each, `[B, T, half]`. What is turned
    is multiplied by magnitude.

    Angles, their sine and cosine and the rotation are float32 whatever x is (a bfloat16 table
    loses whole radians at long range); the result has x's dtype.
    """
    half = inv_freq.shape[-1]
    inv_freq = jnp.asarray(inv_freq, jnp.float32)
    each = inv_freq if inv_freq.ndim == 3 else inv_freq[None, None, :]
    angle = (positions.astype(jnp.float32)[..., None] * each)[:, :, None, :]
    cos, sin = jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude  # [B, T, 1, R/2]
    turned = x[..., : 2 * half].astype(jnp.float32)
    first, second = turned[..., :half], turned[..., half:]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], axis=-1)
