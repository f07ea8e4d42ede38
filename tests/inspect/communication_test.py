import functools
from collections import Counter
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from manualpar import Batch, data_parallel, fsdp, gather_array_with_mean_grads, make_mesh
from manualpar.core.parameters.collectives import cast_to_varying
from manualpar.core.tracing.scopes import ticks_scope
from manualpar.inspect import (
    bytes_by_axes,
    compiled_collectives,
    count_by_kind,
    ledger,
    ring_bytes,
    total_bytes,
    trace_collectives,
)
from manualpar.inspect.compiled import Reading, parse_module
from tests.inspect.small_programs import Deep, Model, loss_fn

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")


def traced(function, mesh, shape=(64, 16), dtype=jnp.float32, *, check_vma=True):
    """Traces a function of one device's part of an array of this global shape."""
    axes = tuple(mesh.axis_names)

    def on_device(x):
        return cast_to_varying(jax.tree.map(jnp.ravel, function(x)), axes)

    # False too: the types change which primitives stand in the jaxpr. No value is looked at.
    on_devices = jax.shard_map(
        on_device, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=check_vma
    )
    return jax.jit(on_devices).trace(jax.ShapeDtypeStruct(shape, dtype))


def read(function, mesh, *args, **kwargs):
    return trace_collectives(traced(function, mesh, *args, **kwargs))


def shift(x, axis, size):
    return jax.lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])


# A device of the mesh of 4 x 2 holds [8, 16] of [64, 16]: 512 bytes of float32.
BOTH = ("data", "model")
ONE_OF_EACH = {
    "gather": (lambda x: jax.lax.all_gather(x, "data"), "all_gather", ("data",), 3 * 512),
    "gather-tiled": (
        lambda x: jax.lax.all_gather(x, BOTH, axis=1, tiled=True),
        "all_gather",
        BOTH,
        7 * 512,
    ),
    "gather-minor-first": (
        lambda x: jax.lax.all_gather(x, ("model", "data"), tiled=True),
        "all_gather",
        ("model", "data"),
        7 * 512,
    ),
    "gather-invariant": (
        lambda x: jax.lax.all_gather(x, "model", tiled=True, to="invarying"),
        "all_gather",
        ("model",),
        512,
    ),
    "scatter": (
        lambda x: jax.lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True),
        "reduce_scatter",
        ("data",),
        384,
    ),
    "scatter-both": (
        lambda x: jax.lax.psum_scatter(x, BOTH, tiled=True),
        "reduce_scatter",
        BOTH,
        448,
    ),
    "sum": (lambda x: jax.lax.psum(x, "data"), "all_reduce", ("data",), 768),
    "mean": (lambda x: jax.lax.pmean(x, BOTH), "all_reduce", BOTH, 896),
    "max": (lambda x: jax.lax.pmax(x, "model"), "all_reduce", ("model",), 512),
    "min": (lambda x: jax.lax.pmin(x, BOTH), "all_reduce", BOTH, 896),
    "exchange": (
        lambda x: jax.lax.all_to_all(x, "data", 0, 1, tiled=True),
        "all_to_all",
        ("data",),
        384,
    ),
    "permute": (lambda x: shift(x, "data", 4), "permute", ("data",), 512),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_each_collective(mesh42, name, check_vma):
    function, kind, axes, expected = ONE_OF_EACH[name]
    [found] = read(function, mesh42, check_vma=check_vma)
    assert (found.kind, found.axes, found.bytes_sent) == (kind, axes, expected)
    assert found.axis_size == {("data",): 4, ("model",): 2}.get(axes, 8)
    assert (found.shape, found.dtype, found.times) == ((8, 16), jnp.float32, 1)


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((64, 16), jnp.bfloat16, 448),
        ((64, 16), jnp.int8, 224),
        ((8, 3), jnp.float16, Fraction(21, 2)),  # 7/4 of six bytes
        ((8,), jnp.bool_, Fraction(7, 4)),
        ((0, 16), jnp.float32, 0),
    ],
)
def test_shapes_and_dtypes(mesh42, shape, dtype, expected):
    [found] = read(lambda x: jax.lax.pmax(x, BOTH), mesh42, shape, dtype)
    assert found.dtype == dtype
    assert found.bytes_sent == expected
    assert isinstance(found.bytes_sent, Fraction)
    assert found.float_bytes_sent == float(expected)


