# SPDX-License-Identifier: Apache-2.0
"""The commands `generate` and `chat`: from `key=value` words to answers on the terminal."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType
from typing import Any, get_args, get_type_hints

from lora_tune import api, build
from lora_tune.data import conversation
from lora_tune.data.files import BROKEN, local_files, open_files
from lora_tune.errors import InputError
from lora_tune.generation.generate import Settings, answers
from lora_tune.generation.prompts import Prompt, has_chat_template, require_chat_template
from lora_tune.recipe import Mesh

Pairs = Sequence[tuple[str, str]]

CHAT_CACHE = 4096
"""Tokens that a conversation may have unless `cache_size` says otherwise."""

_BASE = {"model.path": str, "model.revision": str, "model.dtype": str, "model.chat_template": str}
_MESH = {f"mesh.{field.name}": int for field in dataclasses.fields(Mesh)}
_SETTINGS = get_type_hints(Settings)
_GENERATE = {"run": str, "prompt": str, "prompts": str, "raw": bool, **_SETTINGS, **_BASE, **_MESH}
_CHAT = {"run": str, "system": str, **_SETTINGS, **_BASE, **_MESH}
del _CHAT["batch_size"]
# What other tools call the same thing.
_FOREIGN = {
    "adapter": "run",
    "base_model": "model.path",
    "dtype": "model.dtype",
    "eos_token_id": "stop_ids",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "message": "prompt",
    "model": "model.path",
    "output_dir": "run",
    "path": "model.path",
    "recipe": "run",
    "repeat_penalty": "repetition_penalty",
    "system_prompt": "system",
}


def generate(pairs: Pairs) -> None:
    """Answers `prompt=`, as it comes, or every row of `prompts=`, one JSON line an answer."""
    given = _parse(pairs, _GENERATE)
    prompt, path = given.pop("prompt", None), given.pop("prompts", None)
    if bool(prompt) == bool(path):
        raise InputError("expected one of prompt=TEXT and prompts=FILE.jsonl")
    rows = list(_rows(path)) if path else []
    raw = given.pop("raw", False)
    settings = _settings(given)
    model, tokenizer = _load(given)
    templated = not raw and has_chat_template(tokenizer)
    if prompt:
        asked = _asked(prompt, templated)
        list(answers(model, tokenizer, [asked], settings, stream=_show, once=True))
        print()
        return
    prompts = [_row_prompt(where, row, templated) for where, row in rows]
    found = answers(model, tokenizer, prompts, settings, names=[where for where, _ in rows])
    for (_, row), answer in zip(rows, found, strict=True):
        print(json.dumps({**row, "answer": answer}, ensure_ascii=False), flush=True)


def chat(pairs: Pairs) -> None:
    """Answers each line of the input as the next message of one conversation, until it ends."""
    given = _parse(pairs, _CHAT)
    system = given.pop("system", None)
    settings = _settings({"cache_size": CHAT_CACHE, **given})
    model, tokenizer = _load(given)
    require_chat_template(tokenizer, "chat")
    history = [] if system is None else [{"role": "system", "content": system}]
    for turn, line in enumerate(_lines()):
        history.append({"role": "user", "content": line})
        drawn = dataclasses.replace(settings, seed=settings.seed + turn)
        [answer] = answers(model, tokenizer, [history], drawn, stream=_show)
        print(flush=True)
        history.append({"role": "assistant", "content": answer})


def _parse(pairs: Pairs, known: Mapping[str, Any]) -> dict[str, Any]:
    """The values by key, the last of equal keys; InputError about a key or value that cannot be."""
    for key, _ in pairs:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            meant = _FOREIGN.get(key) if _FOREIGN.get(key) in known else next(iter(close), None)
            hint = f"did you mean {meant!r}?" if meant else f"expected one of {', '.join(known)}"
            raise InputError(f"unknown key {key!r}: {hint}")
    return {key: _value(key, known[key], text) for key, text in pairs}


def _value(key: str, hint: Any, text: str) -> Any:
    options = get_args(hint)
    if NoneType in options:
        if text == "null":
            return None
        hint = options[0]
    if hint is str:
        return text
    if hint is bool:
        if text not in ("true", "false"):
            raise InputError(f"{key} must be true or false, got {text!r}")
        return text == "true"
    try:
        if hint in (int, float):
            return hint(text)
        return [int(part) for part in text.strip("[]").split(",") if part.strip()]
    except ValueError:
        expected = {int: "an integer", float: "a number"}.get(hint, "integers with commas between")
        raise InputError(f"{key} must be {expected}, got {text!r}") from None


def _settings(given: Mapping[str, Any]) -> Settings:
    return Settings(**{key: value for key, value in given.items() if key in _SETTINGS})


def _load(given: Mapping[str, Any]) -> tuple[Any, Any]:
    """The model of a run folder, or a base model, and its tokenizer."""
    base = {key: given[key] for key in (*_BASE, *_MESH) if key in given}
    if "run" in given:
        return api.load_run(given["run"], [f"{key}={value}" for key, value in base.items()])
    if "model.path" not in base:
        raise InputError("expected run=DIR, the folder of a run, or model.path=PATH, a base model")
    sizes = {key.split(".")[1]: size for key, size in base.items() if key in _MESH}
    options = {key.split(".")[1]: value for key, value in base.items() if key in _BASE}
    return api.load_model(**options, mesh=build.make_mesh(Mesh(**sizes)))


def _asked(text: str, templated: bool) -> Prompt:
    return [{"role": "user", "content": text}] if templated else text


def _rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of a file of prompts."""
    files = local_files(path)
    if files is None:
        raise InputError(f"prompts: there is no file {path!r}")
    for where, row in open_files(files)():
        if BROKEN in row:
            raise InputError(row[BROKEN])
        if not row.keys() & {"messages", "conversations", "prompt", "text"}:
            raise InputError(
                f"{where}: expected messages, prompt or text, found {', '.join(sorted(row))}"
            )
        yield where, row


def _row_prompt(where: str, row: Mapping[str, Any], templated: bool) -> Prompt:
    """What a row asks: of messages all up to an answer at the end, as rows for training have."""
    given = row.get("messages", row.get("conversations"))
    if given is not None:
        messages = conversation.messages(given, where=where)
        answered = len(messages) > 1 and messages[-1]["role"] == "assistant"
        return {"messages": messages[:-1] if answered else messages, "tools": row.get("tools")}
    prompt = row.get("prompt", row.get("text"))
    if "prompt" in row and isinstance(prompt, str):
        return _asked(prompt, templated)
    return prompt


def _lines() -> Iterator[str]:
    """The lines of the input that are not empty, asked for where someone is there to answer."""
    asking = sys.stdin.isatty()
    if asking:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  arrow keys and history
        print("Ctrl-D ends the conversation.", file=sys.stderr)
    while True:
        try:
            line = input("> " if asking else "")
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise InputError(f"the input is not UTF-8 text (byte {error.start})") from None
        if line.strip():
            yield line


def _show(_: int, piece: str) -> None:
    print(piece, end="", flush=True)
