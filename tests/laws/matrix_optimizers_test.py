"""Optimizers that multiply matrices take one device's steps, on whole matrices of their owners."""

import functools
import math
import re
from fractions import Fraction
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import (
    Batch,
    Column,
    Pipeline,
    Row,
    data_parallel,
    diloco,
    fsdp,
    hsdp,
    lora,
    make_mesh,
    muon_dims,
    params_ema,
    tensor_parallel,
    zero,
)
from manualpar.core.tracing.scopes import MATRICES_SCOPE
from manualpar.core.trees import path_name
from manualpar.inspect import bytes_by_axes, ledger, parameter_collectives, step_bytes
from manualpar.inspect.budgets import check_budget, parse_budgets
from manualpar.inspect.expected_bytes import matrix_functions
from manualpar.models import Split, Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.flat_fields import with_fields
from tests.one_device import slow_unless, train_on_one_device, train_program

Dims = optax.contrib.MuonDimensionNumbers


def noise(key, shape, dtype=jnp.float32):
    """Returns numbers that give matrices full rank, and compile faster than random bits."""
    return 0.4 * jnp.sin(jnp.arange(math.prod(shape), dtype=dtype) ** 2).reshape(shape)


class Mixed(nn.Module):
    """Has wide and tall matrices, a stack of matrices, and kernels with heads."""

    hidden: int = 24
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        options = {"kernel_init": noise, "param_dtype": self.dtype}
        dense = functools.partial(nn.DenseGeneral, use_bias=False, **options)
        x = x + dense(12, name="down")(jnp.tanh(dense(self.hidden, name="up")(x)))
        for matrix in self.param("stack", noise, (3, 12, 16), self.dtype):
            x = x + jnp.tanh(x @ matrix) @ matrix.T
        heads = jnp.tanh(dense((2, 8), name="query")(x))
        x = x + dense(12, axis=(-2, -1), name="out")(heads)
        return nn.Dense(4, **options, name="head")(x)


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
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(rate, **options, **dims),
        optax.ema(0.9),
        params_ema(0.9),
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
    "fsdp x model": (fsdp, {"data": 4, "model": 2}, {}),
    "hsdp": (hsdp, {"replica": 2, "data": 4}, {}),
}
SPLIT = {"up": Column(), "down": Row(), "query": Column(-2), "out": Row(-3)}


def batches_of(dtype):
    return [jax.tree.map(lambda x: x.astype(dtype), batch) for batch in BATCHES]


def build(layout, tx, hidden=24, dtype=jnp.float32, **options):
    builder, sizes, given = LAYOUTS[layout]
    given = {} if builder is data_parallel else {"min_weight_size": 16, **given}
    mesh = make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    model = Mixed(hidden, dtype)
    model = tensor_parallel(model, SPLIT) if "model" in sizes else model
    batch = batches_of(dtype)[0]
    return builder(model, tx, square_loss, mesh=mesh, batch=batch, **given, **options)


@functools.cache
def one_device(name, hidden=24, dtype=jnp.float32):
    model = Mixed(hidden, dtype)
    return train_on_one_device(model, OPTIMIZERS[name](), batches_of(dtype), square_loss)


def assert_equal(found, expected, bound):
    """Compares losses and parameters, a parameter's numbers relative to its largest."""
    np.testing.assert_allclose(found[1], expected.losses, rtol=bound)
    leaves = jax.tree_util.tree_leaves_with_path(found[0])
    for (path, x), y in zip(leaves, jax.tree.leaves(expected.params), strict=True):
        most = bound * np.abs(y).max()
        np.testing.assert_allclose(x, y, rtol=0, atol=most, err_msg=path_name(path))


def train(program, batches):
    """Returns the parameters of all devices, and the losses."""
    state, losses = train_program(program, batches)
    return program.whole(state)["params"], losses


CASES = [("muon", layout) for layout in LAYOUTS]
CASES += [(name, "fsdp") for name in OPTIMIZERS if name != "muon"]
CASES += [("chain", "hsdp"), ("chain", "fsdp, padded"), ("MultiSteps", "dp")]
FAST = [("muon", "hsdp"), ("chain", "fsdp, padded")]


@pytest.mark.parametrize(("name", "layout"), [slow_unless(FAST, *case) for case in CASES])
def test_three_steps_equal_one_device(devices8, name, layout):
    del devices8
    hidden = 28 if "pad" in layout else 24
    program = build(layout, OPTIMIZERS[name](), hidden)
    assert_equal(train(program, BATCHES), one_device(name, hidden), 2e-6)


@pytest.mark.parametrize(("name", "layout"), [slow_unless(FAST[:1], *case) for case in CASES])
def test_three_steps_in_float64_equal_one_device(devices8, name, layout):
    """The rounding of float32 hides no mistake that is smaller."""
    del devices8
    hidden, dtype = 28 if "pad" in layout else 24, jnp.float64
    with jax.enable_x64(True):
        program = build(layout, OPTIMIZERS[name](), hidden, dtype)
        found = train(program, batches_of(dtype))
        assert_equal(found, one_device(name, hidden, dtype), 1e-12)


# A model axis, experts and layers in a loop, of a `Transformer`.

TOKENS = np.random.default_rng(0).integers(0, 32, (8, 9), dtype=np.int32)
TEXT = Batch(TOKENS[:, :-1], TOKENS[:, 1:])


def transformer(split, **fields):
    plain = Transformer(
        vocab_size=32, num_layers=2, hidden_size=16, mlp_size=32, num_heads=2, split=split
    )
    return with_fields(plain, **fields)


