"""A transformer that is given labels is the one that returns logits, at every leaf, on any mesh."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, Pipeline, abstract_mesh, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.core.tracing.jaxprs import all_equations
from manualpar.layers import head_loss
from manualpar.models import Context, Split, Transformer
from manualpar.models.cross_entropy import language_model_loss, takes_labels
from manualpar.models.flat_fields import with_fields
from tests.models.transformer_on_one_device import assert_same_as_plain_flax, loss_of

MODEL = Transformer(
    vocab_size=29,
    vocab_multiple=8,
    num_layers=2,
    hidden_size=16,
    num_heads=4,
    mlp_size=16,
    logit_soft_cap=2.0,
    split=Split("model"),
    context=Context("context"),
)
BUILDERS = {"fsdp": fsdp, "hsdp": hsdp, "zero2": functools.partial(zero, stage=2)}
SPLIT = {"sequence_parallel": True, "tied_head": True}
EXPERTS = {"num_experts": 4, "expert_axis": "expert", "capacity_factor": 0.0}
TIED = {"tied_head": True}
CASES: list[Any] = [
    ("fsdp", {"data": 2, "model": 4}, SPLIT, {}),
    ("fsdp", {"data": 8}, {"remat": "full"}, {"num_minibatches": 2}),
    ("fsdp", {"data": 8}, TIED, {"communicate_every": "step", "num_minibatches": 2}),
    ("fsdp", {"data": 8}, TIED, {"mode": "auto"}),
    ("fsdp", {"data": 8}, {}, {"mode": "explicit"}),
    ("fsdp", {"data": 8}, {}, {"mode": "auto-unconstrained"}),
    ("fsdp", {"data": 4, "context": 2}, TIED, {}),
    ("fsdp", {"data": 2, "context": 2, "model": 2}, {}, {"use_scan": True, "num_minibatches": 2}),
    ("fsdp", {"data": 4, "stage": 2}, TIED, {"num_minibatches": 2}),
    ("fsdp", {"data": 2, "model": 2, "stage": 2}, SPLIT, {"num_minibatches": 2}),
    ("fsdp", {"data": 2, "expert": 2, "model": 2}, EXPERTS, {}),
    ("hsdp", {"replica": 2, "data": 4}, TIED, {"reshard_after_forward": False}),
    ("zero2", {"data": 8}, TIED, {}),
]


def make_batch() -> Batch:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 29, (16, 9)).astype(np.int32)
    mask = (rng.random((16, 8)) < 0.7).astype(np.float32)
    mask[:2] = 0  # A device has nothing but padding.
    return Batch(tokens[:, :-1], tokens[:, 1:], mask)


@pytest.fixture
def narrow_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of three columns, of which a split head has 8 or more."""
    monkeypatch.setattr(head_loss, "FEWEST_COLUMNS", 3)
    monkeypatch.setattr(head_loss, "CHUNK_ELEMENTS", 0)


@pytest.mark.usefixtures("devices8", "narrow_chunks")
@pytest.mark.slow
@pytest.mark.parametrize(("build", "mesh", "fields", "options"), CASES, ids=str)
def test_labels_train_as_the_logits_of_one_device(
    build: str, mesh: dict[str, int], fields: dict[str, Any], options: dict[str, Any]
) -> None:
    model = with_fields(MODEL, **fields)
    axes = [axis for axis in ("data", "expert") if axis in mesh]
    options = {"min_weight_size": 16, "axis_name": axes if len(axes) > 1 else "data"} | options
    options |= {"context_axis": "context"} if "context" in mesh else {}
    options |= {"pipeline": Pipeline()} if "stage" in mesh else {}
    program = BUILDERS[build](
        model,
        optax.sgd(1.0),
        loss_of(model),
        mesh=make_mesh(mesh),
        batch=make_batch(),
        **{key: tuple(x) if isinstance(x, list) else x for key, x in options.items()},
    )
    assert_same_as_plain_flax(program, model, make_batch)


def test_no_step_makes_an_array_of_all_logits() -> None:
    tokens = jax.ShapeDtypeStruct((16, 512), jnp.int32)
    model = Transformer(vocab_size=131_072, num_layers=1, hidden_size=8, num_heads=2, mlp_size=8)
    program = data_parallel(
        model,
        optax.sgd(1.0),
        language_model_loss,
        mesh=abstract_mesh({"data": 2}, 2),
        batch=Batch(tokens, tokens),
    )
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    shapes = [v.aval.shape for eqn in all_equations(traced.jaxpr.jaxpr) for v in eqn.outvars]
    largest = max(math.prod(shape) for shape in shapes)
    assert largest <= head_loss.CHUNK_ELEMENTS < 4096 * 131_072 // 4


@pytest.mark.slow
@pytest.mark.usefixtures("narrow_chunks")
def test_labels_are_smoothed_and_normalizers_held_in_training_alone() -> None:
    model = MODEL.clone(label_smoothing=0.1, z_loss=0.2, num_layers=1)
    batch = make_batch()
    params = jax.jit(model.init)(jax.random.key(0), batch.inputs)

    def call(train: bool) -> Any:
        return model.apply(params, batch.inputs, train=train, labels=batch.labels)

    logits, evaluated, trained = jax.jit(
        lambda: (model.apply(params, batch.inputs), call(train=False), call(train=True))
    )()
    logits = np.asarray(logits, np.float64)[..., :29]
    normalizer = np.log(np.exp(logits).sum(-1))
    plain = normalizer - np.take_along_axis(logits, batch.labels[..., None], -1)[..., 0]
    spread = 0.9 * plain + 0.1 * (normalizer - logits.mean(-1))
    for (nats, correct), want in ((evaluated, plain), (trained, spread + 0.2 * normalizer**2)):
        np.testing.assert_allclose(nats, want, rtol=1e-5)
        np.testing.assert_array_equal(correct, logits.argmax(-1) == batch.labels)


def test_the_signature_says_whether_a_model_takes_labels() -> None:
    assert takes_labels(MODEL.apply)
    assert not takes_labels(functools.partial(MODEL.apply))
    assert not takes_labels(lambda variables, inputs, labels: inputs)
    assert not takes_labels(Around(MODEL).apply)


class Around(nn.Module):
    """A model that returns the logits of another."""

    module: nn.Module

    def __call__(self, tokens: jax.Array, train: bool = False) -> Any:
        return self.module(tokens, train=train)
