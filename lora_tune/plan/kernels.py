# SPDX-License-Identifier: Apache-2.0
"""Operations of Pallas kernels, which a compiled program holds as code that cannot be read.

They are counted in the traced step: the matrix products of a kernel's body, times its grid.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax

_KERNEL = "pallas_call"


def kernel_flops(jaxpr: Any) -> float:
    """Operations of the matrix products in all kernels of a jaxpr, as often as loops run them.

    Of a conditional, in the step or in a kernel, the branch with the most counts: a block that a
    mask leaves out counts as well.
    """
    return _walk(jaxpr, inside=False)


def _walk(jaxpr: Any, *, inside: bool) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if inside and name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            total += 2.0 * math.prod(eqn.outvars[0].aval.shape) * inner
            continue
        within = [_walk(sub, inside=inside or name == _KERNEL) for sub in _jaxprs(params)]
        if name == "cond":
            total += max(within)
        elif name == "scan":
            total += params["length"] * sum(within)
        elif name == _KERNEL:
            total += _runs(params["grid_mapping"]) * sum(within)
        else:
            total += sum(within)
    return total


def _runs(mapping: Any) -> int:
    """How often a kernel's body runs; what data decide is taken as once for every block of rows."""
    known = [size for size in mapping.grid if isinstance(size, int)]
    if len(known) == len(mapping.grid):
        return math.prod(known)
    most = max(_blocks(operand) for operand in mapping.block_mappings)
    # The operand with the most blocks has those of its rows for each block of its columns.
    return math.prod(known) * -(-most // max(known, default=1))


def _blocks(operand: Any) -> int:
    blocks = [getattr(size, "block_size", size) for size in operand.block_shape]
    sizes = zip(operand.array_aval.shape, blocks, strict=True)
    return math.prod(-(-whole // part) if isinstance(part, int) else 1 for whole, part in sizes)


def _jaxprs(params: Any) -> Iterator[Any]:
    for value in jax.tree.leaves(list(params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
            yield inner
