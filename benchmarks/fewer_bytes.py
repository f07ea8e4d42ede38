"""What training loses when its steps send fewer bytes: held-out losses at equal steps, beside bytes.

python -m benchmarks.fewer_bytes [--tasks digits lm] [--variants exact ...] [--seeds 3] [--steps N]
                                 [--results benchmarks/fewer_bytes.jsonl]

Each of `VARIANTS` trains the model of a config with its data and its optimizer, on eight simulated
devices: four groups of two, between which links are taken to be slow. A seed decides the initial
parameters and the order of the examples, the same for all variants. The loss is that of all test
examples after the last step. Bytes are those that a device sends in a step as it is traced, the
metrics' included, and of replicas that train alone a share of their outer step.

A line of JSON is written for each run. A run that has its line is not repeated, so the command goes
on where it was interrupted. All variants of a seed run before the next seed, the most telling ones
first. A run of the language model takes two minutes and a half on two cores, one of the digits half
a minute.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections
import optax

from configs import fsdp, fsdp_lm
from manualpar import diloco
from manualpar.core.program import Program
from manualpar.data import abstract_batch, evaluation_batches, train_batches
from manualpar.inspect import bytes_by_axes, trace_collectives
from manualpar.sharding.mesh import make_mesh
from manualpar.strategies.local_steps import LocalSteps
from manualpar.training.config import complete_config
from manualpar.training.devices import simulate_devices
from manualpar.training.experiment import prepare
from manualpar.training.optimizer import adamw, warmup_cosine_schedule
from manualpar.training.task import Task, make_task

RESULTS = Path(__file__).with_suffix(".jsonl")
CONFIGS = {"digits": fsdp, "lm": fsdp_lm}
DEVICES = 8
SLOW_AXES = frozenset({"data_minor", "replica"})
Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to send less.

    Attributes:
      parallel: What differs in `config.parallel`.
      every: How many steps replicas take alone; 0: none do.
      outer: The learning rate and the Nesterov momentum of `optax.sgd`, which takes outer steps.
      outer_code: The code of what replicas send each other.
    """

    parallel: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    every: int = 0
    outer: tuple[float, float] = (1.0, 0.0)
    outer_code: str | None = None


def _sharded(**changes: Any) -> Variant:
    """FSDP over all devices, axis by axis, the slow one first."""
    mesh = {"data": 2, "data_minor": 4}
    return Variant({"strategy": "fsdp", "mesh": mesh, "axis_by_axis": True, **changes})


def _replicated(**changes: Any) -> Variant:
    """FSDP inside a group, whose gradients cross the slow links once a step."""
    return Variant({"strategy": "hsdp", "mesh": {"replica": 4, "data": 2}, **changes})


def _alone(every: int, rate: float, momentum: float, code: str | None = None) -> Variant:
    """Groups that train alone, each under FSDP."""
    mesh = {"mesh": {"replica": 4, "data": 2}}
    return Variant(mesh, every=every, outer=(rate, momentum), outer_code=code)


# By the name of the row, the most telling ones first.
VARIANTS: Mapping[str, Variant] = {
    "exact": _sharded(),
    "int8 weights and gradients": _sharded(gather_code="int8", reduce_code="int8"),
    "int4 gradients": _sharded(reduce_code="int4"),
    "groups, int4 between them": _replicated(reduce_code="int4"),
    "DiLoCo every 10, average": _alone(10, 1.0, 0.0),
    "DiLoCo every 50, average": _alone(50, 1.0, 0.0),
    "DiLoCo every 50, 0.7 and 0.9": _alone(50, 0.7, 0.9),
    "DiLoCo every 10, 0.7 and 0.9": _alone(10, 0.7, 0.9),
    "int8 weights": _sharded(gather_code="int8"),
    "int8 gradients": _sharded(reduce_code="int8"),
    "secondary shards": _sharded(regather_axes=("data",)),
    "secondary shards, int8 weights and gradients": _sharded(
        regather_axes=("data",), gather_code="int8", reduce_code="int8"
    ),
    "groups": _replicated(),
    "groups, int8 between them": _replicated(reduce_code="int8"),
    "DiLoCo every 50, 0.7 and 0.5": _alone(50, 0.7, 0.5),
    "DiLoCo every 10, 0.7 and 0.5": _alone(10, 0.7, 0.5),
    "DiLoCo every 50, average in int4": _alone(50, 1.0, 0.0, "int4"),
}


def variant_config(task: str, variant: Variant, steps: int) -> ml_collections.ConfigDict:
    """The config of a variant, complete, with its own number of steps if `steps` is 0."""
    config = ml_collections.ConfigDict(CONFIGS[task].get_config().to_dict())
    for name, value in variant.parallel.items():
        config.parallel[name] = ml_collections.ConfigDict(value) if name == "mesh" else value
    config.training.num_steps = steps or config.training.num_steps
    return complete_config(config)


