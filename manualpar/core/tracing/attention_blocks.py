"""A named scope that records how many blocks of the score matrix attention computes.

A kernel of attention leaves out the blocks that its mask hides. The mask is data, so neither the
jaxpr nor the compiled program shows how many blocks are left.
"""

import re

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
