# SPDX-License-Identifier: Apache-2.0
"""The commands `generate` and `chat`: from `key=value` words to answers on the terminal."""

import codecs
import contextlib
import dataclasses
import datetime
import decimal
import json
import math
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from lora_tune import api, build, recipe, words
from lora_tune.data import conversation
from lora_tune.data.files import BROKEN, local_files, open_files
from lora_tune.errors import InputError, Problems, short
from lora_tune.generation.generate import Settings, Stream, answers, max_positions
from lora_tune.generation.prompts import (
    Prompt,
    has_chat_template,
    is_chat,
    require_chat_template,
)

Pairs = Sequence[tuple[str, str]]

CHAT_CACHE = 4096
"""Tokens that a conversation may have unless `cache_size` says otherwise."""
ANSWER = "answer"
"""Column that the answer to a row is written under."""

_BASE = {"model.path": str, "model.revision": str, "model.dtype": str, "model.chat_template": str}
_MESH = {f"mesh.{field.name}": int for field in dataclasses.fields(recipe.Mesh)}
_SETTINGS = get_type_hints(Settings)
_SHARED = {**_SETTINGS, **_BASE, **_MESH}
_KEYS: dict[str, dict[str, Any]] = {
    "generate": {"run": str, "prompt": str, "prompts": str, "raw": bool, **_SHARED},
    "chat": {"run": str, "system": str, **_SHARED},
}
del _KEYS["chat"]["batch_size"]
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
    given = words.parse(pairs, "generate", _KEYS, foreign=_FOREIGN)
    prompt, path = given.pop("prompt", None), given.pop("prompts", None)
    if (prompt is None) == (path is None):
        raise InputError("expected one of prompt=TEXT and prompts=FILE.jsonl")
    raw = given.pop("raw", False)
    rows = _rows(path, raw) if path else []
    settings = _settings(given)
    model, tokenizer = _load(given)
    templated = not raw and has_chat_template(tokenizer)
    if prompt:
        asked = _asked(prompt, templated)
        cut: list[int] = []
        with _shown() as show:
            options = {"stream": show, "once": True, "cut": cut.append}
            list(answers(model, tokenizer, [asked], settings, **options))
        print(flush=True)
        if cut:
            limit = f"max_new_tokens={settings.max_new_tokens}"
            print(f"lora-tune: the answer was cut off at {limit}", file=sys.stderr)
        return
    prompts = [_row_prompt(where, row, templated) for where, row in rows]
    found = answers(model, tokenizer, prompts, settings, names=[where for where, _ in rows])
    unicode = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
    for (_, row), answer in zip(rows, found, strict=True):
        print(_json({**row, ANSWER: answer}, ensure_ascii=not unicode), flush=True)


def chat(pairs: Pairs) -> None:
    """Answers each line of the input as the next message of one conversation, until it ends."""
    given = words.parse(pairs, "chat", _KEYS, foreign=_FOREIGN)
    system = given.pop("system", None)
    settings = _settings(given)
    model, tokenizer = _load(given)
    require_chat_template(tokenizer, "chat")
    if settings.cache_size is None:
        fits = min(CHAT_CACHE, max_positions(model) or CHAT_CACHE)
        settings = dataclasses.replace(settings, cache_size=fits)
    history = [] if system is None else [{"role": "system", "content": system}]
    names = ["the conversation"]
    with _shown() as show:
        for turn, line in enumerate(_lines()):
            history.append({"role": "user", "content": line})
            drawn = dataclasses.replace(settings, seed=settings.seed + turn)
            [answer] = answers(model, tokenizer, [history], drawn, stream=show, names=names)
            print(flush=True)
            history.append({"role": "assistant", "content": answer})


def _settings(given: Mapping[str, Any]) -> Settings:
    return Settings(**{key: value for key, value in given.items() if key in _SETTINGS})


def _load(given: Mapping[str, Any]) -> tuple[Any, Any]:
    """The model of a run folder, or a base model, and its tokenizer."""
    base = {key: given[key] for key in (*_BASE, *_MESH) if key in given}
    sizes = {key.split(".")[1]: size for key, size in base.items() if key in _MESH}
    if "run" in given:
        overrides = [f"{key}={value}" for key, value in base.items()]
        return api.load_run(given["run"], [*overrides, *_fitting_batches(given["run"], sizes)])
    if "model.path" not in base:
        raise InputError("expected run=DIR, the folder of a run, or model.path=PATH, a base model")
    options = {key.split(".")[1]: value for key, value in base.items() if key in _BASE}
    return api.load_model(**options, mesh=build.make_mesh(recipe.Mesh(**sizes)))


