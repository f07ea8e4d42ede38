"""The named scopes that give the purpose of a collective.

The jaxpr, the metadata of the compiled program, and profiles show these names. If the path of the
module or parameter is known, the path comes before the name.
"""

import functools
import re
from typing import NamedTuple

import numpy as np

__all__ = [
    "CAST_SCOPE",
    "CODES_SCOPE",
    "COLLECTIONS_SCOPE",
    "CONTEXT_SCOPE",
    "COUNT_SCOPE",
    "CROSS_ENTROPY_SCOPE",
    "DECODE_SCOPE",
    "EXAMPLES_SCOPE",
    "EXPERT_SCOPE",
    "FLOAT8_SCOPE",
    "GATHER_SCOPE",
    "HALVES",
    "MATRICES_SCOPE",
    "METRICS_SCOPE",
    "NEW_PARAMS_SCOPE",
    "NONFINITE_SCOPE",
    "OPTIMIZER_SCOPE",
    "OUTER_SCOPE",
    "PIPELINE_SCOPE",
    "QUANTIZED_SCOPE",
    "RECOMPUTED_SCOPE",
    "REDUCE_SCOPE",
    "REGATHER",
    "SCATTER_SCOPE",
    "SCOPES",
    "SEQUENCE_SCOPE",
    "TENSOR_SCOPE",
    "purpose_of",
    "scope_names",
]

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
OPTIMIZER_SCOPE = "optimizer"  # XLA inserts collectives for what is not elementwise.
MATRICES_SCOPE = "whole_matrices"  # Inside the optimizer's scope.
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
    MATRICES_SCOPE,
)
HALVES = ("half_0", "half_1")  # Not a collective: the halves of a batch in a layer.
REGATHER = "regather_params"  # A purpose that has no scope, see `purpose_of`.
# The scope of operations that the backward pass computes again. JAX uses the same name.
RECOMPUTED_SCOPE = "rematted_computation"
DECODE_SCOPE = "decode_params"  # Not a collective: a weight is quantized or dequantized.
# Not collectives: products that quantize both of their factors. The first has one float8 scale for
# each factor, so its factors may be sent as codes.
FLOAT8_SCOPE, QUANTIZED_SCOPE = "float8_product", "quantized_product"
# Not a collective: activations are decoded, which were gathered as float8 codes for such products.
CODES_SCOPE = "decode_activations"


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


# -------------------------------------------------------------------------------------------------
# A named scope that records in how many ticks each stage of a pipeline runs a branch.
#
# All stages of a pipeline run one program, a loop over the ticks of the schedule. In each tick a
# stage looks up in a table which branch of a `cond` it runs. So neither the jaxpr nor the compiled
# program shows how often a branch runs.


_TICKS = re.compile(r"ticks((?:_\d+)+)_in_(\d+)_of_(\d+)")


class TickRuns(NamedTuple):
    """The number of a pipeline's ticks in which an operation runs.

    Attributes:
      runs: For each stage, the number of ticks in which it runs the operation. Only the innermost
        `ticks_scope` counts.
      together: The number of ticks in which at least one stage runs the operation.
      ticks: The number of all ticks.
    """

    runs: tuple[int, ...]
    together: int
    ticks: int


def ticks_scope(is_run: np.ndarray) -> str:
    """Returns the named scope for a `cond` with one empty branch.

    Args:
      is_run: `bool[ticks, stages]`, whether the stage runs the other branch in the tick.
    """
    runs = "_".join(map(str, is_run.sum(axis=0).tolist()))
    return f"ticks_{runs}_in_{is_run.any(axis=1).sum()}_of_{len(is_run)}"


@functools.lru_cache(maxsize=4096)
def innermost_ticks(scope: str) -> str:
    """Returns the last `ticks_scope` name in a scope; "" if there is none."""
    return next((name for name in reversed(scope.split("/")) if _TICKS.fullmatch(name)), "")


def ticks_run(scope: str) -> TickRuns | None:
    """Reads the numbers from a `ticks_scope`; `None` if the innermost scope is another one."""
    if found := _TICKS.fullmatch(scope.rpartition("/")[2]):
        return TickRuns(tuple(map(int, found[1][1:].split("_"))), int(found[2]), int(found[3]))
    return None


# -------------------------------------------------------------------------------------------------
# A named scope that records how many blocks of the score matrix attention computes.
#
# A kernel of attention leaves out the blocks that its mask hides. The mask is data, so neither the
# jaxpr nor the compiled program shows how many blocks are left.


# The matrix products for each block, forward and backward: all of them, and those that count in
# reported FLOP/s. The backward pass computes the scores again, and this product does not count.
PRODUCTS_COMPUTED, PRODUCTS_COUNTED = 7, 6
_BLOCKS = re.compile(r"\bscore_blocks_(\d+)\b")


def blocks_scope(blocks: int) -> str:
    """Returns the named scope around the forward and the backward pass of blockwise attention.

    Args:
      blocks: The number of blocks of scores that are computed for one head of one example. With a
        causal mask they are the blocks on and below the diagonal.
    """
    return f"score_blocks_{blocks}"


def blocks_computed(scope: str) -> int | None:
    """Reads the number of blocks from the innermost `blocks_scope`; `None` without such a scope."""
    found = _BLOCKS.findall(scope)
    return int(found[-1]) if found else None
