"""Mistakes in arguments of `manualpar.inspect`: budgets, programs to read, formulas, ledgers."""

import functools
import operator
import re
import types
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import ClosedJaxpr, Primitive
from jax.sharding import PartitionSpec as P

from manualpar import Batch, abstract_mesh, data_parallel
from manualpar.core.modes.strategy import CommCounts, Strategy
from manualpar.core.parameters.placement import Placement
from manualpar.inspect import (
    compiled_collectives,
    ledger,
    read_compiled,
    step_bytes,
    step_memory,
    trace_collectives,
)
from manualpar.inspect.budgets import (
    BudgetError,
    budget_for,
    budget_text,
    check_budget,
    parse_budgets,
    read_budgets,
    replace_budget,
)
from manualpar.inspect.compiled import HloModule, Instruction, device_groups
from manualpar.strategies.build import build_program
from tests.inspect.small_programs import module
from tests.refused.table import build, check_refused, rows
from tests.tiny import square_loss

DEVICES = abstract_mesh({"data": 4, "model": 2}, 8)
BOTH = ("data", "model")
X = jax.ShapeDtypeStruct((64, 16), jnp.float32)


# Budgets.

SENT = {"kind": "all_gather", "axes": "data", "purpose": "gather_params", "times": 1}
SENT |= {"bytes": 100, "shape": [4], "dtype": "float32"}
STEP = {
    "mesh": {"data": 8},
    "bytes": {"total": 200},
    "counts": {"all_gather": 2},
    "collectives": [SENT | {"module": name} for name in ("layers_0/mlp/up", "head")],
    "flops": {"total": 600, "by_phase": {}, "by_module": {"layers_0/mlp/up": 400, "head": 200}},
    "memory": {"parameters": 700, "gathered": 300, "peak": 1000},
    "compiled": None,
    "changes": [],
    "notes": [],
}


def budget(text):
    check_budget(parse_budgets(f"[lm]\n{text}", "budgets.toml")["lm"], STEP, "budgets.toml")


# Programs.


def traced(function, check_vma=True):
    """Traces `function` inside `shard_map`, with one device's part of an array as its argument."""

    def on_device(x):
        y = function(x).ravel()
        missing = frozenset(BOTH) - jax.typeof(y).mat.varying if check_vma else ()
        return jax.lax.pcast(y, tuple(missing), to="varying") if missing else y

    run = jax.shard_map(
        on_device, mesh=DEVICES, in_specs=P(BOTH), out_specs=P(BOTH), check_vma=check_vma
    )
    return jax.jit(run).trace(X)


def in_body(x):
    with jax.named_scope("search"):
        return jax.lax.while_loop(
            lambda x: x.sum() < 9, lambda x: jax.lax.ppermute(x, "data", [(0, 1)]), x
        )


def in_condition(x):
    return jax.lax.while_loop(lambda x: jax.lax.pmax(x.sum(), BOTH) < 9, lambda x: x + 1, x)


def solve(b):
    def apply(x):
        return jax.lax.pmean(x, "data")

    return jax.lax.custom_linear_solve(apply, b, lambda f, b: f(b), symmetric=True)


gossip = Primitive("gossip")
gossip.def_abstract_eval(lambda x, **_: x)


def chat(x, **params):
    with jax.named_scope("chat"):
        return gossip.bind(x, **params)


def inner(program):
    """Returns the jaxpr inside the program's `shard_map`."""
    [shard_map] = program.jaxpr.jaxpr.eqns
    return ClosedJaxpr(shard_map.params["jaxpr"], ())


def groups_of(attributes):
    gather = Instruction("c", "f32[8]", "all-gather", ("x",), attributes)
    return device_groups(HloModule({}, "", 8), gather)


def two(x, y):
    return x


def gather(x):
    with jax.named_scope("layer"):
        x = jax.lax.all_gather(x, "data", tiled=True)
    return jax.lax.psum(x @ x.T, "data") + jnp.zeros(4)[0]