def _fitting_batches(run: str, sizes: Mapping[str, int]) -> list[str]:
    """Overrides that fit a run's batches, which answers have no part in, to another mesh."""
    path = Path(run) / "recipe.yaml"
    if not sizes or not path.is_file():
        return []
    mesh = dataclasses.replace(recipe.load(path).mesh, **sizes)
    rows = max(1, math.prod(dataclasses.astuple(mesh)))
    return [
        f"train.batch_size={rows}",
        "train.gradient_accumulation_steps=1",
        "eval.batch_size=null",
    ]


def _asked(text: str, templated: bool) -> Prompt:
    return [{"role": "user", "content": text}] if templated else text


def _rows(path: str, raw: bool) -> list[tuple[str, dict[str, Any]]]:
    """(where, row) of a file of prompts, all of which can be asked and written again."""
    files = local_files(path)
    if files is None:
        raise InputError(f"prompts: there is no file {path!r}")
    rows, problems = [], Problems(f"rows of {path!r} cannot be answered")
    for where, row in open_files(files)():
        with problems.collected():
            if BROKEN in row:
                raise InputError(row[BROKEN])
            _check_columns(where, row)
            _row_prompt(where, row, templated=not raw)
            rows.append((where, row))
    problems.raise_if_any()
    return rows


def _check_columns(where: str, row: Mapping[str, Any]) -> None:
    if not row.keys() & {"messages", "conversations", "prompt", "text"}:
        found = ", ".join(sorted(row)) or "an empty row"
        raise InputError(f"{where}: expected messages, prompt or text, found {found}")
    if ANSWER in row:
        raise InputError(
            f"{where}: the row has a column `{ANSWER}` already, which the model's answer is "
            "written to; rename it"
        )
    for column, value in row.items():
        try:
            _json(value)
        except TypeError as error:
            raise InputError(
                f"{where}: the column `{column}` cannot be written as JSON ({error}), got "
                f"{short(value)}; remove it from the file"
            ) from None


def _json(value: Any, *, ensure_ascii: bool = True) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, default=_as_text)


def _as_text(value: Any) -> str:
    """Values of Parquet that JSON has no type for, where the text says all of them."""
    exact = datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID
    if isinstance(value, exact):
        return str(value)
    raise TypeError(f"it holds {type(value).__name__}")


def _row_prompt(where: str, row: Mapping[str, Any], templated: bool) -> Prompt:
    """What a row asks: of messages all up to an answer at the end, as rows for training have."""
    tools = conversation.tools(row.get("tools"), where=where)
    given = row.get("messages", row.get("conversations"))
    if given is not None:
        messages = conversation.messages(given, where=where)
        answered = len(messages) > 1 and messages[-1]["role"] == "assistant"
        return {"messages": messages[:-1] if answered else messages, "tools": tools}
    prompt = row.get("prompt", row.get("text"))
    if "prompt" in row and isinstance(prompt, str):
        prompt = _asked(prompt, templated)
    if isinstance(prompt, list) and is_chat(prompt):
        return {"messages": conversation.messages(prompt, where=where), "tools": tools}
    if tools:
        raise InputError(
            f"{where}: `tools` are shown by the chat template, but the prompt is taken as it is, "
            "without one; remove them or give messages"
        )
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


@contextlib.contextmanager
def _shown() -> Iterator[Stream]:
    """A stream that prints answers; Ctrl-C, which is raised, ends the line that it came in."""
    interrupted = threading.Event()

    def interrupt(*_: Any) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def show(_: int, piece: str) -> None:
        if interrupted.is_set():  # raised in a callback of jax, which drops exceptions
            raise KeyboardInterrupt
        print(piece, end="", flush=True)

    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    replaced = in_main and before == signal.default_int_handler
    if replaced:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield show
    except KeyboardInterrupt:
        print(flush=True)
        raise
    finally:
        if replaced:
            signal.signal(signal.SIGINT, before)
