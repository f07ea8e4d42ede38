"""Products in FP8 and int8, ours and other libraries', on every mesh, against one device."""

import functools
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen import fp8_ops

from manualpar import Batch, Pipeline, data_parallel, fsdp, hsdp, lora, make_mesh, quantized, zero
from manualpar.core.mesh.axes import is_axis_bound
from manualpar.core.modes.variable_reduction import OVERWRITTEN
from manualpar.core.parameters.collectives import gather_invariant
from manualpar.core.tracing.jaxprs import all_equations
from manualpar.core.tracing.scopes import GATHER_SCOPE, SEQUENCE_SCOPE
from manualpar.inspect.communication import bytes_by_axes, summed, trace_collectives
from manualpar.inspect.expected_bytes import parameter_collectives, step_bytes
from manualpar.layers import (
    Column,
    Row,
    Vocab,
    enter,
    float8_dot_general,
    int8_dot_general,
    leave,
    tensor_parallel,
)
from manualpar.models import Transformer
from manualpar.models.flat_fields import with_fields
from tests.layers.tensor_parallel.language import VOCAB
from tests.layers.tensor_parallel.language import loss_fn as split_loss
from tests.layers.tensor_parallel.language import make_batch as make_tokens
from tests.models.finetuning.adapted_models import BATCH, by_path, is_adapter, parameters
from tests.one_device import slow, train_program
from tests.tiny import square_loss

WIDTH = 32
INTEROP = "pip install -e '.[interop]'"


class Block(nn.Module):
    product: Any = None

    @nn.compact
    def __call__(self, x, _=None):
        h = nn.gelu(nn.Dense(2 * WIDTH, dot_general_cls=self.product, name="up")(x))
        return x + nn.Dense(WIDTH, dot_general_cls=self.product, name="down")(h), None


class Model(nn.Module):
    kind: str = "loop"
    product: Any = None

    @nn.compact
    def __call__(self, x):
        if self.kind == "loop":
            for index in range(2):
                x, _ = Block(self.product, name=f"block_{index}")(x)
        elif self.kind == "shared":
            block = Block(self.product, name="block")
            x = block(block(x)[0])[0]
            Block(self.product, name="unused")(x)
        else:
            block = nn.remat(Block) if self.kind == "remat" else Block
            options = {"variable_axes": {"params": 0, OVERWRITTEN: 0}, "length": 2}
            x, _ = nn.scan(block, split_rngs={"params": True}, **options)(
                self.product, name="block"
            )(x, None)
        return nn.Dense(WIDTH, name="head")(x)


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


def make_batch(size=48):
    """Examples with outliers, so that a scale of another part of the batch shows."""
    x = np.random.default_rng(0).normal(size=(size, 4, WIDTH)).astype(np.float32)
    x *= np.exp(np.random.default_rng(1).normal(size=(size, 4, 1))).astype(np.float32)
    return Batch(inputs=x, labels=np.sin(2 * x))


def with_the_largest_first():
    """The batch whose first example, of the first device's first minibatch, is the largest."""
    x = make_batch().inputs
    x[0] *= np.abs(x).max() / np.abs(x[0]).max() * 1.1
    return Batch(inputs=x, labels=np.sin(2 * x))


def build(model, devices, *, builder=fsdp, axes=None, loss_fn=square_loss, rate=0.1, **kwargs):
    if builder is not data_parallel:
        kwargs["min_weight_size"] = 1
    mesh = make_mesh(axes or {"data": -1}, devices)
    tx = optax.sgd(rate)
    return builder(model, tx, loss_fn, mesh=mesh, batch=make_batch(), **kwargs)


def traced_collectives(program):
    return trace_collectives(
        program.train_step.trace(program.abstract_state, program.abstract_batch)
    )


def distance(tree, other):
    """The largest distance of two arrays, in parts of the larger array."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)


def einsum():
    """A `dot_general` for `nn.Dense` that is one of flax's products in FP8, `Fp8Einsum`."""
    product = fp8_ops.Fp8Einsum(amax_history_length=4)
    return lambda x, kernel, dims, **kwargs: product(
        "bsd,df->bsf", x, kernel, preferred_element_type=x.dtype
    )


