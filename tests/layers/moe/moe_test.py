"""Mixtures of experts: the same on every mesh as on one device."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manualpar.core.mesh.axes import axis_tuple
from manualpar.core.mesh.mesh import make_mesh
from manualpar.core.tracing.scopes import EXPERT_SCOPE, SEQUENCE_SCOPE, TENSOR_SCOPE
from manualpar.inspect import count_by_kind, trace_collectives
from manualpar.layers.moe import moe as expert_exchange
from manualpar.layers.moe.experts import Experts
from manualpar.layers.moe.moe import MoE, all_to_all_bytes, capacity_of, has_ragged_all_to_all
from manualpar.layers.moe.routing import auxiliary_loss

SOWN = ("losses", "intermediates")
B, S, D = 8, 8, 4


def _weights():
    """Of sequences, very unequal: as many as there are valid tokens."""
    return jnp.array([8.0, 1, 3, 0, 8, 2, 7, 5])


def _mask(weights):
    return jnp.arange(S)[None] < weights[:, None]


def _input():
    return jax.random.normal(jax.random.key(1), (B, S, D))


def _objective(layers, params, x, weights, target):
    """The sum over layers and sequences of what a loss would be the mean of, and metrics."""
    mask, total, metrics = _mask(weights), 0.0, []
    for layer, own in zip(layers, params, strict=True):
        y, sown = layer.apply({"params": own}, x, mask, mutable=SOWN)
        auxiliary, reported = auxiliary_loss(sown, weights, load_balance=0.3, router_z=0.2)
        value = (y * target).sum()
        if parts := tuple(_axes(value) - _axes(weights)):
            value = jax.lax.psum(value, parts)  # Of each sequence.
        total += value + auxiliary * weights.sum()
        metrics.append(reported)
    return total, metrics


def _axes(x):
    return jax.typeof(x).mat.varying


def _specs(boxed, mesh):
    def spec(x):
        if not isinstance(x, nn.Partitioned):
            return P()
        names = (tuple(a for a in axis_tuple(n) if a in mesh.shape) or None for n in x.names)
        return P(*names)

    return jax.tree.map(spec, boxed, is_leaf=lambda x: isinstance(x, nn.Partitioned))


def _compare(layers, sizes, data_axes, sequence_axes=None):
    """The worst relative difference from one device of a value, metrics and gradients."""
    mesh, x, weights = make_mesh(sizes), _input(), _weights()
    target = jax.random.normal(jax.random.key(2), x.shape)
    boxed = jax.jit(lambda key: [layer.init(key, x)["params"] for layer in layers])(
        jax.random.key(0)
    )
    params, specs = nn.meta.unbox(boxed), _specs(boxed, mesh)
    objective = functools.partial(_objective, layers)
    derivative = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
    expected = jax.jit(derivative)(params, x, weights, target)

    def on_device(*args):
        out, grads = derivative(*args)
        return jax.tree.map(lambda v: jax.lax.psum(v, tuple(_axes(v))), out), grads

    tokens = P(data_axes, sequence_axes)
    on_mesh = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(specs, tokens, P(data_axes), tokens),
        out_specs=(P(), (specs, tokens)),
        check_vma=True,
    )
    return _worst(jax.jit(on_mesh)(params, x, weights, target), expected)


def _worst(got, expected):
    def difference(g, e):
        g, e = np.asarray(g), np.asarray(e)
        return np.abs(g - e).max() / max(np.abs(e).max(), 1e-6)

    differences = jax.tree.map(difference, got, expected)
    return max(jax.tree.leaves(differences))


def moe(**fields):
    return MoE(**{"num_experts": 8, "mlp_size": 8, "capacity_factor": 0.7} | fields)


BOTH = ("data", "expert")
DATA_EXPERT, ALL = {"data": 2, "expert": 4}, {"data": 2, "expert": 2, "model": 2}
ON_INPUTS = {"gates_on_inputs": True, "gates": "sigmoid", "top_k": 1}
# The layer, the mesh, the axes that split the batch, and the axis that splits sequences.
CASES = [
    ([moe(axis=BOTH), moe(axis=BOTH, capacity_factor=None, top_k=3)], ALL, BOTH),
    (
        [moe(axis="data", model_axis=("expert", "model"), sequence=True, num_shared=2)],
        *(ALL, "data", ("expert", "model")),
    ),
    ([moe(), moe(capacity_factor=None)], DATA_EXPERT, BOTH),
    ([moe(num_shared=1), moe(axis=None)], {"data": 4, "expert": 2}, BOTH),
    ([moe(gates="sigmoid", top_k=1)], {"expert": 8}, "expert"),
    (
        [moe(**ON_INPUTS, num_shared=1), moe(**ON_INPUTS, capacity_factor=None)],
        *(DATA_EXPERT, BOTH),
    ),
    (
        [
            moe(**ON_INPUTS, model_axis="model", sequence=True),
            moe(**ON_INPUTS, model_axis="model", sequence=True, capacity_factor=None),
        ],
        *(ALL, "data", "model"),
    ),
    ([moe(axis="data"), moe(axis="data", capacity_factor=None)], {"data": 8}, "data"),
    ([moe(axis=BOTH), moe(axis=BOTH, capacity_factor=None, top_k=3)], DATA_EXPERT, ()),
    ([moe(), moe(capacity_factor=None)], DATA_EXPERT, "data"),
    ([moe(model_axis="model", num_shared=2), moe(axis=None, model_axis="expert")], ALL, "data"),
    ([moe(model_axis="model"), moe(model_axis="model", capacity_factor=None)], ALL, BOTH),
    (
        [
            moe(model_axis="model", sequence=True, num_shared=2),
            moe(model_axis="model", sequence=True, capacity_factor=None),
        ],
        *(ALL, BOTH, "model"),
    ),
    ([moe(model_axis="model", sequence=True)], ALL, "data", "model"),
    (
        [
            moe(model_axis="model", shared_size=6, shared_is_gated=True, normalize_gates=False),
            moe(
                model_axis="model",
                capacity_factor=None,
                gates="sigmoid",
                gate_scale=2.5,
                groups=4,
                groups_per_token=2,
                shared_size=12,
            ),
        ],
        *(ALL, BOTH),
    ),
    (
        [
            moe(
                model_axis="model",
                sequence=True,
                shared_size=6,
                shared_is_gated=True,
                groups=2,
                group_score="best",
            )
        ],
        *(ALL, BOTH, "model"),
    ),
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.slow if i else ()) for i, c in enumerate(CASES)],
    ids=[str(index) for index in range(len(CASES))],
)
def test_every_mesh_computes_what_one_device_does(case, devices8):
    del devices8
    assert _compare(*case) < 2e-6


def _mixture(layer, params, x, mask):
    """The layer's output and the number of dropped choices of each sequence, token by token."""
    params = jax.tree.map(np.asarray, params)
    y, dropped = np.zeros_like(x), np.zeros(len(x))
    for b, sequence in enumerate(np.asarray(x)):
        taken = np.zeros(layer.num_experts, int)
        scores = np.asarray(jax.nn.softmax(sequence @ params["router"]))
        best = np.argsort(-scores)[:, : layer.top_k]
        for rank, s in np.ndindex(layer.top_k, len(sequence)):
            e = best[s, rank]
            if not mask[b, s]:
                continue
            taken[e] += 1
            if taken[e] > capacity_of(layer, len(sequence)):
                dropped[b] += 1
                continue
            token, weight = sequence[s], scores[s, e] / scores[s, best[s]].sum()
            if layer.gates_on_inputs:
                token, weight = scores[s, e] * token, 1
            gate = token @ params["gate"][e]
            hidden = gate / (1 + np.exp(-gate)) * (token @ params["up"][e])
            y[b, s] += weight * (hidden @ params["down"][e])
    return y, dropped


