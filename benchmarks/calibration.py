"""Fits the planner's efficiencies to half of the published speeds; tests them on the other half.

python -m benchmarks.calibration [--json benchmarks/calibration.json]

The command takes a minute on one core, and needs no accelerator. A row is one published training
speed (`benchmarks/published_rows.py`). By least squares of log(estimated / published speed), the
command fits:

- for each chip, the share of its peak that matrix products reach (H200 has the same die as H100),
- for TPUs and for GPUs, the share of the peak that attention kernels reach.

A third share was tried: if a matrix product waits for a collective, the share of the collective's
time that is exposed. The rows do not determine this share: one half gave 0.04 for GPUs and 0.40 for
TPUs, the other half 0.96 and 1.00. With this share, no more rows were within 15%, and the share of
attention kernels on GPUs came out at 0.22, half of the share that these kernels are known to reach.
So these collectives count as fully exposed, as they are in the programs of this package.

The halves were chosen before the first fit. Rows of one publisher and model on one chip are a
*series*. A series is not divided, because its rows are nearly the same measurement. The series of a
chip are in alphabetical order of publisher and model; the first is fitted, the second tested, the
third fitted, and so on. If a chip has only one series, its rows are fitted and tested in turn, in
the order of `FIGURES`. Rows in FP8, which this package lacks, are estimated in bfloat16 and belong
to neither half. A second fit uses the other half. So each row has an estimate from shares that were
not fitted to this row, and the two fits show how much the shares depend on the choice of the half.

`manualpar/planner/hardware.py` contains the shares of the first fit. `docs/scale.md` shows the
table, and explains its largest errors.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.console

from benchmarks.published_figures import PublishedFigure
from benchmarks.published_rows import FIGURES
from benchmarks.results import note_conditions, write_results
from manualpar.inspect.tables import TableColumn, describe_share, print_table
from manualpar.planner.hardware import FITTED_ATTENTION, FITTED_PRODUCTS, SAME_PRODUCTS
from manualpar.planner.plan import StepEstimate
from manualpar.plans.layouts.layout_estimate import estimate_layout

RESULTS = Path(__file__).parent / "calibration.json"
Shares = Mapping[str, float]  # Each share by its name, such as "products v5p", "attention torus".
GOAL = 0.15
# The shares that the planner used before the fit, by chip; attention had the share of products.
BEFORE = {"a100": 0.8, "h100": 0.7, "h100-500w": 0.7, "v5e": 0.85, "v5p": 0.85, "v6e": 0.85}
START = {"products": 0.7, "attention": 0.5}
MOST_STEPS = 100


def shares_of(figure: PublishedFigure) -> tuple[str, str]:
    """Returns the names of a row's two shares: the share of products and of attention."""
    chip = figure.devices.chip
    return f"products {SAME_PRODUCTS.get(chip.name, chip.name)}", f"attention {chip.network.kind}"


def fitted_shares() -> dict[str, float]:
    """Returns the shares in `manualpar/planner/hardware.py`."""
    products = {f"products {name}": share for name, share in FITTED_PRODUCTS.items()}
    return products | {f"attention {kind}": share for kind, share in FITTED_ATTENTION.items()}


def estimate_figure(figure: PublishedFigure, shares: Shares) -> StepEstimate:
    """Estimates a published row; without a share of attention, the share of products is used."""
    (products, attention), topology = shares_of(figure), figure.devices
    chip = dataclasses.replace(
        topology.chip,
        flops_efficiency=shares[products],
        attention_efficiency=shares.get(attention, shares[products]),
    )
    return estimate_layout(
        figure.transformer,
        figure.layout,
        dataclasses.replace(topology, chip=chip),
        examples=figure.examples,
        positions=figure.positions,
        even=False,
        overlap="none",
    )


def ratio(figure: PublishedFigure, shares: Shares) -> float:
    """Returns the estimated speed divided by the published speed."""
    plan = estimate_figure(figure, shares)
    return (plan.tokens_per_second or 0.0) / figure.devices.num_devices / figure.speed


def split(
    figures: Sequence[PublishedFigure],
) -> tuple[list[PublishedFigure], list[PublishedFigure]]:
    """Splits the rows in bfloat16 into fitted and tested rows, as the module's docstring says."""
    halves: tuple[list[PublishedFigure], list[PublishedFigure]] = ([], [])
    comparable = [figure for figure in figures if figure.dtype == "bfloat16"]
    by_chip: dict[str, list[PublishedFigure]] = {}
    for figure in comparable:
        by_chip.setdefault(shares_of(figure)[0], []).append(figure)
    for rows in by_chip.values():
        series = sorted({(row.whose, row.model) for row in rows})
        for number, row in enumerate(rows):
            place = series.index((row.whose, row.model)) if len(series) > 1 else number
            halves[place % 2].append(row)
    return halves


