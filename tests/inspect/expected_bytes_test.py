"""What a step sends, predicted, against what stands in the traced program: exactly."""

import itertools
import math
from fractions import Fraction
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, data_parallel, make_mesh
from manualpar.inspect import (
    bytes_by_axes,
    count_by_kind,
    parameter_collectives,
    step_bytes,
    total_bytes,
    total_step_bytes,
    trace_collectives,
)
from tests.inspect.counted_program import (
    BATCH,
    BUILDERS,
    KERNELS,
    SIZES,
    build,
    read,
)
from tests.one_device import slow_unless

LAYERS, ELEMENTS, FIRST = len(KERNELS), sum(KERNELS), KERNELS[0]


KEEPING = [name for name in BUILDERS if not name.endswith("reshard")]


# By strategy the terms: (kind, how many for each kernel, bytes in parts of b P (n - 1) / n, axis
# size n, and whether they travel as parameters do and not as gradients). `m` minibatches; the row
# of the design's table is the sum of the parts.
def rows(name: str, m: int) -> list[tuple[str, int, Fraction, int, str]]:
    one, m_times = Fraction(1), Fraction(m)
    table = {
        "dp": [("all_reduce", 1, 2 * one, 8, "reduce")],
        "zero1": [("reduce_scatter", 1, one, 8, "reduce"), ("all_gather", 1, one, 8, "store")],
        "zero2": [("reduce_scatter", m, m_times, 8, "reduce"), ("all_gather", 1, one, 8, "store")],
        "fsdp-keep": [
            ("all_gather", m, m_times, 8, "gather"),
            ("reduce_scatter", m, m_times, 8, "reduce"),
        ],
        "fsdp-reshard": [
            ("all_gather", 2 * m, 2 * m_times, 8, "gather"),
            ("reduce_scatter", m, m_times, 8, "reduce"),
        ],
        "fsdp-step": [("all_gather", 1, one, 8, "gather"), ("reduce_scatter", 1, one, 8, "reduce")],
        "fsdp-gather-step": [
            ("all_gather", 1, one, 8, "gather"),
            ("reduce_scatter", m, m_times, 8, "reduce"),
        ],
    }
    if not name.startswith("hsdp"):
        return table[name]
    inner = [
        (kind, number, part, 4, dtype)
        for kind, number, part, _, dtype in table[name.replace("hsdp", "fsdp")]
    ]
    return [*inner, ("all_reduce", 1, 2 * Fraction(1, 4), 2, "reduce")]


WIRES: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "float32": ({}, {"store": 4, "gather": 4, "reduce": 4}),
    "gather-bfloat16": (
        {"gather_dtype": "bfloat16"},
        {"store": 4, "gather": 2, "reduce": 2},
    ),
    "gather-bfloat16-reduce-float32": (
        {"gather_dtype": "bfloat16", "reduce_dtype": "float32"},
        {"store": 4, "gather": 2, "reduce": 4},
    ),
    "reduce-bfloat16": (
        {"reduce_dtype": "bfloat16"},
        {"store": 4, "gather": 4, "reduce": 2},
    ),
    "store-bfloat16": (
        {"param_dtype": "bfloat16"},
        {"store": 2, "gather": 2, "reduce": 2},
    ),
}


