import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from manualpar import Batch, data_parallel, fsdp, make_mesh
from manualpar.core.parameters.collectives import cast_to_varying
from manualpar.inspect import (
    compiled_collectives,
    count_by_kind,
    read_compiled,
    total_bytes,
    trace_collectives,
)
from manualpar.inspect.compiled import (
    HloModule,
    Instruction,
    array_bytes,
    arrays,
    axes_of,
    device_groups,
    parse_module,
    scope_of,
    trip_count,
)
from tests.inspect.small_programs import Deep, Model, loss_fn, module


def both_readings(traced):
    return trace_collectives(traced), compiled_collectives(traced.lower().compile())


def on_devices(function, mesh, shape=(64, 16), dtype=jnp.float32):
    """Traces a function of one device's part of an array of this global shape."""
    axes = tuple(mesh.axis_names)

    def on_device(x):
        return cast_to_varying(jax.tree.map(jnp.ravel, function(x)), axes)

    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=True
    )
    return jax.jit(mapped).trace(jax.ShapeDtypeStruct(shape, dtype))


def shift(x, axes):
    # JAX 0.12 takes several axes in the order of the mesh alone.
    axes = tuple(axis for axis in ("data", "model") if axis in axes)
    size = jax.lax.axis_size(axes)
    return jax.lax.ppermute(x, axes, [(i, (i + 1) % size) for i in range(size)])


# What is written is what runs.


@pytest.mark.parametrize("axes", ["data", "model", ("data", "model"), ("model", "data")], ids=str)
@pytest.mark.parametrize(
    "collective",
    [
        lambda x, axes: jax.lax.all_gather(x, axes, tiled=True),
        lambda x, axes: jax.lax.psum_scatter(x, axes, tiled=True),
        lambda x, axes: jax.lax.pmean(x, axes),
        lambda x, axes: jax.lax.pmax(x, axes),
        lambda x, axes: jax.lax.all_to_all(x, axes, 0, 1, tiled=True),
        lambda x, axes: shift(x, axes),
    ],
    ids=["gather", "scatter", "mean", "max", "exchange", "permute"],
)
def test_a_collective_is_the_one_that_was_traced(mesh42, collective, axes):
    [traced], [compiled] = both_readings(on_devices(lambda x: collective(x, axes), mesh42))
    assert (compiled.kind, compiled.times) == (traced.kind, 1)
    assert compiled.group_size == traced.axis_size == {"data": 4, "model": 2}.get(str(axes), 8)
    assert compiled.bytes_sent == traced.bytes_sent > 0
    assert set(compiled.dtypes) == {"f32"}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(jnp.int8, "s8"), (jnp.bool_, "pred"), (jnp.uint32, "u32"), (jnp.complex64, "c64")],
)
def test_dtypes(mesh42, dtype, name):
    gather = on_devices(lambda x: jax.lax.all_gather(x, "data", tiled=True), mesh42, dtype=dtype)
    [traced], [compiled] = both_readings(gather)
    assert compiled.dtypes == (name,)
    assert compiled.shapes == (traced.shape,)
    assert compiled.bytes_sent == traced.bytes_sent


def test_the_cpu_sends_float32_for_bfloat16(mesh42):
    if jax.default_backend() != "cpu":
        pytest.skip("other backends send what is written")
    program = on_devices(lambda x: jax.lax.psum(x, "data"), mesh42, dtype=jnp.bfloat16)
    [traced], [compiled] = both_readings(program)
    assert (traced.dtype, compiled.dtypes) == (jnp.bfloat16, ("f32",))
    assert compiled.bytes_sent == 2 * traced.bytes_sent


def test_merged_collectives_have_several_operands(mesh42):
    traced, compiled = both_readings(
        on_devices(lambda x: [jax.lax.psum(x * i, "data") for i in (1, 2, 3)], mesh42)
    )
    assert total_bytes(compiled) == total_bytes(traced) == 3 * 768
    assert sum(len(c.shapes) for c in compiled) == len(traced) == 3


