import chex
import cloudpickle
import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, data_parallel, fsdp, make_mesh
from manualpar.core.modes.manual import Manual
from tests.one_device import train_on_one_device, train_program
from tests.tiny import BATCHES, TOLERANCE, Classifier, loss_fn, make_batch


def build(builder, mesh, tx, *, batch=BATCHES[0], model=None, **kwargs):
    if builder is fsdp:
        kwargs.setdefault("min_weight_size", 16)
    return builder(model or Classifier(), tx, loss_fn, mesh=mesh, batch=batch, **kwargs)


@pytest.mark.parametrize(("builder", "use_scan"), [(data_parallel, True), (fsdp, False)])
def test_masks_that_differ_by_device_and_minibatch(devices8, builder, use_scan):
    masks = [(np.arange(64) % 7 < k).astype(np.float32) for k in (1, 3, 6)]
    masks.append((np.arange(64) < 5).astype(np.float32))  # Most devices have no example at all.
    batches = [make_batch(seed, mask=mask) for seed, mask in enumerate(masks)]
    expected = train_on_one_device(Classifier(), optax.sgd(0.3), batches, loss_fn, train=False)
    program = build(
        builder,
        make_mesh({"data": 8}, devices8),
        optax.sgd(0.3),
        batch=batches[0],
        num_minibatches=4,
        use_scan=use_scan,
    )
    state, losses = train_program(program, batches)
    np.testing.assert_allclose(losses, expected.losses, **TOLERANCE)
    chex.assert_trees_all_close(jax.device_get(state.params), expected.params, **TOLERANCE)


@pytest.mark.parametrize("builder", [data_parallel, fsdp])
def test_without_the_gradient_sync_the_program_does_not_trace(devices8, monkeypatch, builder):
    monkeypatch.setattr(Manual, "sync", lambda self, place, shard, g: g)
    with pytest.raises(ValueError, match=r"out_specs.*\n*.*varying|varies|replicated"):
        build(builder, make_mesh({"data": 8}, devices8), optax.sgd(0.1))


def test_without_the_metric_sync_the_program_does_not_trace(devices8, monkeypatch):
    monkeypatch.setattr(Manual, "sync_metrics", lambda self, metrics: metrics)
    with pytest.raises(ValueError, match="out_specs"):
        build(fsdp, make_mesh({"data": 8}, devices8), optax.sgd(0.1))


# What a program is.


def test_state_is_plain_global_arrays_in_the_layout(devices8):
    program = build(fsdp, make_mesh({"data": 8}, devices8), optax.adam(1e-2))
    layout = {
        "LayerNorm_0": {"bias": P("data"), "scale": P("data")},
        "input_dense": {"bias": P("data"), "kernel": P(None, "data")},
        "output_dense": {"bias": P(), "kernel": P("data", None)},
    }
    assert program.layout.params == layout
    assert program.layout.opt_state[0].mu == program.layout.opt_state[0].nu == layout
    assert program.layout.step == program.layout.rng == program.layout.opt_state[0].count == P()
    state = program.init(jax.random.key(0))
    for _ in range(2):
        assert jax.tree.structure(state) == jax.tree.structure(program.abstract_state)
        for x, abstract in zip(
            jax.tree.leaves(state), jax.tree.leaves(program.abstract_state), strict=True
        ):
            assert type(x) is not nn.Partitioned
            assert isinstance(x, jax.Array)
            assert (x.shape, x.dtype) == (abstract.shape, abstract.dtype)
            assert x.sharding.is_equivalent_to(abstract.sharding, x.ndim)
        state, _ = program.train_step(state, BATCHES[0])
    kernel = state.params["input_dense"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(12, 4)}


def test_parameters_that_stay_whole_say_why(devices8):
    program = build(fsdp, make_mesh({"data": 8}, devices8), optax.sgd(0.1), min_weight_size=0)
    notes = {info.path: placement.note for info, placement in program.parameters}
    assert notes["output_dense/bias"] == "none of [5] divides by 8"
    assert notes["input_dense/kernel"] == "only one that divides"


def test_the_state_is_donated(devices8):
    program = build(fsdp, make_mesh({"data": 8}, devices8), optax.adam(1e-2))
    state = program.init(jax.random.key(0))
    program.train_step(state, BATCHES[0])
    assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state)))


def test_building_from_shapes_touches_no_device(devices8):
    before = len(jax.live_arrays())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCHES[0])
    program = build(fsdp, make_mesh({"data": 8}, devices8), optax.adam(1e-2), batch=shapes)
    assert len(jax.live_arrays()) == before
    assert program.abstract_batch.inputs.sharding == program.batch_sharding
    _, metrics = program.train_step(program.init(jax.random.key(0)), BATCHES[0])
    assert metrics["loss"][1] == 64


def test_init_takes_typed_and_raw_keys(devices8):
    program = build(fsdp, make_mesh({"data": 8}, devices8), optax.sgd(0.1))
    typed, raw = program.init(jax.random.key(3)), program.init(jax.random.PRNGKey(3))
    chex.assert_trees_all_equal(typed.params, raw.params)
    with pytest.raises(TypeError, match=r"init: rng is 3, expected one key"):
        program.init(3)
    with pytest.raises(TypeError, match=r"expected one key"):
        program.init(jax.random.split(jax.random.key(0)))


