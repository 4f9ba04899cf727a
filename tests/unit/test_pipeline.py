# SPDX-License-Identifier: Apache-2.0
import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from chat_tokenizers import CHATML_TEMPLATE, qwen

from lora_tune.data import batch, sources
from lora_tune.data.dataset import Dataset, eval_batches
from lora_tune.data.encode import BAD_ROW, encode_rows
from lora_tune.data.examples import DataReport, Examples, Part, join
from lora_tune.data.messages import Encoder, Example
from lora_tune.errors import InputError


def documents(lengths, seed=0):
    """Random documents; token ids are unique, so that a leak would be seen."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = rng.random(offsets[-1]) < 0.5
    mask[offsets[1:] - 1] = True
    trained = int(mask.sum() - mask[offsets[:-1]].sum())
    report = DataReport(len(lengths), len(lengths), int(offsets[-1]), trained, {}, 0, 0)
    tokens = np.arange(1, offsets[-1] + 1, dtype=np.int32)
    rows, lengths = np.arange(len(lengths)), np.asarray(lengths, np.int64)
    targets = np.add.reduceat(mask, offsets[:-1], dtype=np.int64) - mask[offsets[:-1]]
    return Examples((Part(tokens, mask, lengths, rows, targets, report),))


def dataset(examples, **options):
    defaults = {"max_length": 16, "batch_size": 3, "packing": True, "seed": 5}
    return Dataset(examples, **(defaults | options))


def trained(arrays):
    """Every (position's token, its target) pair that the loss sees."""
    on = arrays["weights"] > 0
    return Counter(zip(arrays["tokens"][on].tolist(), arrays["targets"][on].tolist(), strict=True))


def expected_pairs(examples, ids=None):
    pairs = Counter()
    for i in range(len(examples)) if ids is None else ids:
        tokens, mask = examples[i].tokens.tolist(), examples[i].mask
        pairs.update((a, b) for a, b, m in zip(tokens, tokens[1:], mask[1:], strict=False) if m)
    return pairs


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


# Arrays.


def test_golden_arrays_of_a_packed_row():
    rows = [
        [
            Example(np.array([5, 6, 7], np.int32), np.array([False, True, True])),
            Example(np.array([8, 9], np.int32), np.array([True, True])),
        ],
        [],
    ]
    got = batch.build(rows, max_length=6)
    expected = {
        "tokens": [[5, 6, 7, 8, 9, 0], [0] * 6],
        "targets": [[6, 7, 0, 9, 0, 0], [0] * 6],
        "weights": [[1, 1, 0, 1, 0, 0], [0] * 6],
        "segment_ids": [[1, 1, 1, 2, 2, 0], [0] * 6],
        "positions": [[0, 1, 2, 0, 1, 0], [0] * 6],
    }
    assert {name: array.tolist() for name, array in got.items()} == expected
    assert {name: str(array.dtype) for name, array in got.items()} == {
        name: "float32" if name == "weights" else "int32" for name in expected
    }


def test_the_last_token_of_a_document_never_predicts_the_next_document():
    examples = documents([5, 4, 7, 3, 6, 2, 9])
    for _, arrays in islice(dataset(examples).batches(), 6):
        segments = arrays["segment_ids"]
        ends = segments[:, :-1] != segments[:, 1:]
        assert ends.any()
        assert not arrays["weights"][:, :-1][ends].any()
        assert not arrays["weights"][:, -1].any()


def test_the_mask_reaches_the_weights():
    """Weighted loss does not move when labels of untrained tokens change."""
    tok = qwen(CHATML_TEMPLATE)
    messages = [{"role": "user", "content": "q" * 5}, {"role": "assistant", "content": "a" * 5}]
    encoder = Encoder(tok, format="messages", max_length=64)
    (example,) = encoder({"messages": messages}, where="r").examples
    arrays = batch.build([[example]], max_length=64)
    on = arrays["weights"][0] > 0
    assert tok.decode(arrays["targets"][0][on]) == "aaaaa<|im_end|>"
    nll = np.random.default_rng(0).random((64, len(tok)))
    other = np.where(on, arrays["targets"][0], (arrays["targets"][0] + 1) % len(tok))
    before, after = (
        (nll[np.arange(64), t] * arrays["weights"][0]).sum() for t in (arrays["targets"][0], other)
    )
    assert before == after


# Conservation.


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_trains_every_token_exactly_once(packing):
    examples = documents([5, 4, 7, 3, 6, 2, 9, 16])
    data = dataset(examples, packing=packing, batch_size=1)
    seen, ids = Counter(), []
    for step, arrays in islice(data.batches(), data.steps(1)):
        seen += trained(arrays)
        ids += [i for row in data.example_ids(step) for i in row]
    assert sorted(ids) == list(range(8))
    assert seen == expected_pairs(examples)
    assert seen.total() == examples.report.trained_tokens


def test_rows_to_report_account_for_every_trained_token(tmp_path):
    tok = qwen(CHATML_TEMPLATE)

    def chat(question, answer):
        turns = (("user", question), ("assistant", answer))
        return {"messages": [{"role": r, "content": c} for r, c in turns]}

    rows = [chat("q", "a" * 3), chat("q", "b" * 60), chat("q" * 80, "c")]
    path = write(tmp_path / "a.jsonl", rows)
    calls = []
    examples = encode_rows(
        sources.read(path),
        Encoder(tok, format="messages", max_length=40),
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(3, 3)]
    report = examples.report
    assert (report.rows, report.examples, report.truncated) == (3, 2, 2)
    assert report.drops == {"no trained token left after truncation": 1}
    wanted = (3 + 1) + (60 + 1) + (1 + 1)
    assert report.trained_tokens + report.lost_trained_tokens == wanted
    assert report.trained_tokens == expected_pairs(examples).total()
    assert report.tokens == examples.lengths.sum()
    assert examples.rows.tolist() == [0, 1]


def test_packing_efficiency_is_the_share_of_positions_that_hold_tokens():
    examples = documents([8, 8, 8, 4])
    assert dataset(examples).report.packing_efficiency == 28 / 32
    assert dataset(examples, packing=False).report.packing_efficiency == 28 / 64


# Several sources.


def text_examples(tmp_path, name, texts, **options):
    path = write(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts])
    encoder = Encoder(qwen(None), format="text", max_length=16)
    return encode_rows(sources.read(path), encoder, name=name, **options)


