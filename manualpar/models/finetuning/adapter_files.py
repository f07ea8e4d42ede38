"""Saves adapters in a folder without the base model: a few MB instead of many GB.

`adapters.safetensors` contains the adapters by their paths, in float32, which represents narrower
dtypes exactly. `adapters.json` contains the targets with their ranks, and alpha.

Invariants: a folder gets its final name only when it is complete, see
`manualpar.system.storage.drafts`. The adapters in the file are not sharded, so that programs on any
mesh and of any strategy can load them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from manualpar.core.program.guarded_step import check_state
from manualpar.core.program.load_state import variable_leaves, variables_of
from manualpar.core.program.program import Program
from manualpar.core.state.state_arrays import Leaf, list_some, place_leaf, read_unpadded, show_array
from manualpar.core.state.train_state import TrainState
from manualpar.errors import printable, require
from manualpar.models.finetuning.adapted_parameter import is_adapter
from manualpar.models.finetuning.merging import lora_interface
from manualpar.system.storage import GivenPath, draft_of, local_path, publish, sync, writing
from manualpar.system.storage.untrusted import open_tensors, read_object

ARRAYS_FILE, DESCRIPTION_FILE = "adapters.safetensors", "adapters.json"
FLOAT32 = "F32"  # The name of the dtype in `.safetensors` files.


def save_adapters(program: Program, state: TrainState, directory: GivenPath) -> Path:
    """Writes the adapters of a state, without the base model.

    Args:
      program: A program of a model with adapters, see `lora`.
      state: The program's state; not donated.
      directory: The folder to make. It must not exist.

    Returns:
      The folder.

    Raises:
      ValueError: The model has no adapters, the state does not belong to the program, the folder
        exists already, or another process is writing to it. Nothing has been written.
      OSError: The files cannot be written; no folder has been made.

    Communication:
      With several processes an all-gather for each adapter; with one process none.
    """
    require("save_adapters", "safetensors")
    from safetensors.numpy import save

    # Imported here so that `import manualpar` does not load code for several processes.
    from manualpar.system.cluster.agreement import failing_together, gather

    model = lora_interface("save_adapters", program).low_rank
    check_state("save_adapters", program.abstract_state, state)
    target = local_path(directory, "save_adapters: directory").absolute()
    if any(gather(target.exists())):
        raise ValueError(
            f"save_adapters: {target} exists already, expected a new folder. Name another folder."
        )
    arrays = dict(zip(variable_leaves(program), jax.tree.leaves(variables_of(state)), strict=True))
    values = {
        _path(leaf): read_unpadded("save_adapters", leaf, x).astype(np.float32)
        for leaf, x in arrays.items()
        if is_adapter(leaf.name)
    }
    with failing_together():
        if jax.process_index() == 0:
            description = {"alpha": model.alpha, "targets": dict(model.targets)}
            texts = {
                ARRAYS_FILE: save(values),  # Not `save_file`, which ignores the umask.
                DESCRIPTION_FILE: json.dumps(description, indent=2).encode() + b"\n",
            }
            with writing("save_adapters", target), draft_of(target) as draft:
                for name, data in texts.items():
                    (draft / name).write_bytes(data)
                    sync(draft / name)
                publish(draft, target)
    return target


def load_adapters(program: Program, state: TrainState, directory: GivenPath) -> TrainState:
    """Loads adapters that `save_adapters` has written, on any mesh, and returns the new state.

    Args:
      program: A program of a model with the same targets, ranks and alpha.
      state: The program's state; not donated. Only its adapters are replaced: the base parameters
        and the optimizer's state stay the same.
      directory: The folder that `save_adapters` has written.

    Returns:
      The state with the saved adapters, cast to the dtype in which the program stores adapters. If
      the adapters had this dtype when they were saved, they have the same bits again.

    Raises:
      ValueError: The folder is missing or damaged; or alpha, a name or a shape differs from the
        program's. The message names every difference, and nothing has been loaded.

    Communication:
      None. Each device receives its shard.
    """
    require("load_adapters", "safetensors")
    from safetensors import SafetensorError, safe_open

    model = lora_interface("load_adapters", program).low_rank
    check_state("load_adapters", program.abstract_state, state)
    source = local_path(directory, "load_adapters: directory")
    leaves = variable_leaves(program)
    adapters = {_path(leaf): leaf for leaf in leaves if is_adapter(leaf.name)}
    try:
        description = read_object(source / DESCRIPTION_FILE)
        open_tensors(source / ARRAYS_FILE)[0].close()  # Raises for a FIFO, for example.
        with safe_open(source / ARRAYS_FILE, framework="np", backend="pread") as file:
            differences = _differences(adapters, file)
            # Arrays are read only if their shapes match the program.
            found = {} if differences else {path: file.get_tensor(path) for path in adapters}
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"load_adapters: {source} cannot be read: {printable(error)}; expected a folder of "
            "save_adapters."
        ) from error
    if (alpha := description.get("alpha")) != model.alpha:
        raise ValueError(
            f"load_adapters: the adapters in {source} are for alpha={alpha!r:.100}, expected "
            f"the model's {model.alpha}, because products are multiplied by alpha / rank."
        )
    if differences:
        raise ValueError(
            f"load_adapters: the adapters in {source} are not the program's: "
            f"{'; '.join(list_some(differences))}. Name the same targets and ranks in lora."
        )
    arrays, structure = jax.tree.flatten(variables_of(state))
    for number, leaf in enumerate(leaves):
        if is_adapter(leaf.name):
            arrays[number] = place_leaf("load_adapters", leaf, found[_path(leaf)])
    return state.replace(params=jax.tree.unflatten(structure, arrays)["params"])


def _path(leaf: Leaf) -> str:
    return leaf.name.partition("/")[2]


def _differences(leaves: Mapping[str, Leaf], file: Any) -> list[str]:
    """Returns a line for each difference between a file and `leaves` in name, shape or dtype."""
    names = set(file.keys())
    lines = [f"{name} is left over" for name in sorted(names - leaves.keys())]
    for path, leaf in leaves.items():
        expected = show_array(np.float32, leaf.shape)
        if path not in names:
            lines.append(f"{path} is missing, expected {expected}")
            continue
        found = file.get_slice(path)
        shape, code = tuple(found.get_shape()), found.get_dtype()
        if shape != leaf.shape or code != FLOAT32:
            got = f"{'float32' if code == FLOAT32 else code}[{','.join(map(str, shape))}]"
            lines.append(f"{path} is {got}, expected {expected}")
    return lines
