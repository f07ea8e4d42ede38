"""Quantized parameters in models that know nothing of it, against the same on one device."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import (
    Batch,
    Pipeline,
    fsdp,
    lora,
    make_mesh,
    merge_lora,
    quantized,
    tensor_parallel,
)
from manualpar.inspect import ledger
from manualpar.inspect.communication import total_bytes
from manualpar.models import Experts, Split, Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.finetuning.quantized import NF4, decode, encode
from manualpar.models.flat_fields import nest_fields
from manualpar.quantization.quantized_collectives import quantize
from manualpar.training.checkpoints import Checkpoints
from tests.models.finetuning.adapted_models import (
    ALL_OF_OURS,
    BATCH,
    D8,
    D24,
    OURS,
    PLAN,
    SOMEBODYS,
    STRATEGIES,
    TRANSFORMERS,
    Somebodys,
    by_path,
    check,
    loss_of_logits,
    on,
)
from tests.one_device import slow_unless

BLOCKS = {"*kernel": 4}


def decoded(tree: Any) -> Any:
    """Parameters with kernels in the place of codes and scales."""
    if not isinstance(tree, dict):
        return tree
    found = {name: decoded(x) for name, x in tree.items()}
    for name in [name for name in found if name.endswith("_codes")]:
        plain = name.removesuffix("_codes")
        found[plain] = decode(found.pop(name), found.pop(f"{plain}_scales"))
    return found


def check_adapted(
    model: Any, build: Any, targets: Any, blocks: Any = BLOCKS, code: Any = "int8", **loss: Any
) -> None:
    """The step of a quantized model is that of the model with decoded kernels on one device."""

    def given(params: Any) -> Any:
        return lora(model, targets, alpha=4), decoded(params)

    base = quantized(model, blocks, code=code)
    check(lora(base, targets, alpha=4), build, given=given, **loss)


@pytest.mark.slow
@pytest.mark.parametrize("name", [slow_unless([("fsdp",)], name) for name in STRATEGIES])
def test_a_step_of_somebodys_model_is_that_of_one_device(name):
    check_adapted(Somebodys(), STRATEGIES[name], SOMEBODYS)


OF_OURS = {name: x for name, x in TRANSFORMERS.items() if not name.startswith("latents,")} | {
    "kept": (
        Transformer(**OURS),
        on(
            fsdp,
            {"data": 4, "stage": 2},
            num_minibatches=2,
            pipeline=Pipeline("stage", keep="residuals"),
        ),
    ),
}


@pytest.mark.parametrize("blocks", [{"*kernel": 4}, {"*kernel": 64}], ids=["4", "64"])
@pytest.mark.parametrize("name", [slow_unless((), name) for name in OF_OURS])
def test_a_step_of_our_transformer_is_that_of_one_device(name, blocks):
    model, build = OF_OURS[name]
    check_adapted(model, build, ALL_OF_OURS, blocks, loss_fn=language_model_loss)


@pytest.mark.slow
def test_a_step_of_a_model_with_a_plan_is_that_of_one_device():
    check_adapted(tensor_parallel(Somebodys(), PLAN), on(fsdp, D24), SOMEBODYS)


def build(model: Any, mesh: dict[str, int], loss_fn: Any = loss_of_logits, **options: Any) -> Any:
    options = {"min_weight_size": 0, "pad": True, **options}
    mesh = make_mesh(mesh)
    return fsdp(model, optax.sgd(1.0), loss_fn, mesh=mesh, batch=BATCH, **options)


def float_shapes(program: Any) -> set[tuple[int, ...]]:
    """The shapes of all arrays of floating-point numbers in a training step."""

    def walk(jaxpr: Any) -> Any:
        for eqn in jaxpr.eqns:
            found = (v.aval for v in eqn.outvars if hasattr(v.aval, "dtype"))
            yield from (x.shape for x in found if jnp.issubdtype(x.dtype, jnp.floating))
            for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from walk(inner)

    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    return set(walk(traced.jaxpr.jaxpr))


KEPT = {"reshard_after_forward": False}


@pytest.mark.parametrize("options", [{}, slow_unless((), KEPT)], ids=["again", "kept"])
def test_the_backward_pass_decodes_again(options):
    def shapes(model: Any) -> set[tuple[int, ...]]:
        adapted = lora(model, {"*/mlp/*": 3}, alpha=4)
        return float_shapes(build(adapted, D8, language_model_loss, **options))

    # What a scan keeps of every layer: with a float32 base that is not gathered again, kernels.
    model = Transformer(**{**OURS, "hidden_size": 24})
    kernel = (24, 32)
    stacked = (model.num_layers, *kernel)
    own = shapes(quantized(model))
    assert kernel in own
    assert stacked not in own
    if options:
        assert stacked in shapes(model)


@pytest.mark.slow
def test_kernels_are_encoded_in_shards_and_come_out_of_them_again(devices8):
    base = Somebodys()
    plain = nn.meta.unbox(base.init(jax.random.key(7), BATCH.inputs))["params"]
    programs = [
        build(lora(quantized(model, BLOCKS), SOMEBODYS, alpha=4), mesh, **options)
        for model, mesh, options in (
            (base, {"data": 8}, {}),
            (tensor_parallel(base, PLAN), {"data": 2, "model": 4}, {"frozen_dtype": "bfloat16"}),
        )
    ]
    with pytest.warns(
        UserWarning, match="cast to the dtypes that the program stores .*head/bias from"
    ):
        states = [p.init_from(plain, jax.random.key(1), missing="init") for p in programs]
    expected = by_path(plain)
    for program, state in zip(programs, states, strict=True):
        found = by_path(program.whole(state)["params"])
        for path in [path for path in expected if path.endswith("kernel")]:
            codes, scales = quantize(jnp.asarray(expected[path]), 4)
            np.testing.assert_array_equal(found[f"{path}_codes"], codes, err_msg=path)
            np.testing.assert_array_equal(found[f"{path}_scales"], scales, err_msg=path)
            assert path not in found

    # Codes of one mesh are those of another, whatever the dtype of the scales.
    first, second = programs
    moved = by_path(first.whole(first.init_from(second.whole(states[1])["params"]))["params"])
    same = by_path(first.whole(states[0])["params"])
    for path in [path for path in same if path.endswith(("_codes", "_scales"))]:
        np.testing.assert_array_equal(moved[path], same[path], err_msg=path)

    # Merged, they are kernels that compute the same.
    params = jax.tree.map(jnp.asarray, first.whole(states[0])["params"])
    keys = iter(jax.random.split(jax.random.key(2), 100))
    params = jax.tree.map_with_path(
        lambda path, x: (
            jax.random.normal(next(keys), x.shape) / 4 if path[-1].key == "lora_b" else x
        ),
        params,
    )
    merged = merge_lora(first, first.init_from(params))
    kernel = merged["layers"]["out"]["kernel"]
    assert {x.data.shape for x in kernel.addressable_shards} == {(3, 4, 4, 2)}
    whole = build(base, {"data": 8})
    whole_params = whole.whole(whole.init_from(merged))
    logits = lora(quantized(base, BLOCKS), SOMEBODYS, alpha=4).apply(
        {"params": params}, BATCH.inputs
    )
    np.testing.assert_allclose(base.apply(whole_params, BATCH.inputs), logits, rtol=1e-5, atol=1e-5)


class Stacked(nn.Module):
    """A layer whose copies are stacked along the last dim."""

    @nn.compact
    def __call__(self, tokens_BS: jax.Array, train: bool = False) -> jax.Array:
        x_BSD = nn.Embed(16, 16, name="embed")(tokens_BS)
        each = nn.vmap(
            nn.Dense,
            in_axes=None,
            out_axes=-1,
            variable_axes={"params": -1},
            split_rngs={"params": True},
            axis_size=3,
        )
        return each(16, name="each")(x_BSD).sum(-1)


@pytest.mark.slow
def test_what_a_program_cannot_do_with_codes_is_refused():
    with pytest.raises(ValueError, match="kernel_codes' is int8, expected a floating"):
        build(quantized(Somebodys()), D8)
    with pytest.raises(ValueError, match="a loop stacks a quantized parameter along its"):
        build(quantized(Stacked()), D8, trainable=("embed/*",))
    split = Transformer(**{**OURS, "mlp_size": 24}, split=Split("model"))
    with pytest.raises(ValueError, match=r"up/kernel_scales.*does not divide over the 4 devices"):
        build(quantized(split, {"*/up/kernel": 4}), D24, trainable=("embedding",))


WIDE: dict[str, Any] = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 2, "split_axis": "model"}
MESHES: list[dict[str, int]] = [
    {"data": 4, "model": 2},
    {"data": 2, "model": 4},
    {"model": 8, "data": 1},
    {"data": 2, "stage": 4},
    {"data": 2, "model": 2, "stage": 2},
    {"stage": 4, "model": 2, "data": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize("code", ["int8", "nf4"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_step_is_that_of_one_device_on_every_mesh(mesh, code):
    pipeline = Pipeline("stage") if "stage" in mesh else None
    build = on(fsdp, mesh, num_minibatches=4, pipeline=pipeline)
    model = Transformer(**nest_fields({**OURS, **WIDE}))
    check_adapted(model, build, ALL_OF_OURS, code=code, loss_fn=language_model_loss)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["int8", "nf4"])
def test_kernels_of_experts_are_encoded_where_they_are_named(code):
    model = Transformer(**OURS, experts=Experts(4, axis="expert", capacity_factor=0.0))
    names = {"*kernel": 4} | {f"*/experts/{name}": 8 for name in ("gate", "up", "down")}
    check_adapted(
        model,
        on(fsdp, {"data": 4, "expert": 2}, axis_name=("data", "expert")),
        {"*/attention/*": 2, "*/experts/up": 2, "*/experts/down": 3},
        names,
        code=code,
        loss_fn=language_model_loss,
    )


@pytest.mark.slow
def test_checkpoints_hold_codes_and_go_from_mesh_to_mesh(tmp_path, devices8):
    model = lora(
        quantized(Transformer(**nest_fields({**OURS, **WIDE})), BLOCKS), ALL_OF_OURS, alpha=4
    )
    first, second = (
        build(model, mesh, language_model_loss) for mesh in ({"data": 8}, {"data": 2, "model": 4})
    )
    state = first.init(jax.random.key(0))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(first, state, step=0, extra={})
    with Checkpoints(tmp_path) as checkpoints:
        moved = checkpoints.restore(second, report=lambda line: None).state
    expected, found = (by_path(p.whole(s)) for p, s in ((first, state), (second, moved)))
    assert expected.keys() == found.keys()
    for path, x in expected.items():
        np.testing.assert_array_equal(found[path], x, err_msg=path)


def test_adapters_are_merged_on_typed_meshes(devices8):
    """Decoding takes automatic axes, whatever the mesh has."""
    axis_types = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=axis_types, devices=devices8[:2])

    def loss_fn(params, apply_fn, batch, rng):
        losses = jnp.square(apply_fn({"params": params}, batch.inputs)).mean(-1)
        return losses.mean(), {"loss": (losses.sum(), losses.size)}

    model = lora(quantized(nn.Sequential([nn.Dense(8)]), BLOCKS), {"layers_0": 2}, alpha=4)
    batch = Batch(np.ones((4, 8), np.float32), np.ones(4))
    program = fsdp(model, optax.sgd(1.0), loss_fn, mesh=mesh, batch=batch, min_weight_size=1)
    merged = merge_lora(program, program.init(jax.random.key(0)))
    assert merged["layers_0"]["kernel"].shape == (8, 8)


def test_nf4_has_the_levels_of_its_paper_and_its_error():
    """The mean error of normal numbers is that in the tests of bitsandbytes: 0.0728."""
    x = jax.random.normal(jax.random.key(0), (64, 1024))
    codes, scales = encode(x, 64, "nf4")
    assert (codes.dtype, codes.shape, scales.shape) == (jnp.uint8, (64, 512), (64, 16))
    y = decode(codes, scales)
    shares = y.reshape(64, 16, 64) / scales[..., None]
    np.testing.assert_allclose(np.unique(np.round(np.asarray(shares), 5)), NF4, atol=1e-5)
    assert 0.072 < jnp.abs(x - y).mean() < 0.0735
    for before, after in zip((codes, scales), encode(y, 64, "nf4"), strict=True):
        np.testing.assert_array_equal(after, before)
    assert (scales.astype(jnp.bfloat16) == scales).all()
    odd = jnp.array([[0.0, 1e-45, jnp.inf, 1.0], [0.0, 0.0, 0.0, 0.0], [3e38, 0.0, -3e38, 1.0]])
    codes, scales = encode(odd, 4, "nf4")
    assert not codes[1].any()
    assert not scales[1]
    np.testing.assert_array_equal(np.isfinite(decode(codes, scales)).all(-1), [False, True, True])


@pytest.mark.slow
def test_nf4_is_that_of_bitsandbytes():
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("bitsandbytes.functional")
    x = np.random.default_rng(0).normal(size=(32, 256)).astype(np.float32)
    # Scales that bfloat16 represents, which our scales are rounded to.
    x[:, ::64] = np.asarray(jnp.full((32, 4), 4.25))
    packed, state = functional.quantize_4bit(torch.tensor(x), blocksize=64, quant_type="nf4")
    theirs = functional.dequantize_4bit(packed, state).numpy()
    codes, scales = encode(jnp.asarray(x), 64, "nf4")
    np.testing.assert_allclose(decode(codes, scales), theirs, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(codes).ravel() ^ 0x77, packed.numpy().ravel())
    np.testing.assert_array_equal(np.float32(NF4), state.code.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [D8, D24], ids=str)
def test_nf4_is_gathered_as_codes_and_takes_half_the_bytes_of_int8(mesh):
    model = Transformer(**nest_fields({**OURS, **WIDE}))
    sent = {}
    for code in ("int8", "nf4"):
        program = build(
            lora(quantized(model, {"*kernel": 64}, code=code), {"*/attention/*": 2}, alpha=4),
            mesh,
            language_model_loss,
        )
        params = jax.tree.leaves(program.abstract_state.params)
        kernels = [x for x in params if x.dtype.itemsize == 1]
        assert {x.dtype.name for x in kernels} == {"uint8" if code == "nf4" else "int8"}
        sent[code] = total_bytes(
            x for x in ledger(program).collectives if x.dtype == kernels[0].dtype
        )
    assert sent["nf4"] * 2 == sent["int8"] > 0
