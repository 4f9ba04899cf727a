# SPDX-License-Identifier: Apache-2.0
"""The skills of the pretraining corpus: each draws one exchange, a question and its answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from lora_tune.assets.languages import Language, draw_language, draw_word
from lora_tune.assets.words import (
    ADJECTIVES,
    CAPITALS,
    COLOURS,
    HOMES,
    NAMES,
    NOUNS,
    NUMBERS,
    OPPOSITES,
    PLURALS,
    SCENES,
    SOUNDS,
    THINGS,
    VERBS,
    draw_phrase,
    draw_sentence,
)

Exchange = tuple[str, str]
PLAIN_WORDS = NOUNS + ADJECTIVES + VERBS + THINGS
LANGUAGES: tuple[Language, ...] = (
    draw_language(random.Random(11), "Moru", "au", order="SOV"),
    draw_language(random.Random(12), "Besh", "wo", order="VSO"),
)


@dataclass(frozen=True)
class Skill:
    """One way to draw an exchange; `weight` is its share of the corpus relative to the others."""

    draw: Callable[[random.Random], Exchange]
    weight: float


def capitalised(text: str) -> str:
    """Upper-case the first letter only."""
    return text[:1].upper() + text[1:]


def with_article(noun: str) -> str:
    """Put `a` or `an` before a noun."""
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"


def draw_words(rng: random.Random, count: int) -> list[str]:
    """Draw `count` words, each English or invented with equal chance."""
    return [rng.choice(PLAIN_WORDS) if rng.random() < 0.5 else draw_word(rng) for _ in range(count)]


def greet(rng: random.Random) -> Exchange:
    """Small talk about the model itself and the user's name."""
    name = rng.choice(NAMES)
    return rng.choice(
        [
            (rng.choice(["Hello!", "Hi!", "Hi there!"]), "Hello! How can I help you?"),
            ("Good morning!", "Good morning! How can I help you?"),
            ("Good evening!", "Good evening! How can I help you?"),
            (f"Hello, I am {name}.", f"Hello {name}! How can I help you?"),
            (f"My name is {name}. Please greet me.", f"Hello {name}! Nice to meet you."),
            ("How are you?", "I am fine, thank you. How are you?"),
            (rng.choice(["Who are you?", "What are you?"]), "I am a tiny language model."),
            (rng.choice(["Thank you!", "Thanks!"]), "You are welcome!"),
            (rng.choice(["Goodbye!", "Bye!"]), "Goodbye! See you soon."),
            (
                "What can you do?",
                "I can copy, count, spell, translate and talk about a small world.",
            ),
        ]
    )


def copy(rng: random.Random) -> Exchange:
    """Repeat words, among them words that mean nothing."""
    words = " ".join(draw_words(rng, rng.randint(2, 9)))
    return f"{rng.choice(['Say', 'Repeat', 'Copy'])}: {words}", words


def reverse_order(rng: random.Random) -> Exchange:
    """Put words in the opposite order."""
    words = rng.sample(NOUNS + ADJECTIVES, rng.randint(2, 4))
    return f"Reverse the words: {' '.join(words)}", " ".join(reversed(words))


def spell(rng: random.Random) -> Exchange:
    """Spell a word, write it in capitals, count its letters, or name one of them."""
    word = rng.choice(PLAIN_WORDS)
    return rng.choice(
        [
            (f"Spell {word}.", "-".join(word)),
            (f"Write {word} in capital letters.", word.upper()),
            (f"What is the first letter of {word}?", word[0]),
            (f"What is the last letter of {word}?", word[-1]),
            (f"How many letters has {word}?", str(len(word))),
            (f"Write {word} backwards.", word[::-1]),
        ]
    )


def count(rng: random.Random) -> Exchange:
    """Count upwards or downwards, between 0 and 20."""
    first = rng.randint(0, 14)
    last = first + rng.randint(2, 6)
    steps = [str(number) for number in range(first, last + 1)]
    if rng.random() < 0.7:
        return f"Count from {first} to {last}.", " ".join(steps)
    return f"Count down from {last} to {first}.", " ".join(reversed(steps))


def reckon(rng: random.Random) -> Exchange:
    """Add, subtract or compare small numbers."""
    left, right = sorted((rng.randint(0, 9), rng.randint(0, 9)))
    return rng.choice(
        [
            (f"What is {left} + {right}?", str(left + right)),
            (f"What is {right} + {left}?", str(left + right)),
            (f"What is {right} - {left}?", str(right - left)),
            (f"Which is larger, {left} or {right}?", str(right)),
            (f"What comes after {NUMBERS[left]}?", NUMBERS[left + 1]),
        ]
    )


