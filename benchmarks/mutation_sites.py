"""Finds every collective in the source of the package.

A site is a call that communicates: a collective of JAX, or a function of this package that calls a
collective. Two kinds of calls that send nothing are sites too: `axis_index`, which chooses each
device's part of an array, and casts between the types of `check_vma`, whose transpose is an
all-reduce. If a communicating function is an argument of a call, for example of a `map`, the
function's name there is a site.

Add a new communicating function to `OWN` if other modules of the package call it.
"""

import ast
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Signature:
    """The signature of a function that communicates.

    Attributes:
      family: The kind of communication, a key of `mutation_operators.FAMILIES`.
      parameters: The function's parameters; the first is the value to send.
      axes: The parameter that names the mesh axes; `""` if there is none.
      dim: The parameter that names the dim to gather or scatter; `""` if there is none.
      plan: The parameter whose attributes `axes` and `dim` are used in place of two parameters.
      is_tree: Whether the result is a tree and not an array.
      is_method: Whether the function is a method that communicates its own object.
    """

    family: str
    parameters: tuple[str, ...]
    axes: str = ""
    dim: str = ""
    plan: str = ""
    is_tree: bool = False
    is_method: bool = False


def _reduction(parameters: str = "x axis_name", axes: str = "axis_name") -> Signature:
    return Signature("reduction", tuple(parameters.split()), axes)


def _sync(first: str) -> Signature:
    return Signature("sync", (first, "axis_names"), "axis_names", is_tree=True)


_PLANNED = Signature("gather", ("x", "code", "largest", "plan"), plan="plan")

JAX: Mapping[str, Signature] = {
    "psum": _reduction(),
    "pmean": _reduction(),
    "pmax": _reduction(),
    "pmin": _reduction(),
    "all_gather": Signature("gather", ("x", "axis_name"), "axis_name", "axis"),
    "psum_scatter": Signature("scatter", ("x", "axis_name"), "axis_name", "scatter_dimension"),
    "ppermute": Signature("permute", ("x", "axis_name", "perm"), "axis_name"),
    "all_to_all": Signature(
        "exchange", ("x", "axis_name", "split_axis", "concat_axis"), "axis_name", "split_axis"
    ),
    "ragged_all_to_all": Signature(
        "passing",
        ("operand", "output", "input_offsets", "send_sizes", "output_offsets", "recv_sizes"),
    ),
    "axis_index": Signature("place", ("axis_name",), "axis_name"),
    "pcast": Signature("passing", ("x", "axes")),
    "process_allgather": Signature("passing", ("x",)),
}
OWN: Mapping[str, Signature] = {
    "gather_array_with_mean_grads": Signature(
        "gather", ("x", "axis", "axis_name"), "axis_name", "axis"
    ),
    "gather_invariant": Signature("gather", ("x", "dim", "axes"), "axes", "dim"),
    "_gather": _PLANNED,
    "_gather_with_mean_grads": _PLANNED,
    "scatter_mean": Signature("scatter", ("x", "dim", "axes"), "axes", "dim"),
    "scatter_gradients": Signature("whole", ("grads", "shards"), is_tree=True),
    "replicate_shards": Signature("sync", ("params",), is_tree=True),
    "gather_params": Signature("sync", ("params", "axis_name"), "axis_name", is_tree=True),
    "gather_data_axes": Signature("sync", (), is_tree=True, is_method=True),
    "sync_gradients": _sync("grads"),
    "sync_metrics": _sync("metrics"),
    "sync_collections": _sync("collections"),
    "_mean_count": Signature("sync", ("count", "outer_axes")),
    "mean_difference": Signature(
        "sync", ("anchor", "local", "examples", "axes", "wire"), "axes", is_tree=True
    ),
    "mean_collections": Signature(
        "sync", ("before", "local", "axes", "rules"), "axes", is_tree=True
    ),
    "fold_rng_over_axis": Signature("key", ("rng", "axis_name"), "axis_name"),
    "cast_to_varying": Signature("passing", ("tree", "axes")),
    "regather_for_backward": Signature("passing", ("function",)),
    "reduce_gradient": Signature("sync", ("g", "dtype"), "mean_axes", is_tree=True),
    "to_zigzag": Signature("passing", ("batch", "axis")),
    "exchange": Signature("passing", ("x", "axis", "chunks")),
    "_shift": Signature("sync", ("x", "axis")),
}
# Methods that count only on an object whose name ends with `context`.
CONTEXT: Mapping[str, Signature] = {
    "total": Signature("whole", ("x",)),
    "cumsum": Signature("running", ("x",)),
}
# The signature of a site that is a communicating function passed as an argument.
HANDED = Signature("handed", ())


