"""Stores a training state as plain arrays, in a folder that Orbax writes and reads.

A checkpoint must stay readable when the program that wrote it has changed. So it stores a nested
dict with an array at each leaf, such as `params/layers/attention/query/kernel`,
`opt_state/0/mu/...`, `step` and `rng`. It stores no optax classes, padding or typed random keys.
Every array has the shape that it has on one device, so any strategy on any mesh can read it.

In the folder, `state` contains the arrays, `extra` contains the caller's JSON, and `keys` names the
implementation of each random key. The data of a random key is one of the arrays. Orbax can read all
three without this package. Arrays without elements are not stored, because Orbax refuses them.
"""

import contextlib
import errno
import functools
import logging
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging as absl_logging
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from manualpar.core.mesh.mesh_context import no_mesh, with_auto_axes
from manualpar.core.parameters.sharded_parameter import unpad_leaf
from manualpar.core.program.program import Program
from manualpar.core.program.state_arrays import Leaf, leaves_of, place_leaf
from manualpar.core.state.train_state import TrainState
from manualpar.core.summary import show_array
from manualpar.errors import list_some
from manualpar.system.cluster.agreement import JSON
from manualpar.system.cluster.failure_detector import causes
from manualpar.system.storage import AnyPath, BucketError, BucketPath
from manualpar.system.storage.untrusted import NotAFileError, parse_object, read_file, read_object

# The largest chunk of a stored array. A read always reads complete chunks. Chunks of this size are
# so small that a device of another mesh reads little more than its shard, and large enough to be
# read fast.
CHUNK_BYTES = 1 << 20


def read_extra(path: AnyPath) -> dict[str, JSON]:
    """Reads the caller's `extra` from a checkpoint's folder; does not verify checksums.

    Raises:
      OSError: The file can't be read.
    """
    if isinstance(path, BucketPath):
        return parse_object((path / "extra" / "metadata").read_bytes(), allow_nan=True)
    for folder in (path, path / "extra"):
        if folder.is_symlink():
            raise NotAFileError(f"{folder} is a link, expected a folder")
    return parse_object(read_file(path / "extra" / "metadata"), allow_nan=True)


