"""The named scopes that give the purpose of a collective.

The jaxpr, the metadata of the compiled program, and profiles show these names. If the path of the
module or parameter is known, the path comes before the name.
"""

import re

GATHER_SCOPE = "gather_params"
SCATTER_SCOPE = "scatter_gradients"
REDUCE_SCOPE = "sync_gradients"
CAST_SCOPE = "sum_gradients"
NEW_PARAMS_SCOPE = "gather_new_params"
METRICS_SCOPE = "sync_metrics"
COUNT_SCOPE = "count_examples"
COLLECTIONS_SCOPE = "sync_collections"
NONFINITE_SCOPE = "find_nonfinite"
EXAMPLES_SCOPE = "gather_examples"
TENSOR_SCOPE = "tensor_parallel"
SEQUENCE_SCOPE = "sequence_parallel"
CROSS_ENTROPY_SCOPE = "cross_entropy"
EXPERT_SCOPE = "expert_parallel"
CONTEXT_SCOPE = "context_parallel"
PIPELINE_SCOPE = "pipeline"
OUTER_SCOPE = "outer_step"
OPTIMIZER_SCOPE = "optimizer"  # XLA inserts the optimizer's collectives.
SCOPES = (
    GATHER_SCOPE,
    SCATTER_SCOPE,
    REDUCE_SCOPE,
    CAST_SCOPE,
    NEW_PARAMS_SCOPE,
    METRICS_SCOPE,
    COUNT_SCOPE,
    COLLECTIONS_SCOPE,
    NONFINITE_SCOPE,
    EXAMPLES_SCOPE,
    TENSOR_SCOPE,
    SEQUENCE_SCOPE,
    CROSS_ENTROPY_SCOPE,
    EXPERT_SCOPE,
    CONTEXT_SCOPE,
    PIPELINE_SCOPE,
    OUTER_SCOPE,
    OPTIMIZER_SCOPE,
)
REGATHER = "regather_params"  # A purpose that has no scope, see `purpose_of`.
# The scope of operations that the backward pass computes again. JAX uses the same name.
RECOMPUTED_SCOPE = "rematted_computation"
DECODE_SCOPE = "decode_params"  # Not a collective: a weight is quantized or dequantized.


def purpose_of(scope: str) -> str | None:
    """Returns the purpose of a collective, from the named scopes around it.

    Args:
      scope: Scopes and transformations, outermost first, separated by slashes: the `scope` of a
        `Collective`, or the `op_name` of an operation in a compiled program.

    Returns:
      The innermost of `SCOPES`; `REGATHER` in place of `GATHER_SCOPE` for a gather that the
      backward pass repeats; `None` without such a scope: this package did not write the collective.
    """
    names = scope_names(scope)
    ours = next((name for name in reversed(names) if name in SCOPES), None)
    return REGATHER if ours == GATHER_SCOPE and RECOMPUTED_SCOPE in names else ours


def scope_names(scope: str) -> list[str]:
    """Splits a name stack into its scopes and transformations, outermost first."""
    return [name for name in re.split(r"[/()]", scope) if name]
