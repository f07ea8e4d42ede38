"""Parameters that a model reads from its variables, and names that keep what cannot be sharded."""

import io

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console
from jax.sharding import PartitionSpec as P

from manualpar import Batch, fsdp, hsdp, make_mesh, zero
from manualpar.core.parameters.sharded_parameter import ShardedParameter
from manualpar.inspect import count_by_kind, layout_table, trace_collectives
from tests.one_device import name_of, slow, train_on_one_device, train_program

VOCABULARY, WIDTH = 32, 16


class Block(nn.Module):
    """A dense layer whose kernel is read a second time, as the slice that the loop is at."""

    @nn.compact
    def __call__(self, x, _):
        dense = nn.Dense(WIDTH, name="dense")
        x = x + nn.tanh(dense(x))
        return x + 0.1 * x @ dense.variables["params"]["kernel"], None


class Language(nn.Module):
    """Ties its head to its embedding, as the models on HuggingFace do."""

    def setup(self):
        self.wte = nn.Embed(VOCABULARY, WIDTH)
        self.blocks = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )()
        self.mix = nn.Dense(WIDTH, use_bias=False)
        self.head = nn.Dense(VOCABULARY, use_bias=False)

    def __call__(self, ids):
        x, _ = self.blocks(self.mix(self.wte(ids)), None)
        x = x + jnp.mean(self.mix.get_variable("params", "kernel") ** 2)
        kernel = self.wte.variables["params"]["embedding"].T
        return self.head.apply({"params": {"kernel": kernel}}, x)


def loss_fn(params, apply_fn, batch, rng):
    logits = apply_fn({"params": params}, batch.inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    bound = Language(parent=None).bind({"params": params})
    penalty = 0.01 * jnp.sum(bound.wte.variables["params"]["embedding"] ** 2)
    return losses.mean() + penalty, {"loss": (losses.sum(), losses.size)}


def make_batch(seed):
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, (16, 4))
    return Batch(ids.astype(np.int32), np.roll(ids, 1, 1).astype(np.int32))


BATCHES = [make_batch(seed) for seed in range(2)]
SMALL = {"min_weight_size": 16}


def build(builder=fsdp, axes=None, model=None, **options):
    mesh = make_mesh(axes or {"data": 8})
    options = {"batch": BATCHES[0], **SMALL, **options}
    return builder(model or Language(), optax.sgd(0.5), loss_fn, mesh=mesh, **options)


@pytest.fixture(scope="module")
def reference():
    return train_on_one_device(Language(), optax.sgd(0.5), BATCHES, loss_fn)


@pytest.mark.parametrize(
    ("builder", "axes", "options"),
    [
        (fsdp, {"data": 8}, {"num_minibatches": 2, "use_scan": True}),
        slow(hsdp, {"replica": 2, "data": 4}, {}),
        slow(fsdp, {"data": 8}, {"mode": "auto"}),
        slow(fsdp, {"data": 4, "model": 2}, {"reshard_after_forward": False}),
        slow(fsdp, {"data": 2, "model": 4}, {"communicate_every": "step"}),
        slow(fsdp, {"data": 1, "model": 8}, {}),
        slow(hsdp, {"replica": 4, "data": 2}, {"keep_gathered": ("wte",)}),
        slow(fsdp, {"data": 8}, {"pad": True, "mode": "auto-unconstrained"}),
        slow(fsdp, {"data": 8}, {"replicate": ("wte", "mix/kernel")}),
        slow(zero, {"data": 8}, {"stage": 2, "replicate": ("wte",)}),
    ],
    ids=name_of,
)
def test_what_is_read_of_variables_trains_as_on_one_device(
    devices8, reference, builder, axes, options
):
    program = build(builder, axes, **options)
    state, _ = train_program(program, BATCHES)
    chex.assert_trees_all_close(
        jax.device_get(state.params), reference.params, rtol=1e-4, atol=1e-6
    )


def test_each_read_is_a_gather_of_its_own(devices8):
    def gathered(**options):
        program = build(**options)
        traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
        return count_by_kind(trace_collectives(traced))["all_gather"]

    # The embedding is read by Embed, for the head and for the penalty; `mix` twice; in each of two
    # layers the kernel twice and the bias once.
    kept = gathered(reshard_after_forward=False)
    assert kept == 3 + 2 + 2 * 3
    assert kept < gathered() <= 2 * kept


OPERATIONS = {
    "transpose": lambda box, x: x @ box.T,
    "matmul": lambda box, x: x @ box,
    "matmul on the left": lambda box, x: box @ x.T,
    "index": lambda box, x: box[jnp.array([1, 3])],
    "arithmetic": lambda box, x: 1.0 - 2 * box / 3 + box**2,
    "compare": lambda box, x: (box == box) * (box > 0.0),
    "not equal": lambda box, x: jnp.where(box != 0, box, 1.0),
    "jnp": lambda box, x: jnp.einsum("ij,jk->ik", x, box),
    "iterate": lambda box, x: sum(box) + len(box),
    "attributes": lambda box, x: jnp.ones(box.shape, box.dtype) * box.mean() * box.size,
    "jit": lambda box, x: jax.jit(lambda box: box * 2)(box),
    "checkpoint": lambda box, x: jax.checkpoint(lambda box: box @ box)(box),
}