def test_nested_loops_multiply(mesh42):
    def inner(x, _):
        gathered = jax.lax.all_gather(x, "data", tiled=True)
        return jax.lax.psum_scatter(jnp.sin(gathered), "data", tiled=True), None

    def outer(x, _):
        return shift(jax.lax.scan(inner, x, None, length=5)[0], "model"), None

    loops = on_devices(lambda x: jax.lax.scan(outer, x, None, length=3)[0], mesh42)
    traced, compiled = both_readings(loops)
    counts = {"all_gather": 15, "reduce_scatter": 15, "permute": 3}
    assert count_by_kind(compiled) == count_by_kind(traced) == counts
    assert total_bytes(compiled) == total_bytes(traced) == 512 * (15 * 3 + 15 * 3 + 3)


def test_the_branch_that_sends_most(mesh42):
    def branches(x):
        return jax.lax.cond(
            jax.lax.pmax(x.sum(), ("data", "model")) > 0,
            lambda x: shift(shift(x, "data"), "model"),
            lambda x: jax.lax.all_gather(x, "data", tiled=True)[:8],
            x,
        )

    traced, compiled = both_readings(on_devices(branches, mesh42))
    assert count_by_kind(compiled) == count_by_kind(traced) == {"all_reduce": 1, "all_gather": 1}
    assert total_bytes(compiled) == total_bytes(traced) == 7 + 1536


def test_a_loop_of_unknown_length_is_refused(mesh42):
    def search(x, total):
        return jax.lax.while_loop(lambda x: total(x.sum()) < 9, lambda x: x + 1, x)

    def everywhere(x):
        return jax.lax.pmax(x, ("data", "model"))

    compiled = on_devices(lambda x: search(x, everywhere), mesh42).lower().compile()
    message = r"while \(scope: jit.*while\) contains all_reduce, but XLA gives no trip count"
    with pytest.raises(ValueError, match=message):
        compiled_collectives(compiled)
    silent = on_devices(lambda x: search(x, jnp.abs), mesh42).lower().compile()
    assert compiled_collectives(silent) == ()


# Programs of this package.


KEEP = {"min_weight_size": 0, "reshard_after_forward": False}


def read_program(builder, mesh, model, tx, **kwargs):
    shapes = Batch(
        inputs=jax.ShapeDtypeStruct((64, 16), jnp.float32),
        labels=jax.ShapeDtypeStruct((64,), jnp.int32),
    )
    program = builder(model, tx, loss_fn, mesh=mesh, batch=shapes, **kwargs)
    return both_readings(program.train_step.trace(program.abstract_state, shapes))


@pytest.mark.parametrize("axis_name", ["data", ("data", "model")], ids=str)
@pytest.mark.parametrize("model", [Model(), Deep()], ids=["plain", "scan"])
def test_a_fully_sharded_step_sends_what_is_written(mesh42, model, axis_name):
    # One minibatch, weights kept: equal gathers XLA does once. All-reduces of float32 become one
    # with several operands.
    traced, compiled = read_program(
        fsdp, mesh42, model, optax.sgd(0.1), axis_name=axis_name, **KEEP
    )
    for kind in ("all_gather", "reduce_scatter"):
        assert count_by_kind(compiled)[kind] == count_by_kind(traced)[kind]
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        of_kind = [[c for c in found if c.kind == kind] for found in (traced, compiled)]
        assert total_bytes(of_kind[0]) == total_bytes(of_kind[1]) > 0


def test_a_data_parallel_step_sends_what_is_written(mesh42):
    traced, compiled = read_program(
        data_parallel, mesh42, Model(), optax.adam(0.1), axis_name=("data", "model")
    )
    numbers = (
        16 * 32 + 32 + 32 * 5 + 5 + 4
    )  # Sum and count of the loss, as metric and as objective.
    assert total_bytes(compiled) == total_bytes(traced) == Fraction(7, 4) * 4 * numbers
    assert sum(len(c.shapes) for c in compiled) == len(traced) == 6


def test_what_the_optimizer_sends_stands_in_the_compiled_program_only(devices8):
    mesh = make_mesh({"data": 8}, devices8)
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    traced, compiled = read_program(fsdp, mesh, Model(), clip, **KEEP)
    norms = 3 * 4  # A float32 for each of the three sharded gradients.
    assert total_bytes(compiled) - total_bytes(traced) == Fraction(7, 4) * norms


# Programs in which XLA decides.


