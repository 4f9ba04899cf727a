# SPDX-License-Identifier: Apache-2.0
"""Where text for people goes, with colours where a terminal has them."""

from typing import NoReturn, TextIO

import rich.console


class Console(rich.console.Console):
    """Prints text as it is, lines of any length; where nobody reads on, it says so as print does.

    Args:
      stream: where to print; None for stdout, whatever that is when something is printed.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(file=stream, highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> NoReturn:
        """Lets the error through, in whose place rich would end the program with status 1."""
        raise
