"""How long the instructions of GPU programs take, in programs of jax-cuda12-pjrt 0.10.2.

The texts in `gpu/` lack the tables of stack frames and some fields that are not read:

- `layers_h100_8`: the gradient of a scan of 3 layers, each a product of `[512, 2048]` with a weight
  `[2048, 2048]` that is gathered over 8 devices, and gathered again in the backward pass.
- `ragged_h100_8`: a ragged all-to-all of 64 rows of 128 features into a buffer of 256 rows.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from manualpar.inspect.compiled import compiled_collectives, parse_module
from manualpar.planner.compiled_plan import (
    CLOCK,
    cudnn_seconds,
    gpu_cycles,
    read_out_of_memory,
    wire_by_links,
)
from manualpar.planner.compiled_timeline import Timeline, on_all_links, read_timeline
from manualpar.planner.hardware import CUDNN as SPEED
from manualpar.planner.hardware import chip_named
from manualpar.planner.topology import Topology, parse_topology

DATA = Path(__file__).parent / "gpu"
LAYERS, RAGGED = (
    (DATA / f"{name}.txt").read_text(encoding="utf-8")
    for name in ("layers_h100_8", "ragged_h100_8")
)
H100 = chip_named("h100")
# A call of cuDNN's attention: 1 example, 16 heads of 128 features, 2,048 positions.
CUDNN = """HloModule attend, is_scheduled=true, num_partitions=1

ENTRY %main {
  %q = bf16[1,2048,16,128]{3,2,1,0} parameter(0)
  %k = bf16[1,2048,16,128]{3,2,1,0} parameter(1)
  ROOT %out = (bf16[1,16,2048,128]{3,1,2,0}, f32[1,16,2048]{2,1,0}, u8[0]{0}) custom-call(%q, %k), \
custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(f)/dot_product_attention_fwd"}, \
backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16",\
 "dimensions": ["1", "16", "2048", "2048"], "tuple_shapes": []}, "mask_type": "CAUSAL", \
"sliding_window_length": WINDOW}}
}
"""


def read(text: str, *, chip=H100, seconds: float = 1e-3) -> Timeline:
    """Follows a program in which each run of a collective takes `seconds`."""
    return read_timeline(
        text,
        {"data": 8},
        clock=CLOCK,
        wire=on_all_links(lambda collective: seconds),
        kernel_seconds=cudnn_seconds(chip),
        cycles=gpu_cycles(chip),
    )


def test_collectives_are_read_with_their_runs() -> None:
    found = [(x.collective.kind, x.collective.times) for x in read(LAYERS).collectives]
    # XLA has taken one of three iterations out of the backward loop.
    assert found == [
        ("all_gather", 3),
        ("all_gather", 1),
        ("reduce_scatter", 2),
        ("all_gather", 2),
        ("reduce_scatter", 1),
    ]


def test_synchronous_collective_hides_nothing() -> None:
    long = read(LAYERS)
    assert long.hidden_seconds > 0
    assert long.step_seconds == pytest.approx(long.compute_seconds + long.exposed_seconds)
    synchronous = read(LAYERS.replace('"is_sync":false', '"is_sync":true'))
    assert synchronous.hidden_seconds == 0
    assert {x.is_async for x in synchronous.collectives} == {False}
    assert synchronous.exposed_seconds == pytest.approx(9e-3)


@pytest.mark.parametrize("chip", ["h100", "a100"])
def test_product_takes_the_time_of_its_operations_or_bytes(chip: str) -> None:
    """XLA's own estimate of a product, here raised to a second, does not count."""
    text = re.sub(
        r'"exec_time_us":[\d.]+(?=[^{}]*"name":"experimental-)', '"exec_time_us":1e6', LAYERS
    )
    module, found = parse_module(text), chip_named(chip)
    computation = module.computations[module.entry]
    product = computation["gemm_fusion_transpose.4"]
    operations = 2 * 512 * 2048 * 2048 / (found.peak("bfloat16") * found.flops_efficiency)
    moved = 2 * (2 * 512 * 2048 + 2048 * 2048) / (found.hbm_bandwidth * found.hbm_efficiency)
    seconds = gpu_cycles(found)(module, computation, product)
    assert seconds == round(max(operations, moved) * 1e9)