def test_keys_are_what_they_are_made_of(mesh42):
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 64))
    gather = functools.partial(jax.lax.all_gather, axis_name="data", tiled=True)
    [found] = read(gather, mesh42, keys.shape, keys.dtype)
    assert found.bytes_sent == 3 * 8 * 8  # Each of the eight keys is two uint32.


def test_every_factorisation(mesh8):
    axes = tuple(mesh8.axis_names)
    found = read(lambda x: [jax.lax.psum(x, axes), *(jax.lax.psum(x, a) for a in axes)], mesh8)
    by_axes = Counter({axes: Fraction(2 * 7, 8) * 512})
    for axis, size in mesh8.shape.items():
        by_axes[(axis,)] += Fraction(2 * (size - 1), size) * 512
    assert bytes_by_axes(found) == by_axes
    assert total_bytes(found) == sum(by_axes.values())
    assert count_by_kind(found) == {"all_reduce": 1 + len(axes)}


def test_an_axis_of_one_device_sends_nothing_and_is_listed(devices8):
    def all_kinds(x):
        gathered = jax.lax.all_gather(x, "model", tiled=True)
        scattered = jax.lax.psum_scatter(gathered, "model", tiled=True)
        exchanged = jax.lax.all_to_all(scattered, "model", 0, 0, tiled=True)
        return jax.lax.psum(shift(exchanged, "model", 1), "model")

    found = read(all_kinds, make_mesh({"data": 8, "model": 1}, devices8))
    assert count_by_kind(found) == dict.fromkeys(KINDS, 1)
    assert {c.axis_size for c in found} == {1}
    assert total_bytes(found) == 0
    assert {ring_bytes(kind, 100, 1) for kind in KINDS} == {0}


def test_the_ring(devices8):
    sent = {kind: ring_bytes(kind, 1000, 4) for kind in KINDS}
    expected = (3000, 750, 1500, 750, 1000)
    assert sent == dict(zip(KINDS, expected, strict=True))


def test_types_unreduced_and_reduced(mesh42):
    def unreduced(x):
        partial_sum = jax.lax.pcast(x, BOTH, to="unreduced")
        scattered = jax.lax.psum_scatter(partial_sum, BOTH, scatter_dimension=1, tiled=True)
        return jax.lax.psum(partial_sum, BOTH), scattered

    def reduced(x):
        whole = jax.lax.all_gather(x, BOTH, tiled=True, to="reduced")
        return (whole * x[0, 0]).sum()

    sums = read(unreduced, mesh42)
    assert [(c.kind, c.bytes_sent) for c in sums] == [("reduce_scatter", 448), ("all_reduce", 896)]
    gathers = read(jax.grad(reduced), mesh42)
    assert [(c.kind, c.shape, c.bytes_sent) for c in gathers] == [
        ("all_gather", (8, 16), 7 * 512),
        ("reduce_scatter", (64, 16), 7 * 512),
    ]


def test_what_sends_nothing(mesh42):
    def silent(x):
        index = jax.lax.axis_index("data") + jax.lax.axis_size("model")
        reduced = jax.lax.pcast(jnp.ones(3), BOTH, to="reduced")
        return jax.lax.pcast(jnp.ones(3), BOTH, to="varying") * index + x[0, :3] * reduced

    assert read(silent, mesh42) == ()
    assert total_bytes(()) == 0
    assert count_by_kind(()) == bytes_by_axes(()) == {}


def test_each_operand_is_one(mesh42):
    found = read(lambda x: jax.lax.psum({"a": x, "b": (x[0], x[0, 0])}, "data"), mesh42)
    assert [c.shape for c in found] == [(8, 16), (16,), ()]
    assert total_bytes(found) == Fraction(3, 2) * 4 * (8 * 16 + 16 + 1)


