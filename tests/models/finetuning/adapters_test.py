"""Adapters merged into kernels, and saved alone."""

import json
import os

import chex
import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

from manualpar import fsdp, load_adapters, lora, make_mesh, merge_lora, save_adapters
from manualpar.system.storage import draft_of
from tests.models.finetuning.adapted_models import (
    BATCH,
    SOMEBODYS,
    Somebodys,
    by_path,
    is_adapter,
    loss_of_logits,
    parameters,
)


def _program(model, mesh, **options):
    options = {"min_weight_size": 0, "pad": True, **options}
    mesh = make_mesh(mesh)
    return fsdp(model, optax.sgd(1.0), loss_of_logits, mesh=mesh, batch=BATCH, **options)


MODEL = lora(Somebodys(), SOMEBODYS, alpha=4)


@pytest.mark.slow
def test_merged_kernels_compute_what_adapters_add_and_files_hold_adapters_alone(
    tmp_path,
    devices8,
    monkeypatch,
    limit_files,
):
    program = _program(MODEL, {"data": 8})
    state = program.init_from(parameters(MODEL))
    logits = MODEL.apply(program.whole(state), BATCH.inputs)
    merged = merge_lora(program, state)
    for path, x in by_path(state.params).items():
        own = merged
        for name in path.split("/"):
            own = own.get(name) if own else None
        assert (own is None) == is_adapter(path)
        assert own is None or own.shape == x.shape
    assert (
        merged["layers"]["up"]["kernel"].sharding == state.params["layers"]["up"]["kernel"].sharding
    )
    on_host = state.replace(params=jax.device_get(state.params))  # As `from_bytes` leaves it.
    chex.assert_trees_all_equal(merge_lora(program, on_host), merged)
    plain = _program(Somebodys(), {"data": 8})
    params = plain.whole(plain.init_from(merged))
    np.testing.assert_allclose(
        Somebodys().apply(params, BATCH.inputs), logits, rtol=1e-5, atol=1e-5
    )

    # Another mesh takes what has been saved, and keeps its own base.
    monkeypatch.setattr("manualpar.system.storage.drafts.DYING_SECONDS", 0.1)
    with (
        draft_of(tmp_path / "adapters"),
        pytest.raises(ValueError, match="adapters is being written by another process"),
    ):
        save_adapters(program, state, tmp_path / "adapters")
    limit_files(1024)
    with pytest.raises(OSError, match="adapters cannot be written: File too large"):
        save_adapters(program, state, tmp_path / "adapters")
    limit_files(2**30)
    assert not list(tmp_path.iterdir())
    folder = save_adapters(program, state, str(tmp_path / "adapters"))
    assert sum(file.stat().st_size for file in folder.iterdir()) < 40_000
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1  # As the umask has it.
    other = _program(MODEL, {"data": 4})
    begun = other.init(jax.random.key(9))
    before, after = by_path(begun.params), by_path(load_adapters(other, begun, folder).params)
    for path, x in by_path(parameters(MODEL)).items():
        expected = x if is_adapter(path) else before[path]
        own = after[path][tuple(map(slice, x.shape))] if is_adapter(path) else after[path]
        np.testing.assert_array_equal(own, expected, err_msg=path)

    with pytest.raises(ValueError, match="exists already, expected a new folder"):
        save_adapters(program, state, folder)
    with pytest.raises(ValueError, match="which has no adapters, expected the result of lora"):
        merge_lora(plain, plain.init_from(merged))
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="none cannot be read"):
        load_adapters(other, begun, tmp_path / "none")
    wider = _program(lora(Somebodys(), {**SOMEBODYS, "head/kernel": 5}, alpha=4), {"data": 8})
    with pytest.raises(ValueError, match=r"head/lora_a is float32.16,4., expected .*16,5"):
        load_adapters(wider, wider.init(jax.random.key(0)), folder)
    fewer = _program(lora(Somebodys(), {"head": 4, "*/up": 4, "*/out": 3}, alpha=4), {"data": 8})
    with pytest.raises(ValueError, match="layers/down/lora_a is left over"):
        load_adapters(fewer, fewer.init(jax.random.key(0)), folder)
    description = json.loads((folder / "adapters.json").read_text())
    assert description == {"alpha": 4.0, "rank_stabilized": False, "targets": SOMEBODYS}
    stabilized = _program(lora(Somebodys(), SOMEBODYS, alpha=4, rank_stabilized=True), {"data": 8})
    with pytest.raises(ValueError, match="for rank_stabilized=False, expected the model's True"):
        load_adapters(stabilized, stabilized.init(jax.random.key(0)), folder)
    (folder / "adapters.json").write_text(json.dumps({**description, "alpha": 8}))
    with pytest.raises(ValueError, match="are for alpha=8, expected the model's 4"):
        load_adapters(other, begun, folder)
    data = (folder / "adapters.safetensors").read_bytes()
    (folder / "adapters.safetensors").write_bytes(data[:100])
    with pytest.raises(ValueError, match="cannot be read"):
        load_adapters(other, begun, folder)
    (folder / "adapters.safetensors").unlink()
    os.mkfifo(folder / "adapters.safetensors")
    with pytest.raises(ValueError, match="cannot be read: is a FIFO, expected a file"):
        load_adapters(other, begun, str(folder))
    (folder / "adapters.safetensors").unlink()
    save_file({"\x1b[2J": np.zeros(1, np.float32)}, folder / "adapters.safetensors")
    (folder / "adapters.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"not the program's: \\x1b\[2J is left over"):
        load_adapters(other, begun, folder)
    with pytest.raises(ValueError, match="directory is 's3://bucket/x', expected a path on a disk"):
        save_adapters(program, state, "s3://bucket/x")
