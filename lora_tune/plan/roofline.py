# SPDX-License-Identifier: Apache-2.0
"""A bound on the time of a step: what the chip's published rates allow at best.

The step takes at least as long as each of its resources alone: products at the peak rate, memory
traffic at the memory's, communication at that of the links. No program reaches all three, so this
is no estimate of the time; it tells which resource limits, and compares programs.
"""

import dataclasses

from lora_tune.plan.cost import Cost
from lora_tune.plan.topologies import GENERATIONS, Topology


@dataclasses.dataclass(frozen=True)
class Rates:
    """Peak rates of one device, a second; None where none is published.

    `link_rate` is what the links of the device carry one way, `between_rate` the same between
    slices or hosts.
    """

    flops: float | None
    memory_rate: float | None
    link_rate: float | None
    between_rate: float | None


# NVIDIA's data sheets, SXM forms, dense bfloat16; NVLink one way. By words of `device_kind`.
_GPUS = {
    "H200": Rates(989.5e12, 4.8e12, 450e9, None),
    "H100": Rates(989.5e12, 3.35e12, 450e9, None),
    "A100": Rates(312e12, 2.039e12, 300e9, None),
}


def rates_of(topology: Topology, device_kind: str) -> Rates | None:
    """The rates of a device of a topology; None where they are not known, as of CPUs."""
    if topology.generation is None:
        return next((rates for name, rates in _GPUS.items() if name in device_kind), None)
    facts, share = topology.facts, topology.facts.devices
    return Rates(
        facts.flops / share,
        facts.hbm_rate / share,
        # A chip at an edge of a slice without rings has fewer links than ports.
        facts.ici_rate * topology.links / facts.ports / share,
        None if facts.dcn_rate is None else facts.dcn_rate / share,
    )


def peak_flops(device_kind: str) -> float | None:
    """Peak operations a second of one device in dense bfloat16, by what `jax.Device.device_kind`
    says; None where none is known, as of CPUs."""
    for facts in GENERATIONS.values():
        if facts.kind == device_kind:
            return facts.flops / facts.devices
    return next((rates.flops for name, rates in _GPUS.items() if name in device_kind), None)


@dataclasses.dataclass(frozen=True)
class Bound:
    """Least seconds of a step by resource; `between` is communication between slices."""

    compute: float
    memory: float
    links: float
    between: float

    @property
    def seconds(self) -> float:
        """The least that a step can take."""
        return max(dataclasses.astuple(self))

    @property
    def limit(self) -> str:
        """The resource that takes longest."""
        return max(dataclasses.asdict(self).items(), key=lambda item: item[1])[0]


def bound(cost: Cost, rates: Rates) -> Bound:
    """The bound of a program's cost on one device; a rate that is not known bounds nothing."""
    wire = sum(traffic.wire for traffic in cost.traffic.values())
    between = sum(traffic.between for traffic in cost.traffic.values())
    return Bound(
        _seconds(cost.flops, rates.flops),
        _seconds(cost.bytes, rates.memory_rate),
        _seconds(wire, rates.link_rate),
        _seconds(between, rates.between_rate),
    )


def _seconds(amount: float, rate: float | None) -> float:
    return amount / rate if rate else 0.0
