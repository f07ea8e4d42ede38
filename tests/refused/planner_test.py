"""Mistakes in the planner's inputs, and unexpected results of the compilers."""

import functools
import signal
import types

import pytest
from ml_collections import ConfigDict

from manualpar.inspect.throughput import Throughput
from manualpar.planner.compiled_timeline import on_all_links, read_timeline
from manualpar.planner.hardware import CHIPS, chip_named
from manualpar.planner.step_work import read_work
from manualpar.planner.topology import parse_topology, place_axes
from manualpar.plans.compiler_process import CompilerError
from manualpar.plans.gpu_compiler import compile_for_gpu
from manualpar.plans.layouts.layout import Layout
from manualpar.plans.layouts.layout_estimate import estimate_layout
from manualpar.plans.planned_experiment import prepare_planned
from manualpar.plans.sweep import Builder, sweep
from manualpar.plans.tpu_compiler import compile_for_tpu
from manualpar.training.config import load_config
from manualpar.training.task import make_task
from tests.paths import ROOT
from tests.plans.fake_worker import FACTS, answer
from tests.refused.sentences import cases, literally
from tests.refused.table import check_refused, rows

CONFIGS = ROOT / "configs"


def small_config(name):
    config = ConfigDict(load_config(CONFIGS / name).to_dict())
    config.model.num_layers = 1
    return config


def plan_vocabulary(arguments):
    name, vocab_size = arguments
    prepare_planned(small_config(name).lock(), devices=8, vocab_size=vocab_size)


def sweep_order(order):
    config = small_config("fsdp.py")
    config.parallel.mesh_order = order
    sweep(Builder(config, make_task(config)), parse_topology("h100:8"))


def split_examples(layout):
    model, topology = make_task(load_config(CONFIGS / "plan" / "llama3_8b.py")).model, "h100:128"
    estimate_layout(model, layout, parse_topology(topology), examples=16, positions=131_072)


def compile_with(arguments):
    """Calls `compile_for_tpu` with a fake compiler that returns the result of a row."""
    result, more = arguments
    with pytest.MonkeyPatch.context() as patch:
        answer(patch, result, **more)
        compile_for_tpu(small_config("fsdp_lm.py").lock(), "v5e:4x4")


def compile_for_h100(arguments):
    """Calls `compile_for_gpu` with a fake compiler that returns the result of a row."""
    result, more = arguments
    with pytest.MonkeyPatch.context() as patch:
        answer(patch, result, **more)
        compile_for_gpu(small_config("fsdp_lm.py").lock(), "h100:2x8")


def failed(error, *, kind="JaxRuntimeError", stage="compile", **more):
    return {"stage": stage, "type": kind, "error": error}, more


def read_text(text):
    read_timeline(text, {"data": 8}, clock=1.0, wire=on_all_links(lambda collective: 0.0))


