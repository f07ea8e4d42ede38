"""Layers whose fields must not be taken at their word where the model runs on a mesh."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.core.model.interface import interface_of
from manualpar.core.model.linen_model import first_call, initial_call, replace_fields
from manualpar.core.model.trace_model import init_variables
from tests.core.model.switched import Switched
from tests.one_device import name_of, train_on_one_device, train_program

RULES = (("embed", None), ("heads", "model"), ("kv", None))


def annotated(*names, logical=False):
    annotate = nn.with_logical_partitioning if logical else nn.with_partitioning
    return annotate(nn.initializers.lecun_normal(), names)


class Heads(nn.Module):
    """Layers that make their kernels flat, with a name for each dim of the kernel itself."""

    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((8, 2), kernel_init=annotated(None, "data", None), name="split")(x)
        x = nn.DenseGeneral(
            16,
            axis=(-2, -1),
            kernel_init=annotated("model", None, None),
            bias_init=nn.with_partitioning(nn.initializers.normal(), ("model",)),
            name="merge",
        )(x)
        x = nn.DenseGeneral(
            4,
            axis=-1,
            batch_dims=(0,),
            kernel_init=annotated("data", None, None),
            bias_init=nn.with_partitioning(nn.initializers.normal(), (None, None)),
            name="each",
        )(x[None].repeat(8, 0))
        return jnp.moveaxis(x, 0, 1)


class Attention(nn.Module):
    logical: bool = False

    @nn.compact
    def __call__(self, x):
        x = x[:, :, None] * jnp.linspace(0.0, 1.0, 8)[None, None]
        names = ("embed", "heads", "kv") if self.logical else (None, "data", None)
        attention = nn.MultiHeadDotProductAttention(
            num_heads=8, qkv_features=64, kernel_init=annotated(*names, logical=self.logical)
        )
        return attention(x)


class Flat(nn.Module):
    """A copy of what DenseGeneral does, with a layer of somebody's own."""

    weight_init: nn.initializers.Initializer = annotated(None, "data", None)

    @nn.compact
    def __call__(self, x):
        def reshaped(key, shape):
            boxed = self.weight_init(key, (shape[0], shape[1] * shape[2]))
            if isinstance(boxed, nn.Partitioned):
                return boxed.replace(value=boxed.unbox().reshape(shape))
            return boxed.reshape(shape)

        return jnp.einsum("bi,ihd->bhd", x, self.param("weight", reshaped, (16, 8, 2)))


MODELS = {
    "DenseGeneral": Heads(),
    "attention": Attention(),
    "logical": Attention(logical=True),
    "flat": Flat(),
}


def loss_fn(params, apply_fn, batch, rng):
    losses = jnp.square(apply_fn({"params": params}, batch.inputs)).mean((1, 2))
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


BATCH = Batch(np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32), np.zeros(16))


def build(builder, model, axes, **options):
    if builder is not data_parallel:
        options.setdefault("min_weight_size", 1)
    mesh = make_mesh(axes)
    rules = RULES if "model" in axes else ()
    options = {"mesh": mesh, "batch": BATCH, "rules": rules, **options}
    return builder(model, optax.sgd(0.5), loss_fn, **options)


TWO_AXES = {"data": 4, "model": 2}
SLOW = [
    ("DenseGeneral", data_parallel, TWO_AXES, {}),
    ("DenseGeneral", zero, {"data": 2, "model": 4}, {"stage": 2}),
    ("DenseGeneral", hsdp, {"replica": 2, "data": 2, "model": 2}, {}),
    ("DenseGeneral", fsdp, TWO_AXES, {"mode": "auto"}),
    ("DenseGeneral", fsdp, TWO_AXES, {"mode": "auto-unconstrained"}),
    ("attention", fsdp, {"data": 8}, {}),
    ("attention", fsdp, {"data": 8}, {"mode": "auto"}),
    ("attention", data_parallel, {"data": 8}, {}),
    ("logical", zero, TWO_AXES, {}),
    ("logical", fsdp, TWO_AXES, {"mode": "auto"}),
]


