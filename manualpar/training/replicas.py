"""The replica sentinel checks that copies on several devices are the same, bit for bit.

If an array is not sharded over a mesh axis, the devices along that axis hold copies. The copies
differ if a device computes or stores wrongly, or if an update was not synchronised. Nothing else
finds the difference, because JAX reads such an array from only one of the devices. So each device
computes a fingerprint of its part, and the host compares the fingerprints of copies.

A device's part of an array is read as `uint32` words `w_i`; an element of up to 32 bits is one
word. Let `m` be the finaliser of MurmurHash3, which is a bijection, and `p_i = m(i)`. The
fingerprint of the part is two sums modulo 2**32:

    sum_i h_i  where  h_i = m(w_i ^ p_i),   and   sum_i m(h_i + p_i)

Invariants: the order of summation does not matter. Each sum is a bijection of any one word, so a
change of one word is always found; any other change escapes with a chance of about 2**-64.
Positions count modulo 2**32, so a swap of words that are a multiple of 16 GiB apart on a device is
not found.
"""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from manualpar.core.mesh.axes import axis_tuple
from manualpar.core.trees import path_name

MAX_DEVICES_NAMED = 8


class ReplicaError(RuntimeError):
    """Devices that should hold the same bits hold different bits."""


class ReplicaSentinel:
    """Compares the copies of a state on different devices.

    ```python
    sentinel = ReplicaSentinel(program.mesh, program.layout)
    state, metrics = program.train_step(state, batch)
    sentinel.check(state)  # Before the next step, which donates the state.
    ```

    The first check compiles, so keep the sentinel for all checks.
    """

    def __init__(self, mesh: Mesh, layout: Any) -> None:
        """Makes a sentinel for states on a mesh; nothing compiles yet.

        Args:
          layout: A tree like the states with a `PartitionSpec` at each leaf.
        """
        self._mesh = mesh
        self._names, specs = _named_leaves(layout)
        if not specs:
            raise ValueError("ReplicaSentinel: layout is empty. Pass one such as program.layout.")
        for name, spec in zip(self._names, specs, strict=True):
            if not isinstance(spec, PartitionSpec):
                raise TypeError(
                    f"ReplicaSentinel: layout has {spec!r} at {name!r}, expected a PartitionSpec. "
                    "Pass a layout such as program.layout."
                )
        self._shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
        self._devices = tuple(_devices_by_part(mesh, spec) for spec in specs)
        axes = tuple(mesh.axis_names)

        def fingerprints_on_device(leaves: tuple[jax.Array, ...]) -> jax.Array:
            # `shard_map` infers that the fingerprints of copies are equal. Because `out_specs` has
            # all mesh axes, it still returns the fingerprint of each device.
            return jnp.stack([_fingerprint(x) for x in leaves])[None]

        self._on_devices = jax.jit(
            jax.shard_map(
                fingerprints_on_device,
                mesh=mesh,
                in_specs=(specs,),
                out_specs=PartitionSpec(axes),
                check_vma=True,
            ),
            in_shardings=(self._shardings,),
        )

    def check(self, state: Any) -> None:
        """Checks that copies are the same, bit for bit, in every leaf; waits for the state.

        A part that only one device holds is not compared. Later steps can spread a difference to
        all leaves, through the gradients. So only a check soon after the fault can name the device.

        Args:
          state: A tree of global arrays in the sentinel's layout; not donated.

        Raises:
          ReplicaError: Copies differ. The message names the first leaf that differs and the
            devices. All processes raise the error.

        Communication:
          None in one process. Several processes all-gather 8 bytes per leaf and device.
        """
        fingerprints = self.fingerprints(state)
        found = []
        for leaf, devices in enumerate(self._devices):
            copies = fingerprints[devices, leaf]
            differ = (copies != copies[:, :1]).any(axis=(1, 2))
            if differ.any():
                found.append((leaf, devices[differ][0], copies[differ][0]))
        if found:
            leaf, devices, copies = found[0]
            raise ReplicaError(
                f"{self._names[leaf]!r} is not the same, bit for bit, on devices that hold copies "
                f"of it: {_who_differs(self._mesh, devices, copies)}. {len(found)} of "
                f"{len(self._names)} leaves differ. Do not save this state or train on from it: "
                "go back to a state that passed this check. If the same device is named again, "
                "leave the device out, because it computes or stores wrongly. If not, look for an "
                "update of this leaf that is not synchronised."
            )

    def fingerprints(self, state: Any) -> np.ndarray:
        """Computes the fingerprint of each device's part of each leaf; see `check`.

        Returns:
          `uint32[devices, leaves, 2]`, devices in the order of `mesh.devices.flat` and leaves in
          the order of the tree.
        """
        names, leaves = _named_leaves(state)
        if names != self._names:
            changed = sorted(set(names) ^ set(self._names))
            raise ValueError(
                f"ReplicaSentinel: the state and the layout are different trees: only one of them "
                f"has {changed[:MAX_DEVICES_NAMED]}. Build the sentinel from this state's layout."
            )
        for name, leaf, sharding in zip(names, leaves, self._shardings, strict=True):
            _check_leaf(name, leaf, sharding)
        result = self._on_devices(leaves)
        if result.is_fully_addressable:
            return np.asarray(result)
        return np.asarray(multihost_utils.process_allgather(result, tiled=True))