def compile_sharded(function, mesh, in_specs, out_spec, *shapes):
    shardings = [NamedSharding(mesh, spec) for spec in in_specs]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    out_sharding = NamedSharding(mesh, out_spec)
    jitted = jax.jit(function, in_shardings=shardings, out_shardings=out_sharding)
    traced = jitted.trace(*arguments)
    assert trace_collectives(traced) == ()
    return compiled_collectives(traced.lower().compile())


def test_a_contraction_over_a_sharded_dim_is_reduced(mesh42):
    specs = (P(None, "data"), P("data", None))
    [found] = compile_sharded(jnp.matmul, mesh42, specs, P(), (64, 8), (8, 16))
    assert (found.kind, found.group_size, found.shapes) == ("all_reduce", 4, ((64, 16),))
    assert found.bytes_sent == 64 * 16 * 4 * 2 * 3 // 4


def test_a_sharded_array_is_gathered(mesh42):
    [found] = compile_sharded(lambda x: x, mesh42, (P(None, "model"),), P(), (64, 8))
    assert (found.kind, found.group_size, found.bytes_sent) == ("all_gather", 2, 64 * 4 * 4)


def test_an_array_sharded_over_another_dim_is_exchanged(mesh42):
    [found] = compile_sharded(lambda x: x, mesh42, (P(None, "data"),), P("data"), (64, 8))
    assert (found.kind, found.group_size) == ("all_to_all", 4)
    assert found.bytes_sent == 64 * 2 * 4 * 3 // 4  # However many operands XLA cuts it into.


