import functools

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from manualpar import Batch, data_parallel, fsdp, make_mesh
from manualpar.training.replicas import ReplicaError, ReplicaSentinel
from tests.tiny import class_loss
from tests.training.broken_replicas import break_leaf, corrupt, flip_bit, flipped, replace

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("int4", "uint4", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
]
LAYOUT = {
    "key": P(),
    "params": {"bias": P(), "kernel": P("data"), "scale": P()},
    "raw_key": P(),
    "step": P(),
}


def put(tree, layout, mesh):
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), layout)
    return jax.tree.map(jax.device_put, tree, shardings)


def make_state(mesh):
    rng = np.random.default_rng(0)
    state = {
        "key": jax.random.key(1),
        "params": {
            "bias": rng.normal(size=24).astype(np.float32),
            "kernel": rng.normal(size=(16, 3)).astype(jnp.bfloat16),
            "scale": rng.normal(size=(2, 3, 4)).astype(np.float16),
        },
        "raw_key": jax.random.PRNGKey(2),
        "step": np.int32(7),
    }
    return put(state, LAYOUT, mesh)


def on_eight(devices8, value, *axes):
    """A sentinel and a state of one leaf, its dims sharded over `axes`."""
    mesh = make_mesh({"replica": 2, "data": 4}, devices8)
    layout = {"x": P(*axes)}
    return ReplicaSentinel(mesh, layout), put({"x": value}, layout, mesh)


def assert_seen(sentinel, state, device, change):
    sentinel.check(state)
    with pytest.raises(ReplicaError, match=r"'x' is not the same"):
        sentinel.check({"x": corrupt(state["x"], device, change)})


# What is compared.


def test_every_device_of_every_mesh_is_compared_with_its_copies(mesh8):
    sentinel, state = ReplicaSentinel(mesh8, LAYOUT), make_state(mesh8)
    sentinel.check(state)
    for path in ("key", "params/bias", "raw_key", "step"):
        for device in mesh8.devices.flat:
            with pytest.raises(
                ReplicaError, match=rf"^'{path}' .*device {device.id} .*1 of 6 leav"
            ):
                sentinel.check(break_leaf(state, path, device))
    for device in mesh8.devices.flat:
        broken = break_leaf(state, "params/kernel", device)
        if mesh8.shape["data"] < 8:
            with pytest.raises(ReplicaError, match=rf"^'params/kernel' .*device {device.id} "):
                sentinel.check(broken)
        else:
            sentinel.check(broken)  # What only one device holds is compared with nothing.


@pytest.mark.parametrize(
    ("spec", "index", "message"),
    [
        (P(), 0, r": device 0 \(process 0, replica=0, data=0, model=0\), against .*7 .*=1\)\. "),
        (P("data"), 2, r": device 2 \(process 0, replica=0, data=1, model=0\), against device 3 "),
        (P(None, ("replica", "data")), 7, r": device 7 .*, against device 6 .*, neither of them a"),
        (P("model", "data"), 4, r": device 4 .*, against device 0 \([^)]*\), neither of them a"),
    ],
)
def test_the_message_says_who_disagrees(devices8, spec, index, message):
    mesh = make_mesh({"replica": 2, "data": 2, "model": 2}, devices8)
    x = put(np.arange(64, dtype=np.int32).reshape(8, 8), spec, mesh)
    sentinel = ReplicaSentinel(mesh, {"x": spec})
    sentinel.check({"x": x})
    with pytest.raises(ReplicaError, match=message):
        sentinel.check({"x": corrupt(x, mesh.devices.flat[index], flipped(0))})


def test_the_first_leaf_of_the_tree_is_named_and_the_others_counted(devices8):
    mesh = make_mesh({"data": 8}, devices8)
    state = make_state(mesh)
    for path, device in (("step", 1), ("params/scale", 2), ("params/bias", 3)):
        state = break_leaf(state, path, devices8[device], bit=5)
    message = r"^'params/bias' .*: device 3 \(process 0, data=3\), against .*3 of 6 leaves differ"
    with pytest.raises(ReplicaError, match=message):
        ReplicaSentinel(mesh, LAYOUT).check(state)


