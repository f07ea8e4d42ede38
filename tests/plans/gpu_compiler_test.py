"""Compiling for GPUs that are not here: plans of a recorded program, and slowly, of real ones."""

import re
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from manualpar.inspect.memory import step_memory
from manualpar.planner.compiled_plan import plan_of, purpose_and_module, schedule_of
from manualpar.planner.gpu_targets import GPU_TARGETS, describe_target
from manualpar.planner.hardware import chip_named
from manualpar.plans.compiler_process import run_compiler
from manualpar.plans.compiler_worker import installed, tracing_for
from manualpar.plans.gpu_compiler import GPU, PACKAGES, compile_for_gpu
from manualpar.plans.planned_experiment import prepare_planned
from manualpar.training.config import load_config
from tests.paths import ROOT
from tests.plans.fake_worker import FACTS, answer

TEXT = (Path(__file__).parents[1] / "planner" / "gpu" / "layers_h100_8.txt").read_text(
    encoding="utf-8"
)
MEMORY = {"arguments": 1300, "outputs": 1250, "aliased": 1200, "temporaries": 999, "code": 5}
FOUND = FACTS | {
    "compiler": "jax-cuda12-pjrt 0.10.2",
    "num_devices": 8,
    "mesh": {"data": 8},
    "links": "",
    "memory": MEMORY | {"peak": 2000},
}
needs_compiler = pytest.mark.skipif(
    not installed(PACKAGES),
    reason='XLA\'s GPU compiler is not installed: pip install ".[gpu-compiler]"',
)


@pytest.fixture
def config() -> ConfigDict:
    """A small language model of one compiled layer, with cuDNN's attention."""
    config = ConfigDict(load_config(ROOT / "configs" / "fsdp_lm.py").to_dict())
    config.data.path, config.model.num_layers, config.model.scan_layers = (
        str(ROOT / "docs"),
        2,
        True,
    )
    config.model.remat = "full"
    return config


def test_plan_is_read_from_the_compiled_program(
    monkeypatch: pytest.MonkeyPatch, config: ConfigDict
) -> None:
    answer(monkeypatch, FOUND, text=TEXT)
    plan = compile_for_gpu(config.lock(), "h100:8")
    assert plan.source == "XLA's GPU compiler, jax-cuda12-pjrt 0.10.2"
    assert plan.fits
    # All temporaries have memory of their own during the complete step.
    assert plan.memory["temporaries"] == 999
    assert plan.peak_bytes == 1300 + 50 + 999
    assert plan.step_seconds is not None
    assert plan.step_seconds_by_links is None
    assert {x.network for x in plan.collectives} == {"NVLink"}
    assert {x.is_async for x in plan.collectives} == {False, True}
    assert any(
        x.startswith("A compiler without a GPU does not see: autotuning") for x in plan.assumptions
    )
    assert any("are hidden, mostly behind" in x for x in plan.notes)


def test_nodes_share_cards_and_what_is_too_large_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, config: ConfigDict
) -> None:
    memory = {"memory": MEMORY | {"temporaries": 79 * 2**30, "peak": 2000}}
    answer(monkeypatch, FOUND | memory, text=TEXT)
    plan = compile_for_gpu(config.lock(), "a100:2x4")
    assert not plan.fits
    assert plan.slow_bytes > 0
    assert {x.network for x in plan.collectives} == {"NVLink+InfiniBand"}
    assert any("XLA has no rates of the units of a100" in x for x in plan.assumptions)


@pytest.mark.parametrize("chip", GPU_TARGETS)
def test_description_agrees_with_the_chip(chip: str) -> None:
    target, found = GPU_TARGETS[chip], chip_named(chip)
    assert target.bandwidth == pytest.approx(found.hbm_bandwidth, rel=0.05)
    assert found.hbm_bytes + 2 * 2**30 == pytest.approx(target.memory, rel=0.08)
    text = describe_target(found, target)
    assert text.count("{") == text.count("}")
    assert f'name: "{found.device_kind}"\n' in text
    if target.has_costs:  # Four matrix units a core.
        peak = target.cores * 4 * target.matrix_ops * 2 * target.matrix_clock * 1e9
        assert peak == pytest.approx(found.peak("bfloat16"), rel=0.02)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["h100:8", "a100:2x4", "b200:8"])
