# SPDX-License-Identifier: Apache-2.0
"""Output folders and files that appear complete or not at all."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_tune.errors import InputError

MARKER = "lora_tune_export.json"
"""File that marks a folder as written by this package, which alone may replace it.

It names the kind of what is there and, so that no other is lost, the files.
"""
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_TEMPLATES = "additional_chat_templates"


@contextlib.contextmanager
def new_folder(out_dir: Path, *, kind: str, size: int = 0) -> Iterator[Path]:
    """Yields a temporary sibling of `out_dir` and renames it to `out_dir` when the body succeeds.

    On any error the temporary folder is removed and `out_dir` is as before.

    Args:
      out_dir: may exist if it is empty or an earlier result of this package and this kind.
      kind: what the folder holds, kept in its marker file.
      size: bytes that the body is about to write, where that is known.

    Raises:
      InputError: `out_dir` holds something else, or the disk is full or cannot be written.
    """
    out_dir = Path(os.path.abspath(out_dir))
    check_replaceable(out_dir, kind=kind)
    partial, old = (out_dir.with_name(f".{out_dir.name}.{end}") for end in ("partial", "old"))
    # What a run that was killed left behind would take the room of this one.
    shutil.rmtree(partial, ignore_errors=True)
    if out_dir.exists():
        shutil.rmtree(old, ignore_errors=True)
    check_space(out_dir, size)
    try:
        partial.mkdir(parents=True)
        yield partial
        written = {"kind": kind, "files": sorted(_files(partial))}
        (partial / MARKER).write_text(json.dumps(written) + "\n", encoding="utf-8")
        _sync(partial)
        _swap(partial, out_dir, old)
    except OSError as error:
        raise InputError(
            f"{out_dir}: could not be written ({error.strerror or error}), so nothing was; "
            "free some space or choose another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if out_dir.exists():
            shutil.rmtree(old, ignore_errors=True)


def replace_file(path: Path, text: str) -> None:
    """Writes a text file that is complete, old or new, at every moment.

    Raises:
      OSError: it cannot be written, of which `filename` is `path`; nothing is left behind.
    """
    beside = path.with_name(f".{path.name}.partial")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


@contextlib.contextmanager
def writable_output(run_dir: Path) -> Iterator[None]:
    """Around writes to a run folder: what the system refuses becomes one sentence.

    Raises:
      InputError: the folder cannot be written to.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"output_dir {run_dir} cannot be written ({error.strerror or error}); "
            "free space there or set another output_dir, then run the same command again"
        ) from error


def check_writable(folder: Path) -> None:
    """Checks, without making anything, that an output folder can be made or written to.

    Raises:
      InputError: it is a file, lies below one, or may not be written.
    """
    place = Path(os.path.abspath(folder))
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise InputError(f"output_dir {folder}: {place} is a file; set another output_dir")
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"output_dir {folder}: {place} may not be written; set another output_dir")


def check_replaceable(out_dir: Path, *, kind: str) -> None:
    """Checks that nothing would be overwritten but an earlier result of the same kind.

    Raises:
      InputError: `out_dir` is a file, or a non-empty folder that this package did not write, or
        wrote as something else, or in which there are other files too.
    """
    if not out_dir.exists() and not out_dir.is_symlink():
        return
    if not out_dir.is_dir():
        raise InputError(f"{out_dir}: exists and is not a folder; choose another output folder")
    if not any(out_dir.iterdir()):
        return
    held = _marker(out_dir).get("kind")
    if held != kind:
        what = "was not written by lora-tune" if held is None else f"holds the export {held!r}"
        raise InputError(
            f"{out_dir}: is not empty and {what}; choose another output folder or empty it"
        )
    written = _written(out_dir)
    if written is None:
        raise InputError(
            f"{out_dir}: would be replaced, and does not say which of its files lora-tune wrote; "
            "move it away or choose another output folder"
        )
    other = sorted({*_files(out_dir)}.difference(written))
    if other:
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        raise InputError(
            f"{out_dir}: would be replaced, and holds {other[0]}{more}, which lora-tune did not "
            "write; move it away or choose another output folder"
        )


def lost_files(folder: Path) -> list[str]:
    """The files of an export that are not there any more."""
    written = _written(folder) or []
    return [name for name in written if not (folder / name).is_file()]


