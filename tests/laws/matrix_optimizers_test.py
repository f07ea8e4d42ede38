"""Optimizers that multiply matrices take one device's steps, on whole matrices of their owners."""

import functools
import math
import re
from fractions import Fraction

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, data_parallel, diloco, fsdp, hsdp, make_mesh, zero
from manualpar.core.tracing.scopes import MATRICES_SCOPE
from manualpar.inspect import bytes_by_axes, ledger, parameter_collectives, step_bytes
from manualpar.inspect.budgets import check_budget, parse_budgets
from manualpar.inspect.expected_bytes import matrix_functions
from manualpar.models import Split, Transformer
from manualpar.models.cross_entropy import language_model_loss, mixture_of_experts_loss
from manualpar.models.flat_fields import with_fields
from tests.one_device import slow_unless, train_on_one_device, train_program

Dims = optax.contrib.MuonDimensionNumbers


def noise(key, shape, dtype=jnp.float32):
    """Returns numbers that give matrices full rank, and compile faster than random bits."""
    return 0.4 * jnp.sin(jnp.arange(math.prod(shape), dtype=dtype) ** 2).reshape(shape)


class Mixed(nn.Module):
    """Has wide and tall matrices, a stack of matrices, and kernels with heads."""

    hidden: int = 24

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.DenseGeneral, use_bias=False, kernel_init=noise)
        x = x + dense(12, name="down")(jnp.tanh(dense(self.hidden, name="up")(x)))
        for matrix in self.param("stack", noise, (3, 12, 16)):
            x = x + jnp.tanh(x @ matrix) @ matrix.T
        heads = jnp.tanh(dense((2, 8), name="query")(x))
        x = x + dense(12, axis=(-2, -1), name="out")(heads)
        return nn.Dense(4, kernel_init=noise, name="head")(x)


def mixed_dims(params):
    """Returns the dims of the matrices of `Mixed`; Adam updates the head."""
    kernels = {"up": Dims(), "down": Dims(), "query": Dims(0, (1, 2)), "out": Dims((0, 1), 2)}
    named = {name: {"kernel": dims} for name, dims in kernels.items()}
    return {**named, "stack": Dims(-2, -1), "head": None}


def square_loss(params, apply_fn, batch, rng):
    losses = jnp.square(apply_fn({"params": params}, batch.inputs) - batch.labels).mean(-1)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def make_batch(seed):
    x = np.random.default_rng(seed).normal(size=(16, 12)).astype(np.float32)
    return Batch(x, np.sin(x[:, :4]) + 1)


BATCHES = tuple(map(make_batch, range(3)))


def muon(**options):
    return optax.contrib.muon(0.02, muon_weight_dimension_numbers=mixed_dims, **options)


def decayed():
    rate = optax.linear_schedule(0.0, 0.02, 3)
    options = {"weight_decay": 0.1, "consistent_rms": 0.2, "adaptive": True, "nesterov": False}
    dims = {"muon_weight_dimension_numbers": mixed_dims}
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.contrib.muon(rate, **options, **dims), optax.ema(0.9)
    )


def several():
    return optax.MultiSteps(muon(), 2).gradient_transformation()


def polar(rate=0.02):
    """Makes an optimizer that is not of optax: each 2D gradient becomes its polar factor."""

    def update(grads, state, params=None):
        def factor(g):
            if g.ndim != 2:
                return -rate * g
            u, _, v = jnp.linalg.svd(g, full_matrices=False)
            return -rate * u @ v

        return jax.tree.map(factor, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


OPTIMIZERS = {
    "muon": muon,
    "chain": decayed,
    "dion": lambda: muon(ns_coeffs="dion"),
    "aol": lambda: muon(preconditioning="aol"),
    "schatten": lambda: muon(preconditioning="schatten"),
    "MultiSteps": several,
    "finite": lambda: optax.apply_if_finite(muon(), 2),
    "polar": polar,
    "galore": lambda: optax.contrib.galore(0.01, rank=2, update_proj_gap=2),
}
LAYOUTS = {
    "dp": (data_parallel, {"data": 8}, {}),
    "zero1": (zero, {"data": 8}, {}),
    "fsdp": (fsdp, {"data": 8}, {}),
    "fsdp, two axes": (fsdp, {"data": 4, "more": 2}, {"axis_name": ("data", "more")}),
    "fsdp, some replicated": (fsdp, {"data": 4}, {"min_weight_size": 300}),
    "fsdp, padded": (fsdp, {"data": 8}, {"pad": True}),
    "fsdp, skips": (fsdp, {"data": 8}, {"nonfinite": "skip", "norm_metrics": True}),
    "fsdp, minibatches": (fsdp, {"data": 4}, {"num_minibatches": 2}),
    "hsdp": (hsdp, {"replica": 2, "data": 4}, {}),
}


def build(layout, tx, hidden=24, **options):
    builder, sizes, given = LAYOUTS[layout]
    given = {} if builder is data_parallel else {"min_weight_size": 16, **given}
    mesh = make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    return builder(Mixed(hidden), tx, square_loss, mesh=mesh, batch=BATCHES[0], **given, **options)


@functools.cache
def one_device(name, hidden=24):
    return train_on_one_device(Mixed(hidden), OPTIMIZERS[name](), BATCHES, square_loss)


def assert_equal(program, batches, expected):
    """Compares losses and parameters with one device's, which rounds sums in another order."""
    state, losses = train_program(program, batches)
    np.testing.assert_allclose(losses, expected.losses, rtol=2e-6)
    found = jax.tree_util.tree_leaves_with_path(program.whole(state)["params"])
    for (path, x), y in zip(found, jax.tree.leaves(expected.params), strict=True):
        scale = np.abs(y).max()
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6 * scale, err_msg=str(path))