def test_a_mesh_in_another_order_of_devices(devices8):
    mesh = Mesh(np.array(devices8).reshape(2, 4).T, ("data", "model"))
    [found] = compile_sharded(lambda x: x.sum(0), mesh, (P("data"),), P(), (16, 8))
    assert (found.kind, found.group_size, found.bytes_sent) == ("all_reduce", 4, 8 * 4 * 6 // 4)


def test_reduced_in_a_loop(mesh42):
    def layers(x, kernels):
        return jax.lax.scan(lambda x, kernel: (jnp.sin(x @ kernel), None), x, kernels)[0]

    specs = (P("data", "model"), P(None, "model"))
    out_spec = P("data", "model")
    [found] = compile_sharded(layers, mesh42, specs, out_spec, (16, 32), (6, 32, 32))
    assert (found.kind, found.group_size, found.times) == ("all_reduce", 2, 6)
    assert found.bytes_sent == 6 * 4 * 32 * 4


# Forms that XLA:CPU does not write.


def test_a_start_and_its_done_are_one():
    found = compiled_collectives(
        module(
            """
            %ag = (f32[6,4]{1,0}, f32[24,4]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[8]
            %agd = f32[24,4]{1,0} all-gather-done(%ag)
            %ar = f32[6,4]{1,0} all-reduce-start(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
            %ard = f32[6,4]{1,0} all-reduce-done(%ar)
            %cp = (f32[6,4]{1,0}, f32[6,4]{1,0}, u32[], u32[]) collective-permute-start(%x), \
source_target_pairs={{0,1},{1,2},{4,5}}
            ROOT %cpd = f32[6,4]{1,0} collective-permute-done(%cp)
            """,
            """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
""",
        )
    )
    assert [(c.kind, c.group_size, c.bytes_sent) for c in found] == [
        ("all_gather", 4, 3 * 96),
        ("all_reduce", 2, 96),
        ("permute", 3, 96),
    ]


@pytest.mark.parametrize("sugar", [True, False])
def test_wrapped_starts_and_updates(sugar):
    scatter = "replica_groups={{0,1,2,3,4,5}}, dimensions={0}, to_apply=%add"
    start, update, done = (
        ("reduce-scatter-start", "reduce-scatter-update", "reduce-scatter-done")
        if sugar
        else ("async-start", "async-update", "async-done")
    )
    called = scatter if sugar else "calls=%wrapped"
    found = compiled_collectives(
        module(
            f"""
            %s = ((f32[6,4]{{1,0:T(8,128)}}), f32[1,4]{{1,0}}) {start}(%x), {called}
            %u = ((f32[6,4]{{1,0:T(8,128)}}), f32[1,4]{{1,0}}) {update}(%s), {called}
            ROOT %d = f32[1,4]{{1,0}} {done}(%u), {called}
            """,
            ""
            if sugar
            else f"""
%wrapped (p: f32[6,4]) -> f32[1,4] {{
  %p = f32[6,4]{{1,0}} parameter(0)
  ROOT %rs = f32[1,4]{{1,0}} reduce-scatter(%p), {scatter}
}}
""".replace(", to_apply=%add", ""),
        ).replace(", to_apply=%add", "")
    )
    assert [(c.kind, c.group_size, c.bytes_sent) for c in found] == [("reduce_scatter", 6, 80)]


# How XLA:TPU writes a collective that runs while others compute: a start, products that carry it
# on, and a done, each with the instruction in it.
FUSED = """
%start (p: f32[6,4]) -> (f32[6,4], f32[48,4]) {
  %p = f32[6,4]{1,0} parameter(0)
  %ag.1 = f32[48,4]{1,0} all-gather(%p), channel_id=3, GATHER
  ROOT %c.1 = (f32[6,4]{1,0}, f32[48,4]{1,0}) custom-call(%ag.1), \
custom_call_target="AsyncCollectiveStart"
}

%carry (p: f32[6,4]) -> f32[6,4] {
  %p.2 = f32[6,4]{1,0} parameter(0)
  %ag.2 = f32[48,4]{1,0} all-gather(%p.2), channel_id=3, GATHER
  ROOT %product = f32[6,4]{1,0} convolution(%p.2, %p.2)
}

%done (p: f32[6,4]) -> f32[48,4] {
  %p.3 = f32[6,4]{1,0} parameter(0)
  %ag.3 = f32[48,4]{1,0} all-gather(%p.3), channel_id=3, GATHER
  ROOT %c.3 = f32[48,4]{1,0} custom-call(%ag.3), custom_call_target="AsyncCollectiveDone"
}
""".replace("GATHER", 'replica_groups={{0,1,2,3,4,5,6,7}}, frontend_attributes={chain_id="1"}')


def test_a_collective_that_is_fused_with_others_is_one():
    lines = """
    %s = (f32[6,4]{1,0}, f32[48,4]{1,0}) fusion(%x), kind=kCustom, calls=%start
    %y = f32[6,4]{1,0} fusion(%x), kind=kOutput, calls=%carry
    %z = f32[6,4]{1,0} fusion(%y), kind=kOutput, calls=%carry
    ROOT %d = f32[48,4]{1,0} fusion(%z), kind=kCustom, calls=%done
    """
    [found] = compiled_collectives(module(lines, FUSED))
    assert (found.kind, found.times, found.bytes_sent) == ("all_gather", 1, 7 * 96)
    # In a loop the turn before may have started it; there it is counted.
    carried = "\n".join(line for line in lines.splitlines() if "%s =" not in line)
    assert compiled_collectives(module(carried, FUSED)) == ()
    # One that nothing starts is one wherever it stands.
    found = compiled_collectives(
        module(lines, FUSED.replace("AsyncCollective", "Other").replace("chain_id", "name"))
    )
    assert count_by_kind(found) == {"all_gather": 4}


@pytest.mark.parametrize("name", ["all-reduce-scatter", "all-reduce-scatter.3.clone"])
def test_a_sum_of_which_a_part_is_kept_is_a_scatter(name):
    computations = f"""
%{name} (p: f32[48,4]) -> f32[6,4] {{
  %p = f32[48,4]{{1,0}} parameter(0)
  %all-reduce.1 = f32[48,4]{{1,0}} all-reduce(%p), replica_groups={{{{0,1,2,3,4,5,6,7}}}}
  ROOT %part = f32[6,4]{{1,0}} dynamic-slice(%all-reduce.1, %p), dynamic_slice_sizes={{6,4}}
}}
"""
    line = f"ROOT %y = f32[6,4] fusion(%x), kind=kCustom, calls=%{name}"
    [found] = compiled_collectives(module(line, computations))
    assert (found.kind, found.shapes, found.bytes_sent) == ("reduce_scatter", ((48, 4),), 7 * 96)
    other = computations.replace(f"%{name}", "%fused")
    [found] = compiled_collectives(module(line.replace(f"%{name}", "%fused"), other))
    assert (found.kind, found.bytes_sent) == ("all_reduce", 2 * 7 * 96)


def test_a_loop_that_counts_needs_no_trip_count():
    computations = """
%condition (p: (s32[], f32[6,4])) -> pred[] {
  %end = s32[] constant(9)
  %p = (s32[], f32[6,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %end), direction=LT
}

%body (q: (s32[], f32[6,4])) -> (s32[], f32[6,4]) {
  %q = (s32[], f32[6,4]{1,0}) parameter(0)
  %step = s32[] constant(1)
  %j = s32[] get-tuple-element(%q), index=0
  %v = f32[6,4]{1,0} get-tuple-element(%q), index=1
  %sum = f32[6,4]{1,0} all-reduce(%v), replica_groups=[4,2]<=[8]
  %next = s32[] add(%j, %step)
  ROOT %t = (s32[], f32[6,4]{1,0}) tuple(%next, %sum)
}
"""
    lines = """
    %begin = s32[] constant(2)
    %given = (s32[], f32[6,4]{1,0}) tuple(%begin, %x)
    ROOT %w = (s32[], f32[6,4]{1,0}) while(%given), condition=%condition, body=%body
    """
    [found] = compiled_collectives(module(lines, computations))
    assert (found.kind, found.times) == ("all_reduce", 7)


def test_what_a_program_holds(mesh42):
    step = on_devices(lambda x: jax.lax.all_gather(x, "data", tiled=True) @ x.T, mesh42)
    compiled = read_compiled(step.lower().compile())
    assert compiled.collectives == compiled_collectives(step.lower().compile())
    assert compiled.arguments == 8 * 16 * 4
    assert compiled.outputs == 32 * 8 * 4
    assert compiled.aliased == 0
    assert compiled.temporaries >= 32 * 16 * 4  # What is gathered.
    assert compiled.peak == compiled.arguments + compiled.outputs + compiled.temporaries
    assert compiled.flops >= 2 * 32 * 16 * 8
    donated = jax.jit(jnp.sin, donate_argnums=0).lower(jax.ShapeDtypeStruct((8, 4), jnp.float32))
    compiled = read_compiled(donated.compile())
    assert compiled.aliased == compiled.arguments == compiled.outputs == 128
    assert compiled.peak == 128 + compiled.temporaries


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2},{3,4,5}}", 3),
        ("{{0},{1}}", 1),
        ("{{0,1},{2,3,4}}", 3),
        ("{}", 8),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['a'=4,'b'=2] {'a'}", 4),
        ("mesh['a'=4,'b'=2] {'a','b'}", 8),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", 4),
        ("mesh['a'=8,'b'=6] {'a':(2)2,'b':(1)3}", 6),
        ("mesh[a=8,b=6] {b}", 6),
    ],
)
def test_groups(groups, size):
    line = (
        f"ROOT %y = f32[6,4] all-reduce(%x), channel_id=1, replica_groups={groups}, metadata={{}}"
    )
    [found] = compiled_collectives(module(line))
    assert found.group_size == size
    assert found.bytes_sent == Fraction(2 * (size - 1), size) * 96


