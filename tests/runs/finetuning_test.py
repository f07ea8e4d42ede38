"""A run that trains adapters on a mixture of files goes on bit for bit after a kill."""

import signal

import jax
import numpy as np
import pytest
from jax.tree_util import DictKey

from manualpar.training.checkpoints.saved_state import stored_arrays
from manualpar.training.load_run import prepare_saved, saved_config
from manualpar.training.workdir import open_checkpoints
from tests.data.documents import write_documents
from tests.runs.small_runs import (
    assert_same_run,
    checkpoint_arrays,
    complete_steps,
    resumed_from,
    run_here,
    start,
)

CONFIG = "lora_lm.py"
# The base in bfloat16, and an average beside the moments; no interval divides another.
SMALL = (
    "--config.data.source=mixture",
    "--config.data.sequence_length=16",
    "--config.data.held_out=0.1",
    "--config.model.num_heads=2",
    "--config.model.num_layers=2",
    "--config.model.mlp_size=32",
    "--config.model.vocab_multiple=2",
    "--config.optimizer.ema_decay=0.9",
    "--config.parallel.frozen_dtype=bfloat16",
    "--config.parallel.min_weight_size=16",
    "--config.training.num_steps=12",
    "--config.training.eval_every_steps=5",
)


@pytest.mark.slow
def test_a_killed_run_with_adapters_goes_on_bit_for_bit_and_on_other_meshes(
    processes, tmp_path, capsys, devices8
):
    del devices8
    documents = [f"{i} and {i**2} and no more" for i in range(200)]
    paths = {kind: write_documents(tmp_path, kind, documents) for kind in ("jsonl", "parquet")}
    mixture = tuple(f"{i + 1} {kind} {path}" for i, (kind, path) in enumerate(paths.items()))
    cache = f"--config.data.cache={tmp_path / 'cache'}"
    small = (*SMALL, f"--config.data.mixture={mixture}", cache)
    undisturbed, workdir = tmp_path / "undisturbed", tmp_path / "run"
    assert run_here(undisturbed, *small, config=CONFIG) == 0

    killed = start(processes, workdir, *small, kill=10, config=CONFIG)
    assert killed.wait() == -signal.SIGKILL, killed.err
    newest = complete_steps(workdir)[-1]
    assert newest in (4, 8)  # The last one may not have been complete.
    capsys.readouterr()
    assert run_here(workdir, *small, config=CONFIG) == 0
    assert resumed_from(capsys.readouterr().out) == newest
    assert_same_run(workdir, undisturbed)

    saved = checkpoint_arrays(workdir, 12)
    for part in ("lora_a", "lora_b", "'mu'", "'nu'", "['ema']", "'embedding'"):
        assert any(part in name for name in saved), part
    for mesh in ({"data": 8}, {"data": 4, "model": 2}):
        experiment = prepare_saved(saved_config(workdir), mesh)
        with open_checkpoints(experiment.config, workdir) as checkpoints:
            restored = checkpoints.restore(experiment.program, report=print)
        assert restored.extra["position"] == 12 * 32
        arrays, _ = stored_arrays(experiment.program, restored.state)
        found = {jax.tree_util.keystr(map(DictKey, path)): x for path, x in arrays.items()}
        assert found.keys() == saved.keys()
        for name, x in found.items():
            assert x.dtype == saved[name].dtype
            assert np.asarray(x).tobytes() == saved[name].tobytes(), name