def test_other_instructions_take_xlas_estimate_or_the_time_of_their_bytes() -> None:
    module = parse_module(LAYERS)
    computation = module.computations[module.entry]
    sliced = computation["wrapped_slice"]  # It reads one layer of three.
    estimate = float(re.findall(r'"exec_time_us":([\d.]+)', sliced.attributes)[0])
    cycles = gpu_cycles(H100)
    assert cycles(module, computation, sliced) == round(estimate * 1e3)
    unestimated = sliced._replace(attributes=sliced.attributes.replace("exec_time_us", "unknown"))
    layer = 2 * 512 * 2048
    moved = 2 * layer / (H100.hbm_bandwidth * H100.hbm_efficiency)
    assert cycles(module, computation, unestimated) == round(moved * 1e9)
    assert cycles(module, computation, computation["all-gather-done.2"]) is None


def test_an_estimate_that_no_arithmetic_explains_is_not_used() -> None:
    """XLA priced the backward pass of a small LayerNorm at seconds."""
    module = parse_module(LAYERS)
    computation = module.computations[module.entry]
    sliced = computation["wrapped_slice"]
    moved = 2 * 2 * 512 * 2048 / (H100.hbm_bandwidth * H100.hbm_efficiency)

    def cycles(microseconds: str, kind: str) -> int | None:
        attributes = re.sub(
            r'"exec_time_us":[\d.]+', f'"exec_time_us":{microseconds}', sliced.attributes
        )
        attributes = re.sub(r"kind=\w+", f"kind={kind}", attributes)
        return gpu_cycles(H100)(module, computation, sliced._replace(attributes=attributes))

    assert cycles("3253636.6", "kCustom") == round(moved * 1e9)
    assert cycles("50.0", "kCustom") == 50_000
    assert cycles("3253636.6", "kLoop") == round(3253636.6 * 1e3)


STACK = """HloModule stack, is_scheduled=true, num_partitions=1

%push (stack: bf16[24,1024,2048], layer: bf16[1024,2048], i: s32[]) -> bf16[24,1024,2048] {
  %stack = bf16[24,1024,2048]{2,1,0} parameter(0)
  %layer = bf16[1024,2048]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %one = bf16[1,1024,2048]{2,1,0} bitcast(%layer)
  %zero = s32[] constant(0)
  ROOT %new = bf16[24,1024,2048]{2,1,0} dynamic-update-slice(%stack, %one, %i, %zero, %zero)
}

ENTRY %main (stack: bf16[24,1024,2048], layer: bf16[1024,2048], i: s32[]) -> bf16[24,1024,2048] {
  %stack.1 = bf16[24,1024,2048]{2,1,0} parameter(0)
  %layer.1 = bf16[1024,2048]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %begun = ((bf16[24,1024,2048]{2,1,0}, bf16[1024,2048]{1,0}, s32[]), bf16[24,1024,2048]{2,1,0}, \
u32[]) fusion-start(%stack.1, %layer.1, %i.1), kind=kLoop, calls=%push
  ROOT %done = bf16[24,1024,2048]{2,1,0} fusion-done(%begun)
}
"""


def test_a_layer_that_is_copied_into_a_stack_takes_the_time_of_the_layer() -> None:
    """JAX 0.12 copies asynchronously, and the copy's operands are the whole stack."""
    layer = 2 * 1024 * 2048
    moved = 2 * layer / (H100.hbm_bandwidth * H100.hbm_efficiency)
    assert read(STACK).compute_seconds == pytest.approx(moved, rel=0.01)