class OrbaxFiles:
    """Writes checkpoints in the background and reads them, with Orbax, whose errors it raises."""

    def __init__(self, seconds: float) -> None:
        """Stores the limit of a save in seconds; a save that takes longer to write fails."""
        self._seconds = seconds
        self._made: Any = None
        self._muted = contextlib.ExitStack()
        self._has_failed = False

    def save(
        self, path: Path, program: Program, state: TrainState, *, extra: Mapping[str, JSON]
    ) -> None:
        """Starts to write a state to a new folder; returns once the arrays are on the host.

        The folder must not exist yet.

        Communication:
          One all-gather for each padded array, one array at a time. Without its padding, such an
          array can't be sharded evenly, so process 0 writes the complete array. For a moment each
          device stores one such array without sharding, as in every training step.
        """
        import orbax.checkpoint as ocp

        arrays, keys = stored_arrays(program, state)
        leaves = [leaf for leaf in state_leaves(program) if leaf.keys in arrays]
        chunks = nest(leaves, lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES))
        content = ocp.args.Composite(
            state=ocp.args.PyTreeSave(unflatten_dict(arrays), save_args=chunks),
            extra=ocp.args.JsonSave(extra),
            keys=ocp.args.JsonSave(keys),
        )
        with self._checkpointer() as orbax:
            orbax.save(path, args=content)

    def wait(self) -> None:
        """Waits until every process has written its part."""
        with self._checkpointer() as orbax:
            orbax.wait_until_finished()

    def read(
        self, path: Path, program: Program, *, report: Callable[[str], None]
    ) -> tuple[TrainState, dict[str, JSON]]:
        """Reads the state and the caller's `extra`; each device reads its own part of the arrays.

        Raises:
          CheckpointError: The arrays do not fit the program; no array has been read.
        """
        import orbax.checkpoint as ocp

        # Without OCDBT, an array's name is a file's path, which could point outside the folder.
        if read_object(path / "state" / "_METADATA").get("use_ocdbt") is not True:
            raise ValueError("its arrays are not in an OCDBT database, which manualpar writes")
        both = ocp.args.Composite(extra=ocp.args.JsonRestore(), keys=ocp.args.JsonRestore())
        with self._checkpointer() as orbax:
            texts = orbax.restore(path, args=both)
            stored = orbax.metadata(path).item_metadata["state"].tree
        keys = texts["keys"]
        stored_program = program.for_replicas_of(stored.get("local", {}))
        leaves = leaves_to_read(path, stored_program, stored, keys, report=report)
        if not isinstance(texts["extra"], dict):
            raise ValueError("extra is not a JSON object")
        targets = nest(
            leaves,
            lambda leaf: ocp.ArrayRestoreArgs(
                restore_type=jax.Array,
                sharding=leaf.abstract.sharding,
                global_shape=leaf.padded_shape,
                # With `strict=False`, Orbax appends zeros up to the padded shape.
                strict=not any(leaf.padding),
            ),
        )
        wanted = ocp.args.PyTreeRestore(
            item=nest(leaves, lambda _: 0), restore_args=targets, partial_restore=True
        )
        with self._checkpointer() as orbax:
            plain = orbax.restore(path, args=ocp.args.Composite(state=wanted))["state"]
        state = restored_state(stored_program, flatten_dict(plain), keys)
        return program.change_replicas(state), texts["extra"]

    def close(self) -> None:
        """Waits for the write in progress and ends Orbax's threads."""
        if self._made is not None:
            try:
                with self._checkpointer() as orbax:
                    orbax.close()
            finally:
                self._made = None
                # After a failure, other writes in progress may report errors later, so their
                # messages stay muted.
                if not self._has_failed:
                    self._muted.close()

    @contextlib.contextmanager
    def _checkpointer(self) -> Iterator[Any]:
        """Yields Orbax's checkpointer; makes it on first use, because its import takes 0.5 s."""
        if self._made is None:
            import orbax.checkpoint as ocp

            self._muted.enter_context(mute())
            # Folders are created before `save` returns, so an error is raised at once, not after a
            # time-out. If they were created in the background, writes would wait for a signal that
            # carries the number of the latest save of the process. Two threads that save at the
            # same time would take each other's signals, and write into folders that are not there.
            options = ocp.options.AsyncOptions(
                create_directories_asynchronously=False,
                timeout_secs=max(1, math.ceil(self._seconds)),
            )
            self._made = ocp.AsyncCheckpointer(
                ocp.CompositeCheckpointHandler(
                    state=ocp.PyTreeCheckpointHandler(),
                    extra=ocp.JsonCheckpointHandler(),
                    keys=ocp.JsonCheckpointHandler(),
                    composite_options=ocp.CompositeOptions(async_options=options),
                ),
                async_options=options,
            )
        try:
            yield self._made
        except BaseException:
            self._has_failed = True
            raise


def state_leaves(program: Program) -> list[Leaf]:
    """Returns the leaves of a program's state, in the order of the tree."""
    return leaves_of(program.abstract_state, program.unpadded_state)


def stored_arrays(
    program: Program, state: TrainState
) -> tuple[dict[tuple[str, ...], Any], dict[str, str]]:
    """Returns the arrays to store for a state, and the implementation of each random key.

    Arrays without elements are left out.

    Communication:
      One all-gather for each padded array, see `OrbaxFiles.save`.
    """
    arrays: dict[tuple[str, ...], Any] = {}
    keys: dict[str, str] = {}
    for leaf, x in zip(state_leaves(program), jax.tree.leaves(state), strict=True):
        if _is_empty(leaf):
            continue
        if leaf.is_key:
            keys[leaf.name] = str(jax.random.key_impl(x))
            x = jax.random.key_data(x)
        elif any(leaf.padding):
            x = _take_off_padding(leaf, x)
        arrays[leaf.keys] = x
    return arrays, keys


