# SPDX-License-Identifier: Apache-2.0
"""Slices of TPUs as data: from the names that users write to chips, links and published rates.

`v5p-256` counts TensorCores, as Cloud TPU does for v4, v5p and 7x, and `v6e-8` counts chips.
The figures of a generation are those of its page under https://cloud.google.com/tpu/docs
(`v4`, `v5e`, `v5p`, `v6e`, `tpu7x`), "key specifications", read in November 2026.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from difflib import get_close_matches

from lora_tune.errors import InputError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Generation:
    """One generation of TPU; rates are of a chip.

    Attributes:
      libtpu: its name in libtpu's topologies.
      kind: what `jax.Device.device_kind` says.
      hbm: bytes of memory that a program may have, on all devices of the chip together. It is what
        libtpu 0.0.42.1 names as available when a program needs more, or the published capacity
        where that is less.
      flops: peak operations a second in bfloat16.
      hbm_rate: bytes a second between memory and chip.
      ici_rate: bytes a second that all links together carry one way, half of the published
        "bidirectional" figure.
      ports: links of a chip.
      dcn_rate: bytes a second of a chip between slices; the published figure of a pod divided by
        its chips for v5e. For v4 none is published.
      cores: TensorCores of a chip.
      counts_cores: whether names count cores rather than chips.
      devices: jax devices of a chip.
      config: `chip_config_name` of libtpu.
      most: chips of the largest slice.
    """

    libtpu: str
    kind: str
    hbm: int
    flops: float
    hbm_rate: float
    ici_rate: float
    ports: int
    dcn_rate: float | None
    cores: int
    counts_cores: bool
    devices: int
    config: str
    most: int


GENERATIONS: dict[str, Generation] = {
    "v4": Generation(
        libtpu="v4",
        kind="TPU v4",
        hbm=int(30.75 * GIB),  # of 32 GiB
        flops=275e12,
        hbm_rate=1228e9,
        ici_rate=300e9,  # 2400 Gbps
        ports=6,
        dcn_rate=None,
        cores=2,
        counts_cores=True,
        devices=1,
        config="megacore",
        most=4096,
    ),
    "v5e": Generation(
        libtpu="v5e",
        kind="TPU v5 lite",
        hbm=int(15.75 * GIB),  # of 16 GiB
        flops=197e12,
        hbm_rate=819e9,
        ici_rate=200e9,  # 400 GBps bidirectional
        ports=4,
        dcn_rate=6.4e12 / 8 / 256,  # 6.4 Tbps a pod
        cores=1,
        counts_cores=False,
        devices=1,
        config="default",
        most=256,
    ),
    "v5p": Generation(
        libtpu="v5p",
        kind="TPU v5",
        hbm=95 * GIB,  # libtpu: 95.74
        flops=459e12,
        hbm_rate=2765e9,
        ici_rate=600e9,  # 1200 GBps bidirectional
        ports=6,
        dcn_rate=50e9 / 8,
        cores=2,
        counts_cores=True,
        devices=1,
        config="megacore",
        most=6144,
    ),
    "v6e": Generation(
        libtpu="v6e",
        kind="TPU v6 lite",
        hbm=int(31.25 * GIB),  # of 32 GiB
        flops=918e12,
        hbm_rate=1638e9,
        ici_rate=400e9,  # 800 GBps bidirectional
        ports=4,
        dcn_rate=100e9 / 8,
        cores=1,
        counts_cores=False,
        devices=1,
        config="default",
        most=256,
    ),
    "tpu7x": Generation(
        libtpu="tpu7x",
        kind="TPU7x",
        hbm=2 * int(94.75 * GIB),  # of 192 GiB, in two halves
        flops=2307e12,
        hbm_rate=7380e9,
        ici_rate=600e9,  # 1200 GBps bidirectional
        ports=6,
        dcn_rate=100e9 / 8,
        cores=2,
        counts_cores=True,
        devices=2,
        config="default",
        most=9216,
    ),
}
ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v5": "v5p", "v6": "v6e", "v7x": "tpu7x"}
"""Other names of generations, as Cloud TPU or libtpu spell them."""
_GRIDS: dict[int, tuple[int, ...]] = {
    1: (1, 1, 1),
    4: (2, 2, 1),
    8: (2, 2, 2),
    16: (2, 2, 4),
    32: (2, 4, 4),
}
_FLAT_GRIDS = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16)}
_FLAT_GRIDS[256] = (16, 16)
_CUBE = 4
_POD_SIDE = 16
ATTACHED = ("cpu", "gpu", "tpu")
"""Names that mean the devices of this machine."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Slices of one kind, joined over the data center network where there are several.

    Attributes:
      name: as the user wrote it, without the number of slices.
      generation: of its chips; None for the devices of this machine.
      grid: chips along each axis of a slice.
      wrap: axes that close to a ring.
      slices: number of slices.
    """

    name: str
    generation: str | None = None
    grid: tuple[int, ...] = (1,)
    wrap: tuple[bool, ...] = (False,)
    slices: int = 1

    @property
    def facts(self) -> Generation:
        """The figures of its generation."""
        return GENERATIONS[str(self.generation)]

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return math.prod(self.grid) * self.slices

    @property
    def devices(self) -> int:
        """Devices, as jax counts them, of all slices."""
        return self.chips * self.facts.devices

    @property
    def host_grid(self) -> tuple[int, ...]:
        """Chips of a host along each axis; the hosts of slices with 8 v5e or v6e chips have 8."""
        if len(self.grid) == 2 and math.prod(self.grid) <= 8:
            return (*self.grid, 1)
        return (min(2, self.grid[0]), min(2, self.grid[1]), 1)

    @property
    def hosts(self) -> int:
        """Hosts of all slices."""
        return self.chips // math.prod(self.host_grid)

    @property
    def links(self) -> int:
        """Links that the chip with the fewest has: on a ring two an axis, else one."""
        return sum(
            2 if closed else 1
            for side, closed in zip(self.grid, self.wrap, strict=True)
            if side > 1
        )

    @property
    def title(self) -> str:
        """The name, with the number of slices."""
        return self.name if self.slices == 1 else f"{self.slices}x{self.name}"

    @property
    def libtpu_name(self) -> str:
        """What libtpu calls a slice."""
        return f"{self.facts.libtpu}:{'x'.join(map(str, self.grid))}"

    def libtpu_options(self) -> dict[str, object]:
        """The options that make libtpu describe these slices.

        Without `wrap` the compiler takes a torus for a mesh and emits another program: a gather
        over the slice becomes an all-reduce of a buffer of its full size.
        """
        return {
            "chip_config_name": self.facts.config,
            "chips_per_host_bounds": self.host_grid,
            "num_slices": self.slices,
            "wrap": (*self.wrap, False)[:3],
        }


def parse(text: str, *, slices: int = 1) -> tuple[Topology, ...]:
    """Reads `topology=`: names with commas between, each with its number of slices before an x.

    Args:
      text: such as `v5p-8,2xv6e-256` or `cpu`.
      slices: number of slices of names that do not say it.

    Raises:
      InputError: an unknown generation or size; the sentence names the nearest that there are.
    """
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise InputError(f"topology={text} has an empty name; write topology=v5p-8,v6e-8")
    return tuple(_one(name.lower(), slices) for name in names)


def known(generation: str) -> Iterator[str]:
    """The names of slices of a generation, by size, up to those a user may write by hand."""
    facts = GENERATIONS[generation]
    for chips in (1, 4, 8, 16, 32, *(64 * 2**n for n in range(8))):
        if chips <= facts.most and _grid(generation, chips) is not None:
            yield f"{generation}-{chips * (facts.cores if facts.counts_cores else 1)}"


def _one(name: str, slices: int) -> Topology:
    if name in ATTACHED:
        if slices != 1:
            raise InputError(f"slices={slices}: topology={name} is this machine, which is one")
        return Topology(name)
    match = re.fullmatch(r"(?:(\d+)x)?([a-z]+\d*[a-z]*)-(\d+)", name)
    generation = match and ALIASES.get(match[2], match[2])
    if match is None or generation not in GENERATIONS:
        raise InputError(f"topology {name!r} is not known; {_meant(name)}")
    count = int(match[1] or slices)
    if count < 1:
        raise InputError(f"topology {name!r} has {count} slices, expected at least 1")
    facts, number = GENERATIONS[generation], int(match[3])
    chips, rest = divmod(number, facts.cores if facts.counts_cores else 1)
    grid = None if rest or not 0 < chips <= facts.most else _grid(generation, chips)
    if grid is None:
        counted = "cores" if facts.counts_cores else "chips"
        sizes = sorted(known(generation), key=lambda known: abs(_size(known) - number))
        nearest = sorted(sizes[:3], key=_size)
        raise InputError(
            f"topology {name!r}: there is no slice of {number} {counted}; the nearest are "
            f"{', '.join(nearest)}"
        )
    return Topology(f"{match[2]}-{number}", generation, grid, _wrap(grid), count)


def _size(name: str) -> int:
    return int(name.rpartition("-")[2])


def _meant(name: str) -> str:
    every = [*ATTACHED, *(each for generation in GENERATIONS for each in known(generation))]
    close = get_close_matches(name, every, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return (
        f"{hint}expected a slice such as v5e-8, v5p-8, v5p-256, v6e-8, v6e-256 or tpu7x-8, or cpu, "
        "gpu or tpu for the devices of this machine"
    )


def _grid(generation: str, chips: int) -> tuple[int, ...] | None:
    """The sides of a slice, None where there is none of that many chips.

    Large three-dimensional slices are made of cubes of 4 x 4 x 4, put together as compactly as they
    can be.
    """
    if GENERATIONS[generation].ports == 4:
        return _FLAT_GRIDS.get(chips)
    if chips in _GRIDS:
        return None if chips == 1 and generation != "tpu7x" else _GRIDS[chips]
    cubes, rest = divmod(chips, _CUBE**3)
    if rest or not cubes:
        return None
    shapes = [
        (a, b, cubes // (a * b))
        for a in range(1, cubes + 1)
        if cubes % a == 0
        for b in range(a, cubes // a + 1)
        if cubes // a % b == 0 and cubes // (a * b) >= b
    ]
    return tuple(_CUBE * side for side in min(shapes, key=lambda s: (sum(s), s)))


def _wrap(grid: tuple[int, ...]) -> tuple[bool, ...]:
    """Axes with links from one end to the other: of whole cubes, or of a whole v5e or v6e pod."""
    if len(grid) == 3:
        return (all(side % _CUBE == 0 for side in grid),) * 3
    return tuple(side == _POD_SIDE for side in grid)
