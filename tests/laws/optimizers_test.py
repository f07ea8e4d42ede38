"""Every optimizer of optax takes the same steps under FSDP as on one device.

The tests search optax for optimizers, so that they include the optimizers of a new release.
`ARGUMENTS` makes the optimizers that need more than a learning rate. `CANNOT` lists the optimizers
that no program can use.
"""

import functools
import inspect
import math
import re
import warnings

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from manualpar import Batch, data_parallel, fsdp, make_mesh
from manualpar.inspect import state_bytes
from tests.one_device import optimize_on_one_device, slow_unless, train_program

LR = 0.01
ADAM, SGD, DESCEND = optax.adam(LR), optax.sgd(LR), optax.scale(-LR)
CLIP = optax.clip_by_global_norm(0.05)
OLD = not hasattr(optax.contrib, "MuonDimensionNumbers")  # Optax 0.2.5.


# A model with parameters that are sharded along dim 0, 1 or 2, and some that are replicated.


def noise(key, shape, dtype=jnp.float32):
    """Returns numbers that give matrices full rank, and compile faster than random bits."""
    return 0.5 * jnp.sin(jnp.arange(math.prod(shape), dtype=dtype) ** 2).reshape(shape)


class Regressor(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(24, kernel_init=noise, name="wide")(x)
        x = nn.LayerNorm(use_bias=False, name="norm")(x)
        x = nn.DenseGeneral((2, 8), use_bias=False, kernel_init=noise, name="heads")(x)
        x = jnp.tanh(x.reshape(x.shape[0], 16))
        x = jnp.tanh(nn.Dense(7, use_bias=False, kernel_init=noise, name="narrow")(x))
        return nn.Dense(3, kernel_init=noise, name="out")(x)


def loss_fn(params, apply_fn, batch, rng):
    # Squared errors, because gradients of a softmax have a singular value of 0. Its singular
    # vector, which GaLore uses, is not unique.
    loss = jnp.square(apply_fn({"params": params}, batch.inputs, train=True) - batch.labels).sum(-1)
    return loss.mean(), {"loss": (loss.sum(), loss.shape[0])}


def make_batch(seed):
    x = np.random.default_rng(seed).normal(size=(32, 12)).astype(np.float32)
    return Batch(inputs=x, labels=np.sin(x[:, :3]) + 2)


BATCHES = tuple(make_batch(seed) for seed in range(3))


@functools.cache
def initial_params():
    init_rng, _ = jax.random.split(jax.random.key(0))
    return jax.jit(Regressor().init)(init_rng, BATCHES[0].inputs, train=False)["params"]


is_matrix = functools.partial(jax.tree.map, lambda x: x.ndim == 2)
is_kernel = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
kernel_or_bias = functools.partial(jax.tree.map, lambda x: "kernel" if x.ndim > 1 else "bias")
square = functools.partial(
    jax.tree.reduce, lambda total, x: total + jnp.vdot(x, x), initializer=0.0
)


def muon_dims(params):
    """Returns the dims that Muon treats as a matrix; it joins the output dims of a heads kernel."""
    dims = optax.contrib.MuonDimensionNumbers
    return jax.tree.map(lambda x: {2: dims(0, 1), 3: dims(0, (1, 2))}.get(x.ndim), params)


def asking_obj_fn(tx):
    """Wraps Sophia, so that it gets the loss as `value_fn`, the name in optax's line searches."""

    def update(updates, state, params=None, *, value_fn, **extra_args):
        return tx.update(updates, state, params, obj_fn=value_fn, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)


# Functions that make the optimizers for which the rules of `make` do not work.

ARGUMENTS = {
    # Their default learning rate is missing or 1, with which parameters would diverge.
    "adafactor": lambda f: f(LR),
    "scale_by_learning_rate": lambda f: f(LR),
    "contrib.schedule_free_sgd": lambda f: f(LR),
    # Their first steps are about a millionth by default, too small to compare in float32.
    "scale_by_distance_over_gradients": lambda f: optax.chain(f(reps_rel=0.1), optax.scale(-1)),
    "contrib.dadapt_adamw": lambda f: f(estim_lr0=0.01),
    "contrib.dog": lambda f: f(1.0, 0.01 if OLD else ("learning_rate", 0.01)),
    "contrib.mechanize": lambda f: f(SGD, s_init=0.1),
    "contrib.prodigy": lambda f: f(estim_lr0=0.01),
    # With the default `eps` they may divide by almost 0, which multiplies the rounding errors.
    "contrib.acprop": lambda f: f(LR, eps=0.01),
    "contrib.scale_by_acprop": lambda f: optax.chain(f(eps=0.01), DESCEND),
    # Its signature allows any extra argument, but it refuses arguments that it does not know.
    "contrib.sam": lambda f: optax.GradientTransformation(
        *f(SGD, optax.chain(optax.contrib.normalize(), optax.sgd(0.1)))
    ),
    # Its learning rate has another name.
    "polyak_sgd": lambda f: f(),
    # With its default rank it would not change the gradients of these small matrices.
    "contrib.galore": lambda f: f(LR, rank=2, update_proj_gap=2),
    # The remaining optimizers have arguments without a default.
    "add_noise": lambda f: optax.chain(f(0.01, 0.55, seed=0), DESCEND),
    "apply_if_finite": lambda f: f(ADAM, 2),
    "chain": lambda f: f(CLIP, ADAM),
    "conditionally_mask": lambda f: f(ADAM, lambda step: step != 1),
    "conditionally_transform": lambda f: optax.chain(f(CLIP, lambda step: step != 1), DESCEND),
    "freeze": lambda f: optax.chain(ADAM, f(is_matrix(initial_params()))),
    "inject_hyperparams": lambda f: f(optax.adamw)(optax.linear_schedule(0.0, 0.1, 3)),
    "inject_stateful_hyperparams": lambda f: f(optax.adamw)(LR),
    "lookahead": lambda f: f(SGD, 2, 0.5),
    "masked": lambda f: optax.chain(
        optax.scale_by_adam(), f(optax.add_decayed_weights(0.1), is_kernel), DESCEND
    ),
    "measure_with_ema": lambda f: f(square, 0.9),
    "monitor": lambda f: optax.chain(f({"square": square}), SGD),
    "multi_transform": lambda f: f(
        {"kernel": optax.lamb(LR), "bias": optax.sgd(LR, momentum=0.9)}, kernel_or_bias
    ),
    "named_chain": lambda f: f(("clip", CLIP), ("sgd", optax.sgd(0.5))),
    "partition": lambda f: f({"kernel": ADAM, "bias": SGD}, kernel_or_bias),
    "scale_by_backtracking_linesearch": lambda f: optax.chain(optax.sgd(1.0), f(8)),
    "scale_by_schedule": lambda f: f(lambda count: -LR / (1 + count)),
    "scale_by_zoom_linesearch": lambda f: optax.chain(optax.sgd(1.0), f(4)),
    "selective_transform": lambda f: f(ADAM, freeze_mask=is_matrix(initial_params())),
    "snapshot": lambda f: optax.chain(f("square", square), SGD),
    "stateless": lambda f: f(lambda updates, params: jax.tree.map(lambda x: -LR * x, updates)),
    "stateless_with_tree_map": lambda f: f(lambda update, param: -LR * update * param),
    "contrib.differentially_private_aggregate": lambda f: f(1.0, 0.1, seed=0),
    "contrib.dpsgd": lambda f: f(LR, 1.0, 0.1, seed=0),
    "contrib.hutchinson_estimator_diag_hessian": lambda f: optax.chain(asking_obj_fn(f()), DESCEND),
    "contrib.scale_by_muon": lambda f: optax.masked(
        optax.chain(f() if OLD else f(weight_dimension_numbers=muon_dims), DESCEND), is_matrix
    ),
    "contrib.schedule_free": lambda f: f(optax.adam(LR, b1=0.0), LR),
    "contrib.sophia": lambda f: asking_obj_fn(f(LR)),
}

# Optimizers that no program can use: the reason, and words of the error when one is built.

CANNOT = {
    "lookahead": ("its parameters are pairs, LookaheadParams", "no attribute 'fast'"),
    "measure_with_ema": ("a part of monitor: what it returns is no update", "adding its updates"),
    "monitor": ("its state has another structure after a step", "measurements"),
    "contrib.differentially_private_aggregate": ("it needs each example's gradient", "batch dim"),
    "contrib.dpsgd": ("it needs each example's gradient", "batch dim"),
}

# Optimizers that users make of several parts of optax.

CHAINS = {
    "adafactor, factored": lambda: optax.adafactor(LR, min_dim_size_to_factor=4, momentum=0.9),
    "adam, plateau": lambda: optax.chain(ADAM, optax.contrib.reduce_on_plateau(0.5, 1, rtol=0.5)),
    "adamw, masked, schedule": lambda: optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10), mask=is_kernel
    ),
    "adamw, MultiSteps": lambda: optax.MultiSteps(optax.adamw(LR), 2).gradient_transformation(),
    "adaptive clip, adam, ema": lambda: optax.chain(
        optax.adaptive_grad_clip(0.05), optax.scale_by_adam(), optax.ema(0.9), DESCEND
    ),
    "clip, momentum, MultiSteps": lambda: optax.MultiSteps(
        optax.chain(CLIP, optax.sgd(0.5, momentum=0.9, nesterov=True)), 2
    ),
}
if not OLD:
    CHAINS["muon, heads"] = lambda: optax.contrib.muon(LR, muon_weight_dimension_numbers=muon_dims)


