"""Fixtures that several files share."""

import json

import jax
import jax.numpy as jnp
import pytest

from tests.models.pretrained.llama import CONFIG, llama, tensors_of, write


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory with two files and an index, and the parameters in them."""
    directory = tmp_path_factory.mktemp("llama")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    tokens = jnp.zeros((1, 8), jnp.int32)
    params = jax.jit(llama(directory).init)(jax.random.key(3), tokens)["params"]
    write(directory, tensors_of(params))
    return directory, params
