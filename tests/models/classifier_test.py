"""The classifier: names, shapes, dtypes, dropout."""

import chex
import jax
import jax.numpy as jnp

from manualpar.models import Classifier


def _init(model: Classifier):
    return model.init(jax.random.key(0), jnp.zeros((2, 6)), train=False)["params"]


def test_layers_are_named_and_shaped_as_documented():
    params = _init(Classifier(hidden_size=4, num_classes=3, num_layers=3))
    shapes = {name: layer["kernel"].shape for name, layer in params.items()}
    assert shapes == {
        "input_dense": (6, 4),
        "hidden_dense_1": (4, 4),
        "hidden_dense_2": (4, 4),
        "output_dense": (4, 3),
    }


def test_it_computes_what_its_docstring_says():
    model = Classifier(hidden_size=4, num_classes=3)
    params = _init(model)
    x = jax.random.normal(jax.random.key(1), (5, 6))
    hidden = x @ params["input_dense"]["kernel"] + params["input_dense"]["bias"][None]
    hidden = hidden * jax.nn.sigmoid(hidden)
    expected = hidden @ params["output_dense"]["kernel"] + params["output_dense"]["bias"][None]
    logits = model.apply({"params": params}, x, train=False)
    chex.assert_trees_all_close(logits, expected, rtol=1e-5)


def test_a_dtype_may_be_a_name_and_leaves_parameters_and_logits_float32():
    model = Classifier(hidden_size=4, dtype="bfloat16")
    params = _init(model)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    x = jax.random.normal(jax.random.key(1), (5, 6))
    logits, state = model.apply(
        {"params": params}, x, train=False, capture_intermediates=True, mutable=["intermediates"]
    )
    chex.assert_type(logits, jnp.float32)
    chex.assert_type(state["intermediates"]["input_dense"]["__call__"][0], jnp.bfloat16)


def test_dropout_is_for_training_and_follows_its_key():
    model = Classifier(hidden_size=64, dropout_rate=0.5)
    variables = {"params": _init(model)}
    x = jnp.ones((5, 6))

    def logits(seed: int):
        return model.apply(variables, x, train=True, rngs={"dropout": jax.random.key(seed)})

    chex.assert_trees_all_equal(logits(1), logits(1))
    assert not jnp.allclose(logits(1), logits(2))
    assert not jnp.allclose(logits(1), model.apply(variables, x, train=False))