PRODUCTS = {
    "direct": functools.partial(fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=4),
    "fake": functools.partial(fp8_ops.Fp8DotGeneralOp, amax_history_length=4),
    "einsum": einsum,
}
STEPS, RATE = 3, 0.01
RANK = 3


@functools.cache
def train_flax_on_one_device(kind, product):
    """Trains as flax describes it: overwritten variables are replaced by their gradients."""
    model, batch = Model(kind, PRODUCTS[product]), with_the_largest_first()
    inputs, labels = batch.inputs, batch.labels
    key, _ = jax.random.split(jax.random.key(0))
    variables = jax.jit(model.init)(key, inputs)

    def loss(params, scales):
        scales = jax.tree.map(lambda x: jax.lax.convert_element_type(x, fp8_ops.fm32), scales)
        out = model.apply({"params": params, OVERWRITTEN: scales}, inputs)
        losses = jnp.square(out - labels).mean(-1)
        return losses.mean() * losses.size  # As a step weights losses: codes depend on every bit.

    count = inputs.size / WIDTH
    history, step = [], jax.jit(jax.value_and_grad(loss, (0, 1)))
    params, scales = variables["params"], variables[OVERWRITTEN]
    for _ in range(STEPS):
        value, (grads, scales) = step(params, scales)
        params = jax.tree.map(lambda x, g: x - RATE * (g / count), params, grads)
        history.append(jax.device_get((value / count, scales)))
    return history


@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")
@pytest.mark.parametrize(
    ("product", "kind", "builder", "options"),
    [
        ("direct", "shared", fsdp, {"num_minibatches": 2, "use_scan": True}),
        slow("direct", "loop", data_parallel, {}),
        slow("direct", "loop", fsdp, {"num_minibatches": 3}),
        slow("direct", "loop", fsdp, {"axes": {"data": 2, "model": 4}}),
        slow(
            "direct", "loop", fsdp, {"axes": {"data": 4, "context": 2}, "context_axis": "context"}
        ),
        slow("direct", "loop", hsdp, {"axes": {"replica": 2, "data": 4}}),
        slow("direct", "loop", fsdp, {"mode": "auto"}),
        slow("direct", "scan", fsdp, {}),
        slow("direct", "scan", functools.partial(zero, stage=2), {}),
        slow("direct", "remat", fsdp, {"num_minibatches": 2, "use_scan": True}),
        slow("fake", "scan", fsdp, {}),
        slow("einsum", "loop", fsdp, {}),
        slow("einsum", "loop", fsdp, {"axes": {"data": 4, "model": 2}}),
    ],
)
@pytest.mark.every_case
def test_flax_fp8_products_have_the_histories_of_one_device(
    devices8, product, kind, builder, options
):
    """A history has the largest value over all uses, minibatches and devices."""
    model = Model(kind, PRODUCTS[product])
    if "model" in options.get("axes", ()):
        model = tensor_parallel(model, PLAN)
    program = build(model, devices8, builder=builder, rate=RATE, **options)
    state = program.init(jax.random.key(0))
    unused = jax.device_get(state.collections[OVERWRITTEN].get("unused"))
    # After the first step the last bit of a parameter may decide about a code in FP8.
    tolerance = 1e-6
    for loss, scales in train_flax_on_one_device(kind, product):
        state, metrics = program.train_step(state, with_the_largest_first())
        np.testing.assert_allclose(metrics["loss"][0] / metrics["loss"][1], loss, rtol=tolerance)
        found = dict(jax.device_get(state.collections)[OVERWRITTEN])
        # Nothing changes what no loss depends on; plain flax sets it to zero.
        chex.assert_trees_all_equal(found.pop("unused", None), unused)
        expected = {name: x for name, x in scales.items() if name != "unused"}
        chex.assert_trees_all_close(found, expected, rtol=tolerance)
        tolerance = 1e-3


def test_a_pipeline_refuses_products_with_state(devices8):
    with pytest.raises(ValueError, match=r"_overwrite_with_gradient.*expected none in a pipeline"):
        build(
            Model("scan", PRODUCTS["direct"]),
            devices8,
            axes={"data": 4, "stage": 2},
            pipeline=Pipeline(),
        )


