# SPDX-License-Identifier: Apache-2.0
import json
import pickle

import numpy as np
import pytest
from chat_tokenizers import CHATML_TEMPLATE, llama, qwen

from lora_tune.data import conversation, tokenizer
from lora_tune.data.messages import Encoded, Encoder, encode, preview
from lora_tune.errors import InputError


def chat(messages, tok, *, max_length=4096, tools=None, **options) -> Encoded:
    row = {"messages": messages, "tools": tools}
    return encode(row, tok, format="messages", max_length=max_length, where="f.jsonl:7", **options)


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def shown(encoded, tok):
    return [preview(example, tok) for example in encoded.examples]


# Golden cases: what Qwen's own template writes, by hand, and what the assistant writes in it.


def test_qwen3_single_turn_trains_the_answer_and_its_end():
    tok = qwen()
    encoded = chat(
        [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hello")], tok
    )
    assert shown(encoded, tok) == [
        [
            (
                "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
                "<|im_start|>assistant\n",
                False,
            ),
            ("<think>\n\n</think>\n\nHello<|im_end|>", True),
            ("\n", False),
        ]
    ]


def test_qwen3_multi_turn_with_reasoning_trains_each_turn_as_it_is_served():
    tok = qwen()
    encoded = chat(
        [
            user("1+1?"),
            assistant("2", reasoning_content="one and one"),
            user("and 1?"),
            assistant("3", reasoning_content="two and one"),
        ],
        tok,
        reasoning="keep",
    )
    first = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert shown(encoded, tok) == [
        [
            (first, False),
            ("<think>\none and one\n</think>\n\n2<|im_end|>", True),
            ("\n", False),
        ],
        [
            (
                first + "2<|im_end|>\n<|im_start|>user\nand 1?<|im_end|>\n<|im_start|>assistant\n",
                False,
            ),
            ("<think>\ntwo and one\n</think>\n\n3<|im_end|>", True),
            ("\n", False),
        ],
    ]


def test_qwen3_tool_turns_share_one_rendering_and_tool_responses_are_not_trained():
    tok = qwen()
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    encoded = chat(
        [
            user("Weather?"),
            assistant(
                None, reasoning_content="ask", tool_calls=[call("weather", '{"city": "Ulm"}')]
            ),
            {"role": "tool", "name": "weather", "content": "sun"},
            {"role": "tool", "name": "weather", "content": "wind"},
            assistant("Sunny.", reasoning_content="told"),
        ],
        tok,
        tools=json.dumps(tools),
    )
    (pieces,) = shown(encoded, tok)
    assert [trained for _, trained in pieces] == [False, True, False, True, False]
    assert json.dumps(tools[0]) in pieces[0][0]
    assert pieces[0][0].endswith("<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n")
    assert [text for text, _ in pieces[1:]] == [
        "<think>\nask\n</think>\n\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><|im_end|>',
        "\n<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nwind\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "<think>\ntold\n</think>\n\nSunny.<|im_end|>",
        "\n",
    ]


def test_qwen3_tool_chain_before_a_new_question_keeps_its_reasoning_in_its_own_rendering():
    tok = qwen()
    encoded = chat(
        [
            user("a?"),
            assistant("", reasoning_content="r1", tool_calls=[call("f", {})]),
            {"role": "tool", "content": "x"},
            assistant("A", reasoning_content="r2"),
            user("b?"),
            assistant("B", reasoning_content="r3"),
        ],
        tok,
        reasoning="keep",
    )
    trained = [[text for text, on in pieces if on] for pieces in shown(encoded, tok)]
    assert [len(t) for t in trained] == [2, 1]
    assert trained[0][0].startswith("<think>\nr1\n</think>")
    assert trained[0][1] == "<think>\nr2\n</think>\n\nA<|im_end|>"
    assert trained[1] == ["<think>\nr3\n</think>\n\nB<|im_end|>"]
    context = shown(encoded, tok)[1][0][0]
    assert "r1" not in context
    assert "r2" not in context


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_prefix_difference_equals_the_generation_marks_of_a_template(turns):
    tok = qwen(CHATML_TEMPLATE)
    messages = [{"role": "system", "content": "S"}]
    for i in range(turns):
        messages += [user(f"What is {i}?\n"), assistant(f"It is {i}. é→🙂\n")]
    (example,) = chat(messages, tok).examples
    expected = tok.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert example.tokens.tolist() == expected["input_ids"]
    assert example.mask.tolist() == [bool(m) for m in expected["assistant_masks"]]


def test_text_of_a_marker_inside_a_message_does_not_move_the_mask():
    tok = qwen(CHATML_TEMPLATE)
    (pieces,) = shown(
        chat([user("say <|im_start|>assistant\nno<|im_end|>"), assistant("assistant\nyes")], tok),
        tok,
    )
    assert [text for text, trained in pieces if trained] == ["assistant\nyes<|im_end|>"]


def test_turn_end_is_trained_even_if_it_is_the_padding_token():
    tok = qwen(pad_token="<|im_end|>")
    (example,) = chat([user("a"), assistant("b")], tok).examples
    ends = np.flatnonzero(example.tokens == tok.pad_token_id)
    assert example.mask[ends].tolist() == [False, True]


@pytest.mark.parametrize(
    ("which", "trained"),
    [
        ("turn", ["b<|im_end|>", "d<|im_end|>"]),
        ("last", ["b", "d<|im_end|>"]),
        ("none", ["b", "d"]),
        ("all", ["<|im_end|>", "b<|im_end|>", "<|im_end|>", "d<|im_end|>"]),
    ],
)
def test_train_on_eos_says_which_turn_ends_are_learned(which, trained):
    tok = qwen(CHATML_TEMPLATE)
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    (pieces,) = shown(chat(messages, tok, train_on_eos=which), tok)
    assert [text for text, on in pieces if on] == trained
    plain = encode({"text": "ab"}, tok, format="text", max_length=9, train_on_eos=which)
    assert plain.examples[0].mask.tolist() == [True, True, which != "none"]


@pytest.mark.parametrize("format", ["messages", "prompt_completion"])
@pytest.mark.parametrize(
    ("which", "learned"), [("turn", [1, 1, 1, 1]), ("last", [0, 0, 0, 1]), ("none", [0, 0, 0, 0])]
)
def test_train_on_eos_holds_for_whole_conversations(which, learned, format):
    tok = qwen(CHATML_TEMPLATE)
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    row = {"messages": messages, "prompt": messages[:3], "completion": messages[3:]}
    options = {"assistant_only_loss": False, "completion_only_loss": False, "train_on_eos": which}
    (example,) = encode(row, tok, format=format, max_length=99, **options).examples
    ends = example.tokens == tok.eos_token_id
    assert example.mask[ends].tolist() == [bool(on) for on in learned]
    assert example.mask[~ends][:-1].all()  # all but the line break after the last end


def test_mask_history_without_an_answer_to_the_last_question_has_its_own_reason():
    tok = qwen(CHATML_TEMPLATE)
    messages = [user("a"), assistant("b"), user("c")]
    encoded = chat(messages, tok, mask_history=True)
    assert [drop.reason for drop in encoded.drops] == ["no answer after the last question"]
    encoded = chat([*messages, assistant("")], tok, mask_history=True)
    assert [drop.reason for drop in encoded.drops] == ["empty answer"]


def test_mask_history_learns_what_follows_the_last_question():
    tok = qwen()
    messages = [
        user("a?"),
        assistant("A"),
        user("b?"),
        assistant("", reasoning_content="r", tool_calls=[call("f", {})]),
        {"role": "tool", "content": "x"},
        assistant("B"),
    ]
    (pieces,) = shown(chat(messages, tok, mask_history=True), tok)
    assert [text for text, on in pieces if on] == [
        '<think>\nr\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n'
        "</tool_call><|im_end|>",
        "<think>\n\n</think>\n\nB<|im_end|>",
    ]


@pytest.mark.parametrize(("field", "no", "yes"), [("weight", 0, 1), ("train", False, True)])
def test_a_message_of_weight_zero_is_context(field, no, yes):
    tok = qwen(CHATML_TEMPLATE)
    turns = [user("a"), assistant("b", **{field: no}), user("c"), assistant("d", **{field: yes})]
    (pieces,) = shown(chat(turns, tok), tok)
    assert [text for text, on in pieces if on] == ["d<|im_end|>"]
    encoded = chat(turns[:2], tok)
    assert (encoded.examples, encoded.drops[0].reason) == ((), "every answer has weight 0")
    with pytest.raises(InputError, match=r"weight 0.*assistant_only_loss: false"):
        chat(turns, tok, assistant_only_loss=False)
    row = {"prompt": turns[:3], "completion": turns[3:]}
    options = {"format": "prompt_completion", "max_length": 99, "completion_only_loss": False}
    with pytest.raises(InputError, match=r"weight 0.*data\.completion_only_loss: false"):
        encode(row, tok, **options)


# A template that rewrites earlier turns: what is to happen is for the user to say.

THOUGHTS = [
    user("1+1?"),
    assistant("2", reasoning_content="one and one"),
    user("and 1?"),
    assistant("3", reasoning_content="two and one"),
]


def test_a_template_that_rewrites_earlier_turns_is_an_error_until_the_user_chooses():
    with pytest.raises(InputError) as error:
        chat(THOUGHTS, qwen())
    said = str(error.value)
    assert said.startswith("f.jsonl:7, message 1: the chat template writes this assistant turn")
    assert r"('<think>\none and one\n</think>\n\n2<|im_end|' becomes '2<|im_end|>\n<|im_" in said
    assert "data.reasoning to keep" in said


def test_reasoning_last_learns_the_turns_that_the_whole_conversation_shows_as_served():
    tok = qwen()
    encoded = chat(THOUGHTS, tok, reasoning="last")
    assert [[text for text, on in pieces if on] for pieces in shown(encoded, tok)] == [
        ["<think>\ntwo and one\n</think>\n\n3<|im_end|>"]
    ]
    assert encoded.rewritten == 1


def test_reasoning_drop_takes_it_out_of_field_and_text():
    tok = qwen(CHATML_TEMPLATE)
    turns = [user("a"), assistant("<think>\nwhy\n</think>\n\nb", reasoning="so")]
    (pieces,) = shown(chat(turns, tok, reasoning="drop"), tok)
    assert [text for text, on in pieces if on] == ["b<|im_end|>"]
    encoded = chat(THOUGHTS, qwen(), reasoning="drop")
    assert [[text for text, on in pieces if on] for pieces in shown(encoded, tok)] == [
        ["<think>\n\n</think>\n\n2<|im_end|>"],
        ["<think>\n\n</think>\n\n3<|im_end|>"],
    ]


def test_a_template_that_appends_needs_no_choice():
    tok = qwen(CHATML_TEMPLATE)
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    for reasoning in (None, "keep", "drop", "last"):
        encoded = chat(messages, tok, reasoning=reasoning)
        assert (len(encoded.examples), encoded.rewritten) == (1, 0)
        assert tok.decode(encoded.examples[0].tokens[encoded.examples[0].mask]) == (
            "b<|im_end|>d<|im_end|>"
        )


def test_an_encoder_runs_in_another_process():
    """A pure function of the row: a copy that went through pickle gives the same tokens."""
    encoder = Encoder(qwen(), format="messages", max_length=64, reasoning="keep")
    row = {"messages": THOUGHTS}
    before = encoder(row, where="r")
    again = pickle.loads(pickle.dumps(encoder))(row, where="r")
    assert [e.tokens.tolist() for e in again.examples] == [
        e.tokens.tolist() for e in before.examples
    ]
    assert [e.mask.tolist() for e in again.examples] == [e.mask.tolist() for e in before.examples]
    assert row == {"messages": THOUGHTS}


def test_template_begin_token_is_not_doubled():
    tok = llama()
    (example,) = chat([user("a"), assistant("b")], tok).examples
    assert (example.tokens == tok.bos_token_id).sum() == 1
    assert tok.decode(example.tokens[example.mask]) == " b</s>"
    plain = encode({"text": "a"}, tok, format="text", max_length=9).examples[0]
    assert tok.decode(plain.tokens) == "<s>a</s>"


def test_a_token_never_reaches_from_the_prompt_into_the_answer():
    # "\n" of the generation prompt and "\n" of the answer would be one token in this vocabulary.
    tok = qwen(CHATML_TEMPLATE)
    assert len(tok("\n\n", add_special_tokens=False)["input_ids"]) == 1
    messages = [user("a"), assistant("\nblue"), user("b"), assistant("\nIt is")]
    (example,) = chat(messages, tok).examples
    assert tok.decode(example.tokens[example.mask]) == "\nblue<|im_end|>\nIt is<|im_end|>"
    prompt = tok.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert example.mask[: len(prompt) + 1].tolist() == [False] * len(prompt) + [True]
    row = {"prompt": "What is it? ", "completion": "It is"}
    (example,) = encode(row, tok, format="prompt_completion", max_length=99).examples
    assert tok.decode(example.tokens[example.mask]) == "It is<|im_end|>"


def test_prompt_completion_strings_train_the_completion_and_the_end():
    tok = qwen(None)
    row = {"prompt": "What is it? ", "completion": "blue"}
    (pieces,) = shown(encode(row, tok, format="prompt_completion", max_length=99), tok)
    assert pieces == [("What is it? ", False), ("blue<|im_end|>", True)]
    whole = encode(
        row, tok, format="prompt_completion", max_length=99, completion_only_loss=False
    ).examples[0]
    assert whole.mask.all()


def test_prompt_completion_messages_train_only_the_completion():
    tok = qwen(CHATML_TEMPLATE)
    row = {"prompt": [user("a"), assistant("b"), user("c")], "completion": [assistant("d")]}
    (pieces,) = shown(encode(row, tok, format="prompt_completion", max_length=99), tok)
    assert [text for text, trained in pieces if trained] == ["d<|im_end|>"]
    assert "b<|im_end|>" in pieces[0][0]


def test_without_assistant_only_loss_a_conversation_is_one_example_all_trained():
    tok = qwen()
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    (pieces,) = shown(chat(messages, tok, assistant_only_loss=False), tok)
    expected = tok.apply_chat_template(messages, tokenize=False)
    assert pieces == [(expected.rstrip("\n"), True), ("\n", False)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"q": "é", "n": None}, {"q": "é", "n": None}),
        ('{"q": "é"}', {"q": "é"}),
        (json.dumps(json.dumps({"q": 1})), {"q": 1}),
        (None, {}),
    ],
)
def test_arguments_are_encoded_once(arguments, expected):
    tok = qwen()
    messages = [user("a"), assistant("", tool_calls=[call("f", arguments)])]
    text = "".join(t for t, _ in shown(chat(messages, tok), tok)[0])
    body = text.split("<tool_call>\n")[1].split("\n</tool_call>")[0]
    assert json.loads(body) == {"name": "f", "arguments": expected}


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = conversation.messages([{"role": "user", "content": parts}], where="r")
    assert message == {"role": "user", "content": "ab"}


