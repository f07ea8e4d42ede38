import io

import chex
import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console
from jax.sharding import PartitionSpec as P

from manualpar import (
    Batch,
    ShardedParameter,
    fsdp,
    gather_params,
    hsdp,
    make_mesh,
    shard_module_params,
    shard_params,
    sync_gradients,
    zero,
)
from manualpar.core.mesh.axes import axes_size
from manualpar.core.parameters.collectives import cast_to_varying
from manualpar.core.parameters.placement import choose_shard_dim
from manualpar.core.parameters.sharded_parameter import boxed_axes, is_box, replicate_shards
from manualpar.inspect import count_by_kind, layout_table, trace_collectives
from tests.one_device import name_of, slow, train_on_one_device, train_program

REPLICATED = P()


def on_mesh(function, mesh, *args, in_specs=REPLICATED, out_specs=REPLICATED):
    """Runs a function on every device and returns its output as it is described by out_specs."""
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)
    )(*args)


def inside(mesh, function):
    """Traces a function inside shard_map and returns what it says, which need not be arrays."""
    said = []

    def traced():
        said.append(function())
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(traced, mesh=mesh, in_specs=(), out_specs=P()))
    return said[0]


# Which dimension.


@pytest.mark.parametrize(
    ("shape", "dim", "why"),
    [
        ((784, 512), 0, "largest"),  # Neither has whole tiles.
        ((512, 784), 0, "whole tiles"),  # Shards of 64 rows; of 98 columns.
        ((512, 1024), 1, "largest"),  # Both have whole tiles.
        ((512, 512), 0, "largest"),
        ((1024, 1024), 0, "largest"),  # Of equals the first.
        ((8, 64, 64), 0, "whole tiles"),  # Tiles have two dims: the first is whole in any part.
        ((3, 3, 16, 32), 3, "largest"),
        ((10, 24), 1, "only one that divides"),
        ((1000, 8), 0, "largest"),
        ((1001, 8), 1, "only one that divides"),
        ((16,), 0, "only one that divides"),
    ],
)
def test_of_the_dims_that_divide_the_largest_with_whole_tiles_is_chosen(shape, dim, why):
    assert choose_shard_dim(shape, (None,) * len(shape), 8, min_weight_size=0) == (dim, why)


def test_gpus_prefer_the_first_dim_that_divides():
    for shape, dim in {(2048, 8192): 0, (12, 128, 2048): 1, (1001, 8): 1}.items():
        names = (None,) * len(shape)
        chosen, _ = choose_shard_dim(shape, names, 8, min_weight_size=0, prefers_first=True)
        assert chosen == dim


@pytest.mark.parametrize(
    ("shape", "devices", "dim"),
    [
        ((4096, 11008), 16, 0),
        ((11008, 4096), 16, 0),
        ((4096, 32, 128), 16, 0),
        ((32000, 4096), 16, 0),
    ],
)
def test_a_llama_of_seven_billion_has_whole_tiles(shape, devices, dim):
    layers = (32, *shape)
    chosen, _ = choose_shard_dim(
        layers, (None,) * len(layers), devices, min_weight_size=0, excluded_dims=frozenset({0})
    )
    assert chosen == dim + 1


@pytest.mark.parametrize(
    ("shape", "names", "excluded", "dim"),
    [
        ((16, 64), (None, "model"), (), 0),
        ((16, 64), (None, ("data", "model")), (), 0),
        ((64, 16), (None, None), (0,), 1),
        ((64, 10), (None, None), (0,), None),
        ((64, 64), ("model", "pipe"), (), None),
    ],
)
def test_a_named_or_excluded_dim_is_not_chosen(shape, names, excluded, dim):
    chosen, note = choose_shard_dim(
        shape, names, 8, min_weight_size=0, excluded_dims=frozenset(excluded)
    )
    assert chosen == dim
    assert note == ("only one that divides" if dim is not None else note)


@pytest.mark.parametrize(
    ("shape", "note"),
    [
        ((15,), "too small: 15 < 16"),
        ((3, 5, 7), r"none of \[3, 5, 7\] divides by 8"),
        ((), "too small: 1 < 16"),
    ],
)
def test_what_is_not_sharded_says_why(shape, note):
    dim, why = choose_shard_dim(shape, (None,) * len(shape), 8, min_weight_size=16)
    assert dim is None
    assert why == note.replace("\\", "")