@pytest.mark.parametrize(
    ("pairs", "size", "expected"),
    [
        ("{{0,1},{1,0},{2,3},{3,2}}", 2, 96),
        ("{{0,2},{2,4},{4,6},{1,3}}", 4, 96),
        ("{{0,3},{1,2},{2,0},{3,1}}", 4, 96),
        ("{{0,0},{1,1}}", 1, 0),
        ("{}", 1, 0),
    ],
)
def test_who_passes_to_whom(pairs, size, expected):
    line = f"ROOT %y = f32[6,4] collective-permute(%x), source_target_pairs={pairs}, extra={{9,8}}"
    [found] = compiled_collectives(module(line))
    assert (found.group_size, found.bytes_sent) == (size, expected)


def test_the_group_of_all_devices():
    line = "ROOT %y = f32[6,4] all-reduce(%x), replica_groups={}"
    sizes = {
        header: compiled_collectives(module(line, header=header))[0].group_size
        for header in ("num_partitions=2", "replica_count=3", "replica_count=3, num_partitions=2")
    }
    assert list(sizes.values()) == [2, 3, 6]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bf16", 48), ("f8e4m3fn", 24), ("s4", 12), ("pred", 24), ("c128", 384), ("token", 0)],
)
def test_bytes_of_a_dtype(dtype, expected):
    line = f"ROOT %y = {dtype}[48] all-gather(%p), replica_groups=[4,2]<=[8]"
    [found] = compiled_collectives(module(f"%p = {dtype}[24] parameter(1)\n{line}"))
    assert found.bytes_sent == expected