@pytest.mark.parametrize(
    ("name", "builder", "axes", "options"),
    [
        pytest.param("DenseGeneral", fsdp, TWO_AXES, {}, marks=pytest.mark.slow),
        ("logical", hsdp, {"replica": 2, "data": 2, "model": 2}, {}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
    ids=name_of,
)
def test_kernels_that_are_made_flat_train_as_on_one_device(devices8, name, builder, axes, options):
    model = MODELS[name]
    program = build(builder, model, axes, **options)
    if name == "DenseGeneral":
        assert program.layout.params["split"]["kernel"] == P(None, "data", None)
        names = program.layout.params["merge"]["kernel"]
        assert names[0] == "model"
    expected = train_on_one_device(model, optax.sgd(0.5), [BATCH] * 2, loss_fn)
    state, losses = train_program(program, [BATCH] * 2)
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    chex.assert_trees_all_close(
        jax.device_get(state.params), nn.unbox(expected.params), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("mode", ["manual", "auto", "explicit", "auto-unconstrained"])
@pytest.mark.parametrize("name", MODELS)
def test_every_mode_takes_them(devices8, name, mode):
    build(fsdp, MODELS[name], TWO_AXES, mode=mode)


def test_fields_are_what_they_were_after_a_call_that_fails():
    dense = nn.Dense(4)

    def fail():
        with replace_fields(dense, {"kernel_init": 1, "features": 2}):
            raise RuntimeError(str(dense.features))

    with pytest.raises(RuntimeError, match="2"):
        fail()
    assert dense == nn.Dense(4)


# -------------------------------------------------------------------------------------------------


X = jnp.ones(4)


class Silent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class Required(nn.Module):
    def __call__(self, x, deterministic, training=True):
        return x


class Decoder(nn.Module):
    def __call__(self, source, target, scale=1.0, *, mask, train=False):
        return source

    def encode(self, source, key):
        return source


CALL_BATCH = Batch(X, X)


@pytest.mark.parametrize(
    ("model", "kwargs"),
    [
        (Switched(), {"train": False}),
        (Silent(), {}),
        (nn.remat(Switched)(), {"train": False}),
        (nn.Sequential([nn.Dense(3)]), {}),
        (Required(), {"deterministic": True}),
    ],
)
def test_a_model_is_initialised_with_the_inputs_and_told_not_to_train(model, kwargs):
    assert initial_call(model, CALL_BATCH) == ((X,), kwargs)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (((1, 2), {"mask": 3}), {"mask": 3, "train": False}),
        (((1,), {"target": 2, "mask": 3}), {"target": 2, "mask": 3, "train": False}),
        (((1, 2), {"mask": 3, "train": True}), {"mask": 3, "train": True}),
        (((1, 2), {"method": "encode"}), {"method": "encode"}),
        (((1, 2), {"method": Decoder.encode}), {"method": Decoder.encode}),
    ],
)
def test_init_args_say_how_a_model_is_called(call, expected):
    assert initial_call(Decoder(), {"any": "batch"}, lambda batch: call) == (call[0], expected)
    assert initial_call(Switched(), CALL_BATCH, lambda batch: ((1, True), {})) == ((1, True), {})


def test_the_first_call_is_the_one_in_the_loss():
    batch = {"a": jnp.ones((2, 3)), "b": jnp.zeros((2, 4))}

    def loss_fn(params, apply_fn, batch, rng):
        penalty = sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
        call = (batch["a"], 2 * batch["b"])
        rngs = {"dropout": rng}
        out, _ = apply_fn(
            {"params": params}, *call, mask=None, train=True, rngs=rngs, mutable=["m"]
        )
        return out.mean() + penalty

    init_args = first_call(Decoder(), loss_fn, batch)
    (source, target), kwargs = initial_call(Decoder(), batch, init_args)
    assert (source.shape, target.shape) == ((2, 3), (2, 4))
    assert kwargs == {"mask": None, "train": False}
    switched = first_call(Switched(), lambda p, apply_fn, b, r: apply_fn({}, b["a"], True), batch)
    assert initial_call(Switched(), batch, switched)[0][1] is False

    def within_remat(params, apply_fn, batch, rng):
        return jax.checkpoint(lambda x: apply_fn({"params": params}, x))(batch["a"])

    assert first_call(Silent(), within_remat, batch) is None
    assert first_call(Silent(), lambda params, *_: params["kernel"].sum(), batch) is None
    assert first_call(Silent(), lambda *_: 0.0, batch) is None


def test_initialisation_is_that_of_plain_flax():
    key = jax.random.key(3)
    x = jax.random.normal(key, (2, 5))
    ours = init_variables(
        interface_of(Silent()), key, Batch(jax.ShapeDtypeStruct(x.shape, x.dtype), None)
    )
    plain = Silent().init({"params": key}, x)
    jax.tree.map(np.testing.assert_array_equal, ours["params"], plain["params"])
