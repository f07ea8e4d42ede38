"""Programs that the tests of checkpoints save and restore, and processes that they kill.

Run as `python -m tests.training.checkpoints.worker FOLDER`, it saves a state after every step, one
after the other as fast as it can, and prints each step that `wait` has said is complete. With more
arguments it is one of the functions below.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from manualpar import Batch, Program, TrainState, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.system.storage import AnyPath, as_path
from manualpar.training.checkpoints import CheckpointError, Checkpoints

NUM_CLASSES = 6
PROGRAMS = ("dp", "zero1", "zero2", "hsdp", "fsdp", "fsdp_pad", "zero1_pad")


class Model(nn.Module):
    """Some of its dimensions divide by eight, some by nothing."""

    hidden_size: int = 16
    norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        for features in (self.hidden_size, 13, 11):
            x = nn.relu(nn.Dense(features)(x))
        if self.norm:
            x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(NUM_CLASSES)(x)


def loss_fn(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
    """Cross entropy."""
    del rng
    logits = apply_fn({"params": params}, batch.inputs, train=True)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return loss.mean(), {"loss": (loss.sum(), loss.shape[0])}


def make_batch(step: int) -> Batch:
    """The batch of a step."""
    random = np.random.default_rng(step)
    inputs = random.normal(size=(16, 8)).astype(np.float32)
    return Batch(inputs, random.integers(NUM_CLASSES, size=16).astype(np.int32))


def make_program(
    name: str,
    devices: Sequence[jax.Device],
    *,
    model: nn.Module | None = None,
    tx: optax.GradientTransformation | None = None,
    **options: Any,
) -> Program:
    """A program by name, on any number of devices."""
    name, _, pad = name.partition("_")
    builder, axes = {
        "dp": (data_parallel, {"data": -1}),
        "zero1": (functools.partial(zero, stage=1), {"data": -1}),
        "zero2": (functools.partial(zero, stage=2), {"data": -1}),
        "hsdp": (hsdp, {"replica": 2, "data": -1}),
        "fsdp": (fsdp, {"data": -1}),
    }[name]
    if name != "dp":
        options |= {"min_weight_size": 0, "pad": bool(pad)}
    return builder(
        model or Model(),
        tx or optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
        loss_fn,
        mesh=make_mesh(axes, devices),
        batch=make_batch(0),
        **options,
    )


@functools.cache
def shared_program(name: str) -> Program:
    """A program on all devices, which all tests of a process share: it compiles once."""
    return make_program(name, jax.devices())


def train(program: Program, state: TrainState, steps: range) -> tuple[TrainState, list[float]]:
    """Trains for some steps; returns the losses too."""
    losses = []
    for step in steps:
        batch = jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, program.batch_sharding, x.__getitem__),
            make_batch(step),
        )
        state, metrics = program.train_step(state, batch)
        total, count = metrics["loss"]
        losses.append(float(total) / float(count))
    return state, losses


def state_of_step(state: TrainState, step: int) -> TrainState:
    """A state from which one sees of which step it is: every number says so."""

    def fill(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return jax.device_put(np.full(x.shape, step, x.dtype), x.sharding)

    return jax.tree.map(fill, state)


def save_for_ever(folder: AnyPath) -> None:
    """Saves step after step from the newest on, until it is killed."""
    program = make_program("fsdp", jax.devices(), model=Model(hidden_size=1024))
    checkpoints = Checkpoints(folder, keep=2, keep_every_steps=5)
    latest = checkpoints.latest_step()
    state = program.init(jax.random.key(0))
    for step in range((latest or 0) + 1, 10**6):
        checkpoints.save(program, state_of_step(state, step), step=step, extra={"position": step})
        if latest is not None:
            print(latest, flush=True)  # The save of the next step has waited for it.
        latest = step


def save_and_fail(folder: AnyPath, size: int) -> None:
    """Saves steps 1 and 2 and then as many of `size` as fit; prints errors, and a last save."""
    small = make_program("fsdp", jax.devices())
    large = make_program("fsdp", jax.devices(), model=Model(hidden_size=size))
    states = [program.init(jax.random.key(0)) for program in (small, large)]
    checkpoints = Checkpoints(folder, keep=9)
    for step, program, state in (
        (1, small, states[0]),
        (2, large, states[1]),
        (3, large, states[1]),
        (4, small, states[0]),
    ):
        try:
            checkpoints.save(program, state, step=step, extra={})
            print(f"{step}: returned", flush=True)
            checkpoints.wait()
        except CheckpointError as error:
            print(f"{step}: {error}", flush=True)
    print(checkpoints.steps(), flush=True)
    checkpoints.close()


def save_or_restore(folder: AnyPath, action: str, address: str, count: int, index: int) -> None:
    """One of several processes; prints losses, and what `restore` reports or raises."""
    jax.distributed.initialize(
        address, count, index, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=20
    )
    program = make_program("fsdp_pad", jax.devices())
    with Checkpoints(folder, keep=2) as checkpoints:
        if action == "save":
            state = program.init(jax.random.key(1))
            for step in range(4):
                checkpoints.save(program, state, step=step, extra={"position": step})
                if step < 3:
                    state, _ = train(program, state, range(step, step + 1))
            checkpoints.wait()
        else:
            try:
                restored = checkpoints.restore(
                    program, on_corruption="previous", report=lambda line: print(line, flush=True)
                )
            except CheckpointError as error:
                print(error, flush=True)
                return
            assert restored.extra == {"position": restored.step}
            state = restored.state
            # Arrays of which each process holds a part only, by way of the host.
            again = program.init_from(program.whole(state))
            for x, y in zip(*map(jax.tree.leaves, (again.params, state.params)), strict=True):
                for own, other in zip(x.addressable_shards, y.addressable_shards, strict=True):
                    np.testing.assert_array_equal(own.data, other.data)
        print(checkpoints.steps(), train(program, state, range(3, 6))[1], flush=True)


if __name__ == "__main__":
    folder, *rest = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // int(rest[2]) if len(rest) > 1 else 8)
    if not rest:
        save_for_ever(as_path(folder))
    elif len(rest) == 1:
        save_and_fail(as_path(folder), int(rest[0]))
    else:
        save_or_restore(as_path(folder), rest[0], rest[1], int(rest[2]), int(rest[3]))