def check_apart(out_dir: Path, source: Path) -> None:
    """Checks that what is written takes nothing away from what it is made of.

    Raises:
      InputError: one of the two folders is the other, or lies in it.
    """
    out, origin = out_dir.resolve(), source.resolve()
    if out == origin or out in origin.parents or origin in out.parents:
        raise InputError(
            f"{out_dir}: is, holds or lies in {source}, which it is made from; choose an output "
            "folder elsewhere"
        )


def check_inside(path: Path, folder: Path) -> None:
    """Checks that a file of a model folder does not lie somewhere else, by way of a link.

    Links within the folder are fine, and so are those of the hub's cache, whose snapshots link to
    the blobs of the same repository.

    Raises:
      InputError: naming the link and where it leads.
    """
    home, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    blobs = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    if not any(root in target.parents for root in (home, *blobs)):
        raise InputError(
            f"{path}: is a link to {target}, outside its folder; put the file itself there, or "
            "name the folder that holds it"
        )


def check_space(out_dir: Path, needed: int) -> None:
    """Checks that the disk has room for what is about to be written.

    Raises:
      InputError: it has not; both sizes are named.
    """
    place = Path(os.path.abspath(out_dir)).parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise InputError(
            f"{out_dir}: {_size(needed)} are to be written and the disk has {_size(free)} free, so "
            "nothing was; free some space or choose another folder"
        )


def _size(nbytes: int) -> str:
    unit, name = (1e9, "GB") if nbytes >= 1e8 else (1e6, "MB")
    return f"{nbytes / unit:,.1f} {name}"


def remedy(folder: Path) -> str:
    """What to do about a damaged file, which depends on who wrote its folder."""
    if folder.parent.name == "snapshots":
        return "remove the model from the hub's cache and download it again"
    if _marker(folder):
        return "write the folder again, or take a copy of it"
    if (folder / "adapter_config.json").is_file():
        return "save the adapter again, or take a copy of it"
    return "copy or download it again"


def _marker(folder: Path) -> dict[str, Any]:
    """What the marker of a folder of ours says, {} for a folder that is not ours."""
    try:
        found = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _written(folder: Path) -> list[str] | None:
    """The files that the marker of a folder names, None where it names none."""
    files = _marker(folder).get("files")
    return list(map(str, files)) if isinstance(files, list) else None


def _files(folder: Path) -> Iterator[str]:
    """The files and links below a folder, but for the marker."""
    for path in folder.rglob("*"):
        if (path.is_symlink() or not path.is_dir()) and path != folder / MARKER:
            yield path.relative_to(folder).as_posix()


def check_companions(source: Path, *, skip: Sequence[str] = ()) -> None:
    """Checks what `copy_companions` would copy.

    Raises:
      InputError: one of them is a link out of the folder: what it leads to is not the model's.
    """
    for file in (*_companions(source, skip), *(source / _TEMPLATES).rglob("*")):
        check_inside(file, source)


def copy_companions(source: Path, target: Path, *, skip: Sequence[str] = ()) -> None:
    """Copies what belongs to a model beside its weights: configuration, tokenizer, templates.

    Raises:
      InputError: as of `check_companions`.
    """
    check_companions(source, skip=skip)
    for file in _companions(source, skip):
        shutil.copyfile(file, target / file.name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, target / _TEMPLATES)


def _companions(source: Path, skip: Sequence[str]) -> Iterator[Path]:
    for file in sorted(source.iterdir()):
        wanted = file.suffix in _COPIED or file.name.startswith("LICENSE")
        index = file.name.endswith(".index.json") or file.name.startswith("adapter_")
        if file.is_file() and wanted and not index and file.name not in (*skip, MARKER):
            yield file


def _sync(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _swap(partial: Path, out_dir: Path, old: Path) -> None:
    if not out_dir.exists() or not any(out_dir.iterdir()):
        os.rename(partial, out_dir)  # over an empty folder this replaces it
        return
    shutil.rmtree(old, ignore_errors=True)
    os.rename(out_dir, old)
    try:
        os.rename(partial, out_dir)
    except OSError:
        os.rename(old, out_dir)
        raise
