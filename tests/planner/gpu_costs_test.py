"""How long the instructions of GPU programs take, in programs of jax-cuda12-pjrt 0.10.2.

The texts in `gpu/` lack the tables of stack frames and some fields that are not read:

- `layers_h100_8`: the gradient of a scan of 3 layers, each a product of `[512, 2048]` with a weight
  `[2048, 2048]` that is gathered over 8 devices, and gathered again in the backward pass.
- `ragged_h100_8`: a ragged all-to-all of 64 rows of 128 features into a buffer of 256 rows.
"""

import re
from pathlib import Path

import pytest

from manualpar.inspect.compiled import compiled_collectives, parse_module
from manualpar.planner.compiled_plan import CLOCK, cudnn_seconds, gpu_cycles
from manualpar.planner.compiled_timeline import Timeline, on_all_links, read_timeline
from manualpar.planner.hardware import chip_named

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
    assert kernel.seconds == pytest.approx(operations / (989.5e12 * 0.444 * 7 / 6), rel=1e-2)


def test_ragged_all_to_all_sends_the_rows_of_a_device() -> None:
    (found,) = compiled_collectives(RAGGED)
    assert (found.kind, found.group_size, found.times) == ("all_to_all", 8, 1)
    assert found.shapes == ((64, 128),)
    assert found.bytes_sent == 7 * 64 * 128 * 2 // 8
    # On the way back the buffer is the operand, and the rows are the result.
    back = re.sub(r"(start\()(%param\.6), (%copy\.9)", r"\1\3, \2", RAGGED)
    assert back != RAGGED
    assert compiled_collectives(back)[0].shapes == ((64, 128),)