def find_makers():
    """Returns optax's functions that return a gradient transformation, by name.

    Their annotations or docstrings say what they return.
    """
    makers = {}
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name, function in inspect.getmembers(module, callable):
            function_of = getattr(function, "func", function)  # `nadam` is a partial.
            if inspect.isfunction(function_of) and not name.startswith("_"):
                returned = (function_of.__doc__ or "").partition("Returns:")[2][:200]
                returned += str(function_of.__annotations__.get("return"))
                if "gradienttransformation" in re.sub(r"\s", "", returned).lower():
                    makers[f"{prefix}{name}"] = function
    return makers


MAKERS = find_makers()
FAST = ["contrib.muon", "adafactor, factored", "clip, momentum, MultiSteps"]
SLOW = [name for name in [*MAKERS, *CHAINS] if name not in {*FAST, *CANNOT}]
ELEMENTWISE = ["adagrad", "adam", "adamw", "lion", "masked", "nadam", "partition", "rmsprop"]
ELEMENTWISE += ["sgd", "sign_sgd", "trace", "contrib.schedule_free_adamw"]
# Functions that optax 0.2.5 does not have.
NEW = {"contrib.galore", "freeze", "measure_with_ema", "monitor", "selective_transform", "snapshot"}


def make(name):
    if name in CHAINS:
        return CHAINS[name]()
    function = MAKERS[name]
    parameters = inspect.signature(function).parameters
    required = [key for key, p in parameters.items() if p.default is p.empty]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Deprecated optimizers must work too.
        if name in ARGUMENTS:
            return ARGUMENTS[name](function)
        if "learning_rate" in parameters:
            return function(LR) if required else function()
        if set(required) & {"inner", "tx"}:
            return function(ADAM)
        # The function makes a part of an optimizer. If it needs a number, the number is a decay or
        # the limit of a clip.
        return optax.chain(function(0.05) if required else function(), DESCEND)


