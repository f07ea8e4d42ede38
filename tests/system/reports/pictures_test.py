"""Bars and their scale, in settings that end with the picture."""

import threading
from concurrent.futures import ThreadPoolExecutor

import matplotlib
import pytest

from manualpar.core.tracing.scopes import REGATHER, SCOPES
from manualpar.strategies import BUILT_IN
from manualpar.system.reports import pictures
from manualpar.system.reports.pictures import (
    ROOM,
    Bar,
    add_legend,
    draw_bars,
    draw_bars_of_bytes,
    format_ticks,
    new_figure,
    saved_figure,
    scale_in_bytes,
)

BARS = [Bar("a", [(3.0, "red"), (5.0, "blue")], "eight"), Bar("b", [(2.0, "red")], "two")]


def test_bars_lie_end_to_end_the_first_on_top_with_their_texts():
    with new_figure("a test", (4, 3), title="$x$ \udcff") as figure:
        axes = figure.subplots()
        draw_bars(axes, BARS)
        drawn = [(bar.get_x(), bar.get_width(), bar.get_y() > 0) for bar in axes.patches]
        assert drawn == [(0, 3, False), (3, 5, False), (0, 2, True)]
        assert [(text.get_text(), text.xy) for text in axes.texts] == [
            ("eight", (8, 0)),
            ("two", (2, 1)),
        ]
        assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
        assert axes.get_xlim() == (0, ROOM * 8)
        top, bottom = axes.get_ylim()[::-1]
        assert top < 0 < 1 < bottom


def test_a_saved_figure_is_a_file_unless_drawing_it_fails(tmp_path):
    with saved_figure(tmp_path / "drawn.png", (4, 3), title="") as figure:
        draw_bars_of_bytes(figure.subplots(), [Bar("a", [(2**20, "red")], "one")], title="bytes")
        [axes] = figure.axes
        format_ticks(axes.yaxis, "{:.0f} y".format)
    assert (tmp_path / "drawn.png").read_bytes()[1:4] == b"PNG"
    assert (axes.get_title(loc="left"), axes.yaxis.get_major_formatter()(2, 0)) == ("bytes", "2 y")
    assert axes.yaxis.get_major_formatter()(0, 0) == "0"
    assert "1 MiB" in [label.get_text() for label in axes.get_xticklabels()]
    with pytest.raises(ZeroDivisionError), saved_figure(tmp_path / "b.png", (4, 3), title=""):
        raise ZeroDivisionError
    assert not (tmp_path / "b.png").exists()


def test_bytes_are_counted_in_powers_of_two():
    with new_figure("a test", (4, 3), title="") as figure:
        axes = figure.subplots()
        draw_bars(axes, BARS, end=3 * 2**20)
        scale_in_bytes(axes)
        shown = [label.get_text() for label in axes.get_xticklabels()]
        assert shown == ["0", "1 MiB", "2 MiB", "3 MiB"]


def test_settings_are_those_of_before_when_pictures_of_two_threads_are_drawn():
    before, begins, may_end = dict(matplotlib.rcParams), threading.Event(), threading.Event()

    def draw():
        with new_figure("a test", (4, 3), title=""):
            begins.set()
            may_end.wait()
            return matplotlib.rcParams["axes.spines.top"]

    with ThreadPoolExecutor(1) as pool:
        with new_figure("a test", (4, 3), title=""):
            other = pool.submit(draw)
            begins.wait(0.1)  # It must not begin.
            assert not matplotlib.rcParams["axes.spines.top"]
        may_end.set()
        assert not other.result()
    assert dict(matplotlib.rcParams) == before


def test_colours_are_explained_by_their_names():
    with new_figure("a test", (4, 3), title="") as figure:
        axes = figure.subplots()
        add_legend(axes, {"red ones": "red", "blue ones": "blue"})
        legend = axes.get_legend()
        assert [text.get_text() for text in legend.get_texts()] == ["red ones", "blue ones"]
        assert [handle.get_color() for handle in legend.legend_handles] == ["red", "blue"]


def test_a_colour_stands_for_one_thing():
    purposes = {*pictures.PURPOSE_COLORS.values()}
    assert len(purposes) == len(pictures.PURPOSE_COLORS)
    assert pictures.PURPOSE_COLORS.keys() <= {*SCOPES, REGATHER}
    assert pictures.FORWARD[0] == pictures.COMPUTING
    groups = (
        pictures.MEMORY_COLORS.values(),
        purposes - {*pictures.MEMORY_COLORS.values()},
        [*pictures.SPLIT_COLORS.values(), pictures.OTHER_SPLIT],
        [*pictures.FORWARD, *pictures.BACKWARD],
        [pictures.SENDING, pictures.SENDING_HIDDEN, pictures.WAITING],
        [kind.color for kind in BUILT_IN],
        [pictures.INK, pictures.DARK, pictures.GREY, pictures.FAINT],
    )
    colors = [color for group in groups for color in group]
    assert len(set(colors)) == len(colors)
