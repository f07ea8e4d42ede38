"""Writes and reads LoRA adapters in the format of the library peft.

A directory has `adapter_config.json` and `adapter_model.safetensors`, with two matrices for each
adapted module of the model in transformers: `lora_A` `[r, in]` and `lora_B` `[out, r]`, or
`lora_embedding_A` and `lora_embedding_B` for an embedding. `peft_places` finds the module of each
of our parameters, `peft_fused` converts the adapters of fused weights, and `peft_experts` those of
fused experts.

The tensors decide which modules have an adapter, and its rank. Modules of stacked layers may
differ: adapters are padded with zeros to the largest rank of the stack, and a layer without an
adapter gets zeros. Peft may scale the products of some modules by other factors (`alpha_pattern`).
Then `lora_b` is multiplied by the quotient of the factors, so that the products are the same.

Everything else that peft can write changes the model in other ways and is refused by its name.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, AxisType

from manualpar.core.program.guarded_step import check_state
from manualpar.core.program.load_state import plain_leaves, variable_leaves, variables_of
from manualpar.core.program.program import Program
from manualpar.core.state.state_arrays import list_some, read_unpadded
from manualpar.core.state.train_state import TrainState
from manualpar.errors import printable, require
from manualpar.layers.attention.devices import Device, planned_device
from manualpar.models import Transformer
from manualpar.models.finetuning.adapted_parameter import DOWN, UP, adapted_path, is_adapter
from manualpar.models.finetuning.adapter_files import (
    new_folder,
    parameter_path,
    read_adapters,
    replace_adapters,
    write_folder,
)
from manualpar.models.finetuning.lora import LowRankModel, lora
from manualpar.models.finetuning.merging import lora_interface
from manualpar.models.finetuning.quantized import QuantizedModel
from manualpar.models.pretrained.architecture import read_architecture
from manualpar.models.pretrained.directory import CONFIG_FILE as MODEL_CONFIG_FILE
from manualpar.models.pretrained.peft_config import PeftConfig, peft_config, read_peft_config
from manualpar.models.pretrained.peft_experts import (
    join_experts,
    modules_of_experts,
    split_experts,
    weights_to_name,
)
from manualpar.models.pretrained.peft_fused import fused_modules, join_fused, split_fused
from manualpar.models.pretrained.peft_places import (
    PREFIX,
    Place,
    find_family,
    find_places,
    may_have_place,
)
from manualpar.models.pretrained.sources import transformer_of
from manualpar.models.pretrained.tensor_bytes import DTYPES, read_header, read_slice
from manualpar.system.storage import GivenPath, local_path
from manualpar.system.storage.untrusted import open_tensors

CONFIG_FILE, ARRAYS_FILE = "adapter_config.json", "adapter_model.safetensors"
PICKLED = "adapter_model.bin"


def export_peft(
    program: Program, state: TrainState, directory: GivenPath, *, base: str = ""
) -> Path:
    """Writes the adapters of a state for the library peft, without the base model.

    ```python
    export_peft(program, state, "adapters/mine", base="models/llama")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "adapters/mine")
    ```

    Args:
      program: A program of a `Transformer` with adapters, see `lora`.
      state: The program's state; not donated.
      directory: The folder to make. It must not exist.
      base: The directory or the name of the base model, for `base_model_name_or_path`. The config
        in a directory decides how the modules are named.

    Returns:
      The folder.

    Raises:
      ValueError: The model has no adapters, or adapters that peft has no tensors for; or the
        folder exists already. Nothing has been written.
      OSError: The files cannot be written; no folder has been made.

    Communication:
      With several processes an all-gather for each adapter; with one process none.
    """
    require("export_peft", "safetensors")
    from safetensors.numpy import save

    model = lora_interface("export_peft", program).low_rank
    check_state("export_peft", program.abstract_state, state)
    target = new_folder("export_peft", directory)
    is_directory = bool(base) and (Path(base) / MODEL_CONFIG_FILE).is_file()
    family = read_architecture(base).family if is_directory else ""
    places, of_model = _places_of(program, family)
    vocab_size = transformer_of(program).vocab_size
    values: dict[str, np.ndarray] = {}
    for path, own in read_adapters("export_peft", program, state).items():
        part = DOWN if path.endswith(DOWN) else UP
        for place in places[adapted_path(path)]:
            one = own[place.piece.entry]
            if "V" in (dims := place.dims(part)[0]):
                one = np.take(one, range(vocab_size), axis=dims.index("V") + (part == UP))
            values[place.names[part == UP]] = place.to_peft(part, one)
    fused = join_experts(values, modules_of_experts(of_model), model.scale)
    ranks = join_fused(values, fused_modules(of_model), model.scale)
    ranks |= {
        place.module: len(values[place.names[0]])
        for of_path in places.values()
        for place in of_path
        if place.names[0] in values
    }
    if transformer_of(program).experts.num_experts:
        for module in weights_to_name(ranks):
            fused[f"{module}.weight"] = ranks.pop(module)

    def make_files() -> dict[str, bytes]:
        config = peft_config(ranks, fused, model.alpha, base, rank_stabilized=model.rank_stabilized)
        return {
            ARRAYS_FILE: save(values, metadata={"format": "pt"}),
            CONFIG_FILE: json.dumps(config, indent=2).encode() + b"\n",
        }

    write_folder("export_peft", target, make_files)
    return target


def lora_of_peft(model: Any, directory: GivenPath) -> LowRankModel:
    """Adds the adapters of a directory of peft to a model; `load_peft` loads their values.

    ```python
    model = lora_of_peft(Transformer(**read_architecture("models/llama").fields), "adapters/mine")
    state = load_hf(program, "models/llama", missing="init")
    state = load_peft(program, state, "adapters/mine")
    ```

    Args:
      model: A `Transformer`, or the result of `quantized` of one.
      directory: A directory that `save_pretrained` of peft or `export_peft` wrote.

    Raises:
      TypeError: The model is another one.
      ValueError: The files are damaged, or have something that `lora` has not; the message names
        it.
    """
    base: Any = model.model if isinstance(model, QuantizedModel) else model
    if not isinstance(base, Transformer):
        raise TypeError(
            f"lora_of_peft: model is a {type(base).__name__}, expected a Transformer or quantized "
            "of one."
        )
    source = local_path(directory, "lora_of_peft: directory")
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    # Nothing here asks JAX for its devices, which a command chooses later.
    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    with planned_device(Device("cpu")), jax.sharding.use_abstract_mesh(mesh):
        variables = jax.eval_shape(lambda x: base.init(jax.random.key(0), x), tokens)
    params = flatten_dict(nn.meta.unbox(variables["params"]), sep="/")
    shapes = {path: x.shape for path, x in params.items()}
    config, tensors = read_peft_config(source / CONFIG_FILE), _read(source)
    family = find_family(base, shapes, tensors)
    places = find_places(base, shapes, list(filter(may_have_place, shapes)), family=family)
    wrong = _split_adapters(tensors, config, places)
    targets: dict[str, int] = {}
    for path, of_path in places.items():
        found = [tensors[place.names[0]] for place in of_path if place.names[0] in tensors]
        if rank := max((len(x) for x in found), default=0):
            targets[path.removesuffix("/kernel")] = rank
    if left := wrong + _left_over(tensors, places):
        raise ValueError(
            f"{source} has {', '.join(list_some(left))}; expected LoRA adapters of the layers, "
            "the experts, the untied embedding or the head of the model."
        )
    if not targets:
        raise ValueError(
            f"{source} has no adapters of this model, expected tensors such as lora_A."
        )
    return lora(model, targets, alpha=config.alpha, rank_stabilized=config.rank_stabilized)


def load_peft(program: Program, state: TrainState, directory: GivenPath) -> TrainState:
    """Loads adapters that peft or `export_peft` has written, and returns the new state.

    Args:
      program: A program of a model with these adapters, such as `lora_of_peft` makes.
      state: The program's state; not donated. Only its adapters are replaced.
      directory: The directory of the adapters.

    Raises:
      ValueError: The files are damaged, have something that `lora` has not, or do not fit the
        program's adapters. The message names it, and nothing has been loaded.

    Communication:
      None. Each device receives its shard.
    """
    model = lora_interface("load_peft", program).low_rank
    check_state("load_peft", program.abstract_state, state)
    source = local_path(directory, "load_peft: directory")
    config, tensors = read_peft_config(source / CONFIG_FILE), _read(source)
    vocab_size = transformer_of(program).vocab_size
    places, of_model = _places_of(program, tensors=tensors)
    lines = _split_adapters(tensors, config, of_model)
    leaves, arrays = variable_leaves(program), jax.tree.leaves(variables_of(state))
    by_path = {parameter_path(leaf): (leaf, x) for leaf, x in zip(leaves, arrays, strict=True)}
    values: dict[str, np.ndarray] = {}
    lines += [f"{name} is left over" for name in _left_over(tensors, places)]
    for path, (leaf, _) in by_path.items():
        if not is_adapter(path):
            continue
        of_path = places[adapted_path(path)]
        own = [place for place in of_path if not tensors.keys().isdisjoint(place.names)]
        if not own:
            lines.append(f"{of_path[0].names[path.endswith(UP)]} is missing")
        values[path] = np.zeros(leaf.shape, np.float32)
        for place in own:
            where = values[path][place.piece.entry]
            wrong = list(_fill(where, path, place, tensors, vocab_size))
            lines += wrong
            if path.endswith(UP) and not wrong and (rank := tensors[place.names[1]].shape[1]):
                where *= config.scale(place.module, rank) / model.scale(where.shape[0])
    for path, (place, *_) in places.items():
        copy = tensors.get(f"{PREFIX}{place.module}.base_layer.weight")
        if copy is not None and path in by_path:
            x = read_unpadded("load_peft", *by_path[path])
            x = x[:vocab_size] if path == "embedding" else x[:, :vocab_size].T
            if copy.shape != x.shape or (copy.astype(x.dtype) != x).any():
                lines.append(f"{place.module}.base_layer.weight is another {path} than the base's")
    if lines:
        raise ValueError(
            f"load_peft: the adapters in {source} are not the program's: "
            f"{'; '.join(list_some(lines))}. Make the model with lora_of_peft."
        )
    return replace_adapters("load_peft", program, state, values)


def _fill(
    where: np.ndarray, path: str, place: Place, tensors: Mapping[str, np.ndarray], vocab_size: int
) -> Iterator[str]:
    """Copies a tensor to `where`, one layer's `lora_a` or `lora_b`; yields what does not fit."""
    part = DOWN if path.endswith(DOWN) else UP
    name = place.names[part == UP]
    if name not in tensors:
        yield f"{name} is missing"
        return
    x, own = tensors[name], place.dims(part)[0]
    sizes = where.shape[:-1] if part == DOWN else where.shape[1:]
    sizes = tuple(vocab_size if dim == "V" else size for dim, size in zip(own, sizes, strict=True))
    most = where.shape[-1] if part == DOWN else where.shape[0]
    rank, features = x.shape if part == DOWN else x.shape[::-1]
    other = tensors.get(place.names[part == DOWN])
    is_unlike = other is not None and other.shape[part == DOWN] != rank
    if features != math.prod(sizes) or rank > most or is_unlike:
        yield f"{name} has the shape {list(x.shape)}, expected rank {most} and {math.prod(sizes)}"
        return
    one = place.from_peft(part, x, dict(zip(own, sizes, strict=True)))
    where[tuple(map(slice, one.shape))] = one


