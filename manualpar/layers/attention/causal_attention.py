"""Causal attention within documents: one function, and the choice of its implementation.

- `"splash"`: jax's kernel for TPUs, see `splash_attention`.
- `"cudnn"`: NVIDIA's kernel, for dtypes of 16 bits, without `soft_cap`, see `cudnn_attention`. With
  documents it stores a mask `[B, 1, S, S]`.
- `"triton"`: a kernel of this package for NVIDIA GPUs, for dtypes of 16 bits, see
  `triton_attention`. It stores no mask. It has been compiled for A100, H100, H200 and B200, and
  compared with other kinds step by step on CPUs, but not yet timed on a GPU.
- `"blockwise"`: plain JAX, one pair of blocks after the other, see `chunked_attention`. It runs
  everywhere. On CPUs it is faster than `"xla"` at every length, and takes less memory.
- `"xla"`: XLA stores the scores `[B, N, S, S]` in memory, and a mask of this size if there are
  documents.

`""` chooses the best kind for the devices for which a program is traced (`best_kind`): splash on
TPUs; on NVIDIA GPUs triton with documents or a soft cap, otherwise cuDNN, each where it can run;
otherwise blockwise. The enclosing mesh gives these devices. A `kind` other than `""` is the way
back to cuDNN's mask, or to blocks. (`jax.lax.platform_dependent` would trace all kinds. Then counts
of operations, plans and checks would include branches that do not run.)

Symbols: `B` examples, `S` positions, `N` query heads, `K` key and value heads, `H` features of a
head.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from manualpar.core.mesh.axes import axes_size, axis_tuple
from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.layers.attention.blockwise_attention import ATTENDED, Scoring
from manualpar.layers.attention.chunked_attention import attend_in_blocks
from manualpar.layers.attention.splash_attention import (
    batch_and_head_axes,
    splash_attention,
    splash_misfit,
)
from manualpar.layers.attention.triton_attention import (
    add_sinks,
    gradient_of_sinks,
    product_with_gradient,
    triton_attention,
    triton_misfit,
)
from manualpar.layers.boundaries import has_tpu_kernels, platform_traced_for

# -------------------------------------------------------------------------------------------------
# The device that attention is traced for, as the choice of an implementation sees it.


# The memory of a GPU whose allocator names no limit: the smallest GPUs for servers, from Ampere on.
ASSUMED_MEMORY = 16 * 2**30


class Device(NamedTuple):
    """The properties of a device from which an implementation of attention is chosen.

    Attributes:
      platform: JAX's name, such as `"tpu"` or `"gpu"`; `""` if no device is known.
      compute_capability: An NVIDIA GPU's, such as `"9.0"`; `""` for others.
      memory_bytes: The bytes that programs can use on an NVIDIA GPU; 0 for others.
    """

    platform: str
    compute_capability: str = ""
    memory_bytes: int = 0

    @property
    def major(self) -> int:
        """The major number of the compute capability; 0 if the device is no NVIDIA GPU."""
        major = self.compute_capability.partition(".")[0]
        return int(major) if major.isdecimal() else 0


_planned: contextvars.ContextVar[Device | None] = contextvars.ContextVar("_planned", default=None)


def device_traced_for() -> Device:
    """Returns the device for which the code is traced.

    Inside `planned_device` it is the planned device. Otherwise its platform is that of the
    enclosing mesh, and a GPU's numbers are those of this process's first GPU. A TPU that a plan
    names (`has_tpu_kernels`) is no known device.
    """
    if planned := _planned.get():
        return planned
    platform = platform_traced_for()
    if platform == "tpu" and not has_tpu_kernels():
        return Device("")
    if platform not in ("gpu", None) or jax.default_backend() != "gpu":
        return Device(platform or "")
    gpu = jax.local_devices()[0]
    memory = (gpu.memory_stats() or {}).get("bytes_limit", ASSUMED_MEMORY)
    return Device("gpu", str(getattr(gpu, "compute_capability", "")), memory)


@contextlib.contextmanager
def planned_device(device: Device) -> Iterator[None]:
    """Chooses attention for a device that this process need not have.

    JAX itself still asks for the GPU and the cuDNN of this process before it traces cuDNN's kernel,
    see `manualpar.plans.compiler_worker`.
    """
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)


# -------------------------------------------------------------------------------------------------
# Attention on NVIDIA GPUs by cuDNN's kernel, which JAX calls.
#
# The forward pass returns the result and the logarithm of each query's sum of weights, `[B, N,
# S]`. The backward pass reads both arrays. JAX does not name them, so a rematerialisation policy
# could not save them, and a rematerialised layer would run the forward kernel again. This module
# gives both arrays a name.
#
# JAX's public function takes no document numbers. It turns a mask of documents into a bias `[B, 1,
# S, S]`, and its backward pass computes the gradient of that bias too. Causal masks and windows
# are numbers for the kernel, and need no array. A window together with a bias needs cuDNN 9.10.2
# or later.
#
# Symbols: `B` examples, `S` positions, `N` query heads, `K` key and value heads, `H` features of a
# head.


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
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attends causally within documents.

    Args:
      query: `[B, S, N, H]`, in 16 bits.
      key: `[B, S, K, H]`, of the dtype of `query`. `K` divides `N`.
      value: `[B, S, K, H]`, of the dtype of `query`.
      documents: `int32[B, S]`, or `None` if each sequence is one document.
      window: How many positions a query sees, including the query's position; `None` for all.
      sinks: `float32[N]`, see `attention`; `None` for none.

    Returns:
      `[B, S, N, H]`.

    Communication:
      None.

    Gradient:
      The kernel has its own backward pass. The result and the logarithms of the sums of weights
      have the checkpoint name `ATTENDED`. With a policy that saves the name, the forward kernel
      does not run again.
    """
    arrays = (query, key, value, documents, sinks)
    out: jax.Array = _attend(*cast_to_varying(arrays, varying_axes(arrays)), window)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    sinks: jax.Array | None,
    window: int | None,
) -> jax.Array:
    if sinks is not None:
        return _attend_forward(query, key, value, documents, sinks, window)[0]
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
    sinks: jax.Array | None,
    window: int | None,
) -> tuple[jax.Array, Any]:
    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return dot_product_attention(query, key, value, documents, window, "cudnn")

    out, pullback = jax.vjp(attend, query, key, value)
    attended, of_sinks = out, None
    if sinks is not None:
        kept = [x for x in jax.tree.leaves(pullback) if x is out or x.ndim == 3]
        if sorted(x.ndim for x in kept) != [3, out.ndim]:
            raise ValueError(  # Otherwise the gradient would use the softmax without sinks.
                f"attention: JAX's gradient of cuDNN's attention keeps {len(kept)} arrays that may "
                "be the result and the logarithms of its sums, expected these two, because sinks "
                "replace them. Take attention='blockwise', or another version of JAX."
            )
        (log_weights,) = (x for x in kept if x.ndim == 3)
        attended, log_weights = add_sinks(out, log_weights, sinks)
        log_weights = checkpoint_name(log_weights, ATTENDED)
    attended = checkpoint_name(attended, ATTENDED)

    def named(x: jax.Array) -> jax.Array:
        # With a name of its own, the residual `out` would be saved a second time. The other
        # residuals get no name, because the arguments exist anyway, and the mask is too large to
        # save.
        if x is out:
            return attended
        if x.ndim != 3:
            return x
        return checkpoint_name(x, ATTENDED) if sinks is None else log_weights

    if sinks is not None:
        of_sinks = sinks, attended, log_weights
    return attended, (jax.tree.map(named, pullback), of_sinks)