def test_without_estimates_the_layers_still_take_their_time() -> None:
    """XLA has no estimates for A100, so all instructions take the time of their bytes."""
    text = re.sub(r'"reification_cost":\[.*?\](?=[,}])', '"reification_cost":[]', LAYERS)
    assert "exec_time_us" not in text
    found = read(text, chip=chip_named("a100"))
    # Three products forward and six backward, which cannot be faster than the peak.
    assert found.compute_seconds > 9 * 2 * 512 * 2048 * 2048 / 312e12
    assert not found.unestimated


@pytest.mark.parametrize(("window", "share"), [(0, 1 / 2), (512, 1 / 4)])
def test_attention_takes_the_operations_that_its_mask_leaves(window: int, share: float) -> None:
    (kernel,) = read(CUDNN.replace("WINDOW", str(window))).kernels
    operations = 2 * 2 * 16 * 2048 * 2048 * 128 * share
    assert (kernel.name, kernel.times) == ("dot_product_attention_fwd", 1)
    numbers = 16 * 2048 * 128
    more = SPEED.number_bytes * numbers / H100.hbm_bandwidth + SPEED.start
    wanted = operations / (989.5e12 * SPEED.share) + 2 / 7 * more
    assert kernel.seconds == pytest.approx(wanted, rel=1e-2)


def test_ragged_all_to_all_sends_the_rows_of_a_device() -> None:
    (found,) = compiled_collectives(RAGGED)
    assert (found.kind, found.group_size, found.times) == ("all_to_all", 8, 1)
    assert found.shapes == ((64, 128),)
    assert found.bytes_sent == 7 * 64 * 128 * 2 // 8
    # On the way back the buffer is the operand, and the rows are the result.
    back = re.sub(r"(start\()(%param\.6), (%copy\.9)", r"\1\3, \2", RAGGED)
    assert back != RAGGED
    assert compiled_collectives(back)[0].shapes == ((64, 128),)


# -------------------------------------------------------------------------------------------------
# Small schedules by hand, on a torus whose links carry a byte a second: a cycle is a second.


BYTES = 32  # Of what everybody sends, eight numbers.
LINE = [(0, x, 0) for x in range(4)]
OPCODES = {"permute": "collective-permute", "gather": "all-gather", "exchange": "all-to-all"}
SQUARE = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]


def topology_of(name: str, **network: Any) -> Topology:
    topology = parse_topology(name)
    plain = {"bandwidth": 1.0, "efficiency": 1.0, "launch": 0.0, "latency": 0.0} | network
    network_ = dataclasses.replace(topology.chip.network, **plain)
    return Topology(dataclasses.replace(topology.chip, network=network_), topology.shape)


def follow(
    lines: list[str],
    places: list[tuple[int, ...]],
    *,
    topology: str = "v5e:4x4",
    mesh: dict[str, int] | None = None,
    apart: bool = True,
    **network: Any,
) -> Timeline:
    """Begins collectives at once and waits for them at the end; a line has the devices of one.

    It is `permute {0,1},{1,2}`, pairs, or `gather {0,1},{2,3}` or `exchange {0,1},{2,3}`, groups; a
    gather takes 100 seconds.
    """
    written = ["%x = f32[8] parameter(0)"]
    for i, line in enumerate(lines):
        kind, _, devices = line.partition(" ")
        opcode = OPCODES[kind]
        name = "source_target_pairs" if kind == "permute" else "replica_groups"
        joined = f"channel_id={i + 1}, {name}={{{devices}}}, metadata={{}}"
        written.append(f"%s{i} = f32[8] {opcode}-start(%x), {joined}")
    opcodes = [OPCODES[line.partition(" ")[0]] for line in lines]
    written += [f"%d{i} = f32[8] {opcode}-done(%s{i})" for i, opcode in enumerate(opcodes)]
    text = (
        f"HloModule m, is_scheduled=true, num_partitions={len(places)}\n\nENTRY %main (x: f32[8]) "
    )
    text += "-> f32[8] {\n  " + "\n  ".join(written) + "\n}\n"
    wire_seconds: Any = lambda collective: 100.0  # noqa: E731
    return read_timeline(
        text,
        mesh or {"data": len(places)},
        clock=1.0,
        wire=wire_by_links(topology_of(topology, **network), places, wire_seconds, apart=apart),
    )