def restored_state(
    program: Program, arrays: Mapping[tuple[str, ...], Any], keys: Mapping[str, str]
) -> TrainState:
    """Makes a program's state from stored arrays.

    Residuals that are missing are set to zeros. Arrays without elements are made anew.
    """

    def value(leaf: Leaf) -> Any:
        if _is_empty(leaf):
            return jnp.zeros(
                leaf.abstract.shape, leaf.abstract.dtype, device=leaf.abstract.sharding
            )
        if leaf.keys not in arrays:
            return place_leaf("restore", leaf, np.zeros(leaf.shape, leaf.dtype))
        x = arrays[leaf.keys]
        return jax.random.wrap_key_data(x, impl=keys[leaf.name]) if leaf.is_key else x

    values = map(value, state_leaves(program))
    state: TrainState = jax.tree.unflatten(jax.tree.structure(program.abstract_state), values)
    return state


def leaves_to_read(
    path: AnyPath,
    program: Program,
    stored: Mapping[str, Any],
    keys: Mapping[str, str],
    *,
    report: Callable[[str], None],
) -> list[Leaf]:
    """Returns the leaves of a program's state to read: all of them, or all except the residuals.

    Leaves without elements are left out.

    Each residual of encoded gradients belongs to one device of the run that saved the checkpoint.
    If this program has other devices, or if the checkpoint has no residuals, the residuals begin
    with zeros, and `report` is called with a sentence about this.

    Raises:
      CheckpointError: The checkpoint is of another model, see `find_differences`.
    """
    leaves = [leaf for leaf in state_leaves(program) if not _is_empty(leaf)]
    own = {
        leaf.keys: show_array(leaf.dtype, leaf.shape) for leaf in leaves if _is_residual(leaf.keys)
    }
    arrays = {keys: x for keys, x in flatten_dict(stored).items() if 0 not in x.shape}
    stored = unflatten_dict(arrays)
    there = {keys: show_array(x.dtype, x.shape) for keys, x in arrays.items() if _is_residual(keys)}
    if own != there:
        leaves = [leaf for leaf in leaves if leaf.keys not in own]
        stored = unflatten_dict({keys: x for keys, x in arrays.items() if keys not in there})
        if own:
            report("Residuals of gradients begin with zeros: the checkpoint has none that fit.")
    if differences := find_differences(leaves, stored, keys):
        trained, before = (_matrices_of_muon(x) for x in ((x.keys for x in leaves), arrays))
        if trained and before and trained != before:
            raise CheckpointError(
                f"checkpoint {path} has the state of a Muon that trains other matrices. To go on "
                f"with them, set config.optimizer.matrices={tuple(sorted(before))}; releases "
                "before 0.4 took each array of two dims for a matrix. Or choose another workdir."
            )
        raise CheckpointError(
            f"checkpoint {path} is of another model: {'; '.join(differences)}. Choose another "
            "workdir, or the config of the run that saved the checkpoint."
        )
    return leaves


def _matrices_of_muon(arrays: Iterable[tuple[str, ...]]) -> set[str]:
    """Returns globs of the parameters for which the state of `optax.contrib.muon` has momentum."""
    globs = set()
    for keys in arrays:
        if {"muon", "mu"} <= {*keys} and "adam" not in keys:
            path = "/".join(keys[len(keys) - keys[::-1].index("mu") :])
            globs.add(re.sub(r"\d+", "*", path))  # One glob for all layers that are written out.
    return globs


def _is_empty(leaf: Leaf) -> bool:
    return 0 in leaf.shape


def _is_residual(keys: tuple[str, ...]) -> bool:
    return keys[:2] == ("local", "residuals")


