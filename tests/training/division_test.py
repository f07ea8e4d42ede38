"""A run goes on with fewer devices: the same batches; the same values up to the order of sums."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import ml_collections
import numpy as np
import optax
import pytest

from manualpar import gather_examples
from manualpar.data import train_batches
from manualpar.training.checkpoints import Checkpoints
from manualpar.training.config import flatten_config, named_config
from manualpar.training.division import (
    Division,
    EarlierDivision,
    combines_examples,
    describe_change,
    divide_batch,
    read_earlier,
)
from manualpar.training.experiment import prepare
from manualpar.training.task import make_task
from tests.runs.small_runs import checkpoint_arrays, flag_of_text

BATCH_SIZE = 48  # Divided by 8, 6 and 4.
STEPS, EVERY = 12, 4
SMALL = {
    "data.batch_size": BATCH_SIZE,
    "model.dropout_rate": 0.0,
    "model.hidden_size": 16,
    "model.num_layers": 2,
    "model.dtype": "float32",
    "optimizer.name": "sgd",
    "optimizer.learning_rate": 0.1,
    "optimizer.weight_decay": 0.0,
    "optimizer.warmup_steps": 0,
    "optimizer.num_minibatches": 1,
    "schedule.name": "constant_schedule",
}
# The sums over examples are added in another order, so the gradients of a step differ by some
# 1e-7 of the largest. SGD passes this on linearly; Adam would divide by it where a gradient is 0.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def small_config(folder=None, *, mesh, **values):
    """A config without dropout, for digits, or for the texts in a folder."""
    config = named_config("fsdp" if folder is None else "fsdp_lm").unlock()
    config.parallel.mesh = mesh
    for name, value in {**SMALL, **values}.items():
        group, field = name.split(".")
        if group not in config:
            config[group] = ml_collections.ConfigDict()
        config[group][field] = value
    if folder is not None:
        config.data.path = flag_of_text(folder).split("=", 1)[1]
        config.data.sequence_length = 8
        config.model.update({"num_heads": 2, "mlp_size": 16})
        config.sample.num_tokens = 0
    return config


def divided(number, earlier=None, **values):
    values = {"data.batch_size": BATCH_SIZE, **values}
    config = small_config(mesh={"data": -1}, **values)
    return divide_batch(config, ("data",), number, earlier)


def begun(number, **values):
    config = small_config(mesh={"data": -1}, **values)
    return EarlierDivision(
        divide_batch(config, ("data",), number), flatten_config(config.to_dict())
    )


def test_with_fewer_devices_minibatches_grow_and_no_more_is_computed_at_once():
    earlier = begun(8)
    assert earlier.division == (8, 1, 6)
    found = {number: divided(number, earlier) for number in (16, 8, 6, 4, 3, 1)}
    assert found == {
        16: (16, 1, 6),
        8: (8, 1, 6),
        6: (6, 2, 6),
        4: (4, 2, 6),
        3: (3, 4, 6),
        1: (1, 8, 6),
    }
    # What it was when the run began counts, and not what it was with six devices.
    assert divided(8, earlier._replace(division=found[6])) == (8, 1, 6)


def test_the_configs_minibatches_hold_if_more_than_the_devices_has_changed():
    assert divided(4) == (4, 1, 12)
    assert divided(4, begun(8), **{"optimizer.num_minibatches": 3}) == (4, 3, 4)
    other = begun(8)
    other = other._replace(config={**other.config, "parallel.mesh": {"data": 8}})
    assert divided(4, other) == (4, 1, 12)


def test_what_divides_the_batch_is_named():
    with pytest.raises(
        ValueError,
        match=r"batch_size is 48, expected a multiple of 5, the 5 devices along 'data' times "
        r"config\.optimizer\.num_minibatches=1\. Of fewer devices, 1, 2, 3, 4 would divide it\.",
    ):
        divided(5, begun(8))
    # Three devices take eight minibatches of two. In a new run 48 would have to be a multiple of 9.
    three = {"optimizer.num_minibatches": 3}
    assert divided(3, begun(8, **three), **three) == (3, 8, 2)
    with pytest.raises(ValueError, match=r"Of fewer devices, 1, 2, 3, 4 would divide it\."):
        divided(5, begun(8, **three), **three)
    for devices in (5, 10**14):  # The second asks no number above the batch's size.
        with pytest.raises(ValueError, match=r"Of fewer devices, 1, 2, 4\b.* would divide it\."):
            divided(devices, **three)


def never():
    return False


def test_the_change_is_a_sentence():
    now = Division(6, 2, 6)
    assert describe_change([6, 2, 6], now, batch_size=48, draws=True, combines=never) == []
    assert describe_change(None, now, batch_size=48, draws=True, combines=never) == []
    assert describe_change([6, True, -6], now, batch_size=48, draws=True, combines=never) == []
    (sentence,) = describe_change([8, 1, 6], now, batch_size=48, draws=False, combines=never)
    assert sentence == (
        "the 48 examples of a step are divided as 6 devices x 2 x 4 (devices x minibatches x "
        "examples), before as 8 devices x 1 x 6: they are the same examples, whose sums are added "
        "in another order"
    )
    (sentence,) = describe_change([8, 1, 6], now, batch_size=48, draws=True, combines=never)
    drawn = ", but other random numbers are drawn for them (dropout masks)"
    assert sentence.endswith(drawn)
    (sentence,) = describe_change(
        list(now), Division(8, 1, 6), batch_size=48, draws=True, combines=never
    )
    assert "are divided as 8 devices x 1 x 6 (devices" in sentence
    assert "before as 6 devices x 2 x 4: they" in sentence
    assert sentence.endswith(drawn)


class Normed(nn.Module):
    """A classifier that takes statistics of a device's examples, or over axes."""

    axis_name: Any = None
    norms: bool = True

    @nn.compact
    def __call__(self, x, train):
        norm = nn.BatchNorm(use_running_average=not train, axis_name=self.axis_name)
        x = nn.Dense(16)(x)
        return nn.Dense(10)(norm(x) if self.norms else x)


