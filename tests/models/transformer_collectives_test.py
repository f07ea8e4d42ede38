"""What a split transformer sends: the formula, the traced and the compiled step, exactly."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractDevice

from manualpar import Batch, Pipeline, Program, data_parallel, fsdp, hsdp, zero
from manualpar.core.mesh.mesh import mesh_of
from manualpar.core.tracing.scopes import CAST_SCOPE, CONTEXT_SCOPE, COUNT_SCOPE
from manualpar.inspect import (
    Ledger,
    bytes_by_axes,
    ledger,
    parameter_collectives,
    step_bytes,
    total_bytes,
)
from manualpar.inspect.communication import summed
from manualpar.inspect.scope_parsing import LAYER_SCOPES
from manualpar.layers import head_loss
from manualpar.models import Split, Transformer
from manualpar.models.cross_entropy import language_model_loss, mixture_of_experts_loss
from manualpar.models.flat_fields import with_fields
from manualpar.models.transformer_collectives import transformer_sends
from tests.models.transformer_families import (
    COHERE,
    GEMMA,
    GPT2,
    GPT_OSS,
    GPT_OSS_EXPERTS,
    LATENT,
    OLMO,
    QWEN,
)

SMALL = Transformer(
    vocab_size=32, num_layers=3, hidden_size=16, num_heads=8, mlp_size=32, split=Split("model")
)
EXAMPLES, POSITIONS = 16, 8
BUILDERS = {
    "dp": data_parallel,
    "zero1": functools.partial(zero, stage=1, min_weight_size=0),
    "zero2": functools.partial(zero, stage=2, min_weight_size=0),
    "fsdp": functools.partial(fsdp, min_weight_size=0),
    "keep": functools.partial(fsdp, min_weight_size=0, reshard_after_forward=False),
    "hsdp": functools.partial(hsdp, min_weight_size=0, reshard_after_forward=False),
}


def build(
    name: str,
    mesh: dict[str, int],
    *,
    minibatches: int = 1,
    gather_dtype: str = "",
    gather_code: Any = None,
    keep: Any = "residuals",
    devices: Any = None,
    **fields: Any,
) -> Program:
    tokens = jax.ShapeDtypeStruct((EXAMPLES, POSITIONS), jnp.int32)
    model = with_fields(SMALL, **fields)
    options: Any = {"axis_name": ("data", "expert")} if "expert" in mesh else {}
    options |= {"context_axis": "context"} if "context" in mesh else {}
    options |= {"pipeline": Pipeline(keep=keep)} if "stage" in mesh else {}
    return BUILDERS[name](
        model,
        optax.sgd(1.0),
        mixture_of_experts_loss if model.experts.num_experts else language_model_loss,
        **options,
        mesh=mesh_of(mesh, devices),
        batch=Batch(inputs=tokens, labels=tokens),
        num_minibatches=minibatches,
        gather_dtype=gather_dtype or None,
        gather_code=gather_code,
    )


def check(program: Program, *, compile: bool = False, stage: int | None = None) -> Ledger:
    """Whether everything over the model axis, and all that is for parameters, is predicted."""
    found = ledger(program, compile=compile, stage=stage)
    parameters = parameter_collectives(found.collectives)
    axes = [("model",), ("expert",), ("context",), ("stage",)]
    layers = [x for x in found.collectives if x.axes in axes and x not in parameters]
    if program.mesh.shape["data"] == 1:  # Then examples are spread over one of these two alone.
        split = [("expert",), ("context",)]
        layers = [x for x in layers if not (x.purpose == COUNT_SCOPE and x.axes in split)]
    model = program.abstract_state.apply_fn.__self__
    predicted = transformer_sends(program, model, stage=stage or 0)
    assert {x.purpose for x in layers} <= {*LAYER_SCOPES, CAST_SCOPE}

    def amounts(collectives: Any) -> Any:
        if model.split.overlap == "ring":  # Permutations carry the same bytes.
            return summed(((x.purpose, x.axes), x.bytes_sent) for x in collectives)
        keys = ((x.purpose, x.kind, x.axes, math.prod(x.shape), x.dtype) for x in collectives)
        return summed(zip(keys, (x.times for x in collectives), strict=True))

    assert amounts(layers) == amounts(predicted)
    gathers_again = program.strategy.reshard_after_forward or model.remat != "none"
    if not gathers_again or program.strategy.name in ("dp", "zero1", "zero2"):
        assert bytes_by_axes(parameters) == step_bytes(program)
    return found


TP = {"dtype": "bfloat16"}
SP = {"sequence_parallel": True}
GQA = {"num_kv_heads": 2, "remat": "dots"}
EXPERTS = {"num_experts": 4, "expert_axis": "expert", "scan_layers": False}
DENSE = EXPERTS | {"dense_layers": 1, "shared_experts_size": 16, "shared_gate": True}
CONTEXT = {"context_axis": "context", "bos_token": 1}
ULYSSES, GATHER = ({"context_attention": how} | CONTEXT for how in ("ulysses", "gather"))
DUAL = {"overlap": "dual_batch"}
CODES = {"matmul": "float8", "gather_code": "float8"}
CASES = [
    ("zero2", {"data": 2, "model": 4}, TP | GQA | DUAL, 2),
    ("fsdp", {"data": 2, "model": 4}, SP | CODES | {"remat": "dots"}, 1),
]
SLOW = [
    *(
        ("fsdp", {"data": 2, "model": 4}, SP | CODES | more, 2)
        for more in (
            DUAL | {"remat": "full", "matmul_layers": ("attention/[qkv]*", "mlp/*")},
            LATENT | {"matmul_layers": ("attention/*",)},
            COHERE | {"remat": "full", "scan_layers": False},
            GQA | {"overlap": "ring"},
        )
    ),
    ("fsdp", {"data": 1, "expert": 4, "model": 2}, DENSE | SP | CODES, 2),
    ("fsdp", {"data": 2, "model": 4}, GEMMA | QWEN | SP | DUAL | {"remat": "dots"}, 2),
    ("dp", {"data": 2, "model": 4}, OLMO | SP | DUAL, 2),
    ("dp", {"data": 2, "model": 4}, LATENT | SP | DUAL, 2),
    ("dp", {"data": 2, "model": 4}, GPT2 | SP | DUAL | {"remat": "full"}, 2),
    ("dp", {"data": 2, "context": 2, "model": 2}, ULYSSES | TP | DUAL | {"bos_token": -1}, 2),
    ("dp", {"data": 2, "context": 2, "model": 2}, CONTEXT | DUAL, 1),
    ("dp", {"data": 1, "expert": 4, "model": 2}, DENSE | SP | DUAL | {"remat": "full"}, 2),
    ("dp", {"data": 2, "context": 4}, CONTEXT | {"num_layers": 1}, 1),
    *(
        ("dp", {"data": 2, "context": 2, "model": 2}, fields | TP | more, 2)
        for fields, more in itertools.product(
            [CONTEXT, ULYSSES, GATHER],
            [{}, {"remat": "full"}, {"num_kv_heads": 2, "scan_layers": False}],
        )
    ),
    *(
        ("dp", {"data": 2, "model": 4}, GEMMA | QWEN | fields, 2)
        for fields in ({}, {"remat": "full"}, SP | {"remat": "dots"}, SP | {"scan_layers": False})
    ),
    *(
        ("dp", {"data": 2, "context": 4}, GEMMA | CONTEXT | fields, 1)
        for fields in ({}, {"remat": "full", "context_attention": "gather"}, {"bos_token": -1})
    ),
    ("keep", {"data": 4, "context": 2}, CONTEXT | GQA, 1),
    ("zero1", {"data": 2, "context": 4}, ULYSSES | GQA | {"scan_layers": False}, 1),
    ("keep", {"data": 2, "context": 2, "model": 2}, CONTEXT | SP | {"bos_token": -1}, 1),
    ("dp", {"data": 2, "model": 4}, SP | GQA | {"overlap": "ring"}, 2),
    ("fsdp", {"data": 4, "model": 2}, SP | {"tied_head": True, "gather_dtype": "bfloat16"}, 1),
    ("fsdp", {"data": 2, "expert": 4}, EXPERTS | {"remat": "full"}, 2),
    ("dp", {"data": 2, "expert": 2, "model": 2}, EXPERTS | TP, 1),
    ("dp", {"data": 1, "expert": 4, "model": 2}, EXPERTS | SP | {"remat": "full"}, 2),
    ("dp", {"data": 1, "expert": 4, "model": 2}, DENSE | SP | {"remat": "full"}, 2),
    ("keep", {"data": 2, "expert": 2, "model": 2}, DENSE | {"router_bias": True}, 1),
    *(
        ("dp", {"data": 2, "expert": 2, "model": 2}, EXPERTS | GPT_OSS_EXPERTS | GPT_OSS | more, 1)
        for more in (TP, SP | {"remat": "full"})
    ),
    ("dp", {"data": 2, "context": 2, "model": 2}, GPT_OSS | CONTEXT | TP, 2),
    *(
        ("dp", {"data": 2, "model": 4}, fields | more, 1)
        for fields in (OLMO | {"num_kv_heads": 2}, COHERE, GPT2)
        for more in (TP, SP | {"remat": "full"})
    ),
    *(
        ("dp", {"data": 2, "model": 4}, LATENT | more, 2)
        for more in (TP, SP, {"latent_query_rank": 0} | SP | {"remat": "dots"})
    ),
    ("dp", {"data": 2, "context": 2, "model": 2}, LATENT | CONTEXT | SP | {"remat": "full"}, 1),
    ("dp", {"data": 2, "context": 4}, LATENT | ULYSSES | {"latent_value_size": 12}, 1),
    *(
        (name, {"replica": 2, "data": 2, "model": 2} if name == "hsdp" else mesh, fields, 2)
        for name, mesh, fields in itertools.product(
            BUILDERS,
            [{"data": 2, "model": 4}, {"data": 1, "model": 8}],
            [TP, TP | GQA, SP, SP | GQA, SP | {"tied_head": True, "scan_layers": False}],
        )
    ),
]


@pytest.mark.parametrize(
    ("name", "mesh", "fields", "minibatches"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_every_collective_is_predicted(devices8, name, mesh, fields, minibatches):
    check(build(name, mesh, minibatches=minibatches, **fields))


@pytest.mark.parametrize(("heads", "keys", "kind"), [(8, 2, "all_to_all"), (2, 2, "permute")])
def test_gpus_exchange_heads_that_their_number_divides(heads, keys, kind):
    gpus = [AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")] * 8
    mesh, heads = {"data": 2, "context": 2, "model": 2}, {"num_heads": heads, "num_kv_heads": keys}
    found = check(build("dp", mesh, devices=gpus, num_layers=1, **CONTEXT, **heads))
    in_layer = [x for x in found.collectives if x.purpose == CONTEXT_SCOPE and "layer" in x.module]
    assert {x.kind for x in in_layer} - {"all_gather"} == {kind}


def test_a_head_by_chunks_sends_as_much(monkeypatch, devices8):
    monkeypatch.setattr(head_loss, "CHUNK_ELEMENTS", 0)
    monkeypatch.setattr(head_loss, "FEWEST_COLUMNS", 3)
    check(build("dp", {"data": 2, "model": 4}, num_layers=1, label_smoothing=0.1, z_loss=0.1))


STAGES = {"num_layers": 4}
STAGED = [
    ("dp", {"stage": 2, "data": 1, "model": 2}, STAGES | TP),
    ("keep", {"stage": 4, "data": 1, "model": 2}, STAGES | SP | {"num_kv_heads": 2}),
    ("dp", {"stage": 2, "data": 2, "model": 2}, STAGES | TP | {"remat": "full"}),
    ("dp", {"stage": 2, "data": 1, "model": 2}, STAGES | TP | DUAL),
    ("dp", {"stage": 2, "data": 2, "context": 2}, STAGES | CONTEXT | {"bos_token": -1}),
    ("dp", {"stage": 2, "data": 2, "context": 2}, STAGES | ULYSSES | {"bos_token": -1}),
    ("dp", {"stage": 2, "data": 1, "context": 4}, STAGES | GATHER | GQA | {"bos_token": -1}),
    (
        "dp",
        {"stage": 2, "data": 1, "model": 4},
        GEMMA | QWEN | SP | {"num_layers": 5},
    ),
    (
        "dp",
        {"stage": 2, "data": 1, "context": 2, "model": 2},
        GEMMA | CONTEXT | {"num_layers": 5, "bos_token": -1, "remat": "full"},
    ),
    (
        "dp",
        {"stage": 2, "data": 1, "expert": 2, "model": 2},
        STAGES | EXPERTS | SP | {"remat": "dots", "scan_layers": True},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["inputs", "residuals"])
@pytest.mark.parametrize(("name", "mesh", "fields"), STAGED, ids=str)
def test_what_layers_on_stages_send_is_predicted(devices8, name, mesh, fields, keep):
    program = build(name, mesh, minibatches=4, keep=keep, **fields)
    for stage in (0, mesh["stage"] - 1):
        check(program, stage=stage)


@pytest.mark.slow
def test_what_has_no_formula_is_refused(devices8):
    program = build("dp", {"stage": 2, "data": 1, "context": 2}, minibatches=2, **STAGES, **CONTEXT)
    with pytest.raises(ValueError, match=r"transformer_sends: bos_token=1, expected -1"):
        transformer_sends(program, program.abstract_state.apply_fn.__self__)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        pytest.param("keep", SP | {"num_kv_heads": 2}, marks=pytest.mark.slow),
        *(pytest.param(name, SP | GQA, marks=pytest.mark.slow) for name in BUILDERS),
        *(pytest.param(name, GQA, marks=pytest.mark.slow) for name in BUILDERS),
    ],
)
def test_the_compiler_sends_as_much(devices8, name, fields):
    mesh = {"replica": 2, "data": 2, "model": 2} if name == "hsdp" else {"data": 2, "model": 4}
    program = build(name, mesh, num_layers=2, **fields)
    found = check(program, compile=True)
    over_model = [x for x in found.collectives if "model" in x.axes]
    of_model = [x for x in found.compiled.collectives if x.group_size == mesh["model"]]
    if name != "hsdp":  # Whose axes are all of one size.
        assert total_bytes(of_model) == total_bytes(over_model)
    assert total_bytes(found.compiled.collectives) <= found.total_bytes
    assert {x.kind for x in found.changes} <= {"merged"}
