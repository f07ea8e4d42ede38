import math
import types
from fractions import Fraction

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec

from manualpar import Batch, abstract_mesh, data_parallel, fsdp, make_mesh
from manualpar.core.model.loss_function import Mean
from manualpar.core.modes.gradients import accumulate
from manualpar.core.parameters.placement import empty_part
from manualpar.core.tracing.jaxprs import all_equations
from manualpar.core.tracing.scopes import blocks_scope
from manualpar.inspect import ledger
from manualpar.inspect.flops import TrafficReader, flops_of, stage_costs
from manualpar.layers.pipeline.executor import PipelineRun
from manualpar.layers.pipeline.schedules import Costs
from manualpar.models.transformer import Transformer, flops_per_token

# What an equation computes is found out by running it on ones: the sum of its result is the number
# of its multiplications of ones with ones.


def multiplications(eqn, group_sizes=None):
    arguments = [jnp.ones(x.aval.shape, jnp.float32) for x in eqn.invars]
    if group_sizes is not None:
        arguments[2] = jnp.asarray(group_sizes)
    params = {**eqn.params, "preferred_element_type": jnp.dtype("float32")}
    out = eqn.primitive.bind(*arguments, **params)
    return int((out[0] if isinstance(out, list) else out).sum())


def products(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    eqns = list(all_equations(jax.make_jaxpr(function)(*arguments).jaxpr))
    return [eqn for eqn in eqns if flops_of(eqn) is not None]


@pytest.mark.parametrize(
    ("einsum", "left", "right"),
    [
        ("ij,jk->ik", (3, 5), (5, 7)),
        ("bij,bkj->bik", (2, 3, 5), (2, 7, 5)),
        ("bsnh,btnh->bnst", (2, 4, 3, 5), (2, 6, 3, 5)),
        ("i,i->", (5,), (5,)),
        ("i,j->ij", (5,), (3,)),
        ("abc,bcd->ad", (2, 3, 4), (3, 4, 5)),
    ],
)
def test_products(einsum, left, right):
    def loss(x, y):
        return jnp.einsum(einsum, x, y, precision="highest").sum()

    found = products(jax.grad(loss, argnums=(0, 1)), left, right)
    assert len(found) in (0, 3)  # An outer product may be written elementwise.
    for eqn in found:
        assert flops_of(eqn) == 2 * multiplications(eqn)
    sizes = dict(zip((einsum.split("->")[0].replace(",", "")), (*left, *right), strict=True))
    forward = products(loss, left, right)
    assert sum(map(flops_of, forward)) == 2 * math.prod(sizes.values()) * len(forward)


@pytest.mark.parametrize(
    "options",
    [
        {"window_strides": (1, 1), "padding": "VALID"},
        {"window_strides": (1, 1), "padding": "SAME"},
        {"window_strides": (2, 3), "padding": "SAME"},
        {"window_strides": (2, 1), "padding": ((0, 3), (2, 1))},
        {"window_strides": (1, 2), "padding": "SAME", "rhs_dilation": (2, 1)},
        {"window_strides": (1, 1), "padding": ((2, 2), (1, 3)), "lhs_dilation": (2, 3)},
        {"window_strides": (2, 2), "padding": "SAME", "feature_group_count": 2},
        {"window_strides": (1, 1), "padding": ((-1, 0), (0, -2))},
    ],
    ids=str,
)
def test_convolutions_without_their_padding_and_holes(options):
    def loss(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **options).sum()

    kernel = (3, 2, 4 // options.get("feature_group_count", 1), 6)
    gradient = jax.grad(lambda x, kernel: loss(x, kernel) ** 2, argnums=(0, 1))
    found = products(gradient, (2, 7, 8, 4), kernel)
    assert len(found) == 3
    assert [flops_of(eqn) for eqn in found] == [2 * multiplications(eqn) for eqn in found]
    assert len({flops_of(eqn) for eqn in found}) == 1  # Each pair of numbers meets in all three.


def _scaled_in_float32(x):
    """Rounds as products of this package do: the scaled numbers are never in memory."""
    return jnp.clip(x.astype(jnp.float32) * (1 / x.max()), -448, 448).astype(jnp.float8_e4m3fn)


@pytest.mark.parametrize(
    "rounded_to", [lambda x: x.astype(jnp.float8_e4m3fn), _scaled_in_float32], ids=["", "scaled"]
)
def test_what_makes_the_operands_of_float8_products_is_traffic(rounded_to):
    """Each array is rounded once, and each of three float8 operands needs a second layout."""
    M, K, N = 16, 32, 64
    dims = (((1,), (0,)), ((), ()))

    def product(dims, *operands):
        narrow = map(rounded_to, operands)
        return jax.lax.dot_general(*narrow, dims, preferred_element_type=jnp.bfloat16)

    @jax.custom_vjp
    def multiply(x, weights):
        return product(dims, x, weights)

    def backward(kept, gradient):
        x, weights = kept
        of_x = product((((1,), (1,)), ((), ())), gradient, weights)
        return of_x, product((((0,), (0,)), ((), ())), x, gradient)

    multiply.defvjp(lambda x, weights: (product(dims, x, weights), (x, weights)), backward)

    def loss(x, weights):
        with jax.named_scope("layer"):
            return multiply(x, weights).astype(jnp.float32).sum()

    arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((M, K), (K, N)))
    found = TrafficReader("test").read(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*arrays).jaxpr)
    changed = [(x.phase, x.change, int(x.traffic)) for x in found if x.change]
    # 2 bytes are read and 1 is written; the second of two products finds the codes of the first.
    rounded = [("forward", 3 * M * K), ("forward", 3 * K * N), ("backward", 3 * M * N)]
    # Their second layout is written with them.
    rounded += [("backward", M * K), ("backward", M * N)]
    assert sorted(x for x in changed if x[1] == "rounded") == sorted(
        (phase, "rounded", size) for phase, size in rounded
    )
    assert [x for x in changed if x[1] == "transposed"] == [("forward", "transposed", 2 * K * N)]
    assert {x.dtype for x in found if x.flops} == {"float8_e4m3fn"}


