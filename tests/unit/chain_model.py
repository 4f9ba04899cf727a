# SPDX-License-Identifier: Apache-2.0
"""A model small enough to run by hand, with the cache of a real one's interface."""

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

STATES, VOCAB = 97, 400
TRACED: Counter[int] = Counter()
"""Length of a call -> how often it was traced."""
FED: list[np.ndarray] = []
"""Segment ids of every call to a model that logs them, as they came."""


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = VOCAB


class Chain(nnx.Module):
    """Logits are a row of a table, chosen by a running hash of all real tokens so far."""

    def __init__(self, seed: int = 0, *, log: bool = False):
        self.config, self.origin, self.log = Config(), None, log
        drawn = jax.random.normal(jax.random.key(seed), (STATES, VOCAB))
        self.table = nnx.Param(3 * drawn)

    def create_cache(self, batch: int, size: int) -> dict[str, jax.Array]:
        return {"hash": jnp.zeros(batch, jnp.int32), "slots": jnp.zeros((batch, size), jnp.int32)}

    def __call__(self, tokens: Any, segment_ids: Any, *, cache: Any, last: Any) -> Any:
        TRACED[tokens.shape[1]] += 1
        if self.log:
            jax.debug.callback(lambda ids: FED.append(np.asarray(ids)), segment_ids, ordered=True)

        def step(carry: Any, column: Any) -> Any:
            token, real = column
            carry = jnp.where(real != 0, (carry * 31 + token + 1) % STATES, carry)
            return carry, carry

        _, hashes = jax.lax.scan(step, cache["hash"], (tokens.T, segment_ids.T))
        logits = self.table[...][jnp.take_along_axis(hashes, last[None, :], axis=0)[0]]
        slots = jnp.concatenate([cache["slots"], segment_ids + 1], axis=1)[:, tokens.shape[1] :]
        # A cache that has run over knows nothing any more.
        full = jnp.any(cache["slots"][:, : tokens.shape[1]] != 0, axis=1, keepdims=True)
        logits = jnp.where(full, jnp.nan, logits)
        return logits, {"hash": hashes[-1], "slots": slots}


def state_after(prompt: list[int]) -> int:
    """The row of the table that gives the logits of the next token."""
    state = 0
    for token in prompt:
        state = (state * 31 + token + 1) % STATES
    return state


def by_hand(
    prompt: list[int], table: np.ndarray, *, new: int, stops: tuple[int, ...] = ()
) -> list[int]:
    """The greedy answer."""
    answer: list[int] = []
    while len(answer) < new:
        token = int(table[state_after([*prompt, *answer])].argmax())
        if token in stops:
            break
        answer.append(token)
    return answer


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]
