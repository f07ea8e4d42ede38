"""Trains a transformer with PyTorch's FSDP2 and `torch.compile`, for `benchmarks.gpu`.

The training follows torchtitan: every layer is compiled and then sharded, parameters are gathered
in the dtype of the computation, gradients are reduced in float32, and on a GPU attention is the
flash kernel of `scaled_dot_product_attention`.
"""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.process_group import peak_memory, read_settings, serve
from benchmarks.torch_transformer import TorchTransformer, load


class CompiledTraining:
    """A compiled and sharded model, its optimizer and this process's part of a batch."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Connects to the other processes, and makes the model and the optimizer.

        Args:
          settings: The settings that `ProcessGroup` adds; `shape`, see `TorchTransformer`; `files`,
            the path of the file with parameters and batch; `dtype`, of the computation;
            `optimizer`, the arguments of AdamW; and `backend`, of `torch.compile`.
        """
        rank, count = settings["process"], settings["num_processes"]
        is_gpu = torch.cuda.is_available()
        if is_gpu:
            torch.cuda.set_device(rank)
        else:
            torch.set_num_threads(len(settings["cores"]))
        self._device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            init_method=f"tcp://127.0.0.1:{settings['port']}",
            rank=rank,
            world_size=count,
        )
        model = TorchTransformer(settings["shape"])
        with np.load(settings["files"]) as arrays:
            load(model, {name: arrays[name] for name in arrays.files if "batch." not in name})
            own = slice(*(len(arrays["batch.inputs"]) // count * i for i in (rank, rank + 1)))
            self._inputs, self._labels = (
                torch.from_numpy(arrays[name][own]).long().to(self._device)
                for name in ("batch.inputs", "batch.labels")
            )
        self._model = model.to(self._device)
        dtype, backend = getattr(torch, settings["dtype"]), settings["backend"]
        mesh = dist.init_device_mesh(self._device.type, (count,))
        is_narrow = dtype != torch.float32
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mp_policy": policy} if is_narrow else {}
        for layer in self._model.layers:
            layer.compile(backend=backend)
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(self._model, mesh=mesh, **options)
        self._loss = torch.compile(_cross_entropy, backend=backend)
        self._has_flash = is_gpu and is_narrow
        optimizer = dict(settings["optimizer"])
        optimizer["betas"] = (optimizer.pop("b1"), optimizer.pop("b2"))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=is_gpu, **optimizer)

    def losses(self, steps: int) -> Mapping[str, Any]:
        """Runs `steps` steps; returns the loss of the global batch in each step."""
        losses = []
        with self._kernel():
            for _ in range(steps):
                loss = self._step()
                dist.all_reduce(loss)
                losses.append(float(loss) / dist.get_world_size())
        return {"losses": losses}

    def block(self, steps: int) -> Mapping[str, Any]:
        """Waits until all processes are ready, and runs `steps` steps; returns their seconds."""
        dist.barrier()
        self._wait()
        started = time.perf_counter()
        with self._kernel():
            for _ in range(steps):
                self._step()
        self._wait()
        return {"seconds": time.perf_counter() - started}

    def memory(self) -> Mapping[str, Any]:
        """Returns the peak memory of the device, or of the process on a CPU."""
        is_gpu = self._device.type == "cuda"
        return {"peak": torch.cuda.max_memory_allocated() if is_gpu else peak_memory()}

    def _step(self) -> Any:
        loss = self._loss(self._model(self._inputs), self._labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def _kernel(self) -> Any:
        """Returns a context in which attention must use the flash kernel, if there is one."""
        if not self._has_flash:
            return contextlib.nullcontext()
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _cross_entropy(logits: Any, labels: Any) -> Any:
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def main() -> None:
    """Runs the tasks of `benchmarks.gpu` until standard input ends."""
    training = CompiledTraining(read_settings())
    serve({name: getattr(training, name) for name in ("losses", "block", "memory")})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
