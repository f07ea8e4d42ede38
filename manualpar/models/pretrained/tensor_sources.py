"""Finds the tensors of a program's parameters in the files of a directory.

Before any tensor is read, the model is compared with `config.json`, and the names, shapes and
dtypes of the tensors are compared with the parameters.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from manualpar.core.program.program import Program
from manualpar.core.program.state_arrays import Leaf, Missing, plain_leaves, variable_leaves
from manualpar.core.summary import show_array
from manualpar.errors import list_some
from manualpar.models import Transformer
from manualpar.models.pretrained.architecture import (
    Architecture,
    architecture_of,
    complete_fields,
    predicts_more,
    read_architecture,
    read_config,
)
from manualpar.models.pretrained.tensor_files import (
    CONFIG_FILE,
    DTYPES,
    TensorFiles,
    open_tensor_files,
    quantization_of,
)
from manualpar.models.pretrained.tensor_names import (
    COMPUTED,
    Rule,
    TensorPiece,
    pieces_of,
    pieces_of_transformer,
    spelling,
)


class Sources(NamedTuple):
    """The tensors in files from which a program's variables are read.

    Attributes:
      files: The files.
      pieces: The tensors of each variable, by the name of the variable's leaf.
      vocab_size: The size of dim `V` in the tensors; in the program, the dim may be padded.
    """

    files: TensorFiles
    pieces: dict[str, list[TensorPiece]]
    vocab_size: int

    def shape_of(self, piece: TensorPiece, leaf: Leaf) -> tuple[int, ...]:
        """Returns the unpadded sizes of a leaf's dims, without the dims that stack its pieces."""
        sizes = leaf.shape[len(piece.entry) :]
        return tuple(
            self.vocab_size if name == "V" and self.vocab_size else size
            for name, size in zip(piece.dims, sizes, strict=True)
        )


def find_sources(
    program: Program,
    directory: Path,
    *,
    names: Mapping[str, Rule | str] | None = None,
    missing: Missing = "error",
    add_tokens: bool = False,
) -> Sources:
    """Finds the tensors of all variables of a program; reads only the files' headers.

    With `add_tokens` the program's model may have more tokens than the files.
    """
    plain, _ = plain_leaves(program, variable_leaves(program))
    leaves = {leaf.name.partition("/")[2]: leaf for leaf in plain}
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    vocab_size = 0
    if names is None:
        architecture = read_architecture(directory)
        model = transformer_of(program)
        check_same_model(model, directory, architecture, add_tokens=add_tokens)
        vocab_size = architecture.fields["vocab_size"]
        pieces = pieces_of_transformer(architecture.family, shapes, skip_unknown=missing == "init")
    else:
        pieces = _pieces_by_name(names, shapes)
    if missing == "error" and (without := sorted(shapes.keys() - pieces)):
        raise ValueError(
            f"load_hf: names lacks {' and '.join(list_some(without))}, expected every "
            "parameter of the model, or missing='init'."
        )
    has_config = names is None or os.path.lexists(directory / CONFIG_FILE)
    config = read_config(directory) if has_config else {}
    files, is_wrapped = open_tensor_files(directory, quantization_of(config)), False
    if names is None and "embedding" in pieces:
        is_wrapped = bool(architecture.wrapper)
        spell = spelling(architecture.family, pieces["embedding"][0].tensor, files.shapes)
        pieces = {
            path: [piece._replace(tensor=spell(piece.tensor)) for piece in found]
            for path, found in pieces.items()
        }
    sources = Sources(
        files, {leaves[path].name: found for path, found in pieces.items()}, vocab_size
    )
    _check_tensors(
        *(sources, leaves, pieces, directory),
        is_tied="head" not in shapes,
        is_wrapped=is_wrapped,
        config=config,
    )
    return sources


def transformer_of(program: Program) -> Transformer:
    """Returns the `Transformer` that a program trains."""
    model: Any = program.model.interface.module
    while model is not None and not isinstance(model, Transformer):
        model = getattr(model, "module", None)
    if model is None:
        raise ValueError(
            "load_hf: the program's model is no manualpar.models.Transformer, so that the tensors "
            "of its parameters are unknown; pass names= with the tensor of each parameter."
        )
    return model