# Truncation.


def test_truncation_right_keeps_the_start_and_counts():
    tok = qwen(CHATML_TEMPLATE)
    whole = chat([user("a"), assistant("b" * 20)], tok).examples[0]
    encoded = chat([user("a"), assistant("b" * 20)], tok, max_length=20)
    (example,) = encoded.examples
    assert example.tokens.tolist() == whole.tokens[:20].tolist()
    assert encoded.truncated == 1
    assert encoded.lost_trained_tokens == whole.trained_tokens - example.trained_tokens > 0


def test_truncation_left_keeps_the_end():
    tok = qwen(CHATML_TEMPLATE)
    messages = [user("a" * 50), assistant("b")]
    (example,) = chat(messages, tok, max_length=12, truncation_strategy="left").examples
    assert tok.decode(example.tokens[example.mask]) == "b<|im_end|>"


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("right", "no trained token left after truncation"),
        ("delete", "longer than max_length"),
    ],
)
def test_a_row_without_trained_tokens_left_is_dropped_and_counted(strategy, reason):
    tok = qwen(CHATML_TEMPLATE)
    messages = [user("a" * 500), assistant("b")]
    encoded = chat(messages, tok, max_length=30, truncation_strategy=strategy)
    assert encoded.examples == ()
    assert [drop.reason for drop in encoded.drops] == [reason]
    assert encoded.lost_trained_tokens == 2


