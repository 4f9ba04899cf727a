# SPDX-License-Identifier: Apache-2.0
"""`generate`: prompts in any form in, answers out, all at once or as they come."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lora_tune.errors import InputError, Problems, short
from lora_tune.generation import engine
from lora_tune.generation.prompts import (
    Prompt,
    encode,
    is_chat,
    is_ids,
    plain,
    split,
    stop_ids_of,
)
from lora_tune.generation.sampling import Sampling, checked_count, make_sampling
from lora_tune.generation.text import TextStream, decode
from lora_tune.hf.files import read_json
from lora_tune.models import fields
from lora_tune.models.decoder import Decoder
from lora_tune.training.state import split_model

Stream = Callable[[int, Any], None]
Answer = str | list[int]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of `generate`, which describes them; checked when made."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_ids: Sequence[int] | int | None = None
    batch_size: int = 8
    cache_size: int | None = None

    def __post_init__(self) -> None:
        self.sampling()
        least = {"max_new_tokens": 1, "seed": 0, "batch_size": 1, "cache_size": 2}
        if self.cache_size is None:
            del least["cache_size"]
        for name, at_least in least.items():
            value = checked_count(name, getattr(self, name), least=at_least)
            object.__setattr__(self, name, value)
        self.stops()

    def stops(self) -> list[int] | None:
        """The stop ids as a list."""
        if self.stop_ids is None:
            return None
        ids = plain(self.stop_ids)
        listed = ids if isinstance(ids, list) else [ids]
        return [checked_count("an id in stop_ids", i, least=0) for i in listed]

    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        names = (field.name for field in dataclasses.fields(Sampling))
        return make_sampling(**{name: getattr(self, name) for name in names})


def generate(
    model: Decoder,
    tokenizer: Any,
    prompts: Any,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop_ids: Sequence[int] | int | None = None,
    batch_size: int = 8,
    cache_size: int | None = None,
    stream: Stream | None = None,
) -> Any:
    """Lets a model answer prompts.

    The settings have the names and the meaning that they have in transformers. Sampling settings
    in the model's `generation_config.json`, such as a temperature, are not taken over: what is not
    given here is as the defaults say, and they say greedy decoding.

    Args:
      model: with or without adapters.
      tokenizer: of the model; may be None if all prompts are token ids.
      prompts: one prompt or a list of them. A prompt is a text, which the model goes on from as it
        stands; a list of messages, which the chat template renders, or `{"messages": …, "tools":
        …}`; or a list of token ids.
      max_new_tokens: length limit of an answer.
      temperature: 0 takes the most likely token; above 0, tokens are drawn.
      top_k: draw from the k most likely tokens; 0 is off.
      top_p: draw from the fewest tokens whose probabilities reach p together; 1 is off.
      min_p: draw from tokens at least so many times as likely as the most likely one; 0 is off.
      repetition_penalty: above 1, tokens of the prompt and the answer so far become less likely.
      seed: decides the draws, together with a prompt's place in the list.
      stop_ids: one id or several that end an answer, which does not hold them. None takes
        `eos_token_id` of the model's `generation_config.json` (or else of its `config.json`, or the
        tokenizer's), and for messages also the token that ends a turn in the chat template.
      batch_size: prompts answered at a time.
      cache_size: tokens of a prompt and its answer to make room for. Every size is compiled on
        its own; None takes a power of two.
      stream: called as `stream(i, piece)` with the answer to prompt i as it comes: pieces of text,
        never a part of a character, or single ids for a prompt of token ids.

    Returns:
      The answers without the prompts: texts, or lists of token ids for prompts of token ids. One
      for one prompt, a list for a list.

    Raises:
      InputError: a prompt or a setting that cannot be, or a model whose logits are not finite.
    """
    settings = Settings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop_ids=stop_ids,
        batch_size=batch_size,
        cache_size=cache_size,
    )
    _check_callable("tokenizer", tokenizer, "a tokenizer, or None for prompts of token ids")
    _check_callable("stream", stream, "a function of a number and a piece, or None")
    if not hasattr(model, "create_cache"):
        raise InputError(
            f"model is {short(model)}, expected a model: load_model gives one with its tokenizer"
        )
    listed, single = split(prompts)
    found = list(answers(model, tokenizer, listed, settings, stream=stream))
    return found[0] if single else found


def _check_callable(name: str, value: Any, expected: str) -> None:
    if value is not None and not callable(value):
        raise InputError(f"{name} is {short(value)}, expected {expected}")


def answers(
    model: Decoder,
    tokenizer: Any,
    given: Sequence[Prompt],
    settings: Settings,
    *,
    stream: Stream | None = None,
    names: Sequence[str] | None = None,
    once: bool = False,
    cut: Callable[[int], None] | None = None,
) -> Iterator[Answer]:
    """Yields the answers in order, those of a batch as soon as it is done; see `generate`.

    `names` are the prompts' in errors; for `once` see `engine.steps`. `cut` is called with the
    number of every answer that ends because of `max_new_tokens`, before it is yielded.
    """
    count = len(given)
    if names is None:
        names = ["the prompt"] if count == 1 else [f"prompt {i}" for i in range(count)]
    vocab_size = model.config.vocab_size
    encoded, problems = list[list[int]](), Problems("prompts cannot be answered")
    for prompt, name in zip(given, names, strict=True):
        with problems.collected():
            encoded.append(encode(prompt, tokenizer, vocab_size=vocab_size, where=name))
    problems.raise_if_any()
    cache_size = _cache_size(encoded, names, settings, max_positions(model))
    stop_ids = _stop_ids(model, tokenizer, settings, chat=any(map(is_chat, given)))
    split = split_model(model)
    weights = {**split.frozen, **split.trainable}
    batch = min(settings.batch_size, count)
    for first in range(0, count, batch):
        rows = range(first, min(first + batch, count))
        collected = [_Collected(given[i], i, tokenizer, stream) for i in rows]
        for found in engine.steps(
            split.graphdef,
            weights,
            [encoded[i] for i in rows],
            max_new_tokens=settings.max_new_tokens,
            stop_ids=stop_ids,
            sampling=settings.sampling(),
            seed=settings.seed,
            rows=rows,
            batch=batch,
            cache_size=cache_size,
            once=once,
        ):
            for answer, token in zip(collected, found.tolist(), strict=True):
                if token >= 0:
                    answer.add(token)
        for i, answer in zip(rows, collected, strict=True):
            if cut is not None and answer.length == settings.max_new_tokens:
                cut(i)
            yield answer.finish()


class _Collected:
    """The answer to one prompt, passed on to `stream` as it grows."""

    def __init__(self, prompt: Any, number: int, tokenizer: Any, stream: Stream | None):
        self._ids: list[int] = []
        self._tokenizer = None if is_ids(prompt) else tokenizer
        self._text = None if self._tokenizer is None else TextStream(tokenizer)
        self._send = None if stream is None else lambda piece: stream(number, piece)

    @property
    def length(self) -> int:
        """Number of its tokens so far."""
        return len(self._ids)

    def add(self, token: int) -> None:
        self._ids.append(token)
        if self._send is not None:
            piece = token if self._text is None else self._text.add(token)
            if piece != "":
                self._send(piece)

    def finish(self) -> Answer:
        if self._tokenizer is None:
            return self._ids
        if self._send is not None and self._text is not None and (piece := self._text.finish()):
            self._send(piece)
        return decode(self._tokenizer, self._ids)


def _stop_ids(model: Decoder, tokenizer: Any, settings: Settings, *, chat: bool) -> list[int]:
    """The stop ids that were given, which must be in the vocabulary, or else the model's."""
    stop_ids, vocab_size = settings.stops(), model.config.vocab_size
    if stop_ids is None:
        folder = None if model.origin is None else model.origin.folder
        return stop_ids_of(folder, tokenizer, chat=chat)
    for i in stop_ids:
        if i >= vocab_size:
            raise InputError(
                f"stop_ids: {i} is no token id of this model, expected integers from 0 to "
                f"{vocab_size - 1}"
            )
    return stop_ids


def max_positions(model: Decoder) -> int | None:
    """The longest sequence that a model's `config.json` speaks of, None where it does not."""
    if model.origin is None:
        return None
    return fields.max_positions(read_json(model.origin.folder / "config.json"))


def _cache_size(
    encoded: Sequence[Sequence[int]],
    names: Sequence[str],
    settings: Settings,
    positions: int | None,
) -> int:
    """Slots of the cache, one size for all batches; checks that every prompt fits."""
    length, name = max((len(ids), name) for ids, name in zip(encoded, names, strict=True))
    new, size = settings.max_new_tokens, settings.cache_size
    limits = {"max_position_embeddings of the model": positions, "cache_size": size}
    for limit, most in limits.items():
        if most is not None and length + new > most:
            more = ", or raise cache_size" if limit == "cache_size" else ""
            raise InputError(
                f"{name} has {length} tokens, which with max_new_tokens={new} is more than the "
                f"{limit}, {most}; shorten {name} or lower max_new_tokens{more}"
            )
    if size is not None and positions is not None and size > positions:
        raise InputError(
            f"cache_size={size} is more than the max_position_embeddings of the model, "
            f"{positions}; lower it"
        )
    return size or engine.cache_slots(length, new)
