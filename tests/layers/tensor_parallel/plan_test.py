"""Models that know of no mesh, computed in parallel by a plan, against plain flax on one device."""

import collections
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

from manualpar import (
    Batch,
    Column,
    Row,
    Vocab,
    abstract_mesh,
    assert_same_as_one_device,
    data_parallel,
    fsdp,
    hsdp,
    make_mesh,
    tensor_parallel,
    zero,
)
from manualpar.core.tracing.scopes import SEQUENCE_SCOPE, TENSOR_SCOPE, purpose_of
from manualpar.inspect import trace_collectives
from manualpar.layers import MoE, split_cross_entropy
from manualpar.models.transformer import Transformer
from tests.layers.tensor_parallel.language import VOCAB, loss_fn, make_batch

random = nn.initializers.normal(0.3)


def about_one(key: jax.Array, shape: Any, dtype: Any = "float32") -> jax.Array:
    return 1 + random(key, shape, dtype)


class Block(nn.Module):
    """Flax's own attention and dense layers."""

    rate: float
    train: bool

    @nn.compact
    def __call__(self, x_BSD: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        drop = nn.Dropout(self.rate, deterministic=not self.train)
        y_BSD = nn.LayerNorm(scale_init=about_one, bias_init=random, name="norm")(x_BSD)
        attention = nn.MultiHeadDotProductAttention(
            8,
            qkv_features=64,
            bias_init=random,
            normalize_qk=True,
            dropout_rate=self.rate,
            broadcast_dropout=False,
            deterministic=not self.train,
            name="attention",
        )
        x_BSD = x_BSD + attention(y_BSD, mask=mask)
        y_BSF = nn.Dense(32, bias_init=random, name="up")(nn.RMSNorm(scale_init=about_one)(x_BSD))
        y_BSF = drop(nn.gelu(y_BSF))
        return x_BSD + nn.Dense(16, bias_init=random, name="down")(y_BSF), None


class LanguageModel(nn.Module):
    """A model of blocks, whose embedding may be its head."""

    tied: bool = True
    remat: bool = False
    scan: bool = False
    rate: float = 0.0

    @nn.compact
    def __call__(self, tokens_BS: jax.Array, train: bool = False) -> jax.Array:
        embed = nn.Embed(VOCAB, 16, name="embed")
        x_BSD, mask = embed(tokens_BS), nn.make_causal_mask(tokens_BS)
        block: Any = nn.remat(Block) if self.remat else Block
        if self.scan:
            rngs = {"params": True, "dropout": True}
            scanned = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs=rngs,
                in_axes=nn.broadcast,
                length=2,
            )
            x_BSD, _ = scanned(self.rate, train, name="blocks")(x_BSD, mask)
        else:
            for index in range(2):
                x_BSD, _ = block(self.rate, train, name=f"block_{index}")(x_BSD, mask)
        x_BSD = nn.LayerNorm(name="final_norm")(x_BSD)
        return embed.attend(x_BSD) if self.tied else nn.Dense(VOCAB, name="head")(x_BSD)


class InSetup(nn.Module):
    """Layers that are made in `setup`, under names of their own."""

    def setup(self) -> None:
        self.table = nn.Embed(VOCAB, 16)
        self.layers = [nn.remat(nn.Dense)(32, bias_init=random), nn.Dense(16, bias_init=random)]

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        x_BSD = self.table(tokens_BS)
        up, down = self.layers
        return self.logits(x_BSD + down(nn.relu(up(inputs=x_BSD))))

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        return self.table.attend(x_BSD)


class WithExperts(nn.Module):
    """Has experts that know of the axis, and split sequences themselves."""

    @nn.compact
    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        x_BSD = nn.Embed(VOCAB, 16, name="embed")(tokens_BS)
        x_BSD += nn.Dense(16, name="down")(nn.gelu(nn.Dense(32, name="up")(nn.LayerNorm()(x_BSD))))
        options: Any = {"axis": None, "model_axis": "model", "sequence": True}
        x_BSD += MoE(num_experts=4, mlp_size=8, **options)(nn.LayerNorm()(x_BSD))
        return nn.Dense(VOCAB, name="head")(x_BSD)