@pytest.mark.parametrize("length", [2, 3, 7, 10, 11])
def test_split_predicts_every_token_exactly_once(length):
    tok = qwen(None)
    row = {"text": "0123456789"}
    (whole,) = encode(row, tok, format="text", max_length=99).examples
    pieces = encode(row, tok, format="text", max_length=length, truncation_strategy="split")
    targets = np.concatenate([e.tokens[1:] for e in pieces.examples])
    assert targets.tolist() == whole.tokens[1:].tolist()
    assert max(len(e.tokens) for e in pieces.examples) <= length
    assert pieces.lost_trained_tokens == 0


def test_empty_text_has_nothing_to_predict():
    encoded = encode({"text": ""}, qwen(None), format="text", max_length=9)
    assert encoded.examples == ()
    assert encoded.drops[0].reason == "nothing to predict"


@pytest.mark.parametrize("nothing", ["", " \n"])
def test_an_empty_answer_is_not_learned(nothing):
    """Its end alone would be learned, that is, to say nothing."""
    tok = qwen(CHATML_TEMPLATE)
    encoded = chat([user("a"), assistant(nothing)], tok)
    assert encoded.examples == ()
    assert [drop.reason for drop in encoded.drops] == ["empty answer"]
    row = {"prompt": "a", "completion": nothing}
    encoded = encode(row, tok, format="prompt_completion", max_length=99)
    assert (encoded.examples, encoded.drops[0].reason) == ((), "empty answer")
    messages = [user("a"), assistant(nothing), user("b"), assistant("c")]
    (example,) = chat(messages, tok).examples
    assert tok.decode(example.tokens[example.mask]) == "c<|im_end|>"


