# SPDX-License-Identifier: Apache-2.0
"""What a compiled program executes on one device: operations, memory traffic, communication.

Counted from the optimised HLO, loops multiplied by their trip counts. Of a conditional the branch
with the most operations counts. A loop whose trip count is data counts once, and is named.

* Operations are those of matrix products: `2 m k n`. A product by groups counts every row of its
  operand, whether or not the routing of a batch fills it. Those of Pallas kernels are not here: see
  `lora_tune.plan.kernels`.
* Memory traffic is what instructions read and write in the main memory, without the padding of
  layouts. A slice counts as the slice, an update in place as the update, a fusion as its inputs and
  outputs; what lies in the chip's vector memory counts nothing. It is an approximation: a kernel
  may read an operand more than once.
* Communication is counted by kind, in bytes that an instruction gives each device, and in the least
  that a device must send or receive for it (`wire`): of n devices, `(n-1)/n` of a gathered or
  exchanged array, twice that for a sum.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from lora_tune.plan.hlo import Array, Computation, Instruction, Module, trips

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
BETWEEN = "slices-"
"""Begins the kind of a collective that the hosts of several slices carry out."""
_NOTHING = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "constant",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "optimization-barrier",
    "copy-done",
    "iota",
}
_CALLERS = ("while", "conditional", "call", "async-start")


@dataclasses.dataclass
class Traffic:
    """One kind of collective on one device.

    Attributes:
      static: instructions in the program.
      executed: how often they run in a step.
      bytes: what they give the device in a step.
      wire: the least that it must send or receive for them inside its slice.
      between: the least that it must send or receive between slices.
    """

    static: int = 0
    executed: int = 0
    bytes: float = 0.0
    wire: float = 0.0
    between: float = 0.0

    def add(self, other: "Traffic", times: int) -> None:
        """Adds another's figures, executed `times` times."""
        self.static += other.static
        self.executed += other.executed * times
        self.bytes += other.bytes * times
        self.wire += other.wire * times
        self.between += other.between * times


@dataclasses.dataclass
class Cost:
    """What a computation executes once, with all that it calls."""

    flops: float = 0.0
    bytes: float = 0.0
    traffic: dict[str, Traffic] = dataclasses.field(default_factory=dict)
    dynamic: list[str] = dataclasses.field(default_factory=list)
    """Loops whose trip count is data: counted once."""
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)
    """Pallas kernels, whose operations the program does not show -> how often they run."""

    def add(self, other: "Cost", times: int = 1, *, memory: bool = True) -> None:
        """Adds another's figures, executed `times` times."""
        self.flops += other.flops * times
        self.bytes += other.bytes * times if memory else 0.0
        self.dynamic += other.dynamic
        for kind, traffic in other.traffic.items():
            self.traffic.setdefault(kind, Traffic()).add(traffic, times)
        for name, count in other.kernels.items():
            self.kernels[name] = self.kernels.get(name, 0) + count * times


def count(module: Module, *, devices: int, slice_devices: int | None = None) -> Cost:
    """Counts what one device executes in a run of a program.

    Args:
      module: the program.
      devices: that it runs on.
      slice_devices: how many of them, in order, make a slice; None for all.
    """
    slices = slice_devices or devices
    known: dict[str, Cost] = {}

    def of(name: str) -> Cost:
        if name not in known:
            computation, total = module.computations[name], Cost()
            for line in computation.instructions.values():
                _add(total, line, computation)
            known[name] = total
        return known[name]

    def _add(total: Cost, line: Instruction, computation: Computation) -> None:
        if line.op == "while":
            turns = trips(module, computation, line)
            if turns is None:
                total.dynamic.append(line.name)
            total.add(of(line.computation("body")), 1 if turns is None else turns)
        elif line.op == "conditional":
            branches = [of(name) for name in line.called]
            total.add(max(branches, key=lambda cost: (cost.flops, cost.bytes)))
        elif line.op in ("call", "async-start"):
            total.add(of(line.called[0]))
        elif line.op == "fusion":
            total.add(of(line.called[0]), memory=False)
            total.bytes += fusion_bytes(module, computation, line)
        else:
            total.bytes += _bytes(computation, line)
            total.flops += _flops(computation, line, total)
            kind = _kind(line)
            if kind is not None:
                traffic = _traffic(kind, computation, line, devices, slices)
                total.traffic.setdefault(kind, Traffic()).add(traffic, 1)

    return of(module.entry)


def _kind(line: Instruction) -> str | None:
    if line.op.endswith("-done"):
        return None
    if line.op == "recv":
        # Between slices XLA leaves collectives to the hosts: devices send to them and receive.
        moved = re.search(r'_xla_megascale_transfer_type="(\w+)"', line.rest)
        return moved and f"{BETWEEN}{moved[1].lower().replace('_', '-')}"
    kind = line.op.removesuffix("-start")
    return kind if kind in KINDS else None