@pytest.mark.parametrize(
    ("capacity_factor", "num_shared", "fields"),
    [(0.5, 0, {}), (None, 2, {}), (0.5, 0, {"top_k": 1, "gates_on_inputs": True})],
)
def test_one_device_computes_the_mixture(capacity_factor, num_shared, fields):
    layer = moe(capacity_factor=capacity_factor, num_shared=num_shared, **fields)
    x, mask = _input(), _mask(_weights())
    params = nn.meta.unbox(jax.jit(layer.init)(jax.random.key(0), x)["params"])
    y, sown = jax.jit(functools.partial(layer.apply, mutable=SOWN))({"params": params}, x, mask)
    expected, dropped = _mixture(layer, params, x, mask)
    if num_shared:  # They compute every token.
        gate, up, down = (np.asarray(params[f"shared_{name}"]) for name in ("gate", "up", "down"))
        hidden = np.asarray(x) @ gate
        expected += hidden / (1 + np.exp(-hidden)) * (np.asarray(x) @ up) @ down
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_array_equal(sown["intermediates"]["dropped"][0], dropped)
    assert dropped.any() == (capacity_factor is not None)


def test_the_bias_chooses_and_moves_where_it_is_mutable():
    layer, x = moe(bias_rate=0.25, top_k=1), _input()
    variables = nn.meta.unbox(jax.jit(layer.init)(jax.random.key(0), x))
    kept = {"params": variables["params"], "router": {"bias": jnp.zeros(8).at[3].set(9)}}
    assert not variables["router"]["bias"].any()
    _, moved = jax.jit(functools.partial(layer.apply, mutable=[*SOWN, "router"]))(kept, x)
    choices = moved["intermediates"]["choices"][0]
    np.testing.assert_array_equal(choices, jnp.zeros((B, 8)).at[:, 3].set(S))
    np.testing.assert_allclose(moved["router"]["bias"], jnp.full(8, 0.25).at[3].set(8.75))


