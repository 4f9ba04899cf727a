# SPDX-License-Identifier: Apache-2.0
"""Where the assistant's turns are in a rendered conversation, by prefix difference.

A turn of the assistant is trained exactly as it is served. What is served at turn i follows from
two renderings with the chat template: P, the messages before the turn with the generation prompt,
and E, the messages up to and including the turn. P must be a prefix of E; the turn is the
difference, and nothing else is trained: no string marker and no token id is ever searched for.

Most templates render a longer conversation by appending, so all turns of a row share one
rendering. Some do not: Qwen3 removes the reasoning of earlier turns once a new user message
arrives, and gives the last turn an empty reasoning block. Then one rendering cannot hold every turn
as served, and what happens is for the user to say (`Reasoning`). With "keep" and "drop" the row
becomes the fewest renderings that do: walking back from the last turn, a turn joins a later
rendering if its E is a prefix of that, and opens its own rendering if not. A row of a
prefix-preserving template always stays one rendering.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lora_tune.data.conversation import Message
from lora_tune.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
Tools = list[dict[str, Any]] | None
Reasoning = Literal["keep", "drop", "last"] | None


class RewrittenError(InputError):
    """The template rewrites earlier turns, and nothing says what is to happen then."""


@dataclass(frozen=True)
class Rendering:
    """A rendered conversation and the character spans of its trained turns, in order."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template, applied to conversations with these tools."""

    tokenizer: "PreTrainedTokenizerBase"
    tools: Tools
    where: str

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Render `messages`, with the generation prompt at the end if `prompt`."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=None if self.tools is None else list(self.tools),
                    add_generation_prompt=prompt,
                    tokenize=False,
                )
            )
        except Exception as error:  # a template is a program of others and may raise anything
            reason = str(error) or type(error).__name__
            raise InputError(
                f"{self.where}: the chat template cannot render the first {len(messages)} messages "
                f"({reason}): change the row or give another template"
            ) from error


def renderings(
    template: Template, messages: list[Message], turns: Sequence[int], *, reasoning: Reasoning
) -> tuple[list[Rendering], int]:
    """The renderings that hold the assistant's `turns` (numbers of messages) as served.

    Returns them and the number of turns that the template writes differently later. With
    `reasoning` "keep" and "drop" they are the fewest that hold every turn; with "last" there is
    one, without the turns that it does not show as served.

    Raises:
        RewrittenError: there are such turns and `reasoning` is None.
        InputError: the template cannot render the messages, or loses some of what they say.
    """
    found: list[tuple[str, list[Span]]] = []
    for turn in reversed(turns):
        text, span = _served(template, messages, turn)
        for longer, spans in found:
            if longer.startswith(text):
                spans.append(span)
                break
        else:
            if found and reasoning is None:
                raise RewrittenError(_rewritten(template, turn, text, found[-1][0], span))
            found.append((text, [span]))
    if turns:
        _check_tools(template, messages[: turns[0]])
    rewritten = sum(len(spans) for _, spans in found[1:])
    kept = found[:1] if reasoning == "last" else found
    return [Rendering(text, tuple(reversed(spans))) for text, spans in reversed(kept)], rewritten


def _rewritten(template: Template, turn: int, served: str, later: str, span: Span) -> str:
    at = _first_difference(served, later)
    at = span[0] if span[0] < at < span[0] + 20 else at  # the tag that differs, not half of it
    return (
        f"{template.where}, message {turn}: the chat template writes this assistant turn "
        f"differently once the conversation goes on ({served[at : at + 40]!r} becomes "
        f"{later[at : at + 40]!r}), so one sequence cannot hold every turn as it is served: set "
        "data.reasoning to keep (a sequence for each form), drop (the same, without any "
        "reasoning) or last (learn only the turns that the whole conversation shows as served)"
    )


def _first_difference(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)


def _served(template: Template, messages: list[Message], turn: int) -> tuple[str, Span]:
    """The rendering that ends with this turn, and the turn's span in it."""
    if turn == 0:
        raise InputError(
            f"{template.where}: the conversation starts with an assistant message, which no prompt "
            "leads to: put a user message before it or remove it"
        )
    before = template.render(messages[:turn], prompt=True)
    after = template.render(messages[: turn + 1])
    if not after.startswith(before):
        at = _first_difference(before, after)
        raise InputError(
            f"{template.where}, message {turn}: the chat template renders what comes before this "
            f"assistant turn differently once the turn is there ({before[at : at + 40]!r} becomes "
            f"{after[at : at + 40]!r}), so no prompt would lead to it: join neighbouring assistant "
            "messages, or give a template that renders a prompt as the start of its answer"
        )
    span = (len(before), len(after))
    _check_shown(messages[turn], after[len(before) :], where=f"{template.where}, message {turn}")
    return after, span


def _check_shown(message: Message, served: str, *, where: str) -> None:
    """Templates ignore fields they do not know; what they ignore would silently go untrained."""
    parts = [("reasoning_content", message.get("reasoning_content", ""))]
    calls = message.get("tool_calls", ())
    parts += [("tool_calls", call["function"]["name"]) for call in calls]
    if calls:  # many templates write either
        parts.append(("content", message["content"].rpartition("</think>")[2]))
    for field, text in parts:
        if text.strip() not in served:
            raise InputError(
                f"{where}: the chat template does not show the `{field}` of this message: remove "
                "the field or give a template that renders it"
            )


def _check_tools(template: Template, messages: list[Message]) -> None:
    if template.tools is None:
        return
    bare = Template(template.tokenizer, None, template.where)
    if bare.render(messages, prompt=True) == template.render(messages, prompt=True):
        raise InputError(
            f"{template.where}: the chat template does not show the `tools` of this row: remove "
            "them or give a template that renders them"
        )
