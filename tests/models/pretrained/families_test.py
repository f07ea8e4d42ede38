"""Small random models of each family, as transformers computes them, are the same on every mesh."""

import copy

import numpy as np
import pytest

from tests.models.pretrained.transformers_models import (
    MODELS,
    WITH_EXPERTS,
    assert_step_is_that_of_torch,
    logits_of,
    make_batch,
    saved,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
torch = pytest.importorskip("torch", reason="pip install -e '.[interop]'")
pytest.importorskip("transformers", reason="pip install -e '.[interop]'")

MESHES: dict[str, dict[str, int]] = {
    "fsdp": {"data": 8},
    "model": {"data": 2, "model": 4},
    "context": {"data": 2, "context": 4},
    "stage": {"data": 2, "model": 2, "stage": 2},
}
EXPERT_MESHES = MESHES | {
    "model": {"data": 2, "expert": 2, "model": 2},
    "context": {"data": 2, "expert": 2, "context": 2},
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name):
    model = saved(*MODELS[name])
    for scan_layers in (True, False):
        logits = logits_of(model.directory, scan_layers=scan_layers)
        np.testing.assert_allclose(logits, model.logits, rtol=1e-5, atol=1e-5)
    if name in WITH_EXPERTS:
        return  # Where logits of routers are rounded, tokens go to other experts.
    # In bfloat16 both round, at places that differ: ours is no farther from what is exact.
    with torch.no_grad():
        theirs = copy.deepcopy(model.model).to(torch.bfloat16)
        rounded = theirs(torch.tensor(make_batch().inputs).long()).logits.float().numpy()
    found = logits_of(model.directory, dtype="bfloat16"), rounded
    errors = [np.abs(x - model.logits).mean() for x in found]
    assert 0 < errors[0] < 1.5 * errors[1]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_on_a_mesh_is_that_of_transformers(name, mesh, devices8):
    del devices8
    meshes = EXPERT_MESHES if name in WITH_EXPERTS else MESHES
    assert_step_is_that_of_torch(saved(*MODELS[name]), meshes[mesh])
