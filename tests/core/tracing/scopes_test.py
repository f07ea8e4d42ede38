"""Whatever a step sends says for what: in its jaxpr, and in what is compiled and profiled."""

from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, fsdp, gather_examples, make_mesh
from manualpar.core.modes.strategy import MODES
from manualpar.core.parameters.collectives import cast_to_varying
from manualpar.core.tracing.scopes import (
    CAST_SCOPE,
    COLLECTIONS_SCOPE,
    COUNT_SCOPE,
    EXAMPLES_SCOPE,
    GATHER_SCOPE,
    METRICS_SCOPE,
    NEW_PARAMS_SCOPE,
    NONFINITE_SCOPE,
    OPTIMIZER_SCOPE,
    REDUCE_SCOPE,
    REGATHER,
    SCATTER_SCOPE,
    SCOPES,
    TickRuns,
    purpose_of,
    ticks_run,
    ticks_scope,
)
from manualpar.inspect import ledger
from manualpar.inspect.communication import trace_collectives
from manualpar.inspect.compiled import compiled_collectives
from manualpar.inspect.scope_parsing import compiled_scopes, module_of
from manualpar.models.transformer import Transformer
from tests.core.tracing.scoped_program import BATCH, make, trace
from tests.tiny import STRATEGIES

ALWAYS = {COUNT_SCOPE, METRICS_SCOPE, COLLECTIONS_SCOPE}
ZERO = {SCATTER_SCOPE, NEW_PARAMS_SCOPE}
FSDP = {GATHER_SCOPE, SCATTER_SCOPE}
# What a strategy sends besides; where everything is padded and sharded, nothing is reduced.
PURPOSES = {
    "dp": {REDUCE_SCOPE},
    "zero1": {*ZERO, REDUCE_SCOPE},
    "zero2": {*ZERO, REDUCE_SCOPE},
    "zero1, pad": ZERO,
    "fsdp": {*FSDP, REGATHER, REDUCE_SCOPE},
    "fsdp, keep": {*FSDP, REDUCE_SCOPE},
    "fsdp, step": {*FSDP, REDUCE_SCOPE},
    "fsdp, pad": {*FSDP, REGATHER},
    "fsdp, pad, step": FSDP,
    "hsdp": {*FSDP, REGATHER, REDUCE_SCOPE},
}


def scopes_of_compiled(program):
    """The scopes of each collective in a compiled step, of those that XLA has merged too."""
    collectives = compiled_collectives(trace(program).lower().compile())
    assert all(c.scope for c in collectives)
    return [scope for c in collectives for scope in compiled_scopes(c.scope)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_collective_says_what_it_is_for(devices8, name):
    program = make(name, devices8, num_minibatches=2, use_scan=True)
    found = trace_collectives(trace(program))
    assert {purpose_of(c.scope) for c in found} == ALWAYS | PURPOSES[name]
    kinds = {
        GATHER_SCOPE: "all_gather",
        REGATHER: "all_gather",
        NEW_PARAMS_SCOPE: "all_gather",
        SCATTER_SCOPE: "reduce_scatter",
    }
    for c in found:
        assert c.kind == kinds.get(purpose_of(c.scope), "all_reduce")


@pytest.mark.parametrize("name", ["zero1", "hsdp"])
def test_the_compiled_program_says_it_too(devices8, name):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    program = make(name, devices8, tx=tx, nonfinite="skip")
    found = {purpose_of(scope) for scope in scopes_of_compiled(program)}
    expected = ALWAYS | PURPOSES[name]
    # A norm of what is sharded is more than a part of it: there the compiler sends.
    assert found == (expected if name == "dp" else expected | {OPTIMIZER_SCOPE})


# Modules, or parameters where those are sent outside of the model.
MODULES = {"first", "BatchNorm_0", "layers/Dense_0", "last"}


def modules_of(found, purpose):
    return {module_of(c.scope, "Model") for c in found if purpose_of(c.scope) == purpose}


def fast_or_slow(name, use_scan):
    is_fast = (name, use_scan) in [("fsdp", False), ("fsdp", True), ("zero2", False)]
    return pytest.param(name, use_scan, marks=() if is_fast else pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "use_scan"),
    [fast_or_slow(name, use_scan) for name in STRATEGIES for use_scan in (False, True)],
)
def test_what_belongs_together_has_the_same_module(devices8, name, use_scan):
    program = make(name, devices8, num_minibatches=2, use_scan=use_scan)
    found = trace_collectives(trace(program))
    gathered = modules_of(found, GATHER_SCOPE) or modules_of(found, NEW_PARAMS_SCOPE)
    in_loop = {info.path for info, place in program.parameters if place.in_loop}
    is_in_loop = name == "zero2"  # Gradients of a loop's layers are scattered in the model.
    scattered = {x.rpartition("/")[0] if is_in_loop and x in in_loop else x for x in gathered}
    assert modules_of(found, SCATTER_SCOPE) == scattered
    assert modules_of(found, REGATHER) <= gathered
    if {GATHER_SCOPE, NEW_PARAMS_SCOPE} & PURPOSES[name]:
        paths = {info.path for info, place in program.parameters if any(place.sharded_names)}
        is_outside = "step" in name or "zero" in name
        assert gathered == (paths if is_outside else MODULES)
        assert {path.rpartition("/")[0] for path in paths} == MODULES


