"""Writes and reads LoRA adapters in the format of the library peft.

A directory has `adapter_config.json` and `adapter_model.safetensors`, with two matrices for each
adapted module of the model in transformers: `lora_A` `[r, in]` and `lora_B` `[out, r]`, or
`lora_embedding_A` and `lora_embedding_B` for an embedding. With DoRA a module also has a
`lora_magnitude_vector` `[out]`. Modules that are trained as a whole (`modules_to_save`), and an
embedding and a head that have got rows for new tokens, have the tensors of the base model.

The tensors decide which modules have an adapter, and its rank. Modules of stacked layers may
differ: adapters are padded with zeros to the largest rank of the stack, and a layer without an
adapter gets zeros. Peft may scale the products of some modules by other factors (`alpha_pattern`).
Then `lora_b` is multiplied by the quotient of the factors, so that the products are the same.

Everything else that peft can write changes the model in other ways and is refused by its name.
"""

import dataclasses
import json
import math
import re
import warnings
from collections.abc import (
    Collection,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, AxisType

from manualpar.checks.guarded_step import check_state
from manualpar.core.program.program import Program
from manualpar.core.program.state_arrays import (
    Leaf,
    plain_leaves,
    read_unpadded,
    variable_leaves,
    variables_of,
)
from manualpar.core.state.train_state import TrainState
from manualpar.errors import list_some, printable, require
from manualpar.layers.attention.causal_attention import Device, planned_device
from manualpar.models import Transformer
from manualpar.models.finetuning.adapter_files import (
    lora_interface,
    new_folder,
    parameter_path,
    read_adapters,
    replace_adapters,
    write_folder,
)
from manualpar.models.finetuning.lora import (
    DOWN,
    MAGNITUDE,
    UP,
    LowRankModel,
    adapted_path,
    is_adapter,
    lora,
)
from manualpar.models.finetuning.quantized import QuantizedModel
from manualpar.models.pretrained.architecture import (
    read_architecture,
)
from manualpar.models.pretrained.family import is_float32
from manualpar.models.pretrained.peft_modules import (
    DELTA,
    HEADS,
    MAGNITUDE_VECTOR,
    PREFIX,
    TABLES,
    TOKENS,
    Place,
    find_family,
    find_places,
    from_whole,
    fused_modules,
    is_known,
    join_experts,
    join_fused,
    may_have_place,
    module_of,
    modules_of_experts,
    split_experts,
    split_fused,
    to_whole,
    weights_to_name,
    whole_pieces,
)
from manualpar.models.pretrained.tensor_files import CONFIG_FILE as MODEL_CONFIG_FILE
from manualpar.models.pretrained.tensor_files import DTYPES, read_header, read_slice
from manualpar.models.pretrained.tensor_names import TensorPiece
from manualpar.models.pretrained.tensor_sources import transformer_of
from manualpar.system.storage import GivenPath, local_path
from manualpar.system.storage.untrusted import model_file, open_tensors, read_model_object

# -------------------------------------------------------------------------------------------------
# Reads and writes the `adapter_config.json` of the library peft.
#
# A key that changes the function of the model, and for which `lora` has nothing, is refused by its
# name. `USED` are the keys that are read, `UNUSED` the keys without effect on a trained adapter.


USED = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern"),
    *("target_parameters", "lora_dropout", "use_dora", "modules_to_save", "ensure_weight_tying"),
    "trainable_token_indices",
)
# The tensors say which modules have adapters. The others concern training, or name files.
UNUSED = frozenset(
    {
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("inference_mode", "eva_config", "qalora_group_size", "megatron_core"),
        *("base_model_name_or_path", "revision", "auto_mapping", "task_type", "peft_version"),
        *("fan_in_fan_out", "runtime_config"),  # The first is how the base stores the weight.
    }
)
# Keys with a value that means the same as none.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # Others change the base model when an adapter begins.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
EMPTY: tuple[Any, ...] = (None, False, "", [], {})
LARGEST = 2**20
NUMBER = "a number above 0 that float32 represents"
_PLAIN = re.compile(r"\^?[\w.]+\$?")