ATTENTION = {
    "*/attention/query": Column(-2),
    "*/attention/key": Column(-2, shared=True),
    "*/attention/value": Column(-2, shared=True),
    "*/attention/out": Row(-3),
}
PLAN = {**ATTENTION, "*/up": Column(), "*/down": Row(), "embed": Vocab()}
PLAN_OF_OURS = {**ATTENTION, "*/mlp/gate": Column(), "*/mlp/up": Column(), "*/mlp/down": Row()}
PLAN_IN_SETUP = {"table": Vocab(), "layers_0": Column(), "layers_1": Row()}
OURS = {"vocab_size": VOCAB, "num_layers": 2, "hidden_size": 16, "num_heads": 8, "mlp_size": 32}
D24, D42, D18 = {"data": 2, "model": 4}, {"data": 4, "model": 2}, {"data": 1, "model": 8}


def dropping_loss_fn(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
    logits = apply_fn({"params": params}, batch.inputs, train=True, rngs={"dropout": rng})
    losses = split_cross_entropy(logits, batch.labels)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def build(model: Any, axes: Any, builder: Any = fsdp, loss: Any = loss_fn, **options: Any) -> Any:
    options = options if builder is data_parallel else {"min_weight_size": 16, **options}
    mesh, batch = make_mesh(axes), make_batch()
    return builder(model, optax.sgd(1.0), loss, mesh=mesh, batch=batch, **options)


def check_exact(
    model: nn.Module,
    plan: Any,
    axes: Any,
    sequence: bool = False,
    overlap: Any = "none",
    **options: Any,
) -> None:
    program, batch = (
        build(tensor_parallel(model, plan, sequence=sequence, overlap=overlap), axes, **options),
        (make_batch()),
    )
    state = program.init(jax.random.key(0))
    init = jax.jit(lambda key: nn.unbox(model.init({"params": key}, batch.inputs)["params"]))
    params = init(jax.random.split(jax.random.key(0))[0])
    before = program.whole(state)["params"]
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(params))

    def one_device(params: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch.inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

    loss, expected = jax.device_get(jax.jit(jax.value_and_grad(one_device))(params))
    state, metrics = program.train_step(state, batch)
    np.testing.assert_allclose(metrics["loss"][0] / metrics["loss"][1], loss, rtol=1e-6)
    grads = jax.tree.map(np.subtract, before, program.whole(state)["params"])
    total = np.linalg.norm([np.linalg.norm(g) for g in jax.tree.leaves(expected)])
    for (path, grad), like in zip(
        jax.tree.leaves_with_path(grads), jax.tree.leaves(expected), strict=True
    ):
        # The parameters, about 1, are rounded when the gradient is subtracted.
        off = np.linalg.norm(grad - like)
        assert off <= 2e-5 * np.linalg.norm(like) + 1e-6 * total, jax.tree_util.keystr(path)


CASES = {
    "flax": (LanguageModel(), PLAN, D24, {}),
    "flax scan remat": (LanguageModel(remat=True, scan=True), PLAN, D42, {"num_minibatches": 2}),
    "flax untied": (LanguageModel(tied=False), {**PLAN, "head": Column()}, D18, {}),
    "sequence": (LanguageModel(), PLAN, D24, {"sequence": True}),
    "sequence scan remat": (
        LanguageModel(remat=True, scan=True, tied=False),
        {**PLAN, "head": Column()},
        D42,
        {"sequence": True, "num_minibatches": 2},
    ),
    "ring": (LanguageModel(), PLAN, D24, {"sequence": True, "overlap": "ring"}),
    "ring scan remat": (
        LanguageModel(remat=True, scan=True, tied=False),
        {**PLAN, "head": Column()},
        D42,
        {"sequence": True, "overlap": "ring", "num_minibatches": 2},
    ),
    "head of one device": (LanguageModel(tied=False), PLAN, D24, {}),
    "setup": (InSetup(), PLAN_IN_SETUP, D42, {}),
    "setup sequence": (InSetup(), PLAN_IN_SETUP, D24, {"sequence": True}),
    "ours": (Transformer(**OURS), PLAN_OF_OURS, D24, {"num_minibatches": 2}),
    "ours GQA 2": (
        Transformer(**OURS, num_kv_heads=2, remat="full"),
        PLAN_OF_OURS,
        D24,
        {"reshard_after_forward": False},
    ),
    "ours GQA 1": (
        Transformer(**OURS, num_kv_heads=1, scan_layers=False, tied_head=True),
        PLAN_OF_OURS,
        D18,
        {},
    ),
    "experts": (
        WithExperts(),
        {"embed": Vocab(), "up": Column(), "down": Row(), "head": Column()},
        D24,
        {"sequence": True},
    ),
    "hsdp": (
        LanguageModel(),
        PLAN,
        {"replica": 2, "data": 2, "model": 2},
        {"builder": hsdp},
    ),
    "zero": (LanguageModel(), PLAN, D42, {"builder": zero, "stage": 2}),
    "data parallel": (LanguageModel(), PLAN, D24, {"builder": data_parallel}),
    "auto": (LanguageModel(), PLAN, D24, {"mode": "auto"}),
    "axis that the mesh does not have": (LanguageModel(), PLAN, {"data": 8}, {}),
    "axis of one device": (LanguageModel(), PLAN, {"data": 8, "model": 1}, {}),
}
FAST = "setup sequence"


@pytest.mark.parametrize(
    "name", [name if name == FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_planned_model_is_that_of_one_device(devices8: list[jax.Device], name: str) -> None:
    del devices8
    model, plan, axes, options = CASES[name]
    check_exact(model, plan, axes, **options)


def sent_by(model: Any, loss: Any = loss_fn) -> collections.Counter[Any]:
    """What is sent over `model`, on a mesh that nobody has."""
    mesh = abstract_mesh({"data": 2, "model": 4}, num_devices=8)
    program = data_parallel(model, optax.sgd(1.0), loss, mesh=mesh, batch=make_batch())
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    return collections.Counter(
        (one.kind, purpose_of(one.scope))
        for one in trace_collectives(traced)
        if "model" in one.axes
    )


@pytest.mark.slow
def test_a_layer_sends_four_all_reduces() -> None:
    """Key, query and value share one on the way in, and gate and up another."""
    sent = sent_by(tensor_parallel(Transformer(**OURS, scan_layers=False), PLAN_OF_OURS))
    assert sent == {("all_reduce", TENSOR_SCOPE): 2 * 4}
    sent = sent_by(tensor_parallel(LanguageModel(), PLAN, sequence=True))
    # Two layers, and the embedding as the head and not.
    assert sent["all_gather", SEQUENCE_SCOPE] == 2 * 4 + 2
    assert sent["reduce_scatter", SEQUENCE_SCOPE] == 2 * 4 + 2
    sent = sent_by(tensor_parallel(LanguageModel(), PLAN, sequence=True, overlap="ring"))
    # Of the embedding, whose rows no product makes, and of its transpose as the head.
    assert sent["all_gather", SEQUENCE_SCOPE] == sent["reduce_scatter", SEQUENCE_SCOPE] == 2
    # Round a ring of four in both directions, the last chunk in halves.
    assert sent["permute", SEQUENCE_SCOPE] == 2 * 8 * 4


@pytest.mark.slow
def test_a_program_takes_a_planned_model_as_any_other(devices8: list[jax.Device]) -> None:
    del devices8
    model = LanguageModel(tied=False, rate=0.5)
    planned = tensor_parallel(model, PLAN)
    program, batch = build(planned, D24, loss=dropping_loss_fn), make_batch()
    state = program.init(jax.random.key(0))
    variables = program.whole(state)
    logits = state.apply_fn(variables, batch.inputs)
    np.testing.assert_array_equal(logits, model.apply(variables, batch.inputs))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    total, count = program.eval_step(program.init_from(variables), batch)["loss"]
    np.testing.assert_allclose(total / count, losses.mean(), rtol=1e-5)
    assert "LanguageModel" in repr(planned)


@pytest.mark.slow
def test_the_comparison_with_one_device_takes_a_planned_model(devices8: list[jax.Device]) -> None:
    del devices8
    program = build(tensor_parallel(LanguageModel(), PLAN, sequence=True), D24)
    assert_same_as_one_device(program, make_batch(), jax.random.key(0))
