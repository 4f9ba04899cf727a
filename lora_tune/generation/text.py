# SPDX-License-Identifier: Apache-2.0
"""Text from tokens that come one at a time."""

from typing import Any


def decode(tokenizer: Any, ids: list[int]) -> str:
    """The text of an answer, without special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class TextStream:
    """Gives the text of an answer in pieces, each as soon as its characters are complete.

    A character may be spread over several tokens, and the text of a token may depend on the one
    before. So each step decodes the tokens since the last piece together with those of that piece.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # of the last piece, then those after it
        self._shown = 0  # number of ids in the last piece

    def add(self, token: int) -> str:
        """Takes the next token; returns the text that is complete now, which may be none."""
        self._ids.append(token)
        piece = self._new_text()
        if not piece or piece.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._ids, self._shown = self._ids[self._shown :], len(self._ids) - self._shown
        return piece

    def finish(self) -> str:
        """Returns what is left, characters that never became complete included."""
        piece = self._new_text()
        self._ids, self._shown = [], 0
        return piece

    def _new_text(self) -> str:
        before = decode(self._tokenizer, self._ids[: self._shown])
        return decode(self._tokenizer, self._ids)[len(before) :]
