# SPDX-License-Identifier: Apache-2.0
"""Greedy answers to a few prompts, for a look at a model before and after training.

Every new token runs the whole sequence again: right, simple and slow. It is meant for a handful of
short answers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NextToken = Callable[[Any, jax.Array, jax.Array], jax.Array]


def next_token(model: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """The most likely token `[B]` after the first `lengths [B]` of `tokens [B, T]`."""
    real = jnp.arange(tokens.shape[1])[None, :] < lengths[:, None]
    logits = model(tokens, segment_ids=real.astype(jnp.int32), last=lengths - 1)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def greedy(
    step: Callable[[jax.Array, jax.Array], jax.Array],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
) -> list[list[int]]:
    """Continues prompts with the most likely tokens.

    Args:
      step: jitted `(tokens [B, T], lengths [B]) -> next token [B]`.
      prompts: token ids, none empty.
      max_new_tokens: length limit of an answer.
      stop_ids: an answer ends before one of these.

    Returns:
      The new tokens of every prompt.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), int(lengths.max()) + max_new_tokens), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    answers: list[list[int]] = [[] for _ in prompts]
    running = np.ones(len(prompts), bool)
    for _ in range(max_new_tokens):
        found = np.asarray(step(jnp.asarray(tokens), jnp.asarray(lengths)))
        running &= ~np.isin(found, list(stop_ids))
        if not running.any():
            break
        for i in np.flatnonzero(running):
            answers[i].append(int(found[i]))
            tokens[i, lengths[i]] = found[i]
        lengths += running
    return answers