def test_products_of_groups():
    def loss(x, kernels):
        sizes = jnp.array([2, 0, 6])
        return (jax.lax.ragged_dot(x, kernels, sizes) ** 2).sum()

    found = products(jax.grad(loss, argnums=(0, 1)), (8, 4), (3, 4, 5))
    assert [flops_of(eqn) for eqn in found] == [2 * 8 * 4 * 5] * 3
    assert [multiplications(eqn, [2, 0, 6]) for eqn in found] == [8 * 4 * 5] * 3
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((2,), (2,)), ((0,), (0,))),
        lhs_ragged_dimensions=[1],
        rhs_group_dimensions=[1],
    )

    def batches(x, kernels):
        return jax.lax.ragged_dot_general(x, kernels, jnp.array([[2, 6]] * 3), numbers)

    [eqn] = products(batches, (3, 8, 4), (3, 2, 4, 5))
    assert flops_of(eqn) == 2 * 3 * 8 * 4 * 5


# Attention by blocks.


def attend(heads, length, *, block, is_fused=False, window=None, scope=True):
    """The sum of what splash attention gives, with as many blocks as its scope says."""
    mask = splash.CausalMask((length, length))
    rows = length // block
    blocks = rows * (rows + 1) // 2
    if window:  # Of no more keys than a block has: the diagonal and the blocks beside it.
        mask = splash.LocalMask((length, length), (window - 1, 0), 0)
        blocks = 2 * rows - 1
    backward = None if is_fused else block
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block // 2,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=backward,
        block_kv_dq=backward,
        use_fused_bwd_kernel=is_fused,
    )
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads), block_sizes=sizes, head_shards=1, q_seq_shards=1
    )

    def loss(query, key, value):
        with jax.named_scope(blocks_scope(blocks) if scope else "unknown"):
            return jax.vmap(kernel)(query, key, value).astype(jnp.float32).sum()

    return loss, blocks


def kernels(loss, shape, *, fused_attention=False):
    """FLOPs, dtype and traffic of the kernels of a loss and its gradient, by their names."""
    array = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*[array] * 3)
    reader = TrafficReader("test")
    reader.fused_attention = fused_attention
    found = reader.read(traced.jaxpr)
    assert reader.notes == []
    return {
        product.scope.rpartition("/")[2]: product
        for product in found
        if product.scope.rpartition("/")[2].startswith("splash")
    }