def _named_leaves(tree: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return tuple(path_name(path) for path, _ in flat), tuple(leaf for _, leaf in flat)


def _devices_by_part(mesh: Mesh, spec: PartitionSpec) -> np.ndarray:
    """Returns the positions in the mesh of the devices that hold each part: `[parts, copies]`."""
    sharded = {axis for entry in spec for axis in axis_tuple(entry)}
    dims = sorted(range(mesh.devices.ndim), key=lambda dim: mesh.axis_names[dim] not in sharded)
    positions = np.arange(mesh.size).reshape(mesh.devices.shape).transpose(dims)
    parts = math.prod(mesh.shape[axis] for axis in sharded)
    return positions.reshape(parts, -1)


def _who_differs(mesh: Mesh, devices: np.ndarray, copies: np.ndarray) -> str:
    """Names the devices whose copies differ from the majority, for an error message.

    `devices` are the positions in the mesh of the devices that hold `copies`.
    """
    values = [tuple(copy) for copy in copies.tolist()]
    (common, votes), (_, next_votes), *_ = Counter(values).most_common()

    def describe(chosen: np.ndarray) -> str:
        names = []
        for position in chosen[:MAX_DEVICES_NAMED]:
            indices = np.unravel_index(position, mesh.devices.shape)
            where = [f"{a}={i}" for a, i in zip(mesh.axis_names, indices, strict=True)]
            device = mesh.devices.flat[position]
            names.append(f"device {device.id} (process {device.process_index}, {', '.join(where)})")
        more = len(chosen) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")

    is_common = np.array([value == common for value in values])
    doubt = ", neither of them a majority" if votes == next_votes else ""
    return f"{describe(devices[~is_common])}, against {describe(devices[is_common])}{doubt}"


def _check_leaf(name: str, leaf: Any, sharding: NamedSharding) -> None:
    if not isinstance(leaf, jax.Array):
        got = f"a {type(leaf).__name__}"
    elif leaf.is_deleted():
        got = "donated to an earlier call: check the state that the call returned"
    elif not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        got = f"laid out as {leaf.sharding}"
    else:
        return
    raise ValueError(
        f"ReplicaSentinel: {name!r} of the state is {got}, expected an array laid out as "
        f"{sharding}. Pass a state as program.init or program.train_step returns it."
    )


def _fingerprint(x: jax.Array) -> jax.Array:
    """Computes the fingerprint `uint32[2]` of the array that a device holds."""
    words = _words(x)
    index = jnp.zeros(words.shape, jnp.uint32)
    for dim, size in enumerate(words.shape):
        index = index * np.uint32(size % 2**32)
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    position = _mix(index)
    first = _mix(words ^ position)
    # One reduction computes both sums in one pass, and stores no intermediate array of words.
    zero = np.uint32(0)
    sums = jax.lax.reduce(
        (first, _mix(first + position)),
        (zero, zero),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        tuple(range(words.ndim)),
    )
    return jnp.stack(sums)


def _words(x: jax.Array) -> jax.Array:
    """Returns an array's bits as `uint32`; adds a last dim if elements have several words."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype != jnp.bool_:
        bits = min(jax.dtypes.itemsize_bits(x.dtype), 32)
        x = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))
    return x.astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """Applies MurmurHash3's finaliser: every bit of the result depends on every bit of the word."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
