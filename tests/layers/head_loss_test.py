"""A head's cross entropy by chunks of the vocabulary, against float64 numpy and whole logits."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, abstract_mesh, fsdp, make_mesh
from manualpar.core.tracing.jaxprs import all_equations
from manualpar.layers import enter, head_cross_entropy
from manualpar.layers.head_loss import CHUNK_ELEMENTS, FEWEST_COLUMNS, default_chunk
from manualpar.models import Context, Transformer
from manualpar.models.cross_entropy import language_model_loss
from tests.one_device import slow_unless

B, S, D, V = 4, 3, 5, 48
RNG = np.random.default_rng(0)
X, HEAD = RNG.normal(size=(B, S, D)), RNG.normal(size=(D, V))
LABELS = RNG.integers(0, 30, (B, S))
WEIGHTS = RNG.uniform(0.5, 2.0, (B, S))
OPTIONS = {
    "plain": {},
    "smooth": {"label_smoothing": 0.1, "vocab_size": 31},
    "z": {"z_loss": 0.05, "soft_cap": 2.0},
    "all": {"label_smoothing": 0.3, "z_loss": 0.1, "soft_cap": 3.0, "vocab_size": 34},
}


def expected(*, label_smoothing=0.0, z_loss=0.0, soft_cap=None, vocab_size=V):
    """Losses, correctness, and the gradients of their weighted sum, in float64 numpy."""
    product = X @ HEAD
    logits = soft_cap * np.tanh(product / soft_cap) if soft_cap else product
    slope = 1 - (logits / soft_cap) ** 2 if soft_cap else np.ones_like(logits)
    is_token = np.arange(V) < vocab_size
    exponentials = np.exp(logits) * is_token
    normalizer = np.log(exponentials.sum(-1))
    target = (1 - label_smoothing) * np.eye(V)[LABELS] + label_smoothing * is_token / vocab_size
    losses = normalizer - (target * logits).sum(-1) + z_loss * normalizer**2
    shares = exponentials / exponentials.sum(-1, keepdims=True)
    of_logits = shares * (1 + 2 * z_loss * normalizer[..., None]) - target
    of_product = of_logits * slope * WEIGHTS[..., None]
    grads = of_product @ HEAD.T, np.einsum("bsd,bsv->dv", X, of_product)
    return losses, np.where(is_token, logits, -np.inf).argmax(-1) == LABELS, grads


def loss_and_grads(x, head, labels, weights, **options):
    def loss(x, head):
        losses, correct = head_cross_entropy(x, head, labels, **options)
        return (losses * weights).sum(), (losses, correct)

    (_, out), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, head)
    return *out, grads


@pytest.mark.parametrize(
    ("chunk", "options"),
    [
        (7, "all"),
        *(
            pytest.param(chunk, options, marks=pytest.mark.slow)
            for chunk in (1, 16, 30, 47, 48, 100, None)
            for options in OPTIONS
        ),
    ],
)
def test_losses_and_gradients_are_those_of_float64(chunk, options):
    arrays = (jnp.asarray(x, jnp.float32) for x in (X, HEAD))
    call = functools.partial(loss_and_grads, chunk=chunk, **OPTIONS[options])
    losses, correct, grads = jax.jit(call)(*arrays, jnp.asarray(LABELS), jnp.asarray(WEIGHTS))
    wanted = expected(**OPTIONS[options])
    np.testing.assert_allclose(losses, wanted[0], rtol=2e-6)
    np.testing.assert_array_equal(correct, wanted[1])
    for got, want in zip(grads, wanted[2], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


ODD_LABELS = jnp.asarray(LABELS).at[0].set(jnp.array([-1, -V - 1, V])).at[1, 0].set(47)
MESHES = [{"data": 2, "model": 4}, {"data": 4, "model": 2}, {"model": 8}, {"data": 4, "model": 1}]


FAST = [(MESHES[0], "all", True)]
SPLIT = [*FAST, *((sizes, options, False) for sizes in MESHES for options in OPTIONS)]


@pytest.mark.parametrize(
    ("sizes", "options", "tied"), [slow_unless(FAST, *case) for case in SPLIT], ids=str
)
def test_a_split_head_has_the_loss_of_whole_logits(devices8, sizes, options, tied):
    """With labels that nobody has, and a device whose columns are all hidden."""
    options, many = OPTIONS[options], math.prod(sizes.values())
    mesh = make_mesh({"data": 1} | sizes, devices=devices8[:many])
    x, head, labels = jnp.asarray(X, jnp.float32), jnp.asarray(HEAD, jnp.float32), ODD_LABELS
    weights = jnp.asarray(WEIGHTS, jnp.float32)

    def on_device(x, head, labels, weights):
        def loss(x, head):
            whole = head.T if tied else head
            entered = enter(x, "model")
            losses, correct = head_cross_entropy(
                entered, whole, labels, axis="model", chunk=4, **options
            )
            finite = jnp.isfinite(losses)
            return (jnp.where(finite, losses, 0) * weights).sum(), (losses, correct)

        # The head is the same along `data` by its type: autodiff sums its gradient.
        (_, out), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, head)
        return *out, *grads

    of_head, data = P("model", None) if tied else P(None, "model"), P("data")
    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(data, of_head, data, data),
        out_specs=(data, data, data, of_head),
        check_vma=True,
    )
    got = jax.jit(run)(x, head.T if tied else head, labels, weights)

    def whole(x, head):
        losses, correct = head_cross_entropy(x, head, labels, chunk=V, **options)
        finite = jnp.isfinite(losses)
        return (jnp.where(finite, losses, 0) * weights).sum(), (losses, correct)

    (_, out), (of_x, grad) = jax.jit(jax.value_and_grad(whole, (0, 1), has_aux=True))(x, head)
    for one, other in zip(got, (*out, of_x, grad.T if tied else grad), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    assert 0 < np.isfinite(out[0]).sum() < B * S


def test_the_largest_logit_is_the_first_of_equals_and_nan_is_larger():
    heads = jnp.zeros((5, 1, 12)).at[1, 0, jnp.array([3, 4, 9])].set(2.0).at[2].set(-jnp.inf)
    heads = heads.at[3, 0, jnp.array([8, 11])].set(jnp.nan).at[3, 0, 2].set(jnp.inf)
    heads = heads.at[4].set(-1.0).at[4, 0, jnp.array([5, 11])].set(jnp.inf)
    x, labels = jnp.ones((12, 1)), jnp.arange(12)

    @functools.partial(jax.jit, static_argnums=1)
    def correct(heads, chunk):
        return jax.vmap(lambda head: head_cross_entropy(x, head, labels, chunk=chunk)[1])(heads)

    for chunk in (3, 5):
        got = correct(heads, chunk)
        np.testing.assert_array_equal(got.argmax(-1), heads[:, 0].argmax(-1))
        assert (got.sum(-1) == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("features", [D, 2 * B * S])
def test_sixteen_bits_are_added_up_in_32(devices8, features):
    """With more tokens than features, and with fewer, when the head's gradient is one product."""
    rng = np.random.default_rng(features)
    x = jnp.asarray(rng.normal(size=(B, S, features)), jnp.bfloat16)
    head = jnp.asarray(rng.normal(size=(features, V)) * (D / features) ** 0.5, jnp.float32)
    labels, weights = jnp.asarray(LABELS), jnp.asarray(WEIGHTS, jnp.float32)
    call = jax.jit(loss_and_grads, static_argnames="chunk")
    got, whole = (call(x, head, labels, weights, chunk=chunk) for chunk in (7, V))
    assert got[0].dtype == jnp.float32
    np.testing.assert_allclose(got[0], whole[0], rtol=1e-5)
    chex.assert_trees_all_equal_dtypes(got[2], (x, head))
    for one, other in zip(got[2], whole[2], strict=True):
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=2e-2, atol=2e-2)
    # The head's own dtype is not rounded to that of the product.
    rounded = got[2][1].astype(jnp.bfloat16).astype(jnp.float32)
    assert (got[2][1] != rounded).mean() > 0.9

    def on_device(x, head, labels, weights):
        split = functools.partial(loss_and_grads, axis="model", chunk=7)
        losses, correct, (of_x, of_head) = split(enter(x, "model"), head, labels, weights)
        return losses, correct, jax.lax.psum(of_x.astype(jnp.float32), "model"), of_head

    of_head, data = P(None, "model"), P("data")
    run = jax.shard_map(
        on_device,
        mesh=make_mesh({"data": 2, "model": 4}, devices=devices8),
        in_specs=(data, of_head, data, data),
        out_specs=(data, data, data, of_head),
        check_vma=True,
    )
    parts = jax.jit(run)(x, head, labels, weights)
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5)
    np.testing.assert_array_equal(parts[1], whole[1])
    for one, other in zip(parts[2:], whole[2], strict=True):
        np.testing.assert_allclose(one, np.float32(other), rtol=2e-2, atol=3e-2)


