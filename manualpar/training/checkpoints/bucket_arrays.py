"""Writes a training state to a bucket, in the files that Orbax would write, without Orbax.

Orbax writes only to local folders and `gs://`. It uses tensorstore, which has a driver for S3 too.
So this module calls tensorstore directly, for both kinds of bucket. `saved_state` defines the
stored content. If every object of a checkpoint is copied to a file, Orbax reads the copy as a local
checkpoint. A local checkpoint can be copied into a bucket in the same way.

Each process writes its own database: process 3 writes `state/ocdbt.process_3/`. When the database
is complete, process 3 writes `written.3.json`, with the size and the SHA-256 of each object of the
database. Process 0 waits until all processes have written these files. Then process 0 makes one
database that refers to the databases of all processes. Process 0 also writes the other JSON files.
"""

import concurrent.futures
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from manualpar.core.program.program import Program
from manualpar.core.program.state_arrays import Leaf
from manualpar.core.state.train_state import TrainState
from manualpar.system.cluster.agreement import JSON
from manualpar.system.storage import CONTEXT, BucketError, BucketPath, key_value_store, request
from manualpar.system.storage.untrusted import parse_object, write_file
from manualpar.training.checkpoints.saved_state import (
    CHUNK_BYTES,
    leaves_to_read,
    restored_state,
    stored_arrays,
)

# tensorstore joins chunks into objects of about this size. Hashing an object loads all of it into
# memory.
OBJECT_BYTES = 1 << 26
POLL_SECONDS = 0.2
# After writing its own part, process 0 waits at least this long for the other processes' parts.
WAIT_SECONDS = 3600.0
PARALLEL = 8
HANDLERS = {
    "extra": "json_checkpoint_handler.JsonCheckpointHandler",
    "keys": "json_checkpoint_handler.JsonCheckpointHandler",
    "state": "pytree_checkpoint_handler.PyTreeCheckpointHandler",
}
Files = dict[str, tuple[int, str]]  # Maps a path to the file's size and SHA-256.
# `Stored`: an array's shape, chunk shape, dtype, and the parts of it that this process writes.
ArrayPart = tuple[tuple[slice, ...], np.ndarray]
Stored = tuple[tuple[int, ...], tuple[int, ...], np.dtype, list[ArrayPart]]


class BucketArrays:
    """Writes checkpoints in the background and reads them; has the methods of `OrbaxFiles`."""

    def __init__(self) -> None:
        self._background = concurrent.futures.ThreadPoolExecutor(1, "bucket")
        self._writing: concurrent.futures.Future[None] | None = None

    def save(
        self, path: BucketPath, program: Program, state: TrainState, *, extra: Mapping[str, JSON]
    ) -> None:
        """Starts to write a state to an empty folder; returns once the arrays are on the host.

        Communication:
          One all-gather for each padded array, see `saved_state.stored_arrays`.
        """
        arrays, keys = stored_arrays(program, state)
        for x in arrays.values():
            if isinstance(x, jax.Array):
                x.copy_to_host_async()
        copies = {names: _copy(x) for names, x in arrays.items()}
        texts = {
            "_CHECKPOINT_METADATA": _checkpoint_metadata(),
            "state/_METADATA": _tree_metadata(copies),
            "extra/metadata": dict(extra),
            "keys/metadata": keys,
        }
        self._writing = self._background.submit(_write, path, copies, texts)

    def wait(self) -> None:
        """Waits until this process has written its part."""
        if self._writing is not None:
            self._writing.result()

    def read(
        self, path: BucketPath, program: Program, *, report: Callable[[str], None]
    ) -> tuple[TrainState, dict[str, JSON]]:
        """Reads the state and the caller's `extra`; each device reads its own part of the arrays.

        Raises:
          CheckpointError: The arrays do not fit the program; no array has been read.
        """
        tree = parse_object((path / "state" / "_METADATA").read_bytes())
        if tree.get("use_ocdbt") is not True or tree.get("use_zarr3"):
            raise ValueError("its arrays are not in an OCDBT database of zarr arrays")
        extra = parse_object((path / "extra" / "metadata").read_bytes(), allow_nan=True)
        keys = {
            k: str(v) for k, v in parse_object((path / "keys" / "metadata").read_bytes()).items()
        }
        names = [
            tuple(str(key["key"]) for key in entry["key_metadata"])
            for entry in tree["tree_metadata"].values()
        ]
        opened = request(path, lambda: _open_all(path, names))
        stored = unflatten_dict(opened)
        stored_program = program.for_replicas_of(stored.get("local", {}))
        leaves = leaves_to_read(path, stored_program, stored, keys, report=report)
        arrays = {leaf.keys: _read_leaf(path, leaf, opened[leaf.keys]) for leaf in leaves}
        return program.change_replicas(restored_state(stored_program, arrays, keys)), extra

    def close(self) -> None:
        """Waits for the write in progress and ends the thread."""
        self._background.shutdown()


