"""Saves adapters in a folder without the base model: a few MB instead of many GB.

`adapters.safetensors` contains the adapters by their paths, and the parameters that `lora` saves
with them, in float32, which represents narrower dtypes exactly. `adapters.json` contains the
targets with their ranks, alpha, and whether the adapters are rank-stabilized.

Invariants: a folder gets its final name only when it is complete, see
`manualpar.system.storage.drafts`. The adapters in the file are not sharded, so that programs on any
mesh and of any strategy can load them.
"""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from manualpar.checks.guarded_step import check_state
from manualpar.core.mesh.mesh_context import no_mesh, with_auto_axes
from manualpar.core.parameters.sharded_parameter import pad_leaf, unpad_leaf
from manualpar.core.program.program import Program
from manualpar.core.program.state_arrays import (
    Leaf,
    place_leaf,
    plain_leaves,
    read_unpadded,
    variable_leaves,
    variables_of,
)
from manualpar.core.state.train_state import TrainState
from manualpar.core.summary import show_array
from manualpar.errors import list_some, printable, require
from manualpar.models.finetuning.lora import (
    DOWN,
    MAGNITUDE,
    UP,
    LoRAInterface,
    LowRankModel,
    adapted_path,
    is_adapter,
    lengths,
    stacked_product,
)
from manualpar.system.storage import GivenPath, draft_of, local_path, publish, sync, writing
from manualpar.system.storage.untrusted import (
    model_file,
    open_tensors,
    read_model_object,
    write_file,
)

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

    model = lora_interface("save_adapters", program).low_rank
    check_state("save_adapters", program.abstract_state, state)
    target = new_folder("save_adapters", directory)
    values = read_adapters("save_adapters", program, state)

    def make_files() -> dict[str, bytes]:
        description = {
            "alpha": model.alpha,
            "rank_stabilized": model.rank_stabilized,
            "targets": dict(model.targets),
        }
        return {
            ARRAYS_FILE: save(values),  # Not `save_file`, which ignores the umask.
            DESCRIPTION_FILE: json.dumps(description, indent=2).encode() + b"\n",
        }

    write_folder("save_adapters", target, make_files)
    return target


def load_adapters(program: Program, state: TrainState, directory: GivenPath) -> TrainState:
    """Loads adapters that `save_adapters` has written, on any mesh, and returns the new state.

    Args:
      program: A program of a model with the same targets, ranks, alpha and `rank_stabilized`.
      state: The program's state; not donated. Only its adapters, and what is saved with them, are
        replaced: the other parameters and the optimizer's state stay the same.
      directory: The folder that `save_adapters` has written.

    Returns:
      The state with the saved adapters, cast to the dtype in which the program stores adapters. If
      the adapters had this dtype when they were saved, they have the same bits again.

    Raises:
      ValueError: The folder is missing or damaged; or alpha, `rank_stabilized`, a name or a shape
        differs from the program's. The message names every difference, and nothing has been loaded.

    Communication:
      None. Each device receives its shard.
    """
    require("load_adapters", "safetensors")
    from safetensors import SafetensorError, safe_open

    model = lora_interface("load_adapters", program).low_rank
    check_state("load_adapters", program.abstract_state, state)
    source = local_path(directory, "load_adapters: directory")
    leaves = variable_leaves(program)
    adapters = {parameter_path(leaf): leaf for leaf in leaves if is_saved(model, leaf)}
    try:
        description = read_model_object(source / DESCRIPTION_FILE, source)
        arrays = model_file(source / ARRAYS_FILE, source)
        open_tensors(arrays)[0].close()  # Raises for a header that is too long.
        with safe_open(arrays, framework="np", backend="pread") as file:
            differences = _differences(adapters, file)
            # Arrays are read only if their shapes match the program.
            found = {} if differences else {path: file.get_tensor(path) for path in adapters}
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"load_adapters: {source} cannot be read: {printable(error)}; expected a folder of "
            "save_adapters."
        ) from error
    # Folders of earlier versions have no entry `rank_stabilized`.
    for field, found_there in (
        ("alpha", description.get("alpha")),
        ("rank_stabilized", description.get("rank_stabilized", False)),
    ):
        if found_there != (own := getattr(model, field)):
            raise ValueError(
                f"load_adapters: the adapters in {source} are for {field}={found_there!r:.100}, "
                f"expected the model's {own}, because products are multiplied by alpha / rank, or "
                "by alpha / sqrt(rank) if rank_stabilized is set."
            )
    if differences:
        raise ValueError(
            f"load_adapters: the adapters in {source} are not the program's: "
            f"{'; '.join(list_some(differences))}. Name the same targets and ranks in lora."
        )
    return replace_adapters("load_adapters", program, state, found)