def test_operands_of_a_merged_collective():
    parameters = "\n".join(f"%p.{i} = f32[{i}]{{0}} parameter({i})" for i in range(7))
    operands = ", ".join(f"/*index={i}*/%p.{i}" if i == 5 else f"%p.{i}" for i in range(7))
    tuple_shape = ", ".join(f"f32[{i}]{{0}}" for i in range(7))
    [found] = compiled_collectives(
        module(
            f"{parameters}\n%y = ({tuple_shape}) all-reduce({operands}), replica_groups=[4,2]<=[8]"
        )
    )
    assert found.shapes == tuple((i,) for i in range(7))
    assert found.bytes_sent == 4 * sum(range(7))


LOOP = """
%body (p: (s32[], f32[6,4])) -> (s32[], f32[6,4]) {
  %p = (s32[], f32[6,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[6,4]{1,0} get-tuple-element(%p), index=1
  %g = f32[12,4]{1,0} all-gather(%v), replica_groups=[4,2]<=[8], dimensions={0}
  ROOT %t = (s32[], f32[6,4]{1,0}) tuple(%i, %v)
}

%condition (q: (s32[], f32[6,4])) -> pred[] {
  %q = (s32[], f32[6,4]{1,0}) parameter(0)
  %j = pred[] constant(true)
  ROOT %r = pred[] all-reduce(%j), replica_groups=[4,2]<=[8]
}

%twice (w: (s32[], f32[6,4])) -> (s32[], f32[6,4]) {
  %w = (s32[], f32[6,4]{1,0}) parameter(0)
  %w1 = (s32[], f32[6,4]{1,0}) while(%w), condition=%condition, body=%body, TRIPS
  ROOT %w2 = (s32[], f32[6,4]{1,0}) while(%w1), condition=%condition, body=%body, TRIPS
}
"""
CALL_TWICE = "ROOT %y = (s32[], f32[6,4]{1,0}) call(%x), to_apply=%twice"


def test_loops_and_calls():
    trips = 'backend_config={"dynamic_variables":[],"known_trip_count":{"n":"10"}}'
    found = compiled_collectives(module(CALL_TWICE, LOOP.replace("TRIPS", trips)))
    # A condition is computed once more than the body runs.
    assert [(c.kind, c.times) for c in found] == [("all_gather", 10), ("all_reduce", 11)] * 2
    assert total_bytes(found) == 2 * (10 * 96 + 11 * 1)


@pytest.mark.parametrize(
    ("silenced", "kind"), [("all-reduce", "all_gather"), ("all-gather", "all_reduce")]
)
def test_a_loop_without_its_trip_count(silenced, kind):
    loop = LOOP.replace("TRIPS", 'metadata={op_name="jit(f)/solve/while"}')
    text = module(CALL_TWICE, loop.replace(f"{silenced}(", "copy("))
    message = rf"a while \(scope: jit\(f\)/solve/while\) contains {kind}, but XLA gives no"
    with pytest.raises(ValueError, match=message):
        compiled_collectives(text)
    both_silenced = text.replace("all-gather(", "copy(").replace("all-reduce(", "copy(")
    assert compiled_collectives(both_silenced) == ()


@pytest.mark.parametrize(
    "called",
    [
        "fusion(%x), kind=kCustom, calls=%sends",
        "call(%x), to_apply=%sends",
        'custom-call(%x), custom_call_target="f", called_computations={%sends}',
        "conditional(%x, %x, %x), branch_computations={%silent, %sends}",
        "conditional(%x, %x, %x), true_computation=%sends, false_computation=%silent",
        "conditional(%x, %x, %x), true_computation=%silent, false_computation=%sends",
        "call-start(%x), to_apply=%sends",
    ],
)
def test_whatever_calls_a_computation(called):
    computations = """
%silent (p: f32[6,4]) -> f32[6,4] {
  ROOT %p = f32[6,4]{1,0} parameter(0)
}

%sends (q: f32[6,4]) -> f32[6,4] {
  %q = f32[6,4]{1,0} parameter(0)
  ROOT %s = f32[6,4]{1,0} all-to-all(%q), replica_groups=[2,4]<=[8], dimensions={0}
}
"""
    [found] = compiled_collectives(module(f"ROOT %y = f32[6,4] {called}", computations))
    assert (found.kind, found.bytes_sent) == ("all_to_all", 72)