def mean_loss(params, batch):
    return loss_fn(params, Regressor().apply, batch, None)[0]


@functools.cache
def reference(name):
    return optimize_on_one_device(make(name), initial_params(), BATCHES, mean_loss)


def assert_close(actual, expected):
    """Asserts that trees differ by no more than float32 sums in another order may differ."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, y), x in zip(leaves, jax.tree.leaves(actual), strict=True):
        if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        # The first term is relative to the largest number of the array. The second is for arrays of
        # differences of parameters, which are no more exact than the parameters.
        atol = 1e-5 * np.abs(y).max(initial=0.0) + 2e-7
        np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


def assert_lies_like_parameters(program):
    """Asserts that the optimizer's arrays for a parameter are sharded like the parameter.

    An array of the optimizer's state is for a parameter if it has the parameter's path and shape.
    """
    params = jax.tree_util.tree_leaves_with_path(program.abstract_state.params)
    for path, x in jax.tree_util.tree_leaves_with_path(program.abstract_state.opt_state):
        for name, parameter in params:
            is_named_so = jax.tree_util.keystr(path).endswith(jax.tree_util.keystr(name))
            if is_named_so and x.shape == parameter.shape:
                assert x.sharding.spec == parameter.sharding.spec, path


def build(mesh, tx, *, builder=fsdp, **kwargs):
    if builder is fsdp:
        kwargs["min_weight_size"] = 16
    return builder(Regressor(), tx, loss_fn, mesh=mesh, batch=BATCHES[0], **kwargs)


@pytest.mark.parametrize("name", FAST + [pytest.param(x, marks=pytest.mark.slow) for x in SLOW])
def test_three_steps_equal_the_single_device(devices8, name):
    with jax.numpy_rank_promotion("allow"):  # scale_by_distance_over_gradients does.
        expected = reference(name)
        program = build(make_mesh({"data": 8}, devices8), make(name))
        state, losses = train_program(program, BATCHES)
    assert_close((state.params, state.opt_state, losses), expected)
    assert_lies_like_parameters(program)
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), expected[0], initial_params())
    assert max(jax.tree.leaves(moved)) > 1e-4 or name == "set_to_zero"  # Far above the tolerance.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "builder"),
    [
        ("lamb", fsdp),
        pytest.param("adafactor, factored", fsdp, marks=pytest.mark.slow),
        ("contrib.muon", fsdp),
        pytest.param("contrib.muon", data_parallel, marks=pytest.mark.slow),
        pytest.param("adamw", fsdp, marks=pytest.mark.slow),
        pytest.param("named_chain", fsdp, marks=pytest.mark.slow),
    ],
)
def test_three_steps_on_two_data_axes(devices8, builder, name):
    mesh = make_mesh({"replica": 2, "data": 4}, devices8)
    program = build(mesh, make(name), builder=builder, axis_name=("replica", "data"))
    state, losses = train_program(program, BATCHES)
    assert_close((state.params, state.opt_state, losses), reference(name))


def test_a_step_that_is_not_finite_on_one_device_is_left_out_on_all(devices8):
    inputs = BATCHES[1].inputs.copy()
    inputs[5] = np.inf
    batches = (BATCHES[0], BATCHES[1].replace(inputs=inputs), BATCHES[2])
    program = build(make_mesh({"data": 8}, devices8), optax.apply_if_finite(ADAM, 2))
    state, _ = train_program(program, batches)
    params, _, _ = optimize_on_one_device(ADAM, initial_params(), batches[::2], mean_loss)
    assert state.opt_state.total_notfinite == 1
    assert_close(state.params, params)


@pytest.mark.parametrize(
    "name", [slow_unless({("lamb",)}, x) for x in ("adam", "lamb", "contrib.muon", "named_chain")]
)
def test_the_tolerance_tells_a_norm_of_a_shard_from_that_of_the_whole(devices8, name):
    tx = make(name)
    specs = build(make_mesh({"data": 8}, devices8), tx).layout.params

    def first_shard(x, spec):
        return x[tuple(slice(x.shape[dim] // 8 if axis else None) for dim, axis in enumerate(spec))]

    @jax.jit
    def step(params, grads):
        return optax.apply_updates(params, tx.update(grads, tx.init(params), params)[0])

    whole = initial_params(), jax.jit(jax.grad(mean_loss))(initial_params(), BATCHES[0])
    alone = step(*(jax.tree.map(first_shard, tree, specs) for tree in whole))
    expected = jax.tree.map(first_shard, step(*whole), specs)
    if name == "adam":  # It computes no norm of a whole array.
        assert_close(alone, expected)
    else:
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            assert_close(alone, expected)


# The expected bytes of the optimizer's state on a device. A device stores 128 of the 856 numbers in
# the parameters: an eighth of wide (288 + 24), norm (24), heads (384) and narrow (112), and all of
# out (21 + 3). 119 of the 128 are in kernels, and 71 in matrices. A number, a count, a coefficient
# and a placeholder have 4 bytes each.
BYTES = {
    "adamw": 4 * (2 * 128 + 1),
    "masked": 4 * (2 * 128 + 1),
    "trace": 4 * 128,
    "clip, momentum, MultiSteps": 4 * (128 + 128 + 2),
    "multi_transform": 4 * (2 * 119 + 1 + (128 - 119)),
    "contrib.muon": 4 * (71 + 1 + 3 + 2 * (128 - 71) + 1),
    "adafactor": 4 * (128 + 1 + 7 * 2),
    # The momentum, the second moments that are not factored, and the factors. Those with two dims
    # are divided, and the others replicated.
    "adafactor, factored": 4 * (128 + (30 + 3) + (16 + 7 + (48 + 16) // 8 + 12 + 24 + 4 * 2) + 2),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_the_optimizer_state_on_a_device(devices8, name):
    program = build(make_mesh({"data": 8}, devices8), make(name))
    assert state_bytes(program.abstract_state.opt_state)[0] == BYTES[name]


def find_collectives(compiled):
    """Returns (shape, kind, details) for every collective of a compiled function."""
    kinds = r" = (.*) ((?:all|collective)-[a-z-]+?|reduce-scatter)(?:-start)?\((.*)"
    return re.findall(kinds, compiled.as_text())


def collectives_of_optimizers(mesh, names):
    """Returns the collectives of optimizers' updates; the details name the optimizer."""
    states = {name: build(mesh, make(name)).abstract_state for name in names}

    def update(states):
        for name, state in states.items():
            with jax.named_scope(name):
                states[name] = state.apply_gradients(grads=state.params)
        return states

    shardings = jax.tree.map(lambda x: x.sharding, states)
    return find_collectives(jax.jit(update, out_shardings=shardings).lower(states).compile())


