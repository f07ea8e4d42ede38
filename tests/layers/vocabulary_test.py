"""Lookups, losses and predictions where each device has some of the vocabulary."""

import functools
import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, fsdp, make_mesh
from manualpar.core.parameters.annotations import split
from manualpar.layers import enter, split_argmax, split_cross_entropy, split_lookup
from manualpar.models.cross_entropy import language_model_loss
from tests.one_device import train_on_one_device, train_program

V, D, B, S = 16, 6, 4, 8
DATA = P("data")
# Those that no one has are the last ones of each row.
TOKENS = jnp.array([[0, 3, 4, 7, 8, 12, 15, -1], *np.arange(24).reshape(3, 8)[:, ::-1] - 2])
TABLE = jnp.arange(1.0, V * D + 1).reshape(V, D)


MESHES = [
    {"data": 2, "model": 4},
    *(
        pytest.param(sizes, marks=pytest.mark.slow)
        for sizes in ({"data": 1, "model": 8}, {"model": 2, "data": 4}, {"data": 4, "model": 1})
    ),
]


@pytest.fixture(scope="module", params=MESHES, ids=str)
def any_mesh(devices8, request):
    sizes = request.param
    return make_mesh(sizes, devices=devices8[: math.prod(sizes.values())])


@pytest.fixture(scope="module")
def mesh(devices8):
    return make_mesh(MESHES[0], devices=devices8)


def on_mesh(mesh, function, in_specs, out_specs=DATA):
    shard_map = functools.partial(jax.shard_map, mesh=mesh, check_vma=True)
    return jax.jit(shard_map(function, in_specs=in_specs, out_specs=out_specs))


def ordinary_lookup(table, tokens):
    return table.at[tokens].get(mode="fill", wrap_negative_indices=False)


def test_a_split_lookup_finds_the_rows_of_one_device_and_their_gradients(any_mesh):
    weights = jnp.arange(1.0, B * S * D + 1).reshape(B, S, D)

    def loss(lookup, table, tokens, weights):
        rows = lookup(table, tokens)
        # NaN would hide which rows got a gradient.
        return jnp.where(jnp.isnan(rows), 0, rows * weights).sum(), rows

    def of_one_device(table):
        grad, rows = jax.grad(functools.partial(loss, ordinary_lookup), has_aux=True)(
            table, TOKENS, weights
        )
        return rows, grad

    def on_device(table, whole, tokens, weights):
        out = {}
        cases = {
            "plain": (table, "model", None),
            "sequence": (table, ("model",), -2),
            "whole": (whole, "model", 1),
        }
        for name, (table, axis, dim) in cases.items():
            lookup = functools.partial(split_lookup, axis=axis, sequence_dim=dim)
            here = weights
            if dim is not None:
                n = S // jax.lax.axis_size("model")
                start = jax.lax.axis_index("model") * n
                here = jax.lax.dynamic_slice_in_dim(weights, start, n, axis=1)
            grad, rows = jax.grad(functools.partial(loss, lookup), has_aux=True)(
                jax.lax.pcast(table, ("data",), to="varying"), tokens, here
            )
            with jax.named_scope("of the test"):
                out[name] = rows, jax.lax.psum(grad, "data")
        return out

    expected = of_one_device(TABLE)
    split = P("model")
    by_sequence = P("data", "model")
    out_specs = {
        "plain": (DATA, split),
        "sequence": (by_sequence, split),
        "whole": (by_sequence, P()),
    }
    run = on_mesh(any_mesh, on_device, (split, P(), DATA, DATA), out_specs)
    for got in run(TABLE, TABLE, TOKENS, weights).values():
        chex.assert_trees_all_equal(got, expected)
    chex.assert_trees_all_equal(split_lookup(TABLE, TOKENS, "model", 1), expected[0])
    assert np.isnan(expected[0]).any(axis=(0, 2)).sum() > 2
    assert not np.isnan(expected[1]).any()


