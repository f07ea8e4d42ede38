"""Parameters from `.safetensors` files, straight into the shards of a program.

Each process reads the slices of its own devices and nothing else, see `slices`.

Invariants: nothing is read before the config, and the names, shapes and dtypes of all tensors, have
been compared with the program's. The optimizer's state is made from the parameters, sharded. An
error in one process is one in all of them.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple

import jax

from manualpar.core.mesh.rng import typed_key
from manualpar.core.program.load_state import (
    Missing,
    check_has_devices,
    plain_leaves,
    state_with,
    variable_leaves,
)
from manualpar.core.program.program import Program
from manualpar.core.state.train_state import TrainState
from manualpar.models.pretrained.directory import model_directory
from manualpar.models.pretrained.slices import ShardReader
from manualpar.models.pretrained.sources import find_sources
from manualpar.models.pretrained.tensor_names import Rule
from manualpar.system.cluster.agreement import failing_together
from manualpar.system.storage import GivenPath


class Loaded(NamedTuple):
    """The result of `load_hf`.

    Attributes:
      state: The state.
      tensors: How many tensors the files have.
      bytes_read: The bytes of tensors that this process has read.
      seconds: How long it took to read them.
    """

    state: TrainState
    tensors: int
    bytes_read: int
    seconds: float


def load_hf(
    program: Program,
    directory: GivenPath,
    rng: jax.Array | None = None,
    *,
    names: Mapping[str, Rule | str] | None = None,
    missing: Missing = "error",
) -> TrainState:
    """Makes a state from the `.safetensors` files of a directory, at step 0.

    ```python
    state = load_hf(program, "models/llama")
    names = {"encoder/kernel": Rule("enc.weight", "i o -> o i"), "encoder/bias": "enc.bias"}
    state = load_hf(program, "models/mine", names=names)
    ```

    Args:
      program: A program of a `Transformer` that is what the `config.json` of the directory says,
        under any strategy, on any mesh of devices; or of any model, with `names`.
      directory: A directory as `save_pretrained` of transformers writes it, or as the hub has it;
        of one in a bucket each machine makes a copy, see `manualpar.models.pretrained.directory`.
      rng: The key, used as by `init`. By default `jax.random.key(0)`.
      names: The tensor of each parameter, by its path: a name, or a `Rule` if its dims are others.
        By default the rules of the family of models that `config.json` names.
      missing: Whether a parameter that no tensor is known for is an `"error"`, or made as by
        `init(rng)`: `"init"`.

    Returns:
      The state, on the program's devices. The optimizer's state is made for these parameters.

    Raises:
      ValueError: A file is missing, damaged or pickled; the config says another model than the
        program's; tensors are missing, left over, or of another shape. Each is named, and nothing
        has been read or compiled. Or the program is on an abstract mesh.

    Communication:
      None but a few bytes that say whether all processes are well.
    """
    key = 0 if rng is None else typed_key("load_hf", rng)
    return load(program, directory, key, names=names, missing=missing).state


def load(
    program: Program,
    directory: GivenPath,
    rng: jax.Array | int = 0,
    *,
    names: Mapping[str, Rule | str] | None = None,
    missing: Missing = "error",
) -> Loaded:
    """Makes a state as `load_hf`, and counts the tensors, bytes and seconds.

    `rng` is a typed key, or a seed, of which a key is made after the files have been checked.
    """
    check_has_devices("load_hf", program.mesh)
    leaves = variable_leaves(program)
    started = time.perf_counter()
    with failing_together():
        local = model_directory(directory)
        sources = find_sources(program, local, names=names, missing=missing)
    reader = ShardReader(sources.files)
    plain, encodings = plain_leaves(program, leaves)
    with failing_together():
        wanted = [leaf for leaf in plain if leaf.name in sources.pieces]
        placed = reader.place([leaf for leaf in wanted if leaf.name not in encodings], sources)
        for leaf in wanted:  # One at a time, because encoding takes more memory than its result.
            if leaf.name in encodings:
                placed |= encodings[leaf.name].encode(reader.place([leaf], sources)[leaf.name])
    seconds = time.perf_counter() - started
    key = jax.random.key(rng) if isinstance(rng, int) else rng
    state = state_with(program, leaves, placed, key)
    return Loaded(state, len(sources.files.shapes), reader.bytes_read, seconds)
