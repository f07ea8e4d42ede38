"""Adapters of low rank on models that know nothing of them, against the same on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar import (
    fsdp,
    lora,
    tensor_parallel,
)
from manualpar.models.cross_entropy import language_model_loss
from tests.models.finetuning.adapted_models import (
    ALL_OF_OURS,
    BATCH,
    D24,
    OURS,
    PLAN,
    SOMEBODYS,
    STRATEGIES,
    TRANSFORMERS,
    Somebodys,
    by_path,
    check,
    on,
    parameters,
)
from tests.one_device import slow_unless

OURS |= {"num_layers": 2}


@pytest.mark.slow
def test_the_base_and_what_it_computes_are_as_without_adapters():
    base = Somebodys()
    model = lora(base, SOMEBODYS, alpha=4)
    expected, found = (m.init(jax.random.key(3), BATCH.inputs) for m in (base, model))
    expected_by_path, found_by_path = by_path(expected), by_path(found)
    for path, x in expected_by_path.items():
        np.testing.assert_array_equal(found_by_path.pop(path), x, err_msg=path)
    assert {path.removeprefix("params/"): x.shape for path, x in found_by_path.items()} == {
        "head/lora_a": (16, 4),
        "head/lora_b": (4, 16),
        "layers/down/lora_a": (3, 32, 2),
        "layers/down/lora_b": (3, 2, 16),
        "layers/heads/lora_a": (3, 16, 2),
        "layers/heads/lora_b": (3, 2, 4, 4),
        "layers/out/lora_a": (3, 4, 4, 3),
        "layers/out/lora_b": (3, 3, 16),
        "layers/up/lora_a": (3, 16, 4),
        "layers/up/lora_b": (3, 4, 32),
    }
    a = found_by_path["params/layers/out/lora_a"]
    assert np.abs(a).max() <= 1 / 4  # 1/sqrt(4 * 4).
    assert np.abs(a[0] - a[1]).max() > 0.01
    np.testing.assert_array_equal(
        base.apply(expected, BATCH.inputs), model.apply(found, BATCH.inputs)
    )


@pytest.mark.slow
def test_an_adapter_is_a_product_of_low_rank_added_to_the_kernel():
    model = lora(Somebodys(scan=False), SOMEBODYS, alpha=3)
    params = parameters(model)
    logits = model.apply({"params": params}, BATCH.inputs)
    for block in (params["layer_0"], params["layer_1"]):
        for name, inputs in (("heads", 1), ("out", 2), ("up", 1), ("down", 1)):
            layer = block[name]
            a, b = layer.pop("lora_a"), layer.pop("lora_b")
            assert a.ndim == inputs + 1
            layer["kernel"] += 3 / b.shape[0] * jnp.tensordot(a, b, 1)
    head = params["head"]
    head["kernel"] += 3 / 4 * head.pop("lora_a") @ head.pop("lora_b")
    expected = Somebodys(scan=False).apply({"params": params}, BATCH.inputs)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [slow_unless([("fsdp",)], name) for name in STRATEGIES])
def test_a_step_of_somebodys_model_is_that_of_one_device(name):
    check(lora(Somebodys(), SOMEBODYS, alpha=4), STRATEGIES[name])


@pytest.mark.parametrize("name", [slow_unless((), name) for name in TRANSFORMERS])
def test_a_step_of_our_transformer_is_that_of_one_device(name):
    model, build = TRANSFORMERS[name]
    check(lora(model, ALL_OF_OURS, alpha=4), build, language_model_loss)


@pytest.mark.slow
def test_a_step_of_a_model_with_a_plan_is_that_of_one_device():
    model = tensor_parallel(Somebodys(), PLAN)
    check(lora(model, SOMEBODYS, alpha=4), on(fsdp, D24))
