"""Adapters of low rank on models that know nothing of them, against the same on one device."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import (
    fsdp,
    lora,
    make_mesh,
    merge_lora,
    tensor_parallel,
)
from manualpar.models import Attention, Experts, Split, Transformer
from manualpar.models.cross_entropy import language_model_loss
from tests.models.finetuning.adapted_models import (
    ALL_OF_OURS,
    BATCH,
    D24,
    OF_LATENTS,
    OURS,
    PLAN,
    SOMEBODYS,
    STRATEGIES,
    TRANSFORMERS,
    Somebodys,
    by_path,
    check,
    is_adapter,
    loss_of_logits,
    on,
    parameters,
)
from tests.one_device import slow_unless

OURS = {**OURS, "num_layers": 2}  # Not in place, because other tests share it.


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


@pytest.mark.slow
def test_adapters_of_latents_are_merged_into_their_kernels():
    base = Transformer(**OF_LATENTS, scan_layers=False, num_layers=1)
    model = lora(base, {"*/attention/*": 3}, alpha=4)
    params = parameters(model)
    logits = model.apply({"params": params}, BATCH.inputs)
    attention = params["layer_0"]["attention"]
    for name in ("latent", "query_latent", "expand", "query", "out"):
        a, b = (attention[name].pop(f"lora_{part}") for part in "ab")
        attention[name]["kernel"] += 4 / 3 * jnp.tensordot(a, b, 1)
    assert not [path for path in by_path(params) if is_adapter(path)]
    expected = base.apply({"params": params}, BATCH.inputs)
    assert np.abs(expected).max() > 0.1
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


def test_a_glob_chooses_kernels_and_leaves_norms_alone():
    model = Transformer(**OURS, attention=Attention(query_key_norm=True, qkv_bias=True))

    def adapted(glob: str) -> set[str]:
        init = lora(model, {glob: 2}, alpha=4).init
        found = by_path(jax.eval_shape(init, jax.random.key(0), BATCH.inputs)["params"])
        return {path.removesuffix("lora_a") for path in found if path.endswith("lora_a")}

    names = ("query", "key", "value", "out")
    assert adapted("*/attention/*") == {f"layers/attention/{name}/" for name in names}
    with pytest.raises(ValueError, match="and module 'layers/attention/key_norm' is a RMSNorm, ex"):
        adapted("*/attention/*_norm")
    with pytest.raises(ValueError, match=r"parameter 'layers/attention/key/bias' of shape"):
        adapted("*/key/bias")
    with pytest.raises(ValueError, match="this glob matches no module with parameters"):
        adapted("*head*")


class Layer(nn.Module):
    """A layer with a switch for training."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        return nn.Dense(8, name="layer")(x)


@pytest.mark.parametrize("magnitudes", [False, True])
def test_dropout_drops_inputs_of_adapters_in_training_alone(magnitudes):
    model = lora(Layer(), {"layer": 8}, alpha=8, dropout=0.25, magnitudes=magnitudes)
    x = jax.random.normal(jax.random.key(0), (500, 8))
    params = model.init(jax.random.key(1), x)["params"]
    own, bias = params["layer"], jnp.arange(8.0)
    own |= {"lora_a": jnp.eye(8), "lora_b": jnp.eye(8), "bias": bias}
    ratio = jnp.linspace(1.0, 2.0 if magnitudes else 1.0, 8)[None]
    if magnitudes:
        lengths = jnp.linalg.norm(own["kernel"] + jnp.eye(8), axis=0)
        own["lora_magnitude"] = ratio[0] * lengths
    base = x @ own["kernel"]
    apply = jax.jit(model.apply, static_argnames="train")
    keyed = {"rngs": {"dropout": jax.random.key(2)}}
    expected = base + bias[None] + (ratio - 1) * base + ratio * x
    for call in ({}, {"train": True}, keyed, {"train": False, **keyed}):
        np.testing.assert_allclose(apply({"params": params}, x, **call), expected, atol=1e-5)
    # What the adapter gets is the input, of which a quarter is dropped.
    y = apply({"params": params}, x, train=True, **keyed)
    more = own["kernel"] * (ratio - 1) + jnp.eye(8) * ratio
    given = (y - base - bias[None]) @ jnp.linalg.inv(more) / x
    is_kept = np.abs(given) > 0.5
    np.testing.assert_allclose(given, np.where(is_kept, 4 / 3, 0), atol=1e-2)
    assert abs(is_kept.mean() - 0.75) < 0.03