# What is refused.


def test_what_goes_to_the_host_is_no_collective():
    line = "ROOT %y = f32[6,4] send(%x), channel_id=1, is_host_transfer=true"
    assert compiled_collectives(module(line)) == ()


# -------------------------------------------------------------------------------------------------


# A loop as XLA:TPU writes it: nowhere does it say how often it runs.
COUNTED_LOOP = """HloModule jit_f, is_scheduled=true, num_partitions=8

%condition (p: (s32[], f32[4])) -> pred[] {
  %end = s32[]{:T(128)} constant(END)
  %p = (s32[]{:T(128)}, f32[4]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %end), direction=LT, metadata={op_name="while/cond/lt"}
}

%body (q: (s32[], f32[4])) -> (s32[], f32[4]) {
  %q = (s32[]{:T(128)}, f32[4]{0}) parameter(0)
  %step = s32[] constant(STEP)
  %x = f32[4]{0} get-tuple-element(%q), index=1
  %j = s32[] get-tuple-element(%q), index=0
  %next = s32[] add(%j, %step)
  %moved = s32[] copy(%next)
  ROOT %t = (s32[], f32[4]{0}) tuple(%moved, %x)
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %begin = s32[] constant(BEGIN)
  %i0 = s32[] copy(%begin)
  %given = (s32[], f32[4]{0}) tuple(%i0, %a)
  %w = (s32[], f32[4]{0}) while(%given), condition=%condition, body=%body
  ROOT %out = f32[4]{0} get-tuple-element(%w), index=1
}
"""


def count(begin=0, end=7, step=1, changed="", by=""):
    text = (
        COUNTED_LOOP.replace("BEGIN", str(begin))
        .replace("END", str(end))
        .replace("STEP", str(step))
    )
    module = parse_module(text.replace(changed, by) if changed else text)
    around = module.computations[module.entry]
    return trip_count(module, around, around["w"])


@pytest.mark.parametrize(
    ("begin", "end", "step"),
    [(0, 7, 1), (3, 7, 1), (0, 7, 2), (0, 8, 2), (-5, 6, 3), (7, 7, 1), (9, 7, 1), (0, 1, 100)],
)
def test_a_loop_that_counts(begin, end, step):
    assert count(begin, end, step) == len(range(begin, end, step))


@pytest.mark.parametrize(
    ("changed", "by"),
    [
        ("direction=LT", "direction=NE"),
        ("compare(%i, %end)", "compare(%end, %end)"),
        ("ROOT %lt", "ROOT %other = pred[] constant(true)\n  %lt"),
        ("%next = s32[] add(%j, %step)", "%next = s32[] multiply(%j, %step)"),
        ("%next = s32[] add(%j, %step)", "%next = s32[] add(%j, %j)"),
        ("%next = s32[] add(%j, %step)", "%next = s32[] add(%step, %step)"),
        ("%j = s32[] get-tuple-element(%q), index=0", "%j = s32[] parameter(1)"),
        ("%j = s32[] get-tuple-element(%q), index=0", "%j = s32[] get-tuple-element(%q), index=1"),
        ("tuple(%moved, %x)", "custom-call(%moved, %x)"),
        ("%begin = s32[] constant(0)", "%begin = s32[] parameter(1)"),
        ("%end = s32[]{:T(128)} constant(7)", "%end = s32[] parameter(1)"),
        ("while(%given)", "while(%a)"),
        ("constant(0)", "constant(x)"),
    ],
)
def test_one_that_does_not(changed, by):
    assert count() == 7
    assert changed in COUNTED_LOOP.replace("BEGIN", "0").replace("END", "7")
    assert count(changed=changed, by=by) is None


@pytest.mark.parametrize("step", [0, -1])
def test_one_that_would_never_end(step):
    assert count(step=step) is None


@pytest.mark.parametrize("copy", ["bitcast", "convert", "copy-start", "copy-done", "opt-barrier"])
def test_a_counter_that_is_handed_on(copy):
    assert count(changed="copy(%begin)", by=f"{copy}(%begin)") == 7