def complete_checkpoint(path: BucketPath, *, processes: int, seconds: float) -> Files:
    """Waits for the parts of all processes and joins them to a checkpoint, without a manifest yet.

    Returns the checkpoint's files. Only process 0 calls this, after it has written its own part.
    """
    files: Files = {}
    until = time.monotonic() + seconds
    for process in range(processes):
        part = path / _part_name(process)
        while not part.is_file():
            if time.monotonic() > until:
                raise BucketError(
                    f"{path}: process {process} has not written its part in {seconds:.0f} s"
                )
            time.sleep(POLL_SECONDS)
        found = parse_object(part.read_bytes())
        files |= {name: (int(size), str(digest)) for name, (size, digest) in found.items()}
    before = set((path / "state").files())
    request(path, lambda: _merge(path, processes))
    new = (path / "state").files().keys() - before
    return files | hash_files(path, [f"state/{name}" for name in sorted(new)])


def delete_parts(path: BucketPath, *, processes: int) -> None:
    """Deletes the files `written.<process>.json`, because the manifest now has their content."""
    for process in range(processes):
        (path / _part_name(process)).delete()


def hash_files(path: BucketPath, names: list[str]) -> Files:
    """Returns the size and SHA-256 of objects in the bucket; (-1, '') for a missing object."""

    def hash_one(name: str) -> tuple[int, str]:
        try:
            data = (path / name).read_bytes()
        except FileNotFoundError:
            return -1, ""
        return len(data), hashlib.sha256(data).hexdigest()

    with concurrent.futures.ThreadPoolExecutor(PARALLEL) as pool:
        return dict(zip(names, pool.map(hash_one, names), strict=True))


def _part_name(process: int) -> str:
    return f"written.{process}.json"


def _copy(x: jax.Array | np.ndarray) -> Stored:
    """Copies the parts of an array that this process writes; each part has exactly one writer."""
    if not isinstance(x, jax.Array):  # Process 0 has the complete NumPy array in memory.
        everything = tuple(slice(0, size) for size in x.shape)
        parts: list[ArrayPart] = [(everything, x)] if jax.process_index() == 0 else []
        return x.shape, chunk_shape(x.shape, x.dtype.itemsize), x.dtype, parts
    shards = [shard for shard in x.addressable_shards if shard.replica_id == 0]
    parts = [(shard.index, np.array(shard.data)) for shard in shards]
    chunks = chunk_shape(x.sharding.shard_shape(x.shape), x.dtype.itemsize)
    return x.shape, chunks, np.dtype(x.dtype), parts


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Chooses the shape of chunks that divide a shard evenly and have at most `CHUNK_BYTES`.

    Because chunks divide the shard, no two devices or processes write into the same chunk.
    """
    chunk = list(shape)
    while math.prod(chunk) * itemsize > CHUNK_BYTES:
        largest = max(range(len(chunk)), key=chunk.__getitem__)
        size = chunk[largest]
        chunk[largest] = size // next(f for f in range(2, size + 1) if size % f == 0)
    return tuple(max(size, 1) for size in chunk)


def _write(path: BucketPath, copies: dict[tuple[str, ...], Stored], texts: dict[str, Any]) -> None:
    """Writes this process's part, and then `written.<process>.json`, which marks it as complete."""
    process = jax.process_index()
    folder = path / "state" / f"ocdbt.process_{process}"
    request(path, lambda: _write_arrays(folder, copies))
    names = [f"state/{folder.name}/{name}" for name in folder.files()]
    if process == 0:
        for name, content in texts.items():
            write_file(path / name, json.dumps(content))
        names += texts
    files = hash_files(path, names)
    write_file(path / _part_name(process), json.dumps(files))


