"""Draws the parts that all pictures share: figures in one style, bars with numbers, and legends.

`pyplot` is not used, because its figures and its backend are global to the process. The settings of
matplotlib are global too. They are changed only while a picture is drawn, and only one thread draws
at a time.
"""

import contextlib
import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from manualpar.core.tracing import scopes as purposes
from manualpar.errors import require
from manualpar.inspect.tables import describe_bytes
from manualpar.system.storage.untrusted import write_file

INK, DARK, GREY, FAINT = "#222222", "#555555", "#B8BEC6", "#DDDDDD"
# The palette: in all pictures, a colour stands for the same thing. The colours of strategies are
# fields of `StrategyKind`.
#
# Kinds of arrays have Okabe and Ito's colours, which colour-blind readers can distinguish: blue for
# parameters, red for gradients, green for activations, pink for the optimizer, yellow for examples.
# Grey is for everything else.
MEMORY_COLORS = {
    "parameters": "#0072B2",
    "gradients": "#D55E00",
    "optimizer": "#CC79A7",
    "gathered": "#56B4E9",
    "activations": "#009E73",
    "batch": "#F0E442",
}
# The purpose of a collective has the colour of the arrays that it sends, or a shade of this colour.
PURPOSE_COLORS = {
    purposes.GATHER_SCOPE: MEMORY_COLORS["parameters"],
    purposes.REGATHER: MEMORY_COLORS["gathered"],
    purposes.NEW_PARAMS_SCOPE: "#A6CFEA",
    purposes.SCATTER_SCOPE: MEMORY_COLORS["gradients"],
    purposes.REDUCE_SCOPE: "#E69F00",
    purposes.CAST_SCOPE: "#F2B48A",
    purposes.TENSOR_SCOPE: MEMORY_COLORS["activations"],
    purposes.SEQUENCE_SCOPE: "#66C5AB",
    purposes.EXPERT_SCOPE: "#00543D",
    purposes.CROSS_ENTROPY_SCOPE: "#8DB255",
    purposes.CONTEXT_SCOPE: "#4C7A1E",
    purposes.PIPELINE_SCOPE: "#B5E2D3",
    purposes.EXAMPLES_SCOPE: MEMORY_COLORS["batch"],
    purposes.OPTIMIZER_SCOPE: MEMORY_COLORS["optimizer"],
    purposes.MATRICES_SCOPE: "#E3B5CF",
    purposes.OUTER_SCOPE: "#8C4B73",
}
# How a device spends its time.
COMPUTING, SENDING, SENDING_HIDDEN, WAITING = "#44546A", "#7A3E9D", "#D7BFE3", "#EEF0F2"
# Colours of the chunks of a pipeline, in order; more chunks repeat the colours.
FORWARD, BACKWARD = (COMPUTING, "#8496B0"), ("#7F5539", "#B08968")
SPLIT_COLORS = {"train": "#4477AA", "eval": "#EE6677", "test": "#228833"}
OTHER_SPLIT = "#AA3377"
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.facecolor": "white",
    "figure.titlesize": 13,
    "font.size": 9,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "savefig.dpi": 120,
    "text.color": INK,
    "text.parse_math": False,  # Names may contain dollar signs.
    "xtick.color": INK,
    "ytick.color": INK,
}
# Held while the settings of matplotlib are changed. Without it, of two runs that end together one
# could draw with the wrong settings, and leave them behind.
_DRAWING = threading.RLock()
ROOM = 1.4  # The axis is longer than its longest bar by this factor: the bar's text needs space.


class Bar(NamedTuple):
    """A horizontal bar: its name, its parts as (length, colour), and the text after its end."""

    name: str
    parts: Sequence[tuple[float, str]]
    text: str

    @property
    def length(self) -> float:
        """The sum of the parts' lengths."""
        return sum(length for length, _ in self.parts)


@contextlib.contextmanager
def new_figure(user: str, size: tuple[float, float], *, title: str) -> Iterator[Any]:
    """Makes a matplotlib figure with a title; the style is set as long as the context lasts.

    Args:
      user: The feature that needs matplotlib, such as a file's name, for the error's message.
      size: Width and height in inches.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    require(user, "matplotlib")
    # Imported here, because the import takes a second and matplotlib is optional.
    import matplotlib
    from matplotlib.figure import Figure

    with _DRAWING, matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        # The title may contain the name of a folder that is not valid Unicode.
        figure.suptitle(title.encode(errors="backslashreplace").decode())
        yield figure


@contextlib.contextmanager
def saved_figure(path: Path, size: tuple[float, float], *, title: str) -> Iterator[Any]:
    """Makes a figure, see `new_figure`, and writes it into a PNG file when the context ends.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    picture = io.BytesIO()
    with new_figure(path.name, size, title=title) as figure:
        yield figure
        figure.savefig(picture, format="png")
    write_file(path, picture.getvalue())


def draw_bars(axes: Any, bars: Sequence[Bar], *, end: float = 0.0) -> None:
    """Draws horizontal bars, the first on top, on an axis from 0 to `end`.

    If `end` is 0, the axis ends after the longest bar and the space for its text.
    """
    for y, bar in enumerate(bars):
        left = 0.0
        for length, color in bar.parts:
            axes.barh(y, length, left=left, height=0.7, color=color)
            left += length
        near = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(bar.text, (left, y), **near)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.set_ylim(max(len(bars), 1) - 0.4, -0.6)
    axes.set_xlim(0, end or ROOM * max((bar.length for bar in bars), default=0) or 1)
    axes.grid(visible=False, axis="y")
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)


def draw_bars_of_bytes(
    axes: Any, bars: Sequence[Bar], *, end: float = 0.0, title: str = ""
) -> None:
    """Draws bars of bytes, see `draw_bars`, with a title and with bytes on the x axis."""
    draw_bars(axes, bars, end=end)
    scale_in_bytes(axes)
    axes.set_title(title)


def format_ticks(axis: Any, describe: Callable[[float], str]) -> None:
    """Formats the numbers along an axis; 0 has no unit."""
    axis.set_major_formatter(lambda value, position: describe(value) if value else "0")


def count_steps(axes: Any) -> None:
    """Labels the x axis as steps, with whole numbers such as `1,000`."""
    count_along(axes.xaxis)
    axes.set_xlabel("step")


def count_along(axis: Any) -> None:
    """Puts ticks only at whole numbers of an axis."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set_major_formatter("{x:,.0f}")


def scale_in_bytes(axes: Any) -> None:
    """Labels the ticks of the x axis as bytes, such as `4 MiB`."""
    end, step = axes.get_xlim()[1], 1.0
    while end / step > 5.5:  # The step is a power of two, so labels are whole KiB or MiB.
        step *= 2
    ticks = [step * i for i in range(int(end / step) + 1)]
    axes.set_xticks(ticks, [describe_bytes(tick) if tick else "0" for tick in ticks])


def add_legend(axes: Any, colors: Mapping[str, str]) -> None:
    """Draws a legend below the axes, with a name for each colour."""
    for label, color in colors.items():
        axes.plot([], [], "s", color=color, label=label)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 3.5}
    axes.legend(ncols=5, **place)
