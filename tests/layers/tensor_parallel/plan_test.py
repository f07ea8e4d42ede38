"""Models that know of no mesh, computed in parallel by a plan, against plain flax on one device."""

import collections
import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

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
from manualpar.core.parameters.annotations import SplitParameter
from manualpar.core.tracing.scopes import SEQUENCE_SCOPE, TENSOR_SCOPE, purpose_of
from manualpar.inspect import trace_collectives
from manualpar.layers import MoE, SplitDense, enter, split_cross_entropy
from manualpar.layers.tensor_parallel.plan import TensorParallelInterface
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.flat_fields import nest_fields
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


# -------------------------------------------------------------------------------------------------
# What a planned model computes wrongly on shards is refused by its path; what is right is not.


CHECKED_PLAN = {"embed": Vocab(), "up": Column(), "down": Row()}


class Net(nn.Module):
    """Two products with something between them, and something before."""

    between: Any = nn.relu
    before: Any = lambda x, tokens: x

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(16, 8, name="embed")
        x = self.before(embed(tokens), tokens)
        y = self.between(nn.Dense(32, name="up")(x))
        return embed.attend(x + nn.Dense(8, name="down")(y))


def check(model: nn.Module, sequence: bool = False) -> None:
    """Traces a checked call on devices that nobody has."""
    planned = TensorParallelInterface.wrap(tensor_parallel(model, CHECKED_PLAN, sequence=sequence))
    assert planned is not None
    interface = dataclasses.replace(planned, is_checked=True)
    tokens = jax.ShapeDtypeStruct((4, 8), "int32")
    boxed = jax.eval_shape(lambda: interface.init(jax.random.key(0), jnp.zeros((4, 8), int)))

    def is_split(x: Any) -> bool:
        return isinstance(x, SplitParameter)

    specs = jax.tree.map(lambda x: P(*x.names) if is_split(x) else P(), boxed, is_leaf=is_split)

    def call(variables: Any, tokens: jax.Array, key: jax.Array) -> None:
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        interface.apply(variables, tokens, rngs={"dropout": key, "noise": key})

    mesh = abstract_mesh({"data": 2, "model": 4}, num_devices=8)
    run = jax.shard_map(call, mesh=mesh, in_specs=(specs, P("data"), P()), out_specs=P())
    jax.eval_shape(run, nn.unbox(boxed), tokens, jax.eval_shape(lambda: jax.random.key(0)))


def heads(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], -1, 4)


def flat(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], -1)


