# SPDX-License-Identifier: Apache-2.0
"""Orders in plain English and the same as JSON: a task for a real model, learnt in minutes.

Goods, people, places and half of the phrasings of the held-out orders occur in no training order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from lora_tune.assets.conversations import Conversation, conversation
from lora_tune.assets.general import QUESTIONS
from lora_tune.assets.skills import Exchange

INSTRUCTION = "Write this order as JSON: "
_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_COLOURS = ("red", "blue", "green", "black", "white", "yellow", "brown", "grey")
# The first of each belong to training, those behind the bar to the held-out orders.
_GOODS = """
kettle chair lamp ladder basket blanket bucket cushion candle mirror clock broom towel jug
hammer vase bench rope saddle pillow | teapot stool lantern crate ribbon tripod drum kite
"""
_PEOPLE = """
Mira Tom Ada Bruno Clara David Elsa Felix Greta Hugo Ines Jonas Karin Leo Marta Nils Olga Paul
Rosa Simon Tessa Viktor | Anton Berta Carlo Dora Emil Frida Gustav Helga
"""
_PLACES = """
Tarnby Oldbridge Fenwick Marlow Ashford Redhill Stonegate Millbrook Harwich Eastvale Norbury
Whitmore Larkfield Copley | Westford Kingsmere Hollin Brackley Silverton Dunmoor
"""
# What a phrasing leaves out is null in the answer.
_PHRASINGS = (
    "{count} {goods} for {name} in {place} by {day}, please.",
    "Please send {count} {goods} to {name} in {place} before {day}.",
    "{name} from {place} would like {count} {goods} on {day}.",
    "On {day}, {name} needs {count} {goods} in {place}.",
    "Could you bring {count} {goods} to {place}? They are for {name}.",
    "{name} asks for {count} {goods}, to be there on {day}.",
    "We need {count} {goods} in {place} by {day}.",
    "{name} wants {count} {goods}.",
)
_HELD_OUT_PHRASINGS = (
    "Hello, this is {name}. Can I have {count} {goods} in {place} on {day}?",
    "By {day}, {count} {goods} have to be in {place} for {name}.",
    "I am {name} and I am looking for {count} {goods}.",
    "{count} {goods} to {place}, for {name}.",
)


def orders(
    train_count: int, eval_count: int, *, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    """Draw both sets, each of exactly so many conversations.

    Among the training orders there are all `QUESTIONS`, lest everything become an order.
    """
    rng = random.Random(seed)
    train = _draw(rng, train_count - len(QUESTIONS), 0, _PHRASINGS)
    held_out = _draw(rng, eval_count, 1, _PHRASINGS + _HELD_OUT_PHRASINGS * 2)
    train += QUESTIONS
    rng.shuffle(train)
    return [conversation([e]) for e in train], [conversation([e]) for e in held_out]


def _draw(rng: random.Random, count: int, part: int, phrasings: Sequence[str]) -> list[Exchange]:
    """Different orders from one part of the words."""
    goods, people, places = (text.split("|")[part].split() for text in (_GOODS, _PEOPLE, _PLACES))
    found: dict[str, str] = {}
    while len(found) < count:
        number = rng.randrange(len(_NUMBERS))
        item = f"{rng.choice(_COLOURS)} {rng.choice(goods)}"
        order = {
            "item": item,
            "count": number + 2,
            "name": rng.choice(people),
            "place": rng.choice(places),
            "day": rng.choice(_DAYS),
        }
        phrasing = rng.choice(phrasings)
        spelt = _NUMBERS[number] if rng.random() < 0.7 else str(number + 2)
        words = {**order, "count": spelt, "goods": item + ("es" if item.endswith("ch") else "s")}
        text = phrasing.format(**words)
        text = text[0].upper() + text[1:]
        absent = {key for key in ("name", "place", "day") if f"{{{key}}}" not in phrasing}
        answer = {key: None if key in absent else value for key, value in order.items()}
        found[INSTRUCTION + text] = json.dumps(answer)
    return list(found.items())