class PeftConfig(NamedTuple):
    """The numbers of an `adapter_config.json`.

    Attributes:
      alpha: The number over which the rank divides.
      rank_stabilized: Whether the square root of the rank divides instead.
      alphas: Other numbers for some modules, by the end of their names.
      parameters: The fused parameters of experts that have adapters, by the end of their names.
      dropout: The share of the inputs that is dropped in training.
      has_magnitudes: Whether the adapters have magnitudes (DoRA).
      modules: The modules that are trained as a whole, by the end of their names.
      is_tied: Whether a head that is tied to the embedding is trained as the embedding is.
      tokens: The tokens whose rows are trained, by the end of a module's name; `""` stands for the
        embedding.
    """

    alpha: float
    rank_stabilized: bool
    alphas: Mapping[str, float]
    parameters: tuple[str, ...] = ()
    dropout: float = 0.0
    has_magnitudes: bool = False
    modules: tuple[str, ...] = ()
    is_tied: bool = False
    tokens: Mapping[str, tuple[int, ...]] = {}

    def tokens_of(self, module: str, *, is_embedding: bool) -> tuple[int, ...]:
        """Returns the tokens whose rows of an embedding or a head are trained."""
        for name, tokens in self.tokens.items():
            if module.endswith(name) if name else is_embedding:
                return tokens
        return ()

    def trains(self, module: str) -> bool:
        """Returns whether the module with this name is trained as a whole."""
        parts = module.split(".")
        around = (".".join(parts[: number + 1]) for number in range(len(parts)))
        return any(name.endswith(self.modules) for name in around)

    def targets(self, parameter: str) -> bool:
        """Returns whether the fused parameter with this name has an adapter."""
        return any(f".{parameter}".endswith(f".{name}") for name in self.parameters)

    def scale(self, module: str, rank: int) -> float:
        """Returns the factor of the product in a module whose adapter has this rank."""
        alpha = self.alpha
        for key, value in self.alphas.items():
            name = key.strip("^$")
            if module == name or (not key.startswith("^") and module.endswith(f".{name}")):
                alpha = value
                break
        return alpha / (rank**0.5 if self.rank_stabilized else rank)


def read_peft_config(path: Path) -> PeftConfig:
    """Reads an `adapter_config.json`."""
    try:
        given = read_model_object(path, path.parent)
    except FileNotFoundError:
        raise ValueError(
            f"{path.parent} has no {path.name}, expected a directory of peft."
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} {printable(error)}; expected the config of peft.") from None

    def refuse(key: str, expected: str) -> ValueError:
        return ValueError(
            f"{path}: {printable(key)} is {given.get(key)!r:.100}, expected {expected}."
        )

    if given.get("peft_type") != "LORA":
        raise refuse("peft_type", "'LORA'")
    alpha: Any = given.get("lora_alpha")
    if not _is_number(alpha):
        raise refuse("lora_alpha", NUMBER)
    rank = given.get("r")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 < rank < LARGEST:
        raise refuse("r", "a rank of at least 1")
    for key in ("use_rslora", "use_dora", "ensure_weight_tying"):
        if not isinstance(given.get(key, False), bool):
            raise refuse(key, "true or false")
    dropout = given.get("lora_dropout") or 0.0
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise refuse("lora_dropout", "a number from 0 to below 1")
    modules = given.get("modules_to_save") or []
    if not isinstance(modules, list) or not all(isinstance(x, str) and x for x in modules):
        raise refuse("modules_to_save", "names of modules")
    tokens = given.get("trainable_token_indices") or {}
    tokens = {"": tokens} if isinstance(tokens, list) else tokens
    if not isinstance(tokens, dict) or not all(map(_are_tokens, tokens.values())):
        raise refuse("trainable_token_indices", "tokens, or a dict of them by module")
    alphas = given.get("alpha_pattern") or {}
    if not isinstance(alphas, dict) or not all(map(_is_number, alphas.values())):
        raise refuse("alpha_pattern", f"{NUMBER} for the name of each module")
    if not all(map(_PLAIN.fullmatch, alphas)):
        raise refuse("alpha_pattern", "names of modules, not regular expressions")
    parameters = given.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(
        isinstance(name, str) and is_known(name) for name in parameters
    ):
        raise refuse(
            "target_parameters",
            "names that end with experts.gate_up_proj, experts.down_proj or .weight",
        )
    for key, value in given.items():
        if key in USED or key in UNUSED or value in (*EMPTY, *HARMLESS.get(key, ())):
            continue
        raise refuse(key, "nothing, because lora has no such option")
    return PeftConfig(
        float(alpha),
        given.get("use_rslora", False),
        alphas,
        tuple(parameters),
        dropout=float(dropout),
        has_magnitudes=given.get("use_dora", False),
        modules=tuple(modules),
        is_tied=given.get("ensure_weight_tying", False),
        tokens={name: tuple(x) for name, x in tokens.items()},
    )


