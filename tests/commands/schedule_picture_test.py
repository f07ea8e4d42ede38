"""Schedules as pictures."""

import struct

from matplotlib.axes import Axes

from manualpar.commands.inspect_command import draw_schedule
from manualpar.layers.pipeline.schedules import Costs, make_table


def test_a_block_for_each_pass_as_long_as_it_takes(tmp_path, monkeypatch):
    blocks, texts = [], []
    monkeypatch.setattr(
        Axes,
        "barh",
        lambda axes, stages, lengths, left, **style: blocks.extend(
            zip(stages.tolist(), left.tolist(), lengths.tolist(), strict=True)
        ),
    )
    monkeypatch.setattr(Axes, "text", lambda axes, x, y, text, **style: texts.append((y, x, text)))
    path = tmp_path / "schedule.png"
    costs = Costs(forward=1, backward=3, after=2)
    draw_schedule(make_table("1f1b", 2, 2), path, title="two", costs=costs)
    forward = [(0, 0.0, 1.0), (0, 1.0, 1.0), (1, 1.0, 3.0), (1, 7.0, 3.0)]
    # A B begins when the stage's F has ended, and a tick when the slowest stage has.
    backward = [(1, 4.0, 3.0), (0, 7.0, 3.0), (1, 10.0, 3.0), (0, 13.0, 3.0)]
    assert blocks == forward + backward
    assert texts[:2] == [(0, 0.5, "0"), (0, 1.5, "1")]
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", content[16:20])[0] > 1000
