"""What a step sends and holds with every code of gathers and of gradients; nothing is timed.

python -m benchmarks.coded_bytes [--output FILE.md] [--json FILE.json]

A classifier whose sixteen hidden layers are a scan, in float32, on eight devices: four groups of
two, between which links are slow. All numbers are of one device and one step. Bytes are those of
the traced step, over all links and over the slow ones; those that the closed form says, which may
be more by the weights that the backward pass does not need; and those of the step as XLA compiles
it for CPUs, metrics included in the first and the last. Temporaries are those of the compiled step.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.fewer_bytes import DEVICES, SLOW_AXES
from benchmarks.memory_and_collectives import ScannedClassifier
from benchmarks.results import note_conditions, write_results
from benchmarks.turns import table
from manualpar import Batch, Program, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.inspect import ledger, total_bytes
from manualpar.models.cross_entropy import classification_loss
from manualpar.training.devices import simulate_devices

FLAT: Mapping[str, Any] = {
    "mesh": {"data": 2, "data_minor": 4},
    "axis_name": ("data", "data_minor"),
    "axis_by_axis": True,
}
IN_GROUPS: Mapping[str, Any] = {"mesh": {"replica": 4, "data": 2}}
# By the name of the row, the builder and its options; and which codes do something.
STRATEGIES: Mapping[str, tuple[Any, Mapping[str, Any], bool]] = {
    "dp": (data_parallel, FLAT, False),
    "zero1": (zero, {"stage": 1, **FLAT}, False),
    "zero2": (zero, {"stage": 2, "num_minibatches": 2, **FLAT}, False),
    "fsdp": (fsdp, FLAT, True),
    "fsdp, secondary shards": (fsdp, {"regather_axes": ("data",), **FLAT}, True),
    "hsdp": (hsdp, IN_GROUPS, True),
}
HEADER = (
    "strategy",
    "gathers",
    "gradients",
    "traced",
    "closed form",
    "compiled",
    "slow links",
    "temporaries",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """What a device sends and holds in a step, in bytes.

    Attributes:
      strategy: One of `STRATEGIES`.
      gather_code: The code of gathers, if any.
      reduce_code: That of gradients.
      traced: What the traced step sends.
      predicted: What the closed form says, without the metrics.
      compiled: What the compiled step sends.
      slow: What the traced step sends over slow links.
      temporaries: What the compiled step holds besides its arguments and results.
    """

    strategy: str
    gather_code: str | None
    reduce_code: str | None
    traced: int
    predicted: int
    compiled: int
    slow: int
    temporaries: int

    def cells(self) -> list[str]:
        """The row of a table; bytes in MiB."""
        sizes = self.traced, self.predicted, self.compiled, self.slow, self.temporaries
        codes = (code or "exact" for code in (self.gather_code, self.reduce_code))
        return [self.strategy, *codes, *(f"{size / 2**20:.2f}" for size in sizes)]


def build(strategy: str, *, model: Any = None, **codes: Any) -> Program:
    """The program of one of `STRATEGIES`."""
    builder, options, _ = STRATEGIES[strategy]
    given = {**options, "mesh": make_mesh(options["mesh"]), **codes}
    batch = Batch(
        inputs=jax.ShapeDtypeStruct((64, 784), jnp.float32),
        labels=jax.ShapeDtypeStruct((64,), jnp.int32),
    )
    model = model or ScannedClassifier()
    built: Program = builder(model, optax.adamw(1e-3), classification_loss, batch=batch, **given)
    return built


def measure(strategy: str, *, model: Any = None, **codes: str | None) -> Row:
    """Traces and compiles a step."""
    found = ledger(build(strategy, model=model, **codes), compile=True)
    assert found.compiled is not None
    assert found.predicted is not None
    by_axis = found.bytes_by_axis().items()
    return Row(
        strategy=strategy,
        gather_code=codes.get("gather_code"),
        reduce_code=codes.get("reduce_code"),
        traced=round(found.total_bytes),
        predicted=round(sum(found.predicted.values(), Fraction(0))),
        compiled=round(total_bytes(found.compiled.collectives)),
        slow=round(sum((n for axes, n in by_axis if {*axes} & SLOW_AXES), Fraction(0))),
        temporaries=found.compiled.temporaries,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("output", "json"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args(argv)
    conditions = note_conditions("benchmarks.coded_bytes", argv)
    simulate_devices(DEVICES)
    rows = []
    for strategy, (_, _, gathers) in STRATEGIES.items():
        for gather_code in (None, "int8") if gathers else (None,):
            for reduce_code in (None, "int8", "int4"):
                codes = {"gather_code": gather_code, "reduce_code": reduce_code}
                rows.append(measure(strategy, **codes))
                print(f"| {' | '.join(rows[-1].cells())} |", flush=True)
    lines = ["## Codes", "", conditions.sentence(), "", "MiB of a device and a step.", ""]
    lines += table(HEADER, (row.cells() for row in rows))
    write_results(
        conditions, lines=lines, data={"rows": rows}, output=args.output, json_output=args.json
    )


if __name__ == "__main__":
    main()