def test_a_bias_without_a_rate_chooses_and_stays():
    layer, x = moe(router_bias=True, top_k=1, gates="sigmoid"), _input()
    variables = nn.meta.unbox(jax.jit(layer.init)(jax.random.key(0), x))
    variables["router"] = {"bias": jnp.zeros(8).at[3].set(9)}
    _, after = jax.jit(functools.partial(layer.apply, mutable=[*SOWN, "router"]))(variables, x)
    choices = after["intermediates"]["choices"][0]
    np.testing.assert_array_equal(choices, jnp.zeros((B, 8)).at[:, 3].set(S))
    np.testing.assert_array_equal(after["router"]["bias"], variables["router"]["bias"])


def test_a_shared_expert_of_its_own_size_has_a_gate():
    layer, x = moe(shared_size=6, shared_is_gated=True, capacity_factor=None), _input()
    params = nn.meta.unbox(jax.jit(layer.init)(jax.random.key(0), x)["params"])
    assert params["shared_down"].shape == (6, D)
    assert params["shared_router"].shape == (D, 1)
    apply = jax.jit(layer.apply)
    without = jax.tree.map(jnp.zeros_like, {"shared_down": params["shared_down"]})
    added = apply({"params": params}, x) - apply({"params": params | without}, x)
    hidden, up = (np.asarray(x @ params[name]) for name in ("shared_gate", "shared_up"))
    expected = (hidden / (1 + np.exp(-hidden)) * up) @ params["shared_down"]
    expected /= 1 + np.exp(-np.asarray(x @ params["shared_router"]))
    np.testing.assert_allclose(added, expected, atol=1e-5)


def test_it_computes_in_the_dtype_of_its_input():
    layer, x = moe(), _input().astype(jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    assert jax.eval_shape(layer.apply, variables, x).dtype == jnp.bfloat16
    assert {v.dtype for v in jax.tree.leaves(variables)} == {jnp.dtype("float32")}


def test_its_input_may_be_a_numpy_array():
    layer, x = moe(capacity_factor=None), np.asarray(_input())
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    assert jax.eval_shape(lambda variables: layer.apply(variables, x), variables).shape == x.shape


def _trace_gradients(layer, *token_axes):
    mesh, tokens = make_mesh(DATA_EXPERT), P(*token_axes)
    boxed = jax.eval_shape(layer.init, jax.random.key(0), _input())["params"]

    def on_device(params, x):
        return jax.grad(lambda p, x: layer.apply({"params": p}, x).sum(), (0, 1))(params, x)

    specs = _specs(boxed, mesh)
    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=(specs, tokens), out_specs=(specs, tokens), check_vma=True
    )
    return jax.jit(run).trace(nn.meta.unbox(boxed), _input())


def _sent(layer, purpose, *token_axes):
    sent = trace_collectives(_trace_gradients(layer, *(token_axes or [BOTH])))
    return [c for c in sent if c.purpose == purpose]


