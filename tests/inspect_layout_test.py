import io

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from manualpar import Batch, data_parallel, fsdp, make_mesh, zero
from manualpar.inspect import layout_table, state_bytes


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(32, name="hidden")(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        return nn.Dense(5, name="head")(x)


def loss_fn(params, apply_fn, batch, rng):
    loss = apply_fn({"params": params}, batch.inputs, train=True).sum(-1)
    return loss.mean(), {"loss": (loss.sum(), loss.shape[0])}


def build(builder, devices, **kwargs):
    batch = Batch(inputs=np.ones((16, 8), np.float32), labels=np.zeros(16))
    mesh = make_mesh({"data": -1}, devices)
    return builder(Model(), optax.adam(1e-3), loss_fn, mesh=mesh, batch=batch, **kwargs)


def printed(table, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_bytes_are_those_that_a_device_holds(devices8, num_devices):
    program = build(fsdp, devices8[:num_devices], min_weight_size=0)
    state = program.init(jax.random.key(0))
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.params))
    whole = sum(x.nbytes for x in jax.tree.leaves(state.params))
    assert state_bytes(program.abstract_state.params) == (held, whole) == state_bytes(state.params)
    bias = 5 * 4  # Of the head: stays whole on more than one device.
    assert held == (whole - bias) // num_devices + bias


def test_the_table_of_fsdp(devices8):
    text = printed(layout_table(build(fsdp, devices8, min_weight_size=0)))
    lines = {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line.strip()}
    assert "fsdp on 8 devices (data=8)" in text
    assert lines["hidden/kernel"] == "hidden/kernel 8x32 float32 P(None, 'data') 128"
    assert lines["head/bias"] == "head/bias 5 float32 P() none of [5] divides by 8 20"
    parameters = 4 * (8 * 32 + 32 + 32 + 32 + 32 * 5 + 5)
    held = 4 * ((8 * 32 + 32 + 32 + 32 + 32 * 5) // 8 + 5)
    share = f"{held / parameters:.1%} of {parameters:,} bytes"
    assert f"parameters 517 {share} {held}" in " ".join(text.split())
    assert "optimizer state 1,035" in " ".join(text.split())
    assert "other collections 64 100.0% of 256 bytes 256" in " ".join(text.split())


def test_the_table_of_data_parallelism(devices8):
    text = " ".join(printed(layout_table(build(data_parallel, devices8))).split())
    assert "hidden/kernel 8x32 float32 P() 1,024" in text
    assert "100.0% of 2,068 bytes" in text


def test_bytes_of_half_precision(devices8):
    sharding = build(fsdp, devices8).batch_sharding
    x = jax.ShapeDtypeStruct((16, 3), jnp.bfloat16, sharding=sharding)
    assert state_bytes({"x": x}) == (12, 96)


def test_the_table_says_where_the_state_is_if_elsewhere(devices8):
    program = build(zero, devices8, min_weight_size=16)
    cells = [str(cell) for column in layout_table(program).columns for cell in column.cells]
    assert "P(), state P(None, 'data')" in cells
