# SPDX-License-Identifier: Apache-2.0
"""Where nobody reads on, the one who prints hears of it."""

import os

import pytest

from lora_tune.console import Console


def test_a_reader_that_is_gone_is_an_error_and_not_the_end_of_the_program() -> None:
    read, write = os.pipe()
    os.close(read)
    with pytest.raises(BrokenPipeError), os.fdopen(write, "w") as stream:
        Console(stream).print("text")
