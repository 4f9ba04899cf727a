# SPDX-License-Identifier: Apache-2.0
"""Where a model lies: a local folder, the hub's cache, or the hub."""

import dataclasses
import os
import re
from pathlib import Path

from lora_tune.errors import InputError
from lora_tune.hf.card import is_hub_id
from lora_tune.hf.files import INDEX, SINGLE

_SNAPSHOT = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")
_HUB_PAGE = re.compile(r"https?:/+huggingface\.co/(?P<id>[^/]+/[^/?#]+)")
_SMALL = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*"]


@dataclasses.dataclass(frozen=True)
class Source:
    """A model on this machine, and the hub id and commit that it came from, when known."""

    folder: Path
    hub_id: str | None
    commit: str | None

    @property
    def base_name(self) -> str:
        """What an adapter names as its base: the hub id, or else the folder."""
        return self.hub_id or str(self.folder)


def find_model(path: str, *, revision: str | None = None, weights: bool = True) -> Source:
    """Finds a model, downloading it from the hub when it is not here.

    Args:
      path: an existing folder, or a hub id `owner/name`.
      revision: branch, tag or commit of a hub id.
      weights: False fetches only configuration and tokenizer.

    Raises:
      InputError: neither a folder nor a hub id, a revision of a local folder, or the hub cannot
        be reached or does not have it.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise InputError(
                f"{path}: is a local folder, which has no revision ({revision!r}); drop revision"
            )
        return _local(folder)
    if folder.exists() or not is_hub_id(path) or path.startswith("."):
        page = _HUB_PAGE.match(path)
        advice = f"write {page['id']}" if page else "give the path where it is now"
        if folder.is_file():
            advice = f"it is a file, name its folder {folder.parent}"
        raise InputError(
            f"{path}: neither a model folder nor a hub id of the form owner/name; {advice}"
        )
    return _from_hub(path, revision, weights)


def check_complete(source: Source) -> None:
    """Checks that a folder has a configuration, weights and a tokenizer at all.

    Raises:
      InputError: naming everything that is missing, and what the folder may be instead.
    """
    folder = source.folder
    parts = {
        "a configuration (config.json)": ["config.json"],
        f"weights ({SINGLE} or {INDEX})": [SINGLE, INDEX],
        "a tokenizer (tokenizer.json)": ["tokenizer.*", "vocab.*"],
    }
    missing = [part for part, names in parts.items() if not any(any(folder.glob(n)) for n in names)]
    if missing:
        where = source.hub_id or f"the folder {folder}"
        raise InputError(f"{where} lacks {', '.join(missing)}{_instead(folder)}")


def _instead(folder: Path) -> str:
    if (folder / "adapter_config.json").exists():
        return "; it holds an adapter: give its base model, and this as lora.adapter_path"
    below = [path.parent for path in sorted(folder.glob("*/config.json"))]
    if below:
        return f"; did you mean {below[0]}?"
    other = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pth", ".gguf"))
    if other:
        return f"; only safetensors weights can be read, not {other[0]}"
    return "; expected a model in Hugging Face format"


def _local(folder: Path) -> Source:
    """A folder; one in the hub's cache tells its id and commit by its path."""
    full = Path(os.path.abspath(folder))
    match = _SNAPSHOT.fullmatch(full.parent.parent.name)
    if match and full.parent.name == "snapshots":
        return Source(folder, f"{match['owner']}/{match['name']}", full.name)
    # Absolute: `models/mine` would read as a hub id in the adapter that names its base.
    return Source(full, None, None)


def _from_hub(hub_id: str, revision: str | None, weights: bool) -> Source:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = hub_id + (f" at {revision}" if revision else "")
    patterns = [*_SMALL, *(["*.safetensors"] if weights else [])]
    try:
        folder = snapshot_download(hub_id, revision=revision, allow_patterns=patterns)
    except GatedRepoError as error:
        raise InputError(
            f"{where}: access is gated; accept its licence on the hub and run `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(f"{where}: the hub has no such revision") from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"{where}: no such folder here and no such model on the hub (or it is private: run "
            "`hf auth login`)"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"{where}: no such folder here, and the hub could not be reached or does not have it "
            f"in the cache ({reason}); connect, or give the path of a local folder"
        ) from error
    return Source(Path(folder), hub_id, Path(folder).name)
