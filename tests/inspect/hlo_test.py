import itertools
import math

import numpy as np
import pytest

from manualpar.inspect.compiled import (
    HloModule,
    Instruction,
    array_bytes,
    arrays,
    axes_of,
    device_groups,
    parse_module,
    scope_of,
    trip_count,
)

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
        ("constant(0)", "constant(x)"),
    ],
)
def test_one_that_does_not(changed, by):
    assert count() == 7
    assert changed in LOOP.replace("BEGIN", "0").replace("END", "7")
    assert count(changed=changed, by=by) is None


@pytest.mark.parametrize("step", [0, -1])
def test_one_that_would_never_end(step):
    assert count(step=step) is None


@pytest.mark.parametrize("copy", ["bitcast", "convert", "copy-start", "copy-done", "opt-barrier"])
def test_a_counter_that_is_handed_on(copy):
    assert count(changed="copy(%begin)", by=f"{copy}(%begin)") == 7


def test_what_xla_has_written_is_taken():
    written = 'body=%body, backend_config={"known_trip_count":{"n":"12"}}'
    assert count(changed="body=%body", by=written) == 12


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[2,3]{1,0:T(8,128)(2,1)S(1)}", 12),
        ("(f32[8]{0:T(128)}, /*index=1*/s8[3], pred[5], u32[]{:S(2)})", 44),
        ("s4[3]", 2),  # Half a byte each, in whole bytes.
        ("token[]", 0),
    ],
)
def test_bytes_of_shapes(shape, size):
    assert sum(array_bytes(*array) for array in arrays(shape)) == size


def groups_of(attributes, opcode="all-gather"):
    attributes = f", channel_id=1, {attributes}, dimensions={{0}}"
    collective = Instruction("c", "f32[8]", opcode, ("x",), attributes)
    return device_groups(HloModule({}, "", 8), collective)


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={}", [range(8)]),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("replica_groups=[2,4]<=[8]", [range(4), range(4, 8)]),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("replica_groups=mesh['a'=8,'b'=1] {'a','b'}", [range(8)]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
            [(0, 2, 4, 6), (1, 3, 5, 7)],
        ),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'a'}",
            [(4, 0), (5, 1), (6, 2), (7, 3)],
        ),
    ],
)
def test_groups_in_each_form(attributes, groups):
    assert sorted(groups_of(attributes)) == [tuple(group) for group in groups]


def test_groups_of_a_permutation():
    pairs = "source_target_pairs={{0,1},{1,2},{2,0},{4,5}}"
    assert groups_of(pairs, "collective-permute-start") == ((0, 1, 2), (4, 5))


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 1, 4)])
def test_axes_of_the_groups_along_them(sizes):
    mesh = {f"axis{dim}": size for dim, size in enumerate(sizes)}
    ids = np.arange(8).reshape(sizes)
    for count in range(len(sizes) + 1):
        for dims in itertools.combinations(range(len(sizes)), count):
            rest = [dim for dim in range(len(sizes)) if dim not in dims]
            size = math.prod(sizes[dim] for dim in dims)
            groups = ids.transpose([*rest, *dims]).reshape(-1, size)
            expected = tuple(f"axis{dim}" for dim in dims if sizes[dim] > 1)
            assert axes_of(tuple(map(tuple, groups.tolist())), mesh) == expected


def test_devices_that_pass_something_on_need_not_be_all_along_an_axis():
    assert axes_of(((0, 1), (2, 3)), {"data": 8}) == ("data",)
    assert axes_of(((4, 5),), {"replica": 2, "data": 4}) == ("data",)
    assert axes_of(((0, 4),), {"replica": 2, "data": 4}) == ("replica",)
    assert axes_of(((0, 5),), {"replica": 2, "data": 4}) == ("replica", "data")


def test_instruction_without_a_scope_has_that_of_what_it_is_made_from():
    module = parse_module(
        """HloModule m, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0), metadata={op_name="layer/scatter_gradients/reduce_scatter"}
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %reduced = f32[8] all-reduce(%x), replica_groups={}, to_apply=%sum
  %part = f32[4] slice(%reduced), slice={[0:4]}
  ROOT %shifted = f32[4] collective-permute(%part), source_target_pairs={{0,1}}
}
"""
    )
    main = module.computations["main"]
    scope = scope_of(module, main, main["shifted"])
    assert scope == "layer/scatter_gradients/reduce_scatter"
    assert scope_of(module, main, main["x"]) == ""


KERNEL = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %k = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"sizes":{
"block_q":512
},
"xprof_metadata":"{\\"block_q\\": 512}"
},chain="1"}, metadata={op_name="f/kernel/pallas_call"}
  %z = f32[4]{0} negate(%k), backend_config={"estimated_cycles":"9223372036854775807"}
  ROOT %y = f32[4]{0} negate(%k), backend_config={"window_config":{"estimated_cycles":"9"}}
}
"""


def test_a_kernel_says_what_it_says_of_itself_on_lines_of_its_own():
    module = parse_module(KERNEL)
    assert list(module.computations["main"]) == ["x", "k", "z", "y"]
    kernel = module.computations["main"]["k"]
    assert (kernel.target, kernel.op_name) == ("tpu_custom_call", "f/kernel/pallas_call")
    assert module.computations["main"]["y"].cycles == 9
    assert module.computations["main"]["z"].cycles is None  # The estimate has run over.
