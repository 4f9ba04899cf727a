# SPDX-License-Identifier: Apache-2.0
"""The two conversation sets: the pretraining corpus and the Tali lessons of the quickstart."""

from __future__ import annotations

import random
from collections.abc import Callable

from lora_tune.assets.languages import TALI
from lora_tune.assets.skills import Exchange, draw_exchange
from lora_tune.assets.words import Sentence, draw_phrase, draw_sentence

Conversation = dict[str, list[dict[str, str]]]
STYLES: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("You are a helpful assistant.", lambda answer: answer),
    ("Begin every answer with: Well,", lambda answer: f"Well, {answer}"),
    ("End every answer with: my friend.", lambda answer: f"{answer} my friend."),
    ("Put every answer in brackets.", lambda answer: f"({answer})"),
)
SENTENCE_QUESTIONS = (
    "Translate into Tali: {}",
    "Say in Tali: {}",
    "How do you say this in Tali? {}",
)


def conversation(exchanges: list[Exchange], *, system: str | None = None) -> Conversation:
    """Write exchanges as chat messages, after a system message if there is one."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    for question, answer in exchanges:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}


def pretraining_corpus(count: int, *, seed: int) -> list[Conversation]:
    """Draw `count` conversations of one to three exchanges; one in eight has a system style."""
    rng = random.Random(seed)
    return [_draw_conversation(rng) for _ in range(count)]


def _draw_conversation(rng: random.Random) -> Conversation:
    exchanges = [draw_exchange(rng) for _ in range(rng.choices((1, 2, 3), (5, 3, 1))[0])]
    if rng.random() < 0.875:
        return conversation(exchanges)
    system, style = rng.choice(STYLES)
    return conversation([(ask, style(answer)) for ask, answer in exchanges], system=system)


def tali_lessons(
    train_count: int, eval_count: int, *, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    """Draw the quickstart's two sets; no English text asked in the second occurs in the first.

    The first holds phrases (one in five) and sentences, the second only sentences. Both have
    exactly the asked number of conversations, each of a different text.
    """
    rng = random.Random(seed)
    english: set[str] = set()
    phrases = [_phrase_lesson(rng, english) for _ in range(train_count // 5)]
    count = train_count - len(phrases) + eval_count
    sentences = [_sentence_lesson(rng, english) for _ in range(count)]
    train = phrases + sentences[eval_count:]
    rng.shuffle(train)
    return [conversation([e]) for e in train], [conversation([e]) for e in sentences[:eval_count]]


def _phrase_lesson(rng: random.Random, english: set[str]) -> Exchange:
    phrase = draw_phrase(rng)
    while phrase.english() in english:
        phrase = draw_phrase(rng)
    english.add(phrase.english())
    return rng.choice(SENTENCE_QUESTIONS).format(phrase.english()), TALI.phrase(phrase)


def _sentence_lesson(rng: random.Random, english: set[str]) -> Exchange:
    sentence: Sentence = draw_sentence(rng)
    while sentence.english() in english:
        sentence = draw_sentence(rng)
    english.add(sentence.english())
    return rng.choice(SENTENCE_QUESTIONS).format(sentence.english()), TALI.sentence(sentence)
