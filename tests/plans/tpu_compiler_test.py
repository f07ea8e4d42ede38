"""Compiling for TPUs: what is said when it cannot be done, and, slowly, that it can be."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from manualpar.planner.compiled_plan import plan_of, purpose_and_module, schedule_of
from manualpar.planner.hardware import chip_named, kernel_efficiency
from manualpar.plans.compiler_process import CompilerError, run_compiler
from manualpar.plans.compiler_worker import is_out_of_hbm, text_of
from manualpar.plans.tpu_compiler import TPU, compile_for_tpu
from manualpar.training.config import load_config
from tests.paths import ROOT
from tests.plans.fake_worker import FACTS, answer

DATA = Path(__file__).parents[1] / "planner" / "tpu"
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(
    not HAS_LIBTPU,
    reason='libtpu, which has the TPU compiler, is not installed: pip install ".[tpu-compiler]"',
)
MEMORY = {"arguments": 1300, "outputs": 1250, "aliased": 1200, "temporaries": 999, "code": 5}


@pytest.fixture
def config() -> ConfigDict:
    """A small language model of one compiled layer."""
    config = ConfigDict(load_config(ROOT / "configs" / "fsdp_lm.py").to_dict())
    config.data.batch_size, config.data.sequence_length = 16, 256
    config.model.num_layers, config.model.scan_layers = 2, True
    config.model.remat = "full"
    return config.lock()


@pytest.mark.slow
@pytest.mark.skipif(HAS_LIBTPU, reason="libtpu is installed here, so nothing is missing")
def test_missing_library_is_one_sentence_with_the_command(config: ConfigDict) -> None:
    with pytest.raises(CompilerError) as caught:
        compile_for_tpu(config, "v5e:4x4")
    message = str(caught.value)
    assert message.endswith('install it with: pip install "manualpar[tpu-compiler]"')
    assert "\n" not in message


def test_plan_is_what_the_compiler_says(
    monkeypatch: pytest.MonkeyPatch, config: ConfigDict
) -> None:
    text = (DATA / "flat_v5e_4x4.txt").read_text(encoding="utf-8")
    answer(monkeypatch, FACTS | {"memory": MEMORY | {"peak": 2000}}, text=text)
    plan = compile_for_tpu(config, "v5e:4x4", options={"xla_more": "1"})
    assert any(
        "Compiled with xla_some=true, xla_more=1 (by the chip)" in x for x in plan.assumptions
    )
    assert not plan.is_model
    assert plan.source == "XLA's TPU compiler, libtpu 0.0.42"
    assert plan.fits
    # 1300 arguments of which 1230 are known, 50 new outputs, and 650 more at the peak.
    assert plan.memory == {
        "parameters": 400,
        "optimizer": 800,
        "batch": 30,
        "other arguments": 70,
        "outputs": 50,
        "temporaries": 650,
    }
    assert sum(plan.memory.values()) == plan.peak_bytes == 2000
    step = run_compiler(TPU, config, "v5e:4x4")
    cycles = schedule_of(step).compute_cycles
    assert plan.compute_seconds == pytest.approx(cycles / 1.5e9)
    assert plan.exposed_seconds is not None
    assert plan.step_seconds == pytest.approx(plan.compute_seconds + plan.exposed_seconds)
    assert plan.tokens_per_second == pytest.approx(320 / plan.step_seconds)
    assert plan.mfu == pytest.approx(32e9 / plan.step_seconds / (16 * 197e12))
    # Nothing is asynchronous: all that is sent is exposed.
    assert plan.overlapped_seconds == 0
    assert plan.exposed_seconds == pytest.approx(sum(each.seconds for each in plan.collectives))
    assert {each.is_async for each in plan.collectives} == {False}
    assert plan.step_seconds_by_links == pytest.approx(plan.step_seconds)
    assert not any(x.startswith("Kernels") for x in plan.assumptions)
    assert any("estimates no cycles for collectives" in x for x in plan.assumptions)
    json.dumps(plan.to_json())


def test_permutations_of_one_step_run_at_once_where_links_are_their_own(
    monkeypatch: pytest.MonkeyPatch, config: ConfigDict
) -> None:
    text = (DATA / "windowed_v5e_2x4.txt").read_text(encoding="utf-8")
    ring = [(0, 0, y, 0) for y in range(4)] + [(0, 1, y, 0) for y in reversed(range(4))]
    facts = FACTS | {"num_devices": 8, "mesh": {"data": 8}, "memory": MEMORY | {"peak": 2000}}
    config = ConfigDict(config.to_dict())
    config.data.batch_size = 8
    steps = []
    for places in (ring, ring[::2] + ring[1::2]):
        answer(monkeypatch, facts | {"places": places}, text=text)
        step = run_compiler(TPU, config.lock(), "v5e:2x4")
        steps.append(schedule_of(step, by_links=True).exposed_seconds)
        alone = schedule_of(step).exposed_seconds
    # In the order of a ring two directions share nothing; in another one they get in the way.
    assert steps[0] < alone
    assert steps[0] < steps[1]


def test_kernels_are_said_with_what_is_assumed(
    monkeypatch: pytest.MonkeyPatch, config: ConfigDict
) -> None:
    text = (DATA / "splash_v5e_2x2.txt").read_text(encoding="utf-8")
    mask, array = (1, 4, 4), (4, 2048, 128)
    flops = 2e-3 * 197e12 * kernel_efficiency(chip_named("v5e"))
    shapes = [mask, mask, array, array, array, (2048, 128)]
    facts = FACTS | {
        "num_devices": 4,
        "mesh": {"data": 4},
        "memory": MEMORY | {"peak": 2000},
        "kernels": [("splash_mha_fwd_residuals", shapes, 10, flops, "bfloat16")],
    }
    answer(monkeypatch, facts, text=text)
    plan = compile_for_tpu(config, "v5e:2x2")
    (said,) = (x for x in plan.assumptions if x.startswith("Kernels"))
    assert f"reach {kernel_efficiency(chip_named('v5e')):.1%} of the peak" in said
    assert said.endswith(": 1 x splash_mha_fwd_residuals 2 ms.")


def test_what_does_not_fit_says_by_how_much(
    monkeypatch: pytest.MonkeyPatch, config: ConfigDict
) -> None:
    message = (DATA / "out_of_memory.txt").read_text(encoding="utf-8")
    answer(monkeypatch, FACTS | {"out_of_memory": message})
    plan = compile_for_tpu(config, "v5e:4x4")
    assert not plan.fits
    assert plan.peak_bytes == sum(plan.memory.values()) == 15 * 2**30
    assert plan.step_seconds is None
    assert "which is 689 KiB too little" in plan.notes[0]
    assert "gamma" in plan.notes[1]


@pytest.mark.parametrize(
    ("message", "is_hbm"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total", True),
        ("RESOURCE_EXHAUSTED: E1000: Ran out of memory in memory space hbm. Used", True),
        ("RESOURCE_EXHAUSTED: E1001: Ran out of memory in memory space vmem while in hbm", False),
        ("INTERNAL: hbm", False),
    ],
)
def test_memory_that_is_lacking_is_hbm_or_another(message: str, is_hbm: bool) -> None:
    assert is_out_of_hbm(message) == is_hbm


class _Unread:
    """A compiled program that jaxlib cannot read."""

    def as_text(self) -> str:
        raise jax.errors.JaxRuntimeError("RET_CHECK failure: async-update instruction")


def test_a_program_that_jaxlib_cannot_read_is_read_from_the_compilers_files(
    tmp_path: Path,
) -> None:
    unread: Any = _Unread()
    with pytest.raises(jax.errors.JaxRuntimeError, match="async-update"):
        text_of(unread, tmp_path)
    for name, text in (("1.after_codegen", "the step"), ("2.after_codegen", "aux"), ("1.x", "y")):
        (tmp_path / f"module_000{name}.txt").write_text(text, encoding="utf-8")
    assert text_of(unread, tmp_path) == "the step"


@needs_libtpu
@pytest.mark.slow
def test_a_step_of_sparse_cores_is_read(config: ConfigDict) -> None:
    plan = compile_for_tpu(config, "v6e:2x4", vocab_size=512)
    assert plan.fits
    assert {"all_gather", "reduce_scatter"} <= {x.kind for x in plan.collectives if x.is_async}


@needs_libtpu
@pytest.mark.slow
def test_step_is_compiled_for_a_topology(config: ConfigDict) -> None:
    config = ConfigDict(config.to_dict())
    config.parallel.overlap = "none"  # Window loops of a gradient do not say that they scatter.
    step = run_compiler(TPU, config.lock(), "v5e:2x2", vocab_size=512)
    plan = plan_of(step)
    assert plan.fits
    assert plan.num_devices == 4
    assert plan.memory["parameters"] > 0
    assert 0 <= plan.memory["other arguments"] < plan.peak_bytes
    schedule = schedule_of(step)
    assert not schedule.num_carried
    found = {purpose_and_module(each) for each in schedule.collectives}
    assert ("gather_params", "layers/mlp/gate") in found
    assert ("scatter_gradients", "layers/mlp/gate") in found
    assert plan.compute_seconds is not None
    assert plan.compute_seconds > 0
    assert plan.mfu is not None
    assert 0 < plan.mfu < 1


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "options", "sentence"),
    [
        ("v5e:3x5", {}, "does not know the topology 'v5e:3x5'"),
        ("v5e:2x2", {"xla_nobody_knows": "true"}, "does not know the option 'xla_nobody_knows'"),
    ],
)
def test_library_refuses_in_the_words_that_are_looked_for(
    config: ConfigDict, topology: str, options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(CompilerError, match=sentence):
        compile_for_tpu(config, topology, options=options)


@needs_libtpu
@pytest.mark.slow
def test_too_large_a_model_does_not_fit_and_says_so(config: ConfigDict) -> None:
    config = ConfigDict(config.to_dict())
    config.model.hidden_size, config.model.mlp_size, config.model.num_layers = 5120, 2**16, 16
    config.model.num_heads = config.model.num_kv_heads = 40
    plan = compile_for_tpu(config.lock(), "v5e:2x2")
    assert not plan.fits
    assert plan.spare_bytes < 0
    assert "too little" in plan.notes[0]
