"""Plans a step whose devices are joined by slow links, with each way to send less over them.

python -m benchmarks.slow_links [--systems "2xv5e:8x8" ...] [--ways fsdp ...]
                                [--sequence_length 2048] [--json benchmarks/slow_links.json]

Llama 3 8B with one sequence a device, on two slices of 64 TPU v5e, which the data center's network
joins, and on 16 nodes of eight H100s, joined by InfiniBand at 50 and at 12.5 GB/s a device. Each
way is traced and estimated by the roofline of `experiments.plan`; nothing runs. A step of DiLoCo
has its share of what replicas send when they meet, which hides behind nothing here.

The seconds of slow links are those of all collectives that cross them, by themselves. The bytes are
those that cross, of a device on average. Encoding and decoding are not in the estimate.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
import rich.console

from benchmarks.results import note_conditions, write_results
from manualpar.planner.roofline import estimate
from manualpar.planner.step_work import read_work
from manualpar.planner.sweep import throughput_of
from manualpar.planner.topology import Topology, parse_topology
from manualpar.planner.vocabulary import prepare_planned
from manualpar.system.reports.tables import describe_bytes, describe_seconds, print_table
from manualpar.training.config import complete_config, load_config

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).with_suffix(".json")
# The topology, and bytes a second of a device on the slow links; None for what the chip has.
SYSTEMS: Mapping[str, tuple[str, float | None]] = {
    "2xv5e:8x8": ("2xv5e:8x8", None),
    "h100:128 50 GB/s": ("h100:128", 50e9),
    "h100:128 12.5 GB/s": ("h100:128", 12.5e9),
}
CODED = {"gather_code": "int8", "reduce_code": "int8"}
INT4 = {"gather_code": "int8", "reduce_code": "int4"}
# Fields of config.parallel. Groups are slices or nodes; "groups" is replaced by their number.
GROUPS = {"mesh": {"data": -1, "data_minor": "groups"}, "mesh_order": ("data_minor", "data")}
SECONDARY = {**GROUPS, "axis_by_axis": True, "regather_axes": ("data",)}
REPLICAS = {"mesh": {"replica": "groups", "data": -1}}
HSDP = {**REPLICAS, "strategy": "hsdp"}
DILOCO = {**REPLICAS, "strategy": "diloco"}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "fsdp": {},
    "fsdp, int8": CODED,
    "fsdp, int8 and int4": INT4,
    "fsdp by axes": {**GROUPS, "axis_by_axis": True},
    "secondary shards": SECONDARY,
    "secondary shards, int8": {**SECONDARY, **CODED},
    "secondary shards, int8 and int4": {**SECONDARY, **INT4},
    "hsdp": HSDP,
    "hsdp, int8": {**HSDP, "reduce_code": "int8"},
    "hsdp, int4": {**HSDP, "reduce_code": "int4"},
    "diloco every 10": {**DILOCO, "every": 10},
    "diloco every 50": {**DILOCO, "every": 50},
    "diloco every 50, int4": {**DILOCO, "every": 50, "outer_code": "int4"},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Plans, prints a table for each system, and writes the results."""
    conditions = note_conditions("benchmarks.slow_links", argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--sequence_length", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    console, data = rich.console.Console(), {}
    for system in args.systems:
        rows = [plan_way(system, way, args.sequence_length) for way in args.ways]
        data[system] = rows
        print_system(console, system, rows)
    write_results(conditions, lines=[], data=data, output=None, json_output=args.json)
    return 0


def topology_of(system: str) -> Topology:
    """The topology of a system, with the bandwidth of its slow links."""
    name, bandwidth = SYSTEMS[system]
    topology = parse_topology(name)
    if bandwidth is None:
        return topology
    network = dataclasses.replace(topology.chip.network, slow_bandwidth=bandwidth)
    return dataclasses.replace(topology, chip=dataclasses.replace(topology.chip, network=network))


def config_of(way: str, topology: Topology, sequence_length: int) -> ml_collections.ConfigDict:
    """The config of a way on a topology."""
    config = load_config(ROOT / "configs" / "plan" / "llama3_8b.py")
    config.data.batch_size = topology.num_devices
    config.data.sequence_length = sequence_length
    fields: dict[str, Any] = dict(WAYS[way])
    node = topology.chip.network.node_size
    groups = topology.num_devices // node if node else topology.num_slices
    with config.unlocked():
        if "mesh" in fields:
            mesh = {
                axis: groups if size == "groups" else size
                for axis, size in fields.pop("mesh").items()
            }
            config.parallel.mesh = ml_collections.ConfigDict(mesh)
        config.parallel.update(fields)
    return complete_config(config)


def plan_way(system: str, way: str, sequence_length: int) -> dict[str, Any]:
    """What a step takes."""
    topology = topology_of(system)
    config = config_of(way, topology, sequence_length)
    experiment = prepare_planned(config, devices=topology.num_devices, vocab_size=128_256)
    program, order = experiment.program, config.parallel.mesh_order
    throughput = throughput_of(config, experiment.task)
    work = read_work(program, throughput, order=order, fused_attention=True)
    plan = estimate(work, topology)
    return {
        "way": way,
        "mesh": dict(work.mesh),
        "step_seconds": plan.step_seconds,
        "compute_seconds": plan.compute_seconds,
        "slow_seconds": plan.slow_seconds,
        "slow_bytes": plan.slow_bytes,
        "memory_bytes": plan.peak_bytes,
        "fits": plan.fits,
    }


def print_system(
    console: rich.console.Console, system: str, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Prints the table of a system."""
    console.print(f"\n{system}")
    base = rows[0]["step_seconds"]
    print_table(
        console,
        ["", "step", "of the first", "slow links", "sent over them", "memory"],
        [
            (
                row["way"],
                describe_seconds(row["step_seconds"]),
                f"{row['step_seconds'] / base:.2f}",
                describe_seconds(row["slow_seconds"]),
                describe_bytes(row["slow_bytes"]),
                describe_bytes(row["memory_bytes"]) + ("" if row["fits"] else " (too much)"),
            )
            for row in rows
        ],
    )


def read_results() -> dict[str, Any]:
    """The committed results, by system."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {system: found[system] for system in SYSTEMS}


if __name__ == "__main__":
    raise SystemExit(main())
