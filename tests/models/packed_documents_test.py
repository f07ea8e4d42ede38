"""Batches may say which document a position is of: the same function, on every kind of axes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, Pipeline, fsdp, make_mesh
from manualpar.models import Transformer
from manualpar.models.flat_fields import with_fields
from tests.models.transformer_families import LLAMA4
from tests.models.transformer_on_one_device import assert_same_as_plain_flax, loss_of

SMALL = Transformer(
    vocab_size=29, num_layers=2, hidden_size=16, num_heads=8, num_kv_heads=2, mlp_size=32
)
BOS = 28


def _packed():
    """Documents of other lengths in each sequence; the last positions are padding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, BOS, (8, 17)).astype(np.int32)
    begins = rng.random((8, 16)) < 0.2
    documents = 1 + np.cumsum(begins, axis=1, dtype=np.int32)
    documents[:, 14:] = 0
    mask = (rng.random((8, 16)) < 0.5).astype(np.float32)
    mask[:, 13:] = 0
    inputs = {"tokens": tokens[:, :-1], "documents": documents}
    return Batch(inputs=inputs, labels=tokens[:, 1:], mask=mask)


@pytest.mark.slow
def test_documents_of_a_batch_are_those_that_a_token_begins():
    tokens = jnp.array([[3, 4, BOS, 5, 6, BOS, 7, 8], [BOS, 1, 2, 3, 4, BOS, 5, 6]])
    params = SMALL.init(jax.random.key(0), tokens)["params"]
    begun = SMALL.clone(bos_token=BOS).apply({"params": params}, tokens)
    documents = jnp.cumsum(tokens == BOS, axis=1)
    # The batch decides, and numbers need not ascend.
    for model, numbers in ((SMALL, documents), (SMALL.clone(bos_token=3), 5 - documents)):
        given = model.apply({"params": params}, {"tokens": tokens, "documents": numbers})
        chex.assert_trees_all_equal(given, begun)
    alone = SMALL.apply({"params": params}, tokens[:1, 2:5])
    chex.assert_trees_all_close(begun[:1, 2:5], alone, rtol=1e-4, atol=1e-5)


MESHES = {
    "data": ({"data": 8}, {}, {}),
    "split": (
        {"data": 2, "model": 4},
        {"split_axis": "model", "sequence_parallel": True, "num_kv_heads": 4, "vocab_size": 32},
        {},
    ),
    "context": (
        {"data": 2, "context": 4},
        {"context_axis": "context"},
        {"context_axis": "context"},
    ),
    "chunks": (
        {"data": 2, "context": 4},
        {"context_axis": "context", **LLAMA4, "attention_chunk": 5},
        {"context_axis": "context"},
    ),
    "stages": ({"data": 4, "stage": 2}, {}, {"pipeline": Pipeline(), "num_minibatches": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_packed_sequences_train_as_on_one_device(devices8, name):
    mesh, fields, options = MESHES[name]
    model = with_fields(SMALL, **fields)
    program = fsdp(
        model,
        optax.sgd(1.0),
        loss_of(model),
        mesh=make_mesh(mesh),
        axis_name="data",
        batch=_packed(),
        min_weight_size=16,
        **options,
    )
    assert_same_as_plain_flax(program, model, _packed)
