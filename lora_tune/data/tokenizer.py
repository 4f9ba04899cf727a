# SPDX-License-Identifier: Apache-2.0
"""Load the tokenizer and chat template that belong to a model."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from lora_tune.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load(path: str, *, vocab_size: int | None = None) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a local model folder or of a hub id.

    `vocab_size` is the number of rows of the model's embedding; ids beyond it are an error.
    Code from the model repository is never run; templates render in transformers' sandbox.
    """
    # Without torch, transformers advises to install it; for tokenizers nothing is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    local = Path(path).expanduser()
    if not local.is_dir() and (path.startswith(("/", ".", "~")) or path.count("/") > 1):
        raise InputError(
            f"the model folder {path!r} does not exist (looked for {local.absolute()})"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(local) if local.is_dir() else path,
            trust_remote_code=False,
            local_files_only=local.is_dir(),
        )
    except Exception as error:  # the tokenizers library raises bare Exception for a broken file
        said = [line.strip() for line in str(error).strip().splitlines()] or [""]
        reason = said[0] if not said[0].endswith(":") else " ".join(said)[:300]
        raise InputError(f"no tokenizer can be loaded from {path!r}: {reason}") from error
    if not tokenizer.is_fast:
        raise InputError(
            f"the tokenizer of {path!r} has no tokenizer.json: a fast tokenizer is needed, because "
            "the loss mask follows from character offsets"
        )
    if vocab_size is not None:
        check_vocabulary(tokenizer, vocab_size)
    return tokenizer


def rules(tokenizer: "PreTrainedTokenizerBase") -> str:
    """All that a tokenizer does to a text, as JSON, without how it was last called."""
    found = json.loads(tokenizer.backend_tokenizer.to_str())  # pyright: ignore
    found.pop("truncation", None)
    found.pop("padding", None)
    # Of the loader, not of what it holds: whether special tokens in a text are only text.
    found["split_special_tokens"] = bool(tokenizer.split_special_tokens)
    return json.dumps(found, sort_keys=True)


def is_template(text: str) -> bool:
    """Whether a text is a chat template itself rather than the name of a file with one."""
    return "{%" in text or "{{" in text


def use_template(tokenizer: "PreTrainedTokenizerBase", given: str) -> None:
    """Replace the tokenizer's own chat template by another, given as text or as a file's path.

    Raises:
        InputError: the file cannot be read or is empty, or this is no Jinja template.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    text, name = given, "the chat template"
    if not is_template(given):
        name = f"the chat template file {given!r}"
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{name} cannot be read: {error}") from error
        if not text.strip():
            raise InputError(f"{name} is empty")
    try:
        render_jinja_template([], chat_template=text)
    except TemplateSyntaxError as error:
        raise InputError(f"{name} is no Jinja template: line {error.lineno}, {error}") from error
    tokenizer.chat_template = text


def check_vocabulary(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> None:
    """Refuse a tokenizer with token ids that the model's embedding [vocab_size, D] lacks."""
    beyond = {t: i for t, i in tokenizer.get_vocab().items() if i >= vocab_size}
    if beyond:
        shown = ", ".join(f"{t!r} = {i}" for t, i in sorted(beyond.items(), key=lambda x: x[1])[:5])
        raise InputError(
            f"the tokenizer has {len(beyond)} tokens beyond the model's vocabulary of {vocab_size} "
            f"({shown}): remove the added tokens or use the tokenizer that belongs to the model"
        )


def require_chat_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise InputError unless the tokenizer has one chat template to use."""
    try:
        tokenizer.get_chat_template()
    except ValueError as error:
        raise InputError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, which rows of "
            "messages need: set model.chat_template to a Jinja file, or use `text` or plain "
            "`prompt`/`completion` rows"
        ) from error