@pytest.mark.parametrize("window", [None, 256])
def test_kernels_of_attention_compute_the_blocks_that_their_mask_leaves(window):
    loss, blocks = attend(6, 1024, block=256, window=window)
    assert blocks == (7 if window else 10)
    found = kernels(loss, (3, 6, 1024, 128))
    # A product of scores, forward two, then three for queries and four for keys and values.
    one = 2 * 3 * 6 * blocks * 256 * 256 * 128
    assert {name: product.flops / one for name, product in found.items()} == {
        "splash_mha_fwd_residuals": 2,
        "splash_mha_dq_no_residuals": 3,
        "splash_mha_dkv_no_residuals": 4,
    }
    assert {product.dtype for product in found.values()} == {"bfloat16"}
    # Queries, keys, values and results; and float32 sums, of 128 numbers a query.
    arrays, sums = 4 * 3 * 6 * 1024 * 128 * 2, 3 * 6 * 1024 * 128 * 4
    traffic = found["splash_mha_fwd_residuals"].traffic
    assert arrays + sums <= traffic < 1.2 * (arrays + sums)
    # Speeds of kernels count two and four.
    counted = kernels(loss, (3, 6, 1024, 128), fused_attention=True)
    assert {x.flops / found[name].flops for name, x in counted.items()} == {Fraction(6, 7)}


def test_a_fused_backward_kernel_computes_five_products():
    loss, blocks = attend(5, 768, block=256, is_fused=True)
    one = 2 * 5 * blocks * 256 * 256 * 128
    found = kernels(loss, (1, 5, 768, 128))
    assert [product.flops / one for product in found.values()] == [2, 5]


def test_a_kernel_that_does_not_say_how_many_blocks_it_computes_counts_its_grid():
    loss, _ = attend(2, 512, block=256, scope=False)
    found = kernels(loss, (1, 2, 512, 128))
    assert found["splash_mha_fwd_residuals"].flops == 2 * 2 * 2 * 512 * 512 * 128


@pytest.mark.parametrize(
    ("layout", "mask", "window", "pairs"),
    [(0, "NO_MASK", None, 64 * 32), (1, "CAUSAL", 0, 64 * 16), (0, "PADDING_CAUSAL", 4, 64 * 4)],
)
@pytest.mark.parametrize(("name", "count"), [("fwd", 2), ("bwd", 5)])
def test_attention_by_cudnn(layout, mask, window, pairs, name, count):
    shapes = [(3, 64, 8, 16), (3, 32, 2, 16)]
    if layout:
        shapes = [(3, 8, 64, 16), (3, 2, 32, 16)]
    eqn = types.SimpleNamespace(
        primitive=types.SimpleNamespace(name=f"dot_product_attention_{name}_wrapper"),
        params={
            "layout": layout,
            "mask_type": types.SimpleNamespace(name=mask),
            "sliding_window_length": window,
        },
        invars=[types.SimpleNamespace(aval=jax.ShapeDtypeStruct(x, jnp.bfloat16)) for x in shapes],
    )
    assert flops_of(eqn) == count * 2 * 3 * 8 * 16 * pairs


def test_scores_of_blocks_are_not_halved_for_a_causal_mask():
    def loss(x):
        with jax.named_scope(blocks_scope(3)):
            return jnp.einsum("bnsh,bnth->bnst", x, x).sum()

    x = jax.ShapeDtypeStruct((2, 3, 16, 4), jnp.float32)
    reader = TrafficReader("test")
    reader.fused_attention = True
    [product, _] = reader.read(jax.make_jaxpr(loss)(x).jaxpr)
    assert product.flops == 2 * 2 * 3 * 16 * 16 * 4 * Fraction(6, 7)
    assert product.traffic == 2 * 2 * 3 * 16 * 4 * 4  # The scores stay on the chip.


# Models.

SIZES = {"vocab_size": 50, "num_layers": 3, "hidden_size": 24, "mlp_size": 40, "head_size": 6}
EXAMPLES, LENGTH = 8, 10
TOKENS = EXAMPLES * LENGTH
ATTENTION = 2 * 2 * 4 * 6 * LENGTH  # Scores and their products with values: four heads of six.
DOWN = 2 * 40 * 24
LAYER = 2 * (2 * 4 * 6 * 24 + 2 * 2 * 6 * 24 + 3 * 24 * 40) + ATTENTION
# By hand: a layer's last product is needed by nobody in its backward pass.
# Attention's result is saved, and its backward pass computes its scores again.
RECOMPUTED = {"none": 0, "dots": 0, "full": 3 * (LAYER - DOWN - ATTENTION)}
AGAIN = 3 * ATTENTION // 2


