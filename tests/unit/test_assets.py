# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from lora_tune import assets
from lora_tune.errors import InputError


def test_other_paths_stay_as_they_are() -> None:
    assert assets.resolve("Qwen/Qwen3-Next") == Path("Qwen/Qwen3-Next")


def test_every_shipped_name_resolves_into_the_package() -> None:
    package = Path(assets.__file__).parent
    for name in assets.shipped():
        assert assets.resolve(name).is_relative_to(package)


@pytest.mark.parametrize("name", ["nope", "", ".", "..", "../errors.py", "/etc/passwd", "a/../.."])
def test_nothing_else_resolves(name: str) -> None:
    with pytest.raises(InputError, match="is not shipped with lora_tune; there is"):
        assets.resolve(f"lora_tune:{name}")