@dataclasses.dataclass(frozen=True)
class Site:
    """A call that communicates.

    Attributes:
      path: The file, relative to the root of the repository.
      module: The file's module without `manualpar.`.
      function: The qualified name of the function that contains the call.
      callee: The name of the called function.
      number: The number of earlier calls of the same callee in the same function.
      line: The first line of the call.
      start: The offset of the call's text in the file, in bytes.
      end: The offset of the end of that text.
      signature: The callee's signature.
      callee_text: The source text of the callee.
      arguments: The source of each argument, by the name of its parameter; empty if the function
        is itself an argument.
    """

    path: str
    module: str
    function: str
    callee: str
    number: int
    line: int
    start: int
    end: int
    signature: Signature
    callee_text: str
    arguments: Mapping[str, str]

    @property
    def name(self) -> str:
        """The site's name: `module:function:callee`, with `#2` for the second such call."""
        number = f"#{self.number + 1}" if self.number else ""
        return f"{self.module}:{self.function}:{self.callee}{number}"

    @property
    def x(self) -> str:
        """The source text of the value that the call sends."""
        if self.signature.is_method:
            return self.callee_text.rpartition(".")[0]
        return self.arguments[self.signature.parameters[0]]

    @property
    def axes(self) -> str:
        """Source text for a tuple of the call's axes; `""` if the call names none."""
        if self.signature.plan:
            return f"{self.arguments[self.signature.plan]}.axes"
        axes = self.arguments.get(self.signature.axes, "")
        return f"tuple(jax.tree.leaves({axes}))" if axes else ""

    @property
    def dim(self) -> str:
        """Source text for the dim that is gathered or scattered; `""` if there is none."""
        if self.signature.plan:
            return f"{self.arguments[self.signature.plan]}.dim"
        # JAX's collectives use the first dim by default.
        return self.arguments.get(self.signature.dim, "0") if self.signature.dim else ""

    @property
    def is_stacked(self) -> bool:
        """Whether a gather adds a new dim."""
        return self.callee == "all_gather" and self.arguments.get("tiled") != "True"

    def call(self, x: str | None = None, axes: str = "", dim: str = "") -> str:
        """Returns the source of the call with another value, other axes or another dim."""
        signature, arguments = self.signature, dict(self.arguments)
        callee = self.callee_text
        if signature is HANDED:
            return callee
        if signature.is_method:
            callee = callee if x is None else f"({x}).{self.callee}"
        elif x is not None:
            arguments[signature.parameters[0]] = x
        for field, value in (("axes", axes), ("dim", dim)):
            if not value:
                continue
            if signature.plan:
                plan = arguments[signature.plan]
                arguments[signature.plan] = f"{plan}._replace({field}={value})"
            else:
                arguments[getattr(signature, field)] = value
        texts = [f"{name}={text}" for name, text in arguments.items()]
        positional = signature.parameters
        for i, (name, text) in enumerate(arguments.items()):
            if i < len(positional) and positional[i] == name:
                texts[i] = text
        return f"{callee}({', '.join(texts)})"


def find_sites(root: Path) -> tuple[Site, ...]:
    """Finds all communicating calls of the package, in the order of the source."""
    paths = sorted((root / "manualpar").rglob("*.py"))
    return tuple(
        site for path in paths for site in _sites_of(path.relative_to(root), path.read_bytes())
    )


def _sites_of(path: Path, source: bytes) -> Iterator[Site]:
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))

    def span(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = offsets[node.lineno - 1] + node.col_offset
        return start, offsets[node.end_lineno - 1] + node.end_col_offset

    def text(node: ast.expr) -> str:
        start, end = span(node)
        return source[start:end].decode()

    seen: Counter[tuple[str, str]] = Counter()
    for function, node in _calls(ast.parse(source), ""):
        called = node.func if isinstance(node, ast.Call) else node
        callee, signature = callee_of(called)
        if signature is None:
            continue
        arguments = {}
        if isinstance(node, ast.Call):
            assert len(node.args) <= len(signature.parameters)
            positional = zip(signature.parameters, node.args, strict=False)
            arguments = {name: text(value) for name, value in positional}
            arguments |= {keyword.arg or "": text(keyword.value) for keyword in node.keywords}
        else:
            signature = HANDED
        number = seen[function, callee]
        seen[function, callee] += 1
        module = ".".join(path.with_suffix("").parts[1:])
        start, end = span(node)
        yield Site(
            str(path), module, function, callee, number, node.lineno, start, end, signature,
            text(called), arguments,
        )  # fmt: skip


def callee_of(function: ast.expr) -> tuple[str, Signature | None]:
    """Returns the name of a callee, and its signature if it communicates."""
    if isinstance(function, ast.Name):
        return function.id, OWN.get(function.id)
    if not isinstance(function, ast.Attribute):
        return "", None
    name = function.attr
    if isinstance(function.value, ast.Attribute | ast.Name) and name in JAX:
        owner = function.value.attr if isinstance(function.value, ast.Attribute) else ""
        owner = owner or getattr(function.value, "id", "")
        return name, JAX[name] if owner in ("lax", "multihost_utils") else None
    if name in CONTEXT and ast.unparse(function.value).endswith("context"):
        return name, CONTEXT[name]
    signature = OWN.get(name)
    return name, signature if signature and signature.is_method else None


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, ast.expr]]:
    """Yields calls, and names passed to them, each after the name of the function around it."""
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{function}.{child.name}" if function else child.name
        if isinstance(child, ast.Call):
            yield function, child
            handed = child.args if function else []  # Calls in a module's body define gradients.
            yield from ((function, x) for x in handed if isinstance(x, ast.Name | ast.Attribute))
        yield from _calls(child, inner)
