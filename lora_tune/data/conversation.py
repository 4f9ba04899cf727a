# SPDX-License-Identifier: Apache-2.0
"""Check the fields of a conversation and bring them to the one form chat templates expect."""

import json
from collections.abc import Mapping
from typing import Any

from lora_tune.errors import InputError, short

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}

Message = dict[str, Any]


def messages(value: Any, *, where: str) -> list[Message]:
    """Normalise a list of messages.

    Contents become strings (a list of text parts is joined, a missing content is ""), fields that
    are None are absent, ShareGPT's `from` and `value` become `role` and `content`, and every tool
    call is `{"type": "function", "function": {"name", "arguments"}}` with its arguments as an
    object, so that a template encodes them exactly once.
    """
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: expected a non-empty list of messages, got {short(value)}")
    return [_message(item, where=f"{where}, message {i}") for i, item in enumerate(value)]


def _message(value: Any, *, where: str) -> Message:
    if not isinstance(value, Mapping) or not {"role", "from"} & value.keys():
        raise InputError(
            f"{where}: expected an object with `role` and `content`, got {short(value)}"
        )
    message = {k: v for k, v in value.items() if v is not None}
    accepted = [*ROLES]
    if "from" in message and "role" not in message:
        sender = message.pop("from")
        message["role"] = _SHAREGPT_ROLES.get(str(sender), sender)
        message.setdefault("content", message.pop("value", None))
        accepted += _SHAREGPT_ROLES
    if message.get("role") not in ROLES:
        raise InputError(
            f"{where}: role {message.get('role')!r} is unknown, expected one of "
            f"{', '.join(accepted)}"
        )
    calls = message.pop("tool_calls", None)
    if calls and message["role"] != "assistant":
        raise InputError(f"{where}: only an assistant message may have `tool_calls`")
    message["content"] = _content(message, calls, where=where)
    for field in ("reasoning_content", "name"):
        if not isinstance(message.get(field, ""), str):
            raise InputError(f"{where}: `{field}` must be a string, got {short(message[field])}")
    if calls:
        message["tool_calls"] = _tool_calls(calls, where=where)
    return message


def says_something(message: Message) -> bool:
    """Whether a message has text, reasoning or a tool call: anything to learn."""
    texts = (message["content"], message.get("reasoning_content", ""))
    return bool(message.get("tool_calls")) or any(text.strip() for text in texts)


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
        try:
            decoded = json.loads(decoded)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{where}: `arguments` is not valid JSON ({error}), got {short(value)}"
            ) from error
    if not isinstance(decoded, Mapping):
        raise InputError(f"{where}: `arguments` must be a JSON object, got {short(value)}")
    return dict(decoded)


def tools(value: Any, *, where: str) -> list[dict[str, Any]] | None:
    """Normalise `tools`: a list of schemas or that list as a JSON string; none at all is None."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: `tools` is not valid JSON ({error})") from error
    if value is not None and (
        not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value)
    ):
        raise InputError(f"{where}: `tools` must be a list of objects, got {short(value)}")
    return [dict(tool) for tool in value] if value else None