def test_groups_within_an_axis(mesh42):
    groups = [[0, 1], [2, 3]]
    gather = functools.partial(jax.lax.all_gather, axis_name="data", axis_index_groups=groups)
    [found] = read(gather, mesh42)
    assert (found.axes, found.axis_size, found.bytes_sent) == (("data",), 2, 512)


# What surrounds a collective.


def test_nested_loops_multiply(mesh42):
    def step(x, _):
        x, _ = jax.lax.scan(lambda x, _: (jax.lax.pmean(x, "data"), None), x, None, length=5)
        return shift(x, "model", 2), None

    def loops(x):
        x = jax.lax.fori_loop(0, 7, lambda i, x: jax.lax.pmean(x, "model"), x)
        return jax.lax.scan(step, x, None, length=3)[0]

    found = read(loops, mesh42, check_vma=False)
    assert [(c.kind, c.axes, c.times) for c in found] == [
        ("all_reduce", ("model",), 7),
        ("all_reduce", ("data",), 15),
        ("permute", ("model",), 3),
    ]
    assert count_by_kind(found) == {"all_reduce": 22, "permute": 3}
    never = read(lambda x: jax.lax.scan(step, x, None, length=0)[0], mesh42, check_vma=False)
    assert count_by_kind(never) == {}
    assert total_bytes(never) == 0
    assert bytes_by_axes(found) == {("model",): 7 * 512 + 3 * 512, ("data",): 15 * 768}


def test_scopes_are_joined(mesh42):
    @jax.jit
    def inner(x):
        with jax.named_scope("inner"):
            return jax.lax.psum(x, "data")

    def step(x, _):
        with jax.named_scope("step"):
            return x + inner(x).sum(), None

    def outer(x):
        with jax.named_scope("outer"):
            return jax.lax.scan(step, x, None, length=2)[0]

    [found] = read(outer, mesh42)
    assert found.scope == "outer/step/inner"
    [found] = read(lambda x: jax.lax.psum(x, "data"), mesh42)
    assert found.scope == ""


def test_recomputation_gathers_again(mesh42):
    def loss(x):
        return jnp.sin(jax.lax.all_gather(x, "data", tiled=True) ** 2).sum()

    assert count_by_kind(read(jax.grad(loss), mesh42)) == {"all_gather": 1, "reduce_scatter": 1}
    found = read(jax.grad(jax.checkpoint(loss)), mesh42)
    assert count_by_kind(found) == {"all_gather": 2, "reduce_scatter": 1}
    assert [c.bytes_sent for c in found] == [1536, 1536, 1536]


def test_gradients_written_by_hand(mesh42):
    def loss(x):
        return gather_array_with_mean_grads(x, 0, BOTH).sum()

    @jax.custom_jvp
    def passed_on(x):
        return shift(x, "data", 4)

    passed_on.defjvp(lambda primals, tangents: (passed_on(*primals), passed_on(*tangents)))
    assert count_by_kind(read(loss, mesh42)) == {"all_gather": 1}
    forward, backward = read(jax.grad(loss), mesh42)
    assert (forward.kind, forward.shape, forward.bytes_sent) == ("all_gather", (8, 16), 3584)
    assert (backward.kind, backward.shape) == ("reduce_scatter", (64, 16))
    assert backward.bytes_sent == forward.bytes_sent
    assert "scatter_gradients" in backward.scope
    assert count_by_kind(read(passed_on, mesh42)) == {"permute": 1}
    # The primal value, and the transpose of its tangent.
    grad = jax.value_and_grad(lambda x: passed_on(x).sum())
    assert count_by_kind(read(grad, mesh42)) == {"permute": 2}


def test_the_branch_that_sends_most(mesh42):
    branches = [
        lambda x: x,
        lambda x: shift(shift(x, "model", 2), "model", 2),
        lambda x: jax.lax.all_gather(x, "data", tiled=True)[:8],
        lambda x: shift(shift(shift(x, "data", 4), "data", 4), "data", 4),
    ]

    def step(x, branch):
        return jax.lax.switch(branch, branches, x), None

    found = read(lambda x: jax.lax.scan(step, x, jnp.arange(6))[0], mesh42)
    # 1536 bytes, as the last one sends too, where the others send none and 1024.
    assert [(c.kind, c.times, c.bytes_sent) for c in found] == [("all_gather", 6, 6 * 1536)]
    assert read(lambda x: jax.lax.cond(True, jnp.sin, jnp.cos, x), mesh42) == ()


