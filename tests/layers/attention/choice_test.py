"""Which kind of attention is chosen: shapes, masks, splits over devices, and chips."""

import inspect
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import abstract_mesh
from manualpar.layers.attention import causal_attention
from manualpar.layers.attention import context as contexts
from manualpar.layers.attention.causal_attention import ASSUMED_MEMORY, Device, cudnn_misfit
from manualpar.layers.attention.context import Context
from manualpar.planner.hardware import chip_named
from manualpar.plans.compiler_worker import tracing_for

GIB = 2**30
OLD = {
    "cpu": Device("cpu"),
    "t4": Device("gpu", "7.5", 14 * GIB),
    "a10": Device("gpu", "8.6", 22 * GIB),
    "mi300": Device("gpu", "gfx942", 190 * GIB),
}
CHIPS = ("cpu", "v5e", "t4", "mi300", "a10", "a100", "h100", "h200", "b200")
# Name -> B, S, N, K, H of the whole arrays on a device, before layers or sequences are split.
SHAPES = {
    "512": (8, 512, 16, 8, 64),
    "8k": (1, 8192, 32, 8, 128),  # Llama-3-8B; the mask and its gradient have 256 MiB.
    "32k": (1, 32_768, 32, 8, 128),  # 4 GiB
    "64k": (1, 65_536, 32, 8, 128),  # 16 GiB
    "128k": (1, 131_072, 32, 8, 128),  # 64 GiB
    "wide": (1, 8192, 16, 8, 256),
    "huge": (1, 8192, 16, 8, 512),
    "odd": (1, 8191, 32, 8, 128),
    "one": (4, 1, 32, 8, 128),
}
CAUSAL, WINDOW, DOCUMENTS, BOTH, CAP = "causal", "window", "documents", "both", "cap"
MASKS = {
    CAUSAL: (False, {}),
    WINDOW: (False, {"window": 1024}),
    DOCUMENTS: (True, {}),
    BOTH: (True, {"window": 1024}),
    CAP: (False, {"soft_cap": 30.0}),
}
# Of each chip in CHIPS: s(plash), c(uDNN) or b(lockwise).
EXPECTED = {
    "512": dict.fromkeys((CAUSAL, WINDOW, DOCUMENTS, BOTH), "bsbbccccc"),
    "8k": dict.fromkeys((CAUSAL, WINDOW, DOCUMENTS, BOTH), "bsbbccccc") | {CAP: "bsbbbbbbb"},
    "32k": {CAUSAL: "bsbbccccc", DOCUMENTS: "bsbbbcccc", BOTH: "bsbbbcccc"},
    "64k": {CAUSAL: "bsbbccccc", DOCUMENTS: "bsbbbbbcc", BOTH: "bsbbbbbcc"},
    "128k": {WINDOW: "bsbbccccc", DOCUMENTS: "bsbbbbbbb"},
    "wide": dict.fromkeys((CAUSAL, DOCUMENTS), "bsbbbbccb"),
    "huge": {CAUSAL: "bsbbbbbbb"},
    "odd": {CAUSAL: "bsbbccccc", DOCUMENTS: "bsbbbbbbb"},
    "one": {CAUSAL: "bsbbbbbbb"},
}
ROWS = [(shape, mask) for shape, masks in EXPECTED.items() for mask in masks]
NAMES = {"s": "splash", "c": "cudnn", "b": "blockwise"}


def device_of(chip):
    return OLD.get(chip) or chip_named(chip).device


def heads(shape, dtype="bfloat16"):
    B, S, N, K, H = SHAPES[shape]
    return [jax.ShapeDtypeStruct((B, S, n, H), dtype) for n in (N, K, K)]


def best(device, query, key, mask):
    has_documents, options = MASKS[mask]
    scoring = causal_attention.Scoring(**({"window": None, "soft_cap": None} | options))
    return causal_attention.best_kind(device, query, key, scoring, has_documents=has_documents)


@pytest.mark.parametrize(("shape", "mask"), ROWS)
def test_the_choice(shape, mask):
    query, key, _ = heads(shape)
    found = "".join(best(device_of(chip), query, key, mask)[0] for chip in CHIPS)
    assert found == EXPECTED[shape][mask]


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("float16", "float16"), "bbbbccccc"),
        (("float32", "float32"), "bsbbbbbbb"),
        (("bfloat16", "float32"), "bbbbbbbbb"),
    ],
)
def test_the_choice_by_dtype(dtypes, expected):
    query, key = (heads("8k", dtype)[i] for i, dtype in enumerate(dtypes))
    assert "".join(best(device_of(chip), query, key, CAUSAL)[0] for chip in CHIPS) == expected


@pytest.fixture
def chosen(monkeypatch):
    """Records the kinds that run; each returns queries."""
    found = []

    def stand_in(name, module, function):
        def attend(query, *args, **options):
            found.append(name)
            return query

        monkeypatch.setattr(module, function, attend)

    stand_in("splash", causal_attention, "splash_attention")
    stand_in("cudnn", causal_attention, "cudnn_attention")
    stand_in("blockwise", causal_attention, "attend_in_blocks")
    stand_in("ring", contexts, "ring_attention")
    return found


