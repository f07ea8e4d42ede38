"""What a step holds and sends under every strategy, counted and not timed.

python -m benchmarks.memory_and_collectives [--devices 1 2 4 8]

The numbers come from the layout (bytes of parameters and optimizer state on a device), from the
compiled step (temporary bytes on a device) and from the program handed to the compiler (collectives
of a step: each runs once, for the minibatches are unrolled). They are the same on every run.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import optax

from manualpar import Batch, Program, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.inspect import state_bytes, total_bytes, trace_collectives
from manualpar.models import Classifier
from manualpar.training.losses import classification_loss

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
STRATEGIES: dict[str, functools.partial[Program]] = {
    "data_parallel": functools.partial(data_parallel),
    "zero, stage 1": functools.partial(zero, stage=1),
    "zero, stage 2": functools.partial(zero, stage=2),
    "fsdp, keep": functools.partial(fsdp, reshard_after_forward=False),
    "fsdp": functools.partial(fsdp),
    "hsdp, 2 groups": functools.partial(hsdp),
}


def build(strategy: str, num_devices: int) -> Program:
    """A classifier of four hidden layers of 1024, batch 512, AdamW, in float32."""
    groups = {"replica": 2} if strategy.startswith("hsdp") else {}
    return STRATEGIES[strategy](
        Classifier(hidden_size=1024, num_layers=4, num_classes=10, dtype="float32"),
        optax.adamw(1e-3),
        classification_loss,
        mesh=make_mesh({**groups, "data": num_devices // groups.get("replica", 1)}),
        batch=Batch(
            inputs=jax.ShapeDtypeStruct((512, 784), jnp.float32),
            labels=jax.ShapeDtypeStruct((512,), jnp.int32),
        ),
    )


def measure(program: Program) -> list[str]:
    """A row of the table."""
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    lowered = traced.lower()
    memory = lowered.compile().memory_analysis()
    assert memory is not None  # The CPU's compiler always gives one.
    text = lowered.as_text()
    state = (program.abstract_state.params, program.abstract_state.opt_state)
    return [
        f"{state_bytes(state)[0] / 2**20:.2f}",
        f"{memory.temp_size_in_bytes / 2**20:.2f}",
        f"{float(total_bytes(trace_collectives(traced))) / 2**20:.2f}",
        *(str(text.count(f'"stablehlo.{kind}"')) for kind in COLLECTIVES),
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    devices = parser.parse_args().devices
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(devices))
    print(f"jax {jax.__version__}; MiB on each device, and collectives of a step\n")
    header = ["strategy", "devices", "state", "temporaries", "sent", *COLLECTIVES]
    for row in (header, ["---"] * len(header)):
        print(f"| {' | '.join(row)} |")
    for strategy in STRATEGIES:
        for num_devices in devices:
            if num_devices == 1 and strategy.startswith("hsdp"):
                continue
            row = [strategy, str(num_devices), *measure(build(strategy, num_devices))]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
