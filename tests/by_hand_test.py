"""A program in the manner of the notebook that the utilities are known from.

Its own `init`, its own train steps, modules wrapped by hand: only the imports and the spellings of
JAX (`jax.shard_map`, `check_vma`, `jax.tree.map`, typed keys) are of today."""

import functools
import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from manualpar import (
    Batch,
    TrainState,
    accumulate_gradients,
    fold_rng_over_axis,
    print_metrics,
    shard_module_params,
    sync_gradients,
)
from tests.one_device import slow_unless


def get_config(use_scan=False):
    return ConfigDict(
        dict(
            data=dict(batch_size=128, num_classes=10, input_size=784),
            model=dict(
                hidden_size=512,
                dropout_rate=0.1,
                dtype=jnp.bfloat16,
                num_classes=10,
                data_axis_name="data",
            ),
            fsdp=dict(min_weight_size=2**4),
            optimizer=dict(learning_rate=1e-3, num_minibatches=4, use_scan=use_scan),
            data_axis_name="data",
            seed=42,
        )
    )


class DPClassifier(nn.Module):
    config: ConfigDict

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(
            self.config.model.hidden_size, dtype=self.config.model.dtype, name="input_dense"
        )(x)
        x = nn.silu(x)
        x = nn.Dropout(rate=self.config.model.dropout_rate, deterministic=not train)(x)
        x = nn.Dense(
            self.config.model.num_classes, dtype=self.config.model.dtype, name="output_dense"
        )(x)
        return x.astype(jnp.float32)


class FSDPClassifier(nn.Module):
    config: ConfigDict

    @nn.compact
    def __call__(self, x, train):
        sharded_dense = shard_module_params(
            nn.Dense,
            axis_name=self.config.data_axis_name,
            min_weight_size=self.config.fsdp.min_weight_size,
        )
        x = sharded_dense(
            self.config.model.hidden_size, dtype=self.config.model.dtype, name="input_dense"
        )(x)
        x = nn.silu(x)
        x = nn.Dropout(rate=self.config.model.dropout_rate, deterministic=not train)(x)
        x = sharded_dense(
            self.config.model.num_classes, dtype=self.config.model.dtype, name="output_dense"
        )(x)
        return x.astype(jnp.float32)


def init_dp(rng, x, model, optimizer):
    init_rng, rng = jax.random.split(rng)
    variables = model.init({"params": init_rng}, x, train=False)
    params = variables.pop("params")
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer, rng=rng)


def loss_fn(params, apply_fn, batch, rng):
    dropout_rng = fold_rng_over_axis(rng, "data")
    logits = apply_fn({"params": params}, batch.inputs, train=True, rngs={"dropout": dropout_rng})
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    correct_pred = jnp.equal(jnp.argmax(logits, axis=-1), batch.labels)
    batch_size = batch.inputs.shape[0]
    step_metrics = {"loss": (loss.sum(), batch_size), "accuracy": (correct_pred.sum(), batch_size)}
    return loss.mean(), step_metrics


def train_step(state, metrics, batch, config, sync):
    rng, step_rng = jax.random.split(state.rng)
    grads, step_metrics = accumulate_gradients(
        state,
        batch,
        step_rng,
        config.optimizer.num_minibatches,
        loss_fn=loss_fn,
        use_scan=config.optimizer.use_scan,
    )
    with jax.named_scope("sync_gradients"):
        grads = sync(grads)
    new_state = state.apply_gradients(grads=grads, rng=rng)
    with jax.named_scope("sync_metrics"):
        step_metrics = jax.tree.map(lambda x: jax.lax.psum(x, axis_name="data"), step_metrics)
    metrics = step_metrics if metrics is None else jax.tree.map(jnp.add, metrics, step_metrics)
    return new_state, metrics


def dp_sync(grads):
    return jax.tree.map(lambda g: jax.lax.pmean(g, axis_name="data"), grads)


def fsdp_sync(grads):
    return sync_gradients(grads, ("data",))