def test_reasoning_and_tool_calls_are_an_answer():
    for answer in (
        assistant("", reasoning_content="why"),
        assistant("", tool_calls=[call("f", {})]),
    ):
        (example,) = chat([user("a"), answer], qwen()).examples
        assert example.trained_tokens > 2


def test_messages_of_sharegpt_are_messages():
    roles = [("system", "s"), ("human", "q"), ("gpt", "a"), ("user", "r"), ("assistant", "b")]
    theirs = [{"from": role, "value": text} for role, text in roles]
    ours = [
        {"role": "system", "content": "s"},
        user("q"),
        assistant("a"),
        user("r"),
        assistant("b"),
    ]
    assert chat(theirs, qwen(), reasoning="last").examples[0].tokens.tolist() == (
        chat(ours, qwen(), reasoning="last").examples[0].tokens.tolist()
    )


def test_tool_turns_of_sharegpt_are_calls_and_responses():
    tok = qwen()
    theirs = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "r"},
        {"from": "gpt", "value": "a"},
    ]
    ours = [
        user("q"),
        assistant(None, tool_calls=[call("f", {"x": 1})]),
        {"role": "tool", "content": "r"},
        assistant("a"),
    ]
    row = {"conversations": theirs, "system": "s", "tools": None}
    got = encode(row, tok, format="sharegpt", max_length=999, reasoning="keep")
    expected = chat([{"role": "system", "content": "s"}, *ours], tok, reasoning="keep")
    assert shown(got, tok) == shown(expected, tok)
    assert '{"name": "f", "arguments": {"x": 1}}' in shown(got, tok)[0][1][0]
    earlier = [
        user("q"),
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "f", "content": "r"},
        assistant("a"),
    ]
    assert conversation.messages(earlier, where="r")[1:3] == [
        {"role": "assistant", "content": "", "tool_calls": [call("f", {"x": 1})]},
        {"role": "tool", "name": "f", "content": "r"},
    ]


