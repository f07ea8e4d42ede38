"""A process that trains a transformer with PyTorch's `torch.compile`, as `gpu` asks it to."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from benchmarks.process_group import peak_memory, read_settings, serve
from benchmarks.torch_transformer import TorchTransformer


class CompiledTraining:
    """A compiled model, its optimizer and a batch, on one device."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Makes the model.

        Args:
          settings: `shape`, see `TorchTransformer`; `batch_size`, `sequence_length`, `dtype`, what
            is computed in; `optimizer`; and `backend`, that of `torch.compile`.
        """
        torch.manual_seed(0)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._device.type == "cpu":
            torch.set_num_threads(len(settings["cores"]))
        shape = settings["shape"]
        size = (settings["batch_size"], settings["sequence_length"] + 1)
        tokens = torch.randint(0, shape["vocab_size"], size, device=self._device)
        self._inputs, self._labels = tokens[:, :-1], tokens[:, 1:]
        self._dtype = getattr(torch, settings["dtype"])
        self._model = TorchTransformer(shape).to(self._device)
        self._loss = torch.compile(self._loss_of, backend=settings["backend"])
        optimizer = dict(settings["optimizer"])
        optimizer["betas"] = (optimizer.pop("b1"), optimizer.pop("b2"))
        is_gpu = self._device.type == "cuda"
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=is_gpu, **optimizer)

    def losses(self, steps: int) -> Mapping[str, Any]:
        """Takes steps; answers with the loss of each."""
        return {"losses": [float(self._step()) for _ in range(steps)]}

    def block(self, steps: int) -> Mapping[str, Any]:
        """Takes steps; answers with seconds."""
        self._wait()
        started = time.perf_counter()
        for _ in range(steps):
            self._step()
        self._wait()
        return {"seconds": time.perf_counter() - started}

    def memory(self) -> Mapping[str, Any]:
        """Answers with the most memory that was held, on the device or, on a CPU, at all."""
        is_gpu = self._device.type == "cuda"
        return {"peak": torch.cuda.max_memory_allocated() if is_gpu else peak_memory()}

    def _loss_of(self, inputs: Any, labels: Any) -> Any:
        is_narrow = self._dtype != torch.float32
        with torch.autocast(self._device.type, dtype=self._dtype, enabled=is_narrow):
            logits = self._model(inputs)
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def _step(self) -> Any:
        loss = self._loss(self._inputs, self._labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    """Serves until nobody asks any more."""
    training = CompiledTraining(read_settings())
    serve({name: getattr(training, name) for name in ("losses", "block", "memory")})


if __name__ == "__main__":
    main()
