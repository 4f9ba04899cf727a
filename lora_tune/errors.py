# SPDX-License-Identifier: Apache-2.0
"""The one exception type that reports a mistake in what the user gave us."""


class InputError(ValueError):
    """Bad user input; its text is one sentence that says what, where and what to do."""
