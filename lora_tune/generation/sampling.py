# SPDX-License-Identifier: Apache-2.0
"""From logits to the next token: the processors of transformers, in their order, as pure functions.

Logits are float32 `[B, V]`: B rows, V vocabulary. A removed token has the logit -inf.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from lora_tune.errors import InputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, under the names of transformers.

    What is None is off and costs nothing. The values are arguments of the compiled step, so only
    switching one on or off compiles again. Made by `make_sampling`.

    Attributes:
      temperature: divides the logits before a token is drawn; None takes the most likely token.
      top_k: keep the k most likely tokens, and all that are as likely as the last of them.
      top_p: keep the fewest most likely tokens whose probabilities reach p together.
      min_p: keep tokens at least min_p times as likely as the most likely one.
      repetition_penalty: logits of tokens in the prompt or the answer so far are divided by it
        where positive and multiplied where negative.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def make_sampling(
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> Sampling:
    """Checks the settings and switches off those that have no effect.

    Raises:
      InputError: a value out of its range, or one that only matters when drawing together with
        `temperature=0`, which takes the most likely token.
    """
    _check("temperature", temperature, "at least 0", lambda x: x >= 0)
    _check("top_p", top_p, "above 0 and at most 1", lambda x: 0 < x <= 1)
    _check("min_p", min_p, "from 0 to 1", lambda x: 0 <= x <= 1)
    _check("repetition_penalty", repetition_penalty, "above 0", lambda x: x > 0)
    check_count("top_k", top_k, least=0)
    cuts = {"top_k": top_k or None, "top_p": top_p if top_p < 1 else None, "min_p": min_p or None}
    idle = [f"{name}={value}" for name, value in cuts.items() if value is not None]
    if idle and temperature == 0:
        raise InputError(
            f"{', '.join(idle)} has no effect with temperature=0, which always takes the most "
            "likely token; set a temperature above 0"
        )
    return Sampling(
        temperature=temperature or None,
        repetition_penalty=None if repetition_penalty == 1 else repetition_penalty,
        **cuts,
    )


def _check(name: str, value: Any, expected: str, holds: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and holds(value)):
        raise InputError(f"{name} must be a number {expected}, got {value!r}")


def check_count(name: str, value: Any, *, least: int) -> None:
    """Raises InputError unless `value` is an integer of at least `least` that jax can hold."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise InputError(
            f"{name} must be an integer of at least {least} and below 2**31, got {value!r}"
        )


def penalise_repetition(logits: jax.Array, seen: jax.Array, penalty: float) -> jax.Array:
    """Makes tokens less likely (penalty > 1) where `seen` (bool `[B, V]`)."""
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: jax.Array, k: int) -> jax.Array:
    """Removes tokens less likely than the k-th."""
    last = jnp.clip(logits.shape[-1] - k, 0)
    smallest = jnp.take(jnp.sort(logits, axis=-1), last, axis=-1)[..., None]
    return jnp.where(logits < smallest, -jnp.inf, logits)


def keep_top_p(logits: jax.Array, p: float) -> jax.Array:
    """Removes the least likely tokens, as many as leave a probability of at least p."""
    order = jnp.argsort(logits, axis=-1, stable=True)
    ascending = jnp.take_along_axis(logits, order, axis=-1)
    reached = jnp.cumsum(jax.nn.softmax(ascending, axis=-1), axis=-1)
    removed = (reached <= 1 - p).at[..., -1].set(False)
    kept = jnp.where(removed, -jnp.inf, ascending)
    return jnp.put_along_axis(logits, order, kept, axis=-1, inplace=False)


def keep_min_p(logits: jax.Array, min_p: float) -> jax.Array:
    """Removes tokens less than `min_p` times as likely as the most likely one."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    least = min_p * jnp.max(probabilities, axis=-1, keepdims=True)
    return jnp.where(probabilities < least, -jnp.inf, logits)


def process(logits: jax.Array, sampling: Sampling, seen: jax.Array | None) -> jax.Array:
    """The logits that a token is drawn from; `seen` (bool `[B, V]`) is read by the penalty only."""
    if sampling.repetition_penalty is not None:
        assert seen is not None
        logits = penalise_repetition(logits, seen, sampling.repetition_penalty)
    if sampling.temperature is not None:
        logits = logits / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p is not None:
        logits = keep_min_p(logits, sampling.min_p)
    return logits


def next_tokens(
    logits: jax.Array, sampling: Sampling, keys: jax.Array, seen: jax.Array | None = None
) -> jax.Array:
    """The next token of every row.

    Args:
      logits: `[B, V]`.
      sampling: how to choose.
      keys: typed PRNG keys `[B]`, one a row, so that no row depends on the others.
      seen: bool `[B, V]`, tokens of the prompt and the answer so far.

    Returns:
      int32 `[B]`.
    """
    logits = process(logits.astype(jnp.float32), sampling, seen)
    if sampling.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
