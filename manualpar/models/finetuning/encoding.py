"""Quantizes loaded kernels to codes and scales, on the devices, one kernel at a time.

A kernel is loaded as a sharded float32 array. Each device quantizes its shard, so that no device
and no host stores more of the kernel than its shards. A shard of the codes may end in the middle of
a block. Such a kernel is loaded with another sharding, in which every shard contains complete
blocks, and the devices exchange the codes afterwards.

Invariants: padding consists of zeros, and the codes of zeros are zeros. So padding need not be
removed before an array is quantized.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manualpar.core.mesh.axes import axes_size, axis_tuple, with_axis_types
from manualpar.core.mesh.mesh_context import no_mesh, on_auto_axes
from manualpar.core.state.state_arrays import Leaf
from manualpar.models.finetuning.stored_codes import decode, encode, plain_shape


class Encoding(NamedTuple):
    """A parameter that is stored as codes: its leaves before and after quantization.

    Attributes:
      plain: The parameter before quantization, in float32. It is sharded so that each device has
        complete blocks.
      codes: The parameter's codes, as the program stores them.
      scales: The scales of the blocks, as the program stores them.
    """

    plain: Leaf
    codes: Leaf
    scales: Leaf

    @classmethod
    def of(cls, name: str, codes: Leaf, scales: Leaf) -> "Encoding":
        """Makes the `Encoding` of the parameter `name` from the leaves of its codes and scales."""
        dtype = jnp.promote_types(scales.dtype, jnp.float32)
        layout: Any = codes.abstract.sharding
        shape = _plain(codes, codes.shape)
        held, sharding = _whole_blocks(
            shape, _plain(codes, codes.padded_shape), layout, _block(codes, scales)
        )
        abstract = jax.ShapeDtypeStruct(held, dtype, sharding=sharding)
        keys = name.partition("/")[0], *codes.keys[1:-1], name.rpartition("/")[2]
        return cls(Leaf(name, keys, abstract, shape, held, dtype), codes, scales)

    @property
    def padding(self) -> tuple[int, ...]:
        """The padding of the result of `decode`."""
        own, held = (_plain(self.codes, x) for x in (self.codes.shape, self.codes.padded_shape))
        return tuple(b - a for a, b in zip(own, held, strict=True))

    def encode(self, x: jax.Array) -> dict[str, jax.Array]:
        """Quantizes the parameter `x`, which is donated; returns codes and scales by name.

        Communication:
          None for most parameters. Codes are sent if their shards end within blocks. Scales are
          sent if scales and codes are sharded differently.
        """
        with no_mesh():
            made = _encoder(*self._types, _block(self.codes, self.scales))(x)
        return dict(zip((self.codes.name, self.scales.name), made, strict=True))

    def decode(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """Dequantizes the parameter; the result has the sharding and the padding of the codes.

        Communication:
          The communication of `encode`, in the other direction.
        """
        with no_mesh():
            return _decoder(*self._types, _block(self.codes, self.scales))(codes, scales)

    @property
    def _types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self.plain.abstract, self.codes.abstract, self.scales.abstract


def _block(codes: Leaf, scales: Leaf) -> int:
    return -(-_plain(codes, codes.shape)[-1] // scales.shape[-1])


def _plain(codes: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    return plain_shape(jax.ShapeDtypeStruct(shape, codes.dtype))


def _whole_blocks(
    shape: tuple[int, ...], held: tuple[int, ...], sharding: NamedSharding, block: int
) -> tuple[tuple[int, ...], NamedSharding]:
    """Returns a padded shape and a sharding in which no shard ends within a block."""
    axes = [*map(axis_tuple, sharding.spec), *[()] * (len(shape) - len(sharding.spec))]
    parts = axes_size(sharding.mesh, axes[-1])
    if parts == 1 or held[-1] // parts % block == 0:
        return held, sharding
    # The axes that would split blocks of the last dim shard the largest other dim instead.
    sizes = list(held[:-1])
    dim = sizes.index(max(sizes))
    axes[dim], axes[-1] = (*axes[dim], *axes[-1]), ()
    sizes[dim] = _round_up(shape[dim], axes_size(sharding.mesh, axes[dim]))
    return (*sizes, shape[-1]), NamedSharding(
        sharding.mesh, PartitionSpec(*(names or None for names in axes))
    )


def _round_up(size: int, parts: int) -> int:
    return math.ceil(size / parts) * parts


@functools.lru_cache
def _encoder(plain: Any, codes: Any, scales: Any, block: int) -> Callable[[jax.Array], Any]:
    """Makes the compiled function that quantizes parameters of these shapes and shardings."""

    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = encode(x, block, "int8" if codes.dtype == jnp.int8 else "nf4")
        return _resize(made[0], codes.shape), _resize(made[1].astype(scales.dtype), scales.shape)

    return _jit(run, (codes.sharding, scales.sharding))


@functools.lru_cache
def _decoder(plain: Any, codes: Any, scales: Any, block: int) -> Callable[..., jax.Array]:
    # Inside `run` all mesh axes are of type `Auto`, even if they have other types in the program.
    mesh = with_axis_types(plain.sharding.mesh, AxisType.Auto)
    sharding = NamedSharding(mesh, plain.sharding.spec)

    def run(of_codes: jax.Array, of_scales: jax.Array) -> jax.Array:
        factor = _plain(codes, (1,))[0]
        of_codes = _resize(of_codes, (*plain.shape[:-1], plain.shape[-1] // factor))
        of_codes = jax.lax.with_sharding_constraint(of_codes, sharding)
        count = -(-plain.shape[-1] // block)
        of_scales = _resize(of_scales, (*plain.shape[:-1], count))
        return _resize(decode(of_codes, of_scales), _plain(codes, codes.shape))

    return _jit(run, codes.sharding)


def _jit(run: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
    mesh = jax.tree.leaves(shardings)[0].mesh
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    return jax.jit(on_auto_axes(run, mesh=mesh, out_specs=specs), out_shardings=shardings)


def _resize(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Brings an array to a shape: cuts off the end of longer dims, pads shorter dims with zeros."""
    pairs = list(zip(x.shape, shape, strict=True))
    x = x[tuple(slice(min(own, size)) for own, size in pairs)]
    return jnp.pad(x, [(0, max(size - own, 0)) for own, size in pairs])