def test_joined_sources_keep_examples_and_counts(tmp_path):
    parts = [text_examples(tmp_path, "a", ["x", "yy" * 20]), text_examples(tmp_path, "b", ["z"])]
    whole = join(parts)
    singles = [part[i] for part in parts for i in range(len(part))]
    assert [whole[i].tokens.tolist() for i in range(3)] == [e.tokens.tolist() for e in singles]
    assert [whole[i].mask.tolist() for i in range(3)] == [e.mask.tolist() for e in singles]
    assert whole.rows.tolist() == [0, 1, 0]
    assert [(r.source, r.rows, r.examples) for r in whole.sources] == [("a", 2, 2), ("b", 1, 1)]
    report = whole.report
    assert report.trained_tokens == sum(e.trained_tokens for e in singles)
    assert report.all_trained_tokens == report.trained_tokens + report.lost_trained_tokens
    assert (report.rows, report.truncated) == (3, 1)


def test_a_mixture_takes_its_shares_and_resumes(tmp_path):
    whole = join([text_examples(tmp_path, "a", "abcdef"), text_examples(tmp_path, "b", "gh")])
    data = dataset(whole, packing=False, batch_size=1, weights=[1, 3])
    ids = [data.example_ids(step)[0][0] for step in range(data.steps(3))]
    assert Counter(i >= 6 for i in ids) == {False: 6, True: 18}
    assert Counter(ids)[0] == 1  # three epochs of two examples each: every one of six once
    again = dataset(whole, packing=False, batch_size=1, weights=[1, 3])
    assert [again.example_ids(step)[0][0] for step in range(9, 24)] == ids[9:]
    with pytest.raises(InputError, match=r"mixture was \[6, 2\] by \[1, 3\], is None"):
        dataset(whole, packing=False, batch_size=1).check(data.position(3))


def test_malformed_rows_are_dropped_and_counted_if_that_is_asked_for(tmp_path):
    rows = [{"text": "a"}, {"text": 3}, {"id": 1}, {"text": "b"}]
    path = write(tmp_path / "a.jsonl", rows)
    encoder = Encoder(qwen(None), format="text", max_length=16)
    examples = encode_rows(
        sources.read(path, drop_bad_rows=True), encoder, name="a", drop_bad_rows=True
    )
    assert len(examples) == 2
    assert examples.report.drops == {BAD_ROW: 2}
    assert [said.split(": ")[0] for said in examples.report.bad_rows] == [f"{path}:3", f"{path}:2"]
    with pytest.raises(InputError, match=r"b\.jsonl:2: `text` must be a string"):
        encode_rows(sources.read(write(tmp_path / "b.jsonl", rows[:2])), encoder)