@pytest.mark.slow
def test_elementwise_optimizers_add_no_collective(devices8):
    mesh = make_mesh({"data": 8}, devices8)
    assert collectives_of_optimizers(mesh, ELEMENTWISE) == []
    assert collectives_of_optimizers(mesh, ["clip_by_global_norm"])


@pytest.mark.slow
def test_a_step_communicates_no_more_for_adamw_than_for_sgd(devices8):
    def communication(tx):
        program = build(make_mesh({"data": 8}, devices8), tx)
        step = program.train_step.lower(program.abstract_state, program.abstract_batch)
        return sorted(found[:2] for found in find_collectives(step.compile()))

    assert communication(CLIP) != communication(SGD) == communication(optax.adamw(LR))


@pytest.mark.parametrize("name", [name for name in CANNOT if name in MAKERS])
def test_what_cannot_work_is_refused(devices8, name):
    _, message = CANNOT[name]
    with pytest.raises(ValueError, match=f"^tx: .*{message}"):
        build(make_mesh({"data": 8}, devices8), make(name))


# Wrappers and chains that may contain an optimizer that refuses extra arguments, such as
# `optax.contrib.sam`. (Its signature allows any extra argument, but it refuses them.)
AROUND = {
    "chain": lambda tx: optax.chain(CLIP, tx, optax.ema(0.9)),
    "multi_transform": lambda tx: optax.multi_transform(
        {"kernel": tx, "bias": SGD}, kernel_or_bias
    ),
    "masked": lambda tx: optax.masked(tx, is_kernel),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda scale: optax.chain(tx, optax.scale(scale))
    )(scale=0.5),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 2),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, LR),
}


