# SPDX-License-Identifier: Apache-2.0
"""Prompts in every form to token ids, and the ids that end an answer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lora_tune.data import conversation
from lora_tune.data.messages import Encoder
from lora_tune.data.turns import Template
from lora_tune.errors import InputError, short
from lora_tune.hf.files import read_json

Prompt = Any
"""A text, a list of messages, `{"messages": …, "tools": …}`, or a list of token ids."""


def split(prompts: Any) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether a single one was given.

    Raises:
      InputError: there is none.
    """
    prompts = plain(prompts)
    if isinstance(prompts, str | Mapping):
        return [prompts], True
    if not isinstance(prompts, list) or not prompts:
        raise InputError(
            f"prompts is {short(prompts)}, expected a text, a list of messages, a list of token "
            "ids, or a list of these"
        )
    first = prompts[0]
    single = isinstance(first, int) or (isinstance(first, Mapping) and "role" in first)
    return ([prompts], True) if single else (prompts, False)


def plain(value: Any) -> Any:
    """Lists and numbers in place of arrays and of other sequences."""
    if hasattr(value, "tolist"):  # of numpy, jax and torch
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [plain(part) for part in value]
    return value


def is_chat(prompt: Prompt) -> bool:
    """Whether a prompt is a conversation, which the chat template renders."""
    return isinstance(prompt, Mapping) or (
        isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    )


def is_ids(prompt: Prompt) -> bool:
    """Whether a prompt is a list of token ids."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, bytes | bytearray)
        and len(prompt) > 0
        and isinstance(prompt[0], int | np.integer)
    )


def encode(prompt: Prompt, tokenizer: Any, *, vocab_size: int, where: str) -> list[int]:
    """The token ids of one prompt.

    A text gets the special tokens that the tokenizer adds by itself, and no chat template.
    Messages are rendered with the chat template up to where the answer begins.

    Args:
      prompt: in any form.
      tokenizer: may be None for token ids.
      vocab_size: ids are below it.
      where: names the prompt in errors.

    Raises:
      InputError: an empty prompt, unknown ids, malformed messages, no chat template.
    """
    if not is_ids(prompt) and tokenizer is None:
        raise InputError(
            f"{where} is {short(prompt)}, expected a list of token ids, because there is no "
            "tokenizer"
        )
    if is_ids(prompt):
        ids = _checked_ids(prompt, vocab_size, where)
    elif isinstance(prompt, str):
        ids = list(tokenizer(_text(prompt, where), verbose=False)["input_ids"])
    elif not is_chat(prompt):
        raise InputError(
            f"{where} is {short(prompt)}, expected a text, a list of messages or a list of token "
            "ids"
        )
    else:
        rendered = _text(_render(prompt, tokenizer, where), where)
        ids = list(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])
    if not ids:
        raise InputError(f"{where} is empty; the model needs at least one token to go on from")
    return ids


def _checked_ids(prompt: Sequence[Any], vocab_size: int, where: str) -> list[int]:
    for i in prompt:
        if isinstance(i, bool) or not isinstance(i, int | np.integer) or not 0 <= i < vocab_size:
            raise InputError(
                f"{where}: {short(i)} is no token id of this model, expected integers from 0 to "
                f"{vocab_size - 1}"
            )
    return [int(i) for i in prompt]


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where} is not UTF-8 text (character {error.start})") from None
    return text


def _render(prompt: Any, tokenizer: Any, where: str) -> str:
    if not isinstance(prompt, Mapping):
        prompt = {"messages": prompt}
    if "messages" not in prompt or set(prompt) - {"messages", "tools"}:
        raise InputError(f"{where}: expected the keys messages and tools, got {short(prompt)}")
    require_chat_template(tokenizer, where)
    messages = conversation.messages(prompt["messages"], where=where)
    if messages[-1]["role"] == "assistant":
        raise InputError(
            f"{where}: the last message is the assistant's, so there is nothing to answer; remove "
            "it or add a message"
        )
    for i, message in enumerate(messages):
        _text(message["content"], f"{where}, message {i},")
    tools = conversation.tools(prompt.get("tools"), where=where)
    return Template(tokenizer, tools, where).render(messages, prompt=True)


def has_chat_template(tokenizer: Any) -> bool:
    """Whether the tokenizer has a chat template to use."""
    try:
        tokenizer.get_chat_template()
    except ValueError:
        return False
    return True


def require_chat_template(tokenizer: Any, where: str) -> None:
    """Raises InputError unless the tokenizer has a chat template."""
    if not has_chat_template(tokenizer):
        raise InputError(
            f"{where}: the tokenizer has no chat template, which messages need; set "
            "model.chat_template to a Jinja file (in Python tokenizer.chat_template to its text) "
            "or give the prompt as plain text"
        )


def stop_ids_of(folder: Path | None, tokenizer: Any, *, chat: bool) -> list[int]:
    """The ids that end an answer.

    Args:
      folder: of the model: `eos_token_id` of its `generation_config.json`, or else of its
        `config.json`; where neither names one, the tokenizer's.
      tokenizer: may be None.
      chat: whether conversations are answered. Then also the special token after which the chat
        template ends a turn, since that is where training ends an answer: with base models it is
        often not the one that the model folder names.

    Raises:
      InputError: the folder names something other than ids.
    """
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if not found and folder is not None and (folder / name).is_file():
            found = _ids_of(read_json(folder / name).get("eos_token_id"), folder / name)
    if not found and tokenizer is not None and tokenizer.eos_token_id is not None:
        found = [tokenizer.eos_token_id]
    ends = turn_end(tokenizer) if chat else []
    return sorted({*found, *ends})


def _ids_of(value: Any, path: Path) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise InputError(f"{path}: eos_token_id is {value!r}, expected an id or a list of ids")
    return ids


def turn_end(tokenizer: Any) -> list[int]:
    """The special token that ends an assistant's turn, as training teaches it, if there is one."""
    if not has_chat_template(tokenizer):
        return []
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    encoder = Encoder(tokenizer, format="messages", max_length=2**31)
    try:
        example = encoder({"messages": turns}, where="an example of a turn").examples[-1]
    except InputError:
        return []  # a template for other conversations than this
    last = int(example.tokens[example.mask][-1])
    token = tokenizer.added_tokens_decoder.get(last)
    special = last in tokenizer.all_special_ids or (token is not None and token.special)
    return [last] if special else []
