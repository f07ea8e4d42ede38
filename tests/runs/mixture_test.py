"""A run on a mixture of files goes on bit for bit: its batches, whoever reads them."""

import json
import shutil

import pytest

from tests.data.documents import write_documents
from tests.runs.small_runs import (
    assert_close_metrics,
    assert_same_metrics,
    run_here,
    start_launcher,
)

CONFIG = "tp_lm.py"
SMALL = (
    "--config.data.source=mixture",
    "--config.data.sequence_length=8",
    "--config.data.held_out=0.1",
    "--config.model.mlp_size=16",
    "--config.model.dropout_rate=0.0",
    "--config.model.dtype=float32",
    "--config.sample.num_tokens=0",
    "--config.training.num_steps=12",
    "--config.training.log_every_steps=1",
    "--config.training.eval_every_steps=6",
    "--config.checkpoint.every_steps=6",
    "--config.parallel.mesh={'data': 8}",
    "--config.parallel.sequence=False",
)


def _as_killed(workdir, killed):
    """A copy of a finished run as it would be, had it been killed in its tenth step."""
    shutil.copytree(workdir, killed)
    shutil.rmtree(killed / "checkpoints" / "12")
    lines = (killed / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = "".join(line for line in lines if json.loads(line)["step"] <= 9)
    (killed / "metrics.jsonl").write_text(kept)
    return killed


@pytest.mark.slow
def test_a_run_on_a_mixture_goes_on_in_two_processes(processes, tmp_path, capsys, devices8):
    documents = [f"{i} and {i**2} and no more" for i in range(200)]
    paths = {kind: write_documents(tmp_path, kind, documents) for kind in ("jsonl", "parquet")}
    mixture = tuple(f"{i + 1} {kind} {path}" for i, (kind, path) in enumerate(paths.items()))
    small = (
        *SMALL,
        f"--config.data.mixture={mixture}",
        f"--config.data.cache={tmp_path / 'cache'}",
    )
    undisturbed = tmp_path / "undisturbed"
    assert run_here(undisturbed, *small, config=CONFIG) == 0
    # Bit for bit where the devices are the same, with more read ahead.
    again = _as_killed(undisturbed, tmp_path / "again")
    assert run_here(again, *small, "--config.data.prefetch=7", config=CONFIG) == 0
    assert_same_metrics(again, undisturbed)
    # The same batches in two processes, whose sums are added in another order.
    elsewhere = _as_killed(undisturbed, tmp_path / "elsewhere")
    cache = f"--config.data.cache={tmp_path / 'another'}"
    launcher = start_launcher(processes, elsewhere, *small, cache, config=CONFIG)
    assert launcher.wait() == 0, launcher.err
    assert "going on from the checkpoint of step 6" in launcher.out
    assert_close_metrics(elsewhere, undisturbed)
    # Other weights are another run.
    capsys.readouterr()
    other = f"--config.data.mixture={(mixture[0], mixture[1].replace('2 ', '3 ', 1))}"
    assert run_here(again, *small, other, config=CONFIG) == 2
    assert "data.mixture: " in capsys.readouterr().err
    # And so is other data under the same names.
    with open(paths["jsonl"], "a") as file:
        file.write('{"text": "one more"}\n')
    assert run_here(again, *small, "--config.training.num_steps=13", config=CONFIG) == 6
    assert "was saved with other data (fingerprint" in capsys.readouterr().err
