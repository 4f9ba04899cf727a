# SPDX-License-Identifier: Apache-2.0
"""From logits to the next token: the processors of transformers, in their order, as pure functions.

Logits are float32 `[B, V]`: B rows, V vocabulary. A removed token has the logit -inf.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lora_tune.errors import InputError, short


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
    temperature = _checked("temperature", temperature, "at least 0", lambda x: x >= 0)
    top_p = _checked("top_p", top_p, "above 0 and at most 1", lambda x: 0 < x <= 1)
    min_p = _checked("min_p", min_p, "from 0 to 1", lambda x: 0 <= x <= 1)
    penalty = _checked("repetition_penalty", repetition_penalty, "above 0", lambda x: x > 0)
    top_k = checked_count("top_k", top_k, least=0)
    cuts = {"top_k": top_k or None, "top_p": top_p if top_p < 1 else None, "min_p": min_p or None}
    idle = [f"{name}={value}" for name, value in cuts.items() if value is not None]
    if idle and temperature == 0:
        raise InputError(
            f"{', '.join(idle)} has no effect with temperature=0, which always takes the most "
            "likely token; set a temperature above 0"
        )
    return Sampling(
        temperature=temperature or None,
        repetition_penalty=None if penalty == 1 else penalty,
        **cuts,
    )


def _checked(name: str, value: Any, expected: str, holds: Callable[[Any], bool]) -> float:
    """The number as a float, in the range and one that float32 holds: the logits are float32."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not (number and holds(value)):  # nan is in no range
        raise InputError(f"{name} must be a number {expected}, got {short(value)}")
    least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    if value != 0 and not least <= value <= most:
        raise InputError(
            f"{name} must be a number {expected} that float32 can hold, from {least:.2g} to "
            f"{most:.2g} if not 0, got {short(value)}"
        )
    return float(value)


def checked_count(name: str, value: Any, *, least: int) -> int:
    """The integer; raises InputError unless it is one of at least `least` that jax can hold."""
    number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (number and least <= value < 2**31):
        raise InputError(
            f"{name} must be an integer of at least {least} and below 2**31, got {short(value)}"
        )
    return int(value)


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
) -> tuple[jax.Array, jax.Array]:
    """The next token of every row.

    Args:
      logits: `[B, V]`.
      sampling: how to choose.
      keys: typed PRNG keys `[B]`, one a row, so that no row depends on the others.
      seen: bool `[B, V]`, tokens of the prompt and the answer so far.

    Returns:
      int32 `[B]`, and bool `[B]`, whether a token could be chosen: there is none where a logit is
      NaN or infinite, other than those that are removed.
    """
    logits = process(logits.astype(jnp.float32), sampling, seen)
    sound = jnp.isfinite(jnp.max(logits, axis=-1))  # the maximum is NaN if any is
    if sampling.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), sound
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32), sound