@pytest.mark.parametrize(
    ("permutes", "seconds"),
    [
        (["{0,1},{1,2}"], 1),  # Each pair has a link.
        (["{0,1}", "{1,0}"], 1),  # Opposite directions.
        (["{0,1}", "{0,1}"], 2),  # One link.
        (["{0,2}"], 1),  # Two links, one after the other, but at once for what flows.
        (["{0,2}", "{1,2}"], 2),  # The second link is taken.
        (["{0,2}", "{2,3}"], 1),
        (["{0,2},{1,2}"], 2),  # A link with two loads.
        (["{0,3},{3,0}", "{1,2}", "{2,1}"], 2),
        (["{0,0}"], 0),  # Nothing is sent.
    ],
)
def test_permutations_along_a_line(permutes: list[str], seconds: int) -> None:
    found = follow([f"permute {pairs}" for pairs in permutes], LINE)
    assert found.step_seconds == found.exposed_seconds == seconds * BYTES


@pytest.mark.parametrize(
    ("permutes", "seconds"),
    [
        (["{0,3}", "{2,3}"], 2),  # First along x: by 2.
        (["{0,3}", "{0,1}"], 1),
        (["{0,3}", "{3,0}"], 1),  # Back by 1.
    ],
)
def test_a_way_goes_along_x_first(permutes: list[str], seconds: int) -> None:
    found = follow([f"permute {pairs}" for pairs in permutes], SQUARE)
    assert found.step_seconds == seconds * BYTES


@pytest.mark.parametrize(("topology", "seconds"), [("v5e:4x4", 2), ("v5p:4x4x4", 1)])
def test_a_closed_dimension_is_passed_the_shorter_way(topology: str, seconds: int) -> None:
    places = [(*place, 0) for place in LINE]
    found = follow(["permute {0,3}", "permute {1,2}"], places, topology=topology)
    assert found.step_seconds == seconds * BYTES


def test_a_hop_takes_time_and_so_does_a_start() -> None:
    found = follow(["permute {0,2},{2,3}"], LINE, launch=5.0, latency=3.0)
    assert found.step_seconds == 5 + 2 * 3 + BYTES


def test_devices_are_found_where_the_mesh_has_them() -> None:
    # In this order the second and the third device are two hops apart.
    places = [LINE[i] for i in (0, 1, 3, 2)]
    found = follow(["permute {1,2}", "permute {3,2}"], places)
    assert found.step_seconds == 2 * BYTES
    assert follow(["permute {1,3}", "permute {3,2}"], places).step_seconds == BYTES


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        (["gather {0,1},{2,3}", "gather {0,2},{1,3}"], 100),  # One along y, one along x.
        (["gather {0,1},{2,3}", "gather {0,1},{2,3}"], 200),
        (["gather {0,1},{2,3}", "gather {0,1,2,3}"], 200),
        (["gather {0,1},{2,3}", "permute {0,2}"], 100),
        (["gather {0,1},{2,3}", "permute {0,1}"], 100 + BYTES),
        (["gather {0,1},{2,3}", "permute {1,0}"], 100 + BYTES),
    ],
)
def test_others_occupy_the_dimensions_in_which_their_devices_lie(
    lines: list[str], seconds: int
) -> None:
    assert follow(lines, SQUARE).step_seconds == seconds


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(
    ("groups", "places", "seconds"),
    [
        ("{0,1,2,3}", LINE, 1),  # Both devices on the left send a quarter to both on the right.
        ("{0,1,2,3}", SQUARE, 0.5),  # Of four pairs that cross, two go over each link.
        ("{0,1},{2,3}", LINE, 0.5),
        ("{0,2},{1,3}", LINE, 1),  # Both groups cross the middle.
    ],
)
def test_an_all_to_all_is_all_pairs_at_once(
    groups: str, places: list[tuple[int, ...]], seconds: float, apart: bool
) -> None:
    found = follow([f"exchange {groups}"], places, apart=apart)
    assert found.step_seconds == found.exposed_seconds == seconds * BYTES