def run(shape, mask, mesh, context, spec):
    """Traces attention with the sequence or the heads split over four devices."""
    has_documents, options = MASKS[mask]
    B, S, *_ = SHAPES[shape]
    arrays = heads(shape)
    if has_documents:
        arrays.append(jax.ShapeDtypeStruct((B, S), jnp.int32))

    def attend(*arrays):
        return context.attention(*arrays, **options)

    of_documents = P(*spec[:2])
    specs = (spec, spec, spec, of_documents)[: len(arrays)]
    return jax.eval_shape(
        jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=True), *arrays
    )


@pytest.mark.parametrize("chip", ["cpu", "v5e", "t4", "a100", "h100", "b200"])
@pytest.mark.parametrize("mask", EXPECTED["8k"])
def test_the_splits_of_a_model_do_not_change_the_choice(chosen, mask, chip):
    """Neither tensor parallelism nor Ulysses changes the mask, although a device has less heads."""
    kind = NAMES[EXPECTED["8k"][mask][CHIPS.index(chip)]]
    for axis, context, spec in (
        ("model", Context(), P(None, None, "model")),
        ("context", Context("context", "ulysses"), P(None, "context")),
    ):
        with tracing_for(device_of(chip)):
            run("8k", mask, abstract_mesh({axis: 4}, 4), context, spec)
    assert chosen == [kind, kind]


@pytest.mark.parametrize("chip", ["cpu", "v5e", "h100"])
def test_rings_have_their_own_attention(chosen, chip):
    with tracing_for(device_of(chip)):
        run(
            "8k",
            DOCUMENTS,
            abstract_mesh({"context": 4}, 4),
            Context("context", "ring"),
            P(None, "context"),
        )
    assert chosen == ["ring"]


def test_the_mask_may_take_an_eighth_of_the_memory():
    query, key, _ = heads("8k")
    h100 = device_of("h100")
    mask = 2 * 8192**2 * 2
    assert best(h100._replace(memory_bytes=8 * mask), query, key, DOCUMENTS) == "cudnn"
    assert best(h100._replace(memory_bytes=8 * mask - 1), query, key, DOCUMENTS) == "blockwise"
    assert best(h100._replace(memory_bytes=0), query, key, CAUSAL) == "cudnn"


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_the_mask_of_global_arrays_is_split_over_the_examples(chosen, devices8, axis_type):
    """In modes auto and explicit a device has the mask of its own examples."""
    kind = getattr(jax.sharding.AxisType, axis_type)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    sharding = jax.sharding.NamedSharding(mesh, P("data"))
    query = jax.ShapeDtypeStruct((8, 512, 2, 64), jnp.bfloat16, sharding=sharding)
    documents = jax.ShapeDtypeStruct((8, 512), jnp.int32, sharding=sharding)
    one = 8 * 2 * 512**2 * 2  # The memory of which one example's mask takes an eighth.

    for memory in (one, one - 1):

        def attend(query, documents):  # A new function, because JAX caches traces.
            return causal_attention.attention(query, query, query, documents)

        with tracing_for(Device("gpu", "9.0", memory)), jax.set_mesh(mesh):
            jax.eval_shape(attend, query, documents)
    assert chosen == ["cudnn", "blockwise"]


def test_a_gpu_of_this_process_gives_its_numbers(monkeypatch):
    gpu = types.SimpleNamespace(compute_capability="9.0", memory_stats=lambda: {"bytes_limit": 7})
    monkeypatch.setattr(causal_attention.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(causal_attention.jax, "local_devices", lambda: [gpu])
    monkeypatch.setattr(causal_attention, "platform_traced_for", lambda: "gpu")
    assert causal_attention.device_traced_for() == Device("gpu", "9.0", 7)
    gpu.memory_stats = lambda: None
    assert causal_attention.device_traced_for() == Device("gpu", "9.0", ASSUMED_MEMORY)
    monkeypatch.setattr(causal_attention, "platform_traced_for", lambda: "cpu")
    assert causal_attention.device_traced_for() == Device("cpu")


def test_gpus_of_another_machine_have_no_kernel_that_jax_would_trace():
    query, key, _ = heads("8k")
    found = cudnn_misfit(Device("gpu"), query, key, has_documents=False)
    assert found == "this process has no NVIDIA GPU, but JAX needs one to trace the kernel"


def test_jax_is_answered_for_the_planned_gpu_and_asks_again_afterwards():
    names = inspect.unwrap(jax.nn.dot_product_attention).__globals__
    asked = inspect.unwrap(names["cudnn_dot_product_attention"]).__globals__
    before = dict(asked)
    for capability, is_hopper in (("8.0", False), ("9.0", True), ("10.3", True), ("", False)):
        with tracing_for(Device("gpu", capability)):
            assert asked["check_compute_capability"]("9.0") == is_hopper
            assert asked["is_cuda_compute_capability_equal"]("10.3") == (capability == "10.3")
            assert asked["check_cudnn_version"]() >= 91_002
    assert all(asked[name] is before[name] for name in before)
