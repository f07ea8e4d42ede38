"""The strategies: a file and a line here for each.

Read `data_parallel` first, because it is the simplest, and then `zero`, `fsdp` and `hsdp`.
"""

from manualpar.strategies import data_parallel, fsdp, hsdp, zero
from manualpar.strategies.fields import Field
from manualpar.strategies.registry import StrategyKind, register, strategy_kinds

__all__ = ["BUILT_IN", "Field", "StrategyKind", "register", "strategy_kinds"]

BUILT_IN = (data_parallel.KIND, zero.ZERO1, zero.ZERO2, fsdp.KIND, hsdp.KIND)
for _kind in BUILT_IN:
    register(_kind)