def peft_config(
    ranks: Mapping[str, int],
    parameters: Mapping[str, int],
    model: LowRankModel,
    base: str,
    *,
    modules: Collection[str],
    is_tied: bool,
) -> dict[str, Any]:
    """Makes an `adapter_config.json`.

    Args:
      ranks: The rank of each adapted module, by its name.
      parameters: The rank of each parameter for `target_parameters`, by its name.
      is_tied: Whether one of `modules` is an embedding that is also the head.
    """
    both = {**ranks, **parameters}
    # Peft warns of a pattern that matches parameters and no module, and still applies it.
    rank = max((parameters or ranks).values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": model.alpha,
        "use_rslora": model.rank_stabilized,
        "rank_pattern": {f"^{name}$": own for name, own in both.items() if own != rank},
        "target_modules": sorted(ranks) or None,
        "target_parameters": sorted(parameters) or None,
        "bias": "none",
        "lora_dropout": model.dropout,
        "use_dora": model.magnitudes,
        "modules_to_save": sorted(modules) or None,
        **({"ensure_weight_tying": True} if is_tied else {}),
    }


def _are_tokens(x: Any) -> bool:
    """Returns whether `x` is a list of different tokens."""
    if not isinstance(x, list) or not x or any(type(token) is not int for token in x):
        return False
    return min(x) >= 0 and len({*x}) == len(x)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and x > 0 and is_float32(x)


# -------------------------------------------------------------------------------------------------


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
    adapters = read_adapters("export_peft", program, state)
    base_size = read_architecture(base).fields["vocab_size"] if is_directory else vocab_size
    values, modules = _whole_tensors(program, state, family, set(adapters), base_size != vocab_size)
    for path, own in adapters.items():
        part = DOWN if path.endswith(DOWN) else UP
        for place in places[adapted_path(path)] if is_adapter(path) else ():
            one = own[place.piece.entry]
            if path.endswith(MAGNITUDE):
                values[place.magnitude] = place.to_peft(UP, one[None])[:, 0].copy()
                continue
            if "V" in (dims := place.dims(part)[0]):
                one = np.take(one, range(vocab_size), axis=dims.index("V") + (part == UP))
            values[place.names[part == UP]] = place.to_peft(part, one)
    is_tied = transformer_of(program).tied_head and "embedding" in adapters
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
        config = peft_config(ranks, fused, model, base, modules=modules, is_tied=is_tied)
        return {
            ARRAYS_FILE: save(values, metadata={"format": "pt"}),
            CONFIG_FILE: json.dumps(config, indent=2).encode() + b"\n",
        }

    write_folder("export_peft", target, make_files)
    return target


