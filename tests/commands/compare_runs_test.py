"""`manualpar compare-runs` reads the files of runs, and says where they differ."""

from pathlib import Path

import pytest

from manualpar.commands.compare_runs_command import main, overlaid_charts, short_names
from manualpar.training.monitoring.run_files import RunWriter
from manualpar.training.monitoring.run_record import read_run


def _write(folder: Path, *, seed: int, losses: list[float], **more: float) -> Path:
    config = {"seed": seed, "parallel": {"mesh": {"data": 8}}, **more}
    with RunWriter(folder, config=config) as writer:
        for step, loss in enumerate(losses, 1):
            speed = {"examples_per_second": 1000.0 * seed, "memory_bytes": 2.0**20 * seed}
            writer.write(10 * step, "train", {"loss": loss}, throughput=speed)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    first = _write(tmp_path / "a" / "001", seed=1, losses=[2.0, 0.5, 0.125])
    second = _write(tmp_path / "_b" / "001", seed=2, losses=[2.0, float("nan")], extra=3)
    return [first, second]


def _rows(printed: str) -> dict[str, list[str]]:
    lines = [line.rsplit(maxsplit=2) for line in printed.splitlines() if line.strip()]
    return {line[0].strip(): line[1:] for line in lines if len(line) == 3}


def test_results_and_settings_are_side_by_side(runs, tmp_path: Path, capsys):
    target = tmp_path / "compared"
    assert main(["compare-runs", *map(str, runs), f"--output={target}"]) == 0
    rows = _rows(capsys.readouterr().out)
    assert rows["steps"] == ["30", "20"]
    assert rows["examples/s"] == ["1,000", "2,000"]
    assert rows["seed"] == ["1", "2"]
    assert rows["extra"] == ["-", "3"]
    assert "parallel.mesh.data" not in rows
    page = (target / "comparison.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 1
    assert "_b/001" in page
    assert "1 MiB" in page
    assert ">not finite<" in page
    assert (target / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_a_chart_has_the_lines_of_all_runs(runs):
    loss, speed = overlaid_charts(dict(zip("ab", map(read_run, runs), strict=True)))
    assert {name: len(points) for name, points in loss.lines.items()} == {
        "a train": 3,
        "b train": 2,
    }
    assert loss.is_log
    assert speed.title == "Throughput"
    assert list(speed.lines) == ["a train", "b train"]


def test_names_are_as_short_as_they_may_be():
    assert short_names([Path("/runs/a/1"), Path("/runs/a/2")]) == ["1", "2"]
    assert short_names([Path("/runs/a/1"), Path("/runs/b/1")]) == ["a/1", "b/1"]


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([], "expected two or more different runs"),
        (["a/../a/001"], "expected two or more different runs"),
        (["."], "has neither config.json nor metrics.jsonl, expected the folder of a run"),
        (["gs://bucket/run"], "gs://bucket/run, expected a folder on a disk"),
    ],
)
def test_what_is_no_run_is_a_sentence(runs, tmp_path, monkeypatch, capsys, others, words):
    monkeypatch.chdir(tmp_path)
    assert main(["compare-runs", "a/001", *others]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