def kernels(params):
    """Returns the dims of a `Transformer`'s kernels, counted from the end; experts are a batch.

    Of an adapter, `lora_b` is a matrix.
    """

    def dims(path, x):
        # The experts' arrays are in boxes on one device.
        names = path_name(path).removesuffix("/value").split("/")
        if names[-1] not in ("kernel", "lora_b"):
            return Dims(-2, -1) if "experts" in names and names[-1] != "router" else None
        if names[-2] in ("query", "key", "value"):
            return Dims(-3, (-2, -1))
        is_joined = "attention" in names and names[-1] == "kernel"
        return Dims((-3, -2), -1) if is_joined else Dims(-2, -1)

    return jax.tree_util.tree_map_with_path(dims, params)


# Adam, which has the other parameters, divides by gradients. With a smaller number it enlarges the
# rounding of small ones: with the rows of the batch in another order, plain optax is off by 5e-6 on
# one device.
EPSILON = 1e-3
SCANNED = {"scan_layers": True}
SEQUENCES = {"data": 4, "context": 2}
MODELS = {
    "fsdp x model": (SCANNED, {"data": 4, "model": 2}, {}),
    "fsdp x model, unrolled": ({"scan_layers": False}, {"data": 4, "model": 2}, {}),
    "experts": (
        {**SCANNED, "num_experts": 4, "expert_axis": "expert"},
        {"data": 4, "expert": 2},
        {"axis_name": ("data", "expert")},
    ),
    "frozen": (SCANNED, {"data": 8}, {"trainable": ("*/attention/*", "head")}),
    "lora": (SCANNED, {"data": 4, "model": 2}, {}),
    "pipeline": (
        SCANNED,
        {"data": 4, "stage": 2},
        {"pipeline": Pipeline(), "num_minibatches": 2},
    ),
    **{
        how: (
            {**SCANNED, "context_axis": "context", "context_attention": how},
            SEQUENCES,
            {"context_axis": "context"},
        )
        for how in ("ring", "ulysses")
    },
}


def model_of(name, *, plain=False):
    """Returns a model; `plain` for one device, without axes."""
    fields, split = MODELS[name][0], Split("model")
    if plain:
        fields = {field: x for field, x in fields.items() if not field.endswith("_axis")}
        fields, split = {**fields, "context_attention": "auto"}, Split()
    model = transformer(split, **fields)
    return lora(model, {"*/attention/*": 4, "*/mlp/*": 4}, alpha=4) if name == "lora" else model


def muon_of_kernels(parameters):
    """Makes Muon of a model's kernels; of an adapter, the rule is the config's."""
    is_adapted = any(x.path.endswith("lora_b") for x in jax.tree.leaves(parameters))
    dims = muon_dims(parameters, ("*lora_b",)) if is_adapted else kernels
    return optax.contrib.muon(0.02, eps=EPSILON, muon_weight_dimension_numbers=dims)


def plain_muon(name):
    """Makes the same for plain optax, which takes no step with frozen parameters."""
    trained = {"lora": ("lora_",), "frozen": ("attention/", "head")}.get(name, ("",))

    def are_frozen(params):
        def is_frozen(path, x):
            return not any(words in path_name(path) for words in trained)

        return jax.tree_util.tree_map_with_path(is_frozen, params)

    tx = optax.contrib.muon(0.02, eps=EPSILON, muon_weight_dimension_numbers=kernels)
    return optax.chain(tx, optax.masked(optax.set_to_zero(), are_frozen))


def build_transformer(name, loss=language_model_loss):
    _, sizes, options = MODELS[name]
    options = {"min_weight_size": 64, **options}
    mesh = make_mesh(sizes)
    return fsdp(model_of(name), muon_of_kernels, loss, mesh=mesh, batch=TEXT, **options)


def plain_transformer(name, number, loss=language_model_loss):
    model = model_of(name, plain=True)
    return train_on_one_device(model, plain_muon(name), [TEXT] * number, loss)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_transformer_takes_the_steps_of_one_device(devices8, name):
    del devices8
    program, expected = build_transformer(name), plain_transformer(name, 3)
    # `lora_b` begins with zeros, so it is a sum of updates, whose rounding Muon enlarges.
    assert_equal(train(program, [TEXT] * 3), expected, 4e-6 if name == "lora" else 2e-6)
    functions = matrix_functions(program)
    assert functions.left == {}
    assert any(group.exchanged for group in functions.groups)


def given_gradients(params):
    """Returns numbers that are like parameters, and full of rank."""
    return jax.tree.map(lambda x: noise(None, x.shape) + 0.01, params)


def loss_with_given_gradients(params, apply_fn, batch, rng):
    params = nn.unbox(params)
    of_each = jax.tree.map(lambda x, g: (x * g).sum(), params, given_gradients(params))
    total = jnp.stack(jax.tree.leaves(of_each)).sum()
    return total, {"loss": (total, 1)}


WITH_WHOLE_PARAMETERS = [name for name in MODELS if name not in ("lora", "pipeline")]


@pytest.mark.parametrize("name", [slow_unless([("experts",)], x) for x in WITH_WHOLE_PARAMETERS])
def test_the_update_of_equal_gradients_is_that_of_optax(devices8, name):
    """Without the rounding of sums over examples, which Muon's iteration enlarges."""
    del devices8
    program = build_transformer(name, loss_with_given_gradients)
    expected = plain_transformer(name, 2, loss_with_given_gradients)
    assert_equal(train(program, [TEXT] * 2), expected, 1e-6)


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