CASES = [("muon", layout) for layout in LAYOUTS]
CASES += [(name, "fsdp") for name in OPTIMIZERS if name != "muon"]
CASES += [("chain", "hsdp"), ("chain", "fsdp, padded"), ("MultiSteps", "dp")]
FAST = [("muon", "hsdp"), ("chain", "fsdp, padded")]


@pytest.mark.parametrize(("name", "layout"), [slow_unless(FAST, *case) for case in CASES])
def test_three_steps_equal_one_device(devices8, name, layout):
    del devices8
    hidden = 28 if "pad" in layout else 24
    program = build(layout, OPTIMIZERS[name](), hidden)
    assert_equal(program, BATCHES, one_device(name, hidden))


# A model axis, experts and layers in a loop, of a `Transformer`.

TOKENS = np.random.default_rng(0).integers(0, 32, (8, 9), dtype=np.int32)
TEXT = Batch(TOKENS[:, :-1], TOKENS[:, 1:])


def transformer(**fields):
    plain = Transformer(
        vocab_size=32, num_layers=2, hidden_size=16, mlp_size=32, num_heads=2, split=Split("model")
    )
    return with_fields(plain, **fields)


def kernels(params):
    """Returns the dims of a `Transformer`'s kernels, counted from the end; experts are a batch."""

    def dims(path, x):
        names = [key.key for key in path]
        if names[-1] != "kernel" or "router" in names:
            return None
        if names[-2] in ("query", "key", "value"):
            return Dims(-3, (-2, -1))
        return Dims((-3, -2), -1) if "attention" in names else Dims(-2, -1)

    return jax.tree_util.tree_map_with_path(dims, params)


MODELS = {
    "fsdp x model": ({"scan_layers": True}, {"data": 4, "model": 2}, {}),
    "fsdp x model, unrolled": ({"scan_layers": False}, {"data": 4, "model": 2}, {}),
    "experts": (
        {"scan_layers": True, "num_experts": 4, "expert_axis": "expert"},
        {"data": 4, "expert": 2},
        {"axis_name": ("data", "expert")},
    ),
    "frozen": ({"scan_layers": True}, {"data": 8}, {"trainable": ("*", "!*query*")}),
}


def build_transformer(name, mesh=None, **more):
    fields, sizes, options = MODELS[name]
    mesh = mesh or make_mesh(sizes)
    if "axis_name" in options and set(options["axis_name"]) - {*mesh.axis_names}:
        options = {}
    tx = optax.contrib.muon(0.02, muon_weight_dimension_numbers=kernels)
    loss = mixture_of_experts_loss if "experts" in name else language_model_loss
    options = {"min_weight_size": 64, **options, **more}
    return fsdp(transformer(**fields), tx, loss, mesh=mesh, batch=TEXT, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_transformer_takes_the_steps_of_one_device(devices8, name):
    programs = [
        build_transformer(name, mesh) for mesh in (make_mesh({"data": 1}, devices8[:1]), None)
    ]
    states, losses = zip(*(train_program(x, [TEXT] * 3) for x in programs), strict=True)
    np.testing.assert_allclose(*losses, rtol=2e-6)
    wholes = (x.whole(state)["params"] for x, state in zip(programs, states, strict=True))
    for x, y in zip(*map(jax.tree.leaves, wholes), strict=True):
        # Adam divides by small gradients of the embedding, which enlarges how they are rounded.
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)
    functions = matrix_functions(programs[1])
    assert functions.left == {}
    assert any(group.exchanged for group in functions.groups)


def test_a_state_moves_to_another_mesh(devices8):
    programs = [build("zero1", muon()), build("fsdp, skips", muon())]
    first, losses = train_program(programs[0], BATCHES[:1])
    state = programs[1].adopt(first)
    for batch in BATCHES[1:]:
        state, metrics = programs[1].train_step(state, batch)
        total, count = metrics["loss"]
        losses = np.append(losses, total / count)
    np.testing.assert_allclose(losses, one_device("muon").losses, rtol=2e-6)