def test_the_threshold_is_the_fewest_elements_sharded():
    assert choose_shard_dim((4, 4), (None, None), 4, min_weight_size=16) == (0, "largest")
    assert choose_shard_dim((4, 4), (None, None), 4, min_weight_size=17)[0] is None


@pytest.mark.parametrize(("shape", "note"), [((), "a scalar"), ((0, 8), "no elements to shard")])
def test_scalars_and_empty_parameters_stay_whole(shape, note):
    assert choose_shard_dim(shape, (None,) * len(shape), 8, min_weight_size=0) == (None, note)


def is_before(first, second, shape, seen, devices):
    """Whether a dim is better than another, as the rule says in words."""

    def has_whole_tiles(dim):
        size = shape[dim] // devices
        if dim == seen[-1]:
            return size % 128 == 0
        return size % 16 == 0 if dim in seen[-2:] else True

    if has_whole_tiles(first) != has_whole_tiles(second):
        return has_whole_tiles(first)
    if shape[first] != shape[second]:
        return shape[first] > shape[second]
    return first <= second


SIZES = st.sampled_from([0, 1, 3, 8, 16, 24, 64, 96, 128, 256, 1000, 1024, 2048, 11008])


@hypothesis.given(data=st.data())
def test_no_dim_that_may_be_chosen_is_before_the_chosen_one(data):
    shape = tuple(data.draw(st.lists(SIZES, max_size=4)))
    dims = range(len(shape))
    names = tuple(data.draw(st.sampled_from([None, None, None, "model"])) for _ in dims)
    excluded = data.draw(
        st.frozensets(st.sampled_from([*dims]), max_size=2) if shape else st.just(frozenset())
    )
    devices, pad = data.draw(st.sampled_from([1, 2, 6, 8, 16])), data.draw(st.booleans())
    chosen, why = choose_shard_dim(
        shape, names, devices, min_weight_size=1, excluded_dims=excluded, pad=pad
    )
    assert why
    seen = [dim for dim in dims if dim not in excluded]
    free = [dim for dim in seen if names[dim] is None]
    dividing = [dim for dim in free if shape[dim] % devices == 0]
    if not shape or 0 in shape:
        assert chosen is None
    elif dividing:
        assert chosen in dividing
        assert all(is_before(chosen, dim, shape, seen, devices) for dim in dividing)
        is_largest = shape[chosen] == max(shape[dim] for dim in dividing)
        assert is_largest or why == "whole tiles"
    elif pad and any(shape[dim] > 1 for dim in free):
        assert chosen == min(free, key=lambda dim: (-shape[dim], dim))
    else:
        assert chosen is None


# shard_params and gather_params.


TREE = {
    "wide": jnp.arange(16.0 * 8).reshape(16, 8),
    "tall": jnp.arange(8.0 * 32).reshape(8, 32),
    "odd": jnp.arange(15.0).reshape(3, 5),
    "scalar": jnp.float32(3.0),
    "empty": jnp.zeros((0, 4)),
}