def _attend_backward(window: int | None, residuals: Any, g: jax.Array) -> Any:
    del window
    pullback, of_sinks = residuals
    if of_sinks is None:
        return (*pullback(g), None, None)
    sinks, out, log_weights = of_sinks
    grad = gradient_of_sinks(sinks, log_weights, product_with_gradient(out, g))
    return (*pullback(g), None, grad)


_attend.defvjp(_attend_forward, _attend_backward)


# -------------------------------------------------------------------------------------------------


AttentionKind = Literal["", "splash", "cudnn", "triton", "blockwise", "xla"]
WITH_SINKS = ("", "cudnn", "triton", "blockwise")
ATTENTION_KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)

# The share of a GPU's memory that the mask of documents and its gradient may take. Parameters,
# optimizer state and activations need the rest.
MASK_SHARE = 1 / 8


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None = None,
    *,
    kind: AttentionKind = "",
    window: int | None = None,
    soft_cap: float | None = None,
    chunk: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attends causally within documents.

    Args:
      query: `[B, S, N, H]`, floating.
      key: `[B, S, K, H]`, where `K` divides `N`: groups of `N / K` query heads share a key head.
      value: `[B, S, K, H]`, of the dtype of `key`.
      documents: `int32[B, S]`, the document number of each position, in any order. A query sees
        only keys with the query's number. `None` if each sequence is one document.
      kind: The implementation; `""` for the best on the devices that the program is traced for.
      window: How many positions a query sees, including the query's position; `None` for all.
      soft_cap: Bounds scores: a score becomes `soft_cap * tanh(score / soft_cap)`; `None` for no
        bound.
      chunk: The length of the chunks into which sequences are divided from their beginning. A query
        sees only keys of its own chunk; `None` for no chunks.
      sinks: `float32[N]`, the score of each head's *sink*: a key that every query sees, and whose
        value is 0, so that the weights of the other keys sum to less than 1; `None` for none. The
        kinds of `WITH_SINKS` have sinks.

    Returns:
      `[B, S, N, H]`.

    Raises:
      ValueError: Shapes do not fit, an option is out of range, or the kind cannot run.

    Communication:
      None.
    """
    check_attention(query, key, value, documents, scoring := Scoring(window, soft_cap, chunk))
    if kind not in ATTENTION_KINDS:
        known = ", ".join(map(repr, ATTENTION_KINDS))
        raise ValueError(f"attention: kind is {kind!r}, expected one of {known}.")
    if chunk is not None and chunk < query.shape[1]:
        options: Any = {"kind": kind, "window": window, "soft_cap": soft_cap, "sinks": sinks}
        return _attend_to_chunks(query, key, value, documents, chunk, options)
    misfit = _misfit(kind, query, key, documents, scoring) if kind else None
    if kind not in WITH_SINKS and sinks is not None:
        misfit = f"the heads have sinks, but only {', '.join(WITH_SINKS[1:])} have them"
    if misfit is not None:
        raise ValueError(
            f"attention: kind (of models config.model.attention) is {kind!r}, and {misfit}; "
            "expected a kind that can run here. Take '' for the best kind that can."
        )
    kind = kind or _best(query, key, documents, scoring)
    if kind == "splash" and sinks is None:
        return splash_attention(query, key, value, documents, window=window, soft_cap=soft_cap)
    if kind in ("blockwise", "splash"):
        return attend_in_blocks(query, key, value, documents, scoring, sinks)
    if kind == "cudnn":
        return cudnn_attention(query, key, value, documents, window=window, sinks=sinks)
    if kind == "triton":
        return triton_attention(
            query, key, value, documents, window=window, soft_cap=soft_cap, sinks=sinks
        )
    return dot_product_attention(query, key, value, documents, window, "xla")


def _attend_to_chunks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    chunk: int,
    options: Mapping[str, Any],
) -> jax.Array:
    """Attends within chunks: each chunk is a sequence of its own, and so is the rest at the end."""
    B, S = query.shape[:2]
    end, parts = S // chunk * chunk, []
    for start, stop in ((0, end), (end, S)):
        if start == stop:
            continue

        def cut(x: jax.Array, start: int = start, stop: int = stop) -> jax.Array:
            size = min(chunk, stop - start)
            x = x[:, start:stop].reshape(B, -1, size, *x.shape[2:])
            return x.reshape(-1, *x.shape[2:])

        of_documents = None if documents is None else cut(documents)
        out = attention(cut(query), cut(key), cut(value), of_documents, **options)
        # In mode `explicit` the examples may be sharded, and so are the chunks then.
        spec = jax.typeof(out).sharding.spec
        by_examples = PartitionSpec(spec[0], None, *spec[1:]) if any(spec) else None
        out = jnp.reshape(out, (B, -1, *out.shape[1:]), out_sharding=by_examples)
        parts.append(out.reshape(B, stop - start, *out.shape[3:]))
    return jnp.concatenate(parts, axis=1)


def check_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    scoring: Scoring,
) -> None:
    """Refuses arguments that no kind of attention can compute."""

    def shown(x: jax.Array) -> str:
        return f"{x.dtype}{list(x.shape)}"

    if key.shape != value.shape or key.dtype != value.dtype:
        raise ValueError(
            f"attention: key is {shown(key)} and value {shown(value)}, expected the same shape and "
            "dtype."
        )
    B, S, N, H = query.shape
    if key.shape != (B, S, key.shape[2], H) or N % key.shape[2]:
        raise ValueError(
            f"attention: query is {shown(query)} and key {shown(key)}, expected the same examples, "
            "positions and features in both. The number of query heads must be a multiple of the "
            "number of key heads, because groups of equal size share a key head."
        )
    if documents is not None and documents.shape != (B, S):
        raise ValueError(
            f"attention: documents are {shown(documents)}, expected the number of each position's "
            f"document, int32{[B, S]}."
        )
    if scoring.window is not None and scoring.window < 1:
        raise ValueError(
            f"attention: window is {scoring.window}, expected at least 1, or None for all."
        )
    if scoring.chunk is not None and scoring.chunk < 1:
        raise ValueError(
            f"attention: chunk is {scoring.chunk}, expected at least 1, or None for no chunks."
        )
    if scoring.soft_cap is not None and not scoring.soft_cap > 0:
        raise ValueError(
            f"attention: soft_cap is {scoring.soft_cap}, expected more than 0, or None for none."
        )


def best_kind(
    device: Device,
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    scoring: Scoring,
    *,
    has_documents: bool,
    has_pallas: bool = True,
) -> AttentionKind:
    """Chooses the best kind for a device, which need not be a device of this process.

    - Splash on TPUs, if it has the dtype.
    - Triton on GPUs, if it can run (`triton_misfit`), and there are documents or a soft cap, or
      cuDNN cannot run. cuDNN with documents took 2.3 times the time of a causal mask on an H200.
    - cuDNN on GPUs, if there is no soft cap, the kernel can run (`cudnn_misfit`), and the mask
      fits. Causal masks and windows take no memory. Documents need an array `[B, 1, S, S]`, and the
      backward pass its gradient. All heads and layers share the two arrays. So they are compared
      with the device's memory (`MASK_SHARE`), and not with the queries, which are few if heads are
      split. While the arrays fit, the kernel is faster than blocks in plain JAX.
    - Blockwise otherwise.

    Args:
      device: The platform, the memory and the features of the device, as `planned_device` names it.
      query: `[B, S, N, H]`, with the device's own examples and heads; only the shape and the dtype
        are read.
      key: `[B, S, K, H]`, likewise.
      scoring: How scores are bounded, and which positions a query sees.
      has_documents: Whether a query sees only keys of its own document.
      has_pallas: Whether Pallas kernels, splash and triton, can run in the program.
    """
    if has_pallas and device.platform == "tpu" and splash_misfit(query, key) is None:
        return "splash"
    if device.platform != "gpu" or query.shape[1] == 1:
        return "blockwise"
    can_run = scoring.soft_cap is None and not cudnn_misfit(
        device, query, key, has_documents=has_documents
    )
    if has_pallas and (has_documents or not can_run):
        misfit = triton_misfit(device.compute_capability, query, key)
        if misfit is None:
            return "triton"
    mask = mask_bytes(query, has_documents=has_documents)
    return "cudnn" if can_run and mask <= MASK_SHARE * device.memory_bytes else "blockwise"


def _best(
    query: jax.Array, key: jax.Array, documents: jax.Array | None, scoring: Scoring
) -> AttentionKind:
    """Chooses the best kind for the devices of the program."""
    device, mesh = device_traced_for(), jax.sharding.get_abstract_mesh()
    own: jax.Array | jax.ShapeDtypeStruct = query
    if device.platform == "gpu" and {*mesh.auto_axes, *mesh.explicit_axes}:
        axes, _ = batch_and_head_axes(mesh, query, key)  # The arrays are global.
        examples = query.shape[0] // axes_size(mesh, axis_tuple(axes))
        own = jax.ShapeDtypeStruct((examples, *query.shape[1:]), query.dtype)
    # Without a mesh XLA may partition a program over several devices, but cannot partition a Pallas
    # kernel.
    has_pallas = not (mesh.empty and jax.device_count() > 1)
    has_documents = documents is not None
    return best_kind(device, own, key, scoring, has_documents=has_documents, has_pallas=has_pallas)


def _misfit(
    kind: AttentionKind,
    query: jax.Array,
    key: jax.Array,
    documents: jax.Array | None,
    scoring: Scoring,
) -> str | None:
    """Returns why a kind cannot run, or `None`."""
    device = device_traced_for()
    if kind == "splash":
        if device.platform not in ("tpu", ""):
            return f"the devices are {device.platform}s, and no TPUs"
        return splash_misfit(query, key)
    if kind == "triton":
        if device.platform not in ("gpu", ""):
            return f"the devices are {device.platform}s, and no NVIDIA GPUs"
        return triton_misfit(device.compute_capability, query, key)
    if kind in ("cudnn", "xla") and scoring.soft_cap is not None:
        return f"soft_cap is {scoring.soft_cap}, but this kind has no soft cap"
    if kind == "cudnn":
        return cudnn_misfit(device, query, key, has_documents=documents is not None)
    return None
