"""A process that computes parts of a training step with one library, as `torch_parts` asks it to.

A part of a model is computed forward and backward, with gradients of its input and parameters.
"""

import functools
import resource
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.process_group import read_settings, serve
from benchmarks.workloads import ADAMW, Workload, make_workload

Part = Callable[[], Any]


def manualpar_parts(workload: Workload) -> dict[str, Part]:
    """The parts of the step of one device, compiled."""
    import flax.linen as nn
    import jax
    import optax

    from benchmarks.plain_step import plain_step
    from manualpar.models.rotary import rotary_angles
    from manualpar.models.transformer_layer import Attention, GatedMLP

    jax.config.update("jax_platforms", "cpu")
    model: Any = workload.model
    config = model._layer_config(train=True)
    params = model.init(jax.random.key(0), workload.batch.inputs[:1])["params"]
    layer = params["layer_0"]
    x_BSD, labels_BS = jax.numpy.asarray(_stream(workload)), workload.batch.labels
    angles = rotary_angles(jax.numpy.arange(x_BSD.shape[1]), config.head_size, base=model.rope_base)

    def differentiate(params: Any, function: Callable[[Any, Any], Any]) -> Part:
        def both(params: Any, x: Any, g: Any) -> Any:
            return jax.vjp(function, params, x)[1](g)

        y = jax.eval_shape(function, params, x_BSD)
        # Not a constant, whose products XLA would not compute.
        g = jax.random.normal(jax.random.key(1), y.shape)
        return functools.partial(jax.jit(both), params, x_BSD, g)

    def apply(module: Any, *args: Any) -> Callable[[Any, Any], Any]:
        return lambda params, x: module.apply({"params": params}, x, *args)

    def loss(head: Any, x: Any) -> Any:
        logits = x.reshape(-1, x.shape[-1]) @ head
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels_BS.reshape(-1))
        return losses.mean()

    def update(params: Any, grads: Any, state: Any) -> Any:
        updates, state = workload.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step, init = plain_step(workload)
    holder, batch = [init()], jax.device_put(workload.batch)

    def whole() -> Any:
        holder[0], metrics = step(holder[0], batch)
        return holder[0], metrics

    product = layer["mlp"]["gate"]["kernel"]
    parts: dict[str, Part] = {
        "product": differentiate(product, lambda w, x: x.reshape(-1, x.shape[-1]) @ w),
        "mlp": differentiate(layer["mlp"], apply(GatedMLP(config))),
        "attention": differentiate(layer["attention"], apply(Attention(config), angles, None)),
        "norm": differentiate(layer["mlp_norm"], apply(nn.RMSNorm())),
        "loss": differentiate(params["head"], loss),
        "update": functools.partial(jax.jit(update), params, params, workload.tx.init(params)),
        "step": whole,
    }

    def wait_for(part: Part) -> Part:
        return lambda: jax.block_until_ready(part())

    return {name: wait_for(part) for name, part in parts.items()}


def torch_parts(workload: Workload) -> dict[str, Part]:
    """The same as one writes them in PyTorch, run eagerly."""
    import torch
    from torch.nn import functional

    from benchmarks.torch_transformer import TorchTransformer

    torch.set_num_threads(1)
    source: Any = workload.model
    fields = ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "mlp_size")
    model = TorchTransformer({name: getattr(source, name) for name in (*fields, "rope_base")})
    layer: Any = model.layers[0]
    x_BSD = torch.from_numpy(_stream(workload)).requires_grad_()
    inputs, labels = (
        torch.from_numpy(np.array(x)).long() for x in (workload.batch.inputs, workload.batch.labels)
    )
    exponents = -torch.arange(0, model.size, 2) / model.size
    angles = torch.outer(torch.arange(x_BSD.shape[1]).float(), model.rope_base**exponents)
    sin, cos = angles.sin(), angles.cos()

    def differentiate(module: Any, function: Callable[[Any], Any]) -> Part:
        wanted, g = (*module.parameters(), x_BSD), torch.randn_like(function(x_BSD))
        return lambda: torch.autograd.grad(function(x_BSD), wanted, g)

    mlp = torch.nn.ModuleList([layer.gate, layer.up, layer.down])
    rates = {"lr": ADAMW["lr"], "weight_decay": ADAMW["weight_decay"], "eps": ADAMW["eps"]}
    optimizer = torch.optim.AdamW(model.parameters(), betas=(ADAMW["b1"], ADAMW["b2"]), **rates)

    def loss(logits: Any) -> Any:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def update() -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.detach()
        optimizer.step()

    def whole() -> None:
        optimizer.zero_grad()
        loss(model(inputs)).backward()
        optimizer.step()

    return {
        "product": differentiate(layer.gate, layer.gate),
        "mlp": differentiate(
            mlp, lambda x: layer.down(functional.silu(layer.gate(x)) * layer.up(x))
        ),
        "attention": differentiate(layer.attention, lambda x: layer.attention(x, sin, cos)),
        "norm": differentiate(layer.mlp_norm, layer.mlp_norm),
        "loss": differentiate(model.head, lambda x: loss(model.head(x))),
        "update": update,
        "step": whole,
    }


def _stream(workload: Workload) -> np.ndarray:
    """The input of every part of a layer."""
    model: Any = workload.model
    size = (*workload.batch.inputs.shape, model.hidden_size)
    return np.random.default_rng(0).normal(size=size).astype(np.float32)


def main() -> None:
    """Serves until nobody asks any more."""
    settings = read_settings()
    workload = make_workload("lm", batch_size=settings["batch_size"], is_tiny=settings["is_tiny"])
    make = torch_parts if settings["library"] == "torch" else manualpar_parts
    parts = make(workload)

    def block(part: str, steps: int) -> Mapping[str, Any]:
        """Computes a part some times; answers with the processor's time, and the kernel's of it."""
        in_kernel = resource.getrusage(resource.RUSAGE_SELF).ru_stime
        started = time.process_time()
        for _ in range(steps):
            parts[part]()
        seconds = time.process_time() - started
        in_kernel = resource.getrusage(resource.RUSAGE_SELF).ru_stime - in_kernel
        return {"seconds": seconds, "system": in_kernel}

    serve({"block": block})


if __name__ == "__main__":
    main()