# Operations


def _flops(computation: Computation, line: Instruction, total: Cost) -> float:
    if line.op == "dot" or line.op == "ragged-dot":
        lhs = _operand(computation, line, 0).dims
        inner = math.prod(lhs[dim] for dim in _numbers(line.rest, "lhs_contracting_dims"))
        return 2.0 * _size(line.arrays[0]) * inner
    if line.op == "convolution":
        return 2.0 * _convolution(computation, line)
    if line.op == "custom-call":
        return _kernel(computation, line, total)
    return 0.0


def _convolution(computation: Computation, line: Instruction) -> float:
    """Multiply-adds of a convolution, which is what matrix products become on a TPU.

    A batch dimension of a product becomes a dimension of the window that is dilated and padded so
    that each output meets one element; so only places inside the operand are counted.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.rest)
    if labels is None:
        raise ValueError(f"convolution {line.name} has no dim_labels")
    lhs, rhs = (_operand(computation, line, n).dims for n in (0, 1))
    out, window = line.arrays[0].dims, _window(line.rest)
    places = 1.0
    for n in range(len(out) - 2):
        label = str(n)
        places *= _met(
            lhs[labels[1].index(label)],
            rhs[labels[2].index(label)],
            out[labels[3].index(label)],
            {name: values[n] for name, values in window.items() if n < len(values)},
        )
    features = rhs[labels[2].index("i")]
    return places * features * out[labels[3].index("b")] * out[labels[3].index("f")]


def _window(rest: str) -> dict[str, list[tuple[int, ...]]]:
    match = re.search(r"window=\{([^}]*)\}", rest)
    if match is None:
        return {}
    fields = (field.split("=") for field in match[1].split())
    return {
        name: [tuple(int(n) for n in part.split("_")) for part in re.split(r"x", value)]
        for name, value in fields
        if name != "rhs_reversal"
    }


def _met(lhs: int, rhs: int, out: int, window: Mapping[str, tuple[int, ...]]) -> int:
    """Pairs of an output and a window element along one dimension that meet an input element."""
    stride, pad = window.get("stride", (1,))[0], window.get("pad", (0, 0))[0]
    base, step = window.get("lhs_dilate", (1,))[0], window.get("rhs_dilate", (1,))[0]
    at = np.arange(out)[:, None] * stride + np.arange(rhs)[None, :] * step - pad
    return int(((at >= 0) & (at <= (lhs - 1) * base) & (at % base == 0)).sum())


def _kernel(computation: Computation, line: Instruction, total: Cost) -> float:
    """Operations of a library's product, and of XLA's own kernel for products by groups."""
    target = re.search(r'custom_call_target="([^"]*)"', line.rest)
    name = target[1] if target else line.name
    if "gemm" in name or "matmul" in name:
        lhs = _operand(computation, line, 0).dims
        dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', line.rest)
        inner = [int(n) for n in re.findall(r"\d+", dims[1])] if dims else [len(lhs) - 1]
        return 2.0 * _size(line.arrays[0]) * math.prod(lhs[dim] for dim in inner)
    if name != "tpu_custom_call":
        return 0.0
    if line.name.startswith("ragged-dot"):
        return _grouped(computation, line)
    kernel = re.sub(r"[._]\d+$", "", line.name)
    total.kernels[kernel] = total.kernels.get(kernel, 0) + 1
    return 0.0


def _grouped(computation: Computation, line: Instruction) -> float:
    """A product of rows with the matrix of their group, or the gradient of such matrices."""
    operands = [
        array.dims
        for n in range(len(line.operands))
        for array in (_operand(computation, line, n),)
        if array.dtype[0] in "bf" and len(array.dims) >= 2
    ]
    shapes = (*operands[:2], line.arrays[0].dims)
    flat = [dims for dims in shapes if len(dims) == 2]
    if len(shapes) != 3 or len(flat) != 2:  # a table of groups
        return 0.0
    return 2.0 * flat[0][0] * flat[0][1] * flat[1][1]


def _numbers(rest: str, name: str) -> list[int]:
    match = re.search(rf"\b{name}=\{{([\d,]*)\}}", rest)
    return [int(n) for n in match[1].split(",") if n] if match else []


def _size(array: Array) -> int:
    return math.prod(array.dims)


def _operand(computation: Computation, line: Instruction, n: int) -> Array:
    return computation.instructions[line.operands[n]].arrays[0]


# Memory


def _main(arrays: Sequence[Array]) -> int:
    return sum(array.bytes for array in arrays if array.space == 0)


def _bytes(computation: Computation, line: Instruction) -> float:
    """Bytes that an instruction outside of fusions reads and writes in the main memory."""
    if line.op in _NOTHING or line.op in _CALLERS or line.op.endswith("-done"):
        return 0.0
    read = [computation.instructions[name].arrays for name in line.operands]
    if line.op in ("dynamic-slice", "slice", "gather"):
        return 2.0 * _main(line.arrays)
    if line.op == "dynamic-update-slice":
        return 2.0 * _main(read[1])
    if line.op == "scatter":
        return 3.0 * _main(read[-1])
    if line.op in ("copy-start", "recv"):
        return float(_main(line.arrays[:1]) + sum(map(_main, read)))
    if line.op == "send":
        return float(sum(map(_main, read)))
    if line.op.endswith("-start"):
        return float(_main(_results(computation, line)) + sum(map(_main, read)))
    return float(_main(line.arrays) + sum(map(_main, read)))


def fusion_bytes(module: Module, computation: Computation, line: Instruction) -> float:
    """Bytes of a fusion: its inputs as far as they are read, and its outputs as far as written."""
    inside = module.computations[line.called[0]]
    total = 0.0
    for number, name in enumerate(line.operands):
        array = computation.instructions[name].arrays
        if not _main(array):
            continue
        parameter = inside.parameters.get(number)
        part = None if parameter is None else _part_read(inside, parameter)
        total += _main(array) if part is None else min(part, _main(array))
    root = _past(inside, inside.root)
    results = [_past(inside, name) for name in root.operands] if root.op == "tuple" else [root]
    for array, result in zip(line.arrays, results, strict=False):
        if array.space == 0:
            updated = result.op == "dynamic-update-slice"
            total += _operand(inside, result, 1).bytes if updated else array.bytes
    return total


def _past(computation: Computation, name: str) -> Instruction:
    line = computation.instructions[name]
    while line.op in ("bitcast", "copy") and line.operands:
        line = computation.instructions[line.operands[0]]
    return line


def _part_read(computation: Computation, name: str) -> int | None:
    """Bytes read of a parameter that is only sliced, or updated in place; None for all of it."""
    total = 0
    for user in computation.users.get(name, ()):
        if user.op in ("bitcast", "get-tuple-element"):
            part = _part_read(computation, user.name)
            if part is None:
                return None
            total += part
        elif user.operands[0] == name and user.op in ("dynamic-slice", "slice", "gather"):
            total += user.bytes
        elif user.operands[0] != name or user.op != "dynamic-update-slice":
            return None
    return total


# Communication


def _results(computation: Computation, line: Instruction) -> Sequence[Array]:
    """The arrays that a collective gives; one that is started also names its operands."""
    if not line.op.endswith("-start") or line.op == "all-reduce-start":
        return line.arrays
    given = sum(len(computation.instructions[name].arrays) for name in line.operands)
    return line.arrays[given : 2 * given]


def _traffic(
    kind: str, computation: Computation, line: Instruction, devices: int, slice_devices: int
) -> Traffic:
    if kind.startswith(BETWEEN):
        parts, given = devices // slice_devices, line.arrays[0].bytes
        twice = 2.0 if kind.endswith("all-reduce") else 1.0
        return Traffic(1, 1, given, 0.0, twice * given * (parts - 1) / parts)
    given = sum(array.bytes for array in _results(computation, line))
    together = groups(line.rest, devices)
    size = max(len(group) for group in together)
    parts = max(len({device // slice_devices for device in group}) for group in together)
    whole = float(given * size if kind == "reduce-scatter" else given)
    if kind in ("collective-permute", "collective-broadcast"):
        crosses = parts > 1
        return Traffic(1, 1, given, 0.0 if crosses else given, given if crosses else 0.0)
    twice = 2.0 if kind == "all-reduce" else 1.0
    within = size // parts
    # Across slices the members of one slice share the work: each carries its part.
    between = twice * whole * (parts - 1) / parts / within
    wire = twice * whole * (within - 1) / within
    return Traffic(1, 1, given, wire, between)


def groups(rest: str, devices: int) -> list[list[int]]:
    """The devices of each group of a collective."""
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}", rest)
    if listed is not None:
        found = [
            [int(n) for n in part.split(",")] for part in re.findall(r"\{([\d,]+)\}", listed[1])
        ]
        return found or [list(range(devices))]
    spread = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if spread is not None:
        shape, base = ([int(n) for n in part.split(",")] for part in spread.group(1, 2))
        order = np.arange(math.prod(base)).reshape(base)
        if spread[3]:
            order = order.transpose([int(n) for n in spread[3].split(",")])
        return order.reshape(shape).tolist()
    return [list(range(devices))]
