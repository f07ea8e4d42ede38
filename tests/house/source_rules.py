"""Checks of the house rules that the source shows, such as which module may import which.

Every check is a function `(module, source) -> findings`, and a finding is one line of text. So
tests apply a check to the code, and also to samples that break the rule. Add a new folder of the
package to `WINGS`, and a new folder of its core to `CORE`.
"""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Callable, Iterator

MAX_LINES = 1200
# Modules with one reader in their own folder that are chapters of their own, and why.
CHAPTERS = {
    "checks.collectives_check": "a check; program_check calls all of them",
    "checks.context_check": "a check; program_check calls all of them",
    "checks.trainable_check": "a check; program_check calls all of them",
    "core.model.nnx_model": "the library NNX, which registers itself; Linen reads it for bridges",
    "inspect.peak_memory": "a simulation of XLA's allocator, longer than its reader",
    "layers.attention.triton_attention": "a kernel; its reader chooses between kernels",
    "layers.attention.unchecked": "the only module that may pass check_vma=False",
    "layers.tensor_parallel.plan_calls": "runs the calls of a plan; its reader declares plans",
    "models.pretrained.peft_modules": "names and converts tensors; its reader opens files",
    "models.generation.cached_steps": "the steps on the devices; its reader is the host's loop",
    "planner.compiled_timeline": "the clock of TPUs; its reader has that of GPUs",
    "strategies.diloco.steps": "the only module of DiLoCo that may communicate",
    "system.cluster.environment": "what a cluster says; its reader starts a run",
    "system.cluster.job_template": "files for schedulers; its reader starts processes",
    "system.cluster.launchers": "the variables of each launcher, a table to extend",
    "training.checkpoints.bucket_arrays": "needs the extra `buckets`",
}

# The folders of the package in two storeys, and the folders of its core. A module may import
# modules of its own folder, and of the folders that are before it in the list.
LIBRARY = ("errors", "core", "by_hand", "parameter_average", "quantization", "checks")
LIBRARY += ("strategies", "layers", "inspect", "planner")
APPLICATIONS = ("system", "data", "models", "training", "plans", "commands")
WINGS = LIBRARY + APPLICATIONS
CORE = ("trees", "summary", "tracing", "mesh", "parameters", "state", "modes", "model")
CORE += ("program",)
# Loose files: the public names, and what `python -m` finds.
FRONT = (
    "manualpar",
    "manualpar.launch",
    "manualpar.doctor",
    "manualpar.__main__",
)
USERS = ("manualpar", "experiments", "benchmarks", "configs")
# The modules of the core that one reads in half an hour, in this order, see CONTRIBUTING.md.
READ = (
    "mesh.roles",
    "parameters.placement",
    "parameters.collectives",
    "parameters.sharded_parameter",
    "modes.gradients",
    "modes.mode",
    "modes.manual",
    "modes.strategy",
    "program.step",
    "program.program",
)

