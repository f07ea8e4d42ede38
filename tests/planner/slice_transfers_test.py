"""Transfers between slices: how a program of several slices is read, and how long they take.

`data/tpu/two_slices_v5e_2x2` is a scan of 3 layers of one product, compiled by libtpu 0.0.52 for
two slices. Backward the gradient `[1024, 1024]` is scattered over four chips in bfloat16, and its
mean over the slices is taken in float32. XLA sends the mean of a layer while the next layer
computes: it runs 2 of the 3 transfers in a loop, and the last one behind the loop.
"""

import re
from pathlib import Path

import pytest

from manualpar.inspect.compiled import Instruction
from manualpar.planner.compiled_timeline import (
    SLICES,
    Timeline,
    kind_of_transfer,
    on_all_links,
    read_timeline,
    slice_groups,
)

TEXT = (Path(__file__).parent / "tpu" / "two_slices_v5e_2x2.txt").read_text(encoding="utf-8")
MESH = {"replica": 2, "data": 4}
SQUARE = '"{1,2,3,4}x{0:1}"'
LISTED = "{{100000,300000},{100001,300001},{200000,400000},{200001,400001}}"
PERMUTED = "{{100000->200000},{200000->100000},{100001->200001},{200001->100001}}"


def read(seconds: float, *, text: str = TEXT, in_slice: float = 0.0) -> Timeline:
    return read_timeline(
        text,
        MESH,
        clock=1.5e9,
        wire=on_all_links(lambda collective: in_slice),
        between_slices=lambda transfer: seconds,
    )


def test_transfers_are_collectives_over_the_axes_that_cross_slices() -> None:
    found = [x.collective for x in read(0.0).collectives if x.network == SLICES]
    assert {(x.kind, x.axes, x.group_size, x.dtypes) for x in found} == {
        ("all_reduce", ("replica",), 2, ("f32",))
    }
    assert sum(x.times for x in found) == 3
    assert sum(x.bytes_sent for x in found) == 3 * 1024 * 1024 // 4 * 4
    others = [x.collective for x in read(0.0).collectives if x.network != SLICES]
    assert {(x.kind, x.axes) for x in others} == {("reduce_scatter", ("data",))}


def test_a_transfer_runs_behind_the_next_layer_but_the_last_is_exposed() -> None:
    seconds = 10e-6
    timeline = read(seconds)
    *in_loop, last = [x for x in timeline.collectives if x.network == SLICES]
    assert [x.is_async for x in in_loop] == [True] * len(in_loop)
    assert last.hidden_seconds < seconds / 2
    assert timeline.exposed_seconds == pytest.approx(seconds - last.hidden_seconds)
    # A layer computes for less than a second, so nothing hides transfers of that length.
    assert read(1.0).exposed_seconds > 2.9


def test_slices_have_a_clock_of_their_own() -> None:
    """Collectives in a slice do not wait for transfers, which take long here, nor the reverse."""
    scatters = [x for x in read(5e-6, in_slice=5e-6).collectives if x.network != SLICES]
    alone = [x for x in read(0.0, in_slice=5e-6).collectives if x.network != SLICES]
    assert [x.hidden_seconds for x in scatters] == [x.hidden_seconds for x in alone]


def send(target: str, kind: str = "ALL_REDUCE") -> Instruction:
    attributes = (
        '_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target='
        f'{target},_xla_megascale_transfer_type="{kind}"}}'
    )
    return Instruction("send.1", "(f32[8], u32[], token[])", "send", ("x", "token"), attributes)


def test_groups_are_read_in_each_form() -> None:
    """As libtpu 0.0.52 writes them for four slices, here of two chips."""
    assert slice_groups(send(SQUARE), 2) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert slice_groups(send(LISTED), 2) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert slice_groups(send(PERMUTED), 2) == ((0, 2), (2, 0), (1, 3), (3, 1))


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (lambda: slice_groups(send("everything"), 2), "send.1 has the target everything"),
        (lambda: kind_of_transfer(send(SQUARE, "ONE_TO_ALL")), "of type 'ONE_TO_ALL', expected"),
    ],
)
def test_other_forms_are_refused(of, words) -> None:
    with pytest.raises(ValueError, match=words):
        of()


def test_without_a_clock_of_slices_transfers_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("read_timeline: the program contains send")):
        read_timeline(TEXT, MESH, clock=1.0, wire=on_all_links(lambda collective: 0.0))