def new_folder(name: str, directory: GivenPath) -> Path:
    """Returns the path of a folder to make; refuses one that exists already.

    `name` is the caller's, for error messages.

    Communication:
      The communication of `any_process`.
    """
    # Imported here so that `import manualpar` does not load code for several processes.
    from manualpar.system.cluster.agreement import any_process

    target = local_path(directory, f"{name}: directory").absolute()
    if any_process(target.exists()):
        raise ValueError(
            f"{name}: {target} exists already, expected a new folder. Name another folder."
        )
    return target


def read_adapters(name: str, program: Program, state: TrainState) -> dict[str, np.ndarray]:
    """Returns the complete adapters of a state by their paths, in float32, in every process.

    The parameters that are saved with adapters are among them.

    Communication:
      With several processes an all-gather for each array; with one process none.
    """
    model = lora_interface(name, program).low_rank
    arrays = zip(variable_leaves(program), jax.tree.leaves(variables_of(state)), strict=True)
    return {
        parameter_path(leaf): read_unpadded(name, leaf, x).astype(np.float32)
        for leaf, x in arrays
        if is_saved(model, leaf)
    }


def write_folder(name: str, target: Path, make_files: Callable[[], Mapping[str, bytes]]) -> None:
    """Makes files by their names and writes them in process 0: the complete folder, or none.

    Communication:
      The communication of `failing_together`.
    """
    from manualpar.system.cluster.agreement import failing_together

    with failing_together():
        if jax.process_index() == 0:
            files = make_files()
            with writing(name, target), draft_of(target) as draft:
                for file, data in files.items():
                    write_file(draft / file, data)
                    sync(draft / file)
                publish(draft, target)


def replace_adapters(
    name: str, program: Program, state: TrainState, values: Mapping[str, np.ndarray]
) -> TrainState:
    """Returns a state with other values of some parameters, given by their paths.

    Communication:
      None. Each device receives its shard.
    """
    wrong = [path for path, x in values.items() if not np.isfinite(x).all()]
    if wrong:
        raise ValueError(
            f"{name}: {printable(', '.join(list_some(wrong)))} would contain NaN or infinity, "
            "expected finite numbers; the adapters are damaged, or their training has diverged. "
            "Load others."
        )
    arrays, structure = jax.tree.flatten(variables_of(state))
    for number, leaf in enumerate(variable_leaves(program)):
        if leaf.keys[0] == "params" and (path := parameter_path(leaf)) in values:
            arrays[number] = place_leaf(name, leaf, values[path])
    return state.replace(params=jax.tree.unflatten(structure, arrays)["params"])


def is_saved(model: LowRankModel, leaf: Leaf) -> bool:
    """Returns whether an array of a program is saved with the adapters."""
    return leaf.keys[0] == "params" and model.saves(parameter_path(leaf))


def parameter_path(leaf: Leaf) -> str:
    """Returns the path of a parameter, without the name of its collection."""
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


# -------------------------------------------------------------------------------------------------
# Merges LoRA adapters into the kernels of their layers, on the devices.
#
# Invariants: sums are computed in float32 and rounded once, to the dtype of the kernel. Each
# device stores only its shards of the kernels, before and after.


