"""Layers run as the program chooses, with the gradients of the model as it is written."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, data_parallel, fsdp, make_mesh
from manualpar.core.modes import layer_loops
from manualpar.core.modes.layer_loops import CHOICES, LayerChoice, LayerLoops, planned_memory
from manualpar.core.tracing.jaxprs import scan_sizes
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.layer_config import Attention
from tests.core.modes.traced_equations import equations
from tests.tiny import square_loss

LENGTH = 5
TOKENS = np.random.default_rng(0).integers(0, 32, (16, 9), dtype=np.int32)
TEXT = Batch(TOKENS[:, :-1], TOKENS[:, 1:])
ROWS = Batch(*np.random.default_rng(1).normal(size=(2, 16, 8)).astype(np.float32))
LAYERS = {"vocab_size": 32, "hidden_size": 16, "mlp_size": 32, "num_heads": 2}
MODEL = Transformer(num_layers=LENGTH, **LAYERS)
traces = []


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        traces.append(self.scope.root.name)
        h = jnp.sin(nn.Dense(32, dtype=jnp.bfloat16)(nn.LayerNorm()(x)))
        x = x + nn.Dense(8)(h)
        return nn.Dropout(0.1)(x, deterministic=not self.has_rng("dropout")), x.mean()


class Stack(nn.Module):
    length: int = LENGTH
    reverse: bool = False

    @nn.compact
    def __call__(self, x):
        rngs = {"params": True, "dropout": True}
        options = {"length": self.length, "reverse": self.reverse}
        body = nn.scan(Block, variable_axes={"params": 0}, split_rngs=rngs, **options)
        x, means = body(name="layers")(x, None)
        return x + means.sum()


def dropout_loss(params, apply_fn, batch, rng):
    return square_loss(
        params, functools.partial(apply_fn, rngs={"dropout": jax.random.key(3)}), batch, rng
    )


CASES = {
    "marked": (MODEL, language_model_loss, TEXT),
    "marked, several kinds": (
        Transformer(num_layers=5, **LAYERS, attention=Attention(window=3, global_every=2)),
        language_model_loss,
        TEXT,
    ),
    "marked, written out": (MODEL.clone(scan_layers=False), language_model_loss, TEXT),
    "other people's": (Stack(), dropout_loss, ROWS),
    "other people's, reversed": (Stack(reverse=True), dropout_loss, ROWS),
}


def build(name, devices, *, builder=fsdp, **options):
    model, loss, batch = CASES[name]
    if builder is fsdp:
        options["min_weight_size"] = 1
    mesh = make_mesh({"data": -1}, devices)
    return builder(model, optax.sgd(0.1), loss, mesh=mesh, batch=batch, **options)


def trained(program, name):
    state, metrics = program.train_step(program.init(jax.random.key(0)), CASES[name][2])
    return jax.device_get((state.params, metrics))


def choose(monkeypatch, *choices):
    monkeypatch.setitem(CHOICES, "cpu", choices)


@functools.cache
def as_written(name, builder, mode):
    return trained(build(name, jax.devices()[:8], builder=builder, mode=mode), name)


UNROLLED, DOTS, FULL = (
    LayerChoice("none", True),
    LayerChoice("dots", False),
    LayerChoice("full", False),
)


@pytest.mark.parametrize(
    ("name", "choice", "builder", "mode"),
    [
        ("marked", UNROLLED, fsdp, "manual"),
        pytest.param(
            *("marked, several kinds", LayerChoice("dots", True), fsdp, "manual"),
            marks=pytest.mark.slow,
        ),
        pytest.param("marked, written out", FULL, fsdp, "manual", marks=pytest.mark.slow),
        ("other people's", DOTS, fsdp, "auto"),
        ("other people's, reversed", UNROLLED, data_parallel, "manual"),
    ],
)
def test_gradients_of_the_model_as_written(devices8, monkeypatch, name, choice, builder, mode):
    expected = as_written(name, builder, mode)
    choose(monkeypatch, choice)
    with planned_memory(2**40):
        program = build(name, devices8, builder=builder, mode=mode, remat="auto")
    assert program.layer_choice[:2] == choice[:2]
    lengths = {eqn.params["length"] for eqn in equations(program) if eqn.primitive.name == "scan"}
    is_looped = LENGTH // 2 if name == "marked, several kinds" else LENGTH
    is_written_out = choice.unrolled or "written out" in name
    assert (is_looped in lengths) != is_written_out
    chex.assert_trees_all_close(trained(program, name), expected, rtol=2e-4, atol=2e-6)


def test_only_marked_loops_without_the_option(devices8, monkeypatch):
    choose(monkeypatch, UNROLLED)
    assert build("other people's", devices8).layer_choice is None


def test_unrolled_layers_are_traced_once(devices8, monkeypatch):
    choose(monkeypatch, UNROLLED)
    counts = []
    for length in (2, 6):
        monkeypatch.setitem(CASES, "stack", (Stack(length), dropout_loss, ROWS))
        traces.clear()
        with planned_memory(2**40):
            program = build("stack", devices8, remat="auto")
        lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
        counts.append((len(traces), lowered.as_text().count("func.func private @run_layer")))
    assert counts[0] == counts[1]
    assert 2 <= counts[0][1] <= 6  # The first layer and the others, forward and backward.


def test_the_first_choice_that_fits(devices8, monkeypatch):
    choose(monkeypatch, UNROLLED, DOTS, FULL)
    fits = []
    for memory in (2**21, 2**17, 2**10, 0):
        with planned_memory(memory):
            fits.append(build("marked", devices8).layer_choice)
    assert [x.remat for x in fits] == ["none", "dots", "full", "dots"]
    assert "memory of the devices is not known" in str(fits[-1])
    monkeypatch.setattr(layer_loops, "MOST_EQUATIONS", 10)
    with planned_memory(2**21):
        choice = build("marked", devices8).layer_choice
    assert choice[:2] == DOTS[:2]
    assert "would compile for long" in choice.why


def test_loops_stay_loops_between_hosts_where_they_gather_early(devices8, monkeypatch):
    choose(monkeypatch, UNROLLED, DOTS, FULL)
    monkeypatch.setattr(layer_loops, "count_hosts", lambda mesh: 2)
    early = {"compiler_options": {layer_loops.BUFFERING: True}}
    rows = [
        ("marked", DOTS, early),
        ("marked, written out", UNROLLED, early),  # It has no loop that could stay one.
        ("marked", UNROLLED, {}),
        ("marked", UNROLLED, early | {"mode": "auto"}),
    ]
    for name, expected, options in rows:
        with planned_memory(2**21):
            choice = build(name, devices8, **options).layer_choice
        assert choice[:2] == expected[:2], (name, options)
        assert ("gathers between 2 hosts would be exposed" in choice.why) == (expected == DOTS)


def test_a_loop_keeps_what_products_make(devices8, monkeypatch):
    """Without the choice the loop also keeps float32 copies, sines and masks of the MLP's width."""
    wide = {}
    for option in ("model", "auto"):
        choose(monkeypatch, DOTS)
        program = build("other people's", devices8, remat=option)
        forward = next(
            eqn
            for eqn in equations(program)
            if eqn.primitive.name == "scan" and eqn.params["length"] == LENGTH
        )
        _, carried = scan_sizes(forward.params)
        kept = [v.aval for v in forward.outvars[carried:] if v.aval.shape[-1:] == (32,)]
        wide[option] = sorted(str(x.dtype) for x in kept if len(x.shape) == 3)
    assert wide["auto"] == ["bfloat16"]
    assert len(wide["model"]) > 1


@pytest.mark.parametrize(("memory", "unrolled", "remat"), [(60, True, "none"), (50, False, "full")])
def test_unrolled_layers_do_not_hold_all_gradients_with_all_they_keep(memory, unrolled, remat):
    """They need 10 + max(40, 30); a loop with `dots` 10 + 20 + 30, with `full` 10 + 5 + 30."""
    loops = LayerLoops("auto", "gpu", memory_bytes=memory, held_bytes=10, gradient_bytes=30)
    layers = layer_loops._Layers({"none": 40, "dots": 20, "full": 5}, 0, 1)
    choice = loops._first_that_fits([layers], 0)
    assert (choice.unrolled, choice.remat) == (unrolled, remat)