def test_an_update_that_was_not_synchronised_is_found(devices8):
    sentinel, state = on_eight(devices8, np.ones(5, np.float32))
    update = jax.shard_map(
        lambda x: x + jax.lax.axis_index("data"),
        mesh=state["x"].sharding.mesh,
        in_specs=P(),
        out_specs=P(),
        # What the test is about: the type check would refuse it.
        check_vma=False,
    )
    with pytest.raises(ReplicaError, match=r"^'x' .*: device 1 .*device 7 .*, against device 0 "):
        sentinel.check({"x": jax.jit(update)(state["x"])})


def test_a_long_list_of_devices_is_cut(devices8, monkeypatch):
    monkeypatch.setattr("manualpar.training.replicas.MAX_DEVICES_NAMED", 3)
    sentinel, state = on_eight(devices8, np.ones(5, np.float32))
    with pytest.raises(ReplicaError, match=r", against device 0 .*device 2 .* and 4 more\. "):
        sentinel.check({"x": corrupt(state["x"], devices8[7], flipped(0))})


# What is seen.


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_of_every_dtype_counts(devices8, dtype):
    with jax.enable_x64(True):
        dtype = jnp.dtype(dtype)
        bits = 1 if dtype == jnp.bool_ else jax.dtypes.itemsize_bits(dtype)
        value = np.arange(8).astype(np.int8).astype(dtype)
        # All bits are ones: among floats a NaN.
        value.view(np.uint8)[5 * dtype.itemsize : 6 * dtype.itemsize] = 2 ** min(bits, 8) - 1
        for axes, device in ((), devices8[0]), (("data",), devices8[6]):
            sentinel, state = on_eight(devices8, value, *axes)
            assert state["x"].dtype == dtype
            for bit in range(bits):  # Of the second element on the device.
                assert_seen(sentinel, state, device, flipped(dtype.itemsize * 8 + bit))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_every_bit_of_a_key_counts(devices8, impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 4)
    sentinel, state = on_eight(devices8, keys, "data")
    mesh = state["x"].sharding.mesh
    bits = jax.random.key_data(keys).dtype.itemsize * 8 * jax.random.key_data(keys).shape[-1]
    for bit in range(0, bits, 7):
        raw = put(jax.random.key_data(keys), P("data"), mesh)
        broken = jax.random.wrap_key_data(corrupt(raw, devices8[3], flipped(bit)), impl=impl)
        with pytest.raises(ReplicaError, match="'x' is not the same"):
            sentinel.check({"x": broken})


def test_floats_that_compare_equal_or_never_do_are_compared_by_their_bits(devices8):
    nan = np.uint32([0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800001]).view(np.float32)
    value = np.concatenate([nan, np.float32([0.0, -0.0, np.inf, 1e-45])])
    sentinel, state = on_eight(devices8, value)

    def write(index, bits):
        def change(x):
            x.view(np.uint32)[index] = bits
            return x

        return change

    for index, bits in ((0, 0x7FC00002), (1, 0xFFC00001), (3, 0x7FC00001), (4, 1 << 31), (7, 0)):
        assert_seen(sentinel, state, devices8[2], write(index, bits))
    sentinel.check({"x": corrupt(state["x"], devices8[2], write(0, 0x7FC00000))})


@pytest.mark.parametrize("shape", [(2,), (300,), (5, 7), (2, 3, 4), (1, 6, 1)], ids=str)
def test_positions_count(devices8, shape):
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    sentinel, state = on_eight(devices8, value)

    def swap(x, i, j):
        x.reshape(-1)[[i, j]] = x.reshape(-1)[[j, i]]
        return x

    for j in range(1, min(value.size, 24)):
        for i in {0, j - 1}:
            assert_seen(sentinel, state, devices8[5], functools.partial(swap, i=i, j=j))
    assert_seen(sentinel, state, devices8[5], lambda x: np.roll(x, 1))
    assert_seen(sentinel, state, devices8[5], lambda x: x.reshape(-1)[::-1].reshape(x.shape))


