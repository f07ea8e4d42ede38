"""Mistakes in split dense layers, rings, boundaries of split layers, vocabularies and losses."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, abstract_mesh
from manualpar.core.parameters.annotations import SplitParameter, split
from manualpar.layers import (
    SplitDense,
    enter,
    enter_ring,
    gather_matmul,
    leave,
    matmul_scatter,
    split_cross_entropy,
    split_lookup,
)
from manualpar.layers.head_loss import head_cross_entropy
from manualpar.models.cross_entropy import language_model_loss
from tests.refused.table import build, check_refused, rows, trace_on
from tests.tiny import class_loss

ones = functools.partial(np.ones, dtype=np.float32)
MODEL4 = abstract_mesh({"model": 4}, 4)
FOUR = abstract_mesh({"data": 2, "model": 2}, 4)
EIGHT = abstract_mesh({"data": 2, "model": 2, "expert": 2}, 8)
COLUMN = SplitDense((4, 8), (None, "model"))
ROW = SplitDense((8, 4), ("model", None))


def init_dense(case):
    layer, changes, size = case
    layer = dataclasses.replace(layer, **changes)
    jax.eval_shape(layer.init, jax.eval_shape(jax.random.key, 0), ones((2, size)))


def apply_dense(case):
    """Applies a split layer to an input that is complete on each device, or in chunks of a ring."""
    layer, enter_as = case
    x = ones((8, layer.shape[0]))
    boxed = jax.eval_shape(layer.init, jax.eval_shape(jax.random.key, 0), x)
    specs = jax.tree.map(
        lambda leaf: P(*leaf.names) if isinstance(leaf, SplitParameter) else P(),
        boxed,
        is_leaf=lambda leaf: isinstance(leaf, SplitParameter),
    )

    def apply(params, x):
        return layer.apply(params, enter_ring(x, "model", 0) if enter_as == "chunks" else x)

    specs = (specs, P("model") if enter_as == "chunks" else P())
    trace_on(MODEL4, apply, specs, nn.meta.unbox(boxed), x, out=P())


def on_ring(block):
    trace_on(MODEL4, block, (P("model"), P()), ones((8, 4)), ones((4, 3)), out=P())


def at_boundary(case, check_vma=True):
    call, *spec = case
    x = ones((2, 4 if spec == ["data", "model"] else 3, 4))
    trace_on(FOUR, call, P(*spec), x, out=P("data"), check_vma=check_vma)


# Vocabularies.

V, D = 16, 6
TABLE = ones((V, D))
TOKENS = np.zeros((4, 8), np.int32)


def logits_of(x):
    return jnp.zeros((*x.shape, V)) + x[..., None].astype(jnp.float32)


def on_eight(spec):
    specs = (spec, P("data"))
    trace_on(EIGHT, split_cross_entropy, specs, ones((4, 8, V)), TOKENS, out=P("data"))


def on_tokens(case):
    call, *spec = case
    trace_on(abstract_mesh({"data": 2, "model": 4}, 8), call, P(*spec), TOKENS, out=P())


class Bigrams(nn.Module):
    """A language model that returns this device's columns of the logits, split over `model`."""

    @nn.compact
    def __call__(self, tokens, train=False):
        init = nn.initializers.normal()
        table = self.param("table", split(init, ("model", None)), (V, D))
        x = enter(split_lookup(table, tokens, "model"), "model")
        return x @ self.param("head", split(init, (None, "model")), (D, V))


def best_of_own_columns(params, apply_fn, batch, rng):
    loss, metrics = language_model_loss(params, apply_fn, batch, rng)
    best = apply_fn({"params": params}, batch.inputs).argmax(axis=-1) == batch.labels
    return loss, {**metrics, "best": (best.sum(), best.size)}


def head_loss(change):
    args = {"x": ones((4, 3, 5)), "head": ones((5, 48)), "labels": np.zeros((4, 3), np.int32)}
    args |= change
    arrays = {name: args.pop(name) for name in ("x", "head", "labels")}
    jax.eval_shape(functools.partial(head_cross_entropy, **args), **arrays)


def head_loss_on(spec):
    """Traces the loss with a split head, and with labels sharded as in `spec`."""

    def loss(head, labels):
        return head_cross_entropy(jnp.zeros((*labels.shape, 5)), head, labels, axis="model")[0]

    trace_on(FOUR, loss, (P(None, "model"), spec), ones((5, 48)), TOKENS, out=spec)