def make_model(**kwargs):
    return Transformer(**SIZES, num_heads=4, num_kv_heads=2, **kwargs)


def loss_fn(params, apply_fn, batch, rng):
    del rng
    logits = apply_fn({"params": params}, batch.inputs, train=True)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean(-1)
    return loss.mean(), {"loss": (loss.sum(), loss.size)}


def read_gradient(model):
    tokens = jax.ShapeDtypeStruct((EXAMPLES, LENGTH), jnp.int32)
    batch = Batch(inputs=tokens, labels=tokens)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def gradient(params, batch):
        return jax.grad(lambda p: loss_fn(p, model.apply, batch, None)[0])(params)

    return ledger(gradient, params, batch)


@pytest.mark.parametrize("remat", RECOMPUTED)
@pytest.mark.parametrize(
    "scan_layers", [pytest.param(False, marks=pytest.mark.slow), True], ids=["unrolled", "scan"]
)
def test_a_transformer(remat, scan_layers):
    model = make_model(remat=remat, scan_layers=scan_layers)
    phases = read_gradient(model).flops_by_phase()
    per_token = flops_per_token(model, LENGTH) + AGAIN
    assert phases["forward"] + phases["backward"] == TOKENS * per_token
    assert phases["forward"] * 2 + TOKENS * AGAIN == phases["backward"]
    assert phases["forward"] == TOKENS * (3 * LAYER + 2 * 24 * 50)
    assert phases["recomputed"] == TOKENS * RECOMPUTED[remat]
    assert phases["update"] == 0


def test_the_modules_of_a_transformer():
    found = read_gradient(make_model(scan_layers=True, remat="full"))
    modules = found.flops_by_module()
    # What is recomputed is a fourth pass, for all but the last product of a layer.
    weights = {"query": 24 * 24, "key": 24 * 12, "value": 24 * 12, "out": 24 * 24}
    for name, size in weights.items():
        assert modules[f"Transformer/layers/attention/{name}"] == 3 * TOKENS * 4 * 2 * size
    assert modules["Transformer/layers/attention"] == TOKENS * (3 * 3 * ATTENTION + AGAIN)
    assert modules["Transformer/layers/mlp/down"] == 3 * TOKENS * 3 * DOWN
    assert modules["Transformer"] == TOKENS * 3 * 2 * 24 * 50
    assert sum(modules.values()) == found.total_flops
    unrolled = read_gradient(make_model(scan_layers=False, remat="full")).flops_by_module()
    assert (
        sum(n for module, n in unrolled.items() if module.endswith("/query"))
        == (modules["Transformer/layers/attention/query"])
    )


BATCH = Batch(
    inputs=jax.ShapeDtypeStruct((32, LENGTH), jnp.int32),
    labels=jax.ShapeDtypeStruct((32, LENGTH), jnp.int32),
)


@pytest.mark.parametrize(
    ("builder", "options"),
    [
        pytest.param(data_parallel, {"num_minibatches": 2}, marks=pytest.mark.slow),
        (fsdp, {"num_minibatches": 4, "use_scan": True, "min_weight_size": 0}),
        pytest.param(fsdp, {"mode": "auto", "min_weight_size": 0}, marks=pytest.mark.slow),
    ],
    ids=["dp", "fsdp", "auto"],
)
def test_a_device_computes_its_share(devices8, builder, options):
    mesh = make_mesh({"data": 8}, devices8)
    model = make_model(remat="dots")
    program = builder(model, optax.adamw(1e-3), loss_fn, mesh=mesh, batch=BATCH, **options)
    found = ledger(program)
    share = 32 * LENGTH // 8
    phases = found.flops_by_phase()
    per_token = flops_per_token(model, LENGTH) + AGAIN
    assert phases["forward"] + phases["backward"] == share * per_token
    assert phases["recomputed"] == share * RECOMPUTED["dots"]
    assert any("global arrays" in note for note in found.notes) == ("mode" in options)


