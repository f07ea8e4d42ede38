"""Attention on NVIDIA GPUs by cuDNN's kernel, which JAX calls.

The forward pass returns the result and the logarithm of each query's sum of weights, `[B, N, S]`.
The backward pass reads both arrays. JAX does not name them, so a rematerialisation policy could not
save them, and a rematerialised layer would run the forward kernel again. This module gives both
arrays a name.

JAX's public function takes no document numbers. It turns a mask of documents into a bias
`[B, 1, S, S]`, and its backward pass computes the gradient of that bias too.

Symbols: `B` examples, `S` positions, `N` query heads, `K` key and value heads, `H` features of a
head.
"""

import functools
import re
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.layers.attention.blockwise_attention import ATTENDED
from manualpar.layers.boundaries import platform_traced_for

# The lowest major compute capability of a GPU that runs the kernel, and the lowest that runs the
# kernel with heads of more than 128 features.
FIRST, LARGE = 8, 9
# The compute capability by kind of GPU (the beginning of `jax.Device.device_kind`).
CAPABILITIES = {r"NVIDIA A100": "8.0", r"NVIDIA G?H[12]00": "9.0", r"NVIDIA G?B200": "10.0"}


def cudnn_misfit(query: jax.Array, key: jax.Array, documents: jax.Array | None) -> str | None:
    """Returns why the kernel cannot run on these arrays on the program's GPUs, or `None`."""
    platform = platform_traced_for()
    if platform is None:
        platform = jax.default_backend()
    if platform != "gpu":
        return f"the devices are {platform}s, no NVIDIA GPUs"
    capability = compute_capability()
    major = capability.partition(".")[0]
    if not major.isdecimal() or int(major) < FIRST:
        return f"the compute capability of the GPU is {capability!r}, not {FIRST}.0 or more"
    dtypes = sorted({str(query.dtype), str(key.dtype)})
    if dtypes not in (["bfloat16"], ["float16"]):
        return f"the dtype is {' and '.join(dtypes)}, not bfloat16 or float16"
    most, size = 256 if int(major) >= LARGE else 128, query.shape[-1]
    if size % 8 or size > most:
        return f"head_size is {size}, no multiple of 8 up to {most}"
    if documents is not None and query.shape[1] % 2:
        return f"the length is {query.shape[1]}, which with documents must be even"
    return None


def compute_capability() -> str:
    """Returns the compute capability of the GPUs for which the code is traced; "" if unknown.

    A program may be compiled for GPUs that are not here, so the kind of the mesh's devices decides
    (`CAPABILITIES`). Other GPUs are the GPUs of this process.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kind = mesh.abstract_device.device_kind if mesh.abstract_device else ""
    if known := [CAPABILITIES[name] for name in CAPABILITIES if re.match(name, kind)]:
        return known[0]
    return str(getattr(jax.local_devices()[0], "compute_capability", ""))


def cudnn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    *,
    window: int | None = None,
) -> jax.Array:
    """Attends causally within documents.

    Args:
      query: `[B, S, N, H]`, in 16 bits.
      key: `[B, S, K, H]`, of the dtype of `query`. `K` divides `N`.
      value: `[B, S, K, H]`, of the dtype of `query`.
      documents: `int32[B, S]`, or `None` if each sequence is one document.
      window: How many positions a query sees, including the query's position; `None` for all.

    Returns:
      `[B, S, N, H]`.

    Communication:
      None.

    Gradient:
      The kernel has its own backward pass. The result and the logarithms of the sums of weights
      have the checkpoint name `ATTENDED`. With a policy that saves the name, the forward kernel
      does not run again.
    """
    arrays = (query, key, value, documents)
    out: jax.Array = _attend(*cast_to_varying(arrays, varying_axes(arrays)), window)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    window: int | None,
) -> jax.Array:
    return dot_product_attention(query, key, value, documents, window, "cudnn")


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    window: int | None,
    implementation: Any,
) -> jax.Array:
    """Calls `jax.nn.dot_product_attention`; `cudnn_attention` describes the arguments."""
    mask = None
    if documents is not None:
        mask = documents[:, None, :, None] == documents[:, None, None, :]
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )


def _attend_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    window: int | None,
) -> tuple[jax.Array, Any]:
    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return dot_product_attention(query, key, value, documents, window, "cudnn")

    out, pullback = jax.vjp(attend, query, key, value)

    def named(x: jax.Array) -> jax.Array:
        # The other residuals get no name, because the arguments exist anyway, and the mask is too
        # large to save.
        return checkpoint_name(x, ATTENDED) if x is out or x.ndim == 3 else x

    return named(out), jax.tree.map(named, pullback)


def _attend_backward(window: int | None, pullback: Any, g: jax.Array) -> Any:
    del window
    return (*pullback(g), None)


_attend.defvjp(_attend_forward, _attend_backward)
