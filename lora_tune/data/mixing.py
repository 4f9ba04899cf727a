# SPDX-License-Identifier: Apache-2.0
"""Which examples an epoch takes from each source, and in which order: pure and deterministic."""

from collections.abc import Sequence

import numpy as np

from lora_tune.errors import InputError


def shares(counts: Sequence[int], weights: Sequence[float]) -> list[int]:
    """How many examples of each source an epoch has.

    There are `sum(counts)` of them, divided in the proportions of `weights` by largest remainders.

    Raises:
        InputError: the share of a source rounds to nothing.
    """
    total = sum(counts)
    exact = np.asarray(weights, np.float64) / sum(weights) * total
    found = np.floor(exact).astype(np.int64)
    order = np.argsort(found - exact, kind="stable")  # largest remainder first
    found[order[: total - int(found.sum())]] += 1
    for source, (share, weight) in enumerate(zip(found.tolist(), weights, strict=True)):
        if not share:
            raise InputError(
                f"data.sources[{source}] has weight {weight:g}, which is none of the {total} "
                "examples of an epoch: raise it or remove the source"
            )
    return found.tolist()


def epoch_order(
    counts: Sequence[int],
    *,
    weights: Sequence[float] | None,
    seed: int,
    epoch: int,
    shuffle: bool,
) -> np.ndarray:
    """The numbers of the examples of an epoch, int64 [sum(counts)], in order.

    Examples are numbered through, those of source i after those of the sources before it. Without
    `weights` an epoch has each once. With them a source is gone through again and again, each time
    in another order, and an epoch takes its share where the one before has ended: no example
    comes again before all others of its source. Without `shuffle` sources keep their order
    and are spread evenly over an epoch.
    """
    if weights is None:
        order = np.arange(sum(counts))
    else:
        order = _mixed(counts, shares(counts, weights), seed=seed, epoch=epoch, shuffle=shuffle)
    return _generator(seed, epoch).permutation(order) if shuffle else order


def _mixed(
    counts: Sequence[int], taken: Sequence[int], *, seed: int, epoch: int, shuffle: bool
) -> np.ndarray:
    chosen, places, first = [], [], 0
    for source, (count, share) in enumerate(zip(counts, taken, strict=True)):
        numbers = np.arange(epoch * share, (epoch + 1) * share)
        rounds, within = np.divmod(numbers, count)
        if shuffle:
            for each in np.unique(rounds).tolist():
                order = _generator(seed, source, each).permutation(count)
                here = rounds == each
                within[here] = order[within[here]]
        chosen.append(first + within)
        places.append((np.arange(share) + 0.5) / share)
        first += count
    return np.concatenate(chosen)[np.argsort(np.concatenate(places), kind="stable")]


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(list(key))))