def _write_arrays(folder: BucketPath, copies: dict[tuple[str, ...], Stored]) -> None:
    import tensorstore

    context = tensorstore.Context(CONTEXT)
    opening = {}
    for names, (shape, chunks, dtype, parts) in copies.items():
        if parts:
            metadata = {
                "chunks": chunks,
                "compressor": {"id": "zstd", "level": 1},
                "dimension_separator": ".",
                "shape": shape,
            }
            spec = _array_spec(folder, names) | {
                "dtype": dtype.name,
                "metadata": metadata,
                # Stores chunks of zeros too, because tensorstore reads any missing chunk as zeros,
                # so a lost chunk would not be noticed.
                "store_data_equal_to_fill_value": True,
            }
            opening[names] = tensorstore.open(spec, create=True, open=True, context=context)
    writing = [
        opened.result()[index].write(data)
        for names, opened in opening.items()
        for index, data in copies[names][3]
    ]
    for each in writing:
        each.result()


def _merge(path: BucketPath, processes: int) -> None:
    """Makes one database that refers to the databases of all processes."""
    import tensorstore

    context = tensorstore.Context(CONTEXT)
    merged = tensorstore.KvStore.open(_database(path / "state"), context=context).result()
    transaction = tensorstore.Transaction(atomic=True)
    for process in range(processes):
        spec = _database(path / "state" / f"ocdbt.process_{process}")
        part = tensorstore.KvStore.open(spec, context=context).result()
        part.experimental_copy_range_to(merged.with_transaction(transaction)).result()
    transaction.commit_sync()


def _open_all(path: BucketPath, names: list[tuple[str, ...]]) -> dict[tuple[str, ...], Any]:
    import tensorstore

    context = tensorstore.Context(CONTEXT)
    opening = {
        each: tensorstore.open(_array_spec(path / "state", each), open=True, context=context)
        for each in names
    }
    return {each: future.result() for each, future in opening.items()}


def _database(folder: BucketPath) -> dict[str, Any]:
    return {
        "driver": "ocdbt",
        "base": key_value_store(folder),
        "target_data_file_size": OBJECT_BYTES,
    }


def _array_spec(folder: BucketPath, names: tuple[str, ...]) -> dict[str, Any]:
    return {"driver": "zarr", "kvstore": _database(folder) | {"path": f"{'.'.join(names)}/"}}


def _read_leaf(path: BucketPath, leaf: Leaf, stored: Any) -> jax.Array:
    """Reads each device's shard of an array, pads it with zeros, and puts it on the device."""
    sharding, shape = leaf.abstract.sharding, leaf.padded_shape
    places = sharding.addressable_devices_indices_map(shape)
    wanted = {}
    for index in places.values():
        bounds = [each.indices(size)[:2] for each, size in zip(index, shape, strict=True)]
        wanted[tuple(bounds)] = [
            slice(min(start, size), min(stop, size))
            for (start, stop), size in zip(bounds, stored.shape, strict=True)
        ]

    def read() -> dict[Any, np.ndarray]:
        reading = {bounds: stored[tuple(part)].read() for bounds, part in wanted.items()}
        return {bounds: np.asarray(future.result()) for bounds, future in reading.items()}

    parts = {}
    for bounds, data in request(path, read).items():
        padding = [
            (0, stop - start - size) for (start, stop), size in zip(bounds, data.shape, strict=True)
        ]
        parts[bounds] = np.pad(data, padding) if any(after for _, after in padding) else data
    shards = [
        jax.device_put(
            parts[tuple(e.indices(size)[:2] for e, size in zip(index, shape, strict=True))], device
        )
        for device, index in places.items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _tree_metadata(copies: dict[tuple[str, ...], Stored]) -> dict[str, Any]:
    """Returns the metadata that Orbax writes for a nested dict of arrays."""
    tree = {
        str(names): {
            # Orbax's number for the key of a dict is 2.
            "key_metadata": [{"key": name, "key_type": 2} for name in names],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
        for names in copies
    }
    return {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _checkpoint_metadata() -> dict[str, Any]:
    handlers = "orbax.checkpoint._src.handlers"
    return {
        "item_handlers": {name: f"{handlers}.{kind}" for name, kind in HANDLERS.items()},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": time.time_ns(),
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {},
    }
