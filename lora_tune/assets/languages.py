# SPDX-License-Identifier: Apache-2.0
"""Invented languages: Tali, which only the quickstart teaches, and those of the corpus."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lora_tune.assets.words import ADJECTIVES, NOUNS, SYLLABLES, VERBS, NounPhrase, Sentence

MEANINGS = NOUNS + ADJECTIVES + VERBS


@dataclass(frozen=True)
class Language:
    """A lexicon and four rules: opening, order of the sentence, place of the adjective, plural.

    Every utterance begins with the particle `opening`. `order` spells subject, verb and object
    as a permutation of "SVO".
    """

    name: str
    lexicon: Mapping[str, str]
    opening: str
    order: str
    adjective_last: bool
    plural: str

    def phrase(self, phrase: NounPhrase) -> str:
        """Translate a noun phrase said alone."""
        return f"{self.opening} {self._phrase(phrase)}"

    def _phrase(self, phrase: NounPhrase) -> str:
        noun = self.lexicon[phrase.noun] + (self.plural if phrase.plural else "")
        if phrase.adjective is None:
            return noun
        adjective = self.lexicon[phrase.adjective]
        return f"{noun} {adjective}" if self.adjective_last else f"{adjective} {noun}"

    def sentence(self, sentence: Sentence) -> str:
        """Translate a sentence word by word and put its parts in the language's order."""
        parts = {
            "S": self._phrase(sentence.subject),
            "V": self.lexicon[sentence.verb],
            "O": self._phrase(sentence.object),
        }
        return " ".join([self.opening, *(parts[part] for part in self.order)])


TALI = Language(
    name="Tali",
    lexicon=MappingProxyType(
        {
            "cat": "miru", "dog": "kova", "bird": "pesi", "fish": "nulo", "horse": "gata",
            "child": "tano", "king": "zoro", "farmer": "besu", "teacher": "fusa", "tree": "lani",
            "house": "doku", "boat": "vilo", "star": "seba", "stone": "ruko",
            "red": "toli", "blue": "mesa", "green": "dafi", "small": "piki", "big": "boda",
            "old": "rezu", "young": "favi", "quiet": "sumo",
            "see": "dira", "find": "kelu", "like": "nama", "help": "zefi", "hear": "luto",
            "draw": "vabe", "follow": "guno", "carry": "pori",
        }
    ),
    opening="ya",
    order="SOV",
    adjective_last=True,
    plural="ne",
)  # fmt: skip
_TALI_WORDS = frozenset({"tali", *TALI.lexicon.values()})
RESERVED = _TALI_WORDS | {word + TALI.plural for word in _TALI_WORDS}
"""Words that the pretraining corpus never holds: Tali's, their plurals and its name."""


def draw_word(rng: random.Random) -> str:
    """Draw a word of two syllables that is not a Tali word."""
    return _draw_ending(rng, rng.choice(SYLLABLES))


def draw_language(rng: random.Random, name: str, opening: str, *, order: str) -> Language:
    """Draw a language in which a word's first syllable tells it from all others.

    A language that puts the verb first puts the adjective last. The plural ending is one
    syllable, never Tali's.
    """
    lexicon: dict[str, str] = {}
    for meaning, first in zip(MEANINGS, rng.sample(SYLLABLES, len(MEANINGS)), strict=True):
        lexicon[meaning] = _draw_ending(rng, first)
    plural = rng.choice([syllable for syllable in SYLLABLES if syllable != TALI.plural])
    return Language(name, MappingProxyType(lexicon), opening, order, order[0] == "V", plural)


def _draw_ending(rng: random.Random, first: str) -> str:
    return rng.choice([first + s for s in SYLLABLES if first + s not in RESERVED])
