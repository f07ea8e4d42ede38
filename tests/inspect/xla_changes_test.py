import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from manualpar import make_mesh
from manualpar.core.modes.strategy import MODES
from manualpar.inspect import (
    Collective,
    CompiledCollective,
    compiled_collectives,
    find_changes,
    ledger,
    total_bytes,
)
from manualpar.inspect.xla_changes import hlo_dtype
from tests.core.tracing.scoped_program import make
from tests.inspect.small_programs import module
from tests.one_device import slow_unless
from tests.tiny import STRATEGIES

pytestmark = pytest.mark.optimized  # What XLA changes is what is looked at.


def assert_nothing_is_left(found):
    """The invariant: the jaxpr and all changes are the compiled program."""
    difference = sum((c.bytes_after - c.bytes_before for c in found.changes), Fraction(0))
    assert found.total_bytes + difference == total_bytes(found.compiled.collectives)
    for change in found.changes:
        assert (change.bytes_before > 0) or (change.kind == "added")
        assert (change.bytes_after == 0) == (change.kind == "removed") or change.kind == "merged"
        assert change.words.endswith(".")


def read(function, mesh, dtype=jnp.float32):
    """The ledger of a function of a device's [8, 16] of [64, 16], compiled."""
    axes = tuple(mesh.axis_names)

    def on_device(x):
        return jax.tree.map(jnp.ravel, function(x))

    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=False
    )
    found = ledger(jax.jit(mapped), jax.ShapeDtypeStruct((64, 16), dtype), compile=True)
    assert_nothing_is_left(found)
    return found


def gather(x, scope="layer"):
    with jax.named_scope(scope), jax.named_scope("gather_params"):
        return jax.lax.all_gather(x, "data", tiled=True)


# What XLA:CPU does.


def test_nothing(mesh42):
    assert read(lambda x: jnp.sin(gather(x)), mesh42).changes == ()


def test_put_together(mesh42):
    def sums(x):
        out = []
        for name in ("one", "two", "three"):
            with jax.named_scope(name), jax.named_scope("sync_gradients"):
                out.append(jax.lax.psum(x * len(out), "data"))
        return out

    [change] = read(sums, mesh42).changes
    assert (change.kind, change.purpose) == ("merged", "sync_gradients")
    assert change.modules == ("one", "two", "three")
    assert change.bytes_before == change.bytes_after == 3 * 768
    assert "3 collectives (sync_gradients) run as one all-reduce with 3 operands" in change.words


def test_the_same_result_is_used_again(mesh42):
    def twice(x):
        first = jnp.sin(gather(x))
        with jax.named_scope("rematted_computation"):
            return first, jnp.cos(gather(x))

    found = read(twice, mesh42)
    assert found.bytes_by_purpose() == {"gather_params": 1536, "regather_params": 1536}
    [change] = found.changes
    assert (change.kind, change.modules) == ("merged", ("layer",))
    assert (change.bytes_before, change.bytes_after) == (1536, 0)


def test_out_of_a_loop(mesh42):
    def loop(x):
        def body(y, _):
            return jnp.sin(y + gather(x)[:8]), None

        return jax.lax.scan(body, x, None, length=5)[0]

    [change] = read(loop, mesh42).changes
    assert (change.kind, change.purpose, change.modules) == ("hoisted", "gather_params", ("layer",))
    assert (change.bytes_before, change.bytes_after) == (5 * 1536, 1536)
    assert "is moved out of a loop and runs 1 instead of 5 times" in change.words


def test_in_another_dtype(mesh42):
    if jax.default_backend() != "cpu":
        pytest.skip("other backends send what is written")
    found = read(lambda x: jax.lax.psum(x, "data"), mesh42, jnp.bfloat16)
    [change] = found.changes
    assert (change.kind, change.purpose) == ("retyped", "other")
    assert (change.bytes_before, change.bytes_after) == (384, 768)
    assert "an all-reduce of bf16 is sent as f32" in change.words


