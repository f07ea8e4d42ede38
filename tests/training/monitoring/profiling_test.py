"""Profiles hold the steps that were asked for, whole, and open."""

import gzip
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from manualpar.training.monitoring.profiling import TRACE_FILE, StepProfiler, parse_profile


def test_both_ends_are_included():
    assert list(parse_profile("10:13")) == [10, 11, 12, 13]
    assert list(parse_profile("1:1")) == [1]
    assert parse_profile("") == range(0)


@pytest.fixture
def step():
    """A step on eight devices, with a scope in it."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def shard_step(x):
        with jax.named_scope("our_scope_of_a_collective"):
            total = jax.lax.psum(x.sum(), "data")
        return x + total

    specs = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": True}
    return jax.jit(jax.shard_map(shard_step, mesh=mesh, **specs))


def _run(step, profiler: StepProfiler, steps: range, *, fail_at: int | None = None) -> None:
    state = jnp.ones((16,))
    with profiler:
        for number in steps:
            profiler.begin_step(number, state)
            if number == fail_at:
                raise KeyError
            state = step(state)
            profiler.end_step(number, state)


def _trace(folder: Path) -> list[dict]:
    """The events of the one trace in a folder."""
    (path,) = folder.rglob(TRACE_FILE)
    with gzip.open(path) as file:
        trace = json.load(file)
    return trace["traceEvents"] if isinstance(trace, dict) else trace


def _steps(events: list[dict]) -> list[int]:
    """The numbers of the steps that a trace holds."""
    return [int(event["args"]["step_num"]) for event in events if event.get("name") == "train"]


@pytest.mark.slow
def test_a_profile_has_the_steps_their_operations_and_our_scopes(step, tmp_path):
    said = []
    folder = tmp_path / "profile"
    _run(step, StepProfiler(range(2, 4), folder, said.append), range(1, 6))
    events = _trace(folder)
    assert _steps(events) == [2, 3]
    annotations = [event for event in events if event.get("name") == "train"]
    begin = annotations[0]["ts"]
    end = annotations[-1]["ts"] + annotations[-1]["dur"]
    reduces = [event for event in events if event.get("name", "").startswith("psum")]
    assert len(reduces) == 2 * 8, "a device has one in each of two steps"
    assert all(begin <= event["ts"] and event["ts"] + event["dur"] <= end for event in reduces)
    # The timeline of the CPU names operations; scopes are in the program, where XProf finds them.
    (xplane,) = folder.rglob("*.xplane.pb")
    assert b"our_scope_of_a_collective" in xplane.read_bytes()
    (sentence,) = said
    assert sentence.startswith(f"profile: steps 2 to 3 in {folder}/plugins/profile/")
    assert Path(sentence.split(" in ")[1].split(" for ")[0]).is_file()


def test_an_exception_leaves_a_profile_of_what_there_was_and_no_open_trace(step, tmp_path):
    for run in ("first", "second"):
        said = []
        profiler = StepProfiler(range(2, 9), tmp_path / run, said.append)
        with pytest.raises(KeyError):
            _run(step, profiler, range(1, 9), fail_at=4)
        assert _steps(_trace(tmp_path / run))[:2] == [2, 3]
        assert said[0].startswith("profile: steps 2 to 3 in ")


def test_a_profile_that_fails_leaves_a_run_its_own_error(step, tmp_path, monkeypatch):
    def fail():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jax.profiler, "start_trace", lambda *args, **kwargs: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", fail)
    with pytest.raises(KeyError) as caught:
        _run(step, StepProfiler(range(2, 9), tmp_path, print), range(1, 9), fail_at=4)
    note = "the profile was not written: [Errno 28] No space left on device"
    assert caught.value.__notes__ == [note]
    with pytest.raises(OSError, match="No space left"):
        _run(step, StepProfiler(range(2, 9), tmp_path, print), range(1, 4))


def test_steps_that_never_come_are_said(step, tmp_path):
    said = []
    _run(step, StepProfiler(range(2, 4), tmp_path / "p", said.append), range(4, 6))
    assert said == ["profile: the run made no step from 2 to 3, so there is none"]
    assert not (tmp_path / "p").exists()


def test_without_steps_nothing_happens(step, tmp_path):
    said = []
    _run(step, StepProfiler(range(0), tmp_path / "p", said.append), range(1, 3))
    assert said == []
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_profiles_what_is_left(step, tmp_path):
    _run(step, StepProfiler(range(2, 5), tmp_path, print), range(4, 7))
    assert _steps(_trace(tmp_path)) == [4]