def test_training_traces_nothing_that_building_has_not(devices8):
    traces = []

    def counting_loss(*args):
        traces.append(1)
        return loss_fn(*args)

    mesh = make_mesh({"data": 8}, devices8)
    program = fsdp(Classifier(), optax.adam(1e-2), counting_loss, mesh=mesh, batch=BATCHES[0])
    built = len(traces)
    train_program(program, [jax.device_put(batch, program.batch_sharding) for batch in BATCHES[:4]])
    assert len(traces) == built > 0


# Evaluation and dropout.


@pytest.mark.parametrize("builder", [data_parallel, fsdp])
def test_evaluation_is_without_dropout_and_counts_what_the_mask_says(devices8, builder):
    model = Classifier(dropout=0.9)
    mask = (np.arange(64) < 37).astype(np.float32)
    batch = make_batch(mask=mask)
    program = build(builder, make_mesh({"data": 8}, devices8), optax.sgd(0.1), model=model)
    state = program.init(jax.random.key(0))
    metrics = program.eval_step(state, batch)
    params = jax.device_get(state.params)
    logits = model.apply({"params": params}, batch.inputs, train=False)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    np.testing.assert_allclose(metrics["loss"][0], (losses * mask).sum(), rtol=1e-5)
    assert metrics["loss"][1] == metrics["accuracy"][1] == 37
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


@pytest.mark.parametrize("use_scan", [False, True], ids=["loop", "scan"])
def test_dropout_masks_differ_on_every_example_minibatch_and_step(devices8, use_scan):
    size = 32

    class Rows(nn.Module):
        """The gradient of each example's own row of `w` is its dropout mask."""

        @nn.compact
        def __call__(self, x, train):
            w = self.param("w", nn.initializers.zeros, (size, 64))
            return nn.Dropout(0.5, deterministic=not train)(w[x])

    def loss_fn(params, apply_fn, batch, rng):
        rows = apply_fn({"params": params}, batch.inputs, train=True, rngs={"dropout": rng})
        return rows.sum() / size, {"loss": (rows.sum(), rows.shape[0])}

    batch = Batch(inputs=np.arange(size), labels=np.zeros(size))
    program = fsdp(
        Rows(),
        optax.sgd(1.0),
        loss_fn,
        mesh=make_mesh({"replica": 2, "data": 2, "model": 2}, devices8),
        axis_name=("replica", "data"),
        batch=batch,
        num_minibatches=2,
        use_scan=use_scan,
    )
    state = program.init(jax.random.key(0))
    masks, before = [], np.zeros((size, 64))
    for _ in range(2):
        state, _ = program.train_step(state, batch)
        after = np.asarray(state.params["w"])
        masks.extend(tuple(row) for row in (after - before) != 0)
        before = after
    assert len(set(masks)) == 2 * size
    assert 0.4 < np.mean(masks) < 0.6


# Errors, before anything is compiled.


def test_a_later_batch_that_does_not_divide_is_refused(devices8):
    program = build(fsdp, make_mesh({"data": 8}, devices8), optax.sgd(0.1))
    state = program.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"batch.inputs has 63 examples, expected a positive mult"):
        program.eval_step(state, make_batch(size=63))
    with pytest.raises(ValueError, match=r"batch.inputs has 12 examples, expected a positive mult"):
        program.train_step(state, make_batch(size=12))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))  # Nothing is lost by the error.


def test_a_program_says_what_to_pickle_in_its_place(devices8):
    program = build(fsdp, make_mesh({"data": 8}, devices8), optax.sgd(0.1))
    for unpicklable in (program, program.train_step, program.eval_step):
        with pytest.raises(TypeError, match=r"^cannot pickle .*; pickle the arguments of the bu"):
            cloudpickle.dumps(unpicklable)
    with pytest.raises(TypeError, match=r"^cannot pickle a Program, .*Save its state with Checkp"):
        cloudpickle.dumps(lambda: program)


def test_a_pickled_state_is_adopted_by_the_program(devices8):
    program = build(fsdp, make_mesh({"data": 8}, devices8), optax.adam(0.1), min_weight_size=16)
    state = program.init(jax.random.key(0))
    pickled = cloudpickle.loads(cloudpickle.dumps(state))
    with pytest.raises(ValueError, match=r"Convert another program's state with program\.adopt"):
        program.train_step(pickled, make_batch())
    adopted = program.adopt(pickled)
    shardings = (jax.tree.map(lambda x: x.sharding, x.params) for x in (adopted, state))
    chex.assert_trees_all_equal(*shardings)
    keys = (x.replace(rng=jax.random.key_data(x.rng)) for x in (adopted, state))
    chex.assert_trees_all_equal(*keys)


def test_the_repr_of_a_program_and_of_its_states_is_a_few_lines(devices8):
    program = build(fsdp, make_mesh({"data": 8}, devices8), optax.adam(0.1), min_weight_size=16)
    assert str(program).splitlines()[0] == "Program(fsdp, mode manual, mesh data=8)"
    state = program.init(jax.random.key(0))
    numbers = sum(x.size for x in jax.tree.leaves(program.unpadded_state.params))
    for shown in (program, state, program.abstract_state, program.layout):
        text = repr(shown)
        assert text.count("\n") < 15
        assert len(text) < 1000
    assert f"{numbers:,} numbers" in repr(program)
    assert f"{numbers:,} numbers" in repr(program.unpadded_state)
    with pytest.warns(DeprecationWarning, match=r"whole_state is Program\.unpadded_state now"):
        assert program.whole_state is program.unpadded_state
    assert f"; {sum(map(any, jax.tree.leaves(program.layout.params)))} sharded" in repr(program)
