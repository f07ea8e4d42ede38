"""The strategies: each has a file, and an entry in this module.

Read `data_parallel` first, because it is the simplest, and then `zero`, `fsdp` and `hsdp`. `diloco`
adds an outer optimizer to one of these strategies.
"""

from manualpar.core.model.loss_function import LossFn
from manualpar.core.model.options import PROGRAM_OPTIONS
from manualpar.core.program.optimizer_update import Optimizer
from manualpar.strategies import data_parallel, fsdp, hsdp, zero
from manualpar.strategies.diloco import builder as diloco_config
from manualpar.strategies.fsdp import fully_sharded
from manualpar.strategies.registry import (
    PARAMETER_SHARDING_FIELDS,
    REPLICATED_SHARDING_FIELDS,
    STATE_SHARDING_FIELDS,
    Field,
    StrategyKind,
    fields_of_manual_mode,
    fields_of_options,
    register,
    strategy_kinds,
    values_of_options,
    with_meanings,
)
from manualpar.strategies.shared_options import ReplicaMean

__all__ = [
    "BUILT_IN",
    "FSDP",
    "PROGRAM_OPTIONS",
    "STATE_SHARDING_FIELDS",
    "Field",
    "LossFn",
    "Optimizer",
    "ReplicaMean",
    "StrategyKind",
    "fields_of_manual_mode",
    "fields_of_options",
    "fully_sharded",
    "register",
    "strategy_kinds",
    "values_of_options",
    "with_meanings",
]

_STATE, _PARAMETERS = STATE_SHARDING_FIELDS, PARAMETER_SHARDING_FIELDS
_REPLICATED = REPLICATED_SHARDING_FIELDS
# The colours are Paul Tol's muted ones. In pictures they stand for strategies only.
FSDP = StrategyKind("fsdp", fsdp.fsdp, "#332288", _PARAMETERS, on_torus=True, has_curve=True)
BUILT_IN = (
    StrategyKind("dp", data_parallel.data_parallel, "#88CCEE", averages=True, has_curve=True),
    StrategyKind("zero1", zero.zero, "#117733", _STATE, {"stage": 1}),
    StrategyKind("zero2", zero.zero, "#DDCC77", _STATE, {"stage": 2}, fewest_minibatches=2),
    FSDP,
    StrategyKind("hsdp", hsdp.hsdp, "#CC6677", _REPLICATED, replicates=True, has_curve=True),
    StrategyKind(
        "diloco",
        diloco_config.diloco_of_config,
        "#882255",
        {**_PARAMETERS, **diloco_config.FIELDS},
        replicates=True,
        is_exact=False,
    ),
)
for _kind in BUILT_IN:
    register(_kind)