class Noise(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.random.normal(self.make_rng("noise"), x.shape)


RIGHT = {
    "elementwise": lambda x: nn.gelu(x) * nn.silu(x) + jnp.where(x > 0, x, jnp.zeros_like(x)),
    "heads": lambda x: flat(jax.nn.dot_product_attention(heads(x), heads(x), heads(x))),
    "norm of a head": lambda x: flat(nn.LayerNorm()(heads(x))),
    "softmax over tokens": lambda x: nn.softmax(x, axis=1),
    "a loop over tokens": lambda x: jax.lax.scan(
        lambda c, y: (c + y, c), jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1)
    )[1].swapaxes(0, 1),
    "other tokens": lambda x: jnp.roll(x[:, ::-1], 1, 1) + jnp.cumsum(x, 1)[:, jnp.arange(8)],
    "dropout": nn.Dropout(0.5, deterministic=False),
    "recomputed": jax.checkpoint(jax.jit(nn.relu)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_on_shards_is_not_refused(name: str) -> None:
    check(Net(RIGHT[name]))


ARRAY = r"of an array \[2, 8, 32\]"
WRONG = {
    "norm": (nn.LayerNorm(use_scale=False, use_bias=False), "/between' .*reduce_sum along dim 2"),
    "mean": (lambda x: x - x.mean(-1, keepdims=True), f"reduce_sum along dim 2 {ARRAY}"),
    "softmax": (nn.softmax, f"reduce_max along dim 2 {ARRAY}.* put it behind a Row"),
    "recomputed": (jax.checkpoint(jax.jit(nn.softmax)), "reduce_max along dim 2"),
    "argmax": (lambda x: x * x.argmax(-1, keepdims=True), "argmax along dim 2"),
    "sorted": (lambda x: jnp.sort(x), "sort along dim 2"),
    "summed up": (lambda x: jnp.cumsum(x, -1), "cumsum along dim 2"),
    "turned": (lambda x: x[..., ::-1], "rev along dim 2"),
    "shifted": (lambda x: jnp.roll(x, 1, -1), "slice along dim 2"),
    "halves": (lambda x: jnp.tile(nn.glu(x), 2), "split along dim 2 .*parts"),
    "features before heads": (
        lambda x: flat(x.reshape(*x.shape[:2], 4, -1) ** 2),
        r"reshape along dim 2 .* It makes \[2, 8, 4, 8\] .*reshape\(..., -1, head_size\)",
    ),
    "pairs": (lambda x: (x[..., None] * x[..., None, :]).sum(-1), r"dims \[2, 3\] are both split"),
    "product": (lambda x: x * (x @ x.swapaxes(1, 2)).sum(-1, keepdims=True), "dot_general along"),
    "positions": (
        lambda x: x * jnp.arange(x.shape[-1], dtype=x.dtype)[None, None],
        "iota along dim 0",
    ),
    "constant": (lambda x: x * np.ones((1, 1, x.shape[-1]), x.dtype), "mul with a constant"),
    "size": (
        lambda x: x / np.float32(x.shape[-1]),
        "div with a constant that is computed from the size",
    ),
    "picked": (lambda x: x + x[..., jnp.zeros(1, int)], "add with a constant"),
    "noise": (Noise(), "draws random numbers for a split array.* nn.Dropout"),
    "unknown": (lambda x: jnp.fft.fft(x).real, "fft to a split array. This check does not know"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_on_shards_is_refused_by_its_module(name: str) -> None:
    between, expected = WRONG[name]
    with pytest.raises(ValueError, match=f"on shards along 'model' module 'Net.*{expected}"):
        check(Net(between))


TABLE = np.ones((1, 16, 8), np.float32)
OF_A_SEQUENCE = {
    "positions": (lambda x, tokens: x + TABLE[:, : x.shape[1]], "add with a constant"),
    "sliced": (lambda x, tokens: x + jnp.asarray(TABLE)[:, : x.shape[1]], "slice along dim 1"),
    "pooled": (lambda x, tokens: x - x.mean(1, keepdims=True), "reduce_sum along dim 1"),
    "attended": (
        lambda x, tokens: jax.nn.dot_product_attention(*[heads(x)] * 3).reshape(x.shape),
        r"dims \[3, 4\] are both split|dims \[2, 4\]|both split",
    ),
    "a mask of all": (
        lambda x, tokens: jnp.where(jnp.ones((1, 8, 1), bool), x, 0),
        r"Incompatible shapes for broadcasting: .*\. With sequence=True modules",
    ),
    "a quarter": (
        lambda x, tokens: x + 8 % (x.shape[1] // 4),
        "cannot compute with what the plan splits: .*zero. With sequence=True modules",
    ),
    "first token": (lambda x, tokens: x + x[:, :1], "slice along dim 1"),
}


@pytest.mark.parametrize("name", OF_A_SEQUENCE)
def test_between_layers_a_sequence_is_split(name: str) -> None:
    before, expected = OF_A_SEQUENCE[name]
    check(Net(before=before))
    with pytest.raises(ValueError, match=f"module 'Net.*{expected}"):
        check(Net(before=before), sequence=True)


def experts(x: jax.Array, tokens: jax.Array) -> jax.Array:
    del tokens
    options: Any = {"num_experts": 4, "mlp_size": 8, "axis": None, "num_shared": 1}
    return x + nn.remat(MoE)(**options, model_axis="model", sequence=True)(x)


def dense(x: jax.Array, tokens: jax.Array) -> jax.Array:
    del tokens
    y = SplitDense((8, 16), (None, "model"))(enter(x, "model", 1))
    return x + SplitDense((16, 8), ("model", None), sequence_dim=1)(y)


def test_layers_that_split_sequences_themselves_are_compared_or_refused() -> None:
    check(Net(before=experts), sequence=True)
    with pytest.raises(ValueError, match=r"fails: enter: x of shape (?s:.*)pass verify=False"):
        check(Net(before=dense), sequence=True)


@pytest.mark.slow
def test_attention_over_a_context_axis_is_not_refused() -> None:
    batch = Batch(*(jax.ShapeDtypeStruct((8, 8), "int32") for _ in range(2)))
    fields: Any = {"vocab_size": 16, "num_layers": 1, "hidden_size": 16, "mlp_size": 32}
    context: Any = {"context_axis": "context", "context_attention": "gather"}
    model = Transformer(**nest_fields({**fields, **context}), num_heads=8)
    columns = dict.fromkeys(["*/query", "*/key", "*/value"], Column(-2))
    planned = tensor_parallel(model, {**columns, "*/out": Row(-3)})
    mesh = abstract_mesh({"data": 2, "context": 2, "model": 2}, num_devices=8)
    options: Any = {"mesh": mesh, "batch": batch, "context_axis": "context"}
    data_parallel(planned, optax.sgd(1.0), language_model_loss, **options)


class Product(nn.Module):
    """A dense layer of somebody's own, and something behind its product."""

    behind: Any
    features: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        kernel = self.param("kernel", init, (32 if self.features == 8 else 8, self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return self.behind(jnp.einsum("bsd,df->bsf", x, kernel) * 2 + bias[None, None])


class OwnNet(nn.Module):
    up: Any = lambda x: x
    down: Any = lambda x: x

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(16, 8, name="embed")
        y = nn.relu(Product(self.up, 32, name="up")(embed(tokens)))
        return embed.attend(Product(self.down, name="down")(y))


def test_modules_of_the_plan_that_are_no_layers_of_flax_are_looked_into() -> None:
    check(OwnNet())
    check(OwnNet(up=nn.gelu), sequence=True)
    with pytest.raises(ValueError, match=r"'OwnNet/up' .*reduce_max along dim 2"):
        check(OwnNet(up=nn.softmax))
    for wrong in (nn.relu, jax.checkpoint(jnp.tanh), lambda x: x * x):
        with pytest.raises(ValueError, match=r"'OwnNet/down' .* a term of a sum.* only a product"):
            check(OwnNet(down=wrong))


def test_a_program_checks_a_plan_unless_told_not_to() -> None:
    def build(**options: Any) -> None:
        batch = Batch(*(jax.ShapeDtypeStruct((8, 8), "int32") for _ in range(2)))
        mesh = abstract_mesh({"data": 2, "model": 4}, num_devices=8)
        planned = tensor_parallel(Net(nn.softmax), {"up": Column(), "down": Row()}, **options)
        data_parallel(planned, optax.sgd(1.0), loss_fn, mesh=mesh, batch=batch)

    def loss_fn(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
        del rng
        logits = apply_fn({"params": params}, batch.inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return losses.mean(), {"loss": (losses.sum(), losses.size)}

    with pytest.raises(ValueError, match=r"at plan_test.py:\d+ .*verify=False"):
        build()
    build(verify=False)