def nest(leaves: list[Leaf], function: Callable[[Leaf], Any]) -> dict[str, Any]:
    """Applies a function to each leaf and nests the results by their keys."""
    nested: dict[str, Any] = unflatten_dict({leaf.keys: function(leaf) for leaf in leaves})
    return nested


def find_differences(
    leaves: list[Leaf], stored: Mapping[str, Any], keys: Mapping[str, str]
) -> list[str]:
    """Compares the stored arrays with a program's state, before any array is read.

    `stored` has a shape and a dtype at each leaf, and `keys` names each random key's
    implementation. Returns a line for each array that is missing or unexpected, or that has another
    shape or dtype.
    """
    found = {path: show_array(x.dtype, x.shape) for path, x in flatten_dict(stored).items()}
    lines = []
    for leaf in leaves:
        expected = show_array(leaf.dtype, leaf.shape)
        got = found.pop(leaf.keys, "missing")
        kind = keys.get(leaf.name)
        if got != expected:
            lines.append(f"{leaf.name} is {got}, expected {expected}")
        elif kind != _key_implementation(leaf):
            lines.append(f"{leaf.name} is {kind or 'no typed key'}, expected {leaf.abstract.dtype}")
    lines += [f"{'/'.join(path)} is {got}, expected no such array" for path, got in found.items()]
    return list_some(lines)


def _take_off_padding(leaf: Leaf, x: jax.Array) -> np.ndarray:
    """Gathers a padded array into the memory of process 0, and removes the padding."""
    unpadded = unpad_whole(x, leaf.padding, leaf.abstract.sharding.mesh)
    if jax.process_index() == 0:
        return np.array(unpadded.addressable_data(0))
    # Other processes write no part of this array and need only its shape. The result of
    # `broadcast_to` takes no memory.
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _key_implementation(leaf: Leaf) -> str | None:
    names: list[str] = []
    if leaf.is_key:
        jax.eval_shape(lambda key: names.append(str(jax.random.key_impl(key))), leaf.abstract)
    return names[0] if names else None


def unpad_whole(x: jax.Array, padding: tuple[int, ...], mesh: Mesh) -> jax.Array:
    """Removes a global array's padding and replicates the result on the mesh, in one all-gather.

    The result cannot stay sharded, because a dim's size does not divide by the number of shards.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    # `_take_off` is always the same function object, so JAX compiles it only once for each shape.
    with no_mesh():
        take_off = jax.jit(_take_off, static_argnums=(1, 2), out_shardings=replicated)
        unpadded: jax.Array = take_off(x, padding, mesh)
    return unpadded


def _take_off(x: jax.Array, padding: tuple[int, ...], mesh: Mesh) -> jax.Array:
    run = functools.partial(unpad_leaf, padding=padding)
    unpadded: jax.Array = with_auto_axes(run, mesh=mesh, out_specs=PartitionSpec())(x)
    return unpadded


# -------------------------------------------------------------------------------------------------
# Turns an error of saving or restoring into a sentence with the reason and the remedy.
#
# Orbax and tensorstore raise many types of errors: an `OSError`, a `ValueError` with the text of a
# C++ status, a bare `Exception`. This package turns them all into `CheckpointError`, except errors
# about wrong arguments.


MEANINGS: dict[int, str] = {
    errno.ENOSPC: "the disk is full: make room there, or choose another workdir",
    errno.EDQUOT: "the disk quota is used up: make room there, or choose another workdir",
    errno.EROFS: "the file system is read-only: choose a workdir that can be written to",
    errno.EACCES: "permission denied: choose a workdir that you may write to, or change its mode",
    errno.EPERM: "permission denied: choose a workdir that you may write to, or change its mode",
    errno.EFBIG: "a file is larger than allowed: raise the limit (`ulimit -f`), or choose another "
    "file system",
    errno.EMFILE: "too many files are open: raise the limit (`ulimit -n`)",
    errno.ENOTDIR: "a part of the path is a file, not a folder: choose another workdir",
    errno.EIO: "the disk reports an input/output error: it may be failing; choose another one",
}


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message gives the reason and the remedy."""


