# SPDX-License-Identifier: Apache-2.0
"""Where the assistant's turns are in a rendered conversation, by prefix difference.

A turn of the assistant is trained exactly as it is served. What is served at turn i follows from
two renderings with the chat template: P, the messages before the turn with the generation prompt,
and E, the messages up to and including the turn. P must be a prefix of E; the turn is the
difference, and nothing else is trained: no string marker and no token id is ever searched for.

Most templates render a longer conversation by appending, so all turns of a row share one
rendering. Some do not: Qwen3 removes the reasoning of earlier turns once a new user message
arrives, and gives the last turn an empty reasoning block. Then one rendering cannot hold every turn
as served, and the row becomes the fewest renderings that do: walking back from the last turn, a
turn joins a later rendering if its E is a prefix of that, and opens its own rendering if not. A row
of a prefix-preserving template always stays one rendering.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_tune.data.conversation import Message, says_something
from lora_tune.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
Tools = list[dict[str, Any]] | None


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
        from jinja2 import TemplateError

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=None if self.tools is None else list(self.tools),
                    add_generation_prompt=prompt,
                    tokenize=False,
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InputError(
                f"{self.where}: the chat template cannot render the first {len(messages)} messages "
                f"({error}): change the row or give another template"
            ) from error


def renderings(template: Template, messages: list[Message], *, first: int = 0) -> list[Rendering]:
    """The fewest renderings that hold every assistant turn from message `first` on as served.

    Turns that say nothing are context only; without any other turn there is no rendering.
    """
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
    if not turns:
        raise InputError(
            f"{template.where}: there is no assistant message to train on, the roles are "
            f"{', '.join(m['role'] for m in messages[first:])}"
        )
    turns = [i for i in turns if says_something(messages[i])]
    found: list[tuple[str, list[Span]]] = []
    for turn in reversed(turns):
        text, span = _served(template, messages, turn)
        for longer, spans in found:
            if longer.startswith(text):
                spans.append(span)
                break
        else:
            found.append((text, [span]))
    if turns:
        _check_tools(template, messages[: turns[0]])
    return [Rendering(text, tuple(reversed(spans))) for text, spans in reversed(found)]


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
        at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0)
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
    parts += [("tool_calls", c["function"]["name"]) for c in message.get("tool_calls", ())]
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
