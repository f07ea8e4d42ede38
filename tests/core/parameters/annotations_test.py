import ast
import re

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from manualpar import Batch, assert_same_as_one_device, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.core.mesh.axes import axes_size, axis_tuple, is_axis_bound
from manualpar.core.parameters.annotations import check_rules, mesh_names, names_on, split
from manualpar.core.parameters.sharded_parameter import ShardedParameter
from manualpar.core.tracing.scopes import SEQUENCE_SCOPE
from manualpar.inspect import bytes_by_axes, parameter_collectives, step_bytes, trace_collectives
from manualpar.layers.boundaries import enter, leave
from manualpar.training.checkpoints import Checkpoints
from tests.core.parameters.split_models import (
    BATCH,
    NORMAL,
    WIDTH,
    Block,
    ExpertNet,
    Net,
    build,
    gradients_of,
    on_one_device,
    worst_difference,
)
from tests.one_device import slow_unless
from tests.tiny import masked_square_loss

RULES = (("embed", None), ("mlp", "model"), ("heads", ("data", "model")), ("batch", "data"))


@pytest.fixture
def mesh():
    return make_mesh({"data": 4, "model": 2})


def value(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def plain(names, shape=(16, 64)):
    return nn.Partitioned(value(shape), names)


def logical(names, shape=(16, 64), rules=None):
    return nn.LogicallyPartitioned(value(shape), names, rules=rules)


def resolve(box, mesh, *, loop_dims=(), rules=RULES):
    return mesh_names(
        "mlp/kernel",
        box,
        box.value.shape,
        loop_dims=frozenset(loop_dims),
        mesh=mesh,
        rules=rules,
    )


# Rules.


def test_rules_are_written_in_one_way(mesh):
    rules = [["embed", None], ("mlp", ["model"]), ("heads", ["data", "model"]), ("x", ())]
    checked = (("embed", None), ("mlp", "model"), ("heads", ("data", "model")), ("x", None))
    assert check_rules("fsdp", rules, mesh) == checked
    assert check_rules("fsdp", checked, mesh) == checked
    assert check_rules("fsdp", (), mesh) == ()
    assert hash(check_rules("fsdp", rules, mesh)) == hash(checked)


def test_a_name_may_have_several_rules(mesh):
    rules = (("mlp", "model"), ("mlp", "data"), ("mlp", None))
    assert check_rules("fsdp", rules, mesh) == rules


# Names that are mesh axes.


@pytest.mark.parametrize(
    ("names", "loop_dims", "expected"),
    [
        ((None, "data"), (), (None, "data")),
        ((None, "model"), (), (None, "model")),
        (("model", "data"), (), ("model", "data")),
        (("data",), (), ("data", None)),
        ((), (), (None, None)),
        ((None, ("data", "model")), (), (None, ("data", "model"))),
        ((("data",), ()), (), ("data", None)),
        (["data", ["model"]], (), ("data", "model")),
        (P(None, "model"), (), (None, "model")),
        (("layers", "data"), (0,), (None, "data")),
        (("mlp", "data"), (0,), (None, "data")),  # A loop's name, whatever rules say of it.
        (("layers", "layers"), (0, 1), (None, None)),
        ((("layers", "data"), "data"), (0,), (None, "data")),
    ],
)
def test_mesh_axes_are_kept(mesh, names, loop_dims, expected):
    assert resolve(plain(names), mesh, loop_dims=loop_dims) == expected


def test_a_box_of_this_package_names_mesh_axes(mesh):
    assert resolve(ShardedParameter(value((16, 64)), ("data", None)), mesh) == ("data", None)


# Logical names.


@pytest.mark.parametrize(
    ("names", "loop_dims", "expected"),
    [
        (("embed", "mlp"), (), (None, "model")),
        (("mlp",), (), ("model", None)),
        ((None, "heads"), (), (None, ("data", "model"))),
        (("layers", "mlp"), (0,), (None, "model")),
        (("embed", "mlp"), (0,), (None, "model")),
        (("layers", "layers"), (0, 1), (None, None)),
        (("embed", "embed"), (0, 1), (None, None)),
        (("data", "mlp"), (0,), (None, "model")),  # A mesh axis is no logical name.
        (["embed", "mlp"], (), (None, "model")),
        (("heads", "mlp"), (), (None, "model")),  # The axis went to the earlier rule.
    ],
)
def test_logical_names_mean_what_the_rules_say(mesh, names, loop_dims, expected):
    assert resolve(logical(names), mesh, loop_dims=loop_dims) == expected


def test_the_first_rule_whose_axes_are_free_is_taken(mesh):
    rules = (("a", "model"), ("b", "model"), ("b", "data"), ("a", "data"))
    assert resolve(logical(("a", "b")), mesh, rules=rules) == ("model", "data")
    assert resolve(logical(("b", "a")), mesh, rules=rules) == ("data", "model")
    assert resolve(logical(("b",)), mesh, rules=rules) == ("model", None)
    last = (("a", "model"), ("b", "model"))
    assert resolve(logical(("b", "a")), mesh, rules=last) == (None, "model")
    whole = (("a", None), ("a", "model"))
    assert resolve(logical(("a",)), mesh, rules=whole) == (None, None)


def test_the_rules_in_a_box_come_first(mesh):
    box = logical(("embed", "mlp"), rules=[("mlp", ["data"]), ("embed", "model")])
    assert resolve(box, mesh) == ("model", "data")
    assert resolve(logical(("own", "mlp"), rules=(("own", "data"),)), mesh) == ("data", "model")
    assert resolve(logical(("own",), rules=(("own", None),)), mesh, rules=()) == (None, None)


def test_rules_from_outside_do_not_reach_in(mesh):
    with (
        nn.logical_axis_rules((("mlp", "data"),)),
        pytest.raises(
            ValueError, match=r"\['mlp'\] are not in rules \[\]\. Write rules=\(\('mlp', None\),\)"
        ),
    ):
        resolve(logical(("mlp",)), mesh, rules=())


class Named(nn.Module):
    """Logical names in two layers, one of which is in a loop with a name of its own."""

    @nn.compact
    def __call__(self, x, _=None):
        def init(*names):
            return nn.with_logical_partitioning(nn.initializers.ones_init(), names)

        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.Dense(16, kernel_init=init("embed", "mlp"))(x), None

        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        x, _ = nn.scan(Block, metadata_params={nn.PARTITION_NAME: "layers"}, **options)()(x, None)
        return nn.Dense(4, kernel_init=init("embed", "vocab"), bias_init=init("vocab"))(x)


class NamedNNX(nnx.Module):
    def __init__(self, rngs):
        def init(*names):
            return nnx.with_partitioning(nnx.initializers.ones_init(), names)

        self.up = nnx.Linear(16, 16, kernel_init=init("embed", "mlp"), rngs=rngs)
        options = {"kernel_init": init("embed", "vocab"), "bias_init": init("vocab")}
        self.head = nnx.Linear(16, 4, rngs=rngs, **options)

    def __call__(self, x):
        return self.head(self.up(x))


@pytest.mark.parametrize("model", [Named(), NamedNNX])
@pytest.mark.parametrize("given", [(), (("embed", "data"),)])
def test_the_message_has_rules_to_paste(mesh, model, given):
    def loss(params, apply_fn, batch, rng):
        y = apply_fn({"params": params}, batch.inputs)
        return y.mean(), {"loss": (y.sum(), y.size)}

    batch = Batch(jnp.ones((8, 16)), jnp.ones(8))
    options = {"mesh": mesh, "batch": batch, "min_weight_size": 1}
    with pytest.raises(ValueError, match="which has all") as caught:
        fsdp(model, optax.sgd(1.0), loss, rules=given, **options)
    rules = ast.literal_eval(re.search(r"rules=(\(\(.*\)),? which", str(caught.value))[1])
    assert rules == (
        *given,
        *((x, None) for x in ("vocab", "embed", "mlp") if x not in dict(given)),
    )
    fsdp(model, optax.sgd(1.0), loss, rules=rules, **options)


def test_a_model_with_a_loop(mesh):
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(16, use_bias=False, kernel_init=init)(x), None

    stack = nn.scan(
        Block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=3,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    variables = jax.eval_shape(stack().init, jax.random.key(0), jnp.ones((2, 16)), None)
    box = variables["params"]["Dense_0"]["kernel"]
    assert box.names == ("layers", "embed", "mlp")
    assert resolve(box, mesh, loop_dims=(0,)) == (None, None, "model")


# For every annotation that fits.

AXES = ("replica", "data", "model")
ENTRIES = st.one_of(
    st.none(),
    st.sampled_from(AXES),
    st.lists(st.sampled_from(AXES), min_size=2, unique=True).map(tuple),
)
RULE_LISTS = st.lists(st.tuples(st.sampled_from("abcde"), ENTRIES), max_size=10)


def check_invariants(names, shape, mesh, loop_dims):
    axes = [axis for name in names for axis in axis_tuple(name)]
    assert len(names) == len(shape)
    assert len(set(axes)) == len(axes)
    assert set(axes) <= set(mesh.shape)
    assert all(names[dim] is None for dim in loop_dims)
    for size, name in zip(shape, names, strict=True):
        assert size % axes_size(mesh, axis_tuple(name)) == 0


@hypothesis.settings(max_examples=200)
@hypothesis.given(data=st.data(), rules=RULE_LISTS, own=RULE_LISTS)
def test_logical_names_become_what_flax_makes_of_them(data, rules, own):
    mesh = make_mesh(dict.fromkeys(AXES, 2))
    both = check_rules("fsdp", [*own, *rules], mesh)
    known = sorted({name for name, _ in both})
    names = data.draw(st.permutations([*known, None, None]))[: data.draw(st.integers(0, 4))]
    ndim = len(names) + data.draw(st.integers(0, 1))
    shape = tuple(data.draw(st.sampled_from([8, 16, 24])) for _ in range(ndim))
    loop_dim = data.draw(st.integers(0, ndim))
    shape, names = (
        (*shape[:loop_dim], 3, *shape[loop_dim:]),
        [*names, *[None] * (ndim - len(names))],
    )
    names.insert(loop_dim, "layers")

    box = nn.LogicallyPartitioned(value(shape), tuple(names), rules=tuple(own) or None)
    found = mesh_names(
        "p",
        box,
        shape,
        loop_dims=frozenset({loop_dim}),
        mesh=mesh,
        rules=check_rules("fsdp", rules, mesh),
    )
    check_invariants(found, shape, mesh, {loop_dim})
    assert P(*found) == nn.logical_to_mesh_axes(tuple(names), both)


@hypothesis.given(
    dims=st.lists(st.sampled_from([None, *range(4)]), min_size=3, max_size=3),
    order=st.permutations(AXES),
    shape=st.tuples(*[st.sampled_from([8, 16, 24])] * 4),
)
def test_mesh_axes_that_fit_come_out_as_they_are(dims, order, shape):
    mesh = make_mesh(dict.fromkeys(AXES, 2))
    placed = [
        tuple(axis for axis, at in zip(order, dims, strict=True) if at == d) for d in range(4)
    ]
    names = tuple(axes or None for axes in placed)
    box = nn.Partitioned(value(shape), names)
    found = mesh_names("p", box, shape, loop_dims=frozenset(), mesh=mesh, rules=())
    check_invariants(found, shape, mesh, ())
    assert [axis_tuple(name) for name in found] == placed


# -------------------------------------------------------------------------------------------------
# A parameter that is split: its gradient is exact on every mesh, and mistakes are refused.  The
# layers are in `tests/core/parameters/split_models.py`.


TWO_BY_FOUR = {"data": 2, "model": 4}


def check(program, model):
    """The parameters' initial bits and every gradient are those of one device."""
    before, grads = gradients_of(program)
    expected_before, expected = on_one_device(model)
    jax.tree.map(np.testing.assert_array_equal, before, expected_before)
    difference, leaf = worst_difference(grads, expected)
    assert difference < 2e-5, leaf


SCAN = Net(loop="scan")
CASES = {
    "fsdp": (SCAN, TWO_BY_FOUR, fsdp, {}),
    "experts": (ExpertNet(), {"data": 8}, fsdp, {}),
    "experts within": (
        ExpertNet("expert"),
        {"data": 2, "expert": 4},
        fsdp,
        {"axis_name": ("data", "expert"), "communicate_every": "step", "num_minibatches": 2},
    ),
    "experts on replicas": (ExpertNet("replica"), {"replica": 4, "data": 2}, hsdp, {}),
    "experts, zero1": (
        ExpertNet("expert"),
        {"data": 2, "expert": 4},
        zero,
        {"axis_name": ("data", "expert"), "stage": 1, "nonfinite": "skip"},
    ),
    "model of 2": (Net(shared_heads=1), {"data": 4, "model": 2}, fsdp, {"pad": True}),
    "model of 8": (SCAN, {"data": 1, "model": 8}, fsdp, {"reshard_after_forward": False}),
    "model of 1": (SCAN, {"data": 8, "model": 1}, fsdp, {}),
    "hsdp": (
        Net(loop="scan", remat=True),
        {"replica": 2, "data": 2, "model": 2},
        hsdp,
        {"norm_metrics": True, "nonfinite": "skip"},
    ),
    "zero2": (SCAN, TWO_BY_FOUR, zero, {"stage": 2, "num_minibatches": 2}),
    "data_parallel": (Net(), TWO_BY_FOUR, data_parallel, {}),
    "sequence": (
        Net(sequence=True, loop="scan", remat=True),
        TWO_BY_FOUR,
        fsdp,
        {"num_minibatches": 2, "use_scan": True},
    ),
    "nested scans": (Net(loop="nested"), TWO_BY_FOUR, fsdp, {"communicate_every": "gather-step"}),
    "kept": (SCAN, TWO_BY_FOUR, fsdp, {"keep_gathered": ("ScanBlock_0", "up")}),
    "whole": (SCAN, TWO_BY_FOUR, fsdp, {"replicate": ("ScanBlock_0", "table", "up")}),
    "auto": (Net(sequence=True), TWO_BY_FOUR, fsdp, {"mode": "auto"}),
    "explicit": (SCAN, TWO_BY_FOUR, fsdp, {"mode": "explicit"}),
    "unconstrained": (SCAN, TWO_BY_FOUR, zero, {"mode": "auto-unconstrained", "stage": 1}),
}


@pytest.mark.parametrize(
    ("model", "axes", "builder", "options"),
    [slow_unless([CASES["fsdp"]], *case) for case in CASES.values()],
    ids=list(CASES),
)
def test_every_gradient_is_that_of_one_device(devices8, model, axes, builder, options):
    check(build(model, axes, builder, **options), model)


# What is sent is what the formula says.


@pytest.mark.parametrize(
    ("model", "axes", "options"),
    [
        (SCAN, TWO_BY_FOUR, {"communicate_every": "step", "num_minibatches": 2}),
        (SCAN, TWO_BY_FOUR, {"reshard_after_forward": False, "gather_dtype": "bfloat16"}),
        (ExpertNet(), {"data": 4, "model": 2}, {"reshard_after_forward": False}),
    ],
)
def test_what_is_sent_for_parameters_is_the_formula(devices8, model, axes, options):
    program = build(model, axes, **options)
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    sent = bytes_by_axes(parameter_collectives(trace_collectives(traced)))
    assert sent == step_bytes(program)


def test_activations_are_not_gathered_again(devices8):
    model = Net(sequence=True)
    again, kept = (
        trace_collectives(program.train_step.trace(program.abstract_state, program.abstract_batch))
        for program in (
            build(model, TWO_BY_FOUR, reshard_after_forward=reshards) for reshards in (True, False)
        )
    )
    gathers = [[one for one in each if one.kind == "all_gather"] for each in (again, kept)]
    assert len(gathers[0]) > len(gathers[1])
    # Forward one for each layer that enters, backward one for each that leaves.
    activations = [[one for one in each if SEQUENCE_SCOPE in one.scope] for each in gathers]
    assert len(activations[0]) == len(activations[1]) == 3 + 3


# Mistakes.


class Mistaken(nn.Module):
    """A column- and a row-parallel product, with a mistake."""

    mistake: str = ""

    @nn.compact
    def __call__(self, x, train=False):
        init, column = NORMAL(0.3), (None, "model")
        ups = {
            "does not divide": split(init, column),
            "shared that does not divide": split(init, column, shared=True),
            "too few names": split(init, ("model",)),
            "an axis twice": split(init, ("model", "model"), shared=True),
            "annotated within": split(nn.with_partitioning(init, ("data", None)), column),
            "of no axis": split(init, (None, 1)),
        }
        size = 6 if "not divide" in self.mistake else 16
        up = self.param("up", ups.get(self.mistake, split(init, column)), (WIDTH, size))
        shared = "shared" in self.mistake
        down = self.param("down", split(init, ("model", None), shared=shared), (size, 4))
        h = jnp.sin(enter(x, "model") @ up)
        if self.mistake == "statistics of a part":
            mean = self.variable("batch_stats", "mean", jnp.zeros, ())
            mean.value = h.mean()
        y = h @ down
        if self.mistake == "not summed":
            return y
        if self.mistake == "bias before the sum":
            y += self.param("bias", NORMAL(1.0), (4,))[None, None]
        if self.mistake == "a mean" and is_axis_bound("model"):
            return jax.lax.pmean(y, "model")
        y = leave(y, "model")
        if self.mistake == "summed twice":
            return leave(y, "model")
        if self.mistake == "summed twice by hand" and is_axis_bound("model"):
            return jax.lax.psum(y, "model")
        return y


def carrying(params, apply_fn, batch, rng):
    """The loss of a model with statistics."""
    del rng
    y, _ = apply_fn({"params": params}, batch.inputs, mutable=["batch_stats"])
    return jnp.square(y).mean(), {"loss": (jnp.square(y).sum(), jnp.asarray(y.size))}


REFUSED = {
    "does not divide": (ValueError, "'down' .* dim 0 of size 6 does not divide over the 4 devices"),
    "shared that does not divide": (ValueError, "a multiple of 4, or a divisor of 4, because"),
    "too few names": (ValueError, r"split: names=\('model',\) for a parameter of shape \(8, 16\)"),
    "an axis twice": (ValueError, "names an axis twice; name each axis once"),
    "annotated within": (TypeError, "init returned a Partitioned, expected an array"),
    "of no axis": (TypeError, "axis_name=1, expected a mesh axis"),
    "not summed": (ValueError, r"the loss has a type that varies over \['model'\].*leave"),
    "summed twice": (ValueError, "leave: x of shape .* is the same on all devices along"),
    "statistics of a part": (ValueError, r"\['mean'\] differs between the devices along \['model"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_refused(devices8, mistake):
    error, message = REFUSED[mistake]
    loss = carrying if mistake == "statistics of a part" else masked_square_loss
    with pytest.raises(error, match=message):
        build(Mistaken(mistake), TWO_BY_FOUR, loss_fn=loss)


@pytest.mark.parametrize(
    "mistake",
    [
        "bias before the sum",
        pytest.param("a mean", marks=pytest.mark.slow),
        pytest.param("summed twice by hand", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_that_no_type_tells_differs_from_one_device(devices8, mistake):
    program = build(Mistaken(mistake), TWO_BY_FOUR)
    with pytest.raises(
        AssertionError, match=r"the loss is .*the gradient of up.*added before leave"
    ):
        assert_same_as_one_device(program, BATCH, jax.random.key(0))


def test_names_are_axes_and_not_logical(devices8):
    with pytest.raises(ValueError, match=r"marked as split, but rules have \['model'\]; a split"):
        build(Mistaken(), {"data": 8}, rules=(("model", "data"),))


# How it lies.


def test_an_axis_that_the_mesh_lacks_splits_nothing(devices8):
    program = build(Mistaken(), {"data": 8})
    assert {info.path: (info.names, info.split_axes) for info, _ in program.parameters} == {
        "up": ((None, None), frozenset()),
        "down": ((None, None), frozenset()),
    }


@pytest.mark.parametrize(
    ("size", "name", "shared", "expected"),
    [
        (8, "model", False, (("model",), ())),
        (8, ("model", "expert"), False, ((("model", "expert"),), ())),
        (8, ("absent", "model"), True, (("model",), ())),
        (2, "model", True, ((None,), ("model",))),
        (1, "model", True, ((None,), ("model",))),
        (2, ("expert", "model"), True, ((None,), (("expert", "model"),))),
        (2, "expert", True, (("expert",), ())),
        (3, "absent", False, ((None,), ())),
    ],
)
def test_names_on_a_mesh(size, name, shared, expected):
    sizes = {"model": 4, "expert": 2}
    assert names_on("w", (size,), (name,), sizes, shared=shared) == expected


NAMES = [
    ("data", "model"),
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("model", ("model", "data"))),
]


def shards(devices, init, spec):
    """The shards that the devices' initializers return, in the order of a spec."""
    mesh = make_mesh(TWO_BY_FOUR, devices)
    run = jax.shard_map(
        lambda: init(None).value, mesh=mesh, in_specs=(), out_specs=spec, check_vma=True
    )
    return run()


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_a_device_initializes_its_shard(devices8, name):
    full = np.arange(32.0).reshape(2, 16)
    init = split(lambda key: jnp.asarray(full), (None, name))
    np.testing.assert_array_equal(shards(devices8, init, jax.P(None, name)), full)
    np.testing.assert_array_equal(init(None).value, full)


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_neighbours_share(devices8, name):
    """The first half of the devices has the first of two entries."""
    init = split(lambda key: jnp.arange(2.0), (name,), shared=True)
    found = shards(devices8, init, jax.P(name))
    np.testing.assert_array_equal(found, np.repeat([0, 1], len(found) // 2))
    assert len(found) == (4 if name == "model" else 8)
    np.testing.assert_array_equal(init(None).value, [0, 1])


@pytest.mark.slow
def test_optimizers_see_whole_gradients(devices8):
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adafactor(0.1, min_dim_size_to_factor=4))
    program = build(Mistaken(), TWO_BY_FOUR, tx=tx)
    before, change = gradients_of(program)
    _, grads = on_one_device(Mistaken())
    expected, _ = tx.update(grads, tx.init(before), before)
    assert worst_difference(jax.tree.map(np.negative, change), expected)[0] < 1e-4


@pytest.mark.slow
def test_evaluation_is_that_of_one_device(devices8):
    program = build(SCAN, TWO_BY_FOUR, eval_dropout=True)
    metrics = program.eval_step(program.init(jax.random.key(0)), BATCH)
    params, _ = on_one_device(SCAN)
    _, expected = masked_square_loss(params, SCAN.apply, BATCH, None)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.slow
def test_a_state_moves_to_another_factorisation(devices8, tmp_path):
    tx = optax.adam(0.1)
    programs = [
        build(SCAN, axes, builder, tx=tx, **options)
        for axes, builder, options in (
            (TWO_BY_FOUR, fsdp, {}),
            ({"data": 8, "model": 1}, zero, {"stage": 1}),
            ({"replica": 2, "data": 2, "model": 2}, hsdp, {"pad": True}),
        )
    ]
    before = programs[0].init(jax.random.key(0))
    whole = programs[0].whole(before)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(programs[0], before, step=1, extra={})
        checkpoints.wait()
        for program in programs:
            read = checkpoints.restore(program, report=lambda line: None).state
            for state in (program.adopt(before), program.init_from(whole), read):
                jax.tree.map(np.testing.assert_array_equal, program.whole(state), whole)
                for x, like in zip(
                    jax.tree.leaves(state), jax.tree.leaves(program.abstract_state), strict=True
                ):
                    assert x.sharding == like.sharding


class Several(nn.Module):
    """Blocks side by side, in `nn.vmap`."""

    @nn.compact
    def __call__(self, x, train=False):
        blocks = nn.vmap(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            axis_size=2,
            metadata_params={nn.PARTITION_NAME: "blocks"},
        )
        y, _ = blocks()(x)
        return y.sum(0)[..., :4]


@pytest.mark.slow
def test_layers_side_by_side(devices8):
    check(build(Several(), TWO_BY_FOUR), Several())


def normalised(params, apply_fn, batch, rng):
    """The loss of a model with statistics of its batch."""

    def apply(variables, x):
        return apply_fn(variables, x, mutable=["batch_stats"])[0]

    return masked_square_loss(params, apply, batch, rng)


class Normalised(nn.Module):
    """Statistics where activations are whole, of all devices' examples."""

    @nn.compact
    def __call__(self, x, train=False):
        norm = nn.BatchNorm(False, axis_name="data", scale_init=NORMAL(1.0), bias_init=NORMAL(1.0))
        return Mistaken()(norm(x))


@pytest.mark.slow
def test_statistics_of_whole_activations(devices8):
    program = build(Normalised(), TWO_BY_FOUR, loss_fn=normalised)
    assert_same_as_one_device(program, BATCH, jax.random.key(0))
    state, _ = program.train_step(program.init(jax.random.key(0)), BATCH)
    mean = state.collections["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(mean, 0.01 * BATCH.inputs.mean((0, 1)), rtol=1e-4)