def _whole_tensors(
    program: Program, state: TrainState, family: str, saved: Collection[str], is_resized: bool
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the tensors of modules that are saved whole, by name, and the trained modules.

    Like peft it adds the embedding and the head if the base model has fewer tokens.
    """
    model, arrays = transformer_of(program), jax.tree.leaves(variables_of(state))
    pieces = whole_pieces(model, _shapes_of(program), family)
    if unknown := sorted(x for x in saved if not is_adapter(x) and x not in pieces):
        raise ValueError(
            f"peft: save names {', '.join(list_some(unknown))}, expected parameters that are "
            "weights of their own in transformers. Keep them with save_adapters or export_hf."
        )
    modules = {module_of(piece) for path in saved if path in pieces for piece in pieces[path]}
    values = {}
    for leaf, x in zip(variable_leaves(program), arrays, strict=True):
        path = parameter_path(leaf)
        of_path = pieces.get(path, []) if leaf.keys[0] == "params" else []
        wanted = [
            piece
            for piece in of_path
            if module_of(piece) in modules or (is_resized and path in TABLES)
        ]
        whole = read_unpadded("export_peft", leaf, x).astype(np.float32) if wanted else None
        for piece in wanted:
            assert whole is not None
            values[PREFIX + piece.tensor] = to_whole(piece, whole[piece.entry], model.vocab_size)
            if path == "embedding" and model.tied_head:
                values[f"{PREFIX}{HEADS[0]}.weight"] = values[PREFIX + piece.tensor].copy()
    return values, sorted(modules)


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
    config, tensors = read_peft_config(source / CONFIG_FILE), _read(source)
    shapes = _initial_shapes(base)
    family = find_family(base, shapes, tensors)
    pieces = whole_pieces(base, shapes, family)
    number = _rows_of(tensors, module_of(pieces["embedding"][0]))
    if number > base.vocab_size:  # The adapters come with new tokens.
        base = base.clone(vocab_size=number)
        model = (
            dataclasses.replace(model, model=base) if isinstance(model, QuantizedModel) else base
        )
        shapes = _initial_shapes(base)
    places = find_places(base, shapes, list(filter(may_have_place, shapes)), family=family)
    wrong = _split_adapters(tensors, config, places)
    whole, lines = _take_whole(tensors, config, pieces, is_tied=base.tied_head)
    wrong += lines
    targets: dict[str, int] = {}
    for path, of_path in places.items():
        found = [tensors[place.names[0]] for place in of_path if place.names[0] in tensors]
        if rank := max((len(x) for x in found), default=0):
            targets[path.removesuffix("/kernel")] = rank
        if config.has_magnitudes and 0 < len(found) < len(of_path):
            wrong.append(
                f"DoRA in {len(found)} of {len(of_path)} stacked layers of {path}, which needs "
                "scan_layers=False"
            )
    if left := wrong + _left_over(tensors, places, config):
        raise ValueError(
            f"{source} has {', '.join(list_some(left))}; expected LoRA adapters of the layers, "
            "the experts, the untied embedding or the head of the model, magnitudes (DoRA) only of "
            "layers, and modules_to_save."
        )
    if some := sorted(path for path, own in whole.items() if own.tokens):
        warnings.warn(
            f"lora_of_peft: {source} has trainable_token_indices; if these adapters are trained "
            f"further, all rows of {' and '.join(some)} are trained, not only those of the tokens.",
            stacklevel=2,
        )
    if not targets:
        raise ValueError(
            f"{source} has no adapters of this model, expected tensors such as lora_A."
        )
    return lora(
        model,
        targets,
        alpha=config.alpha,
        rank_stabilized=config.rank_stabilized,
        dropout=config.dropout,
        magnitudes=config.has_magnitudes,
        save=sorted(
            path
            for path, own in whole.items()
            if own.tokens or any(config.trains(module_of(x)) for x in pieces[path])
        ),
    )


def _initial_shapes(model: Transformer) -> dict[str, tuple[int, ...]]:
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    # Nothing here asks JAX for its devices, which a command chooses later.
    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    with planned_device(Device("cpu")), jax.sharding.use_abstract_mesh(mesh):
        variables = jax.eval_shape(lambda x: model.init(jax.random.key(0), x), tokens)
    params = flatten_dict(nn.meta.unbox(variables["params"]), sep="/")
    return {path: x.shape for path, x in params.items()}


class _Whole(NamedTuple):
    """What a file has of a parameter that is stored whole.

    Attributes:
      tensors: The tensor of each piece; empty if the file has only some tokens' rows.
      tokens: The tokens whose rows are trained (`trainable_token_indices`).
      rows: The rows of these tokens, `[tokens, D]`.
    """

    tensors: list[np.ndarray]
    tokens: tuple[int, ...] = ()
    rows: np.ndarray | None = None


def _rows_of(tensors: Mapping[str, np.ndarray], module: str) -> int:
    """Returns the number of rows of a module that is stored whole; 0 if it is not."""
    names = (f"{PREFIX}{module}{end}" for end in (".weight", f"{TOKENS}base_layer.weight"))
    return max((len(tensors[name]) for name in names if name in tensors), default=0)


def _take_whole(
    tensors: MutableMapping[str, np.ndarray],
    config: PeftConfig,
    pieces: Mapping[str, Sequence[TensorPiece]],
    *,
    is_tied: bool,
) -> tuple[dict[str, _Whole], list[str]]:
    """Takes the tensors of whole modules out of those of a file.

    Returns:
      What the file has, by the paths of our parameters, and what does not fit.
    """
    found: dict[str, _Whole] = {}
    wrong = []
    for path, of_path in pieces.items():
        modules = [module_of(piece) for piece in of_path]
        heads = HEADS if is_tied and path == "embedding" else ()
        for module in (*modules, *heads):
            _simplify(tensors, f"{PREFIX}{module}")
        key = f"{PREFIX}{modules[0]}{TOKENS}{DELTA}"
        rows = tensors.pop(key, None) if path in TABLES else None
        tokens = config.tokens_of(modules[0], is_embedding=path == "embedding")
        if rows is not None and (len(rows) != len(tokens) or rows.ndim != 2):
            wrong.append(f"{key} of the shape {list(rows.shape)} for {len(tokens)} tokens")
            continue
        names = [PREFIX + piece.tensor for piece in of_path]
        own = [tensors[name] for name in names if name in tensors]
        is_trained = any(map(config.trains, modules))
        # A resized embedding is stored, but not trained.
        if not (is_trained or path in TABLES) or (not own and rows is None):
            continue
        if 0 < len(own) < len(names):
            wrong.append(f"{len(own)} of the {len(names)} stacked layers of {path}")
        for name in names:
            tensors.pop(name, None)
        found[path] = _Whole(own, tokens if rows is not None else (), rows)
        copies = [tensors.pop(f"{PREFIX}{head}.weight", None) for head in heads]
        more = [tensors.pop(f"{PREFIX}{head}{TOKENS}{DELTA}", None) for head in heads]
        is_other = any(x is not None and not np.array_equal(x, own[0]) for x in copies if own)
        is_other |= any(
            x is not None and (rows is None or not np.array_equal(x, rows)) for x in more
        )
        is_alone = is_trained and not config.is_tied and not any(x is not None for x in copies)
        if heads and (is_other or is_alone):
            wrong.append(
                "an embedding without its head, although the model ties them (train it with "
                "ensure_weight_tying=True)"
            )
    return found, wrong


def _simplify(tensors: MutableMapping[str, np.ndarray], module: str) -> None:
    """Takes away the copies of a module's weight that peft writes if the embedding was resized."""
    if (name := f"{module}.weight") in tensors:
        for kind in ("original_module", "modules_to_save"):
            tensors.pop(f"{module}.{kind}.weight", None)
    base = tensors.pop(f"{module}{TOKENS}base_layer.weight", None)
    if base is not None:
        tensors[name] = base


def load_peft(program: Program, state: TrainState, directory: GivenPath) -> TrainState:
    """Loads adapters that peft or `export_peft` has written, and returns the new state.

    Args:
      program: A program of a model with these adapters, such as `lora_of_peft` makes.
      state: The program's state; not donated. Only what the files have is replaced.
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
    family = find_family(transformer_of(program), _shapes_of(program), tensors)
    places, of_model = _places_of(program, family)
    lines = _split_adapters(tensors, config, of_model)
    pieces = whole_pieces(transformer_of(program), _shapes_of(program), family)
    is_tied = transformer_of(program).tied_head
    whole, more = _take_whole(tensors, config, pieces, is_tied=is_tied)
    lines += more
    leaves, arrays = variable_leaves(program), jax.tree.leaves(variables_of(state))
    by_path = {parameter_path(leaf): (leaf, x) for leaf, x in zip(leaves, arrays, strict=True)}
    values: dict[str, np.ndarray] = {}
    lines += [f"{name} is left over" for name in _left_over(tensors, places, config)]
    for path in whole.keys() - by_path.keys():
        lines.append(f"{path} is whole, and in codes here")
    for path, (leaf, array) in by_path.items():
        if path in whole:
            values[path], more = _filled(leaf, array, whole[path], pieces[path], vocab_size)
            lines += more
        elif not is_adapter(path) and model.saves(path):
            lines.append(f"{path} is missing")
        if not is_adapter(path):
            continue
        of_path = places[adapted_path(path)]
        own = [place for place in of_path if not tensors.keys().isdisjoint(place.names)]
        if not own:
            lines.append(f"{of_path[0].names[path.endswith(UP)]} is missing")
        values[path] = np.zeros(leaf.shape, np.float32)
        if path.endswith(MAGNITUDE):
            for place in of_path:
                lines += _fill_magnitude(values[path][place.piece.entry], place, tensors)
            continue
        for place in own:
            where = values[path][place.piece.entry]
            wrong = list(_fill(where, path, place, tensors, vocab_size))
            lines += wrong
            if path.endswith(UP) and not wrong and (rank := tensors[place.names[1]].shape[1]):
                with _overflow_is_infinite():
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


def _filled(
    leaf: Leaf, x: jax.Array, whole: _Whole, pieces: Sequence[TensorPiece], vocab_size: int
) -> tuple[np.ndarray, list[str]]:
    """Makes a parameter from the tensors of a file; returns also what does not fit."""
    value, wrong = np.zeros(leaf.shape, np.float32), []
    if not whole.tensors:
        value = read_unpadded("load_peft", leaf, x).astype(np.float32)
    for piece, tensor in zip(pieces, whole.tensors, strict=False):
        where = value[piece.entry]
        sizes = tuple(
            vocab_size if name == "V" else size
            for name, size in zip(piece.dims, where.shape, strict=True)
        )
        if tensor.shape != (expected := piece.tensor_shape(sizes)):
            wrong.append(
                f"{piece.tensor} has the shape {list(tensor.shape)}, expected {list(expected)}"
            )
            continue
        where[tuple(map(slice, sizes))] = from_whole(piece, tensor, sizes)
    if whole.rows is not None:
        rows = value if pieces[0].dims[0] == "V" else value.T
        if max(whole.tokens) >= vocab_size or whole.rows.shape[1] != rows.shape[1]:
            wrong.append(
                f"{pieces[0].tensor} has rows of the shape {list(whole.rows.shape)} for tokens up "
                f"to {max(whole.tokens)}, expected {rows.shape[1]} features and tokens below "
                f"{vocab_size}"
            )
        else:
            rows[list(whole.tokens)] = whole.rows
    return value, wrong


def _fill_magnitude(
    where: np.ndarray, place: Place, tensors: Mapping[str, np.ndarray]
) -> Iterator[str]:
    """Copies a tensor to `where`, one layer's `lora_magnitude`; yields what does not fit."""
    x = tensors.get(place.magnitude)
    if x is None or x.shape != (where.size,):
        got = "is missing" if x is None else f"has the shape {list(x.shape)}"
        yield f"{place.magnitude} {got}, expected {[where.size]}"
        return
    sizes = dict(zip(place.dims(UP)[0], where.shape, strict=True))
    where[...] = place.from_peft(UP, x[:, None], sizes)[0]


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


def _shapes_of(program: Program) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of a program without adapters, before quantization."""
    plain, _ = plain_leaves(program, variable_leaves(program))
    shapes = {parameter_path(leaf): leaf.shape for leaf in plain}
    return {path: shape for path, shape in shapes.items() if not is_adapter(path)}


def _places_of(
    program: Program, family: str
) -> tuple[dict[str, list[Place]], dict[str, list[Place]]]:
    """Returns the modules of each adapted parameter of a program by path, and of all parameters."""
    names = map(parameter_path, variable_leaves(program))
    adapted = {adapted_path(path) for path in names if is_adapter(path)}
    shapes, model = _shapes_of(program), transformer_of(program)
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
    with _overflow_is_infinite():
        wrong = split_experts(tensors, experts, config.targets, config.scale)
        return wrong + split_fused(tensors, fused_modules(places), config.scale)


def _overflow_is_infinite() -> np.errstate:
    """Prevents warnings of numbers that overflow, because `replace_adapters` refuses infinity."""
    return np.errstate(over="ignore", under="ignore", invalid="ignore")


def _left_over(
    tensors: Mapping[str, np.ndarray], places: Mapping[str, Sequence[Place]], config: PeftConfig
) -> list[str]:
    """Returns the names of tensors that the adapters of the modules in `places` do not have."""
    known = {
        name
        for path, of_path in places.items()
        for place in of_path
        for name in (
            *place.names,
            f"{PREFIX}{place.module}.base_layer.weight",
            *([place.magnitude] if config.has_magnitudes and path.endswith("/kernel") else []),
        )
    }
    used = {name for name, x in tensors.items() if x.size}
    return sorted(printable(name) for name in used - known)


def _read(directory: Path) -> dict[str, np.ndarray]:
    """Reads the tensors of an adapter in float32."""
    require("load_peft", "safetensors")
    import safetensors

    path, found = directory / ARRAYS_FILE, {}
    try:
        real = model_file(path, directory)
        file, _ = open_tensors(real)
        with file, safetensors.safe_open(real, framework="np", backend="pread"):
            for name, place in read_header(file).items():
                is_matrix = ".lora_" in name and not name.endswith(MAGNITUDE_VECTOR)
                dims = (2,) if is_matrix else (1, 2)
                if place.dtype not in DTYPES.values() or len(place.shape) not in dims:
                    raise ValueError(
                        f"has {printable(name)} of {place.dtype} with {len(place.shape)} dims, "
                        f"expected {'matrices' if is_matrix else 'a matrix or a vector'} of floats"
                    )
                whole = tuple(map(slice, place.shape))
                x = read_slice(file.fileno(), place, whole, jnp.dtype(place.dtype))
                with _overflow_is_infinite():
                    found[name] = x.astype(np.float32)
                if not np.isfinite(found[name]).all():
                    raise ValueError(
                        f"has {printable(name)} with NaN or infinity, expected finite numbers; "
                        "the file is damaged, or its training has diverged"
                    )
    except FileNotFoundError:
        pickled = " Pickled adapters are not unpickled." if (directory / PICKLED).exists() else ""
        raise ValueError(
            f"{directory} has no {ARRAYS_FILE}, expected a directory of peft.{pickled}"
        ) from None
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} {printable(error)}.") from None
    return found