def test_a_lookup_of_any_kind_of_table_and_tokens(mesh):
    integers = jnp.arange(V * D).reshape(V, D)

    def on_device(table, whole, integers, tokens):
        return {
            "whole": split_lookup(whole, tokens, "model"),
            "constant": split_lookup(table, jnp.array([0, 5, 15, 99]), "model"),
            "small": split_lookup(table, tokens.astype(jnp.uint8), "model"),
            "integers": split_lookup(integers, tokens, "model"),
        }

    specs = {"whole": P("data"), "constant": P(), "small": P("data"), "integers": P("data")}
    split = P("model")
    got = on_mesh(mesh, on_device, (split, P(), split, P("data")), specs)(
        TABLE, TABLE, integers, TOKENS
    )
    rows = ordinary_lookup(TABLE, TOKENS)
    expected = {
        "whole": rows,
        "constant": ordinary_lookup(TABLE, jnp.array([0, 5, 15, 99])),
        "small": rows,
        "integers": ordinary_lookup(integers, TOKENS),
    }
    chex.assert_trees_all_equal(got, expected)


def random_logits():
    logits = 3 * jax.random.normal(jax.random.key(0), (B, S, V))
    # Columns that are hidden, some of them a device's all; equal ones; one that is far larger.
    logits = logits.at[:, 1, 4:9].set(-jnp.inf).at[:, 2, 3:].set(2.0).at[2, 3, 9].set(500.0)
    # A row without any, and one of infinity.
    return logits.at[0, 4].set(-jnp.inf).at[1, 4, 5].set(jnp.inf)


LABELS = (
    jax.random.randint(jax.random.key(1), (B, S), 0, V)
    .at[0, :5]
    .set(jnp.array([-1, 5, -V - 1, V, 2]))
)
OPTIONS = ({}, {"label_smoothing": 0.1}, {"z_loss": 0.01}, {"label_smoothing": 0.3, "z_loss": 0.1})


