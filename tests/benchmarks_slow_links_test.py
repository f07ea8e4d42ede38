"""Plans of devices behind slow links: what crosses them is what closed forms say."""

import pytest

from benchmarks.slow_links import SYSTEMS, config_of, main, plan_way, topology_of
from manualpar.inspect import step_bytes
from manualpar.inspect.expected_bytes import outer_step_bytes
from manualpar.planner.vocabulary import prepare_planned

H100 = "h100:128 12.5 GB/s"


def program_of(way, system=H100):
    topology = topology_of(system)
    config = config_of(way, topology, 2048)
    return prepare_planned(config, devices=topology.num_devices, vocab_size=128_256).program


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hsdp", "hsdp, int4"])
def test_between_groups_a_device_sends_its_shards(way):
    row = plan_way(H100, way, 2048)
    sent = step_bytes(program_of(way))
    crossing = sum(sent.get(axes, 0) for axes in sent if "replica" in axes)
    assert crossing <= row["slow_bytes"] <= crossing * 1.01  # And metrics.
    assert row["slow_seconds"] > float(crossing) / 12.5e9
    assert row["slow_seconds"] < row["step_seconds"]


@pytest.mark.slow
def test_a_step_has_its_share_of_a_meeting():
    ten, fifty = (plan_way(H100, f"diloco every {every}", 2048) for every in (10, 50))
    (outer,) = outer_step_bytes(program_of("diloco every 10")).values()
    assert ten["slow_bytes"] == pytest.approx(float(outer) / 10, rel=0.01)
    assert fifty["slow_bytes"] == pytest.approx(float(outer) / 50, rel=0.01)
    assert ten["compute_seconds"] == fifty["compute_seconds"]
    difference = ten["step_seconds"] - fifty["step_seconds"]
    assert difference == pytest.approx(ten["slow_seconds"] - fifty["slow_seconds"], rel=0.01)


@pytest.mark.slow
def test_secondary_shards_cross_once_where_layers_are_computed_again(capsys):
    by_axes, secondary = (plan_way(H100, way, 2048) for way in ("fsdp by axes", "secondary shards"))
    # Two bytes a number are gathered, twice or once, and four bytes of its gradient come back.
    assert secondary["slow_bytes"] / by_axes["slow_bytes"] == pytest.approx(6 / 8, abs=0.02)
    assert main(["--systems", *SYSTEMS, "--ways", "fsdp"]) == 0
    assert capsys.readouterr().out.count("slow links") == len(SYSTEMS)