RULES = {
    "weights": {"weight_qtype": "int8"},
    "w8a8": {"weight_qtype": "int8", "act_qtype": "int8"},
    "w8a8g8": {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8"},
    "float8": {
        "weight_qtype": "float8_e4m3fn",
        "act_qtype": "float8_e4m3fn",
        "bwd_qtype": "float8_e5m2",
    },
}


def with_qwix(kind, rule, modules="block.*|up|down"):
    """The model with qwix's rule for kernels, but not for the head's."""
    qwix = pytest.importorskip("qwix", reason=INTEROP)
    provider = qwix.QtProvider([qwix.QtRule(module_path=modules, **RULES[rule])])
    if kind != "nnx":
        return qwix.quantize_model(Model(kind), provider)
    inputs = make_batch().inputs[:2]
    return lambda rngs: qwix.quantize_model(NNXModel(rngs), provider, inputs)


def step(model, devices, **options):
    """The parameters after a step."""
    state, _ = train_program(build(model, devices, **options), [make_batch()])
    return jax.device_get(state.params)


@functools.cache
def step_on_one_device(kind, device, rule=None, modules="block.*|up|down"):
    if rule is None:
        return step(NNXModel if kind == "nnx" else Model(kind), [device])
    return step(with_qwix(kind, rule, modules), [device])


PLAN = {"block_*/up": Column(), "block_*/down": Row()}


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # qwix reads old names of flax.
@pytest.mark.parametrize(
    ("kind", "builder", "options"),
    [
        ("loop", data_parallel, {}),
        ("loop", fsdp, {}),
        ("loop", fsdp, {"reshard_after_forward": False}),
        ("loop", fsdp, {"mode": "auto"}),
        ("loop", fsdp, {"num_minibatches": 3}),
        ("loop", hsdp, {"axes": {"replica": 2, "data": 4}}),
        ("loop", fsdp, {"axes": {"data": 4, "model": 2}}),
        ("scan", fsdp, {}),
        ("scan", functools.partial(zero, stage=2), {}),
        ("remat", fsdp, {}),
        ("nnx", fsdp, {}),
    ],
)
def test_qwix_finds_every_weight_that_a_rule_names(devices8, kind, builder, options):
    """With weights quantized alone nothing depends on the split: a weight not found would show.

    Of a kernel whose rows are split each device has its own scale, so such a kernel has no rule.
    """
    is_split = "model" in options.get("axes", ())
    modules = ".*up" if is_split else "block.*|up|down"
    model = with_qwix(kind, "weights", modules)
    if is_split:
        model = tensor_parallel(model, PLAN)
    found = step(model, devices8, builder=builder, **options)
    expected = step_on_one_device(kind, devices8[0], "weights", modules)
    assert distance(found, expected) < 1e-5
    assert distance(step_on_one_device(kind, devices8[0]), expected) > 1e-4


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("rule", ["w8a8", "w8a8g8", "float8"])
@pytest.mark.parametrize(
    ("kind", "axes"),
    [("scan", {"data": 8}), ("nnx", {"data": 8}), ("loop", {"data": 4, "model": 2})],
)
def test_qwix_errs_no_more_on_several_devices(devices8, kind, axes, rule):
    """Activations and gradients have scales of a device's part, so the rounding is another one.

    If layers are split the kernels' rows have such scales too, and the error varies more.
    """

    def error(params):
        exact = jax.tree.leaves(step_on_one_device(kind, devices8[0]))
        pairs = zip(jax.tree.leaves(params), exact, strict=True)
        return np.sqrt(sum(np.square(a - b).sum() for a, b in pairs))

    model = with_qwix(kind, rule)
    params = step(tensor_parallel(model, PLAN) if kind == "loop" else model, devices8, axes=axes)
    expected = error(step_on_one_device(kind, devices8[0], rule))
    assert 0.5 * expected < error(params) < (1.2 if "model" in axes else 1.1) * expected


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["loop", "scan"])
def test_aqt_products_are_those_of_one_device(devices8, kind):
    """AQT draws from the stream `params`, even if it rounds to the nearest code."""
    aqt = pytest.importorskip("aqt.jax.v2.flax.aqt_flax", reason=INTEROP)
    config = pytest.importorskip("aqt.jax.v2.config").dot_general_make(8, 8)
    model = Model(kind, functools.partial(aqt.AqtDotGeneral, config))

    def loss_fn(params, apply_fn, batch, rng):
        def with_key(variables, inputs):
            return apply_fn(variables, inputs, rngs={"params": rng})

        return square_loss(params, with_key, batch, rng)

    found, expected = (
        step(model, devices, loss_fn=loss_fn) for devices in (devices8, devices8[:1])
    )
    assert distance(found, expected) < 1e-5
    assert distance(step_on_one_device(kind, devices8[0]), expected) > 1e-4


