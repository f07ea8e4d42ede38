"""Writes a state as `.safetensors` files that other programs can read.

On a disk, process 0 writes the headers of all files. Then every process writes the slices of its
devices, see `tensor_writer`. In a bucket, a file must be uploaded as a whole: its tensors are
gathered, and one process writes the file to a local disk and uploads it. The processes take turns.

Invariants: a tensor has the same bits as if the parameters were on one device. A folder with the
requested name is complete, see `target`.
"""

import concurrent.futures
import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec

from manualpar.checks.guarded_step import check_state
from manualpar.core.mesh.mesh_context import no_mesh, with_auto_axes
from manualpar.core.program.program import Program
from manualpar.core.program.state_arrays import plain_leaves, variable_leaves
from manualpar.core.state.train_state import TrainState
from manualpar.data.chat import Chats
from manualpar.data.tokenizer import (
    BOS_NAMES,
    TEMPLATE,
    TEMPLATES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    load_tokenizer,
    special_tokens,
)
from manualpar.errors import list_some, require
from manualpar.models.finetuning.adapter_files import given_variables
from manualpar.models.finetuning.lora import is_adapter
from manualpar.models.pretrained.architecture import (
    MORE_LAYERS,
    architecture_of,
    read_architecture,
    read_config,
    text_config,
    write_config,
)
from manualpar.models.pretrained.families import ALIASES, FAMILIES
from manualpar.models.pretrained.slices import (
    BOX_BYTES,
    THREADS,
    Bounds,
    common,
    copy_turned,
    entry_within,
    finish,
    is_empty,
    join_bounds,
    slices_of,
    within,
)
from manualpar.models.pretrained.tensor_files import (
    CONFIG_FILE,
    DTYPES,
    INDEX_FILE,
    ONE_FILE,
    BytesInFile,
    bounds_of,
    create_tensor_file,
    has_tensors,
    make_header,
    model_directory,
    open_tensor_files,
    quantization_of,
    write_slice,
)
from manualpar.models.pretrained.tensor_names import TensorPiece, pieces_of_transformer, spelling
from manualpar.models.pretrained.tensor_sources import check_same_model, transformer_of
from manualpar.system.cluster.agreement import failing_together, from_first, gather
from manualpar.system.storage import (
    LOCK_PREFIX,
    AnyPath,
    BucketError,
    BucketPath,
    GivenPath,
    Version,
    draft_of,
    hold,
    local_path,
    new_number,
    path_of_draft,
    publish,
    sync,
    user_path,
    writing,
)
from manualpar.system.storage.untrusted import (
    MAX_BYTES,
    model_file,
    open_own_file,
    read_file,
    read_object,
    write_file,
)

# -------------------------------------------------------------------------------------------------
# The target of an export: a folder on a disk or in a bucket that never shows an incomplete model.
#
# One process locks the folder during the export, so that another export to the same folder is
# refused. On a disk all files are written to a draft, a folder that gets its final name at the
# end, see `manualpar.system.storage.drafts`.
#
# Objects in a bucket cannot be renamed. Each file is written to a local disk, uploaded, and
# deleted locally. `config.json` is uploaded last, because a folder without `config.json` is no
# model. The object `.unfinished` exists during the upload. So after a killed export, it shows the
# next export that the files must be deleted. `.unfinished` contains the number of the export. If
# an export loses its connection for long, another export may take over. The first export then
# finds another number in `.unfinished`, or no such object.


UNFINISHED = ".unfinished"


