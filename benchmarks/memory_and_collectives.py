"""Counts the memory and the collectives of a step under every strategy, without timing.

python -m benchmarks.memory_and_collectives [--devices 1 2 4 8] [--models unrolled scanned]
    [--json FILE.json]

The numbers come from the layout (bytes of parameters and optimizer state on a device), from the
compiled step (temporary bytes on a device) and from the traced step (bytes that a device sends, and
the number of collectives; a collective in a scan counts once for each iteration). The numbers are
the same in every run. Outside of loops, XLA:CPU merges the gathers of the backward pass with the
gathers of the forward pass. So the temporaries of the unrolled model do not show the second gather.
"""

import argparse
import functools
import itertools
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.results import note_conditions, write_results
from manualpar import Batch, Program, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.inspect import count_by_kind, state_bytes, total_bytes, trace_collectives
from manualpar.models import Classifier
from manualpar.models.cross_entropy import classification_loss

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
STRATEGIES: dict[str, functools.partial[Program]] = {
    "data_parallel": functools.partial(data_parallel),
    "zero, stage 1": functools.partial(zero, stage=1),
    "zero, stage 2": functools.partial(zero, stage=2),
    "fsdp, keep": functools.partial(fsdp, reshard_after_forward=False),
    "fsdp": functools.partial(fsdp),
    "hsdp, 2 groups": functools.partial(hsdp),
}


class Layer(nn.Module):
    """A hidden layer in the form that `nn.scan` needs."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Maps `[B, width]` to `[B, width]`; the second result is `None`."""
        return nn.silu(nn.Dense(self.width)(x)), None


class ScannedClassifier(nn.Module):
    """A classifier whose hidden layers are one scan."""

    num_layers: int = 16
    width: int = 1024

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps `[B, D]` to logits `[B, 10]`."""
        del train
        layers = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.num_layers,
        )
        x, _ = layers(self.width, name="layers")(nn.Dense(self.width)(x), None)
        return nn.Dense(10)(x)


MODELS = {
    "unrolled": Classifier(hidden_size=1024, num_layers=4, num_classes=10, dtype="float32"),
    "scanned": ScannedClassifier(),
}


def build(strategy: str, model: str, num_devices: int) -> Program:
    """Builds a program of a classifier: batch 512, AdamW, float32."""
    groups = {"replica": 2} if strategy.startswith("hsdp") else {}
    return STRATEGIES[strategy](
        MODELS[model],
        optax.adamw(1e-3),
        classification_loss,
        mesh=make_mesh({**groups, "data": num_devices // groups.get("replica", 1)}),
        batch=Batch(
            inputs=jax.ShapeDtypeStruct((512, 784), jnp.float32),
            labels=jax.ShapeDtypeStruct((512,), jnp.int32),
        ),
    )


def measure(program: Program) -> list[str]:
    """Returns the sizes and the counts of a program's step, as cells of the table."""
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    lowered = traced.lower()
    memory = lowered.compile().memory_analysis()
    assert memory is not None  # XLA:CPU always returns an analysis.
    collectives = trace_collectives(traced)
    counts = count_by_kind(collectives)
    state = (program.abstract_state.params, program.abstract_state.opt_state)
    return [
        f"{state_bytes(state)[0] / 2**20:.2f}",
        f"{memory.temp_size_in_bytes / 2**20:.2f}",
        f"{float(total_bytes(collectives)) / 2**20:.2f}",
        *(str(counts.get(kind, 0)) for kind in COLLECTIVES),
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=Path, help="a JSON file")
    args = parser.parse_args()
    devices = args.devices
    conditions = note_conditions("benchmarks.memory_and_collectives", None)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(devices))
    print(f"jax {jax.__version__}; MiB on each device, and collectives of a step\n")
    header = ["model", "strategy", "devices", "state", "temporaries", "sent", *COLLECTIVES]
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header))]
    print("\n".join(lines))
    for model, strategy, num_devices in itertools.product(args.models, STRATEGIES, devices):
        if num_devices == 1 and strategy.startswith("hsdp"):
            continue
        row = [model, strategy, str(num_devices), *measure(build(strategy, model, num_devices))]
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    write_results(conditions, lines=lines, data={}, output=None, json_output=args.json)


if __name__ == "__main__":
    main()
