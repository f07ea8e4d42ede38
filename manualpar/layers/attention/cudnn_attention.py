"""Attention on NVIDIA GPUs by cuDNN's kernel, which JAX calls.

The forward pass returns the result and the logarithm of each query's sum of weights, `[B, N, S]`.
The backward pass reads both arrays. JAX does not name them, so a rematerialisation policy could not
save them, and a rematerialised layer would run the forward kernel again. This module gives both
arrays a name.

JAX's public function takes no document numbers. It turns a mask of documents into a bias
`[B, 1, S, S]`, and its backward pass computes the gradient of that bias too. Causal masks and
windows are numbers for the kernel, and need no array. A window together with a bias needs cuDNN
9.10.2 or later.

Symbols: `B` examples, `S` positions, `N` query heads, `K` key and value heads, `H` features of a
head.
"""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.layers.attention.blockwise_attention import ATTENDED
from manualpar.layers.attention.devices import Device

# Major compute capability of a GPU -> the most features of a head for which cuDNN has both passes,
# as the checks of its frontend say (`sdpa_support_surface.h`). Older GPUs run no kernel. Newer GPUs
# count as the last. (On Blackwell cuDNN 9.23 has a backward pass for 256 features, but JAX does not
# require this version.)
MOST_FEATURES = {8: 128, 9: 256, 10: 128}
FIRST, LAST = min(MOST_FEATURES), max(MOST_FEATURES)
MASKS = 2  # A bias from documents, and its gradient.


def cudnn_misfit(
    device: Device,
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    *,
    has_documents: bool,
) -> str | None:
    """Returns why the kernel cannot run on these arrays on a device, or `None`."""
    if device.platform != "gpu":
        return f"the devices are {device.platform or jax.default_backend()}s, no NVIDIA GPUs"
    if not device.compute_capability:
        return "this process has no NVIDIA GPU, but JAX needs one to trace the kernel"
    if device.major < FIRST:
        return (
            f"the compute capability of the GPU is {device.compute_capability!r}, not {FIRST}.0 or "
            "more"
        )
    dtypes = sorted({str(query.dtype), str(key.dtype)})
    if dtypes not in (["bfloat16"], ["float16"]):
        return f"the dtype is {' and '.join(dtypes)}, not bfloat16 or float16"
    most, size = MOST_FEATURES[min(device.major, LAST)], query.shape[-1]
    if size % 8 or size > most:
        return f"head_size is {size}, no multiple of 8 up to {most}"
    if query.shape[1] == 1:
        return "the length is 1, not 2 or more"
    if has_documents and query.shape[1] % 2:
        return f"the length is {query.shape[1]}, which with documents must be even"
    return None


def mask_bytes(query: jax.Array | jax.ShapeDtypeStruct, *, has_documents: bool) -> int:
    """Returns the bytes of the kernel's mask and of its gradient; 0 without documents.

    All heads share the mask. XLA keeps one mask for a loop over layers, and drops each gradient.
    """
    examples, length = query.shape[:2]
    return MASKS * examples * length**2 * query.dtype.itemsize if has_documents else 0


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
    attended = checkpoint_name(out, ATTENDED)

    def named(x: jax.Array) -> jax.Array:
        # With a name of its own, the residual `out` would be saved a second time. The other
        # residuals get no name, because the arguments exist anyway, and the mask is too large to
        # save.
        if x is out:
            return attended
        return checkpoint_name(x, ATTENDED) if x.ndim == 3 else x

    return attended, jax.tree.map(named, pullback)


def _attend_backward(window: int | None, pullback: Any, g: jax.Array) -> Any:
    del window
    return (*pullback(g), None)


_attend.defvjp(_attend_forward, _attend_backward)