def in_two_dimensions():
    """Builds a program of a strategy that shards two dims of a parameter, over different axes."""
    strategy = Strategy(
        "tiled",
        lambda info, axes, size: Placement(("replica", "data")),
        lambda minibatches, keep: CommCounts(minibatches, minibatches, minibatches),
    )
    options = {"mesh": abstract_mesh({"replica": 2, "data": 4}, 8), "batch": Batch(X, X)}
    args, axes = (nn.Dense(16, use_bias=False), optax.sgd(1e-3)), ("replica", "data")
    return build_program(strategy, *args, square_loss, axis_name=axes, **options)


WHILE = r"while \(scope: {}\) contains {} over \(.*Write the loop as a jax.lax.scan"
GOSSIP = r"contains gossip over \['data'.*\] \(scope: chat\), expected one of all_gather, .*kind"
TRIPS = "ledger: while_trips is .*, expected the largest number of iterations of a wh"
NOT_COMPILED = r"0 ENTRY computations.*Pass jax.jit\(f\).lower"

WRONG_BUDGETS = (
    ("byts = 1", "[lm] byts is not a known key, expected one of devices, bytes, collectives, "),
    ("byts = 1", "; the nearest one is bytes."),
    ("purposes.gather_params.flops = 1", "[lm] purposes.gather_params flops is not a known key"),
    ("bytes = -1", "[lm] bytes is -1, expected an integer, at least 0, or a size such as '1.5"),
    ("bytes = 1.5", "[lm] bytes is 1.5, expected an integer"),
    ("bytes = true", "[lm] bytes is True, expected an integer"),
    ('bytes = "1 MB"', "[lm] bytes is '1 MB', expected an integer"),
    ('flops = "1 MiB"', "[lm] flops is '1 MiB', expected an integer, at least 0."),
    ("devices = 0", "[lm] devices is 0, expected a number of devices."),
    ("modules = 3", "[lm] modules is 3, expected a table such as {bytes = 1_000}."),
    ('modules."a/b" = 3', '[lm] modules."a/b" is 3, expected a table such as {bytes = 1_000}.'),
    ("purposes.gather_parms.bytes = 1", "has no purpose gather_parms; the nearest one is gath"),
    ("axes.dta.bytes = 1", "the step has no axis dta; the nearest one is data."),
    ("modules.heed.bytes = 1", "the step has no module heed; the nearest one is head."),
    ('modules."layer_*/mlp/up".bytes = 1', 'has no module "layer_*/mlp/up"; the nearest one i'),
    ("devices = 4", "budgets.toml: [lm] is for devices=4, but the step is for 8; inspect the "),
    ("bytes = ", "budgets.toml: Invalid value"),
)