@pytest.mark.slow
@pytest.mark.parametrize("around", AROUND)
def test_a_part_of_an_optimizer_may_refuse_extra_arguments(devices8, around):
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    tx = AROUND[around](optax.contrib.sam(SGD, adversary))
    alone = optax.GradientTransformation(*tx)  # So it gets no extra arguments.
    expected = optimize_on_one_device(alone, initial_params(), BATCHES, mean_loss)
    state, losses = train_program(build(make_mesh({"data": 8}, devices8), tx), BATCHES)
    assert_close((state.params, state.opt_state, losses), expected)


def test_an_argument_that_one_part_needs_and_another_refuses_is_named(devices8):
    sam, mesh = optax.contrib.sam(SGD, SGD), make_mesh({"data": 8}, devices8)
    build(mesh, optax.chain(CLIP, sam))
    opaque = optax.contrib.sam(SGD, SGD, opaque_mode=True)
    for tx, words in (
        (
            optax.chain(sam, optax.contrib.reduce_on_plateau()),
            "another part of the optimizer refuses .*'value'",
        ),
        (optax.contrib.sophia(LR), "tx: its update raises ValueError .obj_fn must be provided"),
        (opaque, "tx: its update raises ValueError .grad_fn must be provided"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            build(mesh, tx)


def test_every_optimizer_of_optax_is_found_and_every_name_exists():
    assert {"adam", "nadam", "scale_by_factored_rms", "contrib.dog", "contrib.muon"} <= set(MAKERS)
    assert {*FAST, *SLOW, *CANNOT} >= set(MAKERS)
    assert {*ARGUMENTS, *BYTES, *CANNOT, *ELEMENTWISE, *FAST} - {*MAKERS, *CHAINS} <= NEW