COLLECTIVES = frozenset(
    {
        "all_gather",
        "all_to_all",
        "pmax",
        "pmean",
        "pmin",
        "ppermute",
        "pshuffle",
        "psum",
        "psum_scatter",
        "pswapaxes",
        "ragged_all_to_all",
    }
)
# Folders and modules that may call collectives, without `manualpar.`.
MAY_COMMUNICATE = frozenset(
    {
        "core.mesh.splitting",
        "core.modes.variable_reduction",
        "core.modes.gradients",
        "core.program.step",
        "core.program.whole_matrices",
        "quantization.quantized_collectives",
        "core.parameters.collectives",
        "core.parameters.sharded_parameter",
        "by_hand",
        "layers",
        "strategies.diloco.steps",
    }
)
# The only module that opens files on a disk for writing, or changes them by their paths.
WRITER = "manualpar.system.storage.untrusted"
# Functions and methods that write to a path. Moving and deleting change a folder, not a file.
WRITING_FUNCTIONS = re.compile(
    r"""
    os\.(truncate|mkfifo|mknod|link|symlink) | shutil\.(copy|copy2|copyfile|copytree|move)
    | numpy\.save\w* | tempfile\.mktemp | logging\.FileHandler
    """,
    re.VERBOSE,
)
WRITING_METHODS = frozenset(
    {"write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "tofile", "save_file"}
)
WRITING_CLASSES = frozenset({"EventsWriter", "EventFileWriter", "RecordWriter", "SummaryWriter"})
# Functions and methods that write to a path if an argument is a mode such as "wb".
OPENING = frozenset({"open", "FileIO", "fdopen", "memmap"})
WRITING_FLAGS = ("O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "O_TRUNC")
# Modules that read files of models. Not `chat_template`: a user may name a single file, or a link.
READ_MODELS = re.compile(
    r"manualpar\.(models|data\.(tokenizer|tokenizer_check|chat)|commands\.import_export)\b"
)
# The only module that may use `check_vma=False`.
UNCHECKED = "manualpar.layers.attention.unchecked"
# Words that end with "s" like a verb in the third person, but are not verbs.
NO_VERBS = re.compile(
    r"""
    Across | Adapters | Always | Arrays | As | Axes | Batches | Blocks | Bytes | Contexts |
    Devices | Dims | Examples | Facts | Fields | Files | Gradients | Groups | Indices | Its
    | Keys | Kernels | Layers | Less | Lines | Logits | Losses | Metrics | Minibatches |
    Numbers | Options | Pairs | Parameters | Parts | Permutations | Pieces | Positions |
    Process | Queries | Rows | Seconds | Shapes | Sizes | Sometimes | Stages | Steps |
    Tensors | Texts | This | Tokens | Types | Unless | Values | Weights | Words | Zeros
    """,
    re.VERBOSE,
)
EMPTY_NAMES = frozenset({"common", "helper", "helpers", "manager", "misc", "util", "utils"})
CHANGES_ENVIRONMENT = (
    "os.environ",
    "os.putenv",
    "os.unsetenv",
    "jax.config",
    "logging.basicConfig",
    "warnings.filterwarnings",
    "warnings.simplefilter",
    "random.seed",
    "numpy.random.seed",
)

Check = Callable[[str, str], list[str]]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def _rank(module: str) -> tuple[int, int] | None:
    """Returns a module's positions in `WINGS` and in `CORE`; `None` if a list lacks its folder."""
    top, *parts = module.split(".")
    if top != "manualpar" or not parts:
        return (len(WINGS) + USERS.index(top), 0) if top in USERS else None
    wing, *rooms = parts
    if wing not in WINGS:
        return None
    if wing == "core" and rooms:
        return (WINGS.index(wing), CORE.index(rooms[0])) if rooms[0] in CORE else None
    return WINGS.index(wing), len(CORE)


@functools.cache
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def _nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Returns every node of a tree, for the checks that all walk it."""
    return tuple(ast.walk(tree))


def _imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yields each import of a file: its line, the full dotted name, and the name that it binds."""
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                yield node.lineno, alias.name, bound
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}", alias.asname or alias.name


def _aliases(tree: ast.AST) -> dict[str, str]:
    """Returns the full name for each name that imports bind; `import a.b` binds `a`."""
    return {
        bound: full.split(".")[0] if full.split(".")[0] == bound else full
        for _, full, bound in _imports(tree)
    }


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    """Returns the full name `a.b.c` of a name or attribute; '' for any other expression."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        origin = _dotted(node.value, aliases)
        return f"{origin}.{node.attr}" if origin else ""
    return ""


def _run_at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields every node that an import of the module evaluates: all but the bodies of functions."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, ast.Lambda):
            pending.append(node.args)
        elif isinstance(node, FunctionNode):
            pending += [*node.decorator_list, node.args]
        else:
            pending += ast.iter_child_nodes(node)


def find_upward_imports(module: str, source: str) -> list[str]:
    """Finds imports of a folder that comes later in `WINGS` or `CORE`, and relative imports."""
    front = _rank("manualpar")
    own = front if module in FRONT else _rank(module)
    if own is None:
        return [
            f"{module}: has no place in WINGS or CORE; give it one in tests/house/source_rules.py"
        ]
    findings = []
    for line, full, _ in _imports(_tree(source)):
        first = full.split(".")[0]
        if first == "":
            findings.append(f"{module}:{line}: relative import")
        # A public name, such as `manualpar.fsdp`, counts as an import of `manualpar/__init__.py`.
        if first == "tests" or (first in USERS and (_rank(full) or front) > own):
            findings.append(f"{module}:{line}: {module} may not import {full}")
    return findings


def find_imports_of_tests(module: str, source: str) -> list[str]:
    """Finds imports from a test file: code that tests share belongs into another module."""
    return [
        f"{module}:{line}: imports from a test file: {full}"
        for line, full, _ in _imports(_tree(source))
        if full.startswith("tests.") and any(part.endswith("_test") for part in full.split("."))
    ]


def find_private_jax(module: str, source: str) -> list[str]:
    """Finds uses of jax's private modules, and of the old `jax.experimental.shard_map`."""
    if "_src" not in source and "shard_map" not in source:
        return []
    tree = _tree(source)
    aliases = _aliases(tree)
    names = [(line, full) for line, full, _ in _imports(tree)]
    names += [
        (node.lineno, _dotted(node, aliases))
        for node in _nodes(tree)
        if isinstance(node, ast.Attribute)
    ]
    banned = ("jax._src", "jax.experimental.shard_map")
    hits = {(line, b) for line, name in names for b in banned if f"{name}.".startswith(f"{b}.")}
    return [f"{module}:{line}: uses {name}" for line, name in sorted(hits)]


def find_unchecked_shard_maps(module: str, source: str) -> list[str]:
    """Finds calls of `shard_map` without `check_vma=True`.

    The module `UNCHECKED` may pass `False`, with a comment that gives the reason.
    """
    if "shard_map" not in source:
        return []
    tree = _tree(source)
    aliases = _aliases(tree)
    commented = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    findings = []
    for node in _nodes(tree):
        if not isinstance(node, ast.Call):
            continue
        called = [node.func]
        if _dotted(node.func, aliases) in ("functools.partial", "partial"):
            called = node.args[:1]
        if not any(_dotted(name, aliases).split(".")[-1] == "shard_map" for name in called):
            continue
        checks = [keyword for keyword in node.keywords if keyword.arg == "check_vma"]
        value = checks[0].value if checks else None
        if isinstance(value, ast.Constant) and value.value is True:
            continue
        if isinstance(value, ast.Constant) and value.value is False:
            if module != UNCHECKED and module.startswith("manualpar."):
                findings.append(f"{module}:{value.lineno}: check_vma=False outside {UNCHECKED}")
            elif not {value.lineno, value.lineno - 1} & commented:
                findings.append(f"{module}:{value.lineno}: check_vma=False without saying why")
            continue
        findings.append(f"{module}:{node.lineno}: shard_map without check_vma=True")
    return findings


def find_import_effects(module: str, source: str) -> list[str]:
    """Finds code that changes the environment or jax's config on import, and module state."""
    tree = _tree(source)
    aliases = _aliases(tree)
    findings = set()
    for node in _run_at_import(tree):
        if isinstance(node, ast.Call):
            changed = _dotted(node.func, aliases)
            if changed in ("os.environ.get", "os.environ.copy"):
                continue
        elif isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            changed = _dotted(node.value, aliases)
        else:
            continue
        if any(f"{changed}.".startswith(f"{name}.") for name in CHANGES_ENVIRONMENT):
            findings.add(f"{module}:{node.lineno}: changes {changed} on import")
    findings |= {
        f"{module}:{node.lineno}: module state: global {', '.join(node.names)}"
        for node in _nodes(tree)
        if isinstance(node, ast.Global)
    }
    return sorted(findings)


def find_stray_collectives(module: str, source: str) -> list[str]:
    """Finds uses of collectives outside of `MAY_COMMUNICATE`."""
    if any(f"{module}.".startswith(f"manualpar.{place}.") for place in MAY_COMMUNICATE):
        return []
    if not any(name in source for name in COLLECTIVES):
        return []
    tree = _tree(source)
    aliases = _aliases(tree)
    names = {(line, full) for line, full, _ in _imports(tree)}
    names |= {
        (node.lineno, _dotted(node, aliases))
        for node in _nodes(tree)
        if isinstance(node, ast.Attribute)
    }
    return [
        f"{module}:{line}: {name} outside {', '.join(sorted(MAY_COMMUNICATE))}"
        for line, name in sorted(names)
        if name.startswith("jax.lax.") and name.split(".")[-1] in COLLECTIVES
    ]


def find_stray_writers(module: str, source: str) -> list[str]:
    """Finds code outside of `WRITER` that opens a file for writing, or writes to a path.

    Pictures are drawn into memory, with the keyword `format`.
    """
    if module == WRITER:
        return []
    tree = _tree(source)
    aliases = _aliases(tree)
    findings = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = _dotted(node.func, aliases)
        last = node.func.attr if isinstance(node.func, ast.Attribute) else called.split(".")[-1]
        keywords = {keyword.arg for keyword in node.keywords}
        writes = (
            WRITING_FUNCTIONS.fullmatch(called)
            or last in WRITING_METHODS
            or last in WRITING_CLASSES
            or (last == "savefig" and "format" not in keywords)
            or (called == "os.open" and _opens_to_write(node))
            or (called == "numpy.memmap" and "mode" not in keywords)
            or (called != "os.open" and last in OPENING and _has_writing_mode(node))
        )
        # The descriptor of a stream that is open already, and the device that takes everything.
        is_stream = called == "os.fdopen" and "fileno()" in ast.unparse(node.args[0])
        is_null = called == "os.open" and ast.unparse(node.args[0]) == "os.devnull"
        if writes and not is_stream and not is_null:
            findings.append(f"{module}:{node.lineno}: {ast.unparse(node.func)} outside {WRITER}")
    return findings


def _opens_to_write(call: ast.Call) -> bool:
    """Returns whether the flags of `os.open` are for writing, or are not visible in the call."""
    flags = ast.unparse(call.args[1]) if len(call.args) > 1 else ""
    return not flags.startswith("os.O_RDONLY") or any(flag in flags for flag in WRITING_FLAGS)


def _has_writing_mode(call: ast.Call) -> bool:
    """Returns whether an argument of a call that opens is a mode for writing."""
    given = [*call.args[:2], *(one.value for one in call.keywords if one.arg == "mode")]
    modes = [one.value for one in given if isinstance(one, ast.Constant)]
    return any(
        isinstance(mode, str) and re.fullmatch("[rwaxbtU+]{1,4}", mode) and set(mode) & set("wax+")
        for mode in modes
    )


def _public_functions(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, FunctionNode]]:
    """Yields functions and methods with public names; not those defined within a function."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public_functions(node.body, f"{owner}{node.name}.")
        elif isinstance(node, FunctionNode):
            dunder = node.name.startswith("__") and node.name.endswith("__")
            if dunder or not node.name.startswith("_"):
                yield f"{owner}{node.name}", node


def find_undocumented(module: str, source: str) -> list[str]:
    """Finds public modules, classes and functions without docstring, or without annotations."""
    tree = _tree(source)
    findings = []
    if source.strip() and not ast.get_docstring(tree):
        findings.append(f"{module}:1: no module docstring")
    for node in tree.body:
        public_class = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        if public_class and not ast.get_docstring(node):
            findings.append(f"{module}:{node.lineno}: {node.name} has no docstring")
    for name, node in _public_functions(tree.body):
        decorators = {_dotted(decorator, {}) for decorator in node.decorator_list}
        # The docstring of an overloaded function is in its implementation.
        is_described = ast.get_docstring(node) or "overload" in decorators
        if not name.endswith("__") and not is_described:
            findings.append(f"{module}:{node.lineno}: {name} has no docstring")
        args = node.args
        positional = [*args.posonlyargs, *args.args]
        if "." in name and "staticmethod" not in decorators:
            positional = positional[1:]
        others = [*args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
        bare = [arg.arg for arg in [*positional, *others] if arg.annotation is None]
        bare += [] if node.returns is not None or name.endswith("__init__") else ["the result"]
        if bare:
            findings.append(f"{module}:{node.lineno}: {name} leaves {', '.join(bare)} unannotated")
    return findings


def find_summaries_without_verb(module: str, source: str) -> list[str]:
    """Finds functions whose summary does not begin with a verb, such as "Returns" or "Pads".

    The summary of a property may be a noun phrase, because its users see an attribute.
    """
    findings = []
    for node in _nodes(_tree(source)):
        if not isinstance(node, FunctionNode) or not (text := ast.get_docstring(node)):
            continue
        if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        first = text.split()[0].rstrip(".,:;")
        if not re.fullmatch("[A-Z][a-z-]*s", first) or NO_VERBS.fullmatch(first):
            findings.append(
                f"{module}:{node.lineno}: {node.name} begins with {first!r}, not a verb"
            )
    return findings


def find_lone_readers(sources: dict[str, str]) -> list[str]:
    """Finds modules that only one module of their folder imports, and that no other imports.

    Args:
      sources: The sources of a package's modules by dotted name.
    """
    readers: dict[str, set[str]] = {}
    for reader, source in sources.items():
        for _, full, _ in _imports(_tree(source)):
            for name in (full, full.rpartition(".")[0]):
                if name in sources and name != reader:
                    readers.setdefault(name, set()).add(reader)
                    break
    return [
        f"{module}: only {reader} reads it, and it belongs there"
        for module, (reader, *others) in sorted(readers.items())
        if not others and module.rpartition(".")[0] == reader.rpartition(".")[0]
    ]


def find_misshapen_files(module: str, source: str) -> list[str]:
    """Finds files that are too long, have an empty name, or run before their end is defined.

    A block `if __name__ == "__main__"` runs the program, so it must come last: what follows it is
    not defined yet when the program runs.
    """
    findings = []
    for node in _tree(source).body[:-1]:
        if isinstance(node, ast.If) and "__name__ == '__main__'" in ast.unparse(node.test):
            findings.append(f"{module}:{node.lineno}: the program runs before the end of the file")
    if (lines := len(source.splitlines())) > MAX_LINES:
        findings.append(f"{module}: {lines} lines; past {MAX_LINES} a file holds two ideas")
    if EMPTY_NAMES & set(module.split(".")[-1].split("_")):
        findings.append(f"{module}: the name says nothing about what is inside")
    return findings


def find_followed_links(module: str, source: str) -> list[str]:
    """Finds readers of models that follow links without `untrusted.model_file`."""
    if not READ_MODELS.match(module):
        return []
    tree = _tree(source)
    aliases = _aliases(tree)
    findings = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func, aliases).split(".")[-1]
        follows = any(keyword.arg == "follow_links" for keyword in node.keywords)
        if follows or name in ("from_file", "read_text"):
            findings.append(
                f"{module}:{node.lineno}: {name} follows links; read the path of model_file"
            )
    return findings