@functools.cache
def run(model_class, sync, *, check_vma, use_scan=False, num_steps=5):
    """The notebook from top to bottom: initialise, look at the specs, train; returns state, specs
    and the metrics of every step.
    """
    config = get_config(use_scan)
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    model = model_class(config)
    optimizer = optax.adamw(learning_rate=config.optimizer.learning_rate)
    rng = jax.random.key(config.seed)
    model_init_rng, data_inputs_rng, data_labels_rng = jax.random.split(rng, 3)
    batch = Batch(
        inputs=jax.random.normal(data_inputs_rng, (config.data.batch_size, config.data.input_size)),
        labels=jax.random.randint(
            data_labels_rng, (config.data.batch_size,), 0, config.data.num_classes
        ),
    )

    init = functools.partial(init_dp, model=model, optimizer=optimizer)
    # Only the names in the boxes are read from this one, so it does not matter what P() would mean
    # for their values.
    shapes_fn = jax.shard_map(
        init, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    state_specs = nn.get_partition_spec(jax.eval_shape(shapes_fn, model_init_rng, batch.inputs))
    init_fn = jax.jit(
        jax.shard_map(
            init, mesh=mesh, in_specs=(P(), P("data")), out_specs=state_specs, check_vma=check_vma
        )
    )
    state = init_fn(model_init_rng, batch.inputs)

    step_fn = jax.jit(
        jax.shard_map(
            functools.partial(train_step, config=config, sync=sync),
            mesh=mesh,
            in_specs=(state_specs, P(), P("data")),
            out_specs=(state_specs, P()),
            check_vma=check_vma,
        ),
        donate_argnames=("state", "metrics"),
    )
    _, metric_shapes = jax.eval_shape(step_fn, state, None, batch)
    history = []
    for _ in range(num_steps):
        metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype=x.dtype), metric_shapes)
        state, metrics = step_fn(state, metrics, batch)
        history.append(jax.device_get(metrics))
    return state, state_specs, history


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_layout_is_the_notebooks(devices8, check_vma):
    state, specs, _ = run(FSDPClassifier, fsdp_sync, check_vma=check_vma)
    layout = {
        "input_dense": {"bias": P("data"), "kernel": P("data", None)},
        "output_dense": {"bias": P(), "kernel": P("data", None)},
    }
    adam = specs.opt_state[0]
    for tree in (specs.params, adam.mu, adam.nu):
        assert tree == layout
    assert specs.step == specs.rng == adam.count == P()
    kernel = state.params["input_dense"]["kernel"]
    assert kernel.names == ("data", None)
    assert kernel.value.sharding.shard_shape(kernel.value.shape) == (784 // 8, 512)
    moment = state.opt_state[0].mu["output_dense"]["kernel"]
    assert moment.names == ("data", None)
    assert moment.value.sharding.shard_shape(moment.value.shape) == (512 // 8, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check_vma", "use_scan"),
    [slow_unless({(True, False)}, *pair) for pair in itertools.product((True, False), repeat=2)],
)
def test_dp_and_fsdp_learn_the_batch_alike(devices8, check_vma, use_scan, capsys):
    _, _, dp = run(DPClassifier, dp_sync, check_vma=check_vma, use_scan=use_scan)
    _, _, sharded = run(FSDPClassifier, fsdp_sync, check_vma=check_vma, use_scan=use_scan)
    chex.assert_trees_all_close(dp, sharded, rtol=2e-2)  # bfloat16
    assert all(step["loss"][1] == 128 for step in sharded)
    losses = [step["loss"][0] / step["loss"][1] for step in sharded]
    assert losses[-1] < 0.8 * losses[0]
    print_metrics(sharded[-1], "FSDP - Final metrics")
    printed = capsys.readouterr().out
    assert "FSDP - Final metrics" in printed
    assert f"loss: {losses[-1]:.6f}" in printed


@pytest.mark.slow
def test_checked_and_unchecked_types_give_the_same_numbers(devices8):
    _, _, checked = run(FSDPClassifier, fsdp_sync, check_vma=True)
    _, _, unchecked = run(FSDPClassifier, fsdp_sync, check_vma=False)
    chex.assert_trees_all_close(checked[0], unchecked[0], rtol=1e-6)
    chex.assert_trees_all_close(checked, unchecked, rtol=1e-3)  # bfloat16


def test_parameters_are_the_same_on_every_device(devices8):
    state, _, _ = run(FSDPClassifier, fsdp_sync, check_vma=True)
    bias = state.params["output_dense"]["bias"]
    shards = [np.asarray(shard.data) for shard in bias.addressable_shards]
    assert len(shards) == 8
    for shard in shards[1:]:
        np.testing.assert_array_equal(shards[0], shard)