OURS = {"float8": lambda: float8_dot_general, "int8": lambda: int8_dot_general}


class Cast(nn.Module):
    """The model in bfloat16, with an exact head."""

    product: Any = None
    kind: str = "loop"

    @nn.compact
    def __call__(self, x):
        return Model(self.kind, self.product)(x.astype(jnp.bfloat16)).astype(jnp.float32)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("kind", "builder", "options"),
    [
        ("scan", fsdp, {"num_minibatches": 2, "use_scan": True}),
        ("shared", fsdp, {}),
        slow("loop", fsdp, {}),
        slow("loop", fsdp, {"reshard_after_forward": False}),
        slow("loop", fsdp, {"communicate_every": "step", "num_minibatches": 2}),
        slow(
            "loop", fsdp, {"axes": {"x": 2, "y": 4}, "axis_name": ("x", "y"), "axis_by_axis": True}
        ),
        slow("loop", fsdp, {"axes": {"data": 4, "model": 2}}),
        slow("remat", fsdp, {"num_minibatches": 3}),
        slow("scan", hsdp, {"axes": {"replica": 2, "data": 4}}),
        slow("bfloat16", fsdp, {"gather_dtype": "bfloat16"}),
    ],
)
def test_a_gather_of_float8_codes_changes_no_bit(devices8, kind, builder, options):
    """A product finds the codes again that were sent. The head's product is exact, so it gets none.

    The bytes are those of the formula: a byte for each number, and the scales.
    """
    model = Cast(OURS["float8"]) if kind == "bfloat16" else Model(kind, OURS["float8"])
    if "model" in options.get("axes", ()):
        model = tensor_parallel(model, PLAN)
    make = functools.partial(build, model, devices8, builder=builder, rate=RATE, **options)
    programs = make(), make(gather_code="float8")
    batches = [make_batch()] * STEPS
    (state, losses), (coded_state, coded_losses) = (train_program(x, batches) for x in programs)
    chex.assert_trees_all_equal(coded_losses, losses)
    chex.assert_trees_all_equal(coded_state.params, state.params)
    exact, coded = (parameter_collectives(traced_collectives(x)) for x in programs)
    of_scales = [x for x in coded if x.kind == "all_reduce" and GATHER_SCOPE in x.scope]
    assert len(of_scales) == 1  # Of all parameters, once for all minibatches.
    assert {str(x.dtype) for x in coded if x.kind == "all_gather"} >= {"float8_e4m3fn"}
    closed = step_bytes(programs[1])
    assert all(x <= closed[axes] for axes, x in bytes_by_axes(coded).items())
    assert sum(closed.values()) < sum(step_bytes(programs[0]).values())
    assert sum(x.times for x in coded) == sum(x.times for x in exact) + 1


class Words(nn.Module):
    """A language model; with `gate` an exact product reads the input of `up` too."""

    dtype: str = "float32"
    gate: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCAB, WIDTH, name="embed")
        float8 = {"dtype": self.dtype, "dot_general": float8_dot_general}
        x = embed(tokens).astype(self.dtype)
        for index in range(2):
            y = nn.RMSNorm(dtype=self.dtype, name=f"norm_{index}")(x)
            h = nn.Dense(2 * WIDTH, **float8, name=f"up_{index}")(y)
            if self.gate:
                h += nn.Dense(2 * WIDTH, dtype=self.dtype, name=f"gate_{index}")(y)
            x += nn.Dense(WIDTH, **float8, name=f"down_{index}")(nn.gelu(h))
        return embed.attend(x).astype(jnp.float32)


def words(**fields):
    plan = {"embed": Vocab(), "up_*": Column(), "down_*": Row()}
    plan |= {"gate_*": Column()} if "gate" in fields else {}
    return tensor_parallel(Words(**fields), plan, sequence=True)


