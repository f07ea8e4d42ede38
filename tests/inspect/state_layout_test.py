import io
import re
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from manualpar import Batch, data_parallel, fsdp, make_mesh, zero
from manualpar.inspect import draw_sharding, layout_table, state_bytes
from manualpar.layers import enter, leave, split


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


class Split(nn.Module):
    """A product over parts of the features, with a bias and entries that devices share."""

    @nn.compact
    def __call__(self, x, train):
        normal = nn.initializers.normal()
        into = self.param("into", split(normal, (None, "model")), (8, 16))
        bias = self.param("bias", split(normal, ("model",)), (16,))
        few = self.param("few", split(normal, ("model", None), shared=True), (2, 4))
        x = enter(x, "model") @ into + bias[None] + few[0, 0]
        return leave(x.sum(-1, keepdims=True), "model")


def test_the_table_of_split_parameters(devices8):
    batch = Batch(inputs=np.ones((16, 8), np.float32), labels=np.zeros(16))
    mesh = make_mesh({"data": 2, "model": 4}, devices8)
    program = fsdp(Split(), optax.sgd(1.0), loss_fn, mesh=mesh, batch=batch, min_weight_size=0)
    lines = [" ".join(line.split()) for line in printed(layout_table(program), 140).splitlines()]
    assert (
        "into 8x16 float32 P('data', 'model'), split over model; only one that divides 64" in lines
    )
    assert "bias 16 float32 P('model'), split over model; none of [] divides by 2 16" in lines
    assert "few 2x4 float32 P(None, 'data'), shared over model; only one that divides 16" in lines


def test_the_table_of_fsdp(devices8, monkeypatch):
    text = printed(layout_table(build(fsdp, devices8, min_weight_size=0)))
    monkeypatch.setenv("COLUMNS", "100")
    assert str(layout_table(build(fsdp, devices8, min_weight_size=0))).split() == text.split()
    lines = {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line.strip()}
    assert "fsdp on 8 devices (data=8)" in text
    assert lines["hidden/kernel"] == "hidden/kernel 8x32 float32 P(None, 'data') largest 128"
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
    assert "P(), state P(None, 'data') largest" in cells


# Drawings show who holds what, in a terminal or not, and say what cannot be drawn.


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture
def mesh(devices8):
    return make_mesh({"replica": 2, "data": 4}, devices8)


def _abstract(shape, mesh, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def _drawn(capsys, x) -> list[str]:
    draw_sharding({"layer": {"kernel": x}}, "layer/kernel")
    return capsys.readouterr().out.splitlines()


def test_a_matrix_is_drawn_as_it_lies(mesh, capsys):
    lines = _drawn(capsys, _abstract((64, 64), mesh, "replica", "data"))
    assert lines[0] == "layer/kernel [64, 64] P('replica', 'data')"
    devices = [re.findall(r"CPU ([\d,]+)", line) for line in lines]
    assert [found for found in devices if found] == [list("0123"), list("4567")]
    assert max(map(len, lines)) <= 80


def test_an_array_is_drawn_like_its_shape(mesh, capsys):
    x = jax.device_put(jnp.ones((8, 3)), NamedSharding(mesh, P("data")))
    lines = _drawn(capsys, x)
    assert lines == _drawn(capsys, _abstract((8, 3), mesh, "data"))
    assert re.findall(r"CPU ([\d,]+)", "".join(lines)) == ["0,4", "1,5", "2,6", "3,7"]


def test_a_vector_is_one_row(mesh, capsys):
    assert "│CPU 0,4│CPU 1,5│CPU 2,6│CPU 3,7│" in _drawn(capsys, _abstract((64,), mesh, "data"))


@pytest.mark.parametrize("shape", [(4, 100_000), (100_000, 4), (1, 8)])
def test_long_and_wide_ones_fit(shape, mesh, capsys):
    lines = _drawn(capsys, _abstract(shape, mesh, *(("data", None) if shape[0] > 8 else (None,))))
    assert max(map(len, lines)) <= 80
    assert len(lines) < 20


@pytest.mark.parametrize(
    ("shape", "spec", "dims"),
    [
        ((3, 64, 32), (None, None, "data"), (1, 2)),
        ((8, 64, 32), ("data",), (0, 2)),
        ((8, 3, 64, 32), ("data", None, "replica"), (0, 2)),
        ((3, 3, 64, 32), (), (2, 3)),
    ],
)
def test_of_more_dims_those_are_drawn_that_are_sharded(shape, spec, dims, mesh, capsys):
    lines = _drawn(capsys, _abstract(shape, mesh, *spec))
    assert lines[0].endswith(f", of which dims {dims[0]} and {dims[1]}")
    padded = (*spec, *(None,) * (len(shape) - len(spec)))
    flat = _abstract([shape[d] for d in dims], mesh, *(padded[d] for d in dims))
    assert lines[1:] == _drawn(capsys, flat)[1:]


def test_what_cannot_be_drawn_says_why(devices8, mesh, capsys):
    cube = make_mesh({"a": 2, "b": 2, "c": 2}, devices8)
    assert _drawn(capsys, _abstract((2, 2, 2), cube, "a", "b", "c"))[0] == (
        "layer/kernel [2, 2, 2] P('a', 'b', 'c'): not drawn, more than two of its dims are sharded"
    )
    assert _drawn(capsys, _abstract((), mesh))[0] == (
        "layer/kernel [] P(): not drawn, it has no dims; whole on 8 devices"
    )
    assert "[0, 3] P(): not drawn, it has no elements" in _drawn(capsys, _abstract((0, 3), mesh))[0]


def test_an_array_on_one_device_is_drawn(devices8, capsys):
    for shape in [(4,), (4, 4), (2, 4, 4)]:
        assert "CPU 0" in "".join(_drawn(capsys, jnp.ones(shape)))


def test_all_of_them_or_one_that_is_there(mesh, capsys):
    params = {"a": _abstract((8,), mesh), "b": {"c": _abstract((8, 8), mesh, "data")}}
    draw_sharding(params, "all")
    shown = capsys.readouterr().out
    assert "a [8] P()\n" in shown
    assert "b/c [8, 8] P('data')\n" in shown
    message = "path is 'b/d', expected the path of a parameter, or 'all'; the nearest one is 'b/c'."
    with pytest.raises(ValueError, match=re.escape(message)):
        draw_sharding(params, "b/d")
    with pytest.raises(ValueError, match="'x' has no sharding"):
        draw_sharding({"x": jax.ShapeDtypeStruct((2,), jnp.float32)}, "x")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_any_output_will_do(encoding, mesh, monkeypatch):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", file)
    draw_sharding({"x": _abstract((8, 8), mesh, "data")}, "x")
    file.flush()
    text = file.buffer.getvalue().decode(encoding)
    assert "CPU 3,7" in text
    assert "\x1b" not in text


def test_a_terminal_gets_colours(mesh, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    pytest.importorskip("matplotlib", reason="jax takes its colours from there")
    assert "\x1b[" in "".join(_drawn(capsys, _abstract((8, 8), mesh, "data")))
