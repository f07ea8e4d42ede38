"""Loads parameters from `.safetensors` files directly into the shards of a program.

Each process reads only the slices of its devices, see `slices`. In a terminal, a bar on standard
error shows the bytes that process 0 has read.

Invariants: the config, and the names, shapes and dtypes of all tensors, are compared with the
program before any tensor is read. The optimizer's state is computed from the sharded parameters. If
one process has an error, all processes raise an error.
"""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from manualpar.core.mesh.mesh_context import no_mesh, with_auto_axes
from manualpar.core.mesh.splitting import typed_key
from manualpar.core.program.program import Program
from manualpar.core.program.state_arrays import (
    Leaf,
    Missing,
    check_has_devices,
    plain_leaves,
    state_with,
    variable_leaves,
)
from manualpar.core.state.train_state import TrainState
from manualpar.models.pretrained.slices import ShardReader, bytes_to_read
from manualpar.models.pretrained.tensor_files import model_directory
from manualpar.models.pretrained.tensor_names import Rule
from manualpar.models.pretrained.tensor_sources import find_sources, transformer_of
from manualpar.system.cluster.agreement import failing_together
from manualpar.system.reports.progress_bars import bytes_bar
from manualpar.system.storage import GivenPath


class Loaded(NamedTuple):
    """The result of `load`.

    Attributes:
      state: The state.
      tensors: The number of tensors in the files.
      bytes_read: The bytes of tensors that this process has read.
      new_tokens: The number of tokens that the files do not have.
      seconds: The seconds that this process needed to read them.
    """

    state: TrainState
    tensors: int
    bytes_read: int
    new_tokens: int
    seconds: float


def load_hf(
    program: Program,
    directory: GivenPath,
    rng: jax.Array | None = None,
    *,
    names: Mapping[str, Rule | str] | None = None,
    missing: Missing = "error",
    add_tokens: bool = False,
) -> TrainState:
    """Makes a state from the `.safetensors` files of a directory, at step 0.

    ```python
    state = load_hf(program, "models/llama")
    names = {"encoder/kernel": Rule("enc.weight", "i o -> o i"), "encoder/bias": "enc.bias"}
    state = load_hf(program, "models/mine", names=names)
    ```

    Args:
      program: A program of the `Transformer` that the directory's `config.json` describes, under
        any strategy, on any mesh of devices. With `names`, a program of any model.
      directory: A directory that `save_pretrained` of transformers wrote, or that was downloaded
        from the Hugging Face hub. If the directory is in a bucket, each machine makes a local copy,
        see `manualpar.models.pretrained.tensor_files`.
      rng: The key, used as in `program.init`. The default is `jax.random.key(0)`.
      names: Maps a parameter's path to the name of its tensor, or to a `Rule` if the tensor has
        other dims. By default the rules of the model family in `config.json` are used.
      missing: `"error"` refuses parameters for which no tensor is known. `"init"` initializes them
        as `program.init(rng)` does.
      add_tokens: Whether the program's model may have a larger `vocab_size` than the files. The new
        rows of the embedding and the head are the mean of the others. `resize_token_embeddings` of
        transformers adds noise to this mean, whose variance is a billionth of that of the rows, if
        there are more tokens than features.

    Returns:
      The state, on the program's devices. The optimizer's state is initialized for the loaded
      parameters.

    Raises:
      ValueError: A file is missing, damaged or pickled; the config describes another model;
        tensors are missing, not needed, or of another shape; or the program is on an abstract mesh.
        The message names the files or tensors. No tensor has been read, and nothing compiled.

    Communication:
      Only a few bytes that report errors to the other processes.
    """
    key = 0 if rng is None else typed_key("load_hf", rng)
    return load(program, directory, key, names=names, missing=missing, add_tokens=add_tokens).state


def load(
    program: Program,
    directory: GivenPath,
    rng: jax.Array | int = 0,
    *,
    names: Mapping[str, Rule | str] | None = None,
    missing: Missing = "error",
    add_tokens: bool = False,
) -> Loaded:
    """Makes a state as `load_hf` does, and counts the tensors, bytes and seconds.

    `rng` is a typed key or a seed. A seed becomes a key after the files have been checked.
    """
    check_has_devices("load_hf", program.mesh)
    leaves = variable_leaves(program)
    started = time.perf_counter()
    with failing_together():
        local = model_directory(directory)
        sources = find_sources(program, local, names=names, missing=missing, add_tokens=add_tokens)
    plain, encodings = plain_leaves(program, leaves)
    wanted = [leaf for leaf in plain if leaf.name in sources.pieces]
    size = transformer_of(program).vocab_size if sources.vocab_size else 0

    def completed(leaf: Leaf, x: jax.Array) -> jax.Array:
        """Adds the rows of new tokens."""
        dims = sources.pieces[leaf.name][0].dims
        if size == sources.vocab_size or "V" not in dims:
            return x
        return _with_new_rows(program, x, dims.index("V"), sources.vocab_size, size)

    total, is_main = bytes_to_read(wanted, sources), jax.process_index() == 0
    with failing_together(), bytes_bar("reading", total, is_shown=is_main) as show:
        reader = ShardReader(sources.files, report=show)
        unencoded = [leaf for leaf in wanted if leaf.name not in encodings]
        placed = reader.place(unencoded, sources)
        placed = {leaf.name: completed(leaf, placed[leaf.name]) for leaf in unencoded}
        # One leaf at a time, because quantizing needs more memory than the result.
        for leaf in wanted:
            if leaf.name in encodings:
                x = reader.place([leaf], sources)[leaf.name]
                placed |= encodings[leaf.name].encode(completed(leaf, x))
    seconds = time.perf_counter() - started
    key = jax.random.key(rng) if isinstance(rng, int) else rng
    state = state_with(program, leaves, placed, key)
    new = size - sources.vocab_size
    return Loaded(state, len(sources.files.shapes), reader.bytes_read, new, seconds)


def _with_new_rows(program: Program, x: jax.Array, dim: int, old: int, new: int) -> jax.Array:
    """Sets the entries from `old` to `new` along a dim to the mean of those before, in float32.

    Communication:
      That of a mean over the devices that shard the dim.
    """

    def run(x: jax.Array) -> jax.Array:
        rows = jax.lax.slice_in_dim(x, 0, old, axis=dim).astype(jnp.float32)
        number = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
        mean = rows.mean(dim, keepdims=True).astype(x.dtype)
        return jnp.where((number >= old) & (number < new), mean, x)

    sharding: Any = x.sharding
    on_auto = with_auto_axes(run, mesh=program.mesh, out_specs=sharding.spec)
    with no_mesh():
        added: jax.Array = jax.jit(on_auto, out_shardings=sharding, donate_argnums=0)(x)
    return added