def fit(figures: Sequence[PublishedFigure]) -> dict[str, float]:
    """Fits shares from 0.001 to 1: minimizes the sum of log(estimated / published speed)²."""
    names = sorted({name for figure in figures for name in shares_of(figure)})

    def residuals(x: np.ndarray) -> np.ndarray:
        shares = dict(zip(names, map(float, x), strict=True))
        return np.array([math.log(ratio(figure, shares)) for figure in figures])

    found = least_squares(residuals, np.array([START[name.split()[0]] for name in names]))
    return dict(zip(names, map(float, found), strict=True))


def least_squares(residuals: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """Minimizes the sum of squared residuals (Levenberg-Marquardt), with unknowns from 0.001 to 1.

    Args:
      residuals: Computes the residuals from the unknowns.
      x: The initial unknowns.

    Returns:
      The unknowns, to about four digits.
    """
    damping, step = 1e-3, 1e-4
    now = residuals(x)
    for _ in range(MOST_STEPS):
        columns = []
        for i in range(len(x)):
            moved = x.copy()
            moved[i] += step if x[i] + step <= 1 else -step
            columns.append((residuals(moved) - now) / (moved[i] - x[i]))
        slopes = np.stack(columns, 1)
        squares = slopes.T @ slopes
        for _ in range(12):
            scaled = squares + damping * np.diag(np.maximum(np.diag(squares), 1e-6))
            tried = np.clip(x - np.linalg.solve(scaled, slopes.T @ now), 1e-3, 1.0)
            after = residuals(tried)
            if after @ after < now @ now:
                break
            damping *= 4
        else:
            return x
        is_done = np.abs(tried - x).max() < 1e-5
        x, now, damping = tried, after, damping / 4
        if is_done:
            return x
    return x


def calibrate() -> dict[str, Any]:
    """Fits shares to each half; returns the shares of both fits, and the ratios of all rows."""
    fitted, tested = split(FIGURES)
    shares, exchanged = fit(fitted), fit(tested)
    before = {f"products {name}": share for name, share in BEFORE.items()}
    rows = []
    for figure in FIGURES:
        half = "fitted" if figure in fitted else "tested" if figure in tested else "neither"
        plan = estimate_figure(figure, shares)
        found = ratio(figure, shares)
        rows.append(
            {
                "name": figure.name,
                "half": half,
                "mesh": figure.layout.name,
                "remat": figure.layout.remat,
                "source": figure.source,
                "remark": figure.remark,
                "published_mfu": (plan.mfu or 0.0) / found,
                "mfu": plan.mfu,
                "before": ratio(figure, before),
                "ratio": found,
                "exchanged": ratio(figure, exchanged),
            }
        )
    return {"shares": shares, "exchanged_shares": exchanged, "rows": rows}


def summarize(results: Mapping[str, Any]) -> list[str]:
    """Describes the errors of the estimates of each half: before and after the fit, one a line."""
    sentences = []
    for half, column, words in (
        ("fitted", "before", "before calibration, the fitted half"),
        ("tested", "before", "before calibration, the tested half"),
        ("fitted", "ratio", "calibrated, the fitted half"),
        ("tested", "ratio", "calibrated, the tested half"),
        ("fitted", "exchanged", "halves exchanged, the half that is then tested"),
    ):
        misses = [abs(row[column] - 1) for row in results["rows"] if row["half"] == half]
        within = sum(miss <= GOAL for miss in misses)
        sentences.append(
            f"{words}: {within} of {len(misses)} within {GOAL:.0%}, off by "
            f"{np.mean(misses):.1%} on average and by {max(misses):.0%} at most"
        )
    return sentences


COLUMNS: Sequence[TableColumn[Mapping[str, Any]]] = (
    TableColumn("published", "name"),
    TableColumn("mesh", "mesh"),
    TableColumn("computed again", "remat"),
    TableColumn("half", "half"),
    TableColumn("MFU", "published_mfu", describe_share),
    TableColumn("here", "mfu", describe_share),
    *(TableColumn(name, name, "{:.2f}".format) for name in ("before", "ratio", "exchanged")),
)


def print_calibration(console: rich.console.Console, results: Mapping[str, Any]) -> None:
    """Prints a table of all rows, and a summary of the errors of their estimates."""
    print_table(console, COLUMNS, results["rows"])
    for sentence in summarize(results):
        console.print(sentence, soft_wrap=True, highlight=False)


def read_results() -> dict[str, Any]:
    """Reads the results in `benchmarks/calibration.json`, which is committed."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Fits the shares, prints the results, and writes them if `--json` is given."""
    conditions = note_conditions("benchmarks.calibration", argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    results = calibrate()
    console = rich.console.Console()
    print_calibration(console, results)
    for name in sorted(results["shares"]):
        share, other = results["shares"][name], results["exchanged_shares"][name]
        console.print(f"{name}: {share:.3f}; by the other half {other:.3f}", highlight=False)
    write_results(conditions, lines=[], data=results, output=None, json_output=args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
