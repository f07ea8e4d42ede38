"""What a run wrote is read back, torn lines and gaps included."""

import json
import math

import pytest

from manualpar.watching.run_record import decimate, final_numbers, make_charts, read_run
from manualpar.watching.writers import RunWriter


def test_a_run_is_read_as_it_was_written(tmp_path):
    with RunWriter(tmp_path, config={"seed": 1}) as writer:
        writer.write(0, "eval", {"loss": 2.0})
        writer.write(1, "train", {"loss": math.nan}, throughput={"examples_per_second": 5.0})
        place = writer.place()
        writer.write(2, "train", {"loss": 1.0})
    with RunWriter.resume(tmp_path, config={"seed": 1}, place=place, step=1) as writer:
        writer.write(2, "train", {"loss": 1.0}, throughput={"examples_per_second": 6.0, "mfu": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "spl')
    run = read_run(tmp_path)
    assert run.config == {"seed": 1}
    assert [record["step"] for record in run.metrics] == [0, 1, 2]
    loss, examples, mfu = make_charts(run)
    assert loss.lines == {"train": [(1, None), (2, 1.0)], "eval": [(0, 2.0)]}
    assert list(loss.lines) == ["train", "eval"]
    assert loss.resumes == [1]
    assert (loss.unit, loss.from_zero) == ("nats", False)
    assert (examples.lines, examples.unit) == ({"train": [(1, 5.0), (2, 6.0)]}, "examples/s")
    assert (mfu.title, mfu.from_zero) == ("Model FLOPs utilization", True)
    assert final_numbers(run) == {
        "loss": {"eval": 2.0, "train": 1.0},
        "examples_per_second": {"train": 6.0},
        "mfu": {"train": 0.5},
    }


def test_tokens_make_a_chart_of_examples_needless(tmp_path):
    with RunWriter(tmp_path, config={}) as writer:
        rates = {"examples_per_second": 5.0, "tokens_per_second": 50.0}
        writer.write(1, "train", {"loss": 1.0, "bits_per_byte": 1.4}, throughput=rates)
    assert [chart.unit for chart in make_charts(read_run(tmp_path))] == ["nats", "bits", "tokens/s"]


def test_a_folder_without_a_run_holds_nothing(tmp_path):
    run = read_run(tmp_path)
    assert run == ({}, [], [], [])
    assert make_charts(run) == []
    assert final_numbers(run) == {}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", r"config.json is not JSON: "),
        ("metrics.jsonl", "{}\n{\n{}\n", r"metrics.jsonl, line 2, is not JSON: "),
        ("throughput.jsonl", "3\n", r"throughput.jsonl, line 1, is 3, expected an object"),
    ],
)
def test_other_files_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path)


def test_a_long_line_keeps_its_ends_its_extremes_and_its_gaps():
    points = [(step, math.sin(step / 300)) for step in range(10_000)]
    points[4321] = (4321, 7.0)
    points[5678] = (5678, -7.0)
    points[6789] = (6789, None)
    kept = decimate(points, 1000)
    assert len(kept) <= 1000
    assert set(kept) <= set(points)
    assert kept == sorted(kept, key=lambda point: point[0])
    assert {points[0], points[-1], points[4321], points[5678], points[6789]} <= set(kept)
    assert decimate(points[:1000], 1000) == points[:1000]
    nothing = [(step, None) for step in range(5000)]
    assert 0 < len(decimate(nothing, 100)) <= 100
    assert json.dumps(decimate(nothing, 100)[0]) == "[0, null]"