@pytest.mark.parametrize("form", [list, json.dumps])
def test_a_sharegpt_row_has_one_system_message(form):
    tok = qwen(CHATML_TEMPLATE)
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    options = {"format": "sharegpt", "max_length": 99}
    row = {"conversations": form(turns), "system": "Sum"}
    (pieces,) = shown(encode(row, tok, **options), tok)
    assert pieces[0][0].startswith("<|im_start|>system\nSum<|im_end|>")
    row["conversations"] = form([{"from": "system", "value": "Add"}, *turns])
    with pytest.raises(InputError, match="`system` column and a system message"):
        encode(row, tok, **options)


def test_messages_may_be_json_text():
    messages = [user("a"), assistant("b")]
    assert conversation.messages(json.dumps(messages), where="r") == messages


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"instruction": "Add.", "input": "1 1", "output": "2"}, "Add.\n\n1 1"),
        ({"instruction": "Add.", "input": "", "output": "2"}, "Add."),
        ({"instruction": "Add.", "output": "2", "system": "Sum"}, "Add."),
    ],
)
def test_alpaca_is_a_question_and_its_answer(row, asked):
    tok = qwen(CHATML_TEMPLATE)
    (pieces,) = shown(encode(row, tok, format="alpaca", max_length=999), tok)
    system = "<|im_start|>system\nSum<|im_end|>" if "system" in row else ""
    assert pieces == [
        (f"{system}<|im_start|>user\n{asked}<|im_end|><|im_start|>assistant\n", False),
        ("2<|im_end|>", True),
    ]


