# SPDX-License-Identifier: Apache-2.0
"""Names of slices: chips, links and hosts as Cloud TPU lists them and libtpu knows them."""

import pytest

from lora_tune.errors import InputError
from lora_tune.plan import abstract
from lora_tune.plan.topologies import GENERATIONS, known, parse


# Shapes and hosts from the tables of configurations in Google's pages on v4, v5e, v5p and v6e.
@pytest.mark.parametrize(
    ("name", "grid", "torus", "hosts"),
    [
        ("v4-8", (2, 2, 1), False, 1),
        ("v5e-1", (1, 1), False, 1),
        ("v5e-8", (2, 4), False, 1),
        ("v5e-256", (16, 16), True, 64),
        ("v5p-8", (2, 2, 1), False, 1),
        ("v5p-64", (2, 4, 4), False, 8),
        ("v5p-128", (4, 4, 4), True, 16),
        ("v5p-256", (4, 4, 8), True, 32),
        ("v5p-512", (4, 8, 8), True, 64),
        ("v5p-1024", (8, 8, 8), True, 128),
        ("v5p-2048", (8, 8, 16), True, 256),
        ("v5p-8192", (16, 16, 16), True, 1024),
        ("v5p-12288", (16, 16, 24), True, 1536),
        ("v6e-8", (2, 4), False, 1),
        ("v6e-256", (16, 16), True, 64),
        ("tpu7x-8", (2, 2, 1), False, 1),
    ],
)
def test_a_slice_is_what_its_name_says(name, grid, torus, hosts):
    [topology] = parse(name)
    assert topology.grid == grid
    assert set(topology.wrap) == {torus}
    assert topology.hosts == hosts


def test_half_a_pod_is_a_ring_along_its_long_side_only():
    [topology] = parse("v5e-128")
    assert (topology.grid, topology.wrap) == ((8, 16), (False, True))


def test_names_count_cores_or_chips():
    assert [parse(name)[0].chips for name in ("v4-8", "v5p-8", "v5e-8", "v6e-8", "tpu7x-8")] == [
        4,
        4,
        8,
        8,
        4,
    ]
    assert parse("tpu7x-8")[0].devices == 8


def test_other_spellings_and_several_slices():
    litepod, two, capital = parse("v5litepod-8, 2xv5p-8,V6E-8")
    assert (litepod.generation, litepod.grid) == ("v5e", (2, 4))
    assert (two.slices, two.chips, two.title) == (2, 8, "2xv5p-8")
    assert capital.generation == "v6e"
    assert parse("v5p-8", slices=4)[0].chips == 16


def test_the_corner_of_a_small_slice_has_fewer_links():
    # 2 x 2: a neighbour along either axis. 4 x 4 x 4: two along each of three.
    assert [parse(name)[0].links for name in ("v5p-8", "v5p-128", "v6e-1", "v6e-256")] == [
        2,
        6,
        0,
        4,
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v5p8", "did you mean v5p-8"),
        ("v5p-9", "no slice of 9 cores; the nearest are v5p-8, v5p-16"),
        ("v6e-12", "no slice of 12 chips; the nearest are v6e-4, v6e-8, v6e-16"),
        ("v5e-512", "the nearest are v5e-64, v5e-128, v5e-256"),
        ("v5p-0", "no slice of 0 cores"),
        ("0xv5p-8", "0 slices, expected at least 1"),
        ("h100", "expected a slice such as"),
        ("v5p-8,", "empty name"),
        ("", "empty name"),
    ],
)
def test_what_is_no_slice_is_refused_with_what_there_is(text, said):
    with pytest.raises(InputError, match=said):
        parse(text)


def test_this_machine_is_one():
    with pytest.raises(InputError, match="which is one"):
        parse("cpu", slices=2)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_libtpu_knows_every_generation(generation):
    pytest.importorskip("libtpu")
    facts = GENERATIONS[generation]
    names = [*known(generation)]
    for name in (names[0], names[-1], f"2x{names[1]}"):
        [topology] = parse(name)
        devices = abstract.devices_of(topology)
        assert len(devices) == topology.devices
        assert {device.device_kind for device in devices} == {facts.kind}
        assert len({device.process_index for device in devices}) == topology.hosts


def test_without_libtpu_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs libtpu.*pip install 'jax\[tpu\]'"):
        abstract.devices_of(parse("v5p-8")[0])
