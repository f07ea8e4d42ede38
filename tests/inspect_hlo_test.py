import pytest

from manualpar.inspect.hlo import parse_module, trip_count

# A loop as XLA:TPU writes it: nowhere does it say how often it runs.
LOOP = """HloModule jit_f, is_scheduled=true, num_partitions=8

%condition (p: (s32[], f32[4])) -> pred[] {
  %end = s32[]{:T(128)} constant(END)
  %p = (s32[]{:T(128)}, f32[4]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %end), direction=LT, metadata={op_name="while/cond/lt"}
}

%body (q: (s32[], f32[4])) -> (s32[], f32[4]) {
  %q = (s32[]{:T(128)}, f32[4]{0}) parameter(0)
  %step = s32[] constant(STEP)
  %x = f32[4]{0} get-tuple-element(%q), index=1
  %j = s32[] get-tuple-element(%q), index=0
  %next = s32[] add(%j, %step)
  %moved = s32[] copy(%next)
  ROOT %t = (s32[], f32[4]{0}) tuple(%moved, %x)
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %begin = s32[] constant(BEGIN)
  %i0 = s32[] copy(%begin)
  %given = (s32[], f32[4]{0}) tuple(%i0, %a)
  %w = (s32[], f32[4]{0}) while(%given), condition=%condition, body=%body
  ROOT %out = f32[4]{0} get-tuple-element(%w), index=1
}
"""


def count(begin=0, end=7, step=1, changed="", by=""):
    text = LOOP.replace("BEGIN", str(begin)).replace("END", str(end)).replace("STEP", str(step))
    module = parse_module(text.replace(changed, by) if changed else text)
    around = module.computations[module.entry]
    return trip_count(module, around, around["w"])


@pytest.mark.parametrize(
    ("begin", "end", "step"),
    [(0, 7, 1), (3, 7, 1), (0, 7, 2), (0, 8, 2), (-5, 6, 3), (7, 7, 1), (9, 7, 1), (0, 1, 100)],
)
def test_a_loop_that_counts(begin, end, step):
    assert count(begin, end, step) == len(range(begin, end, step))


@pytest.mark.parametrize(
    ("changed", "by"),
    [
        ("direction=LT", "direction=NE"),
        ("compare(%i, %end)", "compare(%end, %end)"),
        ("ROOT %lt", "ROOT %other = pred[] constant(true)\n  %lt"),
        ("%next = s32[] add(%j, %step)", "%next = s32[] multiply(%j, %step)"),
        ("%next = s32[] add(%j, %step)", "%next = s32[] add(%j, %j)"),
        ("%next = s32[] add(%j, %step)", "%next = s32[] add(%step, %step)"),
        ("%j = s32[] get-tuple-element(%q), index=0", "%j = s32[] parameter(1)"),
        ("%j = s32[] get-tuple-element(%q), index=0", "%j = s32[] get-tuple-element(%q), index=1"),
        ("tuple(%moved, %x)", "custom-call(%moved, %x)"),
        ("%begin = s32[] constant(0)", "%begin = s32[] parameter(1)"),
        ("%end = s32[]{:T(128)} constant(7)", "%end = s32[] parameter(1)"),
        ("while(%given)", "while(%a)"),
    ],
)
def test_one_that_does_not(changed, by):
    assert count() == 7
    assert changed in LOOP.replace("BEGIN", "0").replace("END", "7")
    assert count(changed=changed, by=by) is None


@pytest.mark.parametrize("step", [0, -1])
def test_one_that_would_never_end(step):
    assert count(step=step) is None


def test_what_xla_has_written_is_taken():
    written = 'body=%body, backend_config={"known_trip_count":{"n":"12"}}'
    assert count(changed="body=%body", by=written) == 12
