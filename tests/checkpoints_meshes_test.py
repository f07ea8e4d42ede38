"""A state goes from mesh to mesh through checkpoints, and every bit of it stays.

Parameters are stacked over layers, split, divided among experts, sharded and padded, on every mesh
in another way; the optimizer's state follows them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, Program, fsdp, make_mesh
from manualpar.checkpoints import Checkpoints
from manualpar.models import Transformer
from manualpar.sharding.axes import axis_tuple
from manualpar.state_arrays import leaves_of, read_unpadded
from manualpar.training.cross_entropy import mixture_of_experts_loss

DATA_AXES = ("replica", "data", "expert")
# 20 hidden features divide by no 8, but by 2 and by 4.
MODEL = Transformer(
    vocab_size=32,
    num_layers=4,
    hidden_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_size=2,
    mlp_size=8,
    num_experts=4,
    split_axis="model",
    expert_axis="expert",
)
MESHES = (
    ({"data": 1}, ()),
    ({"data": 8}, ()),
    ({"model": 2, "data": 4}, ("model", "data")),  # The same program on devices in another order.
    ({"data": 2, "model": 4}, ()),
    ({"expert": 4, "data": 2}, ()),
    ({"data": 2, "expert": 2, "model": 2}, ("expert", "model", "data")),
    ({"replica": 2, "expert": 4}, ()),
)
QUICK = (5,)


@functools.cache
def program_on(number: int) -> Program:
    """The program of the model on a mesh."""
    sizes, order = MESHES[number]
    tokens = jax.ShapeDtypeStruct((16, 8), jnp.int32)
    return fsdp(
        MODEL,
        optax.adamw(0.1),
        mixture_of_experts_loss,
        mesh=make_mesh(sizes, order=order),
        batch=Batch(inputs=tokens, labels=tokens),
        axis_name=tuple(axis for axis in DATA_AXES if axis in sizes),
        min_weight_size=16,
        pad=True,
    )


def leaves(program: Program, state) -> dict[str, np.ndarray]:
    """The whole arrays of a state, without padding."""
    found = leaves_of(program.abstract_state, program.whole_state)
    values = jax.tree.leaves(state)
    return {
        leaf.name: read_unpadded("test", leaf, value)
        for leaf, value in zip(found, values, strict=True)
    }


@pytest.fixture
def state(devices8):
    """A state that no program has made: all its numbers differ."""
    random = np.random.default_rng(0)

    def fill(x):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(5), x.sharding)
        values = random.normal(size=x.shape) if x.ndim else 7
        return jax.device_put(np.asarray(values, x.dtype), x.sharding)

    return jax.tree.map(fill, program_on(0).abstract_state)


def go_through(numbers, state, folder) -> Program:
    """Saves and restores on one mesh after the other, and compares all that a state holds."""
    expected = leaves(program_on(0), state)
    program = program_on(0)
    for step, number in enumerate([*numbers, 0]):
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(program, state, step=step, extra={})
        program = program_on(number)
        with Checkpoints(folder) as checkpoints:
            state = checkpoints.restore(program, report=lambda line: None).state
        for x, abstract in zip(
            jax.tree.leaves(state), jax.tree.leaves(program.abstract_state), strict=True
        ):
            assert x.sharding == abstract.sharding
        found = leaves(program, state)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert value.dtype == expected[name].dtype
            assert value.tobytes() == expected[name].tobytes(), (name, MESHES[number])
    return program


def test_a_state_is_the_same_on_meshes_of_some_axes(state, tmp_path):
    go_through(QUICK, state, tmp_path)


@pytest.mark.slow
def test_a_state_is_the_same_on_meshes_of_all_axes(state, tmp_path):
    go_through(range(len(MESHES)), state, tmp_path)


@pytest.mark.slow
def test_the_meshes_hold_parameters_in_every_way():
    axes, padded = set(), False
    for number in range(len(MESHES)):
        program = program_on(number)
        for spec in jax.tree.leaves(program.layout.params):
            axes |= {axis for entry in spec for axis in axis_tuple(entry)}
        padded |= any(
            leaf.padding for leaf in leaves_of(program.abstract_state, program.whole_state)
        )
    assert axes == {"data", "model", "expert", "replica"}
    assert padded
