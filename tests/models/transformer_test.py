"""The transformer: who sees whom, what its options change and what they leave as it is."""

import functools
import math
import time

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.layers import SplitDense
from manualpar.models import Attention, Rotary, RotaryScaling, Transformer, flops_per_token
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.flat_fields import with_fields
from manualpar.models.rotary import rotary_angles, rotate
from manualpar.models.transformer import REMAT_POLICIES, layer_place, layers_by_window, window_of
from tests.one_device import train_on_one_device, train_program

BOS = 15
SMALL = Transformer(
    vocab_size=16, num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, mlp_size=24
)
UNROLLED = SMALL.clone(scan_layers=False)
# Two documents and the end of one before them.
PACKED = jnp.array([[3, 1, BOS, 4, 1, 5, BOS, 9, 2]], jnp.int32)


@functools.cache
def _init(model):
    tokens = jnp.zeros((1, 4), jnp.int32)
    variables = jax.jit(lambda key: model.init({"params": key}, tokens, train=False))
    return nn.unbox(variables(jax.random.key(0))["params"])


@functools.cache
def _params(model):
    """Parameters of the model's shapes, about as large as it makes them; nothing compiles."""
    rng = np.random.default_rng(0)

    def draw(path, x):
        names = [entry.key for entry in path]
        fan_in = {"scale": 0, "embedding": 1}.get(names[-1], x.shape["layers" in names])
        noise = rng.normal(size=x.shape) * fan_in**-0.5 if fan_in else np.ones(x.shape)
        return jnp.asarray(noise, x.dtype)

    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    return jax.tree_util.tree_map_with_path(draw, nn.unbox(variables["params"]))


def _tokens(shape=(2, 8), seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, BOS, shape), jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, tokens):
    return model.apply({"params": params}, tokens, train=False)


def _loss(model, params, tokens):
    batch = Batch(inputs=tokens, labels=jnp.roll(tokens, -1, axis=1))
    return language_model_loss(params, model.apply, batch, jax.random.key(1))[0]


@functools.partial(jax.jit, static_argnums=0)
def _grads(model, params, tokens):
    return jax.grad(functools.partial(_loss, model))(params, tokens)


