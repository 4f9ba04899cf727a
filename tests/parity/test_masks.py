# SPDX-License-Identifier: Apache-2.0
"""Masks against TRL's training templates, which mark what the assistant generates.

TRL also learns the line break that ChatML puts after a turn, which a model that is stopped at the
turn's end never writes, and with Qwen2.5 the one before it, which the prompt has already; without
these white-space tokens at the edges of a turn both masks are the same.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from chat_tokenizers import llama3, qwen

from lora_tune.data.messages import encode

pytestmark = pytest.mark.parity

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is it?\n"},
    {"role": "assistant", "content": "It is 42.\n\nblue"},
    {"role": "user", "content": "é→🙂"},
    {"role": "assistant", "content": "<b>Hello</b>"},
]
CALLS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "Two."},
]


def template(name: str) -> str:
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("needs trl (extra `parity`)")
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


@pytest.mark.parametrize(
    ("name", "make", "messages"),
    [
        ("llama3_training", llama3, PLAIN),
        ("qwen2_5_training", qwen, PLAIN),
        ("qwen2_5_training", qwen, CALLS),
        ("qwen3_training", qwen, PLAIN),
        ("qwen3_training", qwen, CALLS),
        ("qwen3_instruct_2507_training", qwen, PLAIN),
        ("qwen3_instruct_2507_training", qwen, CALLS),
    ],
)
def test_masks_equal_trl(name, make, messages):
    tok = make(template(name))
    row = {"messages": messages}
    (ours,) = encode(row, tok, format="messages", max_length=999).examples
    theirs = tok.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert ours.tokens.tolist() == theirs["input_ids"]
    mask = np.array(theirs["assistant_masks"], bool)
    texts = [tok.decode([i]) for i in theirs["input_ids"]]
    differ = [texts[i] for i in np.flatnonzero(mask != ours.mask)]
    assert set(differ) <= {"\n"}
    assert not (ours.mask & ~mask).any()
    assert mask.sum() - len(differ) == ours.mask.sum() > 4
    if name == "llama3_training":
        assert differ == []
