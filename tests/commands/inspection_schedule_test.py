"""`inspect --schedule`: the schedule of a config's pipeline, printed, written and drawn."""

import json
from pathlib import Path

import pytest
import rich.console

from manualpar.commands.command_line import parse_command_line
from manualpar.commands.inspect_command import INSPECTING, inspect_command, print_schedule

SMALL = (
    "--config.model.hidden_size=16",
    "--config.model.num_heads=2",
    "--config.model.num_kv_heads=2",
    "--config.model.mlp_size=32",
    "--config.data.sequence_length=8",
    "--config.data.batch_size=16",
)


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _run(name: str, *arguments: str) -> int:
    flags = [f"--config={name}", "--nocompile", "--devices=8", "--output=out"]
    line = ["program", *flags, "--schedule", *arguments]
    return inspect_command(parse_command_line(line, default_config="fsdp", syntax=INSPECTING))


@pytest.mark.slow
def test_the_schedule_is_printed_written_and_drawn(capsys):
    assert _run("pp_lm", *SMALL) == 0
    output = capsys.readouterr().out
    assert "pp_lm: 1f1b: 4 stages, 8 microbatches, 14 ticks, bubble 27.3%" in output
    assert "\nstage 3 F  .  .  .  0  1  2  3  4  5  6  7  .  .  .\n" in output
    found = json.loads(Path("out/pp_lm.json").read_text())["schedule"]
    # One example of 8 tokens: attention's q, k, v and out, its two products, and SwiGLU's three.
    layer = 2 * 8 * (4 * 16 * 16 + 2 * 8 * 16 + 3 * 16 * 32)
    assert found["flops"]["forward"] == layer
    assert found["flops"]["backward"] == 2 * layer + 2 * 8 * 8 * 16  # The scores again.
    assert found["flops"]["after"] > 0
    assert found["idle_share"] > found["bubble"] == pytest.approx(3 / 11)
    assert Path("out/pp_lm.schedule.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_a_config_without_a_pipeline_is_refused_before_it_is_traced(capsys):
    assert _run("fsdp") == 2
    error = capsys.readouterr().err
    assert "--schedule: " in error
    assert (
        "has no pipeline on the mesh {'data': 8}; expected a mesh with an axis for stages" in error
    )


def test_a_long_schedule_is_left_to_the_picture(capsys):
    flops = {"forward": 1e9, "backward": 2e9, "before": 0.0, "before_backward": 0.0, "after": 1e9}
    sizes = {"num_stages": 2, "num_microbatches": 100, "chunks": 1}
    shares = {"bubble": 0.0099, "idle_share": 0.13}
    found = {"schedule": "1f1b", **sizes, **shares, "flops": flops}
    print_schedule(rich.console.Console(width=100), "long", found)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("long: 1f1b: 2 stages, 100 microbatches, 102 ticks, bubble 1.0%")
    assert lines[2] == "102 ticks are too many for text; see the picture."
    rows = [line.split() for line in lines]
    # The step takes 1 + 100 (1 + 2 + 1) + 2 GFLOP of time.
    assert ["0", "0", "101", "3", "300", "GFLOP", "74.4%"] in rows
    assert ["1", "1", "100", "1", "400", "GFLOP", "99.3%"] in rows
    assert "A device idles for 13.0% of the time. It would be 1.0%" in " ".join(lines)
