"""Files become codes and scales in shards, and files again that hold what was decoded."""

import jax
import numpy as np
import pytest

from manualpar import lora, make_mesh, quantized
from manualpar.models import Split
from manualpar.models.pretrained import export_hf, load_hf
from tests.models.finetuning.adapted_models import by_path
from tests.models.pretrained.llama import assert_same_files, llama, program_of, read, tensors_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 4, "model": 2}], ids=str)
def test_what_is_loaded_and_exported_is_what_init_from_makes(mesh, made, tmp_path):
    directory, params = made
    plain = llama(directory, split=Split("model"), vocab_multiple=8)
    model = lora(quantized(plain, {"*kernel": 4}), {"*/up": 2}, alpha=6)
    program = program_of(model, make_mesh(mesh), pad=True)
    key = jax.random.key(1)
    state = load_hf(program, directory, key, missing="init")
    padded = {**params, **{name: params[name] for name in ("embedding", "head")}}
    padded["embedding"] = np.pad(padded["embedding"], [(0, 2), (0, 0)])
    padded["head"] = np.pad(padded["head"], [(0, 0), (0, 2)])
    expected = by_path(program.whole(program.init_from(padded, key, missing="init")))
    found = by_path(program.whole(state))
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        np.testing.assert_array_equal(found[path], x, err_msg=path)

    # What is written is near the tensors that were read, and codes and scales again.
    tensors, written = tensors_of(params), read(export_hf(program, state, tmp_path / "out"))
    assert written.keys() == tensors.keys()
    for name, x in tensors.items():
        if "_proj" in name:
            assert 0 < np.abs(written[name] - x).max() < 0.01 * np.abs(x).max()
        else:
            np.testing.assert_array_equal(written[name], x, err_msg=name)
    again = load_hf(program, tmp_path / "out", key, missing="init")
    for path, x in by_path(program.whole(again)).items():
        np.testing.assert_array_equal(x, found[path], err_msg=path)
    assert_same_files(read(export_hf(program, again, tmp_path / "again")), written)