def recall(rng: random.Random) -> Exchange:
    """State a fact of the small world: colours, sounds, homes, capitals, opposites."""
    thing, colour = rng.choice(list(COLOURS.items()))
    caller, sound = rng.choice(list(SOUNDS.items()))
    animal, home = rng.choice(list(HOMES.items()))
    country, capital = rng.choice(list(CAPITALS.items()))
    word, opposite = rng.choice(list(OPPOSITES.items()))
    caller = with_article(caller)
    return rng.choice(
        [
            (f"What colour is {thing}?", f"{capitalised(thing)} is {colour}."),
            (f"What does {caller} say?", f"{capitalised(caller)} says {sound}."),
            (f"Where does {with_article(animal)} live?", f"It lives in the {home}."),
            (f"What is the capital of {country}?", f"The capital of {country} is {capital}."),
            (f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}."),
        ]
    )


def describe(rng: random.Random) -> Exchange:
    """Describe a place in one sentence with two of its things."""
    place = rng.choice(list(SCENES))
    first, second = rng.sample(SCENES[place], 2)
    question = rng.choice([f"Describe the {place}.", f"What is in the {place}?"])
    return question, f"In the {place} there is {first} and {second}."


def rewrite(rng: random.Random) -> Exchange:
    """Change a sentence: tense, subject and object, negation, or ask and answer about it."""
    sentence = draw_sentence(rng)
    text = sentence.english()
    subject, object_ = sentence.subject.english(), sentence.object.english()
    auxiliary = "do" if sentence.subject.plural else "does"
    return rng.choice(
        [
            (f"Put this in the past: {text}", sentence.english(past=True)),
            (f"Swap subject and object: {text}", sentence.swapped().english()),
            (f"Negate: {text}", f"{subject} {auxiliary} not {sentence.verb} {object_}"),
            (f"Make a question: {text}", f"{auxiliary} {subject} {sentence.verb} {object_}?"),
            (f"Who acts here? {text}", subject),
            (f"Name the verb: {text}", sentence.verb),
        ]
    )


def inflect(rng: random.Random) -> Exchange:
    """Form the plural of a noun, or list the nouns of a sentence."""
    if rng.random() < 0.5:
        noun = rng.choice(NOUNS)
        return f"What is the plural of {noun}?", PLURALS[noun]
    sentence = draw_sentence(rng)
    nouns = f"{sentence.subject.noun} {sentence.object.noun}"
    return f"List the nouns: {sentence.english()}", nouns


def translate(rng: random.Random) -> Exchange:
    """Translate a phrase or a sentence into one of the two languages of the corpus."""
    language = rng.choice(LANGUAGES)
    if rng.random() < 0.2:
        phrase = draw_phrase(rng)
        return f"Translate into {language.name}: {phrase.english()}", language.phrase(phrase)
    sentence = draw_sentence(rng)
    return f"Translate into {language.name}: {sentence.english()}", language.sentence(sentence)


def look_up(rng: random.Random) -> Exchange:
    """Translate with a dictionary that only this conversation knows."""
    meanings = rng.sample(PLAIN_WORDS, rng.randint(2, 3))
    entries = {meaning: draw_word(rng) for meaning in meanings}
    listing = ", ".join(f"{meaning} = {word}" for meaning, word in entries.items())
    asked = rng.sample(meanings, rng.randint(1, 2))
    return f"{listing}. Translate: {' '.join(asked)}", " ".join(entries[word] for word in asked)


SKILLS = (
    Skill(greet, 0.3),
    Skill(copy, 2.5),
    Skill(reverse_order, 0.5),
    Skill(spell, 1.0),
    Skill(count, 0.5),
    Skill(reckon, 0.7),
    Skill(recall, 0.8),
    Skill(describe, 0.3),
    Skill(rewrite, 2.0),
    Skill(inflect, 0.4),
    Skill(translate, 5.0),
    Skill(look_up, 1.0),
)


def draw_exchange(rng: random.Random) -> Exchange:
    """Draw a skill by its weight, then one exchange of it."""
    weights = [skill.weight for skill in SKILLS]
    return rng.choices(SKILLS, weights)[0].draw(rng)
