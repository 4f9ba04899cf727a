# SPDX-License-Identifier: Apache-2.0
"""The program of a process that encodes rows; see `workers.py`, which starts it.

The first message on the standard input is an encoder, each further one some rows; each is answered
with what they became.
"""

import io
import os
import pickle
import sys
from collections.abc import Iterator
from typing import Any

from lora_tune.data.encode import encode_piece
from lora_tune.data.workers import read_message, write_message


def main() -> None:
    """Encodes until there is nothing more to read."""
    # What libraries print is no answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    questions = sys.stdin.buffer
    encoder = pickle.loads(read_message(questions) or pickle.dumps(None))
    while (task := read_message(questions)) is not None:
        piece = encode_piece(_rows(task), encoder)
        try:
            write_message(answers, pickle.dumps(piece, pickle.HIGHEST_PROTOCOL))
        except BrokenPipeError:  # nobody waits for it any more
            os._exit(0)


def _rows(task: bytes) -> Iterator[Any]:
    stream = io.BytesIO(task)
    while stream.tell() < len(task):
        yield pickle.load(stream)


if __name__ == "__main__":
    main()