def test_gone(mesh42):
    found = read(lambda x: (jax.lax.psum(x, "data"), x)[1], mesh42)
    [change] = found.changes
    assert (change.kind, change.bytes_before, change.bytes_after) == ("removed", 768, 0)


def test_what_sends_nothing_is_no_change(devices8):
    mesh = make_mesh({"data": 1, "model": 8}, devices8)
    found = read(lambda x: jax.lax.psum(gather(x), "data"), mesh)
    assert (found.total_bytes, found.changes) == (0, ())


def test_added_outside(mesh42):
    rows = NamedSharding(mesh42, P("data"))

    def norm(x):
        with jax.named_scope("optimizer"):
            return jnp.sqrt(jnp.square(x).sum())

    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=rows)
    found = ledger(norm, x, compile=True)
    assert_nothing_is_left(found)
    [change] = found.changes
    assert (change.kind, change.purpose, change.bytes_after) == ("added", "optimizer", 6)
    assert "that the program does not write" in change.words


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.lax.all_to_all(x, ("data", "model"), 0, 1, tiled=True),
        lambda x: jax.lax.all_to_all(x, "model", 1, 0, tiled=True),
        lambda x: jax.lax.psum_scatter(x, ("model", "data"), tiled=True),
        lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]),
        lambda x: jax.lax.all_gather(x, "data", axis=1),
        lambda x: jax.lax.pmax(x > 0, "data"),
        lambda x: jax.lax.all_gather(x.astype(jnp.int8), "data"),
        lambda x: jax.lax.scan(lambda c, _: (jax.lax.pmean(c * c, "data"), None), x, None, 3)[0],
    ],
    ids=["exchange", "exchange-model", "scatter", "permute", "gather", "bool", "int8", "loop"],
)
def test_each_kind_is_found_again(mesh42, function):
    found = read(function, mesh42)
    assert found.total_bytes > 0
    assert found.changes == ()


def test_keys_travel_as_numbers(mesh42):
    def gather_keys(x):
        keys = jax.random.split(jax.random.key(jax.lax.axis_index("data")), 8)
        return jax.random.key_data(jax.lax.all_gather(keys, "data", tiled=True))

    found = read(gather_keys, mesh42)
    assert (found.total_bytes, found.changes) == (3 * 8 * 8, ())


# The steps of this package.


@pytest.mark.parametrize(
    ("name", "mode"),
    [slow_unless({("fsdp", "manual")}, name, mode) for name in STRATEGIES for mode in MODES],
)
@pytest.mark.parametrize("use_scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_step_is_accounted_for(devices8, name, mode, use_scan):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    program = make(name, devices8, mode=mode, tx=tx, num_minibatches=2, use_scan=use_scan)
    found = ledger(program, compile=True)
    assert_nothing_is_left(found)
    if mode == "manual":
        added = {change.purpose for change in found.changes if change.kind == "added"}
        assert added <= {"optimizer"}
        assert not {"removed", "replaced"} & {change.kind for change in found.changes}
    else:
        assert {change.kind for change in found.changes} == {"added"}


def test_narrow_gathers_are_wide_on_the_cpu(devices8):
    if jax.default_backend() != "cpu":
        pytest.skip("other backends send what is written")
    program = make("fsdp, keep", devices8, gather_dtype="bfloat16")
    found = ledger(program, compile=True)
    assert_nothing_is_left(found)
    retyped = {c.purpose: c for c in found.changes if c.kind == "retyped"}
    assert set(retyped) == {"gather_params", "scatter_gradients", "sync_gradients"}
    for change in retyped.values():
        assert change.bytes_after == 2 * change.bytes_before
        modules = {"first", "BatchNorm_0", "layers/Dense_0", "last"}
        assert set(change.modules) == (
            modules if change.purpose != "sync_gradients" else {"last/bias"}
        )


# What other compilers do, in their words.


def written(kind, scope, *, shape=(6, 4), times=1, dtype="float32", size=8):
    return Collective(kind, ("data",), size, shape, jnp.dtype(dtype), times, scope)


def changes(collectives, *lines):
    text = module("\n".join(lines))
    compiled = compiled_collectives(text)
    found = find_changes(collectives, compiled)
    difference = sum((c.bytes_after - c.bytes_before for c in found), Fraction(0))
    assert total_bytes(collectives) + difference == total_bytes(compiled)
    return [(c.kind, c.purpose, c.bytes_before, c.bytes_after) for c in found]


GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}"