def reference(logits, labels, *, label_smoothing=0.0, z_loss=0.0):
    """What `optax` says, in which a hidden column may not be smoothed."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    if label_smoothing:
        hidden = jnp.isneginf(logits)
        spread = jnp.where(hidden, 0, normalizer[..., None] - logits).sum(axis=-1)
        spread /= (~hidden).sum(axis=-1, dtype=spread.dtype)
        losses = (1 - label_smoothing) * losses + label_smoothing * spread
    return losses + z_loss * normalizer**2 if z_loss else losses


def losses_and_grads(function, logits, labels):
    """Those of each of the options."""

    def one(options):
        losses, vjp = jax.vjp(lambda x: function(x, labels, **options), logits)
        return losses, vjp(jnp.ones_like(losses))[0]

    return [one(options) for options in OPTIONS]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", 1e-5), pytest.param("bfloat16", 3e-2, marks=pytest.mark.slow)],
    ids=lambda x: str(x),
)
def test_the_cross_entropy_of_split_logits_is_that_of_one_device(any_mesh, dtype, tolerance):
    logits = random_logits().astype(dtype)
    expected = jax.jit(functools.partial(losses_and_grads, reference))(logits, LABELS)
    specs = [(P("data"), P("data", None, "model"))] * len(OPTIONS)
    split = functools.partial(losses_and_grads, split_cross_entropy)
    views = (jax.jit(split), on_mesh(any_mesh, split, (P("data", None, "model"), P("data")), specs))
    # Where a loss is infinite or none so are gradients.
    finite = np.isfinite(np.asarray(expected[0][0], np.float32))
    assert 20 < finite.sum() < B * S
    for view in views:
        got = view(logits, LABELS)
        chex.assert_trees_all_equal_dtypes(got, expected)
        for (losses, grads), wanted in zip(as_float32(got), as_float32(expected), strict=True):
            np.testing.assert_allclose(losses, wanted[0], rtol=tolerance)
            np.testing.assert_allclose(grads[finite], wanted[1][finite], tolerance, tolerance)
    chex.assert_trees_all_equal(views[0](logits, LABELS)[0], expected[0])


def as_float32(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float32), tree)


def test_the_prediction_is_the_first_of_the_largest_logits(any_mesh):
    ties = jnp.zeros((B, S, V)).at[0, 0].set(jnp.nan).at[0, 1, 7].set(jnp.nan)
    ties = ties.at[1, 0, jnp.array([6, 7, 12])].set(3.0).at[1, 1].set(-jnp.inf)
    ties = ties.at[1, 2, 15].set(jnp.inf).at[2].set(jax.random.normal(jax.random.key(2), (S, V)))
    for logits in (ties, ties.astype(jnp.bfloat16)):
        split = functools.partial(split_argmax, axis="model")
        got = on_mesh(any_mesh, split, P("data", None, "model"))(logits)
        chex.assert_trees_all_equal(got, logits.argmax(axis=-1), split(logits))
        assert got.dtype == jnp.int32


def test_the_collectives_are_few_and_there_are_none_backward(mesh):
    def on_device(logits, labels):
        def loss(logits):
            losses = split_cross_entropy(logits, labels, label_smoothing=0.1, z_loss=0.1)
            return losses.sum(), (split_argmax(logits, "model") == labels).sum()

        grad, correct = jax.grad(loss, has_aux=True)(logits)
        return grad, correct[None]

    split = P("data", None, "model")
    run = on_mesh(mesh, on_device, (split, P("data")), (split, P("data")))
    traced = run.trace(random_logits(), LABELS).jaxpr
    assert collectives_of(traced) == {"pmax": 1, "psum_invariant": 1, "all_gather_invariant": 1}


def collectives_of(jaxpr):
    """How many equations of each name that sends."""
    words = str(jaxpr).replace("[", " ").split()
    names = ("psum_invariant", "psum", "pmax", "all_gather", "all_gather_invariant", "ppermute")
    return {name: words.count(name) for name in names if name in words}


def test_several_axes_split_in_the_order_that_is_named(mesh):
    split = P(None, None, ("data", "model"))

    def on_device(logits, labels):
        axes = ("data", "model")
        losses = split_cross_entropy(logits, labels, axis=axes, label_smoothing=0.1)
        return losses, split_argmax(logits, axes)

    logits = random_logits()
    losses, best = on_mesh(mesh, on_device, (split, P()), P())(logits, LABELS)
    expected = split_cross_entropy(logits, LABELS, label_smoothing=0.1)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_array_equal(best, logits.argmax(axis=-1))


class Bigrams(nn.Module):
    """Logits of the next token, from an embedding that may be their head too."""

    tied: bool
    sequence_dim: int | None = None

    @nn.compact
    def __call__(self, tokens, train=False):
        normal = nn.initializers.normal(1.0)
        embedding = self.param("embedding", split(normal, ("model", None)), (V, D))
        x = split_lookup(embedding, tokens, "model", self.sequence_dim)
        x = nn.tanh(x * self.param("scale", normal, (1, 1, D)))
        x = enter(x, "model", self.sequence_dim)
        head = embedding.T
        if not self.tied:
            head = self.param("head", split(normal, (None, "model")), (D, V))
        bias = self.param("bias", split(normal, (None, None, "model")), (1, 1, V))
        return x @ head + bias


def text():
    tokens = jax.random.randint(jax.random.key(5), (8, S + 1), 0, V)
    mask = (jnp.arange(8 * S).reshape(8, S) % 5 / 2).astype(jnp.float32)
    return Batch(np.asarray(tokens[:, :-1]), np.asarray(tokens[:, 1:]), np.asarray(mask))


@pytest.mark.parametrize(
    ("sizes", "tied", "sequence_dim"),
    [
        ({"data": 2, "model": 4}, False, 1),
        *(
            pytest.param(sizes, *model, marks=pytest.mark.slow)
            for sizes in ({"data": 8, "model": 1}, {"data": 1, "model": 8}, {"data": 2, "model": 4})
            for model in ((True, None), (True, 1), (False, None))
        ),
    ],
    ids=str,
)
def test_a_program_trains_a_split_vocabulary_as_one_device(devices8, sizes, tied, sequence_dim):
    batch, tx, model = text(), optax.sgd(1.0), Bigrams(tied, sequence_dim)
    expected = train_on_one_device(model, tx, [batch], language_model_loss)
    mesh = make_mesh(sizes, devices=devices8)
    program = fsdp(model, tx, language_model_loss, mesh=mesh, batch=batch, min_weight_size=4)
    state = program.init(jax.random.key(0))
    chex.assert_trees_all_equal(jax.device_get(state.params), nn.unbox(expected.initial))
    state, losses = train_program(program, [batch])
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    got = jax.device_get(state.params)
    chex.assert_trees_all_close(got, nn.unbox(expected.params), rtol=1e-5, atol=1e-6)