def transformer(**fields):
    sizes = {"vocab_size": VOCAB, "num_layers": 2, "hidden_size": WIDTH, "mlp_size": 2 * WIDTH}
    split = {"split_axis": "model", "sequence_parallel": True, "matmul": "float8"}
    return with_fields(Transformer(**sizes, num_heads=4), **{**split, **fields})


BFLOAT16 = {"dtype": "bfloat16"}


@pytest.mark.optimized  # XLA then leaves out roundings to bfloat16.
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make", "fields", "coded"),
    [
        (words, BFLOAT16, 4),
        slow(transformer, {"remat": "full", **BFLOAT16}, 12),
        slow(transformer, {}, 8),
        slow(transformer, {"scan_layers": False, **BFLOAT16}, 8),
        slow(transformer, {"remat": "dots"}, 12),
        slow(transformer, {"overlap": "dual_batch"}, 16),
        slow(transformer, {"overlap": "ring"}, 0),
        slow(transformer, {"matmul_layers": ("attention/out", "mlp/*")}, 6),
        slow(transformer, {"latent_rank": 8, "latent_rotary_size": 4, "latent_value_size": 8}, 8),
        slow(words, {}, 4),
        slow(lambda: lora(transformer(), {"*": 4}, alpha=4), {}, 0),
        slow(lambda: lora(words(), {"up_*": 4, "down_*": 4}, alpha=4), {}, 0),
    ],
)
def test_a_gather_of_activations_as_codes_changes_no_bit(devices8, make, fields, coded):
    """What sequence parallelism gathers for products in float8, and their results' gradients.

    `coded` counts the gathers. Those that others read too, as adapters do, stay exact.
    """
    batch, model = make_tokens(), make(**fields)
    programs = [
        fsdp(
            model,
            optax.sgd(0.1),
            split_loss,
            mesh=make_mesh({"data": 2, "model": 4}, devices8),
            batch=batch,
            min_weight_size=1,
            gather_dtype=fields.get("dtype"),
            gather_code=code,
        )
        for code in (None, "float8")
    ]
    (state, losses), (coded_state, coded_losses) = (train_program(x, [batch] * 3) for x in programs)
    chex.assert_trees_all_equal(coded_losses, losses)
    chex.assert_trees_all_equal(coded_state.params, state.params)
    exact, found = (
        summed(
            (x.dtype.name, x.times)
            for x in traced_collectives(program)
            if x.kind == "all_gather" and x.purpose == SEQUENCE_SCOPE
        )
        for program in programs
    )
    codes = [found.pop(name, 0) for name in ("float8_e4m3fn", "float8_e5m2")]
    assert sum(codes) == coded
    assert min(codes) > 0 or coded == 0
    assert found.keys() <= exact.keys()


@pytest.mark.every_case
@pytest.mark.parametrize("axes", [{"data": 8}, slow({"data": 2, "model": 4})])
def test_adapters_of_a_quantized_model_stay_exact(devices8, axes):
    """QLoRA: products of the frozen weights are in float8, and none with an adapter is.

    The gradients of adapters are nearly those of one device, as with our products alone.
    """

    def step(matmul, axes, devices):
        base = quantized(transformer(matmul=matmul), {"layers/*kernel": 8}, code="nf4")
        model = lora(base, {"*": RANK}, alpha=RANK)
        options = {"mesh": make_mesh(axes, devices), "batch": BATCH, "min_weight_size": 1}
        program = fsdp(model, optax.sgd(1.0), split_loss, **options)
        state, _ = program.train_step(program.init_from(parameters(model)), BATCH)
        return by_path(program.whole(state)["params"]), program

    def between(one, other):
        found = [np.square(one[x] - other[x]).sum() for x in one if is_adapter(x)]
        return np.sqrt(sum(found))

    several, program = step("float8", axes, devices8)
    (expected, _), (exact, _) = (step(x, {"data": 1}, devices8[:1]) for x in ("float8", ""))
    own_error = between(expected, exact)
    assert between(several, exact) < 1.1 * own_error
    assert between(several, expected) < 0.2 * own_error
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    factors = [
        [x.aval for x in eqn.invars]
        for eqn in all_equations(traced.jaxpr.jaxpr)
        if eqn.primitive.name == "dot_general"
    ]
    in_float8 = [x for x in factors if any("float8" in y.dtype.name for y in x)]
    of_adapters = [x for x in factors if any(RANK in y.shape for y in x)]
    assert len(in_float8) >= 2 * 7  # Of a scanned layer, forward and for the gradients of inputs.
    assert len(of_adapters) >= 7 * 5
    assert not any(x is y for x in in_float8 for y in of_adapters)


