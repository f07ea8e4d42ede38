"""Schedules as text."""

from manualpar.layers.pipeline.schedules import describe_schedule, make_table

INTERLEAVED = """\
1f1b: 2 stages of 2 chunks, 4 microbatches, 12 ticks, bubble 11.1%
slots: 5 for inputs, 1 for gradients; inputs in flight by stage: 5 3

tick       0  1  2  3  4  5  6  7  8  9 10 11
stage 0 F 0a 1a 0b 1b 2a 3a 2b 3b  .  .  .  .
        B  .  .  .  . 0b 1b 0a 1a 2b 3b 2a 3a
stage 1 F  . 0a 1a 0b 1b 2a 3a 2b 3b  .  .  .
        B  .  .  . 0b 1b 0a 1a 2b 3b 2a 3a  ."""


def test_a_line_for_what_each_stage_does():
    assert describe_schedule(make_table("1f1b", 2, 4, 2)) == INTERLEAVED


def test_ticks_that_do_not_fit_follow_below():
    lines = describe_schedule(make_table("gpipe", 2, 3), width=17).splitlines()
    assert lines[3:] == [
        "tick      0 1 2 3",
        "stage 0 F 0 1 2 .",
        "        B . . . .",
        "stage 1 F . 0 1 2",
        "        B . . . 0",
        "",
        "tick      4 5 6",
        "stage 0 F . . .",
        "        B 0 1 2",
        "stage 1 F . . .",
        "        B 1 2 .",
    ]


def test_a_forward_pass_alone_has_one_line():
    lines = describe_schedule(make_table("1f1b", 2, 2, backward=False)).splitlines()
    assert lines[3:] == ["tick      0 1 2", "stage 0 F 0 1 .", "stage 1 F . 0 1"]


def test_more_chunks_than_letters_have_numbers():
    text = describe_schedule(make_table("1f1b", 1, 1, 27), width=10_000)
    assert text.splitlines()[4].split()[3:6] == ["0.0", "0.1", "0.2"]
