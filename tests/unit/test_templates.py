# SPDX-License-Identifier: Apache-2.0
"""Golden masks: what templates write, spelled out by hand, with what is learned in «».

And on conversations at random, transformers' own mask of templates that mark what the assistant
generates.
"""

import pytest
from chat_tokenizers import CHATML_TEMPLATE, SMOLLM2_TEMPLATE, llama3, qwen
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.data.messages import encode, preview
from lora_tune.errors import InputError


def marked(messages, tok, *, tools=None, **options):
    """Every example as text, with what is learned in «»."""
    row = {"messages": messages, "tools": tools}
    encoded = encode(row, tok, format="messages", max_length=4096, **options)
    return [
        "".join(f"«{text}»" if on else text for text, on in preview(example, tok))
        for example in encoded.examples
    ]


def system(content):
    return {"role": "system", "content": content}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def tool(content):
    return {"role": "tool", "content": content}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
SUM = [
    user("1+2?"),
    assistant("", reasoning_content="Ask.", tool_calls=[call("add", '{"a": 1, "b": 2}')]),
    tool("3"),
    assistant("Three.", reasoning_content="Told."),
]


def without_reasoning(messages):
    return [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]


def test_smollm2_puts_its_own_system_message_first():
    messages = [user("Hi"), assistant("Hello"), user("Bye"), assistant("Later")]
    assert marked(messages, qwen(SMOLLM2_TEMPLATE)) == [
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n«Hello<|im_end|>»\n"
        "<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n«Later<|im_end|>»\n"
    ]


def test_smollm2_with_a_system_message_and_only_the_last_turn():
    messages = [system("Be brief."), user("Hi"), assistant("Hello"), user("Bye"), assistant("Ok")]
    assert marked(messages, qwen(SMOLLM2_TEMPLATE), mask_history=True) == [
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n«Ok<|im_end|>»\n"
    ]


def test_smollm2_shows_neither_reasoning_nor_calls():
    with pytest.raises(InputError, match="does not show the `reasoning_content`"):
        marked([user("a"), assistant("b", reasoning_content="why")], qwen(SMOLLM2_TEMPLATE))
    with pytest.raises(InputError, match="does not show the `tool_calls`"):
        marked(without_reasoning(SUM), qwen(SMOLLM2_TEMPLATE))


def test_llama3_style_begins_once_and_learns_each_turn():
    messages = [
        system("Be brief."),
        user(" Hi "),
        assistant("Hello "),
        user("Bye"),
        assistant("Ok"),
    ]
    assert marked(messages, llama3()) == [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Hello<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Ok<|eot_id|>»"
    ]


def test_llama3_style_learns_calls_and_not_their_results():
    assert marked(without_reasoning(SUM), llama3(), tools=TOOLS) == [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nFunctions:\n"
        '{"type": "function", "function": {"name": "add", "parameters": {}}}\n\n<|eot_id|>'
        "<|start_header_id|>user<|end_header_id|>\n\n1+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '«{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>»'
        "<|start_header_id|>ipython<|end_header_id|>\n\n3<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Three.<|eot_id|>»"
    ]


QWEN3_TOOLS = (
    "<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist with the user "
    "query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n"
    '<tools>\n{"type": "function", "function": {"name": "add", "parameters": {}}}\n</tools>\n\n'
    "For each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
    "<args-json-object>}\n</tool_call><|im_end|>\n"
)
QWEN3_SUM = (
    "<|im_start|>user\n1+2?<|im_end|>\n"
    "<|im_start|>assistant\n«<think>\nAsk.\n</think>\n\n<tool_call>\n"
    '{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>»\n'
    "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n«<think>\nTold.\n</think>\n\nThree.<|im_end|>»\n"
)


def test_qwen3_keeps_reasoning_around_a_call():
    assert marked(SUM, qwen(), tools=TOOLS) == [QWEN3_TOOLS + QWEN3_SUM]


def test_qwen3_takes_reasoning_out_once_the_user_speaks_again():
    messages = [*SUM, user("More?"), assistant("No.", reasoning_content="Done.")]
    history = (
        "<|im_start|>user\n1+2?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nThree.<|im_end|>\n"
        "<|im_start|>user\nMore?<|im_end|>\n"
    )
    last = "<|im_start|>assistant\n«<think>\nDone.\n</think>\n\nNo.<|im_end|>»\n"
    assert marked(messages, qwen(), reasoning="keep") == [QWEN3_SUM, history + last]
    assert marked(messages, qwen(), reasoning="last") == [history + last]
    assert marked(messages, qwen(), mask_history=True) == [history + last]
    bare = "<|im_start|>assistant\n«<think>\n\n</think>\n\nNo.<|im_end|>»\n"
    assert marked(messages, qwen(), reasoning="drop")[-1] == history + bare
    with pytest.raises(InputError, match=r"set data\.reasoning to keep"):
        marked(messages, qwen())


TEXTS = st.text(st.sampled_from("abz é→🙂\n\t'\"<>{}%0."), min_size=1, max_size=12).filter(
    str.strip
)


@given(
    st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4),
    st.one_of(st.none(), TEXTS),
    st.sampled_from(["chatml", "llama3"]),
)
def test_masks_equal_those_that_transformers_makes_from_generation_marks(turns, first, kind):
    tok = {"chatml": qwen(CHATML_TEMPLATE), "llama3": llama3()}[kind]
    messages = [] if first is None else [system(first)]
    for question, answer in turns:
        messages += [user(question), assistant(answer)]
    row = {"messages": messages}
    (example,) = encode(row, tok, format="messages", max_length=4096).examples
    expected = tok.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    if example.tokens.tolist() != expected["input_ids"]:
        # transformers tokenises over the edge of a prompt, which a server cannot; texts agree.
        assert tok.decode(example.tokens) == tok.decode(expected["input_ids"])
        return
    assert example.mask.tolist() == [bool(m) for m in expected["assistant_masks"]]