def _stack(params):
    """An unrolled model's parameters as a scanned one has them."""
    names = [name for name in params if name.startswith("layer_")]
    layers = [params[f"layer_{index}"] for index in range(len(names))]
    others = {name: tree for name, tree in params.items() if name not in names}
    return {**others, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def _influences(model, tokens):
    """`[S, S]`: the largest derivative of a logit (first) by what its layers begin with (last)."""
    params = _params(model)

    def logits(noise_SD):
        def add_noise(next_fun, args, kwargs, context):
            if context.module.name == "layer_0":
                args = (args[0] + noise_SD[None], *args[1:])
            return next_fun(*args, **kwargs)

        with nn.intercept_methods(add_noise):
            # Not what is compiled already, without the noise.
            return model.apply({"params": params}, tokens)[0]

    jacobian_SVSD = jax.jit(jax.jacobian(logits))(jnp.zeros((tokens.shape[1], model.hidden_size)))
    return np.abs(jacobian_SVSD).max(axis=(1, 3))


def test_a_later_token_moves_no_earlier_logit_and_every_earlier_one_does():
    influences = _influences(UNROLLED.clone(dtype="bfloat16", remat="dots"), PACKED)
    causal = np.tril(np.ones_like(influences, dtype=bool))
    np.testing.assert_array_equal(influences[~causal], 0)
    assert (influences[causal] > 0).all()


@pytest.mark.parametrize("fields", [{}, {"num_experts": 2, "capacity_factor": 0.0}])
def test_parameters_and_tokens_may_be_numpy_arrays(fields):
    model, tokens = with_fields(UNROLLED, num_layers=1, **fields), np.asarray(PACKED)
    params = jax.device_get(_params(model))
    # Within, no argument is traced, as outside of jax.jit.
    logits = jax.eval_shape(lambda: model.apply({"params": params}, tokens))
    assert logits.shape == (*tokens.shape, model.vocab_size)


@pytest.mark.slow
def test_a_token_moves_no_logit_of_another_document():
    influences = _influences(UNROLLED.clone(bos_token=BOS), PACKED)
    document = np.cumsum(np.asarray(PACKED[0]) == BOS)
    visible = np.tril(document[:, None] == document[None, :])
    assert visible.sum() == 3 + 10 + 6
    np.testing.assert_array_equal(influences[~visible], 0)
    assert (influences[visible] > 0).all()


@pytest.mark.slow
def test_a_document_is_the_same_wherever_it_lies():
    model = SMALL.clone(bos_token=BOS)
    params = _params(model)
    packed = _logits(model, params, PACKED)
    for begin, end in ((0, 2), (2, 6), (6, 9)):
        alone = _logits(model, params, PACKED[:, begin:end])
        chex.assert_trees_all_close(packed[:, begin:end], alone, rtol=1e-4, atol=1e-5)
    without = _logits(model.clone(bos_token=-1), params, PACKED)
    assert not np.allclose(packed[:, 2:], without[:, 2:], atol=1e-2)


def test_attention_scores_depend_on_differences_of_positions_only():
    query, key = jax.random.normal(jax.random.key(0), (2, 8))
    angles = rotary_angles(jnp.arange(6), 8, base=100.0)

    def everywhere(x):
        return rotate(jnp.broadcast_to(x, (1, 6, 1, 8)), angles)[0, :, 0]

    scores = np.asarray(everywhere(query) @ everywhere(key).T)
    assert scores[0, 0] == pytest.approx(float(query @ key), rel=1e-5)
    for offset in range(-5, 6):
        diagonal = np.diagonal(scores, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    assert len(np.unique(scores[0].round(3))) == 6


def test_rotations_are_those_of_the_paper_in_the_dtype_of_what_is_turned():
    angles = rotary_angles(jnp.arange(3), 4, base=100.0)
    np.testing.assert_allclose(angles, [[0, 0], [1, 0.1], [2, 0.2]], rtol=1e-6)
    x = jnp.array([1.0, 0.0, 0.0, 2.0]).reshape(1, 1, 1, 4)
    turned = rotate(jnp.broadcast_to(x, (1, 3, 1, 4)), angles)[0, 2, 0]
    # Feature 0 turns with 2 by the first angle, 1 with 3 by the second.
    expected = [math.cos(2), -2 * math.sin(0.2), math.sin(2), 2 * math.cos(0.2)]
    np.testing.assert_allclose(turned, expected, rtol=1e-5)
    chex.assert_type(rotate(x.astype(jnp.bfloat16), angles[:1]), jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat", ["full", *(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "dots"))]
)
def test_scanned_and_unrolled_are_the_same_model(remat):
    unrolled, scanned = (
        SMALL.clone(scan_layers=scan, remat=remat, num_layers=3, bos_token=BOS)
        for scan in (False, True)
    )
    params = _params(unrolled)
    chex.assert_trees_all_equal_shapes(_stack(params), _params(scanned))
    chex.assert_trees_all_close(
        _logits(unrolled, params, PACKED), _logits(scanned, _stack(params), PACKED), rtol=1e-5
    )
    grads = _grads(unrolled, params, PACKED)
    scanned_grads = _grads(scanned, _stack(params), PACKED)
    chex.assert_trees_all_close(_stack(grads), scanned_grads, rtol=1e-4, atol=1e-7)


def test_layers_of_a_scanned_model_begin_differently():
    kernel = _init(SMALL)["layers"]["mlp"]["up"]["kernel"]
    assert not np.allclose(kernel[0], kernel[1], atol=0.1)


def test_grouped_heads_are_heads_with_the_same_keys_and_values():
    grouped, full = UNROLLED, UNROLLED.clone(num_kv_heads=4)
    params = _params(grouped)
    repeated = jax.tree_util.tree_map_with_path(
        lambda path, x: (
            jnp.repeat(x, 2, axis=1) if {"key", "value"} & {entry.key for entry in path} else x
        ),
        params,
    )
    chex.assert_trees_all_close(
        _logits(grouped, params, PACKED), _logits(full, repeated, PACKED), rtol=1e-5, atol=1e-6
    )
    for model in (full, full.clone(num_kv_heads=0)):
        variables = jax.eval_shape(model.init, jax.random.key(0), PACKED)
        chex.assert_trees_all_equal_shapes(repeated, nn.unbox(variables["params"]))


@pytest.mark.slow
def test_a_tied_head_is_the_embedding():
    tied, untied = SMALL.clone(tied_head=True), SMALL
    params = _params(tied)
    assert "head" not in params
    both = {**params, "head": params["embedding"].T}
    chex.assert_trees_all_close(
        _logits(tied, params, PACKED), _logits(untied, both, PACKED), rtol=1e-6, atol=1e-6
    )
    grads = _grads(tied, params, PACKED)
    of_both = _grads(untied, both, PACKED)
    expected = of_both["embedding"] + of_both["head"].T
    chex.assert_trees_all_close(grads["embedding"], expected, rtol=1e-5, atol=1e-7)


def _kept(model, params, tokens):
    """The shapes of what the forward pass keeps for the backward one."""
    vjp = jax.eval_shape(lambda p: jax.vjp(lambda p: _loss(model, p, tokens), p)[1], params)
    return [x.shape for x in jax.tree.leaves(vjp)]


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_remat_changes_what_is_kept_and_no_value(scan_layers):
    model = SMALL.clone(scan_layers=scan_layers)
    params, tokens = _params(model), _tokens((2, 10))
    kept, grads = {}, {}
    for remat in REMAT_POLICIES:
        clone = model.clone(remat=remat)
        kept[remat] = _kept(clone, params, tokens)
        grads[remat] = _grads(clone, params, tokens)
    sizes = {remat: sum(map(math.prod, shapes)) for remat, shapes in kept.items()}
    assert sizes["full"] < sizes["dots"] < sizes["none"]
    # Attention's scores and probabilities, and the hidden features of the MLP.
    assert not any(s.count(10) > 1 for shapes in kept.values() for s in shapes)
    hidden = {
        name: any(s[-2:] in ((10, 24), (20, 24)) for s in shapes) for name, shapes in kept.items()
    }
    assert hidden == {"none": True, "dots": True, "full": False}
    chex.assert_trees_all_close(grads["none"], grads["dots"], rtol=1e-4, atol=1e-7)
    chex.assert_trees_all_close(grads["none"], grads["full"], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16])
def test_computed_in_a_dtype_with_parameters_and_logits_in_float32(dtype):
    model = SMALL.clone(dtype=dtype)
    params, tokens = _params(model), _tokens()
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    seen = []

    def watch(next_fun, args, kwargs, context):
        out = next_fun(*args, **kwargs)
        is_layer = isinstance(context.module, nn.RMSNorm | SplitDense | nn.Dropout)
        if is_layer and context.method_name == "__call__":
            seen.append(out.dtype)
        return out

    with nn.intercept_methods(watch):
        logits = jax.jit(model.apply)({"params": params}, tokens)
    chex.assert_type(logits, jnp.float32)
    assert set(seen) == {jnp.dtype(dtype)}
    exact = _logits(SMALL, params, tokens)
    np.testing.assert_allclose(logits, exact, atol=0.05)
    if dtype != "float32":
        assert (logits != logits.astype(dtype).astype(jnp.float32)).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_is_a_float64_cross_entropy_of_the_logits_with_masks(dtype):
    model = SMALL.clone(dtype=dtype, bos_token=BOS)
    params, tokens = _params(model), _tokens((3, 8))
    mask = np.random.default_rng(1).integers(0, 3, (3, 8)) / 2
    batch = Batch(inputs=tokens, labels=jnp.roll(tokens, -1, axis=1), mask=jnp.asarray(mask))
    loss_fn = jax.jit(language_model_loss, static_argnums=1)
    loss, metrics = loss_fn(params, model.apply, batch, jax.random.key(0))
    logits = np.asarray(_logits(model, params, tokens), np.float64)
    chosen = np.take_along_axis(logits, np.asarray(batch.labels)[..., None], axis=-1)[..., 0]
    losses = np.log(np.exp(logits).sum(-1)) - chosen
    assert loss == pytest.approx((losses * mask).sum() / mask.sum(), rel=1e-6)
    assert metrics["loss"] == (pytest.approx((losses * mask).sum(), rel=1e-6), mask.sum())


def test_every_kind_of_attention_is_the_same_function():
    model = SMALL.clone(bos_token=BOS)
    params, tokens = _params(model), _tokens((2, 10))
    grads = [_grads(with_fields(model, attention=kind), params, tokens) for kind in ("", "xla")]
    chex.assert_trees_all_close(*grads, rtol=1e-4, atol=1e-6)


def test_windows_and_chunks_hide_what_is_outside_and_a_cap_bounds_scores():
    model = with_fields(SMALL, num_layers=1, attention_window=3)
    params, tokens = _params(model), _tokens((1, 8))
    other = tokens.at[0, 0].add(1) % model.vocab_size
    before, after = (_logits(model, params, x)[0] for x in (tokens, other))
    differs = (jnp.abs(before - after) > 1e-6).any(-1)
    assert differs.tolist() == [True] * 3 + [False] * 5
    assert flops_per_token(model, 100) == flops_per_token(with_fields(model, attention_window=0), 3)
    chunked = with_fields(model, attention_window=0, attention_chunk=5)
    before_chunk, after_chunk = (_logits(chunked, params, x)[0] for x in (tokens, other))
    differs = (jnp.abs(before_chunk - after_chunk) > 1e-6).any(-1)
    assert differs.tolist() == [True] * 5 + [False] * 3
    assert flops_per_token(chunked, 100) == flops_per_token(chunked, 5)
    assert flops_per_token(chunked, 3) == flops_per_token(model, 3)
    capped = _logits(with_fields(model, attention_soft_cap=0.1), params, tokens)[0]
    assert jnp.abs(before - capped).max() > 1e-3


def test_attention_that_cannot_run_is_refused_but_its_parameters_can_be_made():
    model = with_fields(SMALL, attention="cudnn")
    with pytest.raises(ValueError, match=r"config.model.attention.* 'cudnn', and the devices"):
        jax.eval_shape(model.apply, {"params": _params(model)}, _tokens((2, 8)))


@pytest.mark.slow
def test_weights_begin_as_documented():
    model = Transformer(vocab_size=512, num_layers=8, hidden_size=256, num_heads=8, mlp_size=768)
    params = _init(model)
    layers = params["layers"]
    deviations = {
        "embedding": (params["embedding"], 1),
        "head": (params["head"], 256**-0.5),
        "query": (layers["attention"]["query"]["kernel"], 256**-0.5),
        "value": (layers["attention"]["value"]["kernel"], 256**-0.5),
        "out": (layers["attention"]["out"]["kernel"], (256 * 16) ** -0.5),
        "gate": (layers["mlp"]["gate"]["kernel"], 256**-0.5),
        "down": (layers["mlp"]["down"]["kernel"], (768 * 16) ** -0.5),
    }
    for name, (weights, expected) in deviations.items():
        assert float(weights.std()) == pytest.approx(expected, rel=0.02), name
    tied = _init(model.clone(tied_head=True))
    assert float(tied["embedding"].std()) == pytest.approx(256**-0.5, rel=0.02)


def _multiplied(jaxpr):
    """The floating point operations of all products in an unrolled program."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * eqn.outvars[0].aval.size * math.prod(shape[dim] for dim in contracted)
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            total += _multiplied(inner) if hasattr(inner, "eqns") else 0
    return total


@pytest.mark.parametrize("fields", [{}, {"tied_head": True}, {"num_kv_heads": 0, "head_size": 6}])
def test_operations_of_a_token_are_those_of_the_program_and_of_its_weights(fields):
    model = with_fields(UNROLLED, **fields, attention="xla")  # Which computes nothing again.
    params, tokens = _params(model), _tokens((3, 8))
    program = jax.make_jaxpr(jax.grad(lambda params: _loss(model, params, tokens)))(params)
    assert flops_per_token(model, 8) == _multiplied(program.jaxpr) / tokens.size
    weights = sum(
        x.size
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if "scale" not in str(path) and ("embedding" not in str(path) or model.tied_head)
    )
    attention = 12 * model.num_layers * model.num_heads * (model.head_size or 4)
    assert flops_per_token(model, 100) == 6 * weights + 100 * attention


@pytest.mark.parametrize("token", [-1, 16])
def test_a_token_out_of_the_vocabulary_is_not_taken_for_another(token):
    tokens = jnp.concatenate([PACKED, PACKED.at[0, 3].set(token)])
    logits = _logits(SMALL, _params(SMALL), tokens)
    np.testing.assert_array_equal(np.isnan(logits).any(axis=(1, 2)), [False, True])


def test_dropout_is_for_training_and_follows_its_key():
    model = SMALL.clone(dropout_rate=0.5)
    params = _params(model)

    @jax.jit
    def logits(seed):
        rngs = {"dropout": jax.random.key(seed)}
        return model.apply({"params": params}, PACKED, train=True, rngs=rngs)

    chex.assert_trees_all_equal(logits(1), logits(1))
    assert not np.allclose(logits(1), logits(2))
    assert not np.allclose(logits(1), _logits(model, params, PACKED))
    without = _logits(model.clone(dropout_rate=0.0), params, PACKED)
    chex.assert_trees_all_equal(_logits(model, params, PACKED), without)


BUILDERS = {"fsdp": fsdp, "zero": zero, "hsdp": hsdp, "data_parallel": data_parallel}


def _every_strategy():
    for name in BUILDERS:
        for mode in ("manual", "auto", "explicit"):
            for remat in ("none", "dots"):
                yield pytest.param(name, mode, remat, id=f"{name}-{mode}-{remat}")


def _packed_batches():
    for seed in range(3):
        tokens = np.array(_tokens((16, 9), seed))
        tokens[:, [2, 6]] = BOS
        mask = np.ones((16, 8), np.float32)
        mask[:2], mask[5, 4:] = 0, 0.5  # The first device has nothing but padding.
        yield Batch(inputs=tokens[:, :-1], labels=tokens[:, 1:], mask=mask)


def _build(name, model, batch, mesh, **options):
    if name != "data_parallel":
        options["min_weight_size"] = 0
    return BUILDERS[name](
        model, optax.sgd(0.1), language_model_loss, mesh=mesh, batch=batch, **options
    )


def _train_and_compare(program, model, batches):
    expected = train_on_one_device(model, optax.sgd(0.1), batches, language_model_loss, train=False)
    state, losses = train_program(program, batches)
    np.testing.assert_allclose(losses, expected.losses, rtol=2e-5)
    params, expected_params = jax.device_get((state.params, nn.unbox(expected.params)))
    chex.assert_trees_all_close(params, expected_params, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode", "remat"), list(_every_strategy()))
def test_it_trains_under_every_strategy_as_on_one_device(devices8, name, mode, remat):
    model = SMALL.clone(remat=remat, bos_token=BOS, tied_head=name == "zero")
    batches = list(_packed_batches())
    mesh = make_mesh({"replica": 2, "data": 4} if name == "hsdp" else {"data": 8}, devices8)
    program = _build(name, model, batches[0], mesh, mode=mode)
    if name in ("fsdp", "hsdp"):
        assert all(len(placement.spec) for _, placement in program.parameters)
        # Never along the layers that a loop runs over.
        assert program.layout.params["layers"]["mlp"]["up"]["kernel"][0] is None
    _train_and_compare(program, model, batches)


def _build_with_rules(devices, batch, *, scan_layers, mode):
    names = ("vocab", "heads", "mlp")
    return _build(
        "fsdp",
        SMALL.clone(annotate=True, scan_layers=scan_layers),
        batch,
        make_mesh({"data": 4, "model": 2}, devices),
        rules=(("embed", "data"), ("kv_heads", None), *((name, "model") for name in names)),
        mode=mode,
    )


@pytest.mark.parametrize("scan_layers", [True, False])
def test_its_dimensions_have_names_for_rules(devices8, scan_layers):
    batch = next(_packed_batches())
    program = _build_with_rules(devices8, batch, scan_layers=scan_layers, mode="manual")
    layout = program.layout.params
    assert layout["embedding"] == P("model", "data")
    assert layout["head"] == P("data", "model")
    assert layout["final_norm"]["scale"] == P("data")
    layer, loop = (layout["layers"], (None,)) if scan_layers else (layout["layer_0"], ())
    assert layer["mlp_norm"]["scale"] == P(*loop, "data")
    assert layer["attention"]["query"]["kernel"] == P(*loop, "data", "model", None)
    for name in ("key", "value"):
        assert layer["attention"][name]["kernel"] == P(*loop, "data", None, None)
    assert layer["attention"]["out"]["kernel"] == P(*loop, "model", None, "data")
    assert layer["mlp"]["gate"]["kernel"] == P(*loop, "data", "model")
    assert layer["mlp"]["down"]["kernel"] == P(*loop, "model", "data")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["manual", "auto"])
@pytest.mark.parametrize("scan_layers", [True, False])
def test_it_trains_by_rules_as_on_one_device(devices8, mode, scan_layers):
    batches = list(_packed_batches())
    program = _build_with_rules(devices8, batches[0], scan_layers=scan_layers, mode=mode)
    _train_and_compare(program, SMALL.clone(scan_layers=scan_layers), batches)


# -------------------------------------------------------------------------------------------------
# Layers of two kinds: where they lie, what they see, and rotations that are slower.


# Two groups of three layers, and two that are left over.
MODEL = Transformer(
    vocab_size=16,
    num_layers=8,
    hidden_size=8,
    num_heads=2,
    mlp_size=8,
    attention=Attention(window=2, global_every=3),
    rotary=Rotary(local_base=100.0, scaling=RotaryScaling("linear", factor=4.0)),
)
TOKENS = np.random.default_rng(0).integers(0, 16, (2, 9)).astype(np.int32)


def _written_out(model, params):
    """The parameters of a scanned model as one has them whose layers are written out."""
    others = {name: x for name, x in params.items() if not name.startswith("layer")}
    for layer in range(model.num_layers):
        place = layer_place(model, layer)
        own = functools.reduce(lambda tree, name: tree[name], place.path, params)
        if place.entry is not None:
            own = jax.tree.map(lambda x, entry=place.entry: x[entry], own)
        others[f"layer_{layer}"] = own
    return others


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_groups_are_the_same_layers_as_those_written_out(remat):
    scanned = MODEL.clone(remat=remat)
    params = nn.unbox(jax.jit(scanned.init)(jax.random.key(0), TOKENS)["params"])
    assert sorted(params["layers"]) == ["layer_0", "layer_1", "layer_2"]
    assert params["layers"]["layer_1"]["attention"]["query"]["kernel"].shape == (2, 8, 2, 4)

    @functools.partial(jax.jit, static_argnums=0)
    def differentiate(model, params):
        def loss(params):
            return (model.apply({"params": params}, TOKENS) ** 2).mean()

        return jax.value_and_grad(loss)(params)

    value, grads = differentiate(scanned, params)
    one_by_one = MODEL.clone(scan_layers=False)
    expected, of_each = differentiate(one_by_one, _written_out(MODEL, params))
    assert value == pytest.approx(float(expected), rel=1e-5)
    chex.assert_trees_all_close(_written_out(MODEL, grads), of_each, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_only_every_so_many_layers_see_more_than_a_window():
    model = MODEL.clone(num_layers=3, scan_layers=False)
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]
    assert "layers" not in params
    logits, changed = jax.jit(model.apply), TOKENS.copy()
    changed[:, 0] = (changed[:, 0] + 1) % 16
    seen = []
    for layer in (0, 2):
        # The others add nothing.
        quiet = {name: params[name] for name in params if name != f"layer_{layer}"}
        others = {name: x for name, x in quiet.items() if name.startswith("layer_")}
        own = {"params": {**params, **jax.tree.map(jnp.zeros_like, others)}}
        differs = np.abs(logits(own, TOKENS) - logits(own, changed)).max((0, 2)) > 1e-6
        seen.append(int(differs.sum()))
        assert differs[: seen[-1]].all()
    assert seen == [2, 9]


def test_a_token_costs_what_its_layers_see():
    def of(layers):
        model = MODEL.clone(num_layers=layers)
        return flops_per_token(model, 100) - flops_per_token(model, 2)

    # Beyond the window only global layers see more: 12 N H for each position.
    assert [of(layers) for layers in (2, 3, 8)] == [0, 12 * 8 * 98, 2 * 12 * 8 * 98]


def test_scanned_layers_cost_nothing_each_before_anything_is_computed():
    model = MODEL.clone(num_layers=10**9)
    started = time.process_time()
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    assert flops_per_token(model.clone(num_layers=10**8), 100) > 0
    # Walking through these layers took 40 and 35 seconds.
    assert time.process_time() - started < 8
    [kernel] = jax.tree.leaves(params["layers"]["layer_1"]["attention"]["query"])
    assert kernel.shape[0] == 10**9 // 3
    assert sorted(name for name in params if name.startswith("layer_")) == ["layer_999999999"]


@pytest.mark.parametrize("fields", [{}, {"global_every": 0}, {"num_layers": 9}, {"num_layers": 2}])
def test_layers_of_each_kind_are_counted_as_one_by_one(fields):
    model = with_fields(MODEL, **fields)
    counted = dict.fromkeys((2, 0), 0)
    for layer in range(model.num_layers):
        counted[window_of(model, layer)] += 1
    assert layers_by_window(model) == tuple(counted.items())


def test_slow_rotations_keep_what_turns_fast():
    plain = rotary_angles(jnp.arange(4), 8, base=1e4)
    linear = rotary_angles(jnp.arange(4), 8, base=1e4, scaling=RotaryScaling("linear", 8.0))
    np.testing.assert_allclose(linear, plain / 8, rtol=1e-6)
    # In 64 pi positions the pairs turn 32, 3.2, 0.32 and 0.032 times.
    scaling = RotaryScaling("llama3", 8.0, 1.0, 4.0, round(64 * math.pi))
    turns = round(64 * math.pi) / (2 * math.pi) * 10.0 ** -np.arange(4)
    kept = np.clip((turns - 1) / 3, 0, 1)
    assert (kept[0], kept[2], kept[3]) == (1, 0, 0)
    assert 0.5 < kept[1] < 0.8
    scaled = rotary_angles(jnp.arange(4), 8, base=1e4, scaling=scaling)
    np.testing.assert_allclose(scaled, plain * (kept + (1 - kept) / 8)[None], rtol=1e-5)
    # Without pairs between the limits.
    at_once = RotaryScaling("llama3", 8.0, 1.0, 1.0, round(64 * math.pi))
    scaled = rotary_angles(jnp.arange(4), 8, base=1e4, scaling=at_once)
    np.testing.assert_allclose(scaled, plain / np.where(turns > 1, 1, 8)[None], rtol=1e-6)
