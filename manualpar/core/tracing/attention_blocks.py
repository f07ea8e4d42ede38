"""How many blocks of scores attention computes, as a named scope says it to readers.

A kernel of attention leaves out the blocks that its mask hides. The mask is data, so neither the
jaxpr nor the compiled program shows how many blocks are left.
"""

import re

# Products of scores, forward and backward together: a backward pass by blocks computes the scores
# again, which speeds in operations a second do not count.
PRODUCTS_COMPUTED, PRODUCTS_COUNTED = 7, 6
_BLOCKS = re.compile(r"\bscore_blocks_(\d+)\b")


def blocks_scope(blocks: int) -> str:
    """The named scope around attention by blocks, in its forward and in its backward pass.

    Args:
      blocks: How many blocks of scores are computed for one head of one example: of a causal mask
        those on and below the diagonal.
    """
    return f"score_blocks_{blocks}"


def blocks_computed(scope: str) -> int | None:
    """What the innermost `blocks_scope` says; `None` if there is none."""
    found = _BLOCKS.findall(scope)
    return int(found[-1]) if found else None
