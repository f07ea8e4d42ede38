import json
import os
import re
import subprocess
import sys

import pytest

from manualpar.core.mesh.compiler_options import (
    CHOICES,
    RENAMED,
    ChosenOptions,
    choose_options,
    keep_if_known,
)
from manualpar.core.mesh.mesh import count_hosts, make_mesh
from manualpar.planner.hardware import CHIPS
from manualpar.planner.topology import parse_topology
from manualpar.plans import gpu_compiler, tpu_compiler
from manualpar.plans.compiler_worker import installed
from manualpar.plans.gpu_compiler import GPU
from manualpar.plans.tpu_compiler import TPU
from tests.paths import ROOT

V5E, V5P, V6E = "TPU v5 lite", "TPU v5", "TPU v6 lite"  # As jax names them.
WINDOWS = "xla_tpu_decompose_einsum_reduce_scatter"
GATHER = "xla_tpu_prefer_async_allgather_to_allreduce"
FUSION = "xla_tpu_enable_async_collective_fusion"
OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload"
H100 = "NVIDIA H100 80GB HBM3"
SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
PIPELINED, COMBINED = "xla_gpu_enable_pipelined_all_gather", "_combine_threshold_bytes"


@pytest.mark.parametrize(
    ("device_kind", "rings", "name"),
    [
        (V5E, [2], WINDOWS),
        (V5E, [1], ""),  # One device sends nothing.
        (H100, [1], ""),
        (V5E, [16], WINDOWS),
        (V5E, [8], "xla_tpu_rwb_fusion"),
        (V5E, [8, 2], ""),
        (V5E, [17], GATHER),
        (V5E, [256], GATHER),
        (V5E, [257], ""),
        (V5E, [4, 64], ""),
        (V5P, [128], f"{OFFLOAD}_all_gather"),
        (V5P, [16], f"{OFFLOAD}_nd_reduce_scatter"),
        (V5P, [129], ""),
        (V6E, [8], f"{OFFLOAD}_all_reduce"),
        (V6E, [16], f"{OFFLOAD}_all_gather"),
        (V6E, [256], f"{OFFLOAD}_nd_reduce_scatter"),
        (V6E, [257], ""),
        ("TPU v4", [8], ""),
        ("cpu", [8], ""),
        ("NVIDIA L40S", [8], ""),
        ("NVIDIA H100 PCIe", [8], ""),
    ],
)
def test_options_follow_from_the_chip_and_the_rings(device_kind, rings, name):
    chosen = choose_options(device_kind, rings)
    assert bool(chosen.options) == bool(name)
    assert not name or name in chosen.options
    assert not choose_options(device_kind, rings, ["replica"]).options or rings == [1]
    none = choose_options(device_kind, rings, overlap="none")
    assert not none.options
    # Where there is nothing to choose nothing is said.
    is_known = any(kind in device_kind for kind in ("v5", "v6", "HBM3"))
    assert bool(none.why) == bool(chosen.why) == is_known


def test_split_layers_take_the_options_where_they_pay():
    for kind in (V5P, V6E):
        chosen = choose_options(kind, [4], ["model"])
        assert chosen.options == choose_options(kind, [4]).options
        assert chosen.why == f"{kind}, gradients over 4 devices and also model"
        assert chosen.options == choose_options(kind, [4], ["model", "sequence"]).options
        assert not choose_options(kind, [4], ["replica", "model"]).options
        assert not choose_options(kind, [4, 4], ["model"]).options
    assert not choose_options(V5E, [4], ["model"]).options


