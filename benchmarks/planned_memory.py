"""Compares the planned memory of a step with XLA's allocations, without timing.

python -m benchmarks.planned_memory [--only fsdp_lm] [--json planned_memory.json]

The plan is `manualpar.inspect.step_memory` with `platform="cpu"`. The plan is compared with XLA's
`memory_analysis` of the same step, compiled for eight simulated CPU devices. Both give the bytes of
one device. The bytes of the state and the batch must be equal, except for arrays that the step
never reads. The plan of temporaries models fusion and XLA:CPU's order of operations. So the ratio
of planned to compiled temporaries is the error of the plan. Known differences: XLA copies some
weights into another layout, stores values that a sum broadcasts, and overwrites an operand only if
the result has the same shape.
"""

import argparse
import importlib
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.results import note_conditions, write_results
from manualpar.inspect.memory import step_memory
from manualpar.training.experiment import prepare

SCANNED = {"model.scan_layers": True}
FULL = {**SCANNED, "model.remat": "full"}
F32 = {"model.dtype": "float32"}
# Pairs of a config and the changes to its fields.
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dp", {}),
    ("dp", {**F32, "optimizer.num_minibatches": 1}),
    ("zero", {}),
    ("zero", {**F32, "optimizer.num_minibatches": 1}),
    ("zero", {**F32, "parallel.strategy": "zero2"}),
    ("fsdp", {}),
    ("fsdp", {**F32, "optimizer.num_minibatches": 1}),
    ("fsdp", {**F32, "parallel.communicate_every": "step"}),
    ("hsdp", {}),
    ("fsdp_lm", {}),
    ("fsdp_lm", SCANNED),
    ("fsdp_lm", FULL),
    ("fsdp_lm", {**SCANNED, "model.remat": "dots"}),
    ("fsdp_lm", {**FULL, "optimizer.num_minibatches": 4}),
    ("fsdp_lm", F32),
    ("fsdp_lm", {**F32, **SCANNED}),
    ("fsdp_lm", {**F32, **FULL}),
    ("fsdp_lm", {**F32, **SCANNED, "model.remat": "dots"}),
    ("fsdp_lm", {**F32, **FULL, "optimizer.num_minibatches": 4}),
    ("fsdp_lm", {**F32, **FULL, "parallel.strategy": "dp"}),
    ("fsdp_lm", {**F32, **FULL, "parallel.strategy": "zero1"}),
    ("fsdp_lm", {**F32, **FULL, "parallel.strategy": "zero2"}),
    ("fsdp_lm", {**F32, **FULL, "parallel.communicate_every": "step"}),
    ("fsdp_lm", {**F32, **FULL, "parallel.reshard_after_forward": False}),
)


class Row(NamedTuple):
    """The bytes of a step on a device.

    Attributes:
      case: The config and the changes to it.
      dtype: The dtype of the computation.
      state: The planned bytes of the state between steps and of the batch.
      arguments: The bytes of the compiled step's arguments.
      planned: The planned bytes of temporaries.
      compiled: The bytes that XLA allocates for temporaries.
    """

    case: str
    dtype: str
    state: int
    arguments: int
    planned: int
    compiled: int

    @property
    def ratio(self) -> float:
        """The planned temporaries divided by the compiled temporaries."""
        return self.planned / self.compiled


def measure(name: str, changes: dict[str, Any]) -> Row:
    """Plans and compiles the step of a config."""
    config = importlib.import_module(f"configs.{name}").get_config()
    for path, value in changes.items():
        section, field = path.split(".")
        config[section][field] = value
    program = prepare(config, devices=jax.devices()).program
    planned = step_memory(program, platform="cpu")
    lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    compiled = lowered.compile().memory_analysis()
    assert compiled is not None  # XLA:CPU always returns an analysis.
    settings = (f"{path.split('.')[1]}={value}" for path, value in changes.items())
    return Row(
        case=" ".join((name, *settings)),
        dtype=config.model.dtype,
        state=planned.peak - planned.temporaries,
        arguments=compiled.argument_size_in_bytes,
        planned=planned.temporaries,
        compiled=compiled.temp_size_in_bytes,
    )


def summarize(rows: list[Row]) -> str:
    """Describes the median and the worst ratio: of all steps, and of the steps in float32."""
    lines = []
    for title, chosen in (
        ("all", rows),
        ("float32", [row for row in rows if row.dtype == "float32"]),
    ):
        if chosen:
            ratios = [row.ratio for row in chosen]
            worst = max(ratios, key=lambda ratio: max(ratio, 1 / ratio))
            median = statistics.median(ratios)
            lines.append(f"{title} ({len(ratios)}): median {median:.2f}, worst {worst:.2f}")
    return "\n".join(lines)


def main() -> None:
    """Prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=sorted({name for name, _ in CASES}))
    parser.add_argument("--json", type=Path, help="a JSON file")
    args = parser.parse_args()
    conditions = note_conditions("benchmarks.planned_memory", None)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    print(f"jax {jax.__version__}; MiB on a device\n")
    header = ["step", "state", "arguments", "planned", "compiled", "ratio"]
    lines = [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header))]
    print("\n".join(lines))
    rows = []
    for name, changes in CASES:
        if args.only in (None, name):
            rows.append(row := measure(name, changes))
            sizes = (row.state, row.arguments, row.planned, row.compiled)
            cells = [row.case, *(f"{size / 2**20:.2f}" for size in sizes), f"{row.ratio:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    print(f"\nplanned / compiled temporaries\n{summarize(rows)}")
    data = {"rows": [{**row._asdict(), "ratio": row.ratio} for row in rows]}
    write_results(conditions, lines=lines, data=data, output=None, json_output=args.json)


if __name__ == "__main__":
    main()
