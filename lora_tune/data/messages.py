# SPDX-License-Identifier: Apache-2.0
"""From a row to token ids and the mask of the tokens to train.

Conversations are rendered and their assistant turns located by `turns.renderings`, one example for
each rendering. A rendering is tokenised as a whole, without adding special tokens to those the
template wrote, and tokens are assigned to turns by their character offsets. Only where one token
would reach from the prompt into the answer is the text cut first, because a server tokenises the
prompt alone.

Plain `prompt`/`completion` strings and `text` are not templated: the tokenizer's own special
tokens apply, and its end-of-text token is put at the end.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lora_tune.data import conversation
from lora_tune.data.formats import canonical
from lora_tune.data.turns import Reasoning, Rendering, Template, renderings
from lora_tune.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TruncationStrategy = Literal["right", "left", "delete", "split"]
TrainOnEos = Literal["turn", "last", "all", "none"]


@dataclass(frozen=True)
class Example:
    """One document: `tokens` int32 [n] and `mask` bool [n], True where a token is trained.

    `source` is the number of the source that it comes from.
    """

    tokens: np.ndarray
    mask: np.ndarray
    source: int = 0

    @property
    def trained_tokens(self) -> int:
        """Number of trained targets; the first token of a document is never predicted."""
        return int(self.mask[1:].sum())


@dataclass(frozen=True)
class Drop:
    """An example, or a piece of one, that cannot be trained on; counted by reason."""

    reason: str


_EMPTY = Drop("empty answer")
_UNANSWERED = Drop("no answer after the last question")
_CONTEXT_ONLY = Drop("every answer has weight 0")


@dataclass(frozen=True)
class Encoded:
    """What one row became: its examples, what was dropped, and what truncation took away.

    `trained_tokens` counts before truncation, `lost_trained_tokens` what is cut off; those of the
    examples are the difference, but counted on their own.
    `rewritten` counts turns that the chat template writes differently later (`turns.renderings`).
    """

    examples: tuple[Example, ...]
    drops: tuple[Drop, ...]
    truncated: int
    trained_tokens: int
    lost_trained_tokens: int
    rewritten: int


def encode(
    row: Mapping[str, Any],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    where: str = "row",
    **options: Any,
) -> Encoded:
    """Encode one row; see `Encoder` for the options. `where` names the row in errors."""
    return Encoder(tokenizer, **options)(row, where=where)


@dataclass(frozen=True)
class Encoder:
    """Turns rows of one format into examples of at most `max_length` tokens.

    A pure function of the row, which may be pickled: it runs in other processes as well.

    `truncation_strategy` says what happens to longer ones: "right" keeps the start, "left" keeps
    the end, "delete" drops the example, "split" cuts it into pieces that overlap by the one token
    that is needed to predict every target exactly once. Without `assistant_only_loss` (rows of
    messages) or `completion_only_loss` (rows of prompt and completion) what comes before an answer
    is trained as well, and a conversation is one rendering with one span. `mask_history` learns
    only what the assistant says after the last message of the user. `train_on_eos` says which
    tokens that end a turn or a text are learned: "turn" those of trained turns, "last" the last of
    these, "all" also those of other roles, "none" none. `reasoning` says what happens where
    the template rewrites earlier turns (`turns.renderings`); "drop" removes reasoning first. An
    answer without text is not learned, because its end alone would teach silence; a row that has
    no other is dropped.

    Calling it raises InputError, naming the row, for a malformed conversation, for one without an
    assistant turn, for a mask that selects nothing or everything, and for a template that cannot
    render the row or does not show what is in it.
    """

    tokenizer: "PreTrainedTokenizerBase"
    _: KW_ONLY
    format: str
    max_length: int
    truncation_strategy: TruncationStrategy = "right"
    assistant_only_loss: bool = True
    completion_only_loss: bool = True
    mask_history: bool = False
    train_on_eos: TrainOnEos = "turn"
    reasoning: Reasoning = None

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise InputError(f"data.max_length must be at least 2 tokens, got {self.max_length}")

    def __call__(self, row: Mapping[str, Any], *, where: str) -> Encoded:
        """Encode one row; `where` names it in errors."""
        examples: list[Example] = []
        drops: list[Drop] = []
        truncated = total = lost = rewritten = 0
        for whole in self._examples(row, where):
            if isinstance(whole, Drop):
                drops.append(whole)
            elif isinstance(whole, int):
                rewritten += whole
            else:
                pieces = list(self._fit(whole))
                kept = [piece for piece in pieces if piece.trained_tokens]
                truncated += len(whole.tokens) > self.max_length
                total += whole.trained_tokens
                lost += self._lost(whole)
                drops += [Drop(self._drop_reason(whole))] * (max(len(pieces), 1) - len(kept))
                examples += kept
        return Encoded(tuple(examples), tuple(drops), truncated, total, lost, rewritten)

    def _examples(self, row: Mapping[str, Any], where: str) -> Iterator[Example | Drop | int]:
        """Whole examples and drops, and numbers of rewritten turns."""
        kind, row = canonical(row, self.format, where=where)
        if kind == "messages":
            messages = conversation.messages(row["messages"], where=where)
            yield from self._chat(messages, row.get("tools"), first=0, where=where)
        elif kind == "prompt_completion":
            yield from self._prompt_completion(row, where)
        else:
            yield self._plain("", _string(row, "text", where), where=where)

    def _prompt_completion(
        self, row: Mapping[str, Any], where: str
    ) -> Iterator[Example | Drop | int]:
        if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
            prompt = conversation.messages(row["prompt"], where=f"{where}, prompt")
            answer = conversation.messages(row["completion"], where=f"{where}, completion")
            yield from self._chat(prompt + answer, row.get("tools"), first=len(prompt), where=where)
            return
        prompt, answer = _string(row, "prompt", where), _string(row, "completion", where)
        if self._answers_only and not answer.strip():
            yield _EMPTY
            return
        example = self._plain(prompt, answer, where=where)
        self._check_mask(example, where)
        yield example

    def _chat(
        self, messages: list[conversation.Message], tools: Any, *, first: int, where: str
    ) -> Iterator[Example | Drop | int]:
        template = Template(self.tokenizer, conversation.tools(tools, where=where), where)
        learned = [bool(message.pop("weight", 1)) for message in messages]
        if self.reasoning == "drop":
            messages = conversation.without_reasoning(messages)
        if not self._answers_only:
            if not all(learned):
                raise InputError(
                    f"{where}: a message has weight 0, and data.{self._loss_key}: false learns "
                    "the whole conversation; remove one of the two"
                )
            text = template.render(messages)
            rendered = [Rendering(text, ((0, len(text)),))]
        else:
            given = self._turns(messages, first, where)
            said = [i for i in given if conversation.says_something(messages[i])]
            turns = [i for i in said if learned[i]]
            if not turns:
                yield _CONTEXT_ONLY if said else _EMPTY if given else _UNANSWERED
            rendered, rewritten = renderings(template, messages, turns, reasoning=self.reasoning)
            yield rewritten
        for rendering in rendered:
            example = self._masked(rendering, where)
            self._check_mask(example, where)
            yield example

    def _turns(self, messages: list[conversation.Message], first: int, where: str) -> list[int]:
        """Numbers of the assistant's messages that may be learned, from message `first` on."""
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
        if not turns:
            raise InputError(
                f"{where}: there is no assistant message to train on, the roles are "
                f"{', '.join(m['role'] for m in messages[first:])}"
            )
        if self.mask_history:
            asked = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=0)
            turns = [i for i in turns if i > asked]
        return turns

    def _masked(self, rendering: Rendering, where: str) -> Example:
        cuts = [start for start, _ in rendering.spans]
        tokens, starts = self._tokenise(rendering.text, cuts, where)
        mask = np.zeros(len(tokens), bool)
        ends: list[int] = []
        for start, end in rendering.spans:
            served = rendering.text[start:end].rstrip()
            stop = int(np.searchsorted(starts, start + len(served)))
            if stop and int(tokens[stop - 1]) in self._special_ids:
                ends.append(stop - 1)
            else:
                stop = int(np.searchsorted(starts, end))
            mask[int(np.searchsorted(starts, start)) : stop] = True
        self._mask_ends(mask, tokens, ends)
        return Example(tokens, mask)

    def _mask_ends(self, mask: np.ndarray, tokens: np.ndarray, ends: list[int]) -> None:
        """Set the mask bool [n] at the tokens that end turns, found at `ends`.

        A turn that ends with a special token and then white space ("<|im_end|>\\n") ends at that
        token: the model is stopped there and never writes the rest. A whole conversation is one
        span with one end; the ends of its turns are the same token.
        """
        if self.train_on_eos == "all":
            mask |= np.isin(tokens, tokens[ends])
        elif self.train_on_eos != "turn":
            found = ends
            if not self._answers_only:
                found = np.flatnonzero(np.isin(tokens, tokens[ends]) & mask).tolist()
            mask[found if self.train_on_eos == "none" else found[:-1]] = False

    def _plain(self, prompt: str, answer: str, *, where: str) -> Example:
        """Untemplated text that ends with the end-of-text token."""
        if self.tokenizer.eos_token_id is None:
            raise InputError(f"{where}: the tokenizer names no end-of-text token (eos_token)")
        tokens, starts = self._tokenise(prompt + answer, [len(prompt)], where)
        mask = starts >= (len(prompt) if self._answers_only else 0)
        if self._begin:
            tokens = np.append(self._begin, tokens)
            mask = np.append(not (self._answers_only and prompt), mask)
        if not len(tokens) or tokens[-1] != self.tokenizer.eos_token_id:
            tokens, mask = np.append(tokens, self.tokenizer.eos_token_id), np.append(mask, True)
        mask[-1] &= self.train_on_eos != "none"
        return Example(tokens.astype(np.int32), mask)

    def _tokenise(
        self, text: str, cuts: Sequence[int], where: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [n] and the character each begins at, int64 [n].

        The text is tokenised as a whole, but a token that reaches across one of `cuts`, where a
        prompt ends, is not what is served: there the text is cut and both sides stand alone.
        """
        try:
            encoded = self.tokenizer(
                text,
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_attention_mask=False,
                verbose=False,
            )
        except (UnicodeEncodeError, TypeError) as error:
            raise InputError(
                f"{where}: a \\u escape is half of a surrogate pair, no text: correct the row"
            ) from error
        tokens = np.asarray(encoded["input_ids"], np.int32)
        starts, ends = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        for cut in cuts:
            if ((starts < cut) & (cut < ends)).any():
                head, tail = text[:cut], text[cut:]
                left = self._tokenise(head, [c for c in cuts if c < cut], where)
                right = self._tokenise(tail, [c - cut for c in cuts if c > cut], where)
                return np.append(left[0], right[0]), np.append(left[1], right[1] + cut)
        return tokens, starts

    def _check_mask(self, example: Example, where: str) -> None:
        if not example.mask.any():
            raise InputError(
                f"{where}: no token would be trained, because the chat template leaves out what "
                "the assistant answers: set model.chat_template to one that renders it"
            )
        if self._answers_only and example.mask.all():
            raise InputError(
                f"{where}: every token would be trained, because there is nothing before the "
                "answer: give a prompt, or use `text` rows to train on everything"
            )

    def _fit(self, example: Example) -> Iterator[Example]:
        limit, length = self.max_length, len(example.tokens)
        if length <= limit:
            yield example
        elif self.truncation_strategy == "right":
            yield _cut(example, 0, limit)
        elif self.truncation_strategy == "left":
            yield _cut(example, length - limit, length)
        elif self.truncation_strategy == "split":
            for start in range(0, length - 1, limit - 1):
                yield _cut(example, start, start + limit)

    def _lost(self, whole: Example) -> int:
        """Trained targets that truncation leaves out, counted in what it cuts off."""
        limit, length = self.max_length, len(whole.tokens)
        if length <= limit or self.truncation_strategy == "split":
            return 0
        # Nothing predicts the first token, neither of the whole nor of what is kept.
        first, last = {"right": (limit, length), "left": (1, length - limit + 1)}.get(
            self.truncation_strategy, (1, length)
        )
        return int(whole.mask[first:last].sum())

    def _drop_reason(self, whole: Example) -> str:
        if len(whole.tokens) <= self.max_length:
            return "nothing to predict"
        if self.truncation_strategy == "delete":
            return "longer than max_length"
        return "no trained token left after truncation"

    @property
    def _loss_key(self) -> str:
        return (
            "completion_only_loss" if self.format == "prompt_completion" else "assistant_only_loss"
        )

    @property
    def _answers_only(self) -> bool:
        return bool(getattr(self, self._loss_key))

    @cached_property
    def _begin(self) -> list[int]:
        """The token that the tokenizer puts before every text, if it does."""
        begin = list(self.tokenizer("")["input_ids"])[:1]
        return [i for i in begin if i == self.tokenizer.bos_token_id]

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset(self.tokenizer.all_special_ids) | {i for i, t in added if t.special}


def _cut(example: Example, start: int, stop: int) -> Example:
    return Example(example.tokens[start:stop].copy(), example.mask[start:stop].copy())


def _string(row: Mapping[str, Any], column: str, where: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        both = " (`prompt` and `completion` may also both be lists of messages)"
        raise InputError(
            f"{where}: `{column}` must be a string, got {type(value).__name__}"
            f"{both if column != 'text' else ''}"
        )
    return value


def preview(example: Example, tokenizer: "PreTrainedTokenizerBase") -> list[tuple[str, bool]]:
    """Decode an example as runs of (text, trained), to show a user what is trained."""
    edges = np.flatnonzero(np.diff(example.mask)) + 1
    pieces = zip(np.split(example.tokens, edges), np.split(example.mask, edges), strict=True)
    return [(str(tokenizer.decode(t.tolist())), bool(m[0])) for t, m in pieces if len(t)]