def test_what_xla_has_written_is_taken():
    written = 'body=%body, backend_config={"known_trip_count":{"n":"12"}}'
    assert count(changed="body=%body", by=written) == 12


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[2,3]{1,0:T(8,128)(2,1)S(1)}", 12),
        ("(f32[8]{0:T(128)}, /*index=1*/s8[3], pred[5], u32[]{:S(2)})", 44),
        ("s4[3]", 2),  # Half a byte each, in whole bytes.
        ("token[]", 0),
    ],
)
def test_bytes_of_shapes(shape, size):
    assert sum(array_bytes(*array) for array in arrays(shape)) == size


def groups_of(attributes, opcode="all-gather"):
    attributes = f", channel_id=1, {attributes}, dimensions={{0}}"
    collective = Instruction("c", "f32[8]", opcode, ("x",), attributes)
    return device_groups(HloModule({}, "", 8), collective)


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={}", [range(8)]),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("replica_groups=[2,4]<=[8]", [range(4), range(4, 8)]),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("replica_groups=mesh['a'=8,'b'=1] {'a','b'}", [range(8)]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
            [(0, 2, 4, 6), (1, 3, 5, 7)],
        ),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'a'}",
            [(4, 0), (5, 1), (6, 2), (7, 3)],
        ),
    ],
)
def test_groups_in_each_form(attributes, groups):
    assert sorted(groups_of(attributes)) == [tuple(group) for group in groups]


def test_groups_of_a_permutation():
    pairs = "source_target_pairs={{0,1},{1,2},{2,0},{4,5}}"
    assert groups_of(pairs, "collective-permute-start") == ((0, 1, 2), (4, 5))


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 1, 4)])
def test_axes_of_the_groups_along_them(sizes):
    mesh = {f"axis{dim}": size for dim, size in enumerate(sizes)}
    ids = np.arange(8).reshape(sizes)
    for count in range(len(sizes) + 1):
        for dims in itertools.combinations(range(len(sizes)), count):
            rest = [dim for dim in range(len(sizes)) if dim not in dims]
            size = math.prod(sizes[dim] for dim in dims)
            groups = ids.transpose([*rest, *dims]).reshape(-1, size)
            expected = tuple(f"axis{dim}" for dim in dims if sizes[dim] > 1)
            assert axes_of(tuple(map(tuple, groups.tolist())), mesh) == expected


def test_devices_that_pass_something_on_need_not_be_all_along_an_axis():
    assert axes_of(((0, 1), (2, 3)), {"data": 8}) == ("data",)
    assert axes_of(((4, 5),), {"replica": 2, "data": 4}) == ("data",)
    assert axes_of(((0, 4),), {"replica": 2, "data": 4}) == ("replica",)
    assert axes_of(((0, 5),), {"replica": 2, "data": 4}) == ("replica", "data")


def test_instruction_without_a_scope_has_that_of_what_it_is_made_from():
    module = parse_module(
        """HloModule m, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0), metadata={op_name="layer/scatter_gradients/reduce_scatter"}
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %reduced = f32[8] all-reduce(%x), replica_groups={}, to_apply=%sum
  %part = f32[4] slice(%reduced), slice={[0:4]}
  ROOT %shifted = f32[4] collective-permute(%part), source_target_pairs={{0,1}}
}
"""
    )
    main = module.computations["main"]
    scope = scope_of(module, main, main["shifted"])
    assert scope == "layer/scatter_gradients/reduce_scatter"
    assert scope_of(module, main, main["x"]) == ""


KERNEL = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %k = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"sizes":{
"block_q":512
},
"xprof_metadata":"{\\"block_q\\": 512}"
},chain="1"}, metadata={op_name="f/kernel/pallas_call"}
  %z = f32[4]{0} negate(%k), backend_config={"estimated_cycles":"9223372036854775807"}
  ROOT %y = f32[4]{0} negate(%k), backend_config={"window_config":{"estimated_cycles":"9"}}
}
"""


def test_a_kernel_says_what_it_says_of_itself_on_lines_of_its_own():
    module = parse_module(KERNEL)
    assert list(module.computations["main"]) == ["x", "k", "z", "y"]
    kernel = module.computations["main"]["k"]
    assert (kernel.target, kernel.op_name) == ("tpu_custom_call", "f/kernel/pallas_call")
    assert module.computations["main"]["y"].cycles == 9
    assert module.computations["main"]["z"].cycles is None  # The estimate has run over.