@pytest.mark.parametrize(
    "device_kind",
    [
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100-SXM4-80GB",
        H100,
        "NVIDIA H100 96GB HBM2e",
        "NVIDIA GH200 480GB",
        "NVIDIA H200",
        "NVIDIA B200",
        "NVIDIA GB200",
    ],
)
@pytest.mark.parametrize(
    ("rings", "others", "is_pipelined"),
    [
        ([8], [], True),
        ([128], [], True),
        ([8], ["replica"], True),
        ([129], [], False),
        ([2], ["model"], True),
        ([2], ["model", "sequence"], False),
        ([2], ["context"], True),
        ([2], ["stage"], True),
        ([4, 2], [], False),
        ([2], ["replica", "model"], False),
    ],
)
def test_gpus_get_the_scheduler_and_over_one_axis_also_pipelined_gathers(
    device_kind, rings, others, is_pipelined
):
    chosen = choose_options(device_kind, rings, others)
    assert chosen.options[SCHEDULER] is True
    assert (PIPELINED in chosen.options) == is_pipelined
    # Thresholds alone make a step slower than no options, and those of split layers too.
    is_combined = any(name.endswith(COMBINED) for name in chosen.options)
    assert is_combined == (is_pipelined and "model" not in others)
    assert device_kind in chosen.why
    none = choose_options(device_kind, rings, others, overlap="none")
    assert none == ChosenOptions(why="overlap is 'none'")


def test_means_over_several_hosts_are_not_delayed(devices8):
    several = choose_options(H100, [32], averages=True)
    assert several.options == {SCHEDULER: True}
    assert PIPELINED in choose_options(H100, [8]).options
    assert choose_options(V5E, [8], averages=True) == choose_options(V5E, [8])
    assert count_hosts(make_mesh({"data": -1}, devices8)) == 1


def test_every_choice_is_of_chips_that_plans_know():
    for choice in CHOICES:
        chips = [chip for chip in CHIPS if re.fullmatch(choice.device_kind, chip.device_kind)]
        assert {chip.is_tpu for chip in chips} == {"TPU" in choice.device_kind}
        assert len(chips) == 1 or not chips[0].is_tpu
        assert choice.measured


def test_what_is_chosen_is_said():
    said = str(choose_options(V5E, [8]))
    assert said == (
        f"{WINDOWS}=true, xla_tpu_rwb_fusion=false (TPU v5 lite, gradients over 8 devices)"
    )
    only = "the other options were measured only for one axis"
    assert str(choose_options(V5E, [8, 2])) == (
        f"the compiler's defaults (TPU v5 lite, gradients over 8 and 2 devices; {only})"
    )
    assert str(choose_options(V5E, [8], ["replica", "model"])) == (
        "the compiler's defaults (TPU v5 lite, gradients over 8 devices and also replica, model; "
        f"{only})"
    )
    assert str(choose_options(V5E, [512])) == (
        "the compiler's defaults (TPU v5 lite, gradients over 512 devices; the other options are "
        "faster for at most 256 devices)"
    )
    assert (
        str(choose_options(V5E, [8], overlap="none"))
        == "the compiler's defaults (overlap is 'none')"
    )
    assert str(choose_options("cpu", [8])) == ""


def test_options_that_the_compiler_refuses_are_left_out_and_it_is_said(devices8):
    chosen = choose_options(V5E, [8])
    kept = keep_if_known(chosen, devices8[0])
    assert kept.options == {}
    assert str(kept).startswith(
        "the compiler's defaults (TPU v5 lite, gradients over 8 devices; refused: "
    )
    assert str(kept).count(f"No such compile option: '{WINDOWS}'") == 1
    assert str(kept).count("No such compile option: 'xla_tpu_rwb_fusion'") == 1
    known = ChosenOptions({"xla_cpu_enable_fast_math": False}, "why")
    assert keep_if_known(known, devices8[0]) == known
    assert keep_if_known(ChosenOptions(), devices8[0]) == ChosenOptions()


@pytest.mark.parametrize("also", [(), ("xla_gpu_all_gather_combine_threshold_bytes",)])
def test_later_compilers_get_the_later_names(devices8, monkeypatch, also):
    """As jax 0.11 renamed options; with others that the compiler refuses, and without."""

    def refuse(options, device):
        unknown = sorted(options.keys() & {*RENAMED, *also})
        return f"no {unknown[0]}" if unknown else ""

    monkeypatch.setattr("manualpar.core.mesh.compiler_options._refusal", refuse)
    chosen = choose_options(H100, [8])
    kept = keep_if_known(chosen, devices8[0])
    assert kept.options.keys() == (
        chosen.options.keys() - {*RENAMED, *also} | {name for name, _ in RENAMED.values()}
    )
    assert kept.options["xla_gpu_pipeline_all_gather"] == "COLLECTIVE_PIPELINING_MODE_ON"
    assert ("refused" in kept.why) == bool(also)


