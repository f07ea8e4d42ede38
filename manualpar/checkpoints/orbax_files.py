"""A training state in a folder that Orbax writes and reads.

In the folder, `state` holds the arrays, `extra` what the caller adds, and `keys` the names of the
keys' implementations; see `plain_arrays`. Orbax alone, without this package, reads all three.
"""

import contextlib
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from manualpar.checkpoints.failures import CheckpointError
from manualpar.checkpoints.orbax_log import mute
from manualpar.checkpoints.plain_arrays import (
    find_differences,
    from_plain,
    nest,
    state_leaves,
    to_plain,
)
from manualpar.cluster.agreement import JSON
from manualpar.core.program import Program
from manualpar.train_state import TrainState
from manualpar.untrusted import NotAFileError, parse_object, read_file, read_object

# An array is stored in chunks of at most this size, and a read takes whole chunks: small enough
# that a device of another mesh reads little besides its own part, large enough for one read.
CHUNK_BYTES = 1 << 20


def read_extra(path: Path) -> dict[str, JSON]:
    """What the caller added to the checkpoint in a folder, without Orbax and without a checksum.

    Raises:
      ValueError: It is not a JSON object.
      OSError: It can't be read.
    """
    for folder in (path, path / "extra"):
        if folder.is_symlink():
            raise NotAFileError(f"{folder} is a link, expected a folder")
    return parse_object(read_file(path / "extra" / "metadata"), allow_nan=True)


class OrbaxFiles:
    """Writes in the background and reads; raises whatever Orbax and tensorstore raise."""

    def __init__(self) -> None:
        self._made: Any = None
        self._muted = contextlib.ExitStack()

    def save(
        self, path: Path, program: Program, state: TrainState, *, extra: Mapping[str, JSON]
    ) -> None:
        """Starts to write a folder, which must not exist; returns once the arrays are copied."""
        import orbax.checkpoint as ocp

        leaves = state_leaves(program)
        arrays, keys = to_plain(leaves, state)
        pieces = nest(leaves, lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES))
        content = ocp.args.Composite(
            state=ocp.args.PyTreeSave(arrays, save_args=pieces),
            extra=ocp.args.JsonSave(extra),
            keys=ocp.args.JsonSave(keys),
        )
        self._checkpointer().save(path, args=content)

    def wait(self) -> None:
        """Waits until every process has written its part."""
        self._checkpointer().wait_until_finished()

    def read(self, path: Path, program: Program) -> tuple[TrainState, dict[str, JSON]]:
        """Reads the state and what the caller added; each device reads its own part of the arrays.

        Raises:
          CheckpointError: The arrays are not those of the program; none has been read.
        """
        import orbax.checkpoint as ocp

        # Otherwise the names of arrays would be names of files, and could lead out of the folder.
        if read_object(path / "state" / "_METADATA").get("use_ocdbt") is not True:
            raise ValueError(
                "its arrays are not in an OCDBT database, which is what is written here"
            )
        leaves = state_leaves(program)
        reader = self._checkpointer()
        both = ocp.args.Composite(extra=ocp.args.JsonRestore(), keys=ocp.args.JsonRestore())
        texts = reader.restore(path, args=both)
        stored = reader.metadata(path).item_metadata["state"].tree
        if differences := find_differences(leaves, stored, texts["keys"]):
            raise CheckpointError(
                f"checkpoint {path} is of another model: {'; '.join(differences)}. Choose another "
                "workdir, or the config that it was saved with."
            )
        if not isinstance(texts["extra"], dict):
            raise ValueError("extra is not a JSON object")
        targets = nest(
            leaves,
            lambda leaf: ocp.ArrayRestoreArgs(
                restore_type=jax.Array,
                sharding=leaf.abstract.sharding,
                global_shape=leaf.held_shape,
                # If not strict, Orbax appends zeros, which is what padding is.
                strict=not any(leaf.padding),
            ),
        )
        wanted = ocp.args.PyTreeRestore(item=nest(leaves, lambda _: 0), restore_args=targets)
        arrays = reader.restore(path, args=ocp.args.Composite(state=wanted))["state"]
        return from_plain(program, leaves, arrays, texts["keys"]), texts["extra"]

    def close(self) -> None:
        """Waits, and ends Orbax's threads."""
        if self._made is not None:
            try:
                self._made.close()
            finally:
                self._made = None
                gc.collect()  # Failed writes leave objects that report when they are collected.
                self._muted.close()

    def _checkpointer(self) -> Any:
        """Orbax's, made when first needed: importing it takes half a second."""
        if self._made is None:
            import orbax.checkpoint as ocp

            self._muted.enter_context(mute())
            self._made = ocp.AsyncCheckpointer(
                ocp.CompositeCheckpointHandler(
                    state=ocp.PyTreeCheckpointHandler(),
                    extra=ocp.JsonCheckpointHandler(),
                    keys=ocp.JsonCheckpointHandler(),
                ),
                # So a folder that can't be made is an error here and now, not after a time-out.
                async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
            )
        return self._made