def test_devices_with_the_same_features_drop_the_same_entries(devices8):
    fields: Any = {**OURS, "num_layers": 1}
    targets = {"*/attention/query": 2, "*/mlp/up": 2}
    trained = []
    for mesh in ({"data": 1}, {"data": 1, "model": 4}):
        split = Split("model" if "model" in mesh else None)
        model = lora(Transformer(**fields, split=split), targets, alpha=4, dropout=0.5)
        devices = make_mesh(mesh, jax.devices()[: math.prod(mesh.values())])
        program = fsdp(model, optax.sgd(1.0), language_model_loss, mesh=devices, batch=BATCH)
        state = program.init_from(parameters(model))
        state, metrics = program.train_step(state, BATCH)
        trained.append(by_path(program.whole(state)) | {"loss": metrics["loss"][0]})
        last = program.eval_step(state, BATCH)["loss"]
    for path, x in trained[0].items():
        np.testing.assert_allclose(trained[1][path], x, rtol=1e-4, atol=1e-5, err_msg=path)
    # No entry is dropped in evaluation.
    whole = lora(Transformer(**fields), targets, alpha=4)
    params = program.whole(state)["params"]
    loss, _ = language_model_loss(params, whole.apply, BATCH, jax.random.key(0))
    np.testing.assert_allclose(last[0] / last[1], loss, rtol=1e-5)


@pytest.mark.parametrize("name", [slow_unless([("fsdp",)], name) for name in ("fsdp", "auto")])
def test_magnitudes_and_saved_parameters_take_the_step_of_one_device(name):
    model = lora(
        Somebodys(), SOMEBODYS, alpha=4, magnitudes=True, save=("layers/norm/*", "embed/*")
    )
    program = check(model, STRATEGIES[name])
    if name == "fsdp":
        # They are the lengths of columns at first, and merged into the kernels.
        begun = model.init(jax.random.key(0), BATCH.inputs)
        np.testing.assert_allclose(
            model.apply(begun, BATCH.inputs),
            Somebodys().apply(Somebodys().init(jax.random.key(0), BATCH.inputs), BATCH.inputs),
            rtol=1e-5,
            atol=1e-5,
        )
        state = program.init_from(parameters(model))
        plain = on(fsdp, {"data": 8})(Somebodys(), optax.sgd(1.0), loss_of_logits, batch=BATCH)
        merged = plain.whole(plain.init_from(merge_lora(program, state)))
        np.testing.assert_allclose(
            Somebodys().apply(merged, BATCH.inputs),
            model.apply(program.whole(state), BATCH.inputs),
            rtol=1e-5,
            atol=1e-5,
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plan", "split", "sequence", "ring", "latents, sequence"])
def test_magnitudes_of_split_layers_take_the_step_of_one_device(name):
    if name == "plan":
        model: Any = lora(tensor_parallel(Somebodys(), PLAN), SOMEBODYS, alpha=4, magnitudes=True)
        check(model, on(fsdp, D24))
        return
    base, build = TRANSFORMERS[name]
    model = lora(base.clone(num_layers=2), ALL_OF_OURS, alpha=4, magnitudes=True)
    check(model, build, language_model_loss)


TABLES = {"*/attention/*": 2, "embedding": 2, "head": 3, "*/experts/up": 2, "*/experts/down": 2}
SPLIT = {"experts": Experts(4, axis="expert", capacity_factor=0.0), "split": Split("model")}
MESHES = [
    ({"data": 8}, {"experts": Experts(4, capacity_factor=0.0)}),
    ({"data": 2, "expert": 2, "model": 2}, SPLIT),
    ({"data": 4, "expert": 2}, SPLIT | {"scan_layers": False}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "fields"), MESHES, ids=str)
def test_adapters_of_tables_and_experts_are_those_of_one_device(mesh, fields):
    model = lora(Transformer(**OURS, **fields), TABLES, alpha=4, rank_stabilized=True)
    axes = tuple(axis for axis in ("data", "expert") if axis in mesh)
    program = check(model, on(fsdp, mesh, axis_name=axes), language_model_loss)
    # They are added to the parameters, and merged into them.
    state = program.init_from(parameters(model))
    base = Transformer(**OURS, **fields)
    merged = on(fsdp, mesh, axis_name=axes)(base, optax.sgd(1.0), language_model_loss, batch=BATCH)
    params = merged.whole(merged.init_from(merge_lora(program, state)))
    np.testing.assert_allclose(
        base.apply(params, BATCH.inputs),
        model.apply(program.whole(state), BATCH.inputs),
        rtol=1e-4,
        atol=1e-5,
    )
