"""Every form of a loss has the value and all gradients of one device, however examples are split.

The reference takes sums over the whole batch, divides them, and is differentiated by plain JAX.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from manualpar import Batch, Pipeline, data_parallel, diloco, fsdp, hsdp, make_mesh, zero
from manualpar.core.state.metrics import mean_metrics
from manualpar.models import Context, Transformer
from tests.laws.cases import LAYERS, TEXT
from tests.tiny import Classifier, keep_gradients, make_batch

RANDOM = np.random.default_rng(3)
# The weights of examples: shares with few, with none and with all examples, and small fractions.
MASK = (RANDOM.random(64) < np.linspace(0, 1, 64)) * np.where(np.arange(64) < 32, 0.01, 1)
MASK[:8] = 0
ROWS = make_batch(mask=MASK.astype(np.float32))
TOKENS = Batch(
    TEXT.inputs, TEXT.labels, (RANDOM.random(TEXT.labels.shape) < 0.4).astype(np.float32)
)


def parts(params, apply_fn, batch, rng):
    """Returns logits, losses of examples, their weights, and weights that the model computes."""
    logits = apply_fn({"params": params}, batch.inputs, train=True, rngs={"dropout": rng})
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return logits, losses, batch.mask, jax.nn.sigmoid(logits[..., 0])


def one_term(*args):
    _, losses, mask, _ = parts(*args)
    return {"loss": ((losses * mask).sum(), mask.sum())}


def pair(*args):
    _, losses, mask, _ = parts(*args)
    total, count = (losses * mask).sum(), mask.sum()
    return total / jnp.where(count > 0, count, 1), {"loss": (total, count)}


def scalar(*args):
    return parts(*args)[1].mean()


def several(*args):
    """A masked mean, and a z-loss over all examples: two divisors."""
    logits, losses, mask, _ = parts(*args)
    z = jax.nn.logsumexp(logits, axis=-1) ** 2
    terms = {"loss": ((losses * mask).sum(), mask.sum()), "z_loss": (0.1 * z.sum(), z.size)}
    return terms, {"most": (losses.sum(), losses.size)}


def learned_pair(*args):
    _, losses, _, weights = parts(*args)
    total, count = (losses * weights).sum(), weights.sum()
    return total / count, {"loss": (total, count)}


def learned(*args):
    _, losses, mask, weights = parts(*args)
    weights *= mask
    other = ((1 - weights) ** 2).sum(), (mask > 0).sum()
    return {"loss": ((losses * weights).sum(), weights.sum()), "other": other}


def expected(loss, module, batch, params):
    """Returns the loss of the whole batch, as one device computes it from sums."""
    out = loss(params, module.apply, batch, jax.random.key(0))
    value = out[0] if isinstance(out, tuple) else out
    if isinstance(value, dict):
        return sum(total / count for total, count in value.values())
    return value


SMALL = {"min_weight_size": 16}
PROGRAMS = {
    "dp": (data_parallel, {"data": 8}, {}),
    "dp, auto": (data_parallel, {"data": 8}, {"mode": "auto", "num_minibatches": 4}),
    "zero2": (zero, {"a": 2, "b": 4}, {"stage": 2, "axis_name": ("a", "b"), **SMALL}),
    "fsdp": (fsdp, {"data": 8}, SMALL),
    "fsdp, unrolled": (fsdp, {"data": 4}, {"num_minibatches": 2, **SMALL}),
    "fsdp, scanned": (fsdp, {"data": 2}, {"num_minibatches": 4, "use_scan": True, **SMALL}),
    "fsdp, explicit": (fsdp, {"data": 8}, {"mode": "explicit", **SMALL}),
    "hsdp": (hsdp, {"replica": 2, "data": 4}, {"num_minibatches": 2, **SMALL}),
}
FORMS = [one_term, pair, scalar, several, learned_pair, learned]
# Each form with several programs, and each program with the two hardest forms.
FAST = {
    *((form, "fsdp") for form in FORMS),
    *((form, name) for form in (several, learned) for name in PROGRAMS),
}
CASES = [
    pytest.param(form, name, marks=[] if (form, name) in FAST else pytest.mark.slow)
    for form in FORMS
    for name in PROGRAMS
]


@functools.cache
def one_device(loss, module):
    """Returns a function (params, batch) -> (loss, gradient), which is compiled once."""

    def whole_loss(params, batch):
        return expected(loss, module, batch, params)

    return jax.jit(jax.value_and_grad(whole_loss))


def check(program, loss, module, batch):
    state = program.init(jax.random.key(0))
    params = program.whole(state)["params"]
    value, gradient = one_device(loss, module)(params, batch)
    state, metrics = program.train_step(state, batch)
    found = jax.tree.leaves(jax.device_get(state.opt_state))
    for g, e in zip(found, jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(g, e, rtol=2e-5, atol=2e-6)
    return mean_metrics(metrics), float(value)


@pytest.mark.parametrize(("loss", "name"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_a_loss_is_that_of_one_device(devices8, loss, name):
    builder, mesh, options = PROGRAMS[name]
    size = math.prod(mesh.values())
    program = builder(
        Classifier(),
        keep_gradients(),
        loss,
        mesh=make_mesh(mesh, devices8[:size]),
        batch=ROWS,
        **options,
    )
    means, value = check(program, loss, Classifier(), ROWS)
    terms = {"several": ("loss", "z_loss"), "learned": ("loss", "other")}.get(
        loss.__name__, ["loss"]
    )
    np.testing.assert_allclose(sum(means[term] for term in terms), value, rtol=1e-5)


class Counting(nn.Module):
    """A classifier that counts its calls in a variable that a state keeps."""

    @nn.compact
    def __call__(self, x, train):
        if self.is_mutable_collection("stats"):
            calls = self.variable("stats", "calls", lambda: jnp.zeros((), jnp.int32))
            calls.value += not self.is_initializing()
        return Classifier()(x, train)


def test_learned_counts_of_a_model_that_counts_its_calls(devices8):
    """Its layers define their gradients, because they are gathered again in the backward pass."""
    mesh = make_mesh({"data": 2}, devices8[:2])
    options = {"num_minibatches": 2, **SMALL}
    module = Counting()
    program = fsdp(module, keep_gradients(), learned, mesh=mesh, batch=ROWS, **options)
    check(program, learned, module, ROWS)


def text_terms(params, apply_fn, batch, rng):
    """Two terms of a language model, with the counts of its masked and of all its tokens."""
    logits = apply_fn({"params": params}, batch.inputs, train=True, rngs={"dropout": rng})
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    z = jax.nn.logsumexp(logits, axis=-1) ** 2
    return {
        "loss": ((losses * batch.mask).sum(), batch.mask.sum()),
        "z_loss": (0.1 * z.sum(), jnp.ones_like(z).sum()),
    }


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"data": 4, "stage": 2}, {"pipeline": Pipeline(), "num_minibatches": 2}),
        ({"data": 2, "context": 4}, {"context_axis": "context"}),
    ],
    ids=["stages", "context"],
)
def test_terms_of_a_language_model(devices8, mesh, options):
    del devices8
    context = Context("context") if "context" in mesh else Context()
    module = Transformer(**LAYERS, context=context)
    program = fsdp(
        module, keep_gradients(), text_terms, mesh=make_mesh(mesh), batch=TOKENS, **SMALL, **options
    )
    check(program, text_terms, Transformer(**LAYERS), TOKENS)


def test_replicas_that_train_separately_have_terms_of_their_own(devices8):
    options = {"mesh": make_mesh({"replica": 2, "data": 2}, devices8[:4]), "batch": ROWS}
    program = diloco(
        Classifier(), optax.sgd(0.1), several, outer_tx=optax.sgd(1.0), every=4, **options
    )
    state = program.init(jax.random.key(0))
    params = program.whole(state)["params"]
    state, metrics = program.train_step(state, ROWS)
    halves = [jax.tree.map(lambda x, i=i: x[i * 32 : i * 32 + 32], ROWS) for i in (0, 1)]
    found = jax.device_get(state.local["params"])
    grad = jax.jit(jax.grad(lambda params, half: expected(several, Classifier(), half, params)))
    for index, half in enumerate(halves):
        gradient = grad(params, half)
        jax.tree.map(
            lambda p, g, x, i=index: np.testing.assert_allclose(
                x[i], p - 0.1 * g, rtol=1e-4, atol=1e-6
            ),
            params,
            gradient,
            found,
        )
    assert set(metrics) == {"loss", "z_loss", "most"}


def test_a_loss_with_two_divisors_in_one_mean_is_refused_in_the_first_step(devices8):
    def uneven(*args):
        logits, losses, mask, _ = parts(*args)
        total, count = (losses * mask).sum(), mask.sum()
        mean = total / jnp.where(count > 0, count, 1)
        return mean + 0.1 * (logits**2).mean(), {"loss": (total, count)}

    def penalty(params, *args):
        mean, metrics = pair(params, *args)
        return mean + sum(jnp.sum(x**2) for x in jax.tree.leaves(nn.unbox(params))), metrics

    for loss, is_refused in ((uneven, True), (penalty, False), (pair, False)):
        program = data_parallel(
            Classifier(), optax.sgd(0.1), loss, mesh=make_mesh({"data": 8}, devices8), batch=ROWS
        )
        state = program.init(jax.random.key(0))
        if is_refused:
            with pytest.raises(ValueError, match=r"off by .*%, .*Return the parts as terms"):
                program.train_step(state, ROWS)
        else:
            state, metrics = program.train_step(state, ROWS)
            assert set(metrics) == {"loss"}


def test_a_scalar_that_is_divided_by_a_count_of_the_batch_is_refused(devices8):
    def masked(*args):
        _, losses, mask, _ = parts(*args)
        return jnp.sum(losses * mask) / jnp.maximum(mask.sum(), 1)

    def average(*args):
        _, losses, mask, _ = parts(*args)
        return jnp.average(losses, weights=mask)

    for loss in (masked, jax.jit(masked, static_argnums=1), average):
        with pytest.raises(ValueError, match="returned a scalar that is divided by"):
            data_parallel(
                Classifier(),
                optax.sgd(0.1),
                loss,
                mesh=make_mesh({"data": 8}, devices8),
                batch=ROWS,
            )


def test_learned_counts_need_all_layers(devices8):
    def learned_text(params, apply_fn, batch, rng):
        logits = apply_fn({"params": params}, batch.inputs, train=True, rngs={"dropout": rng})
        weights = jax.nn.sigmoid(logits[..., 0])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return {"loss": ((losses * weights).sum(), weights.sum())}

    with pytest.raises(ValueError, match=r"count of 'loss' depends on parameters.*stop_gradient"):
        fsdp(
            Transformer(**LAYERS),
            optax.sgd(0.1),
            learned_text,
            batch=TOKENS,
            mesh=make_mesh({"data": 4, "stage": 2}, devices8),
            pipeline=Pipeline(),
            num_minibatches=2,
            **SMALL,
        )


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(12, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.dropout, self.last = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.first(x))))


def guide_loss(model: Net, batch):
    """The loss of flax's first guide of NNX, as it stands there."""
    logits = model(batch.inputs)
    loss = optax.softmax_cross_entropy_with_integer_labels(
        logits=logits, labels=batch.labels
    ).mean()
    return loss, logits


def test_a_loss_of_an_nnx_model_and_a_batch(devices8):
    def without_dropout(model, batch):
        model.dropout.deterministic = True
        return guide_loss(model, batch)

    program = fsdp(
        Net,
        keep_gradients(),
        without_dropout,
        mesh=make_mesh({"data": 8}, devices8),
        batch=ROWS,
        min_weight_size=1,
    )
    state = program.init(jax.random.key(0))
    params = program.whole(state)["params"]
    state, metrics = program.train_step(state, ROWS)
    model = Net(nnx.Rngs(0))
    nnx.update(model, nnx.State(params))
    value, gradient = nnx.jit(nnx.value_and_grad(lambda m: without_dropout(m, ROWS)[0]))(model)
    np.testing.assert_allclose(mean_metrics(metrics)["loss"], value, rtol=1e-5)
    pairs = zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(gradient), strict=True)
    for g, e in pairs:
        np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-6)