def test_a_box_is_used_as_the_array_in_it(devices8):
    w, x = jnp.arange(64.0).reshape(8, 8) - 20, jnp.arange(32.0).reshape(4, 8)

    def run(shard):
        box = ShardedParameter(shard, ("data", None), gather_axes=("data",))
        out = [operation(box, x) for operation in OPERATIONS.values()]
        return jax.tree.map(lambda y: jax.lax.pmean(y, "data"), out)

    mesh = make_mesh({"data": 8})
    got = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P()))(w)
    for name, y in zip(OPERATIONS, got, strict=True):
        np.testing.assert_allclose(y, OPERATIONS[name](w, x), rtol=1e-5, err_msg=name)
    with pytest.raises(AttributeError, match="has no attribute 'kernel'"):
        _ = ShardedParameter(w, ("data", None)).kernel


# What a shard cannot serve.


class Mapped(nn.Module):
    """Reads a kernel by `jax.vmap` or `jax.tree.map`, which see what is stored."""

    how: str

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(ids)
        dense = nn.Dense(WIDTH, name="dense")
        x = dense(x)
        kernel = dense.variables["params"]["kernel"]
        if self.how == "vmap":
            return x @ jax.vmap(lambda row: row * 2)(kernel)
        if self.how == "scan":
            return x @ jax.lax.scan(lambda _, row: (None, row * 2), None, kernel)[1]
        return x @ jax.tree.map(lambda kernel: kernel[::2], {"kernel": kernel})["kernel"].T


def scalar_loss(params, apply_fn, batch, rng):
    out = apply_fn({"params": params}, batch.inputs) ** 2
    return out.mean(), {"loss": (out.sum(), out.size)}


@pytest.mark.parametrize("how", ["vmap", "scan", "tree"])
def test_functions_over_what_is_stored_are_refused_with_what_to_write(devices8, how):
    def build(**options):
        mesh = make_mesh({"data": 8})
        return fsdp(
            Mapped(how),
            optax.sgd(0.1),
            scalar_loss,
            mesh=mesh,
            batch=BATCHES[0],
            **SMALL,
            **options,
        )

    expected = (
        r"parameters of 'dense' would be sharded, but .* use replicate=\('dense',\) with fsdp"
    )
    with pytest.raises(ValueError, match=expected):
        build()
    build(replicate=("dense",))


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(ids)
        return nn.WeightNorm(nn.Dense(WIDTH, name="dense"))(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("builder", "options"),
    [
        (fsdp, {"replicate": ("dense",)}),
        slow(fsdp, {"replicate": ("dense/kernel", "dense/bias"), "communicate_every": "step"}),
        slow(hsdp, {"replicate": ("dense",), "gather_dtype": "float32"}),
        slow(zero, {"replicate": ("dense",)}),
    ],
    ids=name_of,
)
def test_weight_normalisation_runs_where_its_parameters_are_replicated(devices8, builder, options):
    axes = {"replica": 2, "data": 4} if builder is hsdp else {"data": 8}
    program = builder(
        Normalised(),
        optax.sgd(0.5),
        scalar_loss,
        mesh=make_mesh(axes),
        batch=BATCHES[0],
        **SMALL,
        **options,
    )
    found = {info.path: place for info, place in program.parameters}
    assert found["dense/kernel"].spec == found["dense/kernel"].state_spec == P()
    assert "data" in found["embed/embedding"].state_spec
    expected = train_on_one_device(Normalised(), optax.sgd(0.5), BATCHES, scalar_loss)
    state, _ = train_program(program, BATCHES)
    chex.assert_trees_all_close(jax.device_get(state.params), expected.params, rtol=1e-4, atol=1e-6)
    metrics = program.eval_step(state, BATCHES[0])
    params = jax.device_get(state.params)
    total = np.sum(Normalised().apply({"params": params}, BATCHES[0].inputs) ** 2)
    np.testing.assert_allclose(metrics["loss"][0], total, rtol=1e-4)
    if builder is fsdp:
        console = rich.console.Console(file=io.StringIO(), width=200)
        console.print(layout_table(program))
        assert "named by replicate" in console.file.getvalue()


def test_an_annotated_parameter_is_whole_where_it_is_replicated(devices8):
    init = nn.with_partitioning(nn.initializers.normal(), (None, "data"))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            return nn.Embed(VOCABULARY, WIDTH, embedding_init=init, name="embed")(ids)

    for builder in (fsdp, zero):
        program = builder(
            Model(),
            optax.sgd(0.1),
            scalar_loss,
            mesh=make_mesh({"data": 8}),
            batch=BATCHES[0],
            replicate=("embed",),
        )
        [(_, place)] = program.parameters
        assert place.spec == place.state_spec == P()