def _places_of(
    program: Program, family: str = "", tensors: Collection[str] = ()
) -> tuple[dict[str, list[Place]], dict[str, list[Place]]]:
    """Returns the modules of each adapted parameter of a program by path, and of all parameters.

    The names of the tensors in a file decide the family, if there are any.
    """
    plain, _ = plain_leaves(program, variable_leaves(program))
    shapes = {parameter_path(leaf): leaf.shape for leaf in plain}
    adapted = {adapted_path(path) for path in shapes if is_adapter(path)}
    shapes = {path: shape for path, shape in shapes.items() if not is_adapter(path)}
    model = transformer_of(program)
    if tensors:
        family = find_family(model, shapes, tensors)
    places = find_places(model, shapes, adapted, family=family, refuse=True)
    return places, find_places(model, shapes, list(filter(may_have_place, shapes)), family=family)


def _split_adapters(
    tensors: dict[str, np.ndarray], config: PeftConfig, places: Mapping[str, Sequence[Place]]
) -> list[str]:
    """Splits the adapters of fused weights and of fused experts in `tensors`.

    `places` has the modules of all parameters of the model.

    Returns:
      Descriptions of fused tensors that do not fit the model.
    """
    experts = modules_of_experts(places)
    wrong = split_experts(tensors, experts, config.targets, config.scale)
    return wrong + split_fused(tensors, fused_modules(places), config.scale)