def test_one_collective_at_a_time_uses_all_links() -> None:
    assert follow(["permute {0,1}", "permute {1,0}"], LINE, apart=False).step_seconds == 200


def test_what_crosses_slices_occupies_all_links() -> None:
    places = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    found = follow(["permute {0,2},{1,3}", "permute {2,3}"], places)
    assert found.step_seconds == 100 + BYTES


def test_devices_of_a_chip_share_its_links() -> None:
    places = [(0, 0, 0, 0), (0, 0, 0, 0), (0, 1, 0, 0), (0, 1, 0, 0)]
    found = follow(["permute {0,2},{1,3}"], places, topology="tpu7x:2x1x1")
    assert found.step_seconds == BYTES  # Twice the load, at the bandwidth of two devices.


# -------------------------------------------------------------------------------------------------
# The compiler's messages about memory, as libtpu 0.0.42 writes them.


GIB = 2**30
MESSAGE = Path(__file__).parent / "tpu" / "out_of_memory.txt"
SEEN_BEFORE = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(29.86G) exceeds available HBM (15.75G)."
)


def test_what_is_placed_is_named_the_largest_first() -> None:
    found = read_out_of_memory(MESSAGE.read_text(encoding="utf-8"))
    assert (found.needed, found.available) == (15 * GIB, 15 * GIB)
    assert found.sentences[:3] == (
        "Does not fit: a chip needs 15.00 GiB and has 15.00 GiB, which is 689 KiB too little.",
        "6.25 GiB are f32[40960,40960] of gamma (forward: dot_general).",
        "6.25 GiB are f32[40960,40960] (Argument 0 index {}).",
    )
    assert len(found.sentences) == 6  # Of nine buffers.
    sizes = [float(sentence.partition(" GiB")[0]) for sentence in found.sentences[1:]]
    assert sizes == sorted(sizes, reverse=True)


def test_what_is_seen_before_has_no_parts() -> None:
    found = read_out_of_memory(SEEN_BEFORE)
    assert found.needed == pytest.approx(29.86 * GIB, rel=1e-9)
    assert found.available == 15.75 * GIB
    first, second = found.sentences
    assert first.startswith("Does not fit: a chip needs 29.86 GiB and has 15.75 GiB, which is")
    assert "names none of them" in second


@pytest.mark.parametrize(
    ("number", "size"), [("0B", 0), ("160.0K", 163840), ("2.50M", 2621440), ("4.00P", 2**52)]
)
def test_units(number: str, size: int) -> None:
    message = f"the total memory required for HLO temporaries ({number}) exceeds available HBM (1G)"
    assert read_out_of_memory(message).needed == size


def test_another_message_is_handed_on() -> None:
    found = read_out_of_memory("RESOURCE_EXHAUSTED: something\nelse")
    assert found.needed == found.available == 0
    assert found.sentences == (
        "Does not fit. The compiler reports: RESOURCE_EXHAUSTED: something else",
    )


def test_buffer_of_a_layer_names_its_module_and_its_phase() -> None:
    scope = "jit(train)/shard_map/transpose(jvp(Transformer))/layers/mlp/gate/dot_general"
    buffer = f"""
  1. Size: 1.00G
     Operator: op_name="{scope}"
     Shape: f32[8,16]{{1,0}}
     XLA label: fusion.1 = fusion(a)
"""
    sentences = read_out_of_memory(SEEN_BEFORE + buffer).sentences
    assert sentences[1] == "1.00 GiB are f32[8,16] of layers/mlp/gate (backward: dot_general)."
