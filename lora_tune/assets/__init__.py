# SPDX-License-Identifier: Apache-2.0
"""Files shipped in the package, named `lora_tune:PATH` wherever a recipe takes a path."""

from pathlib import Path

from lora_tune.errors import InputError

PREFIX = "lora_tune:"

_FOLDER = Path(__file__).resolve().parent


def shipped() -> list[str]:
    """Return the names, prefix included, of every shipped model folder and data file."""
    models = [config.parent for config in _FOLDER.rglob("config.json")]
    names = [*models, *_FOLDER.rglob("*.jsonl")]
    return sorted(PREFIX + path.relative_to(_FOLDER).as_posix() for path in names)


def resolve(path: str) -> Path:
    """Return the file or folder that `path` names; a path without the prefix stays as it is.

    Raises:
        InputError: nothing of that name is shipped; the message lists what is.
    """
    if not path.startswith(PREFIX):
        return Path(path)
    found = (_FOLDER / path.removeprefix(PREFIX)).resolve()
    if found == _FOLDER or not found.is_relative_to(_FOLDER) or not found.exists():
        raise InputError(
            f"{path!r} is not shipped with lora_tune; there is {', '.join(shipped()) or 'nothing'}"
        )
    return found


def resolve_all(path: str | list[str]) -> str | list[str]:
    """Return one path, or each of several, as text and with shipped names resolved."""
    if isinstance(path, str):
        return str(resolve(path))
    return [str(resolve(each)) for each in path]
