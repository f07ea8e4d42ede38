"""What training loses when its steps send fewer bytes: held-out losses at equal steps, and bytes.

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
import contextlib
import importlib.metadata
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections

from manualpar.core.program.program import Program
from manualpar.data import evaluation_batches, train_batches
from manualpar.inspect import bytes_by_axes, trace_collectives, trace_outer_steps
from manualpar.strategies.diloco.program import DiLoCoProgram
from manualpar.training.config import check_config, complete_config, load_config
from manualpar.training.devices import simulate_devices
from manualpar.training.experiment import Experiment, prepare

RESULTS = Path(__file__).with_suffix(".jsonl")
ROOT = Path(__file__).parent.parent
CONFIGS = {
    "digits": ROOT / "configs" / "fsdp.py",
    "lm": ROOT / "configs" / "fsdp_lm.py",
}
DEVICES = 8
SLOW_AXES = frozenset({"data_minor", "replica"})
Line = dict[str, Any]
Variant = Mapping[str, Any]  # What differs in `config.parallel`.


def _sharded(**changes: Any) -> Variant:
    """FSDP over all devices, axis by axis, the slow one first."""
    mesh = {"data": 2, "data_minor": 4}
    return {"strategy": "fsdp", "mesh": mesh, "axis_by_axis": True, **changes}


def _updated_in_shards(**changes: Any) -> Variant:
    """ZeRO-1, whose gradients are reduced over all devices at once."""
    return {"strategy": "zero1", "mesh": {"data": 2, "data_minor": 4}, **changes}


def _replicated(**changes: Any) -> Variant:
    """FSDP inside a group, whose gradients cross the slow links once a step."""
    return {"strategy": "hsdp", "mesh": {"replica": 4, "data": 2}, **changes}


def _alone(every: int, rate: float, momentum: float, **changes: Any) -> Variant:
    """Groups that train alone, each under FSDP."""
    return {
        "strategy": "diloco",
        "mesh": {"replica": 4, "data": 2},
        "inner": "fsdp",
        "every": every,
        "outer_learning_rate": rate,
        "outer_momentum": momentum,
        **changes,
    }


# By the name of the row, the most telling ones first.
VARIANTS: Mapping[str, Variant] = {
    "exact": _sharded(),
    "int8 weights and gradients": _sharded(gather_code="int8", reduce_code="int8"),
    "int4 gradients": _sharded(reduce_code="int4"),
    "groups, int4 between them": _replicated(reduce_code="int4"),
    "groups, int4, feedback": _replicated(reduce_code="int4", error_feedback=True),
    "DiLoCo every 10, average": _alone(10, 1.0, 0.0),
    "DiLoCo every 50, average": _alone(50, 1.0, 0.0),
    "DiLoCo every 50, 0.7 and 0.9": _alone(50, 0.7, 0.9),
    "DiLoCo every 10, 0.7 and 0.9": _alone(10, 0.7, 0.9),
    "int4 gradients at random": _sharded(reduce_code="int4", stochastic_rounding=True),
    "int8 weights": _sharded(gather_code="int8"),
    "int8 gradients": _sharded(reduce_code="int8"),
    "ZeRO-1, int4 gradients": _updated_in_shards(reduce_code="int4"),
    "ZeRO-1, int4, feedback": _updated_in_shards(reduce_code="int4", error_feedback=True),
    "groups, int8 between them": _replicated(reduce_code="int8"),
    "groups, int8, feedback": _replicated(reduce_code="int8", error_feedback=True),
    "secondary shards": _sharded(regather_axes=("data",)),
    "secondary shards, int8 both": _sharded(
        regather_axes=("data",), gather_code="int8", reduce_code="int8"
    ),
    "groups": _replicated(),
    "DiLoCo every 50, 0.7 and 0.5": _alone(50, 0.7, 0.5),
    "DiLoCo every 10, 0.7 and 0.5": _alone(10, 0.7, 0.5),
    "DiLoCo every 50, average in int4": _alone(50, 1.0, 0.0, outer_code="int4"),
    "DiLoCo every 50, 5 fragments": _alone(50, 1.0, 0.0, outer_fragments=5),
}


def variant_config(task: str, variant: Variant, steps: int) -> ml_collections.ConfigDict:
    """The config of a variant, complete, with its own number of steps if `steps` is 0."""
    config = ml_collections.ConfigDict(load_config(CONFIGS[task]).to_dict())
    for name, value in variant.items():
        config.parallel[name] = ml_collections.ConfigDict(value) if name == "mesh" else value
    config.training.num_steps = steps or config.training.num_steps
    config = complete_config(config)
    check_config(config)
    return config


def bytes_sent(program: Program) -> tuple[float, float]:
    """What a device sends in a step, in all and over the slow links, on average."""
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    sums = [(1.0, bytes_by_axes(trace_collectives(traced)))]
    if isinstance(program, DiLoCoProgram):
        sums.append((1 / program.every, bytes_by_axes(trace_outer_steps(program))))
    sent = [(share * float(n), axes) for share, each in sums for axes, n in each.items()]
    # A ring over several axes crosses the slow links with everything that it sends.
    return sum(n for n, _ in sent), sum(n for n, axes in sent if {*axes} & SLOW_AXES)


def train(experiment: Experiment, seed: int) -> float:
    """Trains with a seed, and returns the mean loss of all test examples."""
    config, program, dataset = experiment.config, experiment.program, experiment.task.dataset
    size = config.data.batch_size
    state = program.init(jax.random.key(seed))
    batches = train_batches(
        dataset.train, seed=seed, batch_size=size, sharding=program.batch_sharding
    )
    with contextlib.closing(batches):
        for step in range(1, config.training.num_steps + 1):
            state, metrics = program.step_at(step)(state, next(batches))
            # Of two steps under way, simulated devices may each wait in another one.
            jax.block_until_ready(metrics)
    total = count = 0.0
    for batch in evaluation_batches(dataset.test, size, program.batch_sharding):
        loss, examples = program.eval_step(state, batch)["loss"]
        total, count = total + float(loss), count + float(examples)
    return total / count


def measure(task: str, name: str, seed: int, config: ml_collections.ConfigDict) -> Line:
    """Runs a variant with a seed, and returns its line."""
    began = time.perf_counter()
    experiment = prepare(config)
    sent, slow = bytes_sent(experiment.program)
    return {
        "task": task,
        "variant": name,
        "seed": seed,
        "steps": config.training.num_steps,
        "loss": round(train(experiment, seed), 6),
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
        if config.training.num_steps % (every := VARIANTS[name].get("every", 1)):
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