def check_same_model(
    model: Transformer, directory: Path, architecture: Architecture, *, add_tokens: bool = False
) -> None:
    """Raises a `ValueError` if a model differs from the fields that a `config.json` describes.

    With `add_tokens` the model may have more tokens.
    """
    own, there = architecture_of(model), complete_fields(architecture)
    if add_tokens and model.vocab_size > architecture.fields["vocab_size"]:
        own["vocab_size"] = there["vocab_size"]
    lines = [
        f"{name} is {own[name]!r}, there {there[name]!r}"
        for name in sorted(own)
        if own[name] != there[name]
    ]
    if lines:
        raise ValueError(
            f"the model is not that of {directory}: {'; '.join(list_some(lines))}. Make it with "
            "Transformer(**read_architecture(directory).fields), or set config.model.from_hf."
        )


def _pieces_by_name(
    names: Mapping[str, Rule | str], shapes: Mapping[str, Sequence[int]]
) -> dict[str, list[TensorPiece]]:
    if unknown := sorted(names.keys() - shapes):
        raise ValueError(
            f"load_hf: names has {' and '.join(list_some(unknown))}, expected paths of parameters "
            f"such as {next(iter(shapes), '')!r}."
        )
    rules = {path: Rule(rule) if isinstance(rule, str) else rule for path, rule in names.items()}
    return {path: pieces_of(rule, shapes[path]) for path, rule in rules.items()}


def _check_tensors(
    sources: Sources,
    leaves: Mapping[str, Leaf],
    pieces: Mapping[str, list[TensorPiece]],
    directory: Path,
    *,
    is_tied: bool,
    is_wrapped: bool,
    config: Mapping[str, Any],
) -> None:
    """Raises a `ValueError` if tensors are missing, not needed, or of another shape or dtype.

    Warns if tensors are cast to a dtype that cannot represent all of their values, or if layers are
    left out that predict more than the next token.
    """
    files, lines, narrowed = sources.files, [], []
    known = set()
    for path, of_path in pieces.items():
        leaf = leaves[path]
        for piece in of_path:
            known.add(piece.tensor)
            expected = piece.tensor_shape(sources.shape_of(piece, leaf))
            if piece.tensor not in files.shapes:
                lines.append(f"{piece.tensor} is missing, of shape {list(expected)} for {path}")
                continue
            got, dtype = files.shapes[piece.tensor], files.dtypes[piece.tensor]
            if got != expected:
                lines.append(
                    f"{piece.tensor} is {show_array(_Named(dtype), got)}, expected the shape "
                    f"{list(expected)} for {path}"
                )
            elif dtype not in DTYPES.values():
                lines.append(
                    f"{piece.tensor} is stored as {dtype}, expected {', '.join(DTYPES.values())}"
                )
            elif np.promote_types(_dtype(dtype), leaf.dtype) != leaf.dtype:
                narrowed.append(f"{piece.tensor} from {dtype} to {leaf.dtype}")
    predicting = [name for name in files.shapes.keys() - known if predicts_more(name, config)]
    if predicting and not lines:
        warnings.warn(
            f"load_hf: left out layers that predict more than the next token "
            f"({'; '.join(list_some(sorted(predicting)))}), as transformers does.",
            stacklevel=5,
        )
    for name in sorted(files.shapes.keys() - known - {*predicting}):
        # If the head is tied to the embedding, transformers ignores this tensor too.
        is_copy = is_tied and name.endswith(("lm_head.weight", "embed_out.weight"))
        if not is_copy and not is_wrapped and not COMPUTED.search(name):
            shown = show_array(_Named(files.dtypes[name]), files.shapes[name])
            lines.append(f"{name} is {shown}, expected no such tensor")
    if lines:
        raise ValueError(
            f"the tensors in {directory} are not those of the model: {'; '.join(list_some(lines))}."
        )
    if narrowed:
        warnings.warn(
            f"load_hf: cast to the dtypes that the program stores (param_dtype): "
            f"{'; '.join(list_some(narrowed))}.",
            stacklevel=5,
        )


class _Named(NamedTuple):
    """A stand-in for a dtype that NumPy may not have; `show_array` reads only its `name`."""

    name: str


def _dtype(name: str) -> np.dtype:
    return np.dtype(jax.numpy.dtype(name))
