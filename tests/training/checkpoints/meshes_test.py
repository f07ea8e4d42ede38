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

from manualpar import Batch, Pipeline, Program, fsdp, make_mesh
from manualpar.core.mesh.axes import axis_tuple
from manualpar.core.program.state_arrays import leaves_of, read_unpadded
from manualpar.models import Context, Experts, Split, Transformer
from manualpar.models.cross_entropy import mixture_of_experts_loss
from manualpar.training.checkpoints import Checkpoints

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
    experts=Experts(4, axis="expert"),
    split=Split("model"),
    context=Context("context"),
)
# Sizes of meshes and the order of their axes on the links. The first has the state to begin with.
MESHES: list[tuple[dict[str, int], tuple[str, ...]]] = [
    ({"data": 1}, ()),
    ({"data": 8}, ()),
    ({"data": 2, "expert": 2, "stage": 2}, ("expert", "stage", "data")),
    ({"data": 2, "context": 4}, ()),
    ({"data": 4, "model": 2}, ("model", "data")),
    ({"data": 4, "model": 2}, ()),  # The same on devices in another order.
    ({"replica": 2, "context": 2, "model": 2}, ("context", "model", "replica")),
    ({"data": 2, "stage": 4}, ()),
    ({"context": 2, "model": 2, "stage": 2}, ("model", "stage", "context")),
    ({"context": 2, "expert": 4}, ()),
]


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
        axis_name=tuple(axis for axis in ("replica", "data", "expert") if axis in sizes),
        context_axis="context" if "context" in sizes else None,
        pipeline=Pipeline() if "stage" in sizes else None,
        communicate_every="step",
        min_weight_size=16,
        pad=True,
    )


def leaves(program: Program, state) -> dict[str, np.ndarray]:
    """The whole arrays of a state, without padding."""
    found = leaves_of(program.abstract_state, program.unpadded_state)
    values = jax.tree.leaves(state)
    return {
        leaf.name: read_unpadded("test", leaf, value)
        for leaf, value in zip(found, values, strict=True)
    }


def begin(program: Program):
    """A state that no program has made: all its numbers differ."""
    random = np.random.default_rng(0)

    def fill(x):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(5), x.sharding)
        values = random.normal(size=x.shape) if x.ndim else 7
        return jax.device_put(np.asarray(values, x.dtype), x.sharding)

    return jax.tree.map(fill, program.abstract_state)


@pytest.mark.long
@pytest.mark.slow
def test_a_state_is_the_same_on_meshes_of_all_axes(devices8, tmp_path):
    program = program_on(0)
    state = begin(program)
    expected = leaves(program, state)
    numbers = range(1, len(MESHES))
    for step, number in enumerate([*numbers, 0]):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(program, state, step=step, extra={})
        program = program_on(number)
        with Checkpoints(tmp_path) as checkpoints:
            state = checkpoints.restore(program, report=lambda line: None).state
        for x, abstract in zip(
            jax.tree.leaves(state), jax.tree.leaves(program.abstract_state), strict=True
        ):
            assert x.sharding == abstract.sharding
        found = leaves(program, state)
        assert found.keys() == expected.keys()
        for leaf, value in found.items():
            assert value.dtype == expected[leaf].dtype
            assert value.tobytes() == expected[leaf].tobytes(), (leaf, MESHES[number])
    axes: set[str] = set()
    is_padded = False
    for number in numbers:
        program = program_on(number)
        of_state = leaves_of(program.abstract_state, program.unpadded_state)
        is_padded |= any(any(leaf.padding) for leaf in of_state)
        for spec in jax.tree.leaves(program.layout.params):
            axes |= {axis for entry in spec for axis in axis_tuple(entry)}
    assert axes == {axis for sizes, _ in MESHES for axis in sizes}
    assert is_padded


@pytest.mark.slow
def test_training_goes_on_bit_for_bit_on_devices_in_another_order(devices8, tmp_path):
    program, other = program_on(5), program_on(4)
    assert list(other.mesh.devices.flat) != list(program.mesh.devices.flat)
    tokens = jax.random.randint(jax.random.key(1), (2, 16, 9), 0, 32)
    first, second = (Batch(x[:, :-1], x[:, 1:]) for x in tokens)
    state, _ = program.train_step(program.init(jax.random.key(0)), first)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(program, state, step=1, extra={})
    state, _ = program.train_step(state, second)
    expected = leaves(program, state)
    with Checkpoints(tmp_path) as checkpoints:
        state = checkpoints.restore(other, report=lambda line: None).state
    state, _ = other.train_step(state, second)
    for name, value in leaves(other, state).items():
        assert value.tobytes() == expected[name].tobytes(), name
