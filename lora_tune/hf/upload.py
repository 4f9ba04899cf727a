# SPDX-License-Identifier: Apache-2.0
"""Folders to the hub. The token is huggingface_hub's to find; it is never seen here."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_tune.errors import InputError
from lora_tune.hf.card import is_hub_id
from lora_tune.hf.folder import MARKER

_TOKEN = re.compile(r"hf_\w+")
_LOGIN = "set HF_TOKEN in the environment or run `hf auth login`"


def check_target(repository: str) -> None:
    """Checks, before anything is written, that a folder can be pushed at all.

    Raises:
      InputError: no name of the form `owner/name`, no token, or the hub is switched off.
    """
    from huggingface_hub import constants, get_token

    if not is_hub_id(repository):
        raise InputError(f"push is {repository!r}, expected USER/NAME, a repository of the hub")
    if constants.HF_HUB_OFFLINE:
        raise InputError(f"push={repository}: HF_HUB_OFFLINE is set; unset it to push")
    if get_token() is None:
        raise InputError(f"push={repository}: there is no token of the hub; {_LOGIN}")


def upload(folder: Path, repository: str, *, private: bool) -> str:
    """Makes the repository if it is not there, and uploads a folder in one commit.

    Args:
      folder: an export.
      repository: `owner/name`.
      private: of a repository that is made here; one that exists stays as it is.

    Returns:
      The address of the commit.

    Raises:
      InputError: the hub refuses or cannot be reached; the folder stays.
    """
    from huggingface_hub import HfApi

    with _said(folder, repository):
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            folder_path=folder,
            repo_id=repository,
            commit_message="Upload by lora-tune",
            ignore_patterns=[MARKER],
        )
        return str(commit.commit_url)


@contextmanager
def _said(folder: Path, repository: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        yield
    except LocalTokenNotFoundError as error:
        raise InputError(f"push={repository}: there is no token of the hub; {_LOGIN}") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        text = str(error).strip()
        reason = _TOKEN.sub("hf_…", text.splitlines()[0] if text else type(error).__name__)
        raise InputError(
            f"push={repository}: the hub did not take it ({reason}); {folder} is written, give the "
            "command again to push it"
        ) from error