def test_a_loop_of_unknown_length_may_compute(mesh42):
    assert read(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, jnp.exp, x), mesh42) == ()


def test_shard_maps_inside_each_other(mesh42):
    def inner(x):
        return jax.lax.psum(x, "model")

    def outer(x):
        with jax.named_scope("outer"):
            x = jax.lax.psum(x, "data")
            return jax.shard_map(
                inner, in_specs=P("model"), out_specs=P(), axis_names={"model"}, check_vma=True
            )(x)

    on_devices = jax.shard_map(
        outer, mesh=mesh42, in_specs=P("data"), out_specs=P(), axis_names={"data"}, check_vma=True
    )
    found = trace_collectives(jax.make_jaxpr(on_devices)(jnp.ones((8, 4))))
    assert bytes_by_axes(found) == {("data",): 48, ("model",): 16}  # Of [2, 4] and of [1, 4].
    assert {c.scope for c in found} == {"outer"}


# What is refused.


def test_axes_of_an_array_are_no_axes_of_a_mesh(mesh42):
    """A primitive that nobody knows is refused only if it names a mesh axis."""
    gossip = Primitive("gossip")
    gossip.def_abstract_eval(lambda x, **_: x)
    assert read(functools.partial(gossip.bind, axes=(0, 1), name="data"), mesh42) == ()


# Real programs.


def read_program(builder, mesh, model=None, *, tx=None, **kwargs):
    if builder is fsdp:
        kwargs.setdefault("min_weight_size", 0)
    shapes = Batch(
        inputs=jax.ShapeDtypeStruct((64, 16), jnp.float32),
        labels=jax.ShapeDtypeStruct((64,), jnp.int32),
    )
    tx = tx or optax.sgd(0.1)
    program = builder(model or Model(), tx, loss_fn, mesh=mesh, batch=shapes, **kwargs)
    return trace_collectives(program.train_step.trace(program.abstract_state, shapes))


# Elements of Model's parameters; only the last, the bias of five, cannot be sharded over eight.
SIZES = (16 * 32, 32, 32 * 5, 5)
# The sum of the loss and the number of examples, each four bytes, as metric and as objective.
METRICS = 4 * 4
KEEP = {"reshard_after_forward": False}


def test_a_data_parallel_step(devices8):
    found = read_program(data_parallel, make_mesh({"data": 8}, devices8))
    assert count_by_kind(found) == {"all_reduce": 4 + 2}
    assert total_bytes(found) == Fraction(2 * 7, 8) * (4 * sum(SIZES) + METRICS)
    assert Counter(c.purpose for c in found) == {"sync_gradients": 4, "sync_metrics": 2}
    reduced = {c.scope for c in found if c.purpose == "sync_gradients"}
    assert {scope.count("/") for scope in reduced} == {2}
    assert any(scope.endswith("/kernel/sync_gradients") for scope in reduced)


@pytest.mark.parametrize("use_scan", [False, True], ids=["loop", "scan"])
@pytest.mark.parametrize("minibatches", [1, 4])
def test_a_fully_sharded_step(devices8, minibatches, use_scan):
    mesh = make_mesh({"data": 8}, devices8)
    found = read_program(fsdp, mesh, num_minibatches=minibatches, use_scan=use_scan, **KEEP)
    counts = {"all_gather": 3 * minibatches, "reduce_scatter": 3 * minibatches, "all_reduce": 3}
    assert count_by_kind(found) == counts
    once = Fraction(7, 8) * 4 * sum(SIZES[:-1])
    reduced = Fraction(2 * 7, 8) * (4 * SIZES[-1] + METRICS)
    assert total_bytes(found) == minibatches * 2 * once + reduced
    assert sum(c.bytes_sent for c in found if c.kind == "all_gather") == minibatches * once
    assert len(found) == 3 + (6 if use_scan else 6 * minibatches)
    assert all("gather_params" in c.scope for c in found if c.kind == "all_gather")