@pytest.mark.parametrize(
    ("m", "use_scan"),
    [
        (1, False),
        (4, True),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(4, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", BUILDERS)
def test_every_row_of_the_table(devices8, name, m, use_scan):
    check_row(name, m, use_scan=use_scan)


MIXED = "gather-bfloat16-reduce-float32"
FAST_WIRES = {*((name, MIXED) for name in BUILDERS), ("dp", "reduce-bfloat16")}
FAST_WIRES |= {("fsdp-reshard", wire) for wire in WIRES}


@pytest.mark.parametrize(
    ("name", "wire"),
    [slow_unless(FAST_WIRES, *pair) for pair in itertools.product(BUILDERS, list(WIRES)[1:])],
)
def test_what_travels_has_its_own_dtype(devices8, name, wire):
    check_row(name, 4, use_scan=True, wire=wire)


def check_row(name: str, m: int, *, use_scan: bool, wire: str = "float32") -> None:
    options, itemsizes = WIRES[wire]
    program = build(name, num_minibatches=m, use_scan=use_scan, **options)
    found = read(program)
    expected_counts: dict[str, int] = {}
    expected_bytes: dict[int, Fraction] = {}
    for kind, number, part, n, dtype in rows(name, m):
        expected_counts[kind] = expected_counts.get(kind, 0) + number * LAYERS
        sent = part * itemsizes[dtype] * ELEMENTS * Fraction(n - 1, n)
        expected_bytes[n] = expected_bytes.get(n, Fraction(0)) + sent

    predicted = step_bytes(program)
    assert {math.prod(program.mesh.shape[a] for a in axes): x for axes, x in predicted.items()} == (
        expected_bytes
    )
    assert total_step_bytes(program) == sum(expected_bytes.values())

    # The value of the first kernel is not needed for any gradient: it is not gathered again.
    spared: dict[tuple[str, ...], Fraction] = {}
    if name.endswith("reshard"):
        expected_counts["all_gather"] -= m
        n = program.mesh.shape["data"]
        spared = {("data",): m * itemsizes["gather"] * FIRST * Fraction(n - 1, n)}
    assert count_by_kind(found) == expected_counts
    sent = bytes_by_axes(found)
    assert {axes: x + spared.get(axes, 0) for axes, x in sent.items()} == predicted


FAST_MODES = {("dp", "explicit"), ("zero2", "explicit"), ("fsdp-reshard", "explicit")}
FAST_MODES |= {("zero1", "auto"), ("fsdp-keep", "auto"), ("hsdp-step", "auto")}


@pytest.mark.parametrize(
    ("name", "mode"),
    [slow_unless(FAST_MODES, *pair) for pair in itertools.product(BUILDERS, ("auto", "explicit"))],
)
def test_the_prediction_is_the_same_in_other_modes(devices8, name, mode):
    program = build(name, num_minibatches=2, mode=mode)
    assert step_bytes(program) == step_bytes(build(name, num_minibatches=2))


class Odd(nn.Module):
    """A kernel no dim of which divides by eight, and a bias."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(7)(nn.Dense(13)(x))


@pytest.mark.parametrize(
    ("name", "pad"),
    [*((name, True) for name in KEEPING), ("zero1", False), ("fsdp-keep", False)],
)
def test_padding_travels_and_small_parameters_cost_an_all_reduce(devices8, name, pad):
    options = {} if name == "dp" else {"pad": pad}
    program = build(name, Odd(), num_minibatches=2, **options)
    assert bytes_by_axes(read(program)) == step_bytes(program)
    if name == "fsdp-keep" and pad:  # [13, 7] is padded to [16, 7], [16, 13] need not be.
        padded = 16 * 13 + 16 + 16 * 7 + 8
        assert total_step_bytes(program) == 2 * 2 * 4 * padded * Fraction(7, 8)


def test_with_biases_the_formula_is_the_most_that_is_sent(devices8):
    program = build("fsdp-reshard", Odd(), num_minibatches=2, pad=True)
    unneeded = 16 * 13 + 16 + 8  # The first kernel and the biases.
    spared = 2 * 4 * unneeded * Fraction(7, 8)
    assert total_bytes(read(program)) == total_step_bytes(program) - spared


class Stacked(nn.Module):
    """Layers in a scan: each iteration gathers its slice."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(module: nn.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(nn.Dense(SIZES[0], use_bias=False, parent=module)(x)), None

        scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=5)
        return scanned(self, x, None)[0]


@pytest.mark.parametrize("name", BUILDERS)
def test_layers_in_a_scan(devices8, name):
    program = build(name, Stacked(), num_minibatches=2)
    # In a loop no iteration is the first: all kernels are needed again.
    assert bytes_by_axes(read(program)) == step_bytes(program)


class Annotated(nn.Module):
    """Kernels that share their storage over an axis that examples are not split over."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for size, names in zip(SIZES[1:], ((None, "model"), ("model", None), ()), strict=True):
            init = nn.initializers.lecun_normal()
            init = nn.with_partitioning(init, names) if names else init
            x = jnp.tanh(nn.Dense(size, use_bias=False, kernel_init=init)(x))
        return x


@pytest.mark.parametrize(
    ("name", "wire"),
    [*((name, "float32") for name in KEEPING), ("fsdp-keep", MIXED), ("hsdp-step", MIXED)],
)
def test_model_axes_are_gathered_too(devices8, name, wire):
    sizes = {"replica": 2} if name.startswith("hsdp") else {}
    mesh = make_mesh({**sizes, "data": 2, "model": 2})
    program = build(name, Annotated(), mesh=mesh, num_minibatches=2, **WIRES[wire][0])
    predicted = step_bytes(program)
    assert ("model",) in predicted
    assert bytes_by_axes(read(program)) == predicted


def test_model_axes_are_gathered_again(devices8):
    mesh = make_mesh({"data": 4, "model": 2})
    program = build("fsdp-reshard", Annotated(), mesh=mesh, num_minibatches=2)
    [first, *_] = [place.names for info, place in program.parameters if info.shape == SIZES[:2]]
    assert first == ("data", "model")
    # A quarter of the kernel's rows, then half of its columns: 1/8, then 1/2 of it is put in.
    spared = {
        ("data",): 2 * 4 * 3 * Fraction(FIRST, 8),
        ("model",): 2 * 4 * Fraction(FIRST, 2),
    }
    sent = bytes_by_axes(read(program))
    assert {axes: x + spared[axes] for axes, x in sent.items()} == step_bytes(program)


FAST_SHAPES = {*((name, (4, 2)) for name in BUILDERS), ("zero1", (2, 4))}
FAST_SHAPES |= {("fsdp-reshard", shape) for shape in ((2, 4), (8, 1), (1, 8))}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        slow_unless(FAST_SHAPES, *pair)
        for pair in itertools.product(BUILDERS, ((4, 2), (2, 4), (8, 1), (1, 8)))
    ],
    ids=str,
)
def test_axis_by_axis_as_much_is_sent_and_most_of_it_over_the_major_axis(devices8, name, shape):
    major, minor = shape
    replica = {}
    if name.startswith("hsdp"):
        if major * minor > 8 // 2 and 1 not in (major, minor):
            major, minor = 2, 2
        else:
            major, minor = max(major // 2, 1), max(minor // 2, 1)
        replica = {"replica": 2}
    mesh = make_mesh({**replica, "major": major, "minor": minor})
    options = {"mesh": mesh, "axis_name": ("major", "minor"), "num_minibatches": 2}
    at_once = build(name, **options)
    by_axis = build(name, axis_by_axis=True, **options)
    assert total_step_bytes(by_axis) == total_step_bytes(at_once)
    # All but a part of each step is over ("major", "minor") as one ring of N: k P (N - 1) / N.
    expected = step_bytes(at_once)
    if name != "dp":
        whole = expected.pop(("major", "minor")) * Fraction(major * minor, major * minor - 1)
        for axis, sent in {
            "major": whole * Fraction(major - 1, major),
            "minor": whole * Fraction(minor - 1, major * minor),
        }.items():
            expected |= {(axis,): sent}
    assert _without_zeros(step_bytes(by_axis)) == _without_zeros(expected)
    found = read(by_axis)
    if not name.endswith("reshard"):
        assert bytes_by_axes(found) == step_bytes(by_axis)
    assert total_bytes(found) == total_bytes(read(at_once))
    rounds = Fraction((major > 1) + (minor > 1))
    counts, single = count_by_kind(found), count_by_kind(read(at_once))
    assert counts.get("reduce_scatter", 0) == rounds * single.get("reduce_scatter", 0)
    assert counts.get("all_reduce", 0) == single.get("all_reduce", 0)


def _without_zeros(sent: dict[tuple[str, ...], Fraction]) -> dict[tuple[str, ...], Fraction]:
    return {axes: x for axes, x in sent.items() if x}


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("fsdp-reshard", ("Dense_1",)),
        ("fsdp-reshard", ("Dense_1/kernel",)),
        ("hsdp-reshard", ("Dense_1", "Dense_2")),
    ],
    ids=str,
)
def test_what_is_kept_is_not_gathered_again(devices8, name, keep):
    program = build(name, keep_gathered=keep, num_minibatches=2)
    n = program.mesh.shape["data"]
    again = 2 * 4 * Fraction(n - 1, n)  # Minibatches, bytes.
    spared = sum(KERNELS[1 : 1 + len(keep)]) * again
    assert total_step_bytes(build(name, num_minibatches=2)) - total_step_bytes(program) == spared
    # The first kernel is not needed for any gradient.
    assert total_bytes(read(program)) == total_step_bytes(program) - FIRST * again
    assert count_by_kind(read(program))["reduce_scatter"] == 2 * LAYERS


class Repeated(nn.Module):
    """One kernel, used three times."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = nn.Dense(SIZES[0], use_bias=False)
        return jnp.tanh(layer(jnp.tanh(layer(jnp.tanh(layer(x))))))


def test_what_is_kept_is_gathered_once_however_often_it_is_used(devices8):
    program = build("fsdp-reshard", Repeated(), keep_gathered=("Dense_0",), num_minibatches=2)
    assert bytes_by_axes(read(program)) == step_bytes(program)
    assert count_by_kind(read(program)) == {"all_gather": 2, "reduce_scatter": 2}


class Normalised(nn.Module):
    """A model with statistics, which are synchronised too."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(8, use_bias=False)(x)
        return nn.BatchNorm(use_running_average=not train, use_bias=False, use_scale=False)(x)


def masked_squares(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
    del rng
    y_BD = apply_fn({"params": params}, batch.inputs, train=True)
    total, count = jnp.sum(y_BD.mean(-1) ** 2 * batch.mask), batch.mask.sum()
    return total / count, {"loss": (total, count)}


def test_metrics_counts_and_statistics_are_left_out(devices8):
    batch = Batch(
        jax.ShapeDtypeStruct((BATCH, SIZES[0]), jnp.float32),
        None,
        jax.ShapeDtypeStruct((BATCH,), jnp.float32),
    )
    program = data_parallel(
        Normalised(), optax.sgd(1e-3), masked_squares, mesh=make_mesh({"data": 8}), batch=batch
    )
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    everything = trace_collectives(traced)
    assert count_by_kind(everything)["all_reduce"] == 5  # Also: metrics, count, mean, variance.
    assert bytes_by_axes(parameter_collectives(everything)) == step_bytes(program)
    assert count_by_kind(parameter_collectives(everything)) == {"all_reduce": 1}


def test_a_sum_that_nobody_has_written_shows_as_a_difference(devices8):
    """Autodiff would add it if a parameter were not cast before a loss is differentiated."""
    mesh = make_mesh({"data": 8})

    def summed(x):
        return jax.lax.psum(x, "data")

    run = jax.shard_map(summed, mesh=mesh, in_specs=P("data"), out_specs=P())
    assert len(parameter_collectives(trace_collectives(jax.jit(run).trace(jnp.ones(8))))) == 1
