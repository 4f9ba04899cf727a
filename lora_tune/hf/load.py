# SPDX-License-Identifier: Apache-2.0
"""Loading a Hugging Face checkpoint into our parameters: total, and streamed slice by slice."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from lora_tune.errors import InputError
from lora_tune.hf.files import DTYPES, Checkpoint, Tensor, open_checkpoint, raise_listed
from lora_tune.hf.table import Family, Leaf, Path, base_params, bind, make_array

_HEAD, _EMBEDDING = "lm_head.kernel", "embed_tokens.embedding"
# Exponent bits all set: an infinity or a NaN. Integer tests are many times faster than isfinite
# on 16-bit floats, and 80 billion of them are looked at.
_NON_FINITE = {"bfloat16": 0x7F80, "float16": 0x7C00}


def load_params(
    model: nnx.Module,
    family: Family,
    folder: FilePath | str,
    *,
    dtype: DTypeLike | None = None,
    shardings: Mapping[Path, jax.sharding.Sharding] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> nnx.State:
    """Reads the weights of `model` from a folder of safetensors.

    Every parameter is assembled per device: a device's slice is filled from the parts of the files
    that it covers, cast there, and sent off, so host memory holds about one slice of one (stacked)
    parameter at a time. Values are only moved and cast, never changed.

    Args:
      model: concrete or abstract; only shapes and metadata are read.
      family: its table.
      folder: `model.safetensors`, or shards with `model.safetensors.index.json`.
      dtype: type of the arrays, None for the model's own.
      shardings: where each parameter goes, by path; those left out go to the default device.
      progress: called with (parameters done, parameters in all) after each one.

    Returns:
      A state of the structure and metadata of the model's base parameters, for `nnx.update`.

    Raises:
      InputError: damaged files; tensors that are unknown, missing or of the wrong shape or type,
        all named at once; a tensor with a NaN or an infinity.
    """
    leaves = bind(family, model)
    checkpoint = open_base(folder, family)
    check_tensors(checkpoint, leaves, family)
    variables = base_params(model)
    shardings = shardings or {}
    loaded = {}
    for done, leaf in enumerate(leaves, start=1):
        target = np.dtype(dtype if dtype is not None else leaf.dtype)
        array = _load(leaf, checkpoint, target, shardings.get(leaf.path))
        loaded[leaf.path] = variables[leaf.path].replace(array)
        if progress is not None:
            progress(done, len(leaves))
    return nnx.from_flat_state(loaded)


def check_tensors(checkpoint: Checkpoint, leaves: Sequence[Leaf], family: Family) -> None:
    """Checks that the files hold exactly what the model needs.

    Tensors that match `family.ignored` may be there. So may the head of a model that ties it to
    the embedding, if both are equal: transformers unties them otherwise.

    Raises:
      InputError: naming every tensor that is missing, unknown, or of the wrong shape or type.
    """
    expected = {name: leaf.hf_shape for leaf in leaves for name in leaf.names.ravel()}
    present = checkpoint.tensors
    problems = [f"{name} is missing" for name in expected if name not in present]
    head, embedding = _tied_names(leaves, family)
    for name, tensor in present.items():
        if name in expected:
            problems += _tensor_problems(tensor, expected[name])
        elif name == head:
            problems += _tied_problems(tensor, present.get(embedding))
        elif not _is_ignored(name, family):
            problems.append(f"{tensor.stored} in {tensor.file.name} is unknown to this model")
    raise_listed(f"{checkpoint.folder}: the checkpoint does not fit the model", problems)


def open_base(folder: FilePath | str, family: Family) -> Checkpoint:
    """Reads the headers of a checkpoint, with the names that the family's table has."""
    return open_checkpoint(FilePath(folder), renamed=family.renamed, fused=family.fused)


def stored_names(folder: FilePath | str, family: Family) -> dict[str, str]:
    """The table's name of every tensor of a checkpoint -> its name in the files.

    Parts of fused tensors have names of their own, as in files without fused tensors.
    """
    checkpoint = open_base(folder, family)
    return {name: tensor.stored for name, tensor in checkpoint.tensors.items()}


def ignored_tensors(folder: FilePath | str, family: Family) -> list[Tensor]:
    """The tensors of a checkpoint that no model of the family holds, in the order of the files."""
    checkpoint = open_base(folder, family)
    return [
        tensor
        for tensors in checkpoint.files.values()
        for tensor in tensors
        if _is_ignored(tensor.name, family)
    ]


def _is_ignored(name: str, family: Family) -> bool:
    return any(re.fullmatch(pattern, name) for pattern, _ in family.ignored)


def _load(
    leaf: Leaf, checkpoint: Checkpoint, dtype: np.dtype, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    def read(name: str, window: tuple[slice, ...]) -> np.ndarray:
        tensor = checkpoint.tensors[name]
        values = tensor.array()[leaf.view.hf_index(window)]
        with np.errstate(over="ignore"):  # an overflow is reported below, by name
            part = leaf.view.from_hf(values).astype(dtype, copy=False)
        if not _is_finite(part):
            raise InputError(
                f"{tensor.where} holds a NaN or an infinity (read as {dtype}); the checkpoint is "
                "damaged or does not fit this type"
            )
        return part

    return make_array(leaf, dtype, read, sharding)


def _is_finite(array: np.ndarray) -> bool:
    limit = _NON_FINITE.get(array.dtype.name)
    if limit is None:
        return bool(np.isfinite(array).all())
    bits = array.ravel(order="K").view(np.uint16) & 0x7FFF  # as it lies: transposed, often
    return not array.size or int(bits.max()) < limit


def _tensor_problems(tensor: Tensor, shape: tuple[int, ...]) -> Iterator[str]:
    if tensor.shape != shape:
        yield (
            f"{tensor.stored} in {tensor.file.name} has shape {list(tensor.shape)}, "
            f"expected {list(shape)}"
        )
    if tensor.dtype not in DTYPES:
        yield (
            f"{tensor.stored} in {tensor.file.name} has type {tensor.dtype}, expected one of "
            f"{', '.join(DTYPES)} (quantised checkpoints cannot be read)"
        )


def _tied_names(leaves: Sequence[Leaf], family: Family) -> tuple[str, str]:
    """Names of head and embedding when the model has no head of its own, else empty."""
    theirs = {row.ours: row.theirs for row in family.top_rows}
    if any(leaf.dotted == _HEAD for leaf in leaves):
        return "", ""
    return theirs.get(_HEAD, ""), theirs.get(_EMBEDDING, "")


def _tied_problems(head: Tensor, embedding: Tensor | None) -> list[str]:
    if embedding is None:
        return []  # reported as missing
    same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
    if same and np.array_equal(head.bytes(), embedding.bytes()):
        return []
    return [
        f"{head.name} in {head.file.name} differs from {embedding.name}, though "
        "tie_word_embeddings is true; set it to false in config.json"
    ]