@pytest.mark.parametrize("axis_name", ["data", ("data", "model"), ("model", "data")], ids=str)
def test_sharding_slices_and_gathering_gives_back(mesh8, axis_name):
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not set(axes) <= set(mesh8.axis_names):
        pytest.skip("the mesh has no such axis")
    n = axes_size(mesh8, axes)

    def on_device(tree):
        sharded = shard_params(tree, axis_name, min_weight_size=16)
        assert sharded["wide"].names == (axis_name, None)
        assert sharded["tall"].names == (None, axis_name)
        assert sharded["wide"].value.shape == (16 // n, 8)
        assert sharded["tall"].value.shape == (8, 32 // n)
        assert not any(is_box(sharded[name]) for name in ("odd", "scalar", "empty"))
        gathered = gather_params(sharded, axis_name)
        assert not any(map(is_box, jax.tree.leaves(gathered, is_leaf=is_box)))
        shards = {name: sharded[name].value for name in ("wide", "tall")}
        everywhere = tuple(mesh8.axis_names)
        return shards, jax.lax.pmax(cast_to_varying(gathered, everywhere), everywhere)

    out_specs = ({"wide": P(axis_name, None), "tall": P(None, axis_name)}, P())
    shards, gathered = on_mesh(on_device, mesh8, TREE, out_specs=out_specs)
    chex.assert_trees_all_equal(shards, {"wide": TREE["wide"], "tall": TREE["tall"]})
    chex.assert_trees_all_equal(gathered, TREE)


def test_a_box_that_names_the_axis_in_a_tuple_is_never_sharded_again(devices8):
    mesh = make_mesh({"data": 4, "model": 2}, devices8)

    def on_device(x):
        box = nn.Partitioned(x, names=(("data", "model"), None))
        for axis_name in ("data", "model", ("data", "model")):
            assert shard_params({"p": box}, axis_name, 0)["p"] is box
        assert boxed_axes(box) == ("data", "model")
        return x

    x = jnp.arange(64.0).reshape(16, 4)
    on_mesh(on_device, mesh, x, in_specs=P(("data", "model")), out_specs=P(("data", "model")))


@pytest.mark.parametrize("axis_name", ["data", "model", ("data", "model")], ids=str)
def test_a_box_that_names_the_axis_in_a_tuple_is_always_gathered(devices8, axis_name):
    mesh = make_mesh({"data": 4, "model": 2}, devices8)
    x = jnp.arange(64.0).reshape(16, 4)

    def on_device(x):
        gathered = gather_params(nn.Partitioned(x, names=(("data", "model"), None)), axis_name)
        assert not is_box(gathered)
        return jax.lax.pmax(gathered, ("data", "model"))

    gathered = on_mesh(on_device, mesh, x, in_specs=P(("data", "model")))
    np.testing.assert_array_equal(gathered, x)


def test_a_box_takes_a_second_axis_on_a_free_dim_and_gives_back_only_that(devices8):
    mesh = make_mesh({"data": 4, "model": 2}, devices8)
    x = jnp.arange(8.0 * 16).reshape(8, 16)

    def on_device(x):
        sharded = shard_params(nn.Partitioned(x, names=("model", None)), "data", 0)
        assert sharded.names == ("model", "data")
        assert sharded.value.shape == (4, 4)
        # A module that asks for it gets its part over `model`, gathered over `data`.
        assert sharded.unbox().shape == (4, 16)
        gathered = gather_params(sharded, "data")
        assert gathered.names == ("model", None)
        assert gathered.unbox().shape == (4, 16)
        return jax.lax.pmax(gathered.value, "data")

    gathered = on_mesh(on_device, mesh, x, in_specs=P("model"), out_specs=P("model"))
    np.testing.assert_array_equal(gathered, x)


def test_what_stays_whole_is_logged(devices8, caplog):
    mesh = make_mesh({"data": 8}, devices8)
    tree = {"small": jnp.ones(15), "odd": jnp.ones((3, 25)), "fits": jnp.ones(16)}
    with caplog.at_level("INFO", logger="absl"):
        inside(mesh, lambda: shard_params(tree, "data", min_weight_size=16))
    assert [record.getMessage() for record in caplog.records] == [
        "shard_params: (3, 25) with names (None, None) stays whole: none of [3, 25] divides by 8",
        "shard_params: (15,) with names (None,) stays whole: too small: 15 < 16",
    ]


# The box.


def test_flax_reads_the_box_as_its_own():
    box = ShardedParameter(jnp.ones((8, 4)), ("data", None), gather_axes=("data",))
    assert nn.get_partition_spec({"p": box}) == {"p": P("data", None)}
    assert isinstance(box, nn.Partitioned)
    np.testing.assert_array_equal(nn.unbox({"p": box})["p"], box.value)  # No axis is bound here.
    assert box.replace_boxed(jnp.zeros(3)).names == box.names


def test_the_box_gathers_itself_inside_shard_map(devices8):
    mesh = make_mesh({"data": 8}, devices8)
    x = jnp.arange(32.0).reshape(16, 2)

    def on_device(x):
        box = ShardedParameter(x, ("data", None), gather_axes=("data",))
        return jax.lax.pmax(nn.unbox({"p": box})["p"], "data")

    np.testing.assert_array_equal(on_mesh(on_device, mesh, x, in_specs=P("data")), x)


@pytest.mark.parametrize("index", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("params", [{}, {nn.PARTITION_NAME: "layers"}], ids=["bare", "named"])
def test_adding_and_removing_a_loop_dim_undo_each_other(index, params):
    box = ShardedParameter(None, (None, "data"), gather_axes=("data",))
    more = box.add_axis(index, params)
    assert len(more.names) == 3
    assert more.names[index] is None
    assert vars(more.remove_axis(index, params)) == vars(box)


# shard_module_params.


@pytest.mark.parametrize("axis_name", ["data", ("data", "model")], ids=str)
@pytest.mark.optimized  # Or jit rounds otherwise than eager code.
def test_a_wrapped_module_equals_the_module(devices8, axis_name):
    axes = ("data", "model")
    mesh = make_mesh({"data": 4, "model": 2}, devices8)
    x = jax.random.normal(jax.random.key(1), (16, 8))
    plain = nn.Dense(32)
    params = jax.jit(plain.init)(jax.random.key(0), x)["params"]
    wrapped = shard_module_params(nn.Dense, axis_name, min_weight_size=64)(32)

    def loss(params, module, x):
        return jnp.mean(jnp.sin(module.apply({"params": params}, x)))

    def on_device(x):
        sharded = wrapped.init(jax.random.key(0), x)["params"]
        assert sharded["kernel"].names == (None, axis_name)
        assert not is_box(sharded["bias"])
        grads = jax.grad(loss)(cast_to_varying(sharded, axes), wrapped, x)
        grads = sync_gradients(grads, axes)
        return sharded["kernel"].value, {"kernel": grads["kernel"].value, "bias": grads["bias"]}

    spec = P(None, axis_name)
    kernel, grads = on_mesh(
        on_device,
        mesh,
        x,
        in_specs=P(axes),
        out_specs=(spec, {"kernel": spec, "bias": P()}),
    )
    np.testing.assert_array_equal(kernel, params["kernel"])
    chex.assert_trees_all_close(grads, jax.grad(loss)(params, plain, x), atol=1e-6)


def test_a_wrapped_module_inside_scan(devices8):
    mesh = make_mesh({"data": 8}, devices8)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            dense = shard_module_params(nn.Dense, "data", min_weight_size=0)(16, name="dense")
            return nn.tanh(dense(x)), None

    stack = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(nn.Dense(16, name="dense")(x)), None

    plain = nn.scan(Plain, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    x = jax.random.normal(jax.random.key(1), (8, 16))
    reference = plain.apply(jax.jit(plain.init)(jax.random.key(0), x, None), x, None)[0]

    def on_device(x):
        variables = stack.init(jax.random.key(0), x, None)
        kernel = variables["params"]["dense"]["kernel"]
        assert kernel.names == (None, "data", None)
        assert kernel.value.shape == (3, 2, 16)
        return stack.apply(variables, x, None)[0]

    output = on_mesh(on_device, mesh, x, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_allclose(output, reference, atol=1e-6)


def test_a_wrapped_module_gathers_once_however_often_it_uses_a_parameter(devices8):
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(16)
            return dense(dense(x))

    mesh = make_mesh({"data": 4, "model": 2}, devices8)
    wrapped = shard_module_params(Twice, "data", min_weight_size=64)()

    def on_device(x):
        return wrapped.apply(wrapped.init(jax.random.key(0), x), x)

    run = jax.shard_map(on_device, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    text = jax.jit(run).lower(jnp.ones((8, 16))).as_text()
    assert text.count('"stablehlo.all_gather"') == 1


@pytest.mark.parametrize("when", ["asked for", "once a step", "the same data"])
@pytest.mark.parametrize("axes", [("data", "model"), ("model", "data")], ids=str)
def test_a_box_is_gathered_over_a_tuple_of_axes_in_its_order(devices8, axes, when):
    mesh = make_mesh({"data": 4, "model": 2}, devices8)
    x = jnp.arange(32.0).reshape(16, 2)
    field = "shard_only_axes" if when == "the same data" else "gather_axes"

    def on_device(x):
        box = ShardedParameter(x, (axes, None), **{field: axes})
        box = box.gather_data_axes() if when == "once a step" else box
        return nn.unbox({"p": box})["p"][None]

    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=P(axes), out_specs=P(mesh.axis_names), check_vma=True
    )
    np.testing.assert_array_equal(jax.jit(run)(x), np.broadcast_to(x, (8, 16, 2)))


def test_replication_gathers_the_data_axes_and_no_other(devices8):
    mesh = make_mesh({"replica": 2, "data": 2, "model": 2}, devices8)
    axes, x = ("replica", "data"), jnp.arange(64.0).reshape(8, 8)

    def on_device(x):
        return replicate_shards({"w": ShardedParameter(x, (axes, "model"), gather_axes=axes)})

    out = on_mesh(on_device, mesh, x, in_specs=P(axes, "model"), out_specs=P(None, "model"))
    np.testing.assert_array_equal(out["w"], x)


def test_entries_that_devices_share_along_two_dims_have_one_sum_of_gradients(devices8):
    mesh = make_mesh({"expert": 2, "model": 4}, devices8)
    shared, x = ("expert", "model"), np.arange(6, dtype=np.float32).reshape(1, 2, 3)

    def on_device(x, weight):
        def loss(x):
            box = ShardedParameter(x, (None, None, None), shared_names=(*shared, None))
            value = nn.unbox({"w": box})["w"]
            return jnp.vdot(value, weight), value

        return jax.grad(loss, has_aux=True)(x)

    spec = P(*shared)
    run = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(P(), spec), out_specs=(P(), spec)))
    weights = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    grad, values = run(x, weights)
    np.testing.assert_array_equal(values, x.repeat(2, 0).repeat(2, 1))
    expected = weights.reshape(2, 2, 2, 3).sum((0, 2))[None]
    np.testing.assert_allclose(grad, expected, rtol=1e-5)
    assert run.lower(x, weights).as_text().count('"stablehlo.all_reduce"') == 1


# -------------------------------------------------------------------------------------------------
# Parameters that a model reads from its variables, and names that keep what cannot be sharded.


VOCABULARY, WIDTH = 32, 16


class Block(nn.Module):
    """A dense layer whose kernel is read a second time, as the slice that the loop is at."""

    @nn.compact
    def __call__(self, x, _):
        dense = nn.Dense(WIDTH, name="dense")
        x = x + nn.tanh(dense(x))
        return x + 0.1 * x @ dense.variables["params"]["kernel"], None


class Language(nn.Module):
    """Ties its head to its embedding, as the models on HuggingFace do."""

    def setup(self):
        self.wte = nn.Embed(VOCABULARY, WIDTH)
        self.blocks = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )()
        self.mix = nn.Dense(WIDTH, use_bias=False)
        self.head = nn.Dense(VOCABULARY, use_bias=False)

    def __call__(self, ids):
        x, _ = self.blocks(self.mix(self.wte(ids)), None)
        x = x + jnp.mean(self.mix.get_variable("params", "kernel") ** 2)
        kernel = self.wte.variables["params"]["embedding"].T
        return self.head.apply({"params": {"kernel": kernel}}, x)


def loss_fn(params, apply_fn, batch, rng):
    logits = apply_fn({"params": params}, batch.inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    bound = Language(parent=None).bind({"params": params})
    penalty = 0.01 * jnp.sum(bound.wte.variables["params"]["embedding"] ** 2)
    return losses.mean() + penalty, {"loss": (losses.sum(), losses.size)}


def make_batch(seed):
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, (16, 4))
    return Batch(ids.astype(np.int32), np.roll(ids, 1, 1).astype(np.int32))


BATCHES = [make_batch(seed) for seed in range(2)]
SMALL = {"min_weight_size": 16}


def build(builder=fsdp, axes=None, model=None, **options):
    mesh = make_mesh(axes or {"data": 8})
    options = {"batch": BATCHES[0], **SMALL, **options}
    return builder(model or Language(), optax.sgd(0.5), loss_fn, mesh=mesh, **options)


@pytest.fixture(scope="module")
def reference():
    return train_on_one_device(Language(), optax.sgd(0.5), BATCHES, loss_fn)


def test_a_library_finds_the_array_that_a_module_got(devices8):
    """As qwix asks: the same tracer, nothing sent, and no array of a trace that has ended."""
    answers = {}

    def ask(box, where):
        array = box.unbox()
        answers[where] = array is box.unbox(apply_constraint=False)
        return array

    def part(kernel, x):
        box = ShardedParameter(kernel, (None, "data"), gather_axes=("data",))
        inside = jax.checkpoint(lambda x: x @ ask(box, "inside"))(x)
        other = box.unbox(apply_constraint=False)  # The checkpoint's array cannot be used here.
        return x @ ask(box, "outside") + jnp.sin(inside) @ other.T

    run = jax.shard_map(
        part,
        mesh=make_mesh({"data": 8}, devices8),
        in_specs=(P(None, "data"), P()),
        out_specs=P("data"),
        check_vma=True,
    )
    with jax.checking_leaks():
        text = str(jax.make_jaxpr(run)(jnp.zeros((16, 16)), jnp.zeros((2, 16))))
    assert answers == {"inside": True, "outside": True}
    assert text.count("all_gather[") == 3


@pytest.mark.parametrize(
    ("builder", "axes", "options"),
    [
        (fsdp, {"data": 8}, {"num_minibatches": 2, "use_scan": True}),
        slow(hsdp, {"replica": 2, "data": 4}, {}),
        slow(fsdp, {"data": 8}, {"mode": "auto"}),
        slow(fsdp, {"data": 4, "model": 2}, {"reshard_after_forward": False}),
        slow(fsdp, {"data": 2, "model": 4}, {"communicate_every": "step"}),
        slow(fsdp, {"data": 1, "model": 8}, {}),
        slow(hsdp, {"replica": 4, "data": 2}, {"keep_gathered": ("wte",)}),
        slow(fsdp, {"data": 8}, {"pad": True, "mode": "auto-unconstrained"}),
        slow(fsdp, {"data": 8}, {"replicate": ("wte", "mix/kernel")}),
        slow(zero, {"data": 8}, {"stage": 2, "replicate": ("wte",)}),
    ],
    ids=name_of,
)
def test_what_is_read_of_variables_trains_as_on_one_device(
    devices8, reference, builder, axes, options
):
    program = build(builder, axes, **options)
    state, _ = train_program(program, BATCHES)
    chex.assert_trees_all_close(
        jax.device_get(state.params), reference.params, rtol=1e-4, atol=1e-6
    )


def test_each_read_is_a_gather_of_its_own(devices8):
    def gathered(**options):
        program = build(**options)
        traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
        return count_by_kind(trace_collectives(traced))["all_gather"]

    # The embedding is read by Embed, for the head and for the penalty; `mix` twice; in each of two
    # layers the kernel twice and the bias once.
    kept = gathered(reshard_after_forward=False)
    assert kept == 3 + 2 + 2 * 3
    assert kept < gathered() <= 2 * kept


OPERATIONS = {
    "transpose": lambda box, x: x @ box.T,
    "matmul": lambda box, x: x @ box,
    "matmul on the left": lambda box, x: box @ x.T,
    "index": lambda box, x: box[jnp.array([1, 3])],
    "arithmetic": lambda box, x: 1.0 - 2 * box / 3 + box**2,
    "compare": lambda box, x: (box == box) * (box > 0.0),
    "not equal": lambda box, x: jnp.where(box != 0, box, 1.0),
    "jnp": lambda box, x: jnp.einsum("ij,jk->ik", x, box),
    "iterate": lambda box, x: sum(box) + len(box),
    "attributes": lambda box, x: jnp.ones(box.shape, box.dtype) * box.mean() * box.size,
    "jit": lambda box, x: jax.jit(lambda box: box * 2)(box),
    "checkpoint": lambda box, x: jax.checkpoint(lambda box: box @ box)(box),
}


def test_a_box_is_used_as_the_array_in_it(devices8):
    w, x = jnp.arange(64.0).reshape(8, 8) - 20, jnp.arange(32.0).reshape(4, 8)

    def run(shard):
        box = ShardedParameter(shard, ("data", None), gather_axes=("data",))
        out = [operation(box, x) for operation in OPERATIONS.values()]
        return jax.tree.map(lambda y: jax.lax.pmean(y, "data"), out)

    mesh = make_mesh({"data": 8})
    got = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P()))(w)
    for name, y in zip(OPERATIONS, got, strict=True):
        np.testing.assert_allclose(y, OPERATIONS[name](w, x), rtol=1e-5, err_msg=name)
    with pytest.raises(AttributeError, match="has no attribute 'kernel'"):
        _ = ShardedParameter(w, ("data", None)).kernel


