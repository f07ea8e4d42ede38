"""Draws a pipeline's schedule: the work of each stage over time, and the inputs that it keeps."""

from pathlib import Path
from typing import Any

import numpy as np

from manualpar.layers.pipeline.schedule_table import Costs, Table
from manualpar.layers.pipeline.schedule_text import describe_place
from manualpar.system.reports import pictures
from manualpar.system.reports.tables import describe_flops, describe_share

MOST_NUMBERS = 48  # Up to this many ticks, each tick shows a number.
MOST_NAMED = 8


def draw_schedule(table: Table, path: Path, *, title: str, costs: Costs | None = None) -> None:
    """Draws a schedule's table into a PNG file, with a row per stage and the kept inputs below.

    The width of a tick is the time of its slowest stage.

    Args:
      table: The schedule's table.
      path: The file to write.
      title: The title of the picture.
      costs: The FLOPs of each part of a tick. Without costs, a backward pass takes as long as two
        forward passes, and nothing else takes time.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    height = 1.2 + 0.4 * table.num_stages
    with pictures.saved_figure(path, (13, 3.6 + height), title=title) as figure:
        stages, kept = figure.subplots(2, 1, sharex=True, height_ratios=(height, 1.6))
        _draw_stages(stages, table, costs or Costs())
        _draw_inputs(kept, table, costs or Costs())
        kept.set_xlabel(
            "time, in forward passes of a chunk" if costs is None else "operations of a device"
        )
        if costs:
            pictures.format_ticks(kept.xaxis, describe_flops)


def _starts(table: Table, costs: Costs) -> np.ndarray:
    """Returns the time at which each tick starts, and the time at which the last tick ends."""
    return np.concatenate([[0.0], np.cumsum(table.tick_times(costs))])


def _draw_stages(axes: Any, table: Table, costs: Costs) -> None:
    starts = _starts(table, costs)
    forward, backward = table.busy(costs)
    for kind, lengths, lefts in (
        ("forward", forward, np.broadcast_to(starts[:-1, None], forward.shape)),
        ("backward", backward, starts[:-1, None] + forward),
    ):
        microbatches, chunks = table.rows[f"{kind}_microbatch"], table.rows[f"{kind}_chunk"]
        places = np.nonzero(microbatches >= 0)
        colors = pictures.FORWARD if kind == "forward" else pictures.BACKWARD
        axes.barh(
            places[1],
            lengths[places],
            left=lefts[places],
            color=[colors[chunk % len(colors)] for chunk in chunks[places]],
            edgecolor="white",
            linewidth=0.6,
            height=0.8,
        )
        if table.num_ticks <= MOST_NUMBERS:
            for tick, stage in zip(*places, strict=True):
                text = describe_place(table, microbatches[tick, stage], chunks[tick, stage])
                middle = lefts[tick, stage] + lengths[tick, stage] / 2
                axes.text(middle, stage, text, ha="center", va="center", color="white")
    axes.set_yticks(range(table.num_stages), [f"stage {i}" for i in range(table.num_stages)])
    axes.set_ylim(table.num_stages - 0.5, -0.5)
    axes.set_xlim(0, starts[-1])
    axes.set_facecolor(pictures.WAITING)
    axes.grid(visible=False)
    axes.tick_params(left=False)
    axes.set_title(
        f"Microbatches forward (slate) and backward (brown); a device idles for "
        f"{describe_share(table.idle_share(costs))} of the time"
    )


def _draw_inputs(axes: Any, table: Table, costs: Costs) -> None:
    """Draws how many chunk inputs each stage keeps in each tick."""
    starts = _starts(table, costs)
    shades = np.linspace(0.75, 0, table.num_stages)
    for stage, kept in enumerate(table.kept.T):
        axes.stairs(kept, starts, baseline=None, color=str(shades[stage]), label=f"stage {stage}")
    axes.axhline(
        table.activation_slots,
        color=pictures.MEMORY_COLORS["activations"],
        linestyle="--",
        linewidth=1,
    )
    axes.set_ylim(0, 1.15 * table.activation_slots)
    pictures.count_along(axes.yaxis)
    axes.set_title(f"Inputs that a stage keeps, in {table.activation_slots} slots")
    if table.num_stages <= MOST_NAMED:
        axes.legend(
            ncols=table.num_stages, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0
        )