class Wide(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(64, use_bias=False)(x)


def test_an_optimizer_that_multiplies(devices8):
    batch = Batch(jnp.ones((16, 24)), jnp.ones(16))
    tx = optax.contrib.muon(0.1, ns_steps=5)

    def loss_fn(params, apply_fn, batch, rng):
        loss = apply_fn({"params": params}, batch.inputs, train=True).sum(-1)
        return loss.mean(), {"loss": (loss.sum(), loss.size)}

    program = data_parallel(Wide(), tx, loss_fn, mesh=make_mesh({"data": 8}, devices8), batch=batch)
    phases = ledger(program).flops_by_phase()
    # A round of Newton-Schulz on [24, 64]: X X', a product of two [24, 24], and one with X. Each
    # device does all of it, because there is one matrix to divide.
    rounds = 5 * (2 * 2 * 24 * 24 * 64 + 2 * 24**3)
    assert phases["update"] == rounds
    # No gradient of the inputs is asked for.
    assert phases["forward"] == phases["backward"] == 2 * 2 * 24 * 64


# -------------------------------------------------------------------------------------------------
# What stages compute in a tick, read from a traced step.


B, INTO, D, OUT, L = 2, 3, 4, 7, 8  # Examples, inputs, features, outputs, layers.


def _trace(run: PipelineRun, *, permutes: bool = False):
    """The gradients of a pipeline, whose layers may permute over another axis."""

    def loss(params, collections, batch, rng):
        def layer(x, kernel):
            if permutes:
                x = jax.lax.ppermute(x, "ring", [(0, 1), (1, 0)])
            return x + jnp.tanh(x @ kernel), None

        x, _ = jax.lax.scan(layer, batch @ params["into"], params["layers"])
        total = jnp.square(x @ params["out"]).sum()
        return Mean(total, jnp.ones(())), {"loss": (total, jnp.ones(()))}, collections

    def device(params, batch):
        pair = params, empty_part(params)
        return accumulate(loss, pair, {}, batch, jax.random.key(0), schedule=run)[0]

    mesh = abstract_mesh({"stage": run.num_stages, "ring": 2}, 2 * run.num_stages)
    specs = {"into": PartitionSpec(), "layers": PartitionSpec("stage"), "out": PartitionSpec()}
    varying = jax.tree.map(lambda spec: PartitionSpec(("stage", "ring")), specs)
    on_mesh = jax.shard_map(
        device,
        mesh=mesh,
        in_specs=(specs, PartitionSpec(None, "ring")),
        out_specs=varying,
        check_vma=True,
    )
    shapes = {"into": (INTO, D), "layers": (L, D, D), "out": (D, OUT)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    batch = jax.ShapeDtypeStruct((run.num_microbatches, 2 * B, INTO), "float32")
    return jax.jit(on_mesh).trace(params, batch)


def _run(keep, *, num_stages=2, chunks=2):
    stacked = (False, True, False)
    return PipelineRun("stage", "1f1b", num_stages, chunks, 3, stacked, keep)


BEFORE, TICK_LAYER, AFTER = 2 * B * INTO * D, 2 * B * D * D, 2 * B * D * OUT


@pytest.mark.parametrize("keep", ["inputs", pytest.param("residuals", marks=pytest.mark.slow)])
def test_chunks_and_what_is_around_them(keep):
    run = _run(keep)
    again = 1 if keep == "inputs" else 0  # The F is computed again in the B.
    assert stage_costs(_trace(run), run.table) == Costs(
        forward=2 * TICK_LAYER,
        backward=(2 + again) * 2 * TICK_LAYER,
        before=BEFORE,
        before_backward=2 * BEFORE,  # Once again forward, and the gradient of its parameter.
        after=3 * AFTER,
    )


def test_layers_that_permute_are_computed_by_all_stages_where_one_has_to():
    run = _run("residuals", chunks=1)
    costs = stage_costs(_trace(run, permutes=True), run.table)
    assert (costs.forward, costs.backward) == (4 * TICK_LAYER, 8 * TICK_LAYER)
    assert (costs.before, costs.after) == (BEFORE, 3 * AFTER)


@pytest.mark.slow
def test_one_stage_has_chunks_alone():
    run = _run("residuals", num_stages=1, chunks=1)
    costs = stage_costs(_trace(run), run.table)
    assert costs.before == costs.after == 0
    assert costs.forward + costs.backward == 3 * (8 * TICK_LAYER + BEFORE + AFTER)