BATCH = Batch(TOKENS, TOKENS, np.ones((4, 8), np.float32))
REFUSED = [
    *rows(
        "dense",
        init_dense,
        ((COLUMN, {"names": (None,)}, 4), "names=.None,., contracted=1: expected a"),
        ((COLUMN, {"contracted": 2}, 4), "expected contracted from 1 to 1"),
        ((COLUMN, {"names": ("model", ("data", "model"))}, 4), "an axis on one side"),
        ((ROW, {"shared": True}, 8), "add the same product"),
        ((COLUMN, {"sequence_dim": 1}, 4), "the result is not summed. Give sequence_dim to"),
        ((ROW, {"overlap": "ring"}, 8), "no sequence_dim, expected the sequence_dim of a row"),
        ((ROW, {"overlap": "rings"}, 8), "expected 'none' or 'ring'"),
        ((COLUMN, {}, 5), r"got x of shape \(2, 5\), expected last dims \(4,\)\."),
    ),
    *rows(
        "dense on an axis",
        apply_dense,
        ((COLUMN, "whole"), "expected what enter returns. Call enter once"),
        ((ROW, "whole"), r"expected last dims \(2,\): this device's part, as a column-parallel"),
        ((SplitDense((4, 8), (None, None)), "chunks"), "expected an output dim that is split over"),
    ),
    *rows(
        "ring",
        on_ring,
        (
            lambda x, w: enter_ring(jnp.ones_like(w), "model", 0),
            r"the same on all devices along \('model',\) by its type, expected an input that is",
        ),
        (
            lambda x, w: gather_matmul(enter_ring(x, "model", 1), w),
            "sequence_dim=1 of an x of shape .2, 4., expected one of its first 1 dims",
        ),
        (
            lambda x, w: gather_matmul(enter_ring(x, "model", 0), w.T),
            "last 1 dims of x to equal the first 1 of the kernel",
        ),
        (
            lambda x, w: matmul_scatter(x, w, "model", 0),
            "2 positions along sequence_dim=0 of an x of shape .2, 4., expected a multiple of",
        ),
        (
            lambda x, w: matmul_scatter(jnp.ones((4, 4)), w, "model", 0),
            "the same on all devices along .'model',. by its type, expected different terms",
        ),
        (
            lambda x, w: matmul_scatter(enter_ring(x[None], "model", 0), w, "model", 1),
            "x is in chunks along sequence_dim=0 over .'model',., expected chunks along 1",
        ),
    ),
    *rows(
        "boundary",
        at_boundary,
        ((lambda x: enter(x, "model"), "data", "model"), r"enter: x .* varies over \('model',\)"),
        ((lambda x: enter(x, "model", 1), "data"), r"enter: x .* expected a part of a sequence"),
        ((lambda x: leave(x, "model"), "data"), r"leave: x .* is the same on all devices along"),
        (
            (lambda x: leave(x, "model", 1), "data", None, "model"),
            r"leave: x of shape \(1, 3, 2\) has 3 entries along sequence_dim=1, expected a multip",
        ),
    ),
    *rows(
        "boundary",
        lambda call: at_boundary((lambda x: call(x, "model"), "data"), check_vma=False),
        (enter, "does not check types"),
        (leave, "does not check types"),
    ),
    *rows(
        "vocabulary",
        on_tokens,
        (
            (lambda x: split_lookup(enter(TABLE, "model"), x, "model"), "data", "model"),
            r"split_lookup: tokens of shape \(2, 2\) vary over \('model',\) by their type",
        ),
        (
            (lambda x: split_lookup(TABLE + x[0, 0], x[0], ("data", "model")), "data"),
            r"split_lookup: an array of shape \(16, 6\) varies over \['data'\] by its type, "
            r"expected all of the axes \('data', 'model'\)",
        ),
        (
            (lambda x: split_cross_entropy(logits_of(x), jnp.ones(x.shape, int)), "data", "model"),
            r"split_cross_entropy: logits of shape \(2, 2, 16\) vary over \['data', 'model'\] by "
            r"their type and labels over no axis",
        ),
        (
            (lambda x: split_cross_entropy(logits_of(x), x, axis="model"), "data", "model"),
            r"split_cross_entropy: labels vary over \('model',\) by their type",
        ),
        (
            (lambda x: split_cross_entropy(logits_of(x), x[0]), "data"),
            r"split_cross_entropy: labels have the shape \(8,\), expected \(2, 8\): one for",
        ),
        (
            (lambda x: split_cross_entropy(logits_of(x), x.astype(float)), "data"),
            TypeError,
            r"split_cross_entropy: logits are float32 and labels float32, expected floats and int",
        ),
    ),
    *rows(
        "logits over several axes",
        on_eight,
        (
            P("data", None, ("model", "expert")),
            r"vary over \['expert', 'model'\] by their type and lab",
        ),
    ),
    *rows(
        "each device's own columns",
        lambda loss: build(Bigrams(), loss=loss, batch=BATCH, axes={"data": 2, "model": 4}),
        *(
            (
                loss,
                rf"loss_fn: {name} has a type that varies over \['model'\], expected the same",
            )
            for loss, name in (
                (class_loss, "the loss"),
                (best_of_own_columns, r"metrics\['best'\]"),
            )
        ),
    ),
    *rows(
        "head_cross_entropy",
        head_loss,
        (
            {"head": ones((48, 5))},
            r"head_cross_entropy: x has the shape \(4, 3, 5\) and head \(48, 5\), expected",
        ),
        (
            {"labels": np.zeros(3, np.int32)},
            r"head_cross_entropy: labels have the shape \(3,\), expected \(4, 3\)",
        ),
        (
            {"labels": ones((4, 3))},
            TypeError,
            r"head_cross_entropy: inputs are float32 and labels float32, expected",
        ),
        (
            {"label_smoothing": 1.0},
            r"head_cross_entropy: label_smoothing is 1.0, expected from 0 to less",
        ),
        ({"soft_cap": 0.0}, r"head_cross_entropy: soft_cap is 0.0, expected more than 0, or None"),
        ({"chunk": 0}, r"head_cross_entropy: chunk is 0, expected at least 1, or None"),
    ),
    *rows(
        "head_cross_entropy on an axis",
        head_loss_on,
        (P("data", "model"), r"head_cross_entropy: labels vary over \('model',\) by"),
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words):
    check_refused(call, error, words)
