# SPDX-License-Identifier: Apache-2.0
"""Arrays of a batch from rows of documents."""

from collections.abc import Sequence

import numpy as np

from lora_tune.data.messages import Example

Batch = dict[str, np.ndarray]


def build(
    rows: Sequence[Sequence[Example]], *, max_length: int, with_sources: bool = False
) -> Batch:
    """Lay out documents side by side; one inner sequence is one row, an empty one is padding.

    Returns arrays [rows, max_length]: `tokens` int32; `targets` int32, the next token of the same
    document, 0 at its last token; `weights` float32, 1 where the target is a trained token;
    `segment_ids` int32, 1, 2, ... for the documents of a row and 0 for padding; `positions` int32,
    from 0 in each document; `with_sources` also `sources` int32, that of each document, 0 for
    padding. Targets are shifted here, once, within each document.
    """
    shape = (len(rows), max_length)
    batch: Batch = {
        name: np.zeros(shape, np.float32 if name == "weights" else np.int32)
        for name in ("tokens", "targets", "weights", "segment_ids", "positions")
    }
    if with_sources:
        batch["sources"] = np.zeros(shape, np.int32)
    for row, documents in enumerate(rows):
        start = 0
        for segment, document in enumerate(documents, start=1):
            start = _place(batch, document, row=row, start=start, segment=segment)
    return batch


def _place(batch: Batch, document: Example, *, row: int, start: int, segment: int) -> int:
    stop = start + len(document.tokens)
    if stop > batch["tokens"].shape[1]:
        raise ValueError(f"row {row} needs {stop} tokens, has {batch['tokens'].shape[1]}")
    batch["tokens"][row, start:stop] = document.tokens
    batch["targets"][row, start : stop - 1] = document.tokens[1:]
    batch["weights"][row, start : stop - 1] = document.mask[1:]
    batch["segment_ids"][row, start:stop] = segment
    batch["positions"][row, start:stop] = np.arange(stop - start)
    if "sources" in batch:
        batch["sources"][row, start:stop] = document.source
    return stop
