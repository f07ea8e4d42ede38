import ast
import re

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from manualpar import Batch, fsdp, make_mesh
from manualpar.core.mesh.axes import axes_size, axis_tuple
from manualpar.core.parameters.annotations import check_rules, mesh_names
from manualpar.core.parameters.sharded_parameter import ShardedParameter

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