REFUSED = [
    *rows(
        "budget", budget, *((text, BudgetError, re.escape(words)) for text, words in WRONG_BUDGETS)
    ),
    *rows(
        "a file of budgets",
        operator.call,
        (
            lambda: parse_budgets("bytes = 3", "budgets.toml"),
            BudgetError,
            "bytes = 3 is outside of a table",
        ),
        (
            lambda: budget_for(parse_budgets("[fsdp]\n[zero]\n", "b.toml"), "fsdp_lm", "b.toml"),
            BudgetError,
            r"b.toml has no budget \[fsdp_lm\]; the nearest one is \[fsdp",
        ),
        (lambda: read_budgets(Path("none.toml")), BudgetError, r"none.toml: No such file"),
        (
            lambda: replace_budget("fsdp = {bytes = 1}\n", "fsdp", budget_text("fsdp", STEP)),
            BudgetError,
            "cannot be replaced",
        ),
    ),
    *rows(
        "traced",
        lambda function: trace_collectives(traced(function)),
        (in_body, WHILE.format("search", "permute")),
        (in_condition, WHILE.format("none", "all_reduce")),
        *(
            (functools.partial(chat, **params), GOSSIP)
            for params in (
                {"axis_name": "data"},
                {"axes": ("data", 0)},
                {"axis_names": frozenset(BOTH)},
            )
        ),
        (lambda x: jax.lax.pbroadcast(x, ("model",), 0), r"contains pbroadcast over \['model'\]"),
    ),
    *rows(
        "traced",
        lambda function: trace_collectives(traced(function, check_vma=False)),
        (solve, r"linear_solve .* contains \d functions with collectives"),
    ),
    *rows(
        "traced, of",
        lambda part: trace_collectives(part(traced(lambda x: jax.lax.psum(x, "data")))),
        (inner, r"psum_invariant over \['data'\].*Trace the whole program"),
        (
            lambda program: program.lower(),
            TypeError,
            r"program is a Lowered, expected the result of jax.jit\(f\).trace",
        ),
    ),
    *rows(
        "while_trips",
        lambda trips: ledger(traced(in_condition), while_trips=trips),
        *((trips, TRIPS) for trips in (-1, 2.5, True, "3")),
    ),
    *rows(
        "compiled",
        lambda line: compiled_collectives(module(f"ROOT %y = f32[6,4] {line}")),
        (
            'collective-broadcast(%x), metadata={op_name="jit(f)/cast"}',
            r"contains collective-broadcast \(scope: jit\(f\)/cast\), expected one of all-gather",
        ),
        ("send(%x), channel_id=1", "contains send "),
        (
            "all-reduce(%x), channel_id=1",
            "all-reduce has no replica_groups, expected it in .*channel_id=1",
        ),
        ("all-reduce(%x), replica_groups=@all", r"has replica_groups=@all, expected \{\{0,1\}\}"),
        ("collective-permute(%x), channel_id=1", "has no source_target_pairs"),
    ),
    *rows(
        "not compiled",
        lambda program: compiled_collectives(program()),
        (lambda: traced(jnp.sin).lower(), NOT_COMPILED),
        (lambda: traced(jnp.sin).lower().as_text(), NOT_COMPILED),
        (lambda: "", NOT_COMPILED),
        (lambda: types.SimpleNamespace(as_text=lambda: None), NOT_COMPILED),
    ),
    *rows(
        "compiled without an analysis",
        read_compiled,
        (
            types.SimpleNamespace(memory_analysis=lambda: None),
            r"read_compiled: the backend's memory_analysis\(\) is None",
        ),
    ),
    *rows(
        "groups", groups_of, (", replica_groups=@groups", "all-gather has replica_groups=@groups")
    ),
    *rows(
        "formulas",
        operator.call,
        (
            lambda: step_bytes(build(mode="auto-unconstrained")),
            "mode='auto-unconstrained', expected 'manual', 'auto'",
        ),
        (lambda: step_bytes(in_two_dimensions()), r"kernel is sharded as \('replica', 'data'\)"),
        (
            lambda: step_memory(build(mode="auto-unconstrained")),
            "mode='auto-unconstrained', expected mode 'manual'",
        ),
        (
            lambda: step_memory(build(axes={"data": 4, "model": 2}, mode="auto")),
            r"axes \['model'\] besides \('data',\), expected",
        ),
        (
            lambda: step_memory(build(), platform="rocm"),
            "step_memory: platform='rocm', expected one of",
        ),
    ),
    *rows(
        "ledger",
        lambda args: ledger(*args),
        (("fsdp",), TypeError, "program is a str, expected a Program, a function with"),
        ((two, X), TypeError, r"ledger: two\(x, y\) was given 1 arguments: missing"),
        (
            (two, X, {"a": "float32"}),
            TypeError,
            r"two was given args\[1\]\['a'\]='float32', expected an a",
        ),
        ((gather, X), r"gather communicates over a mesh axis that no jax.shard"),
    ),
    *rows(
        "ledger of a program",
        lambda case: ledger(build(builder=data_parallel), *case[0], **case[1]),
        (((X,), {}), TypeError, "data_parallel manual was given 1 arguments, expected non"),
        (
            ((), {"compile": True}),
            "ledger: compile=True, but data_parallel manual is on an abstract mesh.*make_mesh",
        ),
    ),
]


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words):
    check_refused(call, error, words)