def merge_lora(program: Program, state: TrainState) -> dict[str, Any]:
    """Merges the adapters of a state into the kernels of their layers.

    ```python
    params = merge_lora(program, state)
    plain = manualpar.fsdp(model, tx, loss_fn, mesh=mesh, batch=batch).init_from(params)
    ```

    Args:
      program: A program of a model with adapters, see `lora`.
      state: The program's state; not donated.

    Returns:
      The parameters of the original model by their paths: global arrays, sharded and padded as in
      the state. Parameters in int8 are dequantized. They differ from the original parameters by
      rounding errors, but the adapters were trained with the dequantized values.

    Raises:
      ValueError: The model has no adapters, or the state does not belong to the program.

    Communication:
      All-gathers of adapters, if a device needs more than its shard; for parameters in int8, the
      communication of `Encoding.decode`.
    """
    lora_interface("merge_lora", program)
    check_state("merge_lora", program.abstract_state, state)
    params = {
        leaf.name.partition("/")[2]: x
        for leaf, x in given_variables(program, state)
        if leaf.keys[0] == "params"
    }
    return unflatten_dict(params, sep="/")


def given_variables(program: Program, state: TrainState) -> list[tuple[Leaf, jax.Array]]:
    """Returns the original model's variables: merged, dequantized, and without adapters.

    Each device stores only its shards of the variables. The communication is the same as in
    `merge_lora`.
    """
    interface, leaves = program.model.interface, variable_leaves(program)
    # A state may have arrays on the host, for example from flax's `from_bytes`.
    by_name: dict[str, Any] = {
        leaf.name: x if isinstance(x, jax.Array) else jax.device_put(x, leaf.abstract.sharding)
        for leaf, x in zip(leaves, jax.tree.leaves(variables_of(state)), strict=True)
    }
    paddings = {leaf.name: leaf.padding for leaf in leaves}
    plain, encodings = plain_leaves(program, leaves)
    for name, each in encodings.items():
        by_name[name] = each.decode(by_name[each.codes.name], by_name[each.scales.name])
        paddings[name] = each.padding
    by_name = {leaf.name: by_name[leaf.name] for leaf in plain}
    if isinstance(interface, LoRAInterface):
        shardings = {name: x.sharding for name, x in by_name.items()}
        merge = with_auto_axes(
            functools.partial(_merge, paddings, interface.low_rank.scale),
            mesh=program.mesh,
            out_specs={name: x.spec for name, x in shardings.items()},
        )
        with no_mesh():
            by_name = jax.jit(merge, out_shardings=shardings)(by_name)
    return [(leaf, by_name[leaf.name]) for leaf in plain if not is_adapter(leaf.name)]


def lora_interface(function: str, program: Program) -> LoRAInterface:
    """Returns the interface of the program's model; refuses a model without LoRA adapters."""
    interface = program.model.interface
    if not isinstance(interface, LoRAInterface):
        raise ValueError(
            f"{function}: the program's model is {interface!r}, which has no adapters, expected "
            "the result of lora."
        )
    return interface


def _merge(
    paddings: dict[str, tuple[int, ...]],
    scale: Callable[[int], float],
    variables: dict[str, jax.Array],
) -> dict[str, jax.Array]:
    merged = dict(variables)

    def unpadded(path: str) -> jax.Array:
        return unpad_leaf(variables[path], paddings[path])

    for path in [path for path in variables if is_adapter(path) and path.endswith(DOWN)]:
        kernel_path, up_path = adapted_path(path), path.removesuffix(DOWN) + UP
        kernel, a, b = map(unpadded, (kernel_path, path, up_path))
        # All three arrays begin with the dims along which loops stack layers.
        loops = a.ndim + b.ndim - 2 - kernel.ndim
        factor = scale(a.shape[-1])
        whole = kernel.astype(jnp.float32) + factor * stacked_product(a, b, loops)
        if (name := path.removesuffix(DOWN) + MAGNITUDE) in variables:
            ratio = unpadded(name) / lengths(kernel, a, b, factor, loops=loops)
            whole *= jnp.expand_dims(ratio, range(loops, a.ndim - 1))
        merged[kernel_path] = pad_leaf(whole.astype(kernel.dtype), paddings[kernel_path])
    return merged
