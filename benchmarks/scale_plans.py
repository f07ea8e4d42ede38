"""Plans large models on thousands of devices: the fastest layouts of each, by their closed forms.

python -m benchmarks.scale_plans [--models llama3_8b ...] [--topologies h100:1024 ...]
                                 [--json benchmarks/scale_plans.json]

For each config of `configs/plan` and each topology it ranks all layouts by their closed forms
(`manualpar.planner.closed_form.layout_search`). `docs/scale.md` shows the results, and
`benchmarks.calibration` says how far such estimates are off. All of it takes about ten minutes of
one core, and no device.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console

from benchmarks.results import note_conditions, write_results
from manualpar.models import Transformer
from manualpar.planner.closed_form.layout import Layout
from manualpar.planner.closed_form.layout_report import fastest_of_each_mesh, layout_values
from manualpar.planner.closed_form.layout_search import rank_layouts
from manualpar.planner.topology import parse_topology
from manualpar.system.reports.tables import (
    describe_bytes,
    describe_seconds,
    describe_share,
    print_table,
)
from manualpar.training.config import load_config
from manualpar.training.task import make_task

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "scale_plans.json"
MODELS = ("llama3_8b", "llama3_70b", "llama3_405b", "mixtral_8x22b", "deepseek_v3")
TOPOLOGIES = ("v5p:16x16x16", "4xv5e:16x16", "h100:1024", "h100:16384")


def main(argv: Sequence[str] | None = None) -> int:
    """Plans, prints tables and writes the results."""
    conditions = note_conditions("benchmarks.scale_plans", argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--topologies", nargs="*", default=list(TOPOLOGIES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    console = rich.console.Console()
    data: dict[str, Any] = {"best": []}
    for name in args.models:
        model, examples, positions = load_model(name)
        for topology in args.topologies:
            data["best"].append(best_plans(name, model, topology, examples, positions))
            print_best(console, data["best"][-1:])
    write_results(conditions, lines=[], data=data, output=None, json_output=args.json)
    return 0


def load_model(name: str) -> tuple[Transformer, int, int]:
    """The model of a config on one device, its examples and their positions."""
    config = load_config(ROOT / "configs" / "plan" / f"{name}.py")
    model = make_task(config).model
    assert isinstance(model, Transformer)
    return model, config.data.batch_size, config.data.sequence_length


def best_plans(
    name: str, model: Transformer, topology: str, examples: int, positions: int
) -> dict[str, Any]:
    """The three fastest layouts with different meshes, and how many were tried."""
    started = time.perf_counter()
    plans = rank_layouts(model, parse_topology(topology), examples=examples, positions=positions)
    return {
        "model": name,
        "topology": topology,
        "fitting": len(plans),
        "seconds": round(time.perf_counter() - started, 1),
        "plans": [layout_values(plan) for plan in fastest_of_each_mesh(plans)[:3]],
    }


def print_best(console: rich.console.Console, results: Sequence[Mapping[str, Any]]) -> None:
    """Prints the fastest layout of each model and topology."""
    rows = []
    for result in results:
        if not result["plans"]:
            rows.append([result["model"], result["topology"], "none fits", *["-"] * 6])
            continue
        plan = result["plans"][0]
        layout = Layout(**plan["layout"])
        rows.append(
            [
                result["model"],
                result["topology"],
                layout.name,
                layout.details,
                describe_seconds(plan["seconds"]),
                describe_share(plan["bubble"], plan["seconds"]),
                describe_share(
                    plan["seconds"] - plan["computing"] - plan["bubble"], plan["seconds"]
                ),
                describe_bytes(plan["peak_bytes"]),
                describe_share(plan["mfu"]),
            ]
        )
    headers = ("config", "topology", "mesh", "how", "step", "bubble", "sending", "memory", "MFU")
    print_table(console, headers, rows, words=4)


def read_results() -> dict[str, Any]:
    """The committed results."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
