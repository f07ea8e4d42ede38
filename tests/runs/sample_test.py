"""The text at the end of a run is the same, whatever the parallelism and the mode of the run."""

import contextlib
import io

import pytest

from tests.runs.small_runs import flag_of_text, run_here, start_cluster

# Without dropout and in float32 the meshes differ by rounding alone.
SMALL = (
    "--config.model.dtype=float32",
    "--config.model.dropout_rate=0.0",
    "--config.model.num_layers=2",
    "--config.model.hidden_size=20",
    "--config.model.num_heads=2",
    "--config.model.num_kv_heads=2",
    "--config.model.mlp_size=20",
    "--config.model.scan_layers=True",
    "--config.model.vocab_multiple=2",
    "--config.data.sequence_length=16",
    "--config.optimizer.num_minibatches=2",
    "--config.parallel.pad=True",
    "--config.checkpoint.every_steps=0",
    "--config.training.num_steps=2",
    "--config.training.eval_every_steps=0",
    "--config.sample.num_tokens=24",  # More than the window has.
)
RUNS = {
    "stages": ({"data": 4, "stage": 2}, ()),
    "context": ({"data": 4, "context": 2}, ()),
    "split layers": ({"data": 4, "model": 2}, ("--config.parallel.sequence=True",)),
    "auto": ({"data": 8}, ("--config.parallel.mode=auto",)),
    "explicit": ({"data": 8}, ("--config.parallel.mode=explicit",)),
}


def flags_of(mesh, *more):
    return (f"--config.parallel.mesh={mesh}", "--config.parallel.communicate_every=step", *more)


def sample_in(output):
    return output.split("sample:\n")[1].split("\ntest ")[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """What all runs have in common; the text is a short one."""
    return (*SMALL, flag_of_text(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def expected(small, tmp_path_factory, devices8):
    """The text of a run under fsdp, whose parameters are padded."""
    del devices8
    workdir = tmp_path_factory.mktemp("expected") / "run"
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert run_here(workdir, *small, *flags_of({"data": 8}), config="fsdp_lm.py") == 0
    return sample_in(output.getvalue())


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_mesh_and_mode_draws_the_same_text(name, small, expected, tmp_path, capsys):
    mesh, more = RUNS[name]
    assert run_here(tmp_path / "run", *small, *flags_of(mesh, *more), config="fsdp_lm.py") == 0
    assert sample_in(capsys.readouterr().out) == expected
    assert expected.startswith("  def ")


@pytest.mark.long
@pytest.mark.slow
def test_stages_across_processes_draw_the_same_text(small, expected, processes, tmp_path):
    flags = (*small, *flags_of({"data": 4, "stage": 2}))
    started = start_cluster(processes, tmp_path / "run", *flags, config="fsdp_lm.py")
    for process in started:
        assert process.wait() == 0, process.err
    assert sample_in(started[0].out) == expected
