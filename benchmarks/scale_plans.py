"""Plans large models on thousands of devices, and estimates the layouts that others have published.

python -m benchmarks.scale_plans [--models llama3_8b ...] [--topologies h100:1024 ...]
                                 [--json benchmarks/scale_plans.json]

For each config of `configs/plan` and each topology it ranks all layouts by their closed forms
(`manualpar.planner.pod_sweep`), and estimates each layout of `PUBLISHED` with the least
recomputation that fits. `docs/scale.md` shows the results. All of it takes about ten minutes of one
core, and no device.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import rich.console

from benchmarks.results import note_conditions, write_results
from manualpar.models import Transformer
from manualpar.planner.pod_estimate import estimate_layout
from manualpar.planner.pod_layout import PodLayout, Remat
from manualpar.planner.pod_report import fastest_of_each_mesh, layout_values
from manualpar.planner.pod_sweep import rank_layouts
from manualpar.planner.topology import parse_topology
from manualpar.training.config import load_config
from manualpar.training.task import make_task
from manualpar.watching.tables import describe_bytes, describe_seconds, describe_share, print_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "scale_plans.json"
MODELS = ("llama3_8b", "llama3_70b", "llama3_405b", "mixtral_8x22b", "deepseek_v3")
TOPOLOGIES = ("v5p:16x16x16", "4xv5e:16x16", "h100:1024", "h100:16384")
META = "https://arxiv.org/abs/2407.21783, table 4"
MAXTEXT = "https://maxtext.readthedocs.io/en/maxtext-v0.2.0/reference/models/tiering.html"
BATCHES = "batch: benchmarks/maxtext_trillium_model_configs.py of MaxText"
TORCHTITAN = (
    "https://github.com/pytorch/torchtitan/blob/31a17bfdb70bab6f62a13d21816a5339b911d6e3/"
    "benchmarks/llama3_h100_202412_torchtitan.md"
)


@dataclasses.dataclass(frozen=True)
class PublishedLayout:
    """A layout whose speed somebody has published.

    Attributes:
      name: Whose it is, and of what.
      model: The config.
      positions: Positions of a sequence.
      examples: Sequences of a step.
      mfu: The published MFU; `None` where there is none.
      tokens_per_second: Of a device, likewise.
      source: Where it stands.
      remark: What differs, or was assumed.
    """

    name: str
    model: str
    topology: str
    layout: PodLayout
    positions: int
    examples: int
    mfu: float | None
    tokens_per_second: float | None
    source: str
    remark: str = ""


def _meta(data: int, *, context: int = 1) -> PodLayout:
    """Meta's layout of 405B, with a microbatch of one sequence and one layer a chunk."""
    return PodLayout(
        stage=16,
        data=data,
        context=context,
        model=8,
        num_minibatches=2048 // data if context == 1 else 16,
        chunks=8,
        communicate="step",
    )


