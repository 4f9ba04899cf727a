# SPDX-License-Identifier: Apache-2.0
"""Compiled HLO text as data: computations, their instructions, and how often each loop runs."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

_BITS = {"pred": 8, "bf16": 16, "f8e4m3": 8, "f8e5m2": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (.*?)\s([a-z][\w\-]*)\((.*)$")
_HEAD = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
_END = re.compile(r'\}(, execution_thread="\w+")?')
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations)="
    r"(?:\{([^}]*)\}|%([\w.\-]+))"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of an instruction's result.

    Attributes:
      dtype: as HLO spells it.
      dims: its sizes.
      space: memory that it lies in, 0 for the device's main memory.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int

    @functools.cached_property
    def bytes(self) -> int:
        """Its size without the padding of its layout."""
        return -(-math.prod(self.dims) * _bits(self.dtype) // 8)


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 8


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without the percent sign.
      op: the operation, such as `fusion`.
      arrays: its results; of nested tuples every array.
      operands: names of instructions of the same computation.
      argument: the text between the parentheses, where it is no operand: a constant, an index.
      rest: the attributes as text.
    """

    name: str
    op: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    argument: str
    rest: str

    @property
    def bytes(self) -> int:
        """Bytes of all results, in whatever memory."""
        return sum(array.bytes for array in self.arrays)

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs."""
        found = []
        for several, one in _CALLED.findall(self.rest):
            found += _NAME.findall(several) if several else [one]
        return tuple(found)

    def computation(self, attribute: str) -> str:
        """The name of one called computation."""
        match = re.search(rf"\b{attribute}=%([\w.\-]+)", self.rest)
        if match is None:
            raise ValueError(f"{self.op} {self.name} has no {attribute}")
        return match[1]


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Instructions by name, in order; the last marked ROOT is the result."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    @functools.cached_property
    def parameters(self) -> Mapping[int, str]:
        """Parameter number -> name."""
        return {
            int(line.argument): line.name
            for line in self.instructions.values()
            if line.op == "parameter"
        }

    @functools.cached_property
    def users(self) -> Mapping[str, Sequence[Instruction]]:
        """Name -> the instructions that read it."""
        found: dict[str, list[Instruction]] = {}
        for line in self.instructions.values():
            for name in line.operands:
                found.setdefault(name, []).append(line)
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A compiled program."""

    computations: Mapping[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """Reads what `compiled.as_text()` gives.

    Raises:
      ValueError: there is no entry computation in it.
    """
    computations: dict[str, Computation] = {}
    entry = name = root = None
    lines: dict[str, Instruction] = {}
    for line in _joined(text):
        if name is None:
            head = _HEAD.match(line)
            if head is not None:
                name, root, lines = head[2], None, {}
                entry = name if head[1] else entry
        elif _END.fullmatch(line):
            computations[name] = Computation(name, lines, root or next(reversed(lines)))
            name = None
        else:
            found = _LINE.match(line)
            if found is not None:
                lines[found[2]] = _instruction(found)
                root = found[2] if found[1] else root
    if entry is None:
        raise ValueError("this is no text of a compiled program: it has no ENTRY")
    return Module(computations, entry)


def _joined(text: str) -> Iterator[str]:
    """The lines, each with what follows it without being an instruction: metadata of kernels."""
    held: str | None = None
    for line in text.splitlines():
        begins = line.startswith("  ") or _END.fullmatch(line) or _HEAD.match(line)
        if held is not None and not begins:
            held += line
            continue
        if held is not None:
            yield held
        held = line
    if held is not None:
        yield held


def _instruction(found: re.Match[str]) -> Instruction:
    _, name, result, op, tail = found.groups()
    end = _closing(tail)
    inside, rest = tail[:end], tail[end + 1 :]
    return Instruction(name, op, arrays(result), tuple(_NAME.findall(inside)), inside, rest)


def _closing(tail: str) -> int:
    """Where the parenthesis closes that was opened before `tail`."""
    depth = 1
    for match in re.finditer(r"[()]", tail):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(tail)


def arrays(text: str) -> tuple[Array, ...]:
    """Every array in the text of a type."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(size) for size in dims.split(",") if size)
        found.append(Array(dtype, sizes, int(space[1]) if space else 0))
    return tuple(found)


def trips(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a `while` runs its body, None where only its data can tell.

    XLA says so for some loops. For others the condition compares a counter, which begins at a
    constant and rises by one, with a constant.
    """
    said = _TRIPS.search(loop.rest)
    if said is not None:
        return int(said[1])
    condition = module.computations[loop.computation("condition")]
    body = module.computations[loop.computation("body")]
    compare, within = _compare(module, condition)
    if compare is None:
        return None
    first = _through(computation, loop.operands[0])
    if first is None or first.op != "tuple":
        return None
    starts = [_constant(computation, name) for name in first.operands]
    elements = [_element(condition, within, name) for name in compare.operands]
    limits = [_constant(within, name) for name in compare.operands]
    for place, index in enumerate(elements):
        if limits[place] is None and index is not None and _stays(body, index):
            limits[place] = starts[index]
    counters = [i for i, limit in zip(elements, limits, strict=True) if limit is None]
    known = [limit for limit in limits if limit is not None]
    if len(known) != 1 or counters[0] is None or not _rises(module, body, counters[0]):
        return None
    start = starts[counters[0]]
    return None if start is None else max(0, known[0] - start + ("direction=LE" in compare.rest))


def _compare(module: Module, condition: Computation) -> tuple[Instruction | None, Computation]:
    """The comparison that a condition ends with, and the computation that it stands in."""
    within, line = condition, condition.instructions[condition.root]
    while line.op in ("fusion", "bitcast", "copy", "call"):
        if line.called:
            within = module.computations[line.called[0]]
            line = within.instructions[within.root]
        else:
            line = within.instructions[line.operands[0]]
    return (line if line.op == "compare" else None), within


def _through(computation: Computation, name: str) -> Instruction | None:
    """The instruction that a value comes from, past copies."""
    line = computation.instructions.get(name)
    while line is not None and line.op in ("copy", "bitcast", "reshape"):
        line = computation.instructions.get(line.operands[0])
    return line


def _constant(computation: Computation, name: str) -> int | None:
    line = _through(computation, name)
    if line is None or line.op != "constant" or not re.fullmatch(r"-?\d+", line.argument):
        return None
    return int(line.argument)


def _index(line: Instruction | None) -> int | None:
    if line is None or line.op != "get-tuple-element":
        return None
    match = re.search(r"index=(\d+)", line.rest)
    return int(match[1]) if match else None


def _stays(body: Computation, index: int) -> bool:
    """Whether a loop hands an element of its state on as it is."""
    root = body.instructions[body.root]
    return root.op == "tuple" and _index(_through(body, root.operands[index])) == index


def _element(condition: Computation, within: Computation, name: str) -> int | None:
    """The element of the loop's state that a value in its condition is."""
    line = within.instructions.get(name)
    if within is not condition and line is not None and line.op == "parameter":
        outer = condition.instructions[condition.root]
        while not outer.called:
            outer = condition.instructions[outer.operands[0]]
        within, line = condition, condition.instructions[outer.operands[int(line.argument)]]
    return None if line is None else _index(_through(within, line.name))


def _rises(module: Module, body: Computation, index: int) -> bool:
    """Whether a turn of a loop adds one to an element of its state."""
    root = body.instructions[body.root]
    if root.op != "tuple":
        return False
    within, line = body, _through(body, root.operands[index])
    if line is not None and line.op == "fusion":
        within = module.computations[line.called[0]]
        line = _through(within, within.root)
    if line is None or line.op != "add":
        return False
    added = [number for number in (_constant(within, name) for name in line.operands) if number]
    # What a fusion is handed, or an earlier turn has left, is one as well: jax counts by one.
    return not added or added == [1]