def test_sharded_over_some_axes_and_over_their_product(mesh42):
    sharded = read_program(fsdp, mesh42, axis_name=BOTH, **KEEP)
    assert bytes_by_axes(sharded).keys() == {BOTH}
    within = read_program(fsdp, mesh42, axis_name="data", **KEEP)
    assert count_by_kind(within) == count_by_kind(sharded)
    gathered = 4 * sum(SIZES[:-1])
    assert bytes_by_axes(within) == {
        ("data",): Fraction(3, 4) * (2 * gathered + 2 * (4 * SIZES[-1] + METRICS))
    }


def test_layers_in_a_scan_gather_again_when_recomputed(devices8):
    mesh = make_mesh({"data": 8}, devices8)
    found = read_program(fsdp, mesh, Deep(), num_minibatches=2, use_scan=True, **KEEP)
    # Kernel and bias of six layers, in two minibatches: forward, recomputed, backward.
    assert count_by_kind(found) == {"all_gather": 48, "reduce_scatter": 24, "all_reduce": 2}
    assert total_bytes(found) == Fraction(7, 8) * (3 * 12 * 4 * (16 * 16 + 16) + 2 * METRICS)
    assert any("rematted_computation" in c.scope for c in found)


# -------------------------------------------------------------------------------------------------


def on_devices(function, mesh, **kwargs):
    spec = P(tuple(mesh.axis_names))
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, **kwargs)


X = jax.ShapeDtypeStruct((64, 8), jnp.float32)  # A device of eight has [8, 8], 256 bytes.
PRODUCT = 2 * 8**3


def search(x):
    """A loop of unknown length with a product and a sum inside, and a sum in its condition."""

    def go_on(x):
        return jax.lax.pmax(x.sum(), ("data", "model")) < 9

    def body(x):
        return jax.lax.pmean(x @ x, ("data", "model"))

    with jax.named_scope("search"):
        return jax.lax.while_loop(go_on, body, x)


def test_a_loop_of_unknown_length_is_bounded(mesh42):
    function = on_devices(search, mesh42, check_vma=False)
    with pytest.raises(ValueError, match=r"ledger: a while \(scope: search\) contains all_reduce"):
        ledger(function, X)
    found = ledger(function, X, while_trips=5)
    assert found.counts() == {"all_reduce": 5 + 6}
    once = Fraction(2 * 7, 8)
    assert found.total_bytes == once * (5 * 256 + 6 * 4)
    assert found.total_flops == 5 * PRODUCT
    assert found.notes == ("while (scope: search): 5 rounds are counted, as while_trips says",)
    never = ledger(function, X, while_trips=0)
    assert (never.counts(), never.total_flops) == ({"all_reduce": 1}, 0)
    traced = jax.jit(function).trace(X)
    assert total_bytes(trace_collectives(traced, while_trips=5)) == found.total_bytes


def test_a_loop_that_only_computes_is_refused_too(mesh42):
    def compute(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x)

    function = on_devices(compute, mesh42)
    with pytest.raises(ValueError, match=r"while \(scope: none\) contains products .*while_trips="):
        ledger(function, X)
    assert ledger(function, X, while_trips=3).total_flops == 3 * PRODUCT
    assert trace_collectives(jax.jit(function).trace(X)) == ()
    # One that does neither has nothing to be counted.
    silent = on_devices(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, jnp.exp, x), mesh42)
    assert ledger(silent, X).notes == ()


def test_each_reading_has_its_own_dearest_branch(mesh42):
    def sends(x):
        return jax.lax.pmean(x, "data")

    def computes(x):
        return x @ x @ x

    def step(x):
        with jax.named_scope("choice"):
            return jax.lax.cond(x[0, 0] > 0, sends, computes, x)

    found = ledger(on_devices(step, mesh42, check_vma=False), X)
    assert (found.counts(), found.total_flops) == ({"all_reduce": 1}, 2 * PRODUCT)
    assert found.notes == (
        "cond (scope: choice): only the branch that sends most is counted, of 2",
        "cond (scope: choice): only the branch that computes most is counted, of 2",
    )
    three = [lambda x: x @ x, lambda x: x @ x @ x @ x, lambda x: x @ x @ x]
    dearest = on_devices(lambda x: jax.lax.switch(jnp.int32(x[0, 0]), three, x), mesh42)
    assert ledger(dearest, X).total_flops == 3 * PRODUCT
    alike = on_devices(lambda x: jax.lax.cond(x[0, 0] > 0, computes, computes, x), mesh42)
    assert ledger(alike, X).notes == ()


