# SPDX-License-Identifier: Apache-2.0
"""The small English world that the embedded model lives in: words, facts and plain sentences."""

from __future__ import annotations

import random
from dataclasses import dataclass

NOUNS = (
    "cat", "dog", "bird", "fish", "horse", "child", "king", "farmer",
    "teacher", "tree", "house", "boat", "star", "stone",
)  # fmt: skip
PLURALS = {noun: noun + "s" for noun in NOUNS} | {"fish": "fishes", "child": "children"}
ADJECTIVES = ("red", "blue", "green", "small", "big", "old", "young", "quiet")
VERBS = ("see", "find", "like", "help", "hear", "draw", "follow", "carry")
THIRD_PERSON = {verb: verb + "s" for verb in VERBS} | {"carry": "carries"}
PAST = {
    "see": "saw", "find": "found", "like": "liked", "help": "helped",
    "hear": "heard", "draw": "drew", "follow": "followed", "carry": "carried",
}  # fmt: skip

THINGS = (
    "apple", "bread", "book", "cup", "door", "egg", "flower", "garden", "hat", "key", "lamp",
    "milk", "moon", "river", "road", "salt", "shoe", "snow", "sun", "table", "water", "window",
)  # fmt: skip
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas")

COLOURS = {
    "grass": "green", "the sky": "blue", "snow": "white", "coal": "black", "the sun": "yellow",
    "a lemon": "yellow", "blood": "red", "a tomato": "red", "milk": "white", "the sea": "blue",
    "a frog": "green", "a carrot": "orange",
}  # fmt: skip
SOUNDS = {
    "cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "pig": "oink",
    "lion": "roar", "bee": "buzz", "owl": "hoot", "mouse": "squeak",
}  # fmt: skip
HOMES = {
    "cow": "farm", "fish": "water", "bird": "nest", "bear": "forest", "camel": "desert",
    "lion": "savanna", "frog": "pond", "bee": "hive", "mouse": "hole", "whale": "sea",
}  # fmt: skip
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo",
    "Germany": "Berlin", "Norway": "Oslo", "Greece": "Athens", "Peru": "Lima", "Kenya": "Nairobi",
}  # fmt: skip
OPPOSITES = {
    "big": "small", "hot": "cold", "old": "young", "day": "night", "up": "down", "fast": "slow",
    "open": "closed", "happy": "sad", "dry": "wet", "hard": "soft", "light": "dark",
    "left": "right",
}  # fmt: skip
SCENES = {
    "farm": ("a red barn", "three cows", "a muddy field", "a friendly farmer", "some hay"),
    "beach": ("warm sand", "small waves", "a blue boat", "white birds", "a sleepy crab"),
    "forest": ("tall trees", "soft moss", "a quiet deer", "an old owl", "a narrow path"),
    "city": ("busy streets", "tall houses", "a loud tram", "many lamps", "a small bakery"),
    "kitchen": ("a hot oven", "fresh bread", "a wooden table", "clean cups", "a sleepy cat"),
    "garden": ("yellow flowers", "a stone bench", "busy bees", "a green frog", "ripe apples"),
}
NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
)  # fmt: skip

CONSONANTS = "bdfgklmnprstvz"
SYLLABLES = tuple(consonant + vowel for consonant in CONSONANTS for vowel in "aeiou")


@dataclass(frozen=True)
class NounPhrase:
    """A noun with at most one adjective, singular or plural."""

    noun: str
    adjective: str | None
    plural: bool

    def english(self) -> str:
        """The phrase with its article, such as `the red cats`."""
        noun = PLURALS[self.noun] if self.plural else self.noun
        return " ".join(["the", *([self.adjective] if self.adjective else []), noun])


@dataclass(frozen=True)
class Sentence:
    """Subject, verb, object: the sentence form that every translation task shares."""

    subject: NounPhrase
    verb: str
    object: NounPhrase

    def english(self, *, past: bool = False) -> str:
        """The sentence in lower case without a full stop."""
        present = self.verb if self.subject.plural else THIRD_PERSON[self.verb]
        verb = PAST[self.verb] if past else present
        return f"{self.subject.english()} {verb} {self.object.english()}"

    def swapped(self) -> Sentence:
        """The sentence with subject and object exchanged."""
        return Sentence(self.object, self.verb, self.subject)


def draw_phrase(rng: random.Random) -> NounPhrase:
    """Draw a noun phrase; three in five carry an adjective and two in five are plural."""
    adjective = rng.choice(ADJECTIVES) if rng.random() < 0.6 else None
    return NounPhrase(rng.choice(NOUNS), adjective, rng.random() < 0.4)


def draw_sentence(rng: random.Random) -> Sentence:
    """Draw a sentence whose subject and object are different nouns."""
    subject, object_ = draw_phrase(rng), draw_phrase(rng)
    while object_.noun == subject.noun:
        object_ = draw_phrase(rng)
    return Sentence(subject, rng.choice(VERBS), object_)