@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scan"])
@pytest.mark.parametrize(
    "remat", [pytest.param("none", marks=pytest.mark.slow), "full"], ids=["keep", "remat"]
)
def test_a_transformer_has_the_same_modules_there_and_back(devices8, scan_layers, remat):
    sizes = {"vocab_size": 16, "num_layers": 2, "hidden_size": 16, "mlp_size": 16, "num_heads": 2}
    model = Transformer(**sizes, scan_layers=scan_layers, remat=remat)
    tokens = np.zeros((16, 8), np.int32)

    def loss_fn(params, apply_fn, batch, rng):
        logits = apply_fn({"params": params}, batch.inputs, train=True)
        loss = jnp.square(logits).mean((1, 2))
        return loss.mean(), {"loss": (loss.sum(), loss.size)}

    program = fsdp(
        model,
        optax.sgd(0.1),
        loss_fn,
        mesh=make_mesh({"data": 8}, devices8),
        batch=Batch(inputs=tokens, labels=tokens),
        min_weight_size=0,
    )
    found = ledger(program).collectives
    modules = {purpose: {c.module for c in found if c.purpose == purpose} for purpose in SCOPES}
    paths = {info.path.rpartition("/")[0] or "Transformer" for info, _ in program.parameters}
    assert modules[GATHER_SCOPE] == modules[SCATTER_SCOPE] == paths
    layers = {module for module in paths if module.startswith("layer")}
    assert layers <= {c.module for c in found if c.purpose == REGATHER} <= paths


def test_the_compiled_program_says_the_same_modules(devices8):
    program = make("fsdp", devices8, num_minibatches=2, use_scan=True)
    written = {module_of(c.scope, "Model") for c in trace_collectives(trace(program))}
    assert {module_of(scope, "Model") for scope in scopes_of_compiled(program)} == written
    assert written == MODULES | {"", "last/bias"}


@pytest.mark.slow
def test_a_gather_says_of_which_parameter_or_module(devices8):
    def scopes(name, purpose):
        found = trace_collectives(trace(make(name, devices8, num_minibatches=2)))
        return [c.scope for c in found if purpose_of(c.scope) == purpose]

    assert f"first/kernel/{GATHER_SCOPE}" in scopes("fsdp, step", GATHER_SCOPE)
    assert f"first/kernel/{SCATTER_SCOPE}" in scopes("fsdp, step", SCATTER_SCOPE)
    assert f"layers/Dense_0/kernel/{SCATTER_SCOPE}" in scopes("zero1", SCATTER_SCOPE)
    assert f"optimizer/first/kernel/{NEW_PARAMS_SCOPE}" in scopes("zero1", NEW_PARAMS_SCOPE)
    for purpose in (GATHER_SCOPE, REGATHER, SCATTER_SCOPE):
        for scope in scopes("fsdp", purpose):
            module, last = scope.split("/")[-2:]
            assert module in {"first", "last", "Dense_0", "BatchNorm_0"}
            assert last in {GATHER_SCOPE, SCATTER_SCOPE}