def test_scalars_and_empty_arrays(devices8):
    sentinel, state = on_eight(devices8, np.float32(0))
    assert_seen(sentinel, state, devices8[1], flipped(31))
    for shape, axes in ((0,), ()), ((8, 0, 3), ("data",)):
        sentinel, state = on_eight(devices8, np.zeros(shape, np.float32), *axes)
        sentinel.check(state)


@functools.cache
def sentinel_and_state():
    mesh = make_mesh({"replica": 2, "data": 4}, jax.devices()[:8])
    return ReplicaSentinel(mesh, LAYOUT), make_state(mesh)


@hypothesis.given(data=st.data())
def test_a_bit_that_flips_anywhere_is_found(devices8, data):
    sentinel, state = sentinel_and_state()
    paths = ["key", "params/bias", "params/kernel", "params/scale", "raw_key", "step"]
    path = data.draw(st.sampled_from(paths), label="leaf")
    device = data.draw(st.sampled_from(devices8), label="device")

    def flip_any(x):
        return flip_bit(x, data.draw(st.integers(0, x.nbytes * 8 - 1), label="bit"))

    with pytest.raises(ReplicaError, match=rf"^'{path}' .*device {device.id} .*1 of 6 leaves"):
        sentinel.check(replace(state, path, lambda x: corrupt(x, device, flip_any)))


# What a fingerprint is.


def mix(x):
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def fingerprint(words):
    """The formula of the module's docstring, in Python's integers."""
    first = [mix(int(word) ^ mix(i)) for i, word in enumerate(words)]
    second = [mix((h + mix(i)) % 2**32) for i, h in enumerate(first)]
    return [sum(first) % 2**32, sum(second) % 2**32]


def test_fingerprints_are_those_of_what_each_device_holds(mesh8):
    layout = {"a": P(), "b": P("data"), "c": P(mesh8.axis_names)}
    rng = np.random.default_rng(0)
    state = {name: rng.normal(size=(8, 3, 5)).astype(np.float32) for name in layout}
    state = put(state, layout, mesh8)
    result = ReplicaSentinel(mesh8, layout).fingerprints(state)
    assert isinstance(result, np.ndarray)
    assert result.dtype == np.uint32
    assert result.shape == (8, 3, 2)
    for leaf, x in enumerate(state.values()):
        held = {s.device: np.asarray(s.data).reshape(-1).view(np.uint32) for s in x.global_shards}
        expected = [fingerprint(held[device]) for device in mesh8.devices.flat]
        np.testing.assert_array_equal(result[:, leaf], expected)


def unmix(x):
    x = (x ^ x >> 16) * pow(0xC2B2AE35, -1, 2**32) % 2**32
    x = (x ^ x >> 13 ^ x >> 26) * pow(0x85EBCA6B, -1, 2**32) % 2**32
    return x ^ x >> 16


@pytest.mark.parametrize("kept", [0, 1])
def test_what_one_of_the_two_sums_misses_the_other_sees(devices8, kept):
    # The terms of the first word grow by what those of the second are made to lose.
    steps = [lambda w, i: mix(w ^ mix(i)), lambda w, i: mix((mix(w ^ mix(i)) + mix(i)) % 2**32)]
    term = steps[kept]
    lost = (term(6, 1) - term(7, 0) + term(5, 0)) % 2**32
    hashed = unmix(lost) if kept == 0 else unmix((unmix(lost) - mix(1)) % 2**32)
    other = [7, hashed ^ mix(1), 8]
    same = [a == b for a, b in zip(fingerprint([5, 6, 8]), fingerprint(other), strict=True)]
    assert same == [kept == 0, kept == 1]
    sentinel, state = on_eight(devices8, np.uint32([5, 6, 8]))
    assert_seen(sentinel, state, devices8[4], lambda x: np.uint32(other))


# What it costs.


def test_devices_send_nothing(mesh8):
    sentinel, state = ReplicaSentinel(mesh8, LAYOUT), make_state(mesh8)
    traced = sentinel._on_devices.trace(tuple(jax.tree.leaves(state)))
    text = str(traced.jaxpr)
    sends = ("psum", "pmax", "all_gather", "reduce_scatter", "all_to_all", "ppermute")
    assert not [name for name in sends if name in text]
    compiled = traced.lower().compile().as_text()
    sends = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective")
    assert not [name for name in sends if name in compiled]