def build(config: ml_collections.ConfigDict, variant: Variant, task: Task) -> Program:
    """The program of a variant, as an experiment of this config has it."""
    if not variant.every:
        return prepare(config, task=task).program
    optimizer, rate, momentum = config.optimizer, *variant.outer
    schedule = warmup_cosine_schedule(
        optimizer.learning_rate,
        warmup_steps=optimizer.warmup_steps,
        num_steps=config.training.num_steps,
    )
    tx = adamw(
        schedule,
        weight_decay=optimizer.weight_decay,
        b1=optimizer.b1,
        b2=optimizer.b2,
        clip_norm=optimizer.clip_norm,
    )
    options: dict[str, Any] = {
        "num_minibatches": optimizer.num_minibatches,
        "min_weight_size": config.parallel.min_weight_size,
        "outer_code": variant.outer_code,
    }
    return diloco(
        task.model,
        tx,
        task.loss_fn,
        every=variant.every,
        outer_tx=optax.sgd(rate, momentum or None, nesterov=bool(momentum)),
        mesh=make_mesh(config.parallel.mesh.to_dict()),
        batch=abstract_batch(task.dataset.train, config.data.batch_size),
        **options,
    )


def bytes_sent(program: Program) -> tuple[float, float]:
    """What a device sends in a step, in all and over the slow links, on average."""
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    sums = [(1.0, bytes_by_axes(trace_collectives(traced)))]
    if isinstance(program, LocalSteps):
        outer = program.outer_step.trace(program.abstract_state)
        sums.append((1 / program.every, bytes_by_axes(trace_collectives(outer))))
    sent = [(share * float(n), axes) for share, each in sums for axes, n in each.items()]
    # A ring over several axes crosses the slow links with everything that it sends.
    return sum(n for n, _ in sent), sum(n for n, axes in sent if {*axes} & SLOW_AXES)


def train(program: Program, task: Task, config: ml_collections.ConfigDict, seed: int) -> float:
    """Trains with a seed, and returns the mean loss of all test examples."""
    number, size = config.training.num_steps, config.data.batch_size
    state = program.init(jax.random.key(seed))
    batches = train_batches(
        task.dataset.train, seed=seed, batch_size=size, sharding=program.batch_sharding
    )
    for step in range(1, number + 1):
        is_local = isinstance(program, LocalSteps)
        take = program.step_at(step) if is_local else program.train_step
        state, metrics = take(state, next(batches))
        if step % 25 == 0:
            jax.block_until_ready(metrics)  # So that no more than this is under way.
    batches.close()
    sums = [
        program.eval_step(state, batch)["loss"]
        for batch in evaluation_batches(task.dataset.test, size, program.batch_sharding)
    ]
    return float(sum(total for total, _ in sums) / sum(count for _, count in sums))


def measure(task: str, name: str, seed: int, config: ml_collections.ConfigDict) -> Line:
    """Runs a variant with a seed, and returns its line."""
    began = time.perf_counter()
    data = make_task(config)
    program = build(config, VARIANTS[name], data)
    sent, slow = bytes_sent(program)
    return {
        "task": task,
        "variant": name,
        "seed": seed,
        "steps": config.training.num_steps,
        "loss": round(train(program, data, config, seed), 6),
        "bytes": round(sent),
        "slow_bytes": round(slow),
        "seconds": round(time.perf_counter() - began, 1),
        "date": time.strftime("%Y-%m-%d"),
        "jax": importlib.metadata.version("jax"),
    }


def read_results(path: Path = RESULTS) -> list[Line]:
    """The lines that have been written, those of the committed file if no other is named."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def _identity(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line[field] for field in ("task", "variant", "seed", "steps"))


def run_all(
    tasks: Sequence[str], variants: Sequence[str], seeds: Iterable[int], steps: int, results: Path
) -> None:
    """Runs what has no line yet, and says how long the rest may take."""
    configs = {
        (task, name): variant_config(task, VARIANTS[name], steps)
        for task in tasks
        for name in variants
    }
    for (task, name), config in configs.items():
        if (every := VARIANTS[name].every) and config.training.num_steps % every:
            raise ValueError(
                f"--steps is {config.training.num_steps}, expected a multiple of {every} for "
                f"{name!r} of {task}: the replicas' last steps would be lost."
            )
    runs = [
        {"task": task, "variant": name, "seed": seed, "steps": config.training.num_steps}
        for seed in seeds
        for (task, name), config in configs.items()
    ]
    done = {_identity(line) for line in read_results(results)}
    left = [run for run in runs if _identity(run) not in done]
    seconds: dict[str, list[float]] = {task: [] for task in tasks}
    for number, run in enumerate(left):
        line = measure(config=configs[run["task"], run["variant"]], **_named(run))
        with results.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")
        seconds[run["task"]].append(line["seconds"])
        rest = sum(
            sum(seconds[each["task"]]) / max(len(seconds[each["task"]]), 1)
            for each in left[number + 1 :]
        )
        print(
            f"{number + 1}/{len(left)} {run['task']} {run['variant']!r} seed {run['seed']}: loss "
            f"{line['loss']:.4f}, {line['seconds']:.0f} s; the rest of the tasks timed so far "
            f"takes {rest / 60:.0f} min",
            flush=True,
        )


def _named(run: Mapping[str, Any]) -> dict[str, Any]:
    return {"task": run["task"], "name": run["variant"], "seed": run["seed"]}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0")
    parser.add_argument("--steps", type=int, default=0, help="of a run; 0: those of the config")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    simulate_devices(DEVICES)
    run_all(args.tasks, args.variants, range(args.seeds), args.steps, args.results)


if __name__ == "__main__":
    main()
