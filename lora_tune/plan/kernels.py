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
            total += math.prod(params["grid_mapping"].grid) * sum(within)
        else:
            total += sum(within)
    return total


def _jaxprs(params: Any) -> Iterator[Any]:
    for value in jax.tree.leaves(list(params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
            yield inner