# Bad input: each error names the row.


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([user("a")], "no assistant message to train on"),
        ([assistant("a")], "starts with an assistant message"),
        ([], "non-empty list of messages"),
        (7, "non-empty list of messages"),
        ([{"human": "x"}], "`role` and `content`"),
        (
            [{"from": "narrator", "value": "x"}],
            "'narrator' is unknown, expected one of system",
        ),
        ([{"from": "human"}], "has no `content`"),
        ([{"from": "function_call", "value": "{"}], "`function_call` is not valid JSON"),
        ([user("a"), assistant("b", weight=0.5)], "`weight` must be 0 or 1"),
        ([user("a"), assistant("b", train="no")], "`train` must be 0 or 1"),
        ([user("a"), assistant("b", train=True, weight=0)], "say different things"),
        ([user("a"), assistant("b", thinking=["x"])], "`thinking` must be a string"),
        ('[{"role": ', "`messages` is not valid JSON"),
        ([{"role": "human", "content": "x"}], "role 'human' is unknown"),
        ([{"role": "user"}], "has no `content`"),
        ([{"role": "user", "content": {"a": 1}}], "must be a string"),
        ([{"role": "user", "content": [{"type": "image"}]}], "only text parts"),
        ([user("a"), assistant("b", reasoning_content=3)], "`reasoning_content` must be"),
        ([user("a"), assistant("b", tool_calls=[call("f", "{")])], "not valid JSON"),
        ([user("a"), assistant("b", tool_calls=[call("f", "[1]")])], "must be a JSON object"),
        ([user("a"), assistant("b", tool_calls=[{"x": 1}])], "`name` and `arguments`"),
        ([user("a"), assistant("b", tool_calls="f")], "must be a list"),
        ([user("a") | {"tool_calls": [call("f", {})]}], "only an assistant message"),
        ([user("a"), assistant("b"), assistant("c")], "join neighbouring assistant messages"),
    ],
)
def test_a_malformed_conversation_names_row_and_fault(messages, says):
    with pytest.raises(InputError, match=r"^f\.jsonl:7.*") as error:
        chat(messages, qwen())
    assert says in str(error.value)


@pytest.mark.parametrize("tools", ["[", {"a": 1}, ["f"], '{"a": 1}'])
def test_bad_tools_name_the_row(tools):
    with pytest.raises(InputError, match=r"f\.jsonl:7: `tools`"):
        chat([user("a"), assistant("b")], qwen(), tools=tools)


def test_a_template_that_loses_what_the_row_has_is_an_error():
    plain = qwen(CHATML_TEMPLATE)
    with pytest.raises(InputError, match="does not show the `reasoning_content`"):
        chat([user("a"), assistant("b", reasoning_content="why")], plain)
    with pytest.raises(InputError, match="does not show the `tool_calls`"):
        chat([user("a"), assistant("b", tool_calls=[call("lookup", {})])], plain)
    with pytest.raises(InputError, match="does not show the `tools`"):
        chat([user("a"), assistant("b")], plain, tools=[{"name": "f"}])


