"""Weights gathered one layer ahead: the same model as `nn.scan`, and nothing to wait for."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_policies

from manualpar import Batch, fsdp, hsdp, make_mesh
from manualpar.core.partitioning import ShardedParameter
from manualpar.inspect import count_by_kind, total_bytes, trace_collectives
from manualpar.layers import prefetched_scan
from tests.one_device import train_on_one_device, train_program

LENGTH = 3
BROADCAST = {"variable_axes": {"params": 0}, "in_axes": nn.broadcast}
RNGS = {"params": True, "dropout": True}


class Block(nn.Module):
    """A residual MLP without biases that returns something besides; with dropout, if at a rate."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x, scale):
        y = nn.RMSNorm(name="norm")(x)
        y = nn.gelu(nn.Dense(24, use_bias=False, name="up")(y)) * scale
        y = nn.Dense(x.shape[-1], use_bias=False, name="down")(y)
        y = nn.Dropout(self.rate, deterministic=not self.rate)(y)
        return x + y, y.mean(-1, keepdims=True)


class Stack(nn.Module):
    """Blocks in either loop, and a parameter that all of them share."""

    prefetch: bool
    full: bool = False
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train=False):
        scale = self.param("scale", nn.initializers.ones, (24,))
        rate = self.rate if train else 0.0
        policy = checkpoint_policies.nothing_saveable if self.full else None
        options = {"length": LENGTH, "split_rngs": RNGS}
        if self.prefetch:
            layers = prefetched_scan(Block, policy=policy, **options)
        else:
            block = nn.remat(Block, policy=policy, prevent_cse=False) if self.full else Block
            layers = nn.scan(block, **BROADCAST, **options)
        x, means = layers(rate, name="layers")(nn.Dense(12, name="first")(x), scale[None])
        return nn.Dense(4, name="last")(x) + (
            means * jnp.arange(1.0, LENGTH + 1)[:, None, None]
        ).sum(0)


def _loss(params, apply_fn, batch, rng):
    out = apply_fn({"params": params}, batch.inputs, train=True, rngs={"dropout": rng})
    loss = jnp.square(out - batch.labels).sum(-1)
    return loss.mean(), {"loss": (loss.sum(), loss.size)}


def _batches(count=2):
    for seed in range(count):
        rng = np.random.default_rng(seed)
        inputs, labels = rng.normal(size=(16, 5)), rng.normal(size=(16, 4))
        yield Batch(inputs=inputs.astype(np.float32), labels=labels.astype(np.float32))


def _build(model, mesh, builder=fsdp, **options):
    options = {"min_weight_size": 0, **options}
    batch = next(_batches())
    return builder(model, optax.sgd(0.1), _loss, mesh=mesh, batch=batch, **options)


def _sent(program, step="train_step"):
    traced = getattr(program, step).trace(program.abstract_state, program.abstract_batch)
    return trace_collectives(traced)