def test_loops_multiply_what_is_inside(mesh42):
    def inner(x, _):
        return jax.lax.pmean(x @ x, "data"), None

    def outer(x, _):
        return jax.lax.scan(inner, x, None, length=5)[0] @ x, None

    function = on_devices(
        lambda x: jax.lax.scan(outer, x, None, length=3)[0], mesh42, check_vma=False
    )
    found = ledger(function, X)
    assert found.counts() == {"all_reduce": 15}
    assert found.total_flops == (15 + 3) * PRODUCT


def test_calls_of_all_kinds_are_looked_into(mesh42):
    @jax.custom_vjp
    def by_hand(x):
        return jax.lax.pmean(x @ x, "data")

    by_hand.defvjp(lambda x: (by_hand(x), x), lambda x, g: (g @ x @ x @ x,))

    @jax.custom_jvp
    def forward_mode(x):
        return x @ x

    forward_mode.defjvp(lambda x, t: (forward_mode(*x), 2 * t[0] @ x[0]))
    for call in (jax.jit, jax.checkpoint, lambda f: f, jax.remat):
        mapped = on_devices(call(lambda x: forward_mode(by_hand(x))), mesh42, check_vma=False)
        found = ledger(mapped, X)
        assert (found.counts(), found.total_flops) == ({"all_reduce": 1}, 2 * PRODUCT)
    mapped = on_devices(jax.grad(lambda x: by_hand(x).sum()), mesh42, check_vma=False)
    phases = ledger(mapped, X).flops_by_phase()
    assert (phases["forward"], phases["backward"]) == (PRODUCT, 3 * PRODUCT)


def test_a_kernel_is_what_it_says_of_itself(mesh42):
    def kernel(x_ref, out_ref):
        def body(x):
            return x @ x

        out_ref[...] = jax.lax.while_loop(lambda x: x.sum() < 9, body, x_ref[...])

    def call(x, estimate=None):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(kernel, out_shape=shape, cost_estimate=estimate)(x)

    silent = ledger(on_devices(call, mesh42, check_vma=False), X)
    assert silent.total_flops == 0
    assert silent.notes == ("FLOPs of pallas_call are unknown and not counted",)
    estimate = pallas.CostEstimate(flops=123, bytes_accessed=0, transcendentals=0)
    known = ledger(on_devices(lambda x: call(x, estimate), mesh42, check_vma=False), X)
    assert (known.total_flops, known.notes) == (123, ())


def test_global_arrays_are_shared_by_all_devices(mesh42):
    def inside(x):
        return x @ x.T

    def step(x):
        local = on_devices(inside, mesh42)(x)
        return local @ local.T

    found = ledger(jax.jit(step), jax.ShapeDtypeStruct((64, 8), jnp.float32))
    assert found.total_flops == 2 * 8**3 + 2 * 64 * 64 * 8 // 8
    [note] = found.notes
    assert note.startswith("FLOPs on global arrays are assumed to be spread evenly over 8 devices")


def test_axes_that_are_left_to_xla_share_too(mesh42):
    def inside(x):  # [16, 8], of which a device has half along some dim.
        return jax.lax.pmean(x.T @ x, "data")

    mapped = jax.shard_map(
        inside, mesh=mesh42, in_specs=P("data"), out_specs=P(), axis_names={"data"}
    )
    found = ledger(jax.jit(mapped), X)
    assert found.total_flops == 2 * 8 * 8 * 16 // 2
    assert "along axes left to XLA" in found.notes[0]
    assert count_by_kind(found.collectives) == {"all_reduce": 1}


# In which ticks each of two stages computes: four and three of five,
COMPUTES = np.array([[1, 0], [1, 1], [1, 1], [1, 0], [0, 1]], bool)
# and in which the first one does more.
EMBEDS = np.array([[1, 0], [1, 0], [0, 0], [0, 0], [0, 0]], bool)
TICKS = len(COMPUTES)