# What a shard cannot serve.


class Mapped(nn.Module):
    """Reads a kernel by `jax.vmap` or `jax.tree.map`, which see what is stored."""

    how: str

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(ids)
        dense = nn.Dense(WIDTH, name="dense")
        x = dense(x)
        kernel = dense.variables["params"]["kernel"]
        if self.how == "vmap":
            return x @ jax.vmap(lambda row: row * 2)(kernel)
        if self.how == "scan":
            return x @ jax.lax.scan(lambda _, row: (None, row * 2), None, kernel)[1]
        return x @ jax.tree.map(lambda kernel: kernel[::2], {"kernel": kernel})["kernel"].T


def scalar_loss(params, apply_fn, batch, rng):
    out = apply_fn({"params": params}, batch.inputs) ** 2
    return out.mean(), {"loss": (out.sum(), out.size)}


@pytest.mark.parametrize("how", ["vmap", "scan", "tree"])
def test_functions_over_what_is_stored_are_refused_with_what_to_write(devices8, how):
    def build(**options):
        mesh = make_mesh({"data": 8})
        return fsdp(
            Mapped(how),
            optax.sgd(0.1),
            scalar_loss,
            mesh=mesh,
            batch=BATCHES[0],
            **SMALL,
            **options,
        )

    expected = (
        r"parameters of 'dense' would be sharded, but .* use replicate=\('dense',\) with fsdp"
    )
    with pytest.raises(ValueError, match=expected):
        build()
    build(replicate=("dense",))


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(ids)
        return nn.WeightNorm(nn.Dense(WIDTH, name="dense"))(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("builder", "options"),
    [
        (fsdp, {"replicate": ("dense",)}),
        slow(fsdp, {"replicate": ("dense/kernel", "dense/bias"), "communicate_every": "step"}),
        slow(hsdp, {"replicate": ("dense",), "gather_dtype": "float32"}),
        slow(zero, {"replicate": ("dense",)}),
    ],
    ids=name_of,
)
def test_weight_normalisation_runs_where_its_parameters_are_replicated(devices8, builder, options):
    axes = {"replica": 2, "data": 4} if builder is hsdp else {"data": 8}
    program = builder(
        Normalised(),
        optax.sgd(0.5),
        scalar_loss,
        mesh=make_mesh(axes),
        batch=BATCHES[0],
        **SMALL,
        **options,
    )
    found = {info.path: place for info, place in program.parameters}
    assert found["dense/kernel"].spec == found["dense/kernel"].state_spec == P()
    assert "data" in found["embed/embedding"].state_spec
    expected = train_on_one_device(Normalised(), optax.sgd(0.5), BATCHES, scalar_loss)
    state, _ = train_program(program, BATCHES)
    chex.assert_trees_all_close(jax.device_get(state.params), expected.params, rtol=1e-4, atol=1e-6)
    metrics = program.eval_step(state, BATCHES[0])
    params = jax.device_get(state.params)
    total = np.sum(Normalised().apply({"params": params}, BATCHES[0].inputs) ** 2)
    np.testing.assert_allclose(metrics["loss"][0], total, rtol=1e-4)
    if builder is fsdp:
        console = rich.console.Console(file=io.StringIO(), width=200)
        console.print(layout_table(program))
        assert "named by replicate" in console.file.getvalue()


def test_an_annotated_parameter_is_whole_where_it_is_replicated(devices8):
    init = nn.with_partitioning(nn.initializers.normal(), (None, "data"))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            return nn.Embed(VOCABULARY, WIDTH, embedding_init=init, name="embed")(ids)

    for builder in (fsdp, zero):
        program = builder(
            Model(),
            optax.sgd(0.1),
            scalar_loss,
            mesh=make_mesh({"data": 8}),
            batch=BATCHES[0],
            replicate=("embed",),
        )
        [(_, place)] = program.parameters
        assert place.spec == place.state_spec == P()


def test_a_box_is_shown_in_one_line():
    box = ShardedParameter(np.zeros((8, 3), np.float32), (None, "data"), gather_axes=("data",))
    assert repr(box) == "ShardedParameter(float32[8, 3], names=(None, 'data'))"
    shown = repr(box.replace(value=jnp.zeros((2, 3), jnp.bfloat16)))
    assert shown == "ShardedParameter(bfloat16[2,3], names=(None, 'data'))"
