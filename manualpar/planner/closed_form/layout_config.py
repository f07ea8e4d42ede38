"""Turns a layout into a config, and estimates the program of that config."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_collections

from manualpar.planner.closed_form.layout import Layout
from manualpar.planner.closed_form.layout_parameters import STRATEGIES
from manualpar.planner.plan import StepEstimate
from manualpar.planner.roofline import estimate
from manualpar.planner.step_work import read_work, with_repeats
from manualpar.planner.sweep import throughput_of
from manualpar.planner.topology import Topology
from manualpar.planner.vocabulary import prepare_planned
from manualpar.training.config import flatten_config


def layout_fields(layout: Layout) -> Mapping[str, Any]:
    """Returns the config fields that make a transformer run on a layout, with their values."""
    return {
        "parallel.mesh": layout.mesh,
        "parallel.strategy": STRATEGIES[layout.replica > 1],
        "parallel.sequence": layout.model > 1,
        "parallel.communicate_every": layout.communicate,
        "parallel.replica_mean": layout.replica_mean,
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
    """Copies a transformer's config and sets the fields of a layout."""
    copy = ml_collections.ConfigDict(config.to_dict())
    for name, value in layout_fields(layout).items():
        group, field = name.split(".")
        is_mesh = isinstance(value, Mapping)
        copy[group][field] = ml_collections.ConfigDict(value) if is_mesh else value
    return copy


def layout_flags(config: ml_collections.ConfigDict, layout: Layout) -> list[str]:
    """Returns the command-line flags that make a config run on a layout."""
    values = flatten_config(config)
    flags = []
    for name, value in layout_fields(layout).items():
        if values[name] != value:
            flags.append(f"--config.{name}={value}")
    return flags


def trace_layout(
    config: ml_collections.ConfigDict, layout: Layout, topology: Topology, *, vocab_size: int = 0
) -> StepEstimate:
    """Traces the program of a layout, and estimates it by the roofline.

    Attention is timed as one fused kernel. Without stages only one minibatch is traced, because the
    minibatches of a step are alike; the estimated memory is then for a step of one minibatch.

    Raises:
      ValueError: The program cannot be built, or the mesh does not fit into the topology.
    """
    config, repeats = config_of_layout(config, layout), 1
    if layout.stage == 1:
        repeats, config.optimizer.num_minibatches = layout.num_minibatches, 1
        config.data.batch_size //= repeats
    experiment = prepare_planned(config, devices=topology.abstract_devices, vocab_size=vocab_size)
    throughput = throughput_of(config, experiment.task)
    work = read_work(
        experiment.program,
        throughput,
        fused_attention=True,
        overlap=config.parallel.overlap,
    )
    if repeats > 1:
        examples = repeats * throughput.examples_per_step
        throughput = dataclasses.replace(throughput, examples_per_step=examples)
        work = dataclasses.replace(with_repeats(work, repeats), throughput=throughput)
    return estimate(work, topology)