def _left_over(
    tensors: Mapping[str, np.ndarray], places: Mapping[str, Sequence[Place]]
) -> list[str]:
    known = {
        name
        for of_path in places.values()
        for place in of_path
        for name in (*place.names, f"{PREFIX}{place.module}.base_layer.weight")
    }
    used = {name for name, x in tensors.items() if x.size}
    return sorted(printable(name) for name in used - known)


def _read(directory: Path) -> dict[str, np.ndarray]:
    """Reads the tensors of an adapter in float32.

    Raises:
      ValueError: The file is missing, damaged or pickled, or has tensors of another kind.
    """
    require("load_peft", "safetensors")
    import safetensors

    path, found = directory / ARRAYS_FILE, {}
    try:
        file, _ = open_tensors(path)
        with file, safetensors.safe_open(path, framework="np", backend="pread"):
            for name, place in read_header(file).items():
                if place.dtype not in DTYPES.values() or len(place.shape) != 2:
                    raise ValueError(
                        f"has {printable(name)} of {place.dtype} with {len(place.shape)} dims, "
                        "expected matrices of LoRA adapters"
                    )
                whole = tuple(map(slice, place.shape))
                x = read_slice(file.fileno(), place, whole, jnp.dtype(place.dtype))
                found[name] = x.astype(np.float32)
    except FileNotFoundError:
        pickled = " Pickled adapters are not unpickled." if (directory / PICKLED).exists() else ""
        raise ValueError(
            f"{directory} has no {ARRAYS_FILE}, expected a directory of peft.{pickled}"
        ) from None
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} {printable(error)}.") from None
    return found
