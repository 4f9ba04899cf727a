# SPDX-License-Identifier: Apache-2.0
"""Cuts a window from a checkpoint and from an adapter: folders as any other program reads them.

Bytes are copied, and only those of the window are read. Layers and experts get new numbers.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lora_tune.errors import InputError
from lora_tune.hf.files import SINGLE, Checkpoint, read_json
from lora_tune.hf.folder import check_space
from lora_tune.hf.header import header_bytes, read_header, write_array
from lora_tune.hf.load import open_base
from lora_tune.hf.peft import WEIGHTS_FILE
from lora_tune.hf.peft_config import CONFIG_FILE
from lora_tune.hf.tensors import Reader, Tensor
from lora_tune.models.family import Family
from lora_tune.proof.windows import UNUSED, Window, cut_config

_ROUTER = ".mlp.gate.weight"
_NUMBER = re.compile(r"(?<=\blayers)(\\?\.)(\d+)\b")


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a window has of a stored tensor.

    Attributes:
      name, shape: in the window.
      tensor: where it comes from.
      start, stop: its bytes there.
      cut: makes the bytes of the window of those, uint8; None leaves them as they are.
    """

    name: str
    shape: tuple[int, ...]
    tensor: Tensor
    start: int
    stop: int
    cut: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def nbytes(self) -> int:
        """Its size in the window's file."""
        return self.tensor.nbytes * prod(self.shape) // max(1, prod(self.tensor.shape))


def cut_base(source: Path, target: Path, family: Family, window: Window) -> None:
    """Writes the configuration and the weights of a window of a checkpoint.

    Raises:
      InputError: the checkpoint cannot be read, or the window cannot be written or has no room.
    """
    config = cut_config(read_json(source / "config.json"), family, window)
    checkpoint = open_base(source, family)
    start = re.compile(re.escape(family.layer_prefix).replace(re.escape("{i}"), r"\d+"))
    whole = [tensor for tensors in checkpoint.files.values() for tensor in tensors]
    pieces = [
        piece
        for tensor in whole
        if not tensor.name.startswith(UNUSED)
        and (piece := _piece(tensor, checkpoint, window, layered=bool(start.match(tensor.name))))
    ]
    check_space(target, sum(piece.nbytes for piece in pieces))
    with _writing(target):
        (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        _write(target / SINGLE, pieces)


def _piece(
    tensor: Tensor, checkpoint: Checkpoint, window: Window, *, layered: bool
) -> Piece | None:
    """What a window has of a stored tensor; None where it has nothing of it."""
    if not layered:
        return Piece(tensor.stored, tensor.shape, tensor, 0, tensor.nbytes)
    name = window.inside(tensor.stored)
    if name is None:
        return None
    by_expert = tensor.stored in checkpoint.parts or tensor.name.endswith(_ROUTER)
    if not by_expert or window.experts is None:
        return Piece(name, tensor.shape, tensor, 0, tensor.nbytes)
    kept, each = window.experts, tensor.nbytes // tensor.shape[0]
    shape = (len(kept), *tensor.shape[1:])
    return Piece(name, shape, tensor, kept.start * each, kept.stop * each)


def cut_adapter(source: Path, target: Path, window: Window, experts: int) -> bool:
    """Writes what a window has of a PEFT adapter; its configuration says what it said.

    Args:
      source: the adapter's folder.
      target: the new one.
      window: layers and experts.
      experts: routed experts of a sparse layer of the whole model.

    Returns:
      Whether there is anything; without, nothing is written.

    Raises:
      InputError: the adapter cannot be read or cut, or the window cannot be written.
    """
    tensors = read_header(source / WEIGHTS_FILE)[0]
    pieces = [piece for tensor in tensors if (piece := _half(tensor, window, experts))]
    if not pieces:
        return False
    config = _adapter_config(read_json(source / CONFIG_FILE), window)
    with _writing(target):
        (target / CONFIG_FILE).write_text(json.dumps(config, indent=2), encoding="utf-8")
        _write(target / WEIGHTS_FILE, pieces)
    return True


def _half(tensor: Tensor, window: Window, experts: int) -> Piece | None:
    """What a window has of an A or B; those of fused experts are `[E r, in]` and `[out, r E]`."""
    name = window.inside(tensor.name)
    if name is None:
        return None
    fused = re.search(r"\.mlp\.experts(\.base_layer)?\.lora_([AB])\.", name)
    if fused is None or window.experts is None:
        return Piece(name, tensor.shape, tensor, 0, tensor.nbytes)
    kept = window.experts
    if fused[2] == "A":
        each = tensor.nbytes // experts
        shape = (tensor.shape[0] // experts * len(kept), tensor.shape[1])
        return Piece(name, shape, tensor, kept.start * each, kept.stop * each)
    rank = tensor.shape[1] // experts

    def columns(data: np.ndarray) -> np.ndarray:
        split = data.reshape(tensor.shape[0], rank, experts, -1)
        return split[:, :, kept.start : kept.stop].reshape(-1)

    shape = (tensor.shape[0], rank * len(kept))
    return Piece(name, shape, tensor, 0, tensor.nbytes, columns)


def _adapter_config(config: dict[str, Any], window: Window) -> dict[str, Any]:
    """The configuration with layers renumbered wherever it names one."""
    for key in ("target_modules", "target_parameters"):
        found = config.get(key)
        if isinstance(found, str):
            raise InputError(
                f"{CONFIG_FILE}: {key} is an expression, which cannot be cut to a part of the "
                "layers; raise limit_gb"
            )
        if found:
            config[key] = _kept(found, window)
    for key in ("rank_pattern", "alpha_pattern"):
        found = config.get(key) or {}
        named = {_renumbered(name, window): value for name, value in found.items()}
        config[key] = {name: value for name, value in named.items() if name is not None}
    return config


def _kept(names: Sequence[str], window: Window) -> list[str]:
    return [new for name in names if (new := _renumbered(name, window)) is not None]


def _renumbered(name: str, window: Window) -> str | None:
    """An ending of a name, as text or as an expression, in the window; None if it has no such."""
    match = _NUMBER.search(name)
    if match is None:
        return name
    if int(match[2]) not in window.layers:
        return None
    return _NUMBER.sub(lambda m: m[1] + str(window.layers.index(int(m[2]))), name)


def _write(path: Path, pieces: Sequence[Piece]) -> None:
    """Writes a file tensor by tensor, one in memory at a time."""
    entries = ((p.name, p.tensor.dtype, p.shape, p.nbytes) for p in pieces)
    with path.open("wb") as out, Reader() as reader:
        out.write(header_bytes(entries, {"format": "pt"}))
        for piece in pieces:
            data = reader.read(piece.tensor, piece.start, piece.stop)
            write_array(out, data if piece.cut is None else piece.cut(data))


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        target.mkdir(parents=True)
        yield
    except OSError as error:
        raise InputError(
            f"{target}: could not be written ({error.strerror or error}); free some space"
        ) from error