def plain_loss(params, apply_fn, batch, rng):
    del rng
    out = apply_fn({"params": params}, batch.inputs, train=True)
    losses = optax.softmax_cross_entropy_with_integer_labels(out, batch.labels)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def contrastive_loss(params, apply_fn, batch, rng):
    """A loss of each example against the examples of all devices."""
    del rng
    out = apply_fn({"params": params}, batch.inputs, train=True)
    losses = jax.nn.logsumexp(out @ gather_examples(out).T, -1) - (out**2).sum(-1)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def ratio_loss(params, apply_fn, batch, rng):
    total, metrics = plain_loss(params, apply_fn, batch, rng)
    return jax.lax.pmean(total, "data"), metrics


@pytest.mark.parametrize(
    ("model", "loss_fn", "combines", "values"),
    [
        (Normed(), plain_loss, False, {}),
        (Normed("data"), plain_loss, True, {}),
        (Normed(norms=False), contrastive_loss, True, {"parallel.strategy": "dp"}),
        pytest.param(Normed(norms=False), ratio_loss, True, {}, marks=pytest.mark.slow),
        pytest.param(
            Normed(("replica", "data")),
            plain_loss,
            True,
            {"parallel.strategy": "hsdp", "parallel.mesh": {"replica": 2, "data": -1}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_minibatches_do_not_grow_if_a_loss_combines_examples(
    devices8, model, loss_fn, combines, values
):
    mesh = values.pop("parallel.mesh", {"data": -1})
    config = small_config(mesh=mesh, **values)
    config.parallel.min_weight_size = 0
    task = dataclasses.replace(make_task(config), model=model, loss_fn=loss_fn)
    begun, losses, combined = None, {}, []
    for number in (8, 4, 2):
        found = prepare(config, devices=jax.devices()[:number], task=task, earlier=begun)
        begun = begun or EarlierDivision(found.division, flatten_config(config.to_dict()))
        each = 1 if combines else 8 // number
        assert found.division == (number, each, 6)
        assert found.program.num_minibatches == each
        program, combined = found.program, [*combined, combines_examples(found.program)]
        (batch,) = read(found, 0, 1)
        state = program.init(jax.random.key(0))
        _, metrics = program.train_step(state, batch_on(program, batch))
        losses[number] = metrics["loss"][0] / metrics["loss"][1]
    assert combined == [combines] * 3
    np.testing.assert_allclose([losses[4], losses[2]], [losses[8]] * 2, rtol=1e-5)
    (sentence,) = describe_change(
        [8, 1, 6], found.division, batch_size=48, draws=False, combines=lambda: combines
    )
    assert ("so there are as many minibatches as before" in sentence) == combines


def test_every_number_of_devices_reads_the_same_examples_in_the_same_order(devices8):
    config = small_config(mesh={"data": -1})
    dataset = None
    batches = {}
    for number in (8, 6, 4):
        experiment = prepare(config, devices=jax.devices()[:number])
        dataset = dataset or experiment.task.dataset
        batches[number] = read(experiment, 5 * BATCH_SIZE, 3)
    for number in (6, 4):
        jax.tree.map(np.testing.assert_array_equal, batches[number], batches[8])


def read(experiment, position, number):
    """The first batches after a position, with the examples in order."""
    stream = train_batches(
        experiment.task.dataset.train,
        seed=experiment.config.seed,
        batch_size=BATCH_SIZE,
        sharding=experiment.program.batch_sharding,
        start_position=position,
    )
    try:
        return [jax.device_get(next(stream)) for _ in range(number)]
    finally:
        stream.close()


def go_on(config, folder, number, until):
    """Trains on some devices from the newest checkpoint in a folder; returns the division."""
    experiment = prepare(config, devices=jax.devices()[:number], earlier=read_earlier(folder))
    program = experiment.program
    with Checkpoints(folder) as checkpoints:
        step = checkpoints.latest_step() or 0
        if step:
            state = checkpoints.restore(program, report=print).state
        else:
            state = program.init(jax.random.key(config.seed))
        for batch in read(experiment, step * BATCH_SIZE, until - step):
            state, _ = program.train_step(state, batch_on(program, batch))
        extra = {"division": list(experiment.division), "config": experiment.config.to_dict()}
        checkpoints.save(program, state, step=until, extra=extra)
    assert program.num_minibatches == experiment.division.minibatches
    return experiment.division


def batch_on(program, batch):
    return jax.device_put(batch, program.batch_sharding)


MESHES = {
    "fsdp": ({}, {"data": -1}, (8, 6, 4)),
    "dp": ({"parallel.strategy": "dp"}, {"data": -1}, (8, 6, 4)),
    "hsdp": ({"parallel.strategy": "hsdp"}, {"replica": 2, "data": -1}, (8, 6, 4)),
    "zero2": ({"parallel.strategy": "zero2"}, {"data": -1}, (8, 6, 4)),
    "model": ({"model.vocab_multiple": 2}, {"data": -1, "model": 2}, (8, 6, 4)),
    "pipeline": ({"model.scan_layers": True}, {"data": -1, "stage": 2}, (8, 6, 4)),
    "pipeline of minibatches": (
        {"model.scan_layers": True, "optimizer.num_minibatches": 3},
        {"data": -1, "stage": 2},
        (8, 6, 4),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *list(MESHES)[:-1],
        pytest.param("pipeline of minibatches", marks=pytest.mark.long),
    ],
)
def test_every_leaf_is_that_of_the_uninterrupted_run(name, tmp_path, devices8):
    values, mesh, (most, some, few) = MESHES[name]
    text = None
    if {"model", "stage"} & mesh.keys():
        text = tmp_path / "text"
        text.mkdir()
    config = small_config(text, mesh=mesh, **values)
    runs = {
        "uninterrupted": [(most, STEPS)],
        "8 to 6": [(most, EVERY), (some, STEPS)],
        "8 to 4 to 8": [(most, EVERY), (few, 2 * EVERY), (most, STEPS)],
    }
    divisions, arrays = {}, {}
    for run, parts in runs.items():
        folder = tmp_path / run / "checkpoints"
        divisions[run] = [go_on(config, folder, *part) for part in parts]
        arrays[run] = checkpoint_arrays(folder.parent, STEPS)
    first = divisions["uninterrupted"][0]
    assert divisions["8 to 6"][0] == first
    assert [one.devices * 8 for one in divisions["8 to 6"]] == [first.devices * n for n in (8, 6)]
    assert divisions["8 to 6"][1].minibatches > first.minibatches
    assert divisions["8 to 4 to 8"][1].minibatches == 2 * first.minibatches
    assert divisions["8 to 4 to 8"][2] == first
    expected = arrays.pop("uninterrupted")
    began = go_on(config, tmp_path / "first" / "checkpoints", most, 1)
    assert began == first
    before = checkpoint_arrays(tmp_path / "first", 1)
    for found in arrays.values():
        assert found.keys() == expected.keys()
        for leaf, x in found.items():
            if not np.issubdtype(x.dtype, np.floating):
                np.testing.assert_array_equal(x, expected[leaf], err_msg=leaf)
                continue
            np.testing.assert_allclose(x, expected[leaf], **CLOSE, err_msg=leaf)
            if "params" in leaf and "bias" not in leaf:
                assert abs(x - before[leaf]).max() > 100 * CLOSE["atol"], leaf