@pytest.mark.slow
def test_replicas_that_train_separately_own_the_matrices_of_their_own(devices8):
    """With the outer optimizer SGD(1) and one replica's data on both, DiLoCo is the inner step."""
    del devices8
    twice = [Batch(np.tile(x.inputs, (2, 1)), np.tile(x.labels, (2, 1))) for x in BATCHES]
    program = diloco(
        Mixed(),
        muon(),
        square_loss,
        mesh=make_mesh({"replica": 2, "data": 4}),
        batch=twice[0],
        every=1,
        outer_tx=optax.sgd(1.0),
    )
    assert ledger(program).bytes_by_purpose()[MATRICES_SCOPE]
    _, losses = train_program(program, twice)
    np.testing.assert_allclose(losses, one_device("muon").losses, rtol=2e-6)


# Bytes, operations, and what XLA adds.


def test_an_owner_has_the_bytes_and_the_work_of_the_formula(devices8):
    """`down` [24, 12] is exchanged transposed, together with `up` [12, 24]."""
    program = build("hsdp", muon())
    groups = {group.paths: group for group in matrix_functions(program).groups}
    both, stack = groups["down/kernel", "up/kernel"], groups["stack",]
    assert (both.matrices, both.shape, both.copies) == (2, (12, 24), ())
    assert (stack.matrices, stack.padded, stack.copies) == (3, 4, ())
    assert {groups[name,].matrices for name in ("query/kernel", "out/kernel")} == {1}
    found = ledger(program)
    # Repeats make the matrices of each group a multiple of the 4 owners.
    sizes = {(12, 24): 4 * 288, (12, 16): 4 * 192, (12, 2, 8): 4 * 192, (2, 8, 12): 4 * 192}
    expected = sum(2 * Fraction(4 * size, 4) * Fraction(3, 4) for size in sizes.values())
    assert found.bytes_by_purpose()[MATRICES_SCOPE] == expected
    # One matrix of each group on an owner: five times `4 m^2 n + 2 m^3`.
    work = sum(5 * (4 * 12**2 * n + 2 * 12**3) for n in (24, 16, 16, 16))
    assert found.flops_by_phase()["update"] == work
    sent = bytes_by_axes(parameter_collectives(found.collectives))
    closed = step_bytes(program)
    assert sent["data",] <= closed["data",] <= 2 * sent["data",]


# The limits of a step of `Mixed` by FSDP on eight devices, as `budget_text` writes them. How often
# parameters are gathered differs between versions of JAX.
BUDGET = """
[muon]
devices = 8
flops = 301_248
[muon.purposes]
whole_matrices = {bytes = 6_048, collectives = 8}
"""


def test_a_step_keeps_its_budget(devices8):
    del devices8
    found = ledger(build("fsdp", muon())).to_json()
    verdict = check_budget(parse_budgets(BUDGET, "here")["muon"], found, "here")
    assert verdict == ((), (), ())


def exchanged(collectives):
    """Returns the bytes of the update's collectives, without all-reduces."""
    return sum(x.bytes_sent for x in collectives if x.phase == "update" and x.kind != "all_reduce")


IN_UPDATE = [(name, layout) for name in ("muon", "chain") for layout in LAYOUTS]
IN_UPDATE += [("MultiSteps", "fsdp"), ("polar", "fsdp"), ("aol", "fsdp")]


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("name", "layout"), [slow_unless([("chain", "fsdp, padded")], *case) for case in IN_UPDATE]
)
def test_xla_adds_no_collective_to_an_update_but_sums_to_a_number(devices8, name, layout):
    del devices8
    program = build(layout, OPTIMIZERS[name](), 28 if "pad" in layout else 24)
    found = ledger(program, compile=True)
    assert found.bytes_by_purpose()[MATRICES_SCOPE]
    assert exchanged(found.compiled.collectives) == exchanged(found.collectives)
    for change in found.changes:
        if change.kind == "added":  # XLA may send several numbers together.
            several = re.search(r"an all-reduce of f32 .* \((\d+) of them\)", change.words)
            assert change.bytes_after < 8 * (int(several[1]) if several else 1), change
    assert not [note for note in found.notes if "left to XLA" in note]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("galore", "has results of other shapes"),
        ("adafactor", "mixes entries without a product"),
        ("joined", "needs values of other parameters"),
    ],
)
def test_the_ledger_says_what_is_left_to_xla(devices8, name, words):
    del devices8

    def joined(grads, params):
        """Divides a product by the norm of all products, which only whole matrices give."""
        grams = jax.tree.map(lambda g: g @ g.T @ g if g.ndim == 2 else g, grads)
        norm = optax.tree.norm(grams)
        return jax.tree.map(lambda g: (g / norm) @ (g.T @ g) if g.ndim == 2 else g, grams)

    makers = {
        "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=4),
        "joined": lambda: optax.stateless(joined),
        **OPTIMIZERS,
    }
    program = build("fsdp", makers[name]())
    notes = [note for note in ledger(program).notes if "left to XLA" in note]
    assert any(words in note and "only in the compiled program" in note for note in notes), notes
    assert MATRICES_SCOPE not in ledger(program).bytes_by_purpose()