def ticks(x):
    """A loop of ticks as a pipeline runs it, with a condition in a condition and a loop in it."""
    stage = jax.lax.axis_index("model")

    def more(x):
        with jax.named_scope("embed"):
            return jax.lax.pmean(x @ x @ x, "data")

    def layers(x):
        with jax.named_scope(ticks_scope(EMBEDS)):
            x = jax.lax.cond(stage == 0, more, lambda x: x, x)

        def layer(x, _):  # The branches of a model's own condition.
            x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x)
            return jax.lax.pmean(x, "data"), None

        return jax.lax.scan(layer, x, None, length=3)[0]

    def tick(x, index):
        with jax.named_scope(ticks_scope(COMPUTES)):
            x = jax.lax.cond(index < 4, layers, lambda x: x, x)
        return jax.lax.ppermute(x, "model", [(0, 1)]), None

    def rounds(x, _):
        return jax.lax.scan(tick, x, jnp.arange(TICKS))[0], None

    return jax.lax.scan(rounds, x, None, length=2)[0]


def test_what_is_in_ticks_counts_as_often_as_a_stage_runs_it(mesh42):
    function = on_devices(ticks, mesh42, check_vma=False)
    first, second = (ledger(function, X, stage=stage) for stage in (0, 1))
    assert first.counts() == {"all_reduce": 2 * (2 + 3 * 4), "permute": 2 * TICKS}
    assert first.total_flops == 2 * (2 * 2 + 3 * 4) * PRODUCT
    assert second.counts() == {"all_reduce": 2 * 3 * 3, "permute": 2 * TICKS}
    assert second.total_flops == 2 * 3 * 3 * PRODUCT
    # The module is that of the model, in which there are no ticks.
    assert set(first.bytes_by_module()) == {"embed", ""}
    assert set(second.bytes_by_module()) == {""}
    assert first.notes == (
        "the numbers are of stage 0 of 2, as requested",
        "cond (scope: ticks_4_3_in_5_of_5): only the branch that computes most is counted, of 2",
    )


def test_the_stage_that_sends_the_most_is_read(mesh42):
    function = on_devices(ticks, mesh42, check_vma=False)
    found = ledger(function, X)
    assert (found.stage, found.to_json()["stage"]) == (0, 0)
    assert found.collectives == ledger(function, X, stage=0).collectives
    assert found.notes[0] == "the numbers are of stage 0 of 2, the one that sends the most"
    traced = jax.jit(function).trace(X)
    for stage, sent in ((None, found.collectives), (1, ledger(function, X, stage=1).collectives)):
        assert total_bytes(trace_collectives(traced, stage=stage)) == total_bytes(sent)
    for read in (ledger, trace_collectives):
        with pytest.raises(ValueError, match=r"stage=2, expected a stage from 0 to 1, or None"):
            read(traced, stage=2)


def test_a_program_without_ticks_has_one_stage(mesh42):
    function = on_devices(lambda x: jax.lax.pmean(x, "data"), mesh42, check_vma=False)
    assert ledger(function, X).stage is None
    assert ledger(function, X, stage=0).collectives == ledger(function, X).collectives
    with pytest.raises(ValueError, match=r"ledger: stage=1, expected a stage from 0 to 0"):
        ledger(function, X, stage=1)


def test_what_is_in_ticks_counts_as_often_once_it_is_compiled(mesh42):
    traced = jax.jit(on_devices(ticks, mesh42, check_vma=False)).trace(X)
    text = traced.lower().compile().as_text()
    for stage in (0, 1, None):
        written = trace_collectives(traced, stage=stage)
        found = compiled_collectives(text, stage=stage)
        assert count_by_kind(found) == count_by_kind(written)
        assert total_bytes(found) == total_bytes(written)
    # By the clock some stage computes in every tick.
    module = parse_module(text)
    together = Reading(module, module.entry, 1).collectives
    assert count_by_kind(together) == {"all_reduce": 2 * (2 + 3 * TICKS), "permute": 2 * TICKS}
