"""Small schedules by hand, on a torus whose links carry a byte a second: a cycle is a second."""

import dataclasses
from typing import Any

import pytest

from manualpar.planner.compiled_plan import wire_by_links
from manualpar.planner.compiled_timeline import Timeline, read_timeline
from manualpar.planner.topology import Topology, parse_topology

BYTES = 32  # Of what everybody sends, eight numbers.
LINE = [(0, x, 0) for x in range(4)]
OPCODES = {"permute": "collective-permute", "gather": "all-gather", "exchange": "all-to-all"}
SQUARE = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]


def topology_of(name: str, **network: Any) -> Topology:
    topology = parse_topology(name)
    plain = {"bandwidth": 1.0, "efficiency": 1.0, "launch": 0.0, "latency": 0.0} | network
    network_ = dataclasses.replace(topology.chip.network, **plain)
    return Topology(dataclasses.replace(topology.chip, network=network_), topology.shape)


def follow(
    lines: list[str],
    places: list[tuple[int, ...]],
    *,
    topology: str = "v5e:4x4",
    mesh: dict[str, int] | None = None,
    apart: bool = True,
    **network: Any,
) -> Timeline:
    """Begins collectives at once and waits for them at the end; a line has the devices of one.

    It is `permute {0,1},{1,2}`, pairs, or `gather {0,1},{2,3}` or `exchange {0,1},{2,3}`, groups; a
    gather takes 100 seconds.
    """
    written = ["%x = f32[8] parameter(0)"]
    for i, line in enumerate(lines):
        kind, _, devices = line.partition(" ")
        opcode = OPCODES[kind]
        name = "source_target_pairs" if kind == "permute" else "replica_groups"
        joined = f"channel_id={i + 1}, {name}={{{devices}}}, metadata={{}}"
        written.append(f"%s{i} = f32[8] {opcode}-start(%x), {joined}")
    opcodes = [OPCODES[line.partition(" ")[0]] for line in lines]
    written += [f"%d{i} = f32[8] {opcode}-done(%s{i})" for i, opcode in enumerate(opcodes)]
    text = (
        f"HloModule m, is_scheduled=true, num_partitions={len(places)}\n\nENTRY %main (x: f32[8]) "
    )
    text += "-> f32[8] {\n  " + "\n  ".join(written) + "\n}\n"
    wire_seconds: Any = lambda collective: 100.0  # noqa: E731
    return read_timeline(
        text,
        mesh or {"data": len(places)},
        clock=1.0,
        wire=wire_by_links(topology_of(topology, **network), places, wire_seconds, apart=apart),
    )


@pytest.mark.parametrize(
    ("permutes", "seconds"),
    [
        (["{0,1},{1,2}"], 1),  # Each pair has a link.
        (["{0,1}", "{1,0}"], 1),  # Opposite directions.
        (["{0,1}", "{0,1}"], 2),  # One link.
        (["{0,2}"], 1),  # Two links, one after the other, but at once for what flows.
        (["{0,2}", "{1,2}"], 2),  # The second link is taken.
        (["{0,2}", "{2,3}"], 1),
        (["{0,2},{1,2}"], 2),  # A link with two loads.
        (["{0,3},{3,0}", "{1,2}", "{2,1}"], 2),
        (["{0,0}"], 0),  # Nothing is sent.
    ],
)
def test_permutations_along_a_line(permutes: list[str], seconds: int) -> None:
    found = follow([f"permute {pairs}" for pairs in permutes], LINE)
    assert found.step_seconds == found.exposed_seconds == seconds * BYTES


@pytest.mark.parametrize(
    ("permutes", "seconds"),
    [
        (["{0,3}", "{2,3}"], 2),  # First along x: by 2.
        (["{0,3}", "{0,1}"], 1),
        (["{0,3}", "{3,0}"], 1),  # Back by 1.
    ],
)
def test_a_way_goes_along_x_first(permutes: list[str], seconds: int) -> None:
    found = follow([f"permute {pairs}" for pairs in permutes], SQUARE)
    assert found.step_seconds == seconds * BYTES


@pytest.mark.parametrize(("topology", "seconds"), [("v5e:4x4", 2), ("v5p:4x4x4", 1)])
def test_a_closed_dimension_is_passed_the_shorter_way(topology: str, seconds: int) -> None:
    places = [(*place, 0) for place in LINE]
    found = follow(["permute {0,3}", "permute {1,2}"], places, topology=topology)
    assert found.step_seconds == seconds * BYTES


def test_a_hop_takes_time_and_so_does_a_start() -> None:
    found = follow(["permute {0,2},{2,3}"], LINE, launch=5.0, latency=3.0)
    assert found.step_seconds == 5 + 2 * 3 + BYTES


def test_devices_are_found_where_the_mesh_has_them() -> None:
    # In this order the second and the third device are two hops apart.
    places = [LINE[i] for i in (0, 1, 3, 2)]
    found = follow(["permute {1,2}", "permute {3,2}"], places)
    assert found.step_seconds == 2 * BYTES
    assert follow(["permute {1,3}", "permute {3,2}"], places).step_seconds == BYTES


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        (["gather {0,1},{2,3}", "gather {0,2},{1,3}"], 100),  # One along y, one along x.
        (["gather {0,1},{2,3}", "gather {0,1},{2,3}"], 200),
        (["gather {0,1},{2,3}", "gather {0,1,2,3}"], 200),
        (["gather {0,1},{2,3}", "permute {0,2}"], 100),
        (["gather {0,1},{2,3}", "permute {0,1}"], 100 + BYTES),
        (["gather {0,1},{2,3}", "permute {1,0}"], 100 + BYTES),
    ],
)
def test_others_occupy_the_dimensions_in_which_their_devices_lie(
    lines: list[str], seconds: int
) -> None:
    assert follow(lines, SQUARE).step_seconds == seconds


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(
    ("groups", "places", "seconds"),
    [
        ("{0,1,2,3}", LINE, 1),  # Both devices on the left send a quarter to both on the right.
        ("{0,1,2,3}", SQUARE, 0.5),  # Of four pairs that cross, two go over each link.
        ("{0,1},{2,3}", LINE, 0.5),
        ("{0,2},{1,3}", LINE, 1),  # Both groups cross the middle.
    ],
)
def test_an_all_to_all_is_all_pairs_at_once(
    groups: str, places: list[tuple[int, ...]], seconds: float, apart: bool
) -> None:
    found = follow([f"exchange {groups}"], places, apart=apart)
    assert found.step_seconds == found.exposed_seconds == seconds * BYTES


def test_one_collective_at_a_time_uses_all_links() -> None:
    assert follow(["permute {0,1}", "permute {1,0}"], LINE, apart=False).step_seconds == 200


def test_what_crosses_slices_occupies_all_links() -> None:
    places = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    found = follow(["permute {0,2},{1,3}", "permute {2,3}"], places)
    assert found.step_seconds == 100 + BYTES


def test_devices_of_a_chip_share_its_links() -> None:
    places = [(0, 0, 0, 0), (0, 0, 0, 0), (0, 1, 0, 0), (0, 1, 0, 0)]
    found = follow(["permute {0,2},{1,3}"], places, topology="tpu7x:2x1x1")
    assert found.step_seconds == BYTES  # Twice the load, at the bandwidth of two devices.
