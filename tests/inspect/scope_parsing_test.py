import pytest

from manualpar.core.tracing.scopes import (
    CAST_SCOPE,
    COUNT_SCOPE,
    GATHER_SCOPE,
    METRICS_SCOPE,
    REDUCE_SCOPE,
    REGATHER,
    TENSOR_SCOPE,
)
from manualpar.inspect.scope_parsing import (
    OTHER,
    compiled_scopes,
    module_of,
    phase_of,
    purpose_in,
)

IN_BACKWARD = "transpose(jvp(minibatch_0))/jvp()"
# How the same module is written in the forward pass, recomputed, backward, and compiled.
SAME_MODULE = {
    "last": [
        "minibatch_0/jvp(Model)/last/gather_params",
        f"minibatch_0/{IN_BACKWARD}/rematted_computation/Model/last/gather_params",
        f"minibatch_0/{IN_BACKWARD}/Model/last/scatter_gradients",
        "minibatch/transpose(minibatch)/jvp(Model)/last/scatter_gradients",
        f"jit(train)/shard_map/while/body/closed_call/minibatch/{IN_BACKWARD}/checkpoint"
        "/rematted_computation/Model/last/gather_params",
        "jvp(Model)/jvp(Model)/last",
    ],
    "layers/Dense_0": [
        "jvp(Model)/jvp()/layers/Dense_0/gather_params",
        "jvp(Model)/jvp()//layers/Dense_0",
        f"{IN_BACKWARD}/Model/transpose(jvp())/rematted_computation/layers/Dense_0/gather_params",
        "jit(f)/jvp(Model)/jvp()/closed_call/while/body/closed_call/layers/Dense_0/gather_params",
        "jit(f)/jvp(Model)/jvp()/while/body/eval_jaxpr/layers/Dense_0/gather_params",  # jax 0.12
        "jvp(Model)/layers/Dense_0",
        "vmap(jvp(Model))/layers/Dense_0",
    ],
    "layer_0/attention/query": [
        "jvp(Model)/Model._run_layers/layer_0/attention/query/gather_params",
        "jvp(Model/Model._run)/jvp(Model)/Model._run/layer_0/attention/query/gather_params",
        f"{IN_BACKWARD}/Model/Model._run/transpose(jvp(Model))/Model._run/jvp(Model)/Model._run"
        "/rematted_computation/layer_0/attention/query/gather_params",
        "jvp(Model)/layer_0/jvp(layer_0)/attention/query",
        "jvp(Model/Model._run)/Model/Model._run/jvp(layer_0/attention/query)/gather_params",
    ],
    "attention": [
        "jvp(Model)/attention/vmap(BTNH,BSNH->BNTS)",
        "jvp(Model)/attention/jit(silu)",
        "jvp(Model)/attention/jit(<lambda>)/jit(a/b)",
        "jvp(Model)/attention/cond/branch_1_fun",
        "while/body/ticks_8_8_in_9_of_9/cond/branch_1_fun/jvp(Model)/attention",
        "ticks_8_8_in_9_of_9/ticks_8_0_in_8_of_9/transpose(jvp())/Model/attention",
    ],
    "first/kernel": ["optimizer/first/kernel/gather_new_params", "first/kernel/scatter_gradients"],
    "Model": ["jvp(Model)/gather_params", "jvp(Model)"],
    "": ["", "sync_metrics", "optimizer", "minibatch_3", "jit(train)/shard_map", "jvp()"],
}


@pytest.mark.parametrize(
    ("module", "scope"),
    [(module, scope) for module in SAME_MODULE for scope in SAME_MODULE[module]],
)
def test_the_path_of_a_module(module, scope):
    assert module_of(scope, "Model") == module


def test_names_that_look_like_others_stay():
    # Without a transformation between them equal names are a module in a module.
    assert module_of("Model/layers/layers/dense", "Model") == "layers/layers/dense"
    assert module_of("Model/cond/dense", "Model") == "cond/dense"
    assert module_of("Model/while/dense", "Model") == "while/dense"
    assert module_of("Model/my-name_2/minibatch_norm", "Model") == "my-name_2/minibatch_norm"
    assert module_of("Model/dense") == "Model/dense"
    assert module_of("first/Model/dense", "Model") == "first/Model/dense"


def test_phases():
    assert phase_of("jvp(Model)/dense") == phase_of("") == phase_of("sync_metrics") == "forward"
    assert phase_of(f"{IN_BACKWARD}/Model/dense") == "backward"
    assert phase_of(f"{IN_BACKWARD}/rematted_computation/Model/dense") == "recomputed"
    assert phase_of("optimizer/muon/dot_general") == "update"
    assert phase_of("dense/kernel/gather_new_params") == "update"
    for scope in ("dense/kernel/scatter_gradients", REDUCE_SCOPE, CAST_SCOPE):
        assert phase_of(scope) == "backward"
    # Parts of names are no names.
    assert phase_of("jvp(my_optimizer)/transposed/rematted") == "forward"


def test_purposes():
    data = ("replica", "data")
    assert purpose_in("a/gather_params", ("model",), data) == GATHER_SCOPE
    assert purpose_in("rematted_computation/gather_params", ("data",), data) == REGATHER
    assert purpose_in("attention/out", ("model",), data) == TENSOR_SCOPE
    assert purpose_in(f"{IN_BACKWARD}/attention/norm", ("model",), data) == CAST_SCOPE
    assert purpose_in("attention/out", ("model", "data"), data) == OTHER
    assert purpose_in("attention/out", ("model",)) == OTHER
    assert purpose_in("attention/out", (), data) == OTHER


def test_scopes_of_what_was_merged():
    assert compiled_scopes("jit(f)/dense/gather_params/all_gather") == (
        "jit(f)/dense/gather_params",
    )
    assert compiled_scopes("all_gather") == ("",)
    added_by_xla = r"state.params[\'layers\'][0][\'dense\'][\'kernel\']"
    assert compiled_scopes(added_by_xla) == ("layers/0/dense/gather_params",)
    merged = "jit(f)/shard_map/(sync_metrics/psum:a/count_examples/psum_invariant:psum)"
    scopes = compiled_scopes(merged)
    assert scopes == (
        "jit(f)/shard_map/sync_metrics",
        "jit(f)/shard_map/a/count_examples",
        "jit(f)/shard_map",
    )
    assert [purpose_in(scope, ()) for scope in scopes] == [METRICS_SCOPE, COUNT_SCOPE, OTHER]
    # Parentheses of transformations, in which a colon separates nothing, and others at the end.
    nested = compiled_scopes("jit(f)/(jvp(A)/a/x:transpose(jvp(B:C))/b/y)")
    assert nested == ("jit(f)/jvp(A)/a", "jit(f)/transpose(jvp(B:C))/b")
    assert compiled_scopes("jit(f)/(odd)/psum") == ("jit(f)/(odd)",)