def named(scope):
    return f'metadata={{op_name="jit(f)/{scope}/x"}}'


def test_another_kind_does_the_same():
    scatter = written("reduce_scatter", "dense/scatter_gradients")
    line = f"%y = f32[6,4] all-reduce(%x), {GROUPS}, {named('dense/scatter_gradients')}"
    assert changes([scatter], line) == [("replaced", "scatter_gradients", 84, 168)]
    # A gather of zeros and a part, summed up, as XLA:TPU does with what is small.
    small = written("all_gather", "norm/gather_params", shape=(3,))
    line = f"%y = f32[24] all-reduce(%p), {GROUPS}, {named('norm/gather_params')}"
    assert changes([small], "%p = f32[24] parameter(1)", line) == [
        ("replaced", "gather_params", 84, 168)
    ]


def test_of_many_names_only_one_is_kept():
    scopes = ["count_examples", "a/scatter_gradients", "b/scatter_gradients"]
    collectives = [
        written("all_reduce", scopes[0], shape=()),
        written("reduce_scatter", scopes[1]),
        written("reduce_scatter", scopes[2]),
    ]
    found = changes(
        collectives,
        "%s = f32[] parameter(1)",
        f"%y = (f32[6,4], f32[], f32[6,4]) all-reduce(%x, %s, %x), {GROUPS}, {named(scopes[0])}",
    )
    assert found == [
        ("merged", "scatter_gradients, count_examples", 343, 343),
        ("replaced", "scatter_gradients", 168, 336),
    ]


def test_what_has_no_name_is_found_by_its_shape():
    gathered = written("all_gather", "dense/gather_params")
    line = f"%y = f32[48,4] all-gather(%x), {GROUPS}"
    assert changes([gathered], line) == []
    assert changes([gathered], line.replace("{{0,1,2,3,4,5,6,7}}", "[2,4]<=[8]")) == [
        ("removed", "gather_params", 672, 0),
        ("added", "other", 0, 288),
    ]
    # One with another's name is another.
    assert changes([gathered], f"{line}, {named('sync_metrics')}") == [
        ("removed", "gather_params", 672, 0),
        ("added", "sync_metrics", 0, 672),
    ]


def test_of_two_the_one_that_runs_as_often_is_found_again():
    scope = "dense/gather_params"
    collectives = [written("all_gather", scope, times=times) for times in (2, 3)]
    compiled = [
        CompiledCollective("all_gather", 8, ((6, 4),), ("f32",), times, f"jit(f)/{scope}/x")
        for times in (3, 1)
    ]
    [change] = find_changes(collectives, compiled)
    assert (change.kind, change.bytes_before, change.bytes_after) == ("hoisted", 2 * 672, 672)
    # Of two that are alike each has its own.
    pair = [written("all_gather", scope, times=2)] * 2
    halves = [dataclasses.replace(compiled[1]) for _ in pair]
    [change] = find_changes(pair, halves)
    assert (change.kind, change.bytes_before, change.bytes_after) == ("hoisted", 4 * 672, 2 * 672)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "f32"),
        ("bfloat16", "bf16"),
        ("float8_e4m3fn", "f8e4m3fn"),
        ("bool", "pred"),
        ("int4", "s4"),
        ("int32", "s32"),
        ("uint8", "u8"),
        ("complex64", "c64"),
    ],
)
def test_names_of_dtypes(dtype, name):
    assert hlo_dtype(jnp.dtype(dtype)) == name
