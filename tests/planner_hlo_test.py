"""What is read off the text of a scheduled program, against what was written into it."""

import itertools
import math
import re

import numpy as np
import pytest

from manualpar.planner.hlo import (
    Instruction,
    Module,
    array_bytes,
    axes_of,
    device_groups,
    parse_module,
    scope_of,
    trip_count,
)

LOOP = """HloModule jit_f, is_scheduled=true, num_partitions=8

%cond (p: (s32[], f32[4])) -> pred[] {{
  %p = (s32[], f32[4]) parameter(0)
  %bound = s32[] constant({end})
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %bound), direction={direction}
}}

%body (q: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %q = (s32[], f32[4]) parameter(0)
  %x = f32[4]{{0:T(128)}} get-tuple-element(%q), index=1
  %j = s32[] get-tuple-element(%q), index={counter}
  %k = s32[]{{:S(6)}} copy(%j)
  %step = s32[] constant({step})
  %next = s32[] add(%k, %step)
  ROOT %t = (s32[], f32[4]) tuple(%next, %x)
}}

ENTRY %main (a: f32[4]) -> (s32[], f32[4]) {{
  %a = f32[4]{{0:T(128)}} parameter(0)
  %zero = s32[] constant({start})
  %start = s32[] copy(%zero)
  %init = (s32[], f32[4]) tuple(%start, %a)
  ROOT %w = (s32[], f32[4]) while(%init), condition=%cond, body=%body, metadata={{op_name="scan"}}
}}
"""


def turns(**changes: object) -> int:
    """How often the loop runs, with something changed."""
    values = {"start": 0, "end": 7, "step": 1, "direction": "LT", "counter": 0} | changes
    module = parse_module(LOOP.format(**values))
    main = module.computations["main"]
    return trip_count(module, main, main.instructions["w"])


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("end", [0, 1, 7, 32])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_loop_runs_as_often_as_python_would(start: int, end: int, step: int) -> None:
    assert turns(start=start, end=end, step=step) == len(range(start, end, step))


@pytest.mark.parametrize(
    "changes", [{"direction": "NE"}, {"counter": 1}, {"step": 0}, {"step": -1}, {"start": "x"}]
)
def test_loop_that_counts_otherwise_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"loop w \(scope: scan\).*Write it as a jax\.lax\.scan"):
        turns(**changes)


def test_known_trip_count_is_taken_at_its_word() -> None:
    text = LOOP.format(start="x", end=7, step=1, direction="LT", counter=0)
    known = text.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    module = parse_module(known)
    main = module.computations["main"]
    assert trip_count(module, main, main.instructions["w"]) == 5


@pytest.mark.parametrize("text", ["", "module @jit_f {}", "HloModule jit_f, num_partitions=8"])
def test_text_that_is_not_scheduled_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected an HloModule that is scheduled"):
        parse_module(text)


def test_bytes_of_shapes() -> None:
    assert array_bytes("bf16[2,3]{1,0:T(8,128)(2,1)S(1)}") == 12
    assert array_bytes("(f32[8]{0:T(128)}, /*index=1*/s8[3], pred[5], u32[]{:S(2)})") == 44
    assert array_bytes("s4[3]") == 2  # Half a byte each, in whole bytes.
    assert array_bytes("token[]") == 0


def collective(attributes: str, opcode: str = "all-gather") -> Instruction:
    """A collective with these attributes."""
    return Instruction(
        "c", "f32[8]", opcode, ("x",), f", channel_id=1, {attributes}, dimensions={{0}}"
    )


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
        ("source_target_pairs={{0,1},{1,2},{2,0},{4,5}}", [(0, 1, 2), (4, 5)]),
    ],
)
def test_groups_in_each_form(attributes: str, groups: list[range | tuple[int, ...]]) -> None:
    found = device_groups(Module({}, "", 8), collective(attributes))
    assert sorted(found) == [tuple(group) for group in groups]


def test_groups_in_another_form_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("all-gather c has replica_groups='@groups")):
        device_groups(Module({}, "", 8), collective("replica_groups=@groups"))


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 1, 4)])
def test_axes_of_the_groups_along_them(sizes: tuple[int, ...]) -> None:
    mesh = {f"axis{dim}": size for dim, size in enumerate(sizes)}
    ids = np.arange(8).reshape(sizes)
    for count in range(len(sizes) + 1):
        for dims in itertools.combinations(range(len(sizes)), count):
            rest = [dim for dim in range(len(sizes)) if dim not in dims]
            size = math.prod(sizes[dim] for dim in dims)
            groups = ids.transpose([*rest, *dims]).reshape(-1, size)
            expected = tuple(f"axis{dim}" for dim in dims if sizes[dim] > 1)
            assert axes_of(tuple(map(tuple, groups.tolist())), mesh) == expected


def test_devices_that_pass_something_on_need_not_be_all_along_an_axis() -> None:
    assert axes_of(((0, 1), (2, 3)), {"data": 8}) == ("data",)
    assert axes_of(((4, 5),), {"replica": 2, "data": 4}) == ("data",)
    assert axes_of(((0, 4),), {"replica": 2, "data": 4}) == ("replica",)
    assert axes_of(((0, 5),), {"replica": 2, "data": 4}) == ("replica", "data")


def test_instruction_without_a_scope_has_that_of_what_it_is_made_from() -> None:
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
    scope = scope_of(module, main, main.instructions["shifted"])
    assert scope == "layer/scatter_gradients/reduce_scatter"
    assert scope_of(module, main, main.instructions["x"]) == ""