class ExportTarget(Protocol):
    """A folder to create. Only process 0 calls `owned` and `finish`.

    Attributes:
      path: The folder.
      folder: The draft to which all processes write the files; `None` in a bucket.
    """

    path: AnyPath
    folder: Path | None

    def check_free(self) -> None:
        """Raises a `ValueError` if the folder contains other files, or is not a folder."""

    def owned(self) -> contextlib.AbstractContextManager[None]:
        """Locks the folder during a context; first deletes the files of an unfinished export."""

    def file(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """Yields the path of a local file to write, and stores the file when the context ends."""

    def check_files(self) -> None:
        """Raises a `BucketError` if a file that this process uploaded has been replaced."""

    def finish(self) -> None:
        """Marks the folder as complete, after all files have been written."""


def open_target(path: AnyPath, number: str) -> ExportTarget:
    """Opens the folder at a path as the target of a numbered export; creates nothing."""
    if isinstance(path, BucketPath):
        return BucketTarget(path, number)
    return DiskTarget(path, number)


class DiskTarget:
    """A folder on a file system that all processes share."""

    def __init__(self, path: Path, number: str) -> None:
        self.path: AnyPath = path
        self._target, self._number = path, number
        self._draft = path_of_draft(path.absolute(), number)
        self.folder: Path | None = self._draft

    def check_free(self) -> None:
        """Implements `ExportTarget`."""
        target = self._target
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise ValueError(
                f"export_hf: {target} is no directory, expected a new path or an empty directory."
            )
        if target.is_dir() and any(target.iterdir()):
            raise _not_empty(target)

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Implements `ExportTarget`."""
        with draft_of(self._target.absolute(), number=self._number):
            self.check_free()  # Another export may have ended after the first check.
            yield

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """Implements `ExportTarget`."""
        (self._draft / name).parent.mkdir(exist_ok=True)
        yield self._draft / name
        sync(self._draft / name)

    def check_files(self) -> None:
        """Implements `ExportTarget`."""

    def finish(self) -> None:
        """Implements `ExportTarget`."""
        publish(self._draft, self._target.absolute())


class BucketTarget:
    """A folder in a bucket."""

    def __init__(self, path: BucketPath, number: str) -> None:
        self.path: AnyPath = path
        self.folder: Path | None = None
        self._target, self._number = path, number.encode()
        self._check_lock: Callable[[], None] | None = None  # Set only in process 0.
        self._versions: dict[str, Version] = {}

    def check_free(self) -> None:
        """Implements `ExportTarget`."""
        names = [name for name in self._target.names() if not name.startswith(LOCK_PREFIX)]
        if names and UNFINISHED not in names:
            raise _not_empty(self._target)

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Implements `ExportTarget`."""
        with hold(self._target, report=logging.warning, remains=False) as self._check_lock:
            self.check_free()  # Another export may have ended after the first check.
            write_file(self._target / UNFINISHED, self._number)
            for name in (CONFIG_FILE, *self._target.files()):
                if name != UNFINISHED and not name.startswith(LOCK_PREFIX):
                    (self._target / name).delete()
            yield

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """Implements `ExportTarget`."""
        with tempfile.TemporaryDirectory(prefix="export-") as folder:
            with writing("export_hf", Path(folder)):
                (Path(folder) / name).parent.mkdir(exist_ok=True)
                yield Path(folder) / name
            self._check_owned()
            (self._target / name).upload(Path(folder) / name)
        self._versions[name] = (self._target / name).version()

    def check_files(self) -> None:
        """Implements `ExportTarget`."""
        for name, version in self._versions.items():
            try:
                found = (self._target / name).version()
            except FileNotFoundError:
                found = None
            if found != version:
                raise _taken_over(self._target)

    def finish(self) -> None:
        """Implements `ExportTarget`."""
        self._check_owned()
        (self._target / UNFINISHED).delete()

    def _check_owned(self) -> None:
        """Raises a `BucketError` if another export has taken over."""
        if self._check_lock is not None:
            self._check_lock()
        try:
            number = (self._target / UNFINISHED).read_bytes()
        except FileNotFoundError:
            number = b""
        if number != self._number:
            raise _taken_over(self._target)


def _not_empty(target: AnyPath) -> ValueError:
    return ValueError(
        f"export_hf: {target} is not empty, expected a new directory, because it would contain the "
        "files of two models. Name another directory, or delete its files."
    )


def _taken_over(target: BucketPath) -> BucketError:
    return BucketError(
        f"export_hf: another export has written {target} in the meantime, because this export lost "
        "its connection or the server does not lock; this export has failed, export again"
    )


# -------------------------------------------------------------------------------------------------
# Writes tensors from shards: every process writes the slices that its devices store.
#
# The header of a file gives the place of each tensor, so that processes write without waiting for
# each other. If several devices store a shard, only the first of them writes it. In addition to
# its state, a process needs memory for one band of a tensor (a range of rows, see `slices.BAND`)
# in each thread. On an accelerator, each thread also needs a copy on the host: `BOX_BYTES`, or one
# shard if a shard is larger.


# The platform whose devices use the host's memory.
ON_HOST = "cpu"


class Tensor(NamedTuple):
    """A tensor to write, or the part of a tensor that a variable contains.

    Attributes:
      name: The tensor's name.
      shape: The tensor's shape.
      sizes: The sizes of the variable's dims, without padding and without the dims that stack
        several tensors.
      dtype: The dtype in the file.
      leaf: The name of the variable that contains the tensor.
      piece: The tensor's place in the variable, and how the dims of both correspond.
    """

    name: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: np.dtype
    leaf: str
    piece: TensorPiece

    @property
    def nbytes(self) -> int:
        """The bytes of the variable's part of the tensor in a file."""
        return int(np.prod(self.sizes, dtype=np.int64)) * self.dtype.itemsize


# Maps the name of each file to its tensors.
Files = Mapping[str, Sequence[Tensor]]


def create_files(folder: Path, files: Files) -> None:
    """Writes the header of every file; only one process calls it."""
    for name, tensors in files.items():
        create_tensor_file(folder / name, _kinds(tensors))


def write_tensors(folder: Path, files: Files, arrays: Mapping[str, jax.Array]) -> None:
    """Writes the shards of this process's devices, and waits until they are on the disk.

    Args:
      folder: The folder of the files, which already have their headers.
      files: The tensors of each file.
      arrays: The variables, by name.

    Raises:
      OSError: A file cannot be written.
    """
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        jobs = []
        for name, tensors in files.items():
            _, places = make_header(_kinds(tensors))
            for tensor in tensors:
                task = folder / name, places[tensor.name], tensor, arrays[tensor.leaf]
                jobs.append(threads.submit(_write, *task))
        finish(threads, jobs)
        finish(threads, [threads.submit(sync, folder / name) for name in files])


def _kinds(tensors: Sequence[Tensor]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}


def _write(path: Path, place: BytesInFile, tensor: Tensor, x: jax.Array) -> None:
    """Writes the slices of a tensor that no other process writes: shards with replica number 0."""
    shards = _own_shards(tensor, x)
    for box, inside in join_bounds(shards, BOX_BYTES // tensor.dtype.itemsize):
        parts = {bounds: _to_host(*shards[bounds]) for bounds in inside}
        for part in slices_of(tensor.piece, tensor.sizes, box):
            value = np.empty([len(range(of.stop)[of]) for of in part.where], tensor.dtype)
            for bounds, shard in parts.items():
                both = common(bounds, part.bounds)
                if not is_empty(both):
                    out = part.turned(value)[within(both, part.bounds)]
                    copy_turned(out, shard[within(both, bounds)])
            with open_own_file(path, create=False) as file:
                write_slice(file.fileno(), place, part.where, value)


def _own_shards(tensor: Tensor, x: jax.Array) -> dict[Bounds, tuple[jax.Array, tuple[Any, ...]]]:
    """Returns the shards that this process writes, by their bounds in the tensor without padding.

    With each shard it returns the index of the tensor's entry along the dims that stack tensors.
    """
    entry = tensor.piece.entry
    own = {}
    for shard in x.addressable_shards:
        held = bounds_of(shard.index, x.shape)
        index = entry_within(entry, held)
        bounds = common(held[len(entry) :], [(0, size) for size in tensor.sizes])
        if shard.replica_id == 0 and index is not None and not is_empty(bounds):
            own[bounds] = shard.data, index
    return own


def _to_host(x: jax.Array, index: tuple[Any, ...]) -> np.ndarray:
    if next(iter(x.devices())).platform == ON_HOST:
        return np.asarray(x)[index]  # A view of the shard's memory.
    # Copies the array first, because an array caches its values on the host and would keep them.
    return np.asarray(x[index].copy())


# -------------------------------------------------------------------------------------------------


SHARD_BYTES = 2 << 30
MAX_COPIED_BYTES = 4 * MAX_BYTES  # The most bytes of all small files of a model together.
# The files of a tokenizer, which are copied to the export.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
GENERATION_CONFIG = "generation_config.json"
# The keys of configs for special tokens, and the names of the tokens in `tokenizer_config.json`.
SPECIAL_IDS = {f"{name}_token_id": f"{name}_token" for name in ("bos", "eos", "pad")}


def export_hf(
    program: Program,
    state: TrainState,
    directory: GivenPath,
    *,
    like: GivenPath | None = None,
    family: str = "",
    dtype: str = "",
    tokenizer: GivenPath | None = None,
    template: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> AnyPath:
    """Writes a state of a `Transformer` to a directory that the library transformers can load.

    ```python
    export_hf(program, state, "models/tuned", like="models/llama")
    ```

    Args:
      program: The program. LoRA adapters are merged into their kernels, and parameters in int8 are
        dequantized.
      state: The program's state; not donated.
      directory: The directory to create. It must be missing or empty. In a bucket `config.json` is
        written last, so that a directory with a `config.json` is complete.
      like: The directory from which the parameters were loaded. Its config, the files of its
        tokenizer, and `generation_config.json` are copied. Every tensor gets the dtype of the
        tensor with the same name in `like`, so that parameters that were loaded and not trained are
        written bit for bit. If `like` has no tensors, its config decides the dtype. If `like` is
        quantized, tensors that were decoded are written in bfloat16.
      family: The model family of the config, such as `"llama"`, if there is no `like`. By default
        the first family that can describe the model.
      dtype: The dtype of all tensors, such as `"bfloat16"`. The default is the dtype of `like`, or
        the dtype of the parameters.
      tokenizer: The directory of a tokenizer, or a `tokenizer.json`, to copy instead of the
        tokenizer in `like`. The config names its tokens that begin and end documents, and its
        padding. `generation_config.json` names them too.
      template: For a model of chats, the chat template as in `config.data.template`: a file, the
        name of one of the tokenizer's templates, or "" for the tokenizer's template. It is written,
        and answers also end at the token with which it ends a turn.
      max_shard_bytes: The most bytes of tensors in a file. A larger tensor gets a file for itself.

    Returns:
      The directory.

    Raises:
      ValueError: No family can describe the model; `like` is another model; the directory is not
        empty; another export is writing to it; or a process does not see the files of process 0. No
        tensor has been written.
      OSError: The files cannot be written, for example because the disk is full. On a disk, the
        directory has not changed. In a bucket, the next export deletes the files of this export.

    Communication:
      With one process: none. With several processes and a disk: a few bytes that report errors.
      With several processes and a bucket: an all-gather for each tensor. Every device stores one
      complete tensor at a time, and one device of each process stores all tensors of one file. With
      adapters: in addition, the communication of merging them.
    """
    check_state("export_hf", program.abstract_state, state)
    is_first = jax.process_index() == 0
    number = from_first(new_number())
    with contextlib.ExitStack() as owner:
        with failing_together():
            require("export_hf", "safetensors")
            target = open_target(user_path(directory), number)
            source = None if like is None else model_directory(like)
            config, tensors = _plan(program, source, family=family, dtype=dtype)
            files = _divide(tensors, max_shard_bytes)
            target.check_free()
            extras, folder = _extra_files(source, tokenizer)
            own, generation = tokenizer is not None, _object_in(extras, GENERATION_CONFIG)
            texts = _about_tokens(program, config, generation, extras, own=own)
            if template is not None and folder is not None:
                texts |= _about_chats(generation, folder, template)
            if generation != _object_in(extras, GENERATION_CONFIG):
                texts[GENERATION_CONFIG] = json.dumps(generation, indent=2) + "\n"
            if is_first:
                with writing("export_hf", target.path):
                    owner.enter_context(target.owned())
                    if target.folder is not None:
                        create_files(target.folder, files)
        if target.folder is not None:
            _check_shared(target.folder)
        arrays = {leaf.name: x for leaf, x in given_variables(program, state)}
        if target.folder is not None:
            with failing_together(), writing("export_hf", target.path):
                write_tensors(target.folder, files, arrays)
        else:
            _write_in_turn(target, files, arrays)
        with failing_together(), writing("export_hf", target.path):
            if is_first:
                _write_rest(target, config, files, extras, texts)
            target.check_files()
        with failing_together(), writing("export_hf", target.path):
            if is_first:
                target.finish()
    return target.path


def _plan(
    program: Program, source: Path | None, *, family: str, dtype: str
) -> tuple[dict[str, Any], list[Tensor]]:
    """Plans the config and the tensors to write."""
    model, (leaves, _) = transformer_of(program), plain_leaves(program, variable_leaves(program))
    dtypes: Mapping[str, str] = {}
    if source is not None:
        architecture = read_architecture(source)
        check_same_model(model, source, architecture, add_tokens=True)
        config = dict(text_config(read_config(source))[0])
        quantization = quantization_of(config)
        config.pop("quantization_config", None)  # Decoded tensors are written.
        config |= dict.fromkeys(config.keys() & {*MORE_LAYERS}, 0)  # They were left out.
        config |= {"tie_word_embeddings": False} if architecture.is_untied else {}
        if model.vocab_size != architecture.fields["vocab_size"]:  # Tokens have been added.
            config["vocab_size"] = model.vocab_size
        if architecture.wrapper:
            config["architectures"] = [FAMILIES[architecture.family].class_name]
        if has_tensors(source):
            dtypes = open_tensor_files(source, quantization).dtypes
        else:  # `like` has only a config and a tokenizer, such as the output of an import.
            dtype = dtype or str(config.get("dtype") or config.get("torch_dtype") or "")
    else:
        config = write_config(architecture_of(model), family=family)
    if dtype and dtype not in DTYPES.values():
        raise ValueError(
            f"export_hf: dtype is {dtype!r}, expected one of {', '.join(DTYPES.values())}, or '' "
            "for the dtype of like, or of the parameters."
        )
    paths = [leaf.name.partition("/")[2] for leaf in leaves]
    shapes = {
        path: leaf.shape
        for path, leaf in zip(paths, leaves, strict=True)
        if not is_adapter(path)  # Adapters are merged into their kernels.
    }
    name = config["model_type"]
    pieces = pieces_of_transformer(ALIASES.get(name, name), shapes)
    spell = spelling(name, pieces["embedding"][0].tensor, dtypes)
    tensors = []
    for path, leaf in zip(paths, leaves, strict=True):
        for piece in pieces.get(path, ()):
            sizes = tuple(
                model.vocab_size if name == "V" else size
                for name, size in zip(piece.dims, leaf.shape[len(piece.entry) :], strict=True)
            )
            name = dtype or dtypes.get(spell(piece.tensor)) or leaf.dtype.name
            shape, numbers = piece.tensor_shape(sizes), np.dtype(jax.numpy.dtype(name))
            tensors.append(Tensor(piece.tensor, shape, sizes, numbers, leaf.name, piece))
    sizes_of: dict[str, int] = {}
    for tensor in tensors:
        sizes_of[tensor.dtype.name] = sizes_of.get(tensor.dtype.name, 0) + tensor.nbytes
    most = max(sizes_of, key=lambda name: sizes_of[name])
    config["dtype" if "dtype" in config else "torch_dtype"] = most
    return config, sorted(tensors, key=lambda tensor: _natural(tensor.name))


def _natural(name: str) -> list[Any]:
    """Returns a sort key that puts `layers.2` before `layers.10`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _divide(tensors: Sequence[Tensor], max_bytes: int) -> dict[str, list[Tensor]]:
    """Assigns the tensors to files in their order, at most `max_bytes` of tensors to a file."""
    if max_bytes < 1:
        raise ValueError(f"export_hf: max_shard_bytes is {max_bytes}, expected at least 1.")
    groups: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        # Several variables may be parts of one tensor.
        is_new = not groups or groups[-1][-1].name != tensor.name
        if is_new and (not groups or size + tensor.nbytes > max_bytes):
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return {ONE_FILE: groups[0]}
    total = len(groups)
    return {
        f"model-{number:05d}-of-{total:05d}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def _check_shared(folder: Path) -> None:
    """Raises a `ValueError` if a process does not see the folder that process 0 has made."""
    found = None
    with contextlib.suppress(FileNotFoundError):
        status = folder.stat()
        found = [status.st_ino, status.st_mtime_ns]
    others = gather(found)
    unlike = [number for number, other in enumerate(others) if other != others[0]]
    if unlike:
        raise ValueError(
            f"export_hf: process {unlike[0]} does not see {folder}, which process 0 has made; "
            "expected a directory in a bucket, or on a file system that all processes share, "
            "because each process writes the shards of its devices."
        )


def _write_in_turn(target: ExportTarget, files: Files, arrays: Mapping[str, jax.Array]) -> None:
    """Gathers the tensors of each file for one process, which writes it; processes take turns."""
    for number, (name, tensors) in enumerate(files.items()):
        gathered = [_gathered(arrays[tensor.leaf], tensor) for tensor in tensors]
        with failing_together():
            if number % jax.process_count() == jax.process_index():
                with target.file(name) as path:
                    own = {name: [tensor for tensor, _ in gathered]}
                    create_files(path.parent, own)
                    write_tensors(path.parent, own, {t.leaf: x for t, x in gathered})


def _gathered(x: jax.Array, tensor: Tensor) -> tuple[Tensor, jax.Array]:
    """Gathers a tensor's array, so that this process can write it alone."""
    if x.is_fully_addressable:
        return tensor, x
    sharding: Any = x.sharding
    take = with_auto_axes(_index, mesh=sharding.mesh, out_specs=PartitionSpec())
    with no_mesh():
        replicated = NamedSharding(sharding.mesh, PartitionSpec())
        whole = jax.jit(take, out_shardings=replicated)(x, tensor.piece.entry)
    leaf = f"{tensor.name} of {tensor.leaf}"
    alone = tensor._replace(leaf=leaf, piece=tensor.piece._replace(entry=()))
    return alone, whole.addressable_data(0)


def _index(x: jax.Array, entry: tuple[jax.Array, ...]) -> jax.Array:
    for at in entry:
        x = jax.lax.dynamic_index_in_dim(x, at, 0, keepdims=False)
    return x


def _extra_files(
    source: Path | None, tokenizer: GivenPath | None
) -> tuple[dict[str, Path], Path | None]:
    """Returns the files to copy; the keys are their names in the export.

    The second result is the folder of the tokenizer; `None` if there is none.
    """
    extras = {}
    if source is not None:
        extras = tokenizer_files(source, "export_hf: like")
    if tokenizer is None:
        return extras, source
    path, name = local_path(tokenizer, "export_hf: tokenizer"), "export_hf: tokenizer"
    if path.is_dir():
        kept = {each: file for each, file in extras.items() if each == GENERATION_CONFIG}
        others = tokenizer_files(path, name)
        others.pop(GENERATION_CONFIG, None)  # That of another model.
        return kept | others, path
    # A user has named the file itself, so it may be a link.
    path = path.resolve()
    _copied_size(path, path.parent, name)
    return extras | {TOKENIZER: path}, path.parent


def _object_in(extras: Mapping[str, Path], name: str) -> dict[str, Any]:
    """Returns the object in a file to copy; an empty one if there is no such file."""
    try:
        return read_object(extras[name]) if name in extras else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"export_hf: {extras[name]} {error}.") from error


def _about_tokens(
    program: Program,
    config: dict[str, Any],
    generation: dict[str, Any],
    extras: Mapping[str, Path],
    *,
    own: bool,
) -> dict[str, str]:
    """Adds the special tokens to two configs; returns the texts of the tokenizer's files.

    Args:
      config: The `config.json`, which is changed.
      generation: The `generation_config.json`, which is changed.
      extras: The files to copy, see `_extra_files`.
      own: Whether the tokenizer's tokens replace those of the configs.
    """
    model, ids = transformer_of(program), _special_ids(extras)
    if not ids and model.bos_token >= 0:  # Documents end where the next one begins.
        ids = {"bos_token_id": model.bos_token, "eos_token_id": model.bos_token}
    for name, value in ids.items():
        if not value < model.vocab_size:
            raise ValueError(
                f"export_hf: the tokenizer has {name}={value}, expected a token below the model's "
                f"vocab_size={model.vocab_size}."
            )
        if own or config.get(name) is None:
            config[name] = value
    ends = _ends(config)
    generation |= {k: x for k, x in ends.items() if own or generation.get(k) is None}
    if own and TOKENIZER_CONFIG not in extras and "bos_token_id" in ids:
        return _with_bos(_object_in(extras, TOKENIZER), ids)
    return {}


def _ends(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the special tokens of a config for its `generation_config.json`."""
    found = {name: config[name] for name in SPECIAL_IDS if config.get(name) is not None}
    ends = found.get("eos_token_id")
    if "pad_token_id" not in found and ends is not None:
        found["pad_token_id"] = ends[0] if isinstance(ends, list) else ends
    return found if ends is not None else {}


def _special_ids(extras: Mapping[str, Path]) -> dict[str, int]:
    """Returns the numbers of the special tokens of a tokenizer, as the keys of a config."""
    if TOKENIZER not in extras:
        return {}
    fields, described = (_object_in(extras, name) for name in (TOKENIZER, TOKENIZER_CONFIG))
    try:
        named = special_tokens(described, tuple(SPECIAL_IDS.values()))
    except ValueError as error:
        raise ValueError(f"export_hf: {extras[TOKENIZER_CONFIG]} {error}.") from error
    model = fields.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # Of a unigram model: pairs (text, score).
        vocabulary = {pair[0]: n for n, pair in enumerate(vocabulary) if isinstance(pair, list)}
    numbers = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    added = fields.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            numbers[token.get("content")] = token.get("id")
    if "bos_token" not in named and (first := [name for name in BOS_NAMES if name in numbers]):
        named["bos_token"] = first[0]
    if "eos_token" not in named and "bos_token" in named:
        named["eos_token"] = named["bos_token"]
    named.setdefault("bos_token", named.get("eos_token", ""))
    found = {name: numbers.get(named.get(text, "")) for name, text in SPECIAL_IDS.items()}
    return {name: number for name, number in found.items() if type(number) is int}


def _about_chats(generation: dict[str, Any], folder: Path, template: str) -> dict[str, str]:
    """Adds a chat template's end of turn to the ends; returns the text of the template's file."""
    try:
        chats = Chats(load_tokenizer(str(folder)), template)
        chats.prompt({"messages": [{"role": "user", "content": "asked"}]})
    except ValueError as error:
        logging.warning("export_hf: the chat template's end of turn is not known (%s)", error)
        return {}
    found = generation.get("eos_token_id")
    found = found if isinstance(found, list) else [] if found is None else [found]
    if new := [end for end in sorted(chats.end_tokens) if end not in found]:
        generation["eos_token_id"] = [*found, *new]
    return {TEMPLATE: chats.chosen} if template else {}


def _with_bos(fields: dict[str, Any], ids: Mapping[str, int]) -> dict[str, str]:
    """Writes a config for a tokenizer without one, and puts BOS before each text, as in training.

    A tokenizer that already changes the tokens of a text at its end is left as it is, and so is one
    whose BOS is no added token.
    """
    numbers = {token["id"]: token["content"] for token in fields.get("added_tokens") or ()}
    names = {text: numbers.get(ids.get(name, -1)) for name, text in SPECIAL_IDS.items()}
    bos = names["bos_token"]
    if bos is None or fields.get("post_processor") is not None:
        return {}
    begin = {"SpecialToken": {"id": bos, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))
    fields["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, second],
        "special_tokens": {bos: {"id": bos, "ids": [ids["bos_token_id"]], "tokens": [bos]}},
    }
    named = {name: text for name, text in names.items() if text is not None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    return {
        TOKENIZER: json.dumps(fields, ensure_ascii=False),
        TOKENIZER_CONFIG: json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }


def tokenizer_files(folder: Path, name: str, others: Sequence[str] = ()) -> dict[str, Path]:
    """Finds the small files of a model that an import or an export copies.

    Returns:
      The path without links of each file, by its path relative to `folder`.
    """
    names = [each for each in (*others, *TOKENIZER_FILES) if os.path.lexists(folder / each)]
    templates = sorted((folder / TEMPLATES).glob("*.jinja"))
    names += [f"{TEMPLATES}/{file.name}" for file in templates]
    total = sum(_copied_size(folder / each, folder, name) for each in names)
    if total > MAX_COPIED_BYTES:
        raise ValueError(
            f"{name}: {', '.join(list_some(names))} in {folder} have {total:,} bytes, expected at "
            f"most {MAX_COPIED_BYTES:,}. Delete the files that do not belong to the model."
        )
    return {each: model_file(folder / each, folder) for each in names}


def _copied_size(path: Path, folder: Path, name: str) -> int:
    """Returns the size of a file to copy; refuses one that is not in the folder or is too large."""
    try:
        size = model_file(path, folder).stat().st_size
    except FileNotFoundError:
        raise ValueError(
            f"{name}: {path} cannot be copied, because there is no such file."
        ) from None
    except OSError as error:
        raise ValueError(f"{name}: {path} {error}.") from None
    if size > MAX_BYTES:
        raise ValueError(
            f"{name}: {path} has {size:,} bytes, expected at most {MAX_BYTES:,} of such a file."
        )
    return size


def _write_rest(
    target: ExportTarget,
    config: Mapping[str, Any],
    files: Files,
    extras: Mapping[str, Path],
    texts: Mapping[str, str],
) -> None:
    """Writes `texts`, the config, and an index for several files; copies the rest of `extras`."""
    for name in filter(lambda name: name not in texts, extras):
        with target.file(name) as path:
            write_file(path, read_file(extras[name]))
    for name, text in texts.items():
        with target.file(name) as path:
            write_file(path, text)
    objects = {}
    if len(files) > 1:
        total = sum(tensor.nbytes for of_file in files.values() for tensor in of_file)
        weight_map = {t.name: name for name, of_file in files.items() for t in of_file}
        objects[INDEX_FILE] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    objects[CONFIG_FILE] = dict(config)
    for name, value in objects.items():
        with target.file(name) as path:
            write_file(path, json.dumps(value, indent=2) + "\n")