@pytest.mark.parametrize(
    ("builder", "axes", "full", "options"),
    [
        (fsdp, {"data": 8}, True, {}),
        pytest.param(fsdp, {"data": 4}, False, {"pad": True}, marks=pytest.mark.slow),
        pytest.param(fsdp, {"data": 8}, False, {"num_minibatches": 2}, marks=pytest.mark.slow),
        pytest.param(
            hsdp,
            {"replica": 2, "data": 4},
            True,
            {"gather_dtype": "float32"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_trains_as_on_one_device(devices8, builder, axes, full, options):
    mesh = make_mesh(axes, devices8[: np.prod(list(axes.values()))])
    model = Stack(prefetch=True, full=full)
    program = _build(model, mesh, builder, **options)
    assert any(len(place.spec) for _, place in program.parameters)
    batches = list(_batches())
    expected = train_on_one_device(Stack(prefetch=False), optax.sgd(0.1), batches, _loss)
    state, losses = train_program(program, batches)
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    params = jax.device_get(
        jax.tree.map(
            lambda x, whole: x[tuple(map(slice, whole.shape))],
            state.params,
            program.whole_state.params,
        )
    )
    chex.assert_trees_all_close(params, nn.unbox(expected.params), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("full", [False, True])
def test_parameters_and_results_are_those_of_a_scan_and_so_are_the_bytes(devices8, full):
    mesh = make_mesh({"data": 8}, devices8)
    stacks = [Stack(prefetch, full=full) for prefetch in (False, True)]
    programs = [_build(stack, mesh) for stack in stacks]
    # Of the stack: what surrounds it keeps what it wants.
    plain, ahead = (
        [c for c in _sent(program) if "layers" in c.scope and c.purpose != "sync_gradients"]
        for program in programs
    )
    assert count_by_kind(plain) == {"all_gather": 12, "reduce_scatter": 6}
    assert count_by_kind(ahead) == count_by_kind(plain)
    assert total_bytes(ahead) == total_bytes(plain)
    assert total_bytes(_sent(programs[1], "eval_step")) == total_bytes(
        _sent(programs[0], "eval_step")
    )
    trained = [train_program(program, list(_batches(1))) for program in programs]
    (state, losses), (state_ahead, losses_ahead) = jax.device_get(trained)
    chex.assert_trees_all_equal_shapes(state.params, state_ahead.params)
    np.testing.assert_array_equal(losses, losses_ahead)
    chex.assert_trees_all_close(state.params, state_ahead.params, rtol=1e-6, atol=1e-7)


def _inner_jaxprs(eqn):
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield inner


def _loops(jaxpr):
    for eqn in jaxpr.eqns:
        for inner in _inner_jaxprs(eqn):
            if eqn.primitive.name == "scan":
                yield inner
            yield from _loops(inner)


def _names(eqn):
    yield eqn.primitive.name
    for inner in _inner_jaxprs(eqn):
        for each in inner.eqns:
            yield from _names(each)


def _waits(body):
    """Whether a matrix product in a loop's body is made of what was gathered in it."""
    gathered, waits = set(), False
    for eqn in body.eqns:
        names = set(_names(eqn))
        depends = any(id(v) in gathered for v in eqn.invars)
        waits |= "dot_general" in names and (depends or "all_gather" in names)
        if depends or "all_gather" in names:
            gathered |= set(map(id, eqn.outvars))
    return waits


@pytest.mark.parametrize("full", [False, True])
def test_no_compute_of_an_iteration_waits_for_a_gather_in_it(devices8, full):
    mesh = make_mesh({"data": 8}, devices8)
    waiting = {}
    for prefetch in (False, True):
        program = _build(Stack(prefetch, full=full), mesh)
        traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
        loops = [
            body
            for body in _loops(traced.jaxpr.jaxpr)
            if "all_gather" in {name for eqn in body.eqns for name in _names(eqn)}
        ]
        waiting[prefetch] = [_waits(body) for body in loops]
    assert waiting == {False: [True, True], True: [False, False]}


def test_where_nothing_is_sharded_it_is_a_scan():
    x = next(_batches()).inputs
    plain, ahead = Stack(prefetch=False), Stack(prefetch=True)
    params = jax.jit(ahead.init)(jax.random.key(0), x)
    chex.assert_trees_all_equal(params, jax.jit(plain.init)(jax.random.key(0), x))
    chex.assert_trees_all_equal(*(jax.jit(stack.apply)(params, x) for stack in (plain, ahead)))
    jaxpr = str(jax.make_jaxpr(ahead.apply)(params, x))
    assert "custom_vjp" not in jaxpr


class Counting(nn.Module):
    """A block with a variable that is no parameter."""

    @nn.compact
    def __call__(self, x):
        count = self.variable("counts", "count", jnp.zeros, ())
        return nn.Dense(x.shape[-1])(x) + count.value, None


class Counted(nn.Module):
    """A stack of those."""

    @nn.compact
    def __call__(self, x, train=False):
        layers = prefetched_scan(Counting, length=2)
        return layers(name="layers")(x)[0]


def test_blocks_with_other_variables_and_lengths_that_are_none_are_refused(devices8):
    for options in ({"length": 0}, {"length": True}, {"length": 2, "unroll": 0}):
        with pytest.raises(ValueError, match=r"prefetched_scan: \w+=.*expected a positive integer"):
            prefetched_scan(Block, **options)
    counts = {"layers": {"count": jnp.zeros(2)}}
    with pytest.raises(ValueError, match=r"collections \['counts'\], expected parameters only"):
        _run_sharded(Counted(), make_mesh({"data": 8}, devices8), counts=counts)


def test_a_carry_of_another_structure_is_refused(devices8):
    class Wrong(nn.Module):
        @nn.compact
        def __call__(self, x):
            return (nn.Dense(8)(x), x), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return prefetched_scan(Wrong, length=2)(name="layers")(x)[0]

    with pytest.raises(ValueError, match=r"returns a carry .* expected one like its argument"):
        _run_sharded(Model(), make_mesh({"data": 8}, devices8))


def _run_sharded(model, mesh, **collections):
    """Applies a model to variables whose stacked kernel is sharded by hand."""

    def on_device(kernel, bias, x):
        box = ShardedParameter(kernel, (None, "data", None), gather_axes=("data",))
        params = {"layers": {"Dense_0": {"kernel": box, "bias": bias}}}
        return model.apply({"params": params, **collections}, x)

    spec = jax.sharding.PartitionSpec
    specs = (spec(None, "data"), spec(), spec("data"))
    run = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=spec("data"))
    return jax.eval_shape(run, jnp.ones((2, 8, 8)), jnp.ones((2, 8)), jnp.ones((8, 8)))
