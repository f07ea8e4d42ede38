"""The order, the time and the lines of the rows that `benchmarks.gpu_hour` measures."""

import gzip
import json
import types

import pytest

from benchmarks import gpu, gpu_hour
from benchmarks.gpu_rows import Row

MACHINE = Row(gpu.MACHINE, facts={"kind": "cpu", "platform": "cpu", "devices": 8, "memory": 0})
BEFORE, FAILS = (gpu_hour.CONDITIONS, gpu.MACHINE), 7.0


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command with rows that take `takes[name]` seconds; returns what it did."""
    takes, ran, clock = {}, [], [0.0]

    def lines():
        found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        return [(row["name"], row["problem"]) for row in found if row["name"] not in BEFORE]

    def run_row(name, command, *, limit, environment):
        if name == gpu.MACHINE:
            facts = {**MACHINE.facts, "processes": 1, "process": 0}
            return Row(name, facts=facts)
        ran.append((name, limit, lines()))
        took = takes.get(name, 1.0)
        clock[0] += min(took, limit)
        if took == FAILS:
            return Row(name, problem="its process ended with -6: out of memory")
        return Row(name, (1.0,), losses=(5.0,), facts={"a": 1})

    def run(*flags):
        code = gpu_hour.main(["--tiny", f"--output={tmp_path}", *flags])
        page = tmp_path / "page.md"
        return types.SimpleNamespace(
            code=code, ran=ran, lines=lines(), page=page.read_text() if page.exists() else ""
        )

    monkeypatch.setattr(gpu_hour, "run_row", run_row)
    monkeypatch.setattr(gpu_hour.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(gpu_hour.signal, "signal", lambda *_: None)
    monkeypatch.setattr(gpu_hour.importlib.util, "find_spec", lambda name: name != "peft" or None)
    run.takes = takes
    return run


def test_every_row_is_written_before_the_next_begins_and_after_one_that_fails(command):
    command.takes |= {"attention": FAILS}
    found = command()
    assert found.code == 0
    assert [name for name, _ in found.lines] == list(gpu_hour.ROWS)
    # The first rows answer what is asked first: our defaults beside plain jit and PyTorch.
    assert list(gpu_hour.ROWS)[:3] == ["manual fsdp", "plain jit", "PyTorch FSDP2, compiled"]
    for index, (_, _, written) in enumerate(found.ran):
        assert len(written) >= index
    problems = {name: problem for name, problem in found.lines if problem}
    assert problems == {
        "attention": "its process ended with -6: out of memory",
        "NF4 and LoRA, peft": "not measured: peft is not installed here",
    }
    assert "- attention: its process ended with -6: out of memory." in found.page


def test_no_row_gets_more_time_than_is_left(command):
    command.takes |= {"manual fsdp": 100.0, "plain jit": 1000.0, "PyTorch FSDP2, compiled": 1000.0}
    found = command("--minutes=4")
    assert [limit for _, limit, _ in found.ran] == [110.0, 80.0, 60.0]
    assert [name for name, _ in found.lines] == list(gpu_hour.ROWS)
    over = {name for name, problem in found.lines if "4 minutes are over" in problem}
    assert over == {*list(gpu_hour.ROWS)[3:]} - {"NF4 and LoRA, peft"}


def test_a_command_without_any_figure_fails(command):
    command.takes |= {"attention": FAILS}
    assert command("--rows=^attention$").code == 1
    assert command("--rows=^(attention|generation)$").code == 0


def test_a_case_that_cannot_run_has_its_reason(tmp_path, monkeypatch):
    def refuse():
        raise ValueError("no such kernel\nhere")

    def measure(options):
        yield from gpu_hour.each_case({"a": refuse, "b": lambda: {"ms": 1.0}})
        yield {"seen": [row["facts"] for row in map(json.loads, lines.read_text().splitlines())]}

    lines = tmp_path / "rows.jsonl"
    monkeypatch.setattr(gpu_hour, "note_where_it_hangs", lambda: None)
    monkeypatch.setattr(gpu_hour, "ROWS", {"a row": gpu_hour.Part(1.0, measure)})
    result = tmp_path / "row.json"
    assert gpu_hour.main(["--row=a row", f"--output={tmp_path}", f"--result={result}"]) == 0
    row = Row.read(result)
    refused = {"a, not measured": "no such kernel"}
    # Each case is on the disk when the next one begins.
    assert row.facts["seen"] == [refused, {**refused, "b, ms": 1.0}]
    assert row.problem == ""


def test_a_profile_is_summed_by_kernel(tmp_path):
    names = [("process_name", 1, None, "/device:GPU:0"), ("thread_name", 1, 5, "Stream #13")]
    named = [
        {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": text}}
        for name, pid, tid, text in [*names, ("thread_name", 1, 6, "XLA Modules")]
    ]
    ran = [("gemm.1", 5, 1500), ("gemm.22", 5, 500), ("copy", 5, 1000), ("jit_step", 6, 9000)]
    events = [{"ph": "X", "name": name, "pid": 1, "tid": tid, "dur": us} for name, tid, us in ran]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*named, *events]}).encode()))
    assert gpu_hour.kernel_times(path) == {"all": 3.0, "gemm": 2.0, "copy": 1.0}
