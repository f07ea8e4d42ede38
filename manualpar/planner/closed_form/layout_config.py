"""A layout as a config, and the estimate of the program that the config describes."""

from collections.abc import Mapping
from typing import Any

import ml_collections

from manualpar.planner.closed_form.layout import Layout
from manualpar.planner.plan import StepEstimate
from manualpar.planner.roofline import estimate
from manualpar.planner.step_work import read_work
from manualpar.planner.sweep import throughput_of
from manualpar.planner.topology import Topology
from manualpar.planner.vocabulary import prepare_planned
from manualpar.strategies import BUILT_IN
from manualpar.training.config import flatten_config


def layout_fields(layout: Layout) -> Mapping[str, Any]:
    """The fields of a transformer's config that make it run as a layout says, with their values."""
    # Those that shard parameters, by whether they replicate them over an axis.
    sharded = {
        kind.replicates: kind.name
        for kind in BUILT_IN
        if kind.is_exact and "communicate_every" in kind.fields
    }
    return {
        "parallel.mesh": layout.mesh,
        "parallel.strategy": sharded[layout.replica > 1],
        "parallel.sequence": layout.model > 1,
        "parallel.communicate_every": layout.communicate,
        "parallel.pipeline_chunks": layout.chunks,
        "parallel.pipeline_keep": layout.keep,
        "optimizer.num_minibatches": layout.num_minibatches,
        "model.remat": layout.remat,
        "model.scan_layers": True,
        "parallel.gather_dtype": "bfloat16",
        "parallel.reduce_dtype": "float32",
        "parallel.gather_code": layout.gather_code,
        "parallel.reduce_code": layout.reduce_code,
    }


def config_of_layout(
    config: ml_collections.ConfigDict, layout: Layout
) -> ml_collections.ConfigDict:
    """A copy of a transformer's config that runs as a layout says."""
    copy = ml_collections.ConfigDict(config.to_dict())
    for name, value in layout_fields(layout).items():
        group, field = name.split(".")
        is_mesh = isinstance(value, Mapping)
        copy[group][field] = ml_collections.ConfigDict(value) if is_mesh else value
    return copy


def layout_flags(config: ml_collections.ConfigDict, layout: Layout) -> list[str]:
    """The flags that make a config run as a layout says, as a command takes them."""
    values = flatten_config(config)
    flags = []
    for name, value in layout_fields(layout).items():
        is_mesh = isinstance(value, Mapping)
        if (values[name].to_dict() if is_mesh else values[name]) != value:
            flags.append(f"--config.{name}={value}")
    return flags


def trace_layout(
    config: ml_collections.ConfigDict, layout: Layout, topology: Topology, *, vocab_size: int = 0
) -> StepEstimate:
    """The roofline's plan of the traced program; a `ValueError` of the builder may refuse it.

    In time attention is one fused kernel. In memory it is that of the program.
    """
    config = config_of_layout(config, layout)
    experiment = prepare_planned(config, devices=layout.num_devices, vocab_size=vocab_size)
    throughput = throughput_of(config, experiment.task)
    overlap = config.parallel.overlap
    work = read_work(experiment.program, throughput, fused_attention=True, overlap=overlap)
    return estimate(work, topology)