class Annotated(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
        return nn.Dense(8, use_bias=False, kernel_init=init)(x)


@pytest.mark.parametrize("name", ["dp", "fsdp"])
def test_storage_along_another_axis_and_the_check_say_it(devices8, name):
    mesh = make_mesh({"data": 2, "model": 4}, devices8)
    batch = BATCH.replace(labels=np.ones((32, 8), np.float32))
    program = make(name, devices8, mesh=mesh, model=Annotated(), batch=batch, nonfinite="report")
    found = trace_collectives(trace(program))
    purposes = {(purpose_of(c.scope), c.axes) for c in found}
    assert (NONFINITE_SCOPE, ("model",)) in purposes
    assert (GATHER_SCOPE, ("model",)) in purposes
    assert {purpose for purpose, _ in purposes} <= {*SCOPES, REGATHER}


def test_a_sum_by_autodiff_is_said_by_the_cast(devices8):
    mesh = make_mesh({"data": 8}, devices8)

    def local(w, x):
        return jax.grad(lambda w: (cast_to_varying(w, ("data",)) * x).sum())(w)

    run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    (found,) = trace_collectives(jax.make_jaxpr(run)(jnp.ones(4), jnp.ones(32)))
    assert (found.kind, purpose_of(found.scope)) == ("all_reduce", CAST_SCOPE)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "manual"])
def test_what_the_compiler_is_asked_for_says_it(devices8, mode):
    text = trace(make("zero1", devices8, mode=mode)).lower().as_text(debug_info=True)
    assert NEW_PARAMS_SCOPE in text
    text = trace(make("fsdp", devices8, mode=mode)).lower().as_text(debug_info=True)
    assert (GATHER_SCOPE in text) == (mode in ("auto", "explicit"))
    assert (SCATTER_SCOPE in text) == (mode == "auto")


def test_purposes():
    assert purpose_of("jit(train)/shmap_body/minibatch/jvp(Dense)/gather_params") == GATHER_SCOPE
    assert purpose_of("transpose(jvp())/rematted_computation/Dense/gather_params") == REGATHER
    assert purpose_of("checkpoint/rematted_computation/scatter_gradients") == SCATTER_SCOPE
    assert purpose_of("optimizer/while/body/sync_metrics") == METRICS_SCOPE
    assert purpose_of("transpose(sum_gradients)") == CAST_SCOPE
    for foreign in ("", "model/reduce_sum", "my_gather_params", "gather_params_of_mine"):
        assert purpose_of(foreign) is None
    assert len(set(SCOPES)) == len(SCOPES)


def test_examples_are_not_mistaken_for_weights(devices8):
    """They are as large as the weights that are gathered again, and are gathered once."""

    def loss_fn(params, apply_fn, batch, rng):
        z = gather_examples(apply_fn({"params": params}, batch.inputs))
        loss = jax.nn.logsumexp(z @ z.T)
        return loss, {"loss": (loss, 1)}

    model = nn.Sequential([nn.Dense(16, use_bias=False), jnp.tanh, nn.Dense(16, use_bias=False)])
    batch = Batch(inputs=np.ones((16, 16), np.float32), labels=np.ones(16))
    program = make("fsdp", devices8, model=model, batch=batch, loss=loss_fn)
    found = Counter((c.purpose, c.kind) for c in trace_collectives(trace(program)))
    assert found == {
        (GATHER_SCOPE, "all_gather"): 2,
        (REGATHER, "all_gather"): 1,  # The first layer's is not needed again.
        (SCATTER_SCOPE, "reduce_scatter"): 2,
        (EXAMPLES_SCOPE, "all_gather"): 1,
        (EXAMPLES_SCOPE, "reduce_scatter"): 1,
        (METRICS_SCOPE, "all_reduce"): found[METRICS_SCOPE, "all_reduce"],
    }


# -------------------------------------------------------------------------------------------------


def test_how_often_stages_run_something():
    is_run = np.array([[True, False], [True, True], [False, False], [True, False]])
    scope = ticks_scope(is_run)
    assert scope == "ticks_3_1_in_3_of_4"
    assert ticks_run(scope) == ticks_run(f"jit(f)/while/body/{scope}") == TickRuns((3, 1), 3, 4)
    assert ticks_run(ticks_scope(is_run[:, :1])) == TickRuns((3,), 3, 4)
    for foreign in ("", f"{scope}/dense", f"my_{scope}", "ticks_in_3_of_4", "ticks_a_in_3_of_4"):
        assert ticks_run(foreign) is None
