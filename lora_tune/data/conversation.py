# SPDX-License-Identifier: Apache-2.0
"""Check the fields of a conversation and bring them to the one form chat templates expect."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lora_tune.errors import InputError, short

ROLES = ("system", "user", "assistant", "tool")
# Other names of the roles: ShareGPT's (`from`), LLaMA-Factory's, and OpenAI's earlier `function`.
_OTHER_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
}
_CALLS = "function_call"  # a role whose text is a call of a tool, or OpenAI's earlier field
_REASONING = ("reasoning_content", "reasoning", "thinking")
_THINK = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)

Message = dict[str, Any]


def messages(value: Any, *, where: str) -> list[Message]:
    """Normalise a list of messages, or that list as JSON text.

    Contents become strings (a list of text parts is joined, a missing content is ""), fields that
    are None are absent, ShareGPT's `from` and `value` become `role` and `content`, `reasoning` and
    `thinking` are also `reasoning_content`, and every tool call is
    `{"type": "function", "function": {"name", "arguments"}}` with its arguments as an object, so
    that a template encodes them exactly once. Whether a message is to be learned, said by `weight`
    (0 or 1) or `train` (true or false), is left in `weight` where it is 0.
    """
    if isinstance(value, str):
        value = from_json(value, "`messages`", where)
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: expected a non-empty list of messages, got {short(value)}")
    return [_message(item, where=f"{where}, message {i}") for i, item in enumerate(value)]


def _message(value: Any, *, where: str) -> Message:
    if not isinstance(value, Mapping) or not {"role", "from"} & value.keys():
        raise InputError(
            f"{where}: expected an object with `role` and `content`, got {short(value)}"
        )
    message = {k: v for k, v in value.items() if v is not None}
    _set_role(message, where)
    calls = message.pop("tool_calls", None)
    if _CALLS in message and message["role"] == "assistant":
        calls = calls or [message[_CALLS]]
        del message[_CALLS]
    if calls and message["role"] != "assistant":
        raise InputError(f"{where}: only an assistant message may have `tool_calls`")
    _set_reasoning(message, where)
    message["content"] = _content(message, calls, where=where)
    if not isinstance(message.get("name", ""), str):
        raise InputError(f"{where}: `name` must be a string, got {short(message['name'])}")
    if calls:
        message["tool_calls"] = _tool_calls(calls, where=where)
    _set_weight(message, where)
    return message


def _set_role(message: Message, where: str) -> None:
    accepted = [*ROLES]
    given = message.get("role")
    if "from" in message and "role" not in message:
        given = message.pop("from")
        message.setdefault("content", message.pop("value", None))
        accepted += [*_OTHER_ROLES, _CALLS]
        if given == _CALLS:
            calls = from_json(message["content"], "`function_call`", where)
            message["tool_calls"] = calls if isinstance(calls, list) else [calls]
            message["content"], given = None, "assistant"
        given = _OTHER_ROLES.get(given, given) if isinstance(given, str) else given
    elif given == "function":
        given = "tool"
    if given not in ROLES:
        raise InputError(
            f"{where}: role {short(given)} is unknown, expected one of {', '.join(accepted)}"
        )
    message["role"] = given


def _set_reasoning(message: Message, where: str) -> None:
    for field in _REASONING:
        if not isinstance(message.get(field, ""), str):
            raise InputError(f"{where}: `{field}` must be a string, got {short(message[field])}")
        if field in message:
            message.setdefault("reasoning_content", message[field])


def _set_weight(message: Message, where: str) -> None:
    """`weight` is OpenAI's name for it, `train` Axolotl's."""
    flags = {field: message.pop(field) for field in ("weight", "train") if field in message}
    for field, value in flags.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise InputError(
                f"{where}: `{field}` must be 0 or 1 (context only, or learned), got {short(value)}"
            )
    if len({bool(value) for value in flags.values()}) > 1:
        raise InputError(f"{where}: `weight` and `train` say different things; remove one")
    if flags and not all(flags.values()):
        message["weight"] = 0


def says_something(message: Message) -> bool:
    """Whether a message has text, reasoning or a tool call: anything to learn."""
    texts = (message["content"], message.get("reasoning_content", ""))
    return bool(message.get("tool_calls")) or any(text.strip() for text in texts)


def without_reasoning(conversation: Sequence[Message]) -> list[Message]:
    """The messages without their reasoning, in a field or between <think> tags at the start."""
    kept = [{k: v for k, v in m.items() if k not in _REASONING} for m in conversation]
    for message in kept:
        thought = _THINK.match(message["content"]) if message["role"] == "assistant" else None
        if thought:
            message["content"] = message["content"][thought.end() :]
    return kept


def _content(message: Message, calls: Any, *, where: str) -> str:
    content = message.get("content")
    if content is None:
        if message["role"] == "assistant" and (calls or message.get("reasoning_content")):
            return ""
        raise InputError(f"{where}: the {message['role']} message has no `content`")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_text_part(part, where=where) for part in content)
    raise InputError(f"{where}: `content` must be a string, got {short(content)}")


def _text_part(part: Any, *, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise InputError(f"{where}: only text parts can be trained on, got the part {short(part)}")


def _tool_calls(value: Any, *, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise InputError(f"{where}: `tool_calls` must be a list, got {short(value)}")
    return [_tool_call(call, where=f"{where}, tool call {i}") for i, call in enumerate(value)]


def _tool_call(value: Any, *, where: str) -> dict[str, Any]:
    call = value.get("function") or value if isinstance(value, Mapping) else {}
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise InputError(
            f"{where}: expected an object with `function` holding `name` and `arguments`, "
            f"got {short(value)}"
        )
    function = {"name": call["name"], "arguments": _arguments(call.get("arguments"), where=where)}
    outer = {k: v for k, v in value.items() if k == "id" and v is not None}
    return outer | {"type": "function", "function": function}


def _arguments(value: Any, *, where: str) -> dict[str, Any]:
    """Undo every level of JSON encoding: some exporters encode twice."""
    decoded = {} if value in (None, "") else value
    while isinstance(decoded, str):
        decoded = from_json(decoded, "`arguments`", where)
    if not isinstance(decoded, Mapping):
        raise InputError(f"{where}: `arguments` must be a JSON object, got {short(value)}")
    return dict(decoded)


def tools(value: Any, *, where: str) -> list[dict[str, Any]] | None:
    """Normalise `tools`: a list of schemas or that list as a JSON string; none at all is None."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        value = from_json(value, "`tools`", where)
    if value is not None and (
        not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value)
    ):
        raise InputError(f"{where}: `tools` must be a list of objects, got {short(value)}")
    return [dict(tool) for tool in value] if value else None


def from_json(text: Any, what: str, where: str) -> Any:
    """The value of JSON text; `what` names it in the InputError that it is none."""
    if not isinstance(text, str):
        raise InputError(f"{where}: {what} must be JSON text, got {short(text)}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{where}: {what} is not valid JSON ({error}), got {short(text)}"
        ) from error