def explain_failure(error: BaseException) -> str:
    """Explains an error of the operating system; for another error, gives type and first line.

    The function searches the causes of the error and their texts too, because tensorstore names an
    error of the operating system only in a text.
    """
    for cause in causes(error):
        if isinstance(cause, BucketError):
            return str(cause)
        number = getattr(cause, "errno", None)
        if number in MEANINGS:
            return MEANINGS[number]
        for number, meaning in MEANINGS.items():
            if os.strerror(number) in str(cause):
                return meaning
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line.rstrip('.')}"


def cannot_write(path: AnyPath, error: BaseException) -> CheckpointError:
    """Makes the error to raise for a checkpoint that was not saved."""
    if any(isinstance(cause, TimeoutError) for cause in causes(error)):
        return CheckpointError(
            f"checkpoint {path} was not saved: it was not written in time; check that all "
            "processes can write there, or raise the limit for a slow disk: seconds= of "
            "Checkpoints, which in a run follows from config.watch.stall_seconds."
        )
    return CheckpointError(f"checkpoint {path} was not saved: {explain_failure(error)}.")


# -------------------------------------------------------------------------------------------------
# Keeps Orbax's messages off the screen.
#
# Orbax logs every phase of a save. When one write fails, asyncio also reports hundreds of other
# writes that no code awaits. A single `CheckpointError` tells the user all that is needed. To see
# Orbax's messages, set absl's verbosity to DEBUG (`absl.logging.set_verbosity(1)`).


# Held while the hook is replaced: the contexts of several threads may overlap in any order.
_HOOKING = threading.Lock()


def mute() -> contextlib.ExitStack:
    """Drops the messages of all of Orbax's threads until the returned context is closed.

    Keep the context open while Orbax may be working: its threads go on after its functions return.
    Python may report the errors of a failed call as late as the end of the process.
    """

    def let_through(record: logging.LogRecord) -> bool:
        by_orbax = "/orbax/checkpoint/" in record.pathname.replace("\\", "/")
        about_orbax = record.name == "asyncio" and "orbax" in record.getMessage()
        return _is_verbose() or not (by_orbax or about_orbax)

    hook = _Hook()

    def unhook() -> None:
        hook.has_ended = True
        with _HOOKING:
            # If other code has replaced the hook since, its hook stays. If another context has, it
            # removes this hook too when it ends.
            while isinstance(last := sys.unraisablehook, _Hook) and last.has_ended:
                sys.unraisablehook = last.before

    muted = contextlib.ExitStack()
    for logger in (logging.getLogger(name) for name in ("absl", "asyncio")):
        # Each call makes a new function, so that each context removes only its own filter.
        logger.addFilter(let_through)
        muted.callback(logger.removeFilter, let_through)
    with _HOOKING:
        hook.before, sys.unraisablehook = sys.unraisablehook, hook
    muted.callback(unhook)
    return muted


class _Hook:
    """A `sys.unraisablehook` that drops the errors of Orbax's threads."""

    before: Callable[[Any], Any]
    has_ended = False

    def __call__(self, unraisable: Any) -> None:
        """Passes other errors to the hook before this one."""
        is_late = str(unraisable.exc_value) == "Event loop is closed"
        # The coroutine of another read or write that was in progress when the first one failed.
        code = getattr(getattr(unraisable, "object", None), "cr_code", None)
        by_orbax = code is not None and "/orbax/checkpoint/" in code.co_filename
        if self.has_ended or _is_verbose() or not (is_late or by_orbax):
            self.before(unraisable)


def _is_verbose() -> bool:
    return absl_logging.get_verbosity() >= absl_logging.DEBUG
