"""A process that trains a transformer with `manualpar.fsdp`, as `torch_fsdp` asks it to.

Processes have one device each and gloo between them; one process alone simulates as many devices
as it is told to.
"""

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from benchmarks.compiled_steps import mean_loss
from benchmarks.process_group import (
    forget_peak,
    loopback_bytes,
    peak_memory,
    read_settings,
    serve,
)
from benchmarks.workloads import make_workload
from manualpar import Batch, TrainState, fsdp, make_mesh
from manualpar.inspect import (
    bytes_by_axes,
    compiled_collectives,
    count_by_kind,
    total_bytes,
    trace_collectives,
)


class ManualparTraining:
    """A program, its state and a batch."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Joins the other processes and compiles the step.

        Args:
          settings: See `ProcessGroup`; also `workload`, `is_tiny`, `devices`, how many this process
            has, `options` of `fsdp`, and `files`, the path of the parameters and the batch.
        """
        self._process, self._count = settings["process"], settings["num_processes"]
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", settings["devices"])
        if self._count > 1:
            address = f"127.0.0.1:{settings['port']}"
            jax.distributed.initialize(address, self._count, self._process)
        jax.devices()
        self._imported = peak_memory()
        workload = make_workload(settings["workload"], is_tiny=settings["is_tiny"])
        program = fsdp(
            workload.model,
            workload.tx,
            workload.loss_fn,
            mesh=make_mesh({"data": -1}),
            batch=workload.abstract_batch,
            min_weight_size=0,
            **settings["options"],
        )
        traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
        self._compiled: Any = traced.lower().compile()
        written, runs = trace_collectives(traced), compiled_collectives(self._compiled)
        self._sent = {
            "traced_bytes": float(sum(bytes_by_axes(written).values())),
            "traced": count_by_kind(written),
            "compiled_bytes": float(total_bytes(runs)),
            "compiled": count_by_kind(runs),
        }
        with np.load(settings["files"]) as arrays:
            self._state = _given(program.init(jax.random.key(0)), arrays)
            batch = Batch(inputs=arrays["batch.inputs"], labels=arrays["batch.labels"])
        self._batch = jax.tree.map(
            lambda x: jax.make_array_from_callback(
                x.shape, program.batch_sharding, lambda index: x[index]
            ),
            batch,
        )

    def losses(self, steps: int) -> Mapping[str, Any]:
        """Takes steps; answers with the loss of each."""
        losses = []
        for _ in range(steps):
            self._state, metrics = self._compiled(self._state, self._batch)
            losses.append(mean_loss(metrics))
        return {"losses": losses}

    def block(self, steps: int) -> Mapping[str, Any]:
        """Takes steps once all processes are there; answers with seconds and bytes.

        `processor` are the seconds that all threads of this process have computed for.
        """
        jax.block_until_ready(self._state)
        self._barrier()
        sent, computed, started = loopback_bytes(), time.process_time(), time.perf_counter()
        for _ in range(steps):
            self._state, metrics = self._compiled(self._state, self._batch)
            # The other library's processes wait for every loss too.
            jax.block_until_ready(metrics)
        jax.block_until_ready(self._state)
        self._barrier()
        seconds, computed = time.perf_counter() - started, time.process_time() - computed
        return {"seconds": seconds, "processor": computed, "loopback": loopback_bytes() - sent}

    def counts(self) -> Mapping[str, Any]:
        """Answers with what the traced and the compiled step send."""
        return self._sent

    def forget(self) -> Mapping[str, Any]:
        """Answers with the memory so far and begins to look for the peak anew."""
        before = peak_memory()
        forget_peak()
        return {"imported": self._imported, "peak": before}

    def memory(self) -> Mapping[str, Any]:
        """Answers with the peak since."""
        return {"peak": peak_memory()}

    def _barrier(self) -> None:
        if self._count > 1:
            multihost_utils.sync_global_devices("block")


def _given(state: TrainState, arrays: Any) -> TrainState:
    """A first state with parameters of a file, stacked where layers are scanned."""

    def read(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        first, _, rest = name.partition("/")
        if first == "layers":
            value = np.stack([arrays[f"layer_{i}/{rest}"] for i in range(len(x))])
        else:
            value = arrays[name]
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: value[index])

    return state.replace(params=jax.tree_util.tree_map_with_path(read, state.params))


def main() -> None:
    """Serves until nobody asks any more."""
    training = ManualparTraining(read_settings())
    names = ("losses", "block", "counts", "forget", "memory")
    serve({name: getattr(training, name) for name in names})


if __name__ == "__main__":
    main()