def test_an_option_that_is_refused_takes_no_other_with_it(devices8):
    fast, width = {"xla_cpu_enable_fast_math": False}, {"xla_cpu_prefer_vector_width": "256"}
    kept = keep_if_known(ChosenOptions(fast | {WINDOWS: "true"} | width, "why"), devices8[0])
    assert kept.options == fast | width
    assert kept.why.startswith(f"why; refused: {WINDOWS} (")


def test_of_two_that_are_refused_together_the_first_stays(devices8, monkeypatch):
    """As newer compilers for v5p refuse two options, of which they take each alone."""

    def refuse(options, device):
        return "unsafe together" if {"a", "b"} <= options.keys() else ""

    monkeypatch.setattr("manualpar.core.mesh.compiler_options._refusal", refuse)
    kept = keep_if_known(ChosenOptions({"a": "1", "b": "1", "c": "1"}, "why"), devices8[0])
    assert kept == ChosenOptions({"a": "1", "c": "1"}, "why; refused: b (unsafe together)")


def test_no_choice_has_what_a_compiler_calls_unsafe():
    """libtpu 0.0.52 says of both on v5p: might lead to incorrect results, hang."""
    pair = {"xla_enable_async_all_gather", f"{FUSION}_fuse_all_gather"}
    assert not any(pair <= choice.options.keys() for choice in CHOICES)


def compile_with(compiler, topology, options):
    """Compiles in another process; returns the options that are kept, or the end of the error."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.mesh.compile_with_options", topology, options],
        env={**os.environ, **compiler.environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.stderr[-2000:] if done.returncode else json.loads(done.stdout)


def needs(compiler, install):
    return pytest.mark.skipif(
        not installed(compiler.packages),
        reason=f"XLA's compiler for {compiler.name}s is not installed: {install}",
    )


needs_tpu_compiler = needs(TPU, tpu_compiler.INSTALL)
needs_gpu_compiler = needs(GPU, gpu_compiler.INSTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "topology", "choice"),
    [
        pytest.param(compiler, name, choice, id=f"{name}-{choice.most}", marks=mark)
        for compiler, mark in ((TPU, needs_tpu_compiler), (GPU, needs_gpu_compiler))
        for choice in CHOICES
        for chip in CHIPS
        for name in [f"{chip.name}:{'x'.join('2' * chip.network.dims) if chip.is_tpu else 8}"]
        if re.fullmatch(choice.device_kind, chip.device_kind)
        and not compiler.refuse(parse_topology(name))
    ],
)
def test_the_compiler_takes_the_options_of_a_choice_together(compiler, topology, choice):
    kept = compile_with(compiler, topology, json.dumps(dict(choice.options)))
    later = dict(RENAMED.get(name, (name, value)) for name, value in choice.options.items())
    assert kept in (choice.options, later)


@needs_tpu_compiler
@pytest.mark.slow
def test_a_pair_that_is_unsafe_on_a_chip_shows():
    pair = "xla_enable_async_all_gather", f"{FUSION}_fuse_all_gather"
    for option in pair:
        assert compile_with(TPU, "v5p:2x2x2", json.dumps({option: "true"})) == {option: "true"}
    refusal = compile_with(TPU, "v5p:2x2x2", json.dumps(dict.fromkeys(pair, "true")))
    assert "not supported/recommended on platforms other than TPU v5e" in refusal


@needs_gpu_compiler
@pytest.mark.slow
def test_a_value_that_the_gpu_compiler_refuses_shows():
    refusal = compile_with(GPU, "h100:8", json.dumps({SCHEDULER: "true"}))
    assert f"While setting option {SCHEDULER}, 'true' is not a valid bool value" in refusal
