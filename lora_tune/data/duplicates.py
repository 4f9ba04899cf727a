# SPDX-License-Identifier: Apache-2.0
"""Examples that are there more than once, and held-out ones that are training examples too."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from lora_tune.data.examples import Examples


def repeated(examples: Examples) -> int:
    """How many examples equal an earlier one in tokens and mask."""
    return len(examples) - len(set(_digests(examples, range(len(examples)))))


def seen_in_training(train: Examples, held_out: Examples) -> int:
    """How many held-out examples equal a training example in tokens and mask."""
    # Of another length than all held-out ones, an example is none of them.
    alike = np.flatnonzero(np.isin(train.lengths, held_out.lengths))
    return _found(_digests(held_out, range(len(held_out))), _digests(train, map(int, alike)))


def prompts_seen_in_training(train: Examples, held_out: Examples) -> int:
    """How many held-out examples begin, up to their first trained token, as a training example."""
    return _found(_prompts(held_out), _prompts(train))


def _found(wanted: Iterable[bytes], known: Iterable[bytes]) -> int:
    """How many of `wanted` are among `known`, of which no more is kept than `wanted` has."""
    counts = Counter(wanted)
    return sum(counts[digest] for digest in {each for each in known if each in counts})


def _digests(examples: Examples, which: Iterable[int]) -> Iterator[bytes]:
    for example in map(examples.__getitem__, which):
        yield _hash(example.tokens, example.mask)


def _prompts(examples: Examples) -> Iterator[bytes]:
    """Hashes of what comes before the first trained token, where something does."""
    for example in map(examples.__getitem__, range(len(examples))):
        if stop := int(np.argmax(example.mask)):
            yield _hash(example.tokens[:stop])


def _hash(*arrays: np.ndarray) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(array.tobytes())
    return digest.digest()
