# SPDX-License-Identifier: Apache-2.0
"""Put documents together into rows of bounded length: pure and deterministic."""

from collections import deque
from collections.abc import Sequence

import numpy as np

WINDOW = 4096


def pack(lengths: Sequence[int] | np.ndarray, max_length: int) -> list[list[int]]:
    """Group the indices of `lengths` into rows whose lengths sum to at most `max_length`.

    Every index appears in exactly one row. Documents are placed by best-fit decreasing (Johnson
    1973) within windows of `WINDOW` consecutive documents, so a document moves at most a window
    from its place. Rows come in the order of their first document, not by length, so a shuffled
    input gives shuffled rows. Raises ValueError for a length outside 1..max_length.
    """
    sizes = np.asarray(lengths, np.int64)
    if sizes.size and not 1 <= sizes.min() <= sizes.max() <= max_length:
        raise ValueError(f"lengths must be in 1..{max_length}, got {sizes.min()}..{sizes.max()}")
    rows: list[list[int]] = []
    for start in range(0, len(sizes), WINDOW):
        rows += _pack_window(sizes[start : start + WINDOW], max_length, start)
    return rows


def _pack_window(sizes: np.ndarray, max_length: int, first: int) -> list[list[int]]:
    """Best-fit decreasing; open rows wait in a queue for each remaining room.

    `room_bits` has bit r set when a row with room r is open, so the tightest fit is the lowest set
    bit from the document's size upwards.
    """
    order = np.argsort(-sizes, kind="stable")
    open_rows: dict[int, deque[list[int]]] = {}
    room_bits = 0
    rows: list[list[int]] = []
    for index, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = room_bits >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].popleft()
            if not open_rows[room]:
                room_bits ^= 1 << room
        else:
            room, row = max_length, []
            rows.append(row)
        row.append(first + index)
        left = room - size
        if left:
            open_rows.setdefault(left, deque()).append(row)
            room_bits |= 1 << left
    for row in rows:
        row.sort()
    rows.sort()
    return rows
