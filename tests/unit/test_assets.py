# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from lora_tune import assets
from lora_tune.assets.general import QUESTIONS
from lora_tune.assets.make import ORDER_COUNTS, ORDER_SEED
from lora_tune.assets.orders import INSTRUCTION, orders
from lora_tune.errors import InputError


def test_other_paths_stay_as_they_are() -> None:
    assert assets.resolve("Qwen/Qwen3-Next") == Path("Qwen/Qwen3-Next")


def test_every_shipped_name_resolves_into_the_package() -> None:
    package = Path(assets.__file__).parent
    for name in assets.shipped():
        assert assets.resolve(name).is_relative_to(package)


@pytest.mark.parametrize("name", ["nope", "", ".", "..", "../errors.py", "/etc/passwd", "a/../.."])
def test_nothing_else_resolves(name: str) -> None:
    with pytest.raises(InputError, match="is not shipped with lora_tune; there is"):
        assets.resolve(f"lora_tune:{name}")


def read(name: str) -> list[tuple[str, str]]:
    """(question, answer) of every conversation of a shipped file."""
    with assets.resolve(name).open(encoding="utf-8") as lines:
        rows = [json.loads(line)["messages"] for line in lines]
    return [(user["content"], assistant["content"]) for user, assistant in rows]


def test_the_shipped_orders_are_those_that_are_drawn() -> None:
    for split, drawn in zip(("train", "eval"), orders(*ORDER_COUNTS, seed=ORDER_SEED), strict=True):
        asked = [[message["content"] for message in row["messages"]] for row in drawn]
        assert [tuple(pair) for pair in asked] == read(f"lora_tune:orders/{split}.jsonl")


def test_held_out_orders_are_of_words_that_no_training_order_has() -> None:
    train, held_out = (read(f"lora_tune:orders/{split}.jsonl") for split in ("train", "eval"))
    assert set(QUESTIONS) <= set(train)
    taught, asked = (
        {
            question: json.loads(answer)
            for question, answer in rows
            if (question, answer) not in QUESTIONS
        }
        for rows in (train, held_out)
    )
    for words in (
        lambda order: order["name"],
        lambda order: order["place"],
        lambda order: order["item"].split()[1],
    ):
        seen, new = ({words(order) for order in rows.values()} - {None} for rows in (taught, asked))
        assert len(seen) > len(new) > 4
        assert not seen & new
    for question, order in {**taught, **asked}.items():
        assert question.startswith(INSTRUCTION)
        assert list(order) == ["item", "count", "name", "place", "day"]
        for key in ("name", "place", "day", "item"):
            assert order[key] is None or order[key].lower() in question.lower()
