# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode: rows of prompts in, one token a row and step out.

Prompts are padded on the left to one of few lengths and read in chunks, then each step appends one
token. Both are one function, compiled once a length; a decode step has the length 1 and is compiled
once for a batch and a cache size, whatever the prompts. Weights are its arguments and the cache is
updated in place. Shapes: B rows, T time, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from lora_tune.generation.sampling import Sampling, next_tokens
from lora_tune.training.state import Weights, unflatten

LENGTHS = (32, 128, 512)
"""Lengths that prompts are padded to; longer ones to a multiple of the last, and read in chunks."""
ONE_BY_ONE = (1,)
"""The same for a few short prompts: the decode step reads them, and nothing else is compiled."""


def padded_length(length: int, lengths: Sequence[int] = LENGTHS) -> int:
    """The length that prompts are padded to whose longest has `length` tokens."""
    largest = lengths[-1]
    return next((n for n in lengths if length <= n), -(-length // largest) * largest)


def cache_slots(length: int, max_new_tokens: int) -> int:
    """The usual cache size for such prompts: a power of two, so that few sizes are compiled."""
    return 1 << (padded_length(length) + max_new_tokens - 1).bit_length()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """What a step changes in place.

    Attributes:
      cache: of the model.
      seen: bool `[B, V]`, tokens of the prompt and the answer; None without repetition penalty.
    """

    cache: Any
    seen: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Program:
    """The compiled functions of one model.

    Attributes:
      create: `(weights, batch, size, penalise) -> state`, an empty cache.
      advance: `(weights, state, tokens [B, T], segment_ids [B, T], step, *draw) ->
        (state, next token [B, 1], running [B, 1])`, with `draw` the sampling, the key, the row
        numbers `[B]` and the stop ids. `running` is 1 where the row goes on, as a segment id.
    """

    create: Callable[..., _State]
    advance: Callable[..., tuple[_State, jax.Array, jax.Array]]


@functools.lru_cache(maxsize=4)
def program_of(graphdef: Any, everywhere: NamedSharding | None) -> Program:
    """The functions of the models used last; `everywhere` is the sharding of all results."""

    def placed(value: Any) -> Any:
        return value if everywhere is None else jax.lax.with_sharding_constraint(value, everywhere)

    def merge(weights: Weights) -> Any:
        return nnx.merge(graphdef, unflatten(weights), copy=True)

    @functools.partial(jax.jit, static_argnums=(1, 2, 3))
    def create(weights: Weights, batch: int, size: int, penalise: bool) -> _State:
        model = merge(weights)
        seen = jnp.zeros((batch, model.config.vocab_size), bool) if penalise else None
        return placed(_State(model.create_cache(batch, size), seen))

    @functools.partial(jax.jit, donate_argnums=1)
    def advance(
        weights: Weights,
        state: _State,
        tokens: jax.Array,
        segment_ids: jax.Array,
        step: jax.Array,
        sampling: Sampling,
        key: jax.Array,
        rows: jax.Array,
        stop_ids: jax.Array,
    ) -> tuple[_State, jax.Array, jax.Array]:
        batch, time = tokens.shape
        last = jnp.full((batch,), time - 1, jnp.int32)
        logits, cache = merge(weights)(tokens, segment_ids, cache=state.cache, last=last)
        seen = state.seen
        if seen is not None:
            seen = seen.at[jnp.arange(batch)[:, None], tokens].max(segment_ids != 0)
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), step))(rows)
        drawn = next_tokens(logits, sampling, keys, seen)[:, None]
        running = (segment_ids[:, -1:] != 0) & ~jnp.isin(drawn, stop_ids)
        return placed((_State(cache, seen), drawn, running.astype(jnp.int32)))

    return Program(create, advance)


def _everywhere(weights: Weights) -> NamedSharding | None:
    """Replicated over the mesh that the weights lie on, if they do.

    What a step passes on is small, and with one known place it is compiled once.
    """
    for array in weights.values():
        sharding = array.sharding
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            return NamedSharding(sharding.mesh, PartitionSpec())
    return None


def steps(
    graphdef: Any,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    sampling: Sampling,
    seed: int = 0,
    rows: Sequence[int] | None = None,
    batch: int | None = None,
    cache_size: int | None = None,
    lengths: Sequence[int] = LENGTHS,
) -> Iterator[np.ndarray]:
    """Continues prompts, all at once, one token a step.

    A token is chosen by the row's own prompt, number and step alone, not by the other rows.

    Args:
      graphdef: structure of a model with `create_cache` (see `lora_tune.training.state`).
      weights: its arrays by path.
      prompts: token ids, none empty.
      max_new_tokens: number of steps at most; it ends earlier when every row has.
      stop_ids: a row ends before one of these.
      sampling: how tokens are chosen.
      seed: of the draws.
      rows: numbers of the prompts, which the draws depend on; default 0, 1, …
      batch: number of rows to compute, at least that of prompts; default just these.
      cache_size: slots of a row, at least the longest prompt and `max_new_tokens`.
      lengths: to pad prompts to, rising; longer prompts are read in chunks of the last.

    Yields:
      int32 `[len(prompts)]`, the next token of each row, or -1 where the row has ended.
    """
    longest = max(map(len, prompts))
    batch = batch or len(prompts)
    cache_size = cache_size or cache_slots(longest, max_new_tokens)
    assert longest + max_new_tokens <= cache_size
    assert len(prompts) <= batch
    length = min(padded_length(longest, lengths), cache_size - max_new_tokens)
    tokens, segment_ids = _left_padded(prompts, batch, length)
    numbers = np.zeros(batch, np.int32)
    numbers[: len(prompts)] = range(len(prompts)) if rows is None else rows
    program = program_of(graphdef, _everywhere(weights))
    draw = sampling, jax.random.key(seed), numbers, _padded(stop_ids)

    state = program.create(weights, batch, cache_size, sampling.repetition_penalty is not None)
    for at in range(0, length, lengths[-1]):
        part = slice(at, at + lengths[-1])
        state, token, running = program.advance(
            weights, state, tokens[:, part], segment_ids[:, part], 0, *draw
        )
    for step in range(1, max_new_tokens + 1):
        drawn = token, running
        if step < max_new_tokens:  # it runs while the host looks at the tokens before it
            state, token, running = program.advance(weights, state, token, running, step, *draw)
        found, going = jax.device_get(drawn)
        yield np.where(going, found, -1)[: len(prompts), 0]
        if not going.any():
            return


def _left_padded(
    prompts: Sequence[Sequence[int]], batch: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segment ids `[batch, length]`; rows without a prompt are all padding."""
    tokens = np.zeros((batch, length), np.int32)
    segment_ids = np.zeros((batch, length), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = prompt
        segment_ids[row, length - len(prompt) :] = 1
    return tokens, segment_ids


def _padded(stop_ids: Sequence[int]) -> np.ndarray:
    """The ids filled up with -1 to a multiple of eight, so that few lengths are compiled."""
    padded = np.full(max(-(-len(stop_ids) // 8), 1) * 8, -1, np.int32)
    padded[: len(stop_ids)] = stop_ids
    return padded


def complete(graphdef: Any, weights: Weights, prompts: Sequence[Sequence[int]], **options: Any):
    """The answers of `steps`, as one list of token ids a prompt."""
    answers: list[list[int]] = [[] for _ in prompts]
    for found in steps(graphdef, weights, prompts, **options):
        for answer, token in zip(answers, found.tolist(), strict=True):
            if token >= 0:
                answer.append(token)
    return answers
