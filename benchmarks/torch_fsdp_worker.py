"""A process that trains a transformer with PyTorch's FSDP2, as `torch_fsdp` asks it to.

It is the documented way: `fully_shard` on every layer and on the model, AdamW on the sharded
parameters, gloo between the processes.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

from benchmarks.process_group import (
    forget_peak,
    loopback_bytes,
    peak_memory,
    read_settings,
    serve,
)
from benchmarks.torch_transformer import TorchTransformer, load


class TorchTraining:
    """A sharded model, its optimizer and this process's part of a batch."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Joins the other processes and makes the model.

        Args:
          settings: See `ProcessGroup`; also `shape`, see `TorchTransformer`, `files`, the path of
            the parameters and the batch, and `optimizer`.
        """
        torch.set_num_threads(len(settings["cores"]))
        rank, count = settings["process"], settings["num_processes"]
        address = f"tcp://127.0.0.1:{settings['port']}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=count)
        self._imported = peak_memory()
        with np.load(settings["files"]) as arrays:
            params = {name: arrays[name] for name in arrays.files if not name.startswith("batch.")}
            own = slice(*(len(arrays["batch.inputs"]) // count * i for i in (rank, rank + 1)))
            self._inputs, self._labels = (
                torch.from_numpy(arrays[name][own]).long()
                for name in ("batch.inputs", "batch.labels")
            )
        self._model = TorchTransformer(settings["shape"])
        load(self._model, params)
        del params
        mesh = dist.init_device_mesh("cpu", (count,))
        for layer in self._model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        decayed = [p for p in self._model.parameters() if p.ndim > 1]
        spared = [p for p in self._model.parameters() if p.ndim <= 1]
        options = dict(settings["optimizer"])
        decay = options.pop("weight_decay")
        options["betas"] = (options.pop("b1"), options.pop("b2"))
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": decay},
                {"params": spared, "weight_decay": 0.0},
            ],
            **options,
        )

    def step(self) -> torch.Tensor:
        """Takes a step; returns the loss of the whole batch."""
        logits = self._model(self._inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), self._labels.flatten())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    def losses(self, steps: int) -> Mapping[str, Any]:
        """Takes steps; answers with the loss of each."""
        return {"losses": [float(self.step()) for _ in range(steps)]}

    def block(self, steps: int) -> Mapping[str, Any]:
        """Takes steps once all processes are there; answers with seconds and bytes.

        `processor` are the seconds that all threads of this process have computed for.
        """
        dist.barrier()
        sent, computed, started = loopback_bytes(), time.process_time(), time.perf_counter()
        for _ in range(steps):
            self.step()
        dist.barrier()
        seconds, computed = time.perf_counter() - started, time.process_time() - computed
        return {"seconds": seconds, "processor": computed, "loopback": loopback_bytes() - sent}

    def counts(self) -> Mapping[str, Any]:
        """Takes a step; answers with what was called in it."""
        with CommDebugMode() as mode:
            self.step()
        return {"collectives": {str(k): v for k, v in mode.get_comm_counts().items()}}

    def forget(self) -> Mapping[str, Any]:
        """Answers with the memory so far and begins to look for the peak anew."""
        before = peak_memory()
        forget_peak()
        return {"imported": self._imported, "peak": before}

    def memory(self) -> Mapping[str, Any]:
        """Answers with the peak since."""
        return {"peak": peak_memory()}


def main() -> None:
    """Serves until nobody asks any more."""
    training = TorchTraining(read_settings())
    names = ("losses", "block", "counts", "forget", "memory")
    serve({name: getattr(training, name) for name in names})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