def test_what_a_product_reads_exactly_is_not_sent_as_codes(devices8):
    """A head that is tied to a float8 layer would read codes in place of its weights."""

    class Tied(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(WIDTH, dot_general=float8_dot_general, name="tied")
            return layer(x) + x @ layer.variables["params"]["kernel"]

    with pytest.raises(ValueError, match="multiplies no parameter in float8"):
        build(Tied(), devices8, gather_code="float8")
    with pytest.raises(ValueError, match=r"gather_code='float8' with a pipeline"):
        build(
            Model("scan", OURS["float8"]),
            devices8,
            axes={"data": 4, "stage": 2},
            pipeline=Pipeline(),
            gather_code="float8",
        )
    mesh = make_mesh({"data": 2, "model": 4}, devices8)
    options = {"mesh": mesh, "batch": make_tokens(), "gather_code": "float8", "min_weight_size": 1}
    with pytest.raises(ValueError, match=r"gather_dtype=None, .* cast the parameter to a narrower"):
        fsdp(words(**BFLOAT16), optax.sgd(0.1), split_loss, **options)
    with pytest.raises(ValueError, match="only one of their products is in float8, expected both"):
        fsdp(words(gate=True), optax.sgd(0.1), split_loss, **options)


@pytest.mark.parametrize("is_gradient", [False, True], ids=["activations", "gradients"])
def test_activations_that_are_read_exactly_are_not_gathered_as_codes(devices8, is_gradient):
    class Split(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = leave(enter(x, "model"), "model", 1)
            x = enter(x, "model", 1, float8=not is_gradient)
            x = leave(nn.Dense(WIDTH)(x), "model", 1, float8=is_gradient)
            return gather_invariant(x, 1, ("model",)) if is_axis_bound("model") else x

    with pytest.raises(ValueError, match="something else than products in float8 reads them"):
        build(Split(), devices8, axes={"data": 2, "model": 4})


@functools.cache
def train_ours_on_one_device(kind, product, device):
    product = OURS.get(product)
    return train_program(build(Model(kind, product), [device], rate=RATE), [make_batch()])


@pytest.mark.every_case
@pytest.mark.parametrize("product", OURS)
@pytest.mark.parametrize(
    ("kind", "axes", "options"),
    [
        ("scan", {"data": 8}, {"num_minibatches": 2}),
        slow("loop", {"data": 4, "model": 2}, {}),
        slow("scan", {"data": 4, "stage": 2}, {"pipeline": Pipeline(), "num_minibatches": 2}),
        slow("loop", {"data": 4, "context": 2}, {"context_axis": "context"}),
        slow("scan", {"data": 8}, {"mode": "auto"}),
    ],
)
def test_our_products_err_no_more_on_several_devices(devices8, product, kind, axes, options):
    """In float8 a device's scale changes no digit, so the gradient is nearly that of one device."""
    model = Model(kind, OURS[product])
    if "model" in axes:
        model = tensor_parallel(model, PLAN)
    state, _ = train_program(
        build(model, devices8, axes=axes, rate=RATE, **options), [make_batch()]
    )
    expected, _ = train_ours_on_one_device(kind, product, devices8[0])
    exact, _ = train_ours_on_one_device(kind, "", devices8[0])

    def between(one, other):
        differences = jax.tree.map(
            lambda x, y: np.square(x - y).sum(), *jax.device_get((one, other))
        )
        return np.sqrt(sum(jax.tree.leaves(differences)))

    own_error = between(expected.params, exact.params)
    assert between(state.params, exact.params) < 1.1 * own_error
    most = 0.2 if product == "float8" else 1.1
    assert between(state.params, expected.params) < most * own_error