OF_META = "chunks of one layer are assumed, and 8 layers in every stage"
PUBLISHED = (
    PublishedLayout(
        "Meta, 405B", "llama3_405b", "h100:8192", _meta(64), 8192, 2048, 0.43, None, META, OF_META
    ),
    PublishedLayout(
        "Meta, 405B", "llama3_405b", "h100:16384", _meta(128), 8192, 2048, 0.41, None, META, OF_META
    ),
    PublishedLayout(
        "Meta, 405B, 131,072 positions",
        "llama3_405b",
        "h100:16384",
        _meta(8, context=16),
        131_072,
        128,
        0.38,
        None,
        META,
        "keys and values are gathered there, and travel in a ring here; attention is counted as if "
        "no mask halved it, which is 29% of the FLOPs here and may not be counted there",
    ),
    PublishedLayout(
        "MaxText, 8B",
        "llama3_8b",
        "v6e:16x16",
        PodLayout(data=256),
        8192,
        4 * 256,
        0.4546,
        7207,
        MAXTEXT,
        f"{BATCHES}; queries, keys, values and outputs are kept on the host there",
    ),
    PublishedLayout(
        "MaxText, 70B",
        "llama3_70b",
        "v6e:16x16",
        PodLayout(data=256),
        8192,
        4 * 256,
        0.5033,
        960,
        MAXTEXT,
        f"{BATCHES}; as above",
    ),
    PublishedLayout(
        "MaxText, 405B",
        "llama3_405b",
        "v6e:16x16",
        PodLayout(data=64, model=4),
        8192,
        256,
        0.3855,
        123,
        MAXTEXT,
        f"{BATCHES}, which is for two pods; as above",
    ),
    PublishedLayout(
        "MaxText, Mixtral 8x22B",
        "mixtral_8x22b",
        "v6e:16x16",
        PodLayout(data=256),
        4096,
        8 * 256,
        0.362,
        1326,
        MAXTEXT,
        "the batch, 8 sequences a chip, is assumed",
    ),
    PublishedLayout(
        "torchtitan, 8B",
        "llama3_8b",
        "h100:8",
        PodLayout(data=8),
        8192,
        16,
        None,
        6667,
        TORCHTITAN,
        "table 1, compiled, bfloat16; H100s of 500 W with 2.4 TB/s",
    ),
    PublishedLayout(
        "torchtitan, 8B",
        "llama3_8b",
        "h100:128",
        PodLayout(data=128),
        8192,
        256,
        None,
        6514,
        TORCHTITAN,
        "table 3, likewise",
    ),
    PublishedLayout(
        "DeepSeek-V3",
        "deepseek_v3",
        "h100:2048",
        PodLayout(stage=16, data=2, expert=64, num_minibatches=120, communicate="step"),
        4096,
        15_360,
        None,
        1e12 / (180e3 * 3600),
        "https://arxiv.org/abs/2412.19437, 180 thousand GPU hours for 10^12 tokens",
        "FP8 on H800s and a schedule of its own there, bfloat16 on H100s and 1F1B here",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Plans, prints tables and writes the results."""
    conditions = note_conditions("benchmarks.scale_plans", argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--topologies", nargs="*", default=list(TOPOLOGIES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    console = rich.console.Console()
    data: dict[str, Any] = {"best": [], "published": []}
    for name in args.models:
        model, examples, positions = load_model(name)
        for topology in args.topologies:
            data["best"].append(best_plans(name, model, topology, examples, positions))
            print_best(console, data["best"][-1:])
    for figure in PUBLISHED:
        if figure.model in args.models:
            data["published"].append(estimate_published(figure))
    print_published(console, data["published"])
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


def estimate_published(figure: PublishedLayout) -> dict[str, Any]:
    """Estimates a published layout with the least recomputation that fits."""
    model, _, _ = load_model(figure.model)
    plans = [
        estimate_layout(
            model,
            dataclasses.replace(figure.layout, remat=remat),
            parse_topology(figure.topology),
            examples=figure.examples,
            positions=figure.positions,
            even=False,
        )
        for remat in get_args(Remat)
    ]
    fitting = [plan for plan in plans if plan.fits] or plans[-1:]
    plan = min(fitting, key=lambda plan: plan.seconds)
    devices = plan.layout.num_devices
    ratio = plan.mfu / figure.mfu if figure.mfu else None
    if not figure.mfu and figure.tokens_per_second:
        ratio = plan.tokens_per_second / devices / figure.tokens_per_second
    kept = {field.name: getattr(figure, field.name) for field in dataclasses.fields(figure)}
    return kept | {
        "layout": dataclasses.asdict(plan.layout),
        "plan": layout_values(plan),
        "without_remat_bytes": plans[0].memory.peak,
        "ratio": ratio,
    }


def print_best(console: rich.console.Console, results: Sequence[Mapping[str, Any]]) -> None:
    """Prints the fastest layout of each model and topology."""
    rows = []
    for result in results:
        if not result["plans"]:
            rows.append([result["model"], result["topology"], "none fits", *["-"] * 6])
            continue
        plan = result["plans"][0]
        layout = PodLayout(**plan["layout"])
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


def print_published(console: rich.console.Console, results: Sequence[Mapping[str, Any]]) -> None:
    """Prints published figures, MFU or a device's tokens a second, beside estimates."""
    rows = []
    for result in results:
        plan, layout = result["plan"], PodLayout(**result["layout"])
        published, here = describe_share(result["mfu"]), describe_share(plan["mfu"])
        if result["mfu"] is None:
            speed = plan["tokens_per_second"] / layout.num_devices
            published, here = f"{result['tokens_per_second']:,.0f}/s", f"{speed:,.0f}/s"
        memory = describe_bytes(plan["peak_bytes"])
        rows.append(
            [
                result["name"],
                result["topology"],
                layout.name,
                layout.details,
                published,
                here,
                f"{result['ratio']:.2f}",
                memory if plan["fits"] else f"{memory}, too much",
            ]
        )
    headers = ("whose", "on", "mesh", "how", "published", "here", "ratio", "memory")
    print_table(console, headers, rows, words=4)


def read_results() -> dict[str, Any]:
    """The committed results."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