def test_nothing_of_the_size_of_a_leaf_is_stored(devices8):
    sentinel, state = on_eight(devices8, np.ones((64, 3, 32), jnp.bfloat16))
    memory = sentinel._on_devices.lower((state["x"],)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < state["x"].nbytes / 4


def test_it_compiles_once(devices8, caplog):
    mesh = make_mesh({"data": 8}, devices8)
    sentinel, state = ReplicaSentinel(mesh, LAYOUT), make_state(mesh)
    # The same layout in other words.
    other = replace(state, "params/kernel", lambda x: put(x, P("data", None), mesh))
    broken = break_leaf(state, "step", devices8[1])
    with jax.log_compiles():
        for checked in (state, other, state):
            sentinel.check(checked)
        with pytest.raises(ReplicaError):
            sentinel.check(broken)
    compiled = [r.message for r in caplog.records if r.message.startswith("Finished XLA comp")]
    assert len(compiled) == 1, compiled


# Programs.


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="output_dense")(nn.silu(nn.Dense(32, name="input_dense")(x)))


@pytest.mark.slow
@pytest.mark.parametrize("builder", [data_parallel, fsdp])
def test_a_program_passes_until_a_device_goes_wrong(devices8, builder):
    mesh = make_mesh({"replica": 2, "data": 4}, devices8)
    rng = np.random.default_rng(0)
    batch = Batch(rng.normal(size=(16, 8)).astype(np.float32), np.arange(16, dtype=np.int32) % 8)
    kwargs = {"min_weight_size": 0} if builder is fsdp else {}
    program = builder(Classifier(), optax.adam(0.1), class_loss, mesh=mesh, batch=batch, **kwargs)
    sentinel = ReplicaSentinel(program.mesh, program.layout)
    state = program.init(jax.random.key(0))
    sentinel.check(state)
    initial = state
    for _ in range(3):
        state, _ = program.train_step(state, batch)
        sentinel.check(state)

    with pytest.raises(ValueError, match="is donated to an earlier call"):
        sentinel.check(initial)
    kernel = "params/input_dense/kernel"
    for path in (kernel, "opt_state/0/mu/output_dense/bias", "opt_state/0/count", "step", "rng"):
        message = rf"^'{path}' .*device 3 \(process 0, replica=0, data=3\).* 1 of "
        with pytest.raises(ReplicaError, match=message):
            sentinel.check(break_leaf(state, path, devices8[3]))
    # The next step spreads it, with the gradients of the wrong device, to leaves that come before.
    state, _ = program.train_step(break_leaf(state, kernel, devices8[3], bit=22), batch)
    with pytest.raises(ReplicaError, match=r"^'params/input_dense/bias' "):
        sentinel.check(state)


# Mistakes.


def test_a_state_that_is_not_in_the_layout_is_refused(devices8):
    mesh = make_mesh({"data": 8}, devices8)
    sentinel, state = ReplicaSentinel(mesh, LAYOUT), make_state(mesh)
    moved = replace(state, "params/bias", lambda x: put(x, P("data"), mesh))
    with pytest.raises(ValueError, match=r"'params/bias' of the state is laid out as .*'data'"):
        sentinel.check(moved)
    one_device = replace(state, "step", lambda x: jax.device_put(x, devices8[0]))
    with pytest.raises(ValueError, match=r"'step' of the state is laid out as Single"):
        sentinel.check(one_device)
    reordered = replace(
        state, "step", lambda x: put(x, P(), make_mesh({"data": 8}, devices8[::-1]))
    )
    with pytest.raises(ValueError, match=r"'step' of the state is laid out as"):
        sentinel.check(reordered)
    with pytest.raises(ValueError, match=r"'raw_key' of the state is a ndarray"):
        sentinel.check(replace(state, "raw_key", np.asarray))
    with pytest.raises(ValueError, match=r"only one of them has \['extra', 'step'\]"):
        sentinel.check({**{k: v for k, v in state.items() if k != "step"}, "extra": state["step"]})
