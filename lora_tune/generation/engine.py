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
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from lora_tune import distributed
from lora_tune.errors import InputError
from lora_tune.generation.sampling import Sampling, next_tokens
from lora_tune.training.state import Weights, unflatten

LENGTHS = (32, 128, 512)
"""Lengths that prompts are padded to; longer ones to a multiple of the last, and read in chunks.
Where the cache has no room for so many, they are padded to what there is."""
SHORT = 128
"""Reading prompts up to this length one token at a time takes less time than compiling for it."""

_UNSOUND = (
    "the model's logits for token {} of an answer are not finite: its weights or adapter are "
    "damaged (did training diverge?), its dtype is too narrow (try float32), or temperature or "
    "repetition_penalty is extreme"
)


def padded_length(length: int) -> int:
    """The length that prompts are padded to whose longest has `length` tokens."""
    return next((n for n in LENGTHS if length <= n), -(-length // LENGTHS[-1]) * LENGTHS[-1])


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
        (state, next token [B, 1], running [B, 1], sound)`, with `draw` the sampling, the key, the
        row numbers `[B]` and the stop ids. `running` is 1 where the row goes on, as a segment id;
        `sound` is False if the logits of a row that has not ended give no token.
    """

    create: Callable[..., _State]
    advance: Callable[..., tuple[_State, jax.Array, jax.Array, jax.Array]]


@functools.lru_cache(maxsize=4)
def program_of(graphdef: Any, place: Sharding) -> Program:
    """The functions of the models used last; all their results lie at `place`."""

    def merge(weights: Weights) -> Any:
        return nnx.merge(graphdef, unflatten(weights), copy=True)

    @functools.partial(jax.jit, static_argnums=(1, 2, 3), out_shardings=place)
    def create(weights: Weights, batch: int, size: int, penalise: bool) -> _State:
        model = merge(weights)
        seen = jnp.zeros((batch, model.config.vocab_size), bool) if penalise else None
        return _State(model.create_cache(batch, size), seen)

    @functools.partial(jax.jit, donate_argnums=1, out_shardings=place)
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
    ) -> tuple[_State, jax.Array, jax.Array, jax.Array]:
        batch, time = tokens.shape
        last = jnp.full((batch,), time - 1, jnp.int32)
        logits, cache = merge(weights)(tokens, segment_ids, cache=state.cache, last=last)
        seen = state.seen
        if seen is not None:
            seen = seen.at[jnp.arange(batch)[:, None], tokens].max(segment_ids != 0)
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), step))(rows)
        drawn, sound = next_tokens(logits, sampling, keys, seen)
        token, asked = drawn[:, None], segment_ids[:, -1:] != 0
        running = (asked & ~jnp.isin(token, stop_ids)).astype(jnp.int32)
        return _State(cache, seen), token, running, jnp.all(sound[:, None] | ~asked)

    return Program(create, advance)


def place_of(weights: Weights) -> Sharding:
    """Where the weights lie: their device, or replicated all over their mesh.

    What goes from step to step lies at one place, so that a step is compiled once. On a mesh every
    device holds the whole cache and computes all rows.
    """
    found = [array.sharding for array in weights.values()]
    for sharding in found:
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
    return found[0]


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
    once: bool = False,
) -> Iterator[np.ndarray]:
    """Continues prompts, all at once, one token a step.

    A token is drawn by the row's own prompt, number and step alone, not by the other rows. So an
    answer is the same in any batch up to the rounding of its logits, which may depend on shapes.

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
      once: whether this is one of few calls for a model. Then decode steps read a short prompt as
        well, which spares the compilation of anything else.

    Yields:
      int32 `[len(prompts)]`, the next token of each row, or -1 where the row has ended.

    Raises:
      InputError: the logits give no token, since the model is damaged or overflows.
    """
    longest = max(map(len, prompts))
    batch = batch or len(prompts)
    cache_size = cache_size or cache_slots(longest, max_new_tokens)
    assert longest + max_new_tokens <= cache_size
    assert len(prompts) <= batch
    by_token = once and longest <= SHORT
    length = longest if by_token else min(padded_length(longest), cache_size - max_new_tokens)
    tokens, segment_ids = _left_padded(prompts, batch, length)
    numbers = np.zeros(batch, np.int32)
    numbers[: len(prompts)] = range(len(prompts)) if rows is None else rows
    place = place_of(weights)
    program = program_of(graphdef, place)
    key = jax.jit(jax.random.key, out_shardings=place)(seed)
    draw = sampling, key, *distributed.put((numbers, _padded(stop_ids)), place)

    state = program.create(weights, batch, cache_size, sampling.repetition_penalty is not None)
    chunk = 1 if by_token else LENGTHS[-1]
    for at in range(0, length, chunk):
        part = distributed.put([a[:, at : at + chunk] for a in (tokens, segment_ids)], place)
        state, *drawn = program.advance(weights, state, *part, 0, *draw)
    for step in range(1, max_new_tokens + 1):
        before = drawn
        if step < max_new_tokens:  # it runs while the host looks at the tokens before it
            state, *drawn = program.advance(weights, state, *drawn[:2], step, *draw)
        # Every process must end, and give up, after the same token.
        found, going, sound = distributed.arrays_of_first(jax.device_get(before))
        if not sound:
            raise InputError(_UNSOUND.format(step))
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


def complete(
    graphdef: Any, weights: Weights, prompts: Sequence[Sequence[int]], **options: Any
) -> list[list[int]]:
    """The answers of `steps`, as one list of token ids a prompt."""
    answers: list[list[int]] = [[] for _ in prompts]
    for found in steps(graphdef, weights, prompts, **options):
        for answer, token in zip(answers, found.tolist(), strict=True):
            if token >= 0:
                answer.append(token)
    return answers