def test_step_is_compiled_for_a_topology(config: ConfigDict, topology: str) -> None:
    step = run_compiler(GPU, config.lock(), topology)
    plan = plan_of(step)
    assert plan.fits
    assert plan.mfu is not None
    assert 0 < plan.mfu < 1
    timeline = schedule_of(step)
    assert not timeline.unestimated
    assert {kernel.name for kernel in timeline.kernels} == {
        "dot_product_attention_fwd",
        "dot_product_attention_bwd",
    }
    found = {purpose_and_module(x) for x in timeline.collectives}
    assert {purpose for purpose, _ in found} >= {"gather_params", "scatter_gradients"}


@needs_compiler
@pytest.mark.slow
def test_planned_memory_is_near_the_compiled_memory(config: ConfigDict) -> None:
    """Eight layers of width 2,048: the compiled temporaries are 1,046 MiB, the planned ones 889."""
    model = {"num_layers": 8, "hidden_size": 2048, "mlp_size": 8192}
    config.model.update(model | {"num_heads": 16, "num_kv_heads": 16})
    config.data.sequence_length, config.data.batch_size = 2048, 8
    config.parallel.gather_dtype, config.parallel.min_weight_size = "bfloat16", 2**18
    chip = chip_named("h100")
    compiled = compile_for_gpu(config.lock(), "h100:8", vocab_size=32_000)
    with tracing_for(chip.device):
        program = prepare_planned(config, devices=8, vocab_size=32_000).program
        planned = step_memory(program, platform="gpu")
    assert planned.peak == pytest.approx(compiled.peak_bytes, rel=0.1)


@needs_compiler
@pytest.mark.slow
def test_experts_without_a_capacity_send_ragged(config: ConfigDict) -> None:
    config.model.num_experts, config.model.capacity_factor = 8, 0.0
    config.parallel.mesh = {"data": 2, "expert": 4}
    step = run_compiler(GPU, config.lock(), "h100:8")
    assert "ragged-all-to-all-start" in step.text
    assert any(x.kind == "all_to_all" for x in plan_of(step).collectives)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "model": 4}], ids=str)
def test_products_and_gathers_of_layers_are_in_float8(
    config: ConfigDict, mesh: dict[str, int]
) -> None:
    """Head and embedding are exact; their gathers may be merged with those of a layer."""
    sizes = {"hidden_size": 512, "mlp_size": 2048, "num_heads": 8, "num_kv_heads": 8}
    config.model.update({**sizes, "matmul": "float8", "dtype": "bfloat16", "vocab_multiple": 4})
    config.data.sequence_length, config.data.batch_size = 512, 8
    codes = {"gather_dtype": "bfloat16", "gather_code": "float8", "min_weight_size": 2**12}
    config.parallel.update({**codes, "mesh": mesh, "sequence": "model" in mesh})
    text = run_compiler(GPU, config.lock(), "h100:8").text
    dtypes = dict(re.findall(r"%(\S+) = (\w+)\[", text))
    products = re.findall(r' dot\(%([\w.-]+), %([\w.-]+)\).*op_name="([^"]*)"', text)
    for left, right, scope in products:
        is_float8 = {dtypes[x].startswith("f8") for x in (left, right)}
        assert is_float8 == {"/layers/" in scope}, scope
    assert sum("/layers/" in scope for *_, scope in products) >= 3 * 7
    gathers = re.findall(r' = (.*) all-gather(?:-start)?\(.*op_name="([^"]*)"', text)
    of_layers = [shapes for shapes, scope in gathers if "layers/" in scope]
    sent = [x for shapes in of_layers for x in re.findall(r"\b(\w+)\[([\d,]+)\]", shapes)]
    vocabulary = {"65", "260"}
    exact = [x for x in sent if not x[0].startswith("f8") and x[0] != "f32"]
    assert all(vocabulary & {*shape.split(",")} for _, shape in exact), exact
    assert {dtype for dtype, _ in sent} >= {"f8e4m3fn", *({"f8e5m2"} if "model" in mesh else ())}
