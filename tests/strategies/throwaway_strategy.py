"""A strategy as a user adds one: ZeRO-1 with parameters stored in 16 bits. This file is all."""

import functools
from typing import Any

from manualpar.core.modes.strategy import CommCounts, Strategy
from manualpar.core.parameters.placement import shard_state_only
from manualpar.core.program.program import Program
from manualpar.strategies import STATE_SHARDING_FIELDS, Field, StrategyKind, register
from manualpar.strategies.shared_options import STATE_SHARDING, build_sharded


def zero_in_16_bits(
    model: Any, tx: Any, loss_fn: Any, *, stored_dtype: str, **options: Any
) -> Program:
    """Builds ZeRO-1 that stores in `param_dtype` if it is given, or else in `stored_dtype`."""

    def strategy(**placing: Any) -> Strategy:
        return Strategy(
            "zero_in_16_bits",
            functools.partial(shard_state_only, **placing),
            lambda minibatches, keep: CommCounts(minibatches, scatters=1, new_gathers=1),
        )

    options["param_dtype"] = options.get("param_dtype") or stored_dtype
    return build_sharded(
        "zero_in_16_bits", strategy, model, tx, loss_fn, options=options, own=STATE_SHARDING
    )


register(
    StrategyKind(
        "zero_in_16_bits",
        zero_in_16_bits,
        color="#999933",
        fields={
            **STATE_SHARDING_FIELDS,
            "stored_dtype": Field(
                str, choices=("bfloat16",), meaning="The dtype in which parameters are stored."
            ),
        },
    )
)
