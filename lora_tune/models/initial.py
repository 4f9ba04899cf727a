# SPDX-License-Identifier: Apache-2.0
"""Fresh weights, drawn per Hugging Face tensor.

Each tensor's values follow from a seed and the tensor's name alone: they do not depend on how
layers are stacked, scanned or sharded, nor on how many devices there are.
"""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from lora_tune.hf.table import Cell, Leaf, Path, base_params, bind, make_array
from lora_tune.layers.weights import Draw


def generator(seed: int, name: str) -> np.random.Generator:
    """The random generator of one tensor."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def draw_leaf(leaf: Leaf, draw: Draw, seed: int, sharding: Sharding | None = None) -> jax.Array:
    """Fills a stacked parameter tensor by tensor, each device's part on its own.

    Args:
      leaf: shape, dtype and the Hugging Face name of every slice.
      draw: `(generator, shape without stacked axes) -> values`.
      seed: joined with each slice's name.
      sharding: None for the default device.
    """
    inner_shape = tuple(leaf.shape[i] for i in leaf.inner_axes)

    def fill(cells: Iterator[Cell]) -> None:
        for name, window, out in cells:
            out[...] = draw(generator(seed, name), inner_shape)[window]

    return make_array(leaf, leaf.dtype, fill, sharding)


def initialise(model: Any, *, seed: int, shardings: Mapping[Path, Sharding] | None = None) -> Any:
    """Returns the abstract model with fresh weights.

    Args:
      model: an abstract decoder; not modified.
      seed: of every weight.
      shardings: where each parameter goes, by path; those left out go to the default device.
    """
    variables = base_params(model)
    drawn = {}
    for leaf in bind(model.family, model):
        variable = variables[leaf.path]
        init = variable.get_metadata()["init"]
        array = draw_leaf(leaf, init, seed, (shardings or {}).get(leaf.path))
        drawn[leaf.path] = variable.replace(array)
    return nnx.merge(nnx.split(model)[0], nnx.from_flat_state(drawn))