def test_what_a_layer_sends(devices8):
    del devices8
    layer = moe()
    sent = trace_collectives(_trace_gradients(layer, BOTH))
    travels = [c for c in sent if c.kind == "all_to_all"]
    each = all_to_all_bytes(layer, (B // 8, S, D), devices=4)
    # 2 of 8 experts here, 1 sequence, room for 2 tokens: 8 * 2 tokens, of which 3/4 are sent.
    assert [c.bytes_sent for c in travels] == [each] * 4 == [8 * 2 * D * 4 * 3 // 4] * 4
    assert {c.purpose for c in travels} == {EXPERT_SCOPE}
    assert {c.kind for c in sent} == {"all_to_all", "all_reduce"}  # Of the parameters' gradients.
    counts = count_by_kind(_sent(moe(capacity_factor=None), EXPERT_SCOPE))
    assert counts == {"all_gather": 4, "reduce_scatter": 3}
    # Of the output forward, of the input and the gates backward.
    assert count_by_kind(_sent(moe(), EXPERT_SCOPE, "data")) == {"all_reduce": 3}
    split = moe(axis=None, model_axis="expert")
    assert count_by_kind(_sent(split, TENSOR_SCOPE, "data")) == {"all_reduce": 3}
    split = moe(axis=None, model_axis="expert", sequence=True)
    counts = count_by_kind(_sent(split, SEQUENCE_SCOPE, "data", "expert"))
    assert counts == {"all_gather": 3, "reduce_scatter": 2}  # The tokens' two ways; the logits.


def test_what_a_layer_sends_by_ragged_all_to_alls(devices8, monkeypatch):
    del devices8
    monkeypatch.setattr(expert_exchange, "has_ragged_all_to_all", lambda: True)
    sent = _sent(moe(capacity_factor=None, top_k=2), EXPERT_SCOPE)
    # Of one sequence 2 choices of each token travel, of which 3/4 leave the device.
    rows = [c.bytes_sent for c in sent if c.kind == "all_to_all" and c.dtype == jnp.float32]
    assert rows == [S * 2 * D * 4 * 3 // 4] * 4
    others = {(c.kind, str(c.dtype)) for c in sent} - {("all_to_all", "float32")}
    assert others == {("all_gather", "int32"), ("all_to_all", "int32")}  # The numbers of rows.


def _emulated_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """What each receiver has after all devices have sent; no output beyond its end."""
    del recv_sizes
    operands, starts, sizes, ends = (
        jax.lax.all_gather(x, axis_name)
        for x in (operand, input_offsets, send_sizes, output_offsets)
    )
    me = jax.lax.axis_index(axis_name)
    row = jnp.arange(len(output))
    for sender in range(len(operands)):
        start, size, end = starts[sender, me], sizes[sender, me], ends[sender, me]
        arrives = (row >= end) & (row < end + size)
        sent = operands[sender].at[row - end + start].get(mode="clip")
        output = jnp.where(arrives[:, None], sent, output)
    return output


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ([moe(capacity_factor=None, axis=BOTH, top_k=3)], DATA_EXPERT, BOTH),
        ([moe(capacity_factor=None, model_axis="model")], ALL, BOTH),
        ([moe(capacity_factor=None)], DATA_EXPERT, BOTH),
        ([moe(capacity_factor=None, axis="data")], {"data": 8}, "data"),
    ],
    ids=range(4),
)
def test_rows_travel_by_a_ragged_all_to_all(case, devices8, monkeypatch):
    del devices8
    monkeypatch.setattr(expert_exchange, "has_ragged_all_to_all", lambda: True)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", _emulated_ragged_all_to_all)
    assert _compare(*case) < 2e-6


def test_backends_with_a_ragged_all_to_all_get_it(devices8, monkeypatch):
    del devices8
    assert not has_ragged_all_to_all()
    monkeypatch.setattr(expert_exchange, "has_ragged_all_to_all", lambda: True)
    traced = _trace_gradients(moe(capacity_factor=None), BOTH)
    for platform in ("tpu", "cuda"):
        lowered = traced.lower(lowering_platforms=(platform,))
        assert lowered.as_text().count("ragged_all_to_all") == 4


def test_a_layer_has_the_fields_of_a_model_s_experts_with_the_same_defaults():
    of_model = {field.name: field.default for field in dataclasses.fields(Experts)}
    of_layer = {field.name: field.default for field in dataclasses.fields(MoE)}
    assert of_model.keys() - of_layer.keys() == {"dense_layers", "dense_mlp_size", "every"}
    shared = of_model.keys() & of_layer.keys() - {"num_experts", "axis"}
    assert {name: of_layer[name] for name in shared} == {name: of_model[name] for name in shared}
    assert Experts(2).of_layer.keys() == shared | {"num_experts", "axis"}