def test_a_template_that_writes_either_text_or_calls_is_an_error():
    either = qwen(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}"
        "{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    calls = {"tool_calls": [call("lookup", {})]}
    with pytest.raises(InputError, match=r"^f\.jsonl:7, message 1: .*not show the `content`"):
        chat([user("a"), assistant("Let me look.", **calls)], either)
    (pieces,) = shown(chat([user("a"), assistant("", **calls)], either), either)
    assert pieces[-1] == ("lookup<|im_end|>", True)
    thought = assistant("<think>\nwhy\n</think>\n\nLet me look.", **calls)
    assert "Let me look." in shown(chat([user("a"), thought], qwen()), qwen())[0][1][0]


def test_an_empty_mask_and_a_full_mask_are_errors():
    deaf = qwen("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(InputError, match=r"f\.jsonl:7: no token would be trained"):
        chat([user("a"), assistant("b")], deaf)
    silent = qwen("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(InputError, match=r"f\.jsonl:7: every token would be trained"):
        chat([user(""), assistant("b")], silent)


def test_a_template_that_refuses_the_row_is_an_error():
    strict = qwen("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match=r"f\.jsonl:7.*roles must alternate"):
        chat([user("a"), assistant("b")], strict)


def test_a_template_that_rewrites_the_prompt_is_an_error():
    counting = qwen("{{ messages | length }}" + CHATML_TEMPLATE)
    with pytest.raises(InputError, match=r"f\.jsonl:7, message 1: .*no prompt would lead to it"):
        chat([user("a"), assistant("b")], counting)


def test_prompt_and_completion_of_different_kinds_are_an_error():
    row = {"prompt": "a", "completion": [assistant("b")]}
    with pytest.raises(InputError, match=r"row: `completion` must be a string"):
        encode(row, qwen(), format="prompt_completion", max_length=9)


def test_max_length_below_two_is_an_error():
    with pytest.raises(InputError, match="at least 2"):
        encode({"text": "a"}, qwen(), format="text", max_length=1)


# Loading tokenizers.


def test_load_reads_a_model_folder_with_its_template(tmp_path):
    saved = qwen()
    saved.save_pretrained(tmp_path)
    loaded = tokenizer.load(str(tmp_path), vocab_size=len(saved))
    messages = [user("a"), assistant("b")]
    tokenizer.require_chat_template(loaded)
    assert chat(messages, loaded).examples[0].tokens.tolist() == (
        chat(messages, saved).examples[0].tokens.tolist()
    )


def test_a_template_file_overrides(tmp_path):
    qwen().save_pretrained(tmp_path)
    file = tmp_path / "mine.jinja"
    file.write_text(CHATML_TEMPLATE)
    loaded = tokenizer.load(str(tmp_path))
    tokenizer.use_template(loaded, str(file))
    assert loaded.chat_template == CHATML_TEMPLATE
    with pytest.raises(InputError, match=r"absent\.jinja"):
        tokenizer.use_template(loaded, str(tmp_path / "absent.jinja"))


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    saved = qwen()
    saved.add_tokens(["<extra>"])
    saved.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"1 tokens beyond the model's vocabulary.*<extra>"):
        tokenizer.load(str(tmp_path), vocab_size=len(saved) - 1)


def test_missing_broken_and_templateless_tokenizers_are_errors(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        tokenizer.load(str(tmp_path / "absent"))
    with pytest.raises(InputError, match="no tokenizer can be loaded"):
        tokenizer.load(str(tmp_path))
    with pytest.raises(InputError, match="has no chat template"):
        tokenizer.require_chat_template(qwen(None))
    qwen().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="no tokenizer can be loaded"):
        tokenizer.load(str(tmp_path))


def test_templates_cannot_reach_python():
    evil = qwen("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InputError, match="unsafe"):
        chat([user("a"), assistant("b")], evil)