@pytest.mark.parametrize(
    ("dtype", "tokens", "is_one"),
    [("bfloat16", 64, True), ("bfloat16", 65, False), ("float32", 8, False)],
)
def test_the_gradient_of_a_head_is_one_product_where_that_takes_no_more_memory(
    dtype, tokens, is_one
):
    shapes = ((tokens, 64), (64, V))
    args = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    call = functools.partial(loss_and_grads, weights=1.0, chunk=8)
    products = [
        (eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype)
        for eqn in all_equations(jax.make_jaxpr(call)(*args, labels).jaxpr)
        if eqn.primitive.name == "dot_general"
    ]
    # A cast in between would keep a compiler from scattering the product while it is computed.
    assert (((64, V), jnp.dtype(dtype)) in products) == is_one
    assert (((64, 8), jnp.dtype(dtype)) in products) != is_one


def test_nothing_of_the_size_of_all_logits_is_made():
    tokens, columns = 2048, 100_000
    chunk = default_chunk(tokens)
    assert chunk % 128 == 0
    assert FEWEST_COLUMNS <= chunk < columns
    assert tokens * chunk <= CHUNK_ELEMENTS
    assert default_chunk(2**30) == FEWEST_COLUMNS
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((tokens, 8), (8, columns))]
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    call = functools.partial(loss_and_grads, weights=1.0)
    jaxpr = jax.make_jaxpr(call)(*args, labels).jaxpr
    sizes = [math.prod(v.aval.shape) for eqn in all_equations(jaxpr) for v in eqn.outvars]
    assert max(sizes) == tokens * chunk


@pytest.mark.slow
def test_how_many_chunks_there_are_is_not_taken_for_positions():
    """A model with a context axis is traced with several lengths, and longer ones have more."""
    model = Transformer(
        vocab_size=4096,
        num_layers=1,
        hidden_size=8,
        num_heads=2,
        mlp_size=8,
        context=Context("context"),
    )
    tokens = jax.ShapeDtypeStruct((2, 2**13), jnp.int32)
    program = fsdp(
        model,
        optax.sgd(1.0),
        language_model_loss,
        mesh=abstract_mesh({"data": 2, "context": 2}, 4),
        batch=Batch(inputs=tokens, labels=tokens),
        context_axis="context",
    )
    assert default_chunk(2**13) < 4096 <= default_chunk(2**12)
    assert program.train_step.trace(program.abstract_state, program.abstract_batch)