def test_a_choice_that_is_missing_is_never_a_dropped_row(tmp_path):
    turns = [(role, f"{i}") for i in range(2) for role in ("user", "assistant")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    path = write(tmp_path / "a.jsonl", [row])
    encoder = Encoder(qwen(), format="messages", max_length=64)
    with pytest.raises(InputError, match=r"set data\.reasoning to keep"):
        encode_rows(sources.read(path), encoder, drop_bad_rows=True)


# Order and resuming.


@pytest.mark.parametrize("packing", [True, False])
def test_resuming_gives_the_same_batches_and_examples(packing):
    examples = documents([5, 4, 7, 3, 6, 2, 9])
    whole = list(islice(dataset(examples, packing=packing).batches(), 10))
    again = dataset(examples, packing=packing)
    resumed = list(islice(again.batches(5), 5))
    assert [step for step, _ in resumed] == [5, 6, 7, 8, 9]
    for (step, arrays), (_, expected) in zip(resumed, whole[5:], strict=True):
        assert again.example_ids(step) == dataset(examples, packing=packing).example_ids(step)
        for name in expected:
            np.testing.assert_array_equal(arrays[name], expected[name])


def test_epochs_are_shuffled_differently_and_seeds_differ():
    examples = documents([16] * 50)
    data = dataset(examples, batch_size=50)
    first, second = ([row[0] for row in data.example_ids(step)] for step in (0, 1))
    other = [row[0] for row in dataset(examples, batch_size=50, seed=6).example_ids(0)]
    assert sorted(first) == sorted(second) == sorted(other) == list(range(50))
    assert len({tuple(first), tuple(second), tuple(other), tuple(range(50))}) == 4


def test_without_shuffle_rows_come_in_order():
    data = dataset(documents([3] * 5), shuffle=False, packing=False, batch_size=2)
    ids = [data.example_ids(step) for step in range(4)]
    assert ids == [[[0], [1]], [[2], [3]], [[4], [0]], [[1], [2]]]


def test_a_batch_may_span_epochs_and_be_larger_than_one():
    data = dataset(documents([3] * 2), packing=False, batch_size=7)
    ids = Counter(i for step in range(4) for row in data.example_ids(step) for i in row)
    assert ids == {0: 14, 1: 14}
    assert data.position(2) | {"fingerprint": ""} == {
        "step": 2,
        "epoch": 7,
        "row": 0,
        "fingerprint": "",
        "examples": 2,
        "max_length": 16,
        "batch_size": 7,
        "packing": False,
        "seed": 5,
        "shuffle": True,
    }


def test_steps_of_epochs():
    data = dataset(documents([3] * 7), packing=False, batch_size=2)
    assert [data.steps(e) for e in (0.5, 1, 2, 3)] == [2, 4, 7, 11]


def test_the_position_survives_json_and_refuses_other_data():
    examples = documents([5, 4, 7, 3])
    position = json.loads(json.dumps(dataset(examples).position(3)))
    dataset(examples).check(position)
    changed = documents([5, 4, 7, 3], seed=1)
    with pytest.raises(InputError, match=r"at step 3 was trained on \(other tokens\)"):
        dataset(changed).check(position)
    with pytest.raises(InputError, match="seed was 5, is 6"):
        dataset(examples, seed=6).check(position)
    with pytest.raises(InputError, match="batch_size was 3, is 4"):
        dataset(examples, batch_size=4).check(position)


def test_the_fingerprint_sees_boundaries():
    assert documents([2, 3]).fingerprint != documents([3, 2]).fingerprint


# Evaluation.


@pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 9])
@pytest.mark.parametrize("packing", [True, False])
def test_evaluation_sees_every_example_once_at_any_batch_size(batch_size, packing):
    examples = documents([5, 4, 7, 3, 6, 2, 9])
    seen = Counter()
    for arrays in eval_batches(examples, max_length=16, batch_size=batch_size, packing=packing):
        assert arrays["tokens"].shape == (batch_size, 16)
        seen += trained(arrays)
    assert seen == expected_pairs(examples)


def test_unpacked_evaluation_rows_are_examples_in_order_then_padding():
    examples = documents([5, 4, 7])
    got = list(eval_batches(examples, max_length=16, batch_size=2))
    lengths = [(arrays["segment_ids"] > 0).sum(axis=1).tolist() for arrays in got]
    assert lengths == [[5, 4], [7, 0]]
    assert all(not array[1].any() for array in got[1].values())


# Bad input.


def test_rows_that_cannot_be_encoded_are_named_together(tmp_path):
    only_user = {"messages": [{"role": "user", "content": "a"}]}
    encoder = Encoder(qwen(), format="messages", max_length=40)
    path = write(tmp_path / "a.jsonl", [only_user] * 2)
    with pytest.raises(InputError, match=r"^2 rows of .*a\.jsonl:1: .*a\.jsonl:2: "):
        encode_rows(sources.read(path), encoder)
    path = write(tmp_path / "b.jsonl", [only_user] * 9)
    with pytest.raises(InputError, match=r"^5 rows of .*\(stopped there\)"):
        encode_rows(sources.read(path), encoder)


def test_a_data_set_of_which_nothing_is_left_is_an_error(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "long text"}] * 2)
    encoder = Encoder(qwen(None), format="text", max_length=3, truncation_strategy="delete")
    with pytest.raises(InputError, match="no example of its 2 rows: 2 x longer than max_length"):
        encode_rows(sources.read(path), encoder)


def test_examples_longer_than_a_row_are_refused():
    with pytest.raises(InputError, match="has 17 tokens, more than max_length 16"):
        dataset(documents([3, 17]))
    with pytest.raises(ValueError, match="needs 17 tokens"):
        batch.build([[documents([17])[0]]], max_length=16)
