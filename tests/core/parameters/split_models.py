"""Small models that compute with shards, with random biases and scales, and what they must equal.

A zero bias or a scale of one hides a gradient that is counted twice.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from manualpar import Batch, fsdp, make_mesh
from manualpar.core.mesh.axes import is_axis_bound
from manualpar.core.parameters.annotations import split
from manualpar.core.tracing.scopes import EXPERT_SCOPE
from manualpar.layers.boundaries import enter, leave
from tests.tiny import masked_square_loss

WIDTH, LENGTH, HEADS, HEAD = 8, 8, 8, 4
NORMAL = nn.initializers.normal


class Block(nn.Module):
    """Products of heads, of which some share a factor, and a product with a gathered kernel."""

    shared_heads: int = 2
    sequence_dim: int | None = None

    @nn.compact
    def __call__(self, x, _=None):
        h = enter(nn.RMSNorm(scale_init=NORMAL(1.0))(x), "model", self.sequence_dim)
        heads = (None, "model", None)
        q = self.param("q", split(NORMAL(0.3), heads), (WIDTH, HEADS, HEAD))
        bias = self.param("bias", split(NORMAL(0.3), heads[1:]), (HEADS, HEAD))
        k_init = split(NORMAL(0.3), heads, shared=True)
        k = self.param("k", k_init, (WIDTH, self.shared_heads, HEAD))
        out = self.param("out", split(NORMAL(0.3), (*heads[1:], None)), (HEADS, HEAD, WIDTH))
        q, k = (jnp.tensordot(h, kernel, 1) for kernel in (q, k))
        product = jnp.sin(q + bias[None, None]) * jnp.repeat(k, q.shape[-2] // k.shape[-2], -2)
        x = x + leave(jnp.tensordot(product, out, 2), "model", self.sequence_dim)
        x = x + self.param("out_bias", NORMAL(0.3), (WIDTH,))[None, None]
        stored = nn.with_partitioning(NORMAL(0.3), (None, "model"))
        return x + jnp.tanh(x @ self.param("stored", stored, (WIDTH, WIDTH))) / 2, None


class Net(nn.Module):
    """Blocks between two products that are split.

    Attributes:
      shared_heads: The heads that all others share.
      sequence: Whether activations between layers are split along their sequence.
      loop: `""` for two blocks one after the other, "scan", or "nested" for a scan of scans.
      remat: Whether blocks are rematerialised.
    """

    shared_heads: int = 2
    sequence: bool = False
    loop: str = ""
    remat: bool = False

    @nn.compact
    def __call__(self, x, train=False):
        dim = 1 if self.sequence else None
        table = self.param("table", nn.with_partitioning(NORMAL(0.5), ("model", None)), (WIDTH, 16))
        up = self.param("up", split(NORMAL(0.3), (None, "model")), (16, 16))
        down = self.param("down", split(NORMAL(0.3), ("model", None)), (16, WIDTH))
        x = leave(jnp.sin(enter(x @ table, "model") @ up) @ down, "model", dim)
        block = nn.remat(Block, prevent_cse=not self.loop) if self.remat else Block
        if self.loop:
            in_layers = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            in_layers["metadata_params"] = {nn.PARTITION_NAME: "layers"}
            for length in (2, 3)[: 1 + (self.loop == "nested")]:
                block = nn.scan(block, length=length, **in_layers)
            x, _ = block(self.shared_heads, dim)(x, None)
        else:
            for _ in range(2):
                x, _ = block(self.shared_heads, dim)(x)
        h = enter(nn.LayerNorm(bias_init=NORMAL(1.0), scale_init=NORMAL(1.0))(x), "model", dim)
        head = self.param("head", split(NORMAL(0.3), (None, "model")), (WIDTH, 16))
        last = self.param("last", split(NORMAL(0.3), ("model", None)), (16, 4))
        return leave(jnp.sin(h @ head) @ last, "model")


class Experts(nn.Module):
    """Experts of which each device along `axis`, which splits the batch, has some or shares one.

    Every expert sees all tokens of these devices; of an expert that devices share, each device does
    its part of the examples.
    """

    num_experts: int
    axis: str

    @nn.compact
    def __call__(self, x):
        n, axis = self.num_experts, self.axis
        up = self._param("up", (n, WIDTH, 8))
        bias = self._param("bias", (n, 8))
        down = self._param("down", (n, 8, WIDTH))
        gate = nn.softmax(nn.Dense(n)(x))
        is_split = is_axis_bound(axis)
        if is_split:
            devices, device = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
            with jax.named_scope(EXPERT_SCOPE):
                x, gate = (jax.lax.all_gather(a, axis, axis=0, tiled=True) for a in (x, gate))
            gate = jax.lax.dynamic_slice_in_dim(gate, device * n // devices, up.shape[0], -1)
            sharing = max(devices // n, 1)
            gate *= (jnp.arange(len(gate)) % sharing == device % sharing)[:, None, None]
        h = jnp.sin(jnp.einsum("bsd,edf->besf", x, up) + bias[None, :, None])
        y = jnp.einsum("besf,efd,bse->bsd", h, down, gate)
        with jax.named_scope(EXPERT_SCOPE):
            return jax.lax.psum_scatter(y, axis, scatter_dimension=0, tiled=True) if is_split else y

    def _param(self, name, shape):
        names = (self.axis, *(None,) * (len(shape) - 1))
        return self.param(name, split(NORMAL(0.4), names, shared=True), shape)


class ExpertNet(nn.Module):
    """A layer of eight experts and one of two."""

    axis: str = "data"

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(WIDTH, bias_init=NORMAL(1.0))(x)
        x = x + Experts(8, self.axis)(x)
        return nn.Dense(4)(x + Experts(2, self.axis)(x))


def make_batch(seed=0):
    """Examples with masks that leave each device another number of tokens."""
    rng = np.random.default_rng(seed)
    inputs, labels = (rng.normal(size=(16, LENGTH, n)).astype(np.float32) for n in (WIDTH, 4))
    mask = rng.random((16, LENGTH)) < np.linspace(0.1, 1, 16)[:, None]
    return Batch(inputs, labels, mask.astype(np.float32))


BATCH = make_batch()


@functools.cache
def on_one_device(model):
    """The parameters of a model, and their gradient, by plain flax; both without boxes."""
    key, _ = jax.random.split(jax.random.key(0))
    params = nn.unbox(jax.jit(lambda key: model.init({"params": key}, BATCH.inputs))(key)["params"])
    grads = jax.jit(
        jax.grad(lambda params: masked_square_loss(params, model.apply, BATCH, None)[0])
    )(params)
    return jax.device_get((params, grads))


def build(model, axes, builder=fsdp, **options):
    """A program of SGD with a rate of 1, so that a step subtracts the gradient."""
    if builder.__name__ != "data_parallel":
        options = {"min_weight_size": 16, **options}
    tx = options.pop("tx", optax.sgd(1.0))
    loss = options.pop("loss_fn", masked_square_loss)
    return builder(model, tx, loss, mesh=make_mesh(axes), batch=BATCH, **options)


def gradients_of(program):
    """The initial parameters and the gradient of a program's first step, whole."""
    state = program.init(jax.random.key(0))
    before = program.whole(state)["params"]
    state, _ = program.train_step(state, BATCH)
    after = program.whole(state)["params"]
    return before, jax.tree.map(np.subtract, before, after)


def worst_difference(grads, expected):
    """The largest difference of an element, in parts of the largest of its leaf, with the leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return max(
        (float(np.abs(g - e).max() / np.abs(e).max()), jax.tree_util.keystr(path))
        for (path, g), e in zip(leaves, jax.tree.leaves(expected), strict=True)
    )