REFUSED = [
    *rows(
        "topology",
        parse_topology,
        *literally(
            ("v5p", "topology 'v5p' is not understood, expected a chip and a shape such as"),
            ("v5e-8", "is not understood"),
            ("v5litepod:8x8", "chip 'v5litepod' is not known"),
            ("v5p:8x8", "has 2 dimensions, expected 3 for v5p, such as v5p:4x4x4"),
            ("v5e:8", "has 1 dimensions, expected 2"),
            ("v5e:0x8", "has a size of 0"),
            ("0xv5e:8x8", "has a size of 0"),
            ("v5e:32x32", "has 1024 devices in a slice, expected at most 256"),
            ("h100:2x2x8", "expected a number of devices for h100, such as h100:32, or nodes"),
            ("2xh100:8", "expected a number of devices for h100"),
            ("h100:8x16", "has 16 devices in a node, expected at most 8 of h100"),
            ("h100:12", "expected a multiple of 8 (full nodes), or fewer devices than one node"),
        ),
    ),
    *rows(
        "a mesh on a topology",
        lambda axes: place_axes(parse_topology("v5e:4x8"), axes),
        ({"data": 8}, "has 8 devices, expected the 32 of v5e:4x8"),
    ),
    *rows(
        "chip",
        chip_named,
        ("v5pp", "chip 'v5pp' is not known.*nearest one is 'v5p'"),
        ("abacus", "expected one of v4, v5e, v5p"),
    ),
    *rows(
        "a chip's peak",
        lambda chip: chip.peak("int4"),
        *((chip, f"chip {chip.name}: no peak is known for dtype 'int4'") for chip in CHIPS),
    ),
    *rows(
        "another mode",
        lambda mode: read_work(types.SimpleNamespace(mode=mode), Throughput(1)),
        ("auto", "mode='auto', expected 'manual'.*--compiler=tpu"),
    ),
    *rows(
        "sweep", sweep_order, (("data",), r"mesh_order is \('data',\), expected \(\) in a sweep")
    ),
    *rows(
        "a layout's examples",
        split_examples,
        (Layout(data=128), "examples do not divide by replica x data"),
    ),
    *rows(
        "vocabulary",
        plan_vocabulary,
        (("fsdp.py", 100), "vocab_size is 100 and config.model.name"),
        (("fsdp_lm.py", -1), "vocab_size is -1 and config.model.name"),
    ),
    *rows(
        "a program's text",
        read_text,
        *(
            (text, "expected a scheduled HloModule")
            for text in ("", "module @jit_f {}", "HloModule jit_f, num_partitions=8")
        ),
    ),
    *rows(
        "GPUs",
        functools.partial(compile_for_tpu, small_config("fsdp_lm.py").lock()),
        ("h100:8", CompilerError, "expected TPUs"),
    ),
    *rows(
        "TPUs",
        functools.partial(compile_for_gpu, small_config("fsdp_lm.py").lock()),
        ("v5e:2x2", CompilerError, "is of v5e, expected one of a100, h100, h200, b200"),
    ),
    *rows(
        "compiler",
        compile_with,
        (
            failed("config.data.batch_size is 7, expected", kind="ValueError", stage="prepare"),
            r"^config\.data\.batch_size is 7, expected$",
        ),
        *cases(
            (
                failed('layout "v5e:3x5" is not divisible', stage="topology"),
                "libtpu does not know the topology 'v5e:4x4' .*3x5.* such as v5e:2x2",
            ),
            (
                failed("INVALID_ARGUMENT: No such compile option: 'xla_a'"),
                "does not know the option 'xla_a'",
            ),
            (
                failed("RESOURCE_EXHAUSTED: Ran out of memory in vmem"),
                "needs more of the chip's own memory",
            ),
            (failed("INTERNAL: a\nb"), "failed for v5e:4x4: INTERNAL: a b"),
            (
                (None, {"returncode": -signal.SIGABRT, "stderr": "chat\nF0000 check failed\n"}),
                "ended with signal SIGABRT for v5e:4x4; its last line: F0000 check failed",
            ),
            ((None, {"returncode": 3}), "ended with exit code 3 .* no output"),
            ((FACTS, {"returncode": -signal.SIGKILL}), "ended with signal SIGKILL"),
            ((None, {"is_slow": True}), "has not finished after 1,800 seconds for v5e:4x4"),
            ((FACTS | {"num_devices": 8, "memory": {}}, {}), "for 8 devices, expected 16"),
            error=CompilerError,
        ),
    ),
    *rows(
        "GPU compiler",
        compile_for_h100,
        *cases(
            (
                failed("no package", kind="ModuleNotFoundError", stage="library"),
                r"^jax-cuda12-pjrt, .* install it with: pip install \"manualpar\[gpu-compiler\]\"$",
            ),
            (failed("parse\nerror", stage="topology"), "description of h100:2x8 .parse error"),
            (
                failed("INVALID_ARGUMENT: No such compile option: 'xla_a'"),
                "the GPU compiler does not know the option 'xla_a'; .* as `jax-cuda12-pjrt` spells",
            ),
            (
                failed("While setting option xla_b, 'true' is not a valid bool value."),
                "refuses an option .*; write True or False",
            ),
            (failed("INTERNAL: a\nb"), "the GPU compiler failed for h100:2x8: INTERNAL: a b"),
            error=CompilerError,
        ),
    ),
]


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words):
    check_refused(call, error, words)
