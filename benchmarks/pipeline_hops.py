"""What the TPU compiler lets a chip do while a pipeline's activations and gradients travel.

A tick is the F of a microbatch, then the B of another, then a hop each way. The permute of a hop is
asynchronous where instructions stand between its start and its end in the compiled schedule. What
these take is the compiler's estimate. Some of them are branches of a condition on the stage. Which
stages take a branch is known from its named scope, so they are counted apart: a permute is hidden
on a stage only by what that stage runs.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_collections

from benchmarks.turns import table
from manualpar.core.tracing.scopes import PIPELINE_SCOPE
from manualpar.inspect.compiled import ticks_of
from manualpar.inspect.hlo import HloModule, Instruction, parse_module, trip_count
from manualpar.planner.compiled_plan import schedule_of
from manualpar.planner.topology import parse_topology
from manualpar.planner.tpu_compiler import compile_step
from manualpar.training.config import load_config

CONFIG = Path(__file__).parents[1] / "configs" / "pp_lm.py"
STAGES, TPU_VOCAB_SIZE = 4, 32_000


class Hop(NamedTuple):
    """What a chip computes between the start and the end of a permute over stages, in cycles.

    Attributes:
      name: Of the permute.
      is_on: Whether activations go on, and not gradients back.
      always: Outside of branches, in every tick.
      chunks: In branches that every stage takes, in those ticks in which it has a microbatch.
      others: In branches of the first or the last stage alone.
    """

    name: str
    is_on: bool
    always: int
    chunks: int
    others: int


def find_hops(text: str) -> list[Hop]:
    """The permutes over stages of a program that was compiled for a TPU."""
    module = parse_module(text)
    hops = []
    for computation in module.computations.values():
        listed = list(computation.values())
        for i, start in enumerate(listed):
            is_hop = start.opcode == "collective-permute-start"
            if not is_hop or f"/{PIPELINE_SCOPE}/" not in start.op_name:
                continue
            ends = (j for j, one in enumerate(listed) if start.name in one.operands and j > i)
            between = listed[i + 1 : next(ends)]
            cycles = {"always": 0, "chunks": 0, "others": 0}
            for one in between:
                ticks = ticks_of(one)
                kind = "always" if not ticks else "chunks" if all(ticks.runs) else "others"
                cycles[kind] += _cycles(module, computation, one)
            source, target = re.findall(r"source_target_pairs=\{\{(\d+),(\d+)", start.attributes)[0]
            hops.append(Hop(start.name, int(target) > int(source), **cycles))
    return hops


def _cycles(module: HloModule, around: Mapping[str, Instruction], one: Instruction) -> int:
    """What the compiler estimates for an instruction, with all that it runs."""

    def whole(name: str) -> int:
        inner = module.computations[name]
        return sum(_cycles(module, inner, each) for each in inner.values())

    if one.opcode == "while":
        return (trip_count(module, around, one) or 0) * whole(one.loop[1])
    if one.opcode == "conditional":
        return max(map(whole, one.called))
    return one.cycles or 0


def tpu_config(args: argparse.Namespace, keep: str, chips: int) -> ml_collections.ConfigDict:
    """One sequence in a microbatch, four stages."""
    config = ml_collections.ConfigDict(load_config(CONFIG).to_dict())
    number, data = args.microbatches[0], chips // STAGES
    config.data.sequence_length, config.data.batch_size = 1024, data * number
    config.model.num_layers, config.model.hidden_size, config.model.mlp_size = 8, 1024, 4096
    config.model.num_heads = config.model.num_kv_heads = 8
    config.optimizer.num_minibatches = number
    config.parallel.mesh = ml_collections.ConfigDict({"data": data, "stage": STAGES})
    config.parallel.gather_dtype, config.parallel.min_weight_size = "bfloat16", 2**14
    config.parallel.pipeline_keep = keep
    return config.lock()


def measure_hops(args: argparse.Namespace) -> tuple[list[str], Any]:
    """What the TPU compiler lets a chip do while activations and gradients travel."""
    topology = parse_topology(args.topology)
    lines, sentences, data = [], [], []
    for keep in ("inputs", "residuals"):
        config = tpu_config(args, keep, topology.num_devices)
        step = compile_step(config, topology, vocab_size=TPU_VOCAB_SIZE)
        schedule = schedule_of(step)
        permutes = {one.name: one for one in schedule.collectives}
        ticks = 0.0
        for hop in find_hops(step.text):
            permute, way = permutes[hop.name], "on" if hop.is_on else "back"
            ticks = float(permute.times)
            wire = permute.wire_seconds / ticks
            spans = [x / topology.chip.clock for x in (hop.always, hop.chunks, hop.others)]
            lines.append([f"{keep}, {way}", *(f"{1e6 * span:,.1f}" for span in (wire, *spans))])
            data.append({"keep": keep, "wire_seconds": wire, **hop._asdict()})
        sentences.append(
            f"`{keep}`: the step has {ticks:.0f} ticks, and a chip in all of them together, with "
            f"prefix and suffix, {1e3 * schedule.compute_seconds:,.1f} ms of computing; it holds "
            f"{step.facts['memory']['peak'] / 2**20:,.0f} MiB."
        )
        data.append({"keep": keep, "seconds": schedule.step_seconds, "facts": step.facts})
        print(f"  {sentences[-1]}", flush=True)
    header = ("µs", "on the wire", "always", "in chunks", "in prefix or suffix")
    return [*table(header, lines), "", *sentences], data
