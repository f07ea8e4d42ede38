"""The named scopes that say for what purpose something is sent.

They stand in the jaxpr, in the metadata of the compiled program, and in profiles, behind the path
of the module or parameter where that is known.
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
OPTIMIZER_SCOPE = "optimizer"  # In it XLA sends what the optimizer must know of other devices.
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
REGATHER = "regather_params"  # A purpose without a scope of its own, see `purpose_of`.
# JAX's name for what a `jax.checkpoint` computes again, and ours.
RECOMPUTED_SCOPE = "rematted_computation"
DECODE_SCOPE = "decode_params"  # Nothing is sent: a weight becomes codes, or is made of them again.


def purpose_of(scope: str) -> str | None:
    """For what purpose something is sent, by the named scopes around it.

    Args:
      scope: Scopes and transformations, outermost first, separated by slashes: the `scope` of a
        `Collective`, or the `op_name` of an operation in a compiled program.

    Returns:
      The innermost of `SCOPES`; `REGATHER` in place of `GATHER_SCOPE` for what is gathered again in
      the backward pass; `None` if none is there, so that it was not this package that sent.
    """
    parts = scope_names(scope)
    ours = next((part for part in reversed(parts) if part in SCOPES), None)
    return REGATHER if ours == GATHER_SCOPE and RECOMPUTED_SCOPE in parts else ours


def scope_names(scope: str) -> list[str]:
    """The names of scopes and transformations in a name stack, outermost first."""
    return [part for part in re.split(r"[/()]", scope) if part]
