"""The law of two storeys: applications import from the library only what is public."""

import ast
import functools
from collections.abc import Iterator

import pytest

from docs.site.public_names import GROUPS
from tests.house.source_rules import APPLICATIONS, LIBRARY
from tests.paths import ROOT

# Names of the library that applications import although they are not public, without `manualpar.`.
# This list only shrinks. What applications need, other users need too: give a module of the library
# an `__all__` and a place in `GROUPS`, or move the code into the application.
NOT_PUBLIC = (
    "core.mesh.roles.AxisRoles",
    "core.model.apply_fn.CarryingApply",
    "core.model.linen_model.LinenModel",
    "core.model.options.first_sentences",
    "core.model.options.with_defaults",
    "core.model.trace_model.init_variables",
    "core.parameters.annotations.SplitParameter",
    "core.tracing.thread_patches.replaced_in_thread",
    "errors.JAX_NOTE",
    "errors.LIBRARIES",
    "inspect.communication.as_number",
    "inspect.communication.grouped",
    "inspect.expected_bytes.is_of_parameters",
    "inspect.flops.ROWS",
    "inspect.state_layout.ALL",
    "inspect.state_layout.trained_parts",
    "layers.boundaries.platform_traced_for",
    "layers.head_loss.FEWEST_COLUMNS",
    "layers.head_loss.default_chunk",
    "layers.moe.moe.capacity_of",
    "layers.pipeline.executor.PipelineRun",
    "layers.ring.Chunks",
    "planner.hardware.kernels_in",
    "planner.plan.FITS",
    "planner.plan.LINES",
    "planner.timed_collectives.Rings",
    "strategies.shared_options.PARAMETER_SHARDING",
    "strategies.shared_options.REPLICATED_SHARDING",
)
MOST_NOT_PUBLIC = 28


@functools.cache
def _modules() -> dict[str, ast.Module]:
    """Returns the syntax tree of each module of the package, by dotted name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in sorted((ROOT / "manualpar").rglob("*.py"))
        if path.parent.name != "new_project"
    }


def _homes(module: str, name: str) -> Iterator[str]:
    """Yields the full name of a member of a module, and its name in the module that defines it."""
    yield f"{module}.{name}"
    for node in ast.walk(_modules()[module]):
        if isinstance(node, ast.ImportFrom) and node.module in _modules():
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    yield from _homes(node.module, alias.name)


def _members(module: str) -> list[str]:
    """Returns the `__all__` of a module."""
    for node in _modules()[module].body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


@functools.cache
def public_names() -> frozenset[str]:
    """Returns the public names, each also as a member of the module that defines it."""
    found: set[str] = set()
    for listed in (name for group in GROUPS for name in group.names):
        module, _, name = listed.rpartition(".")
        if listed in _modules():
            assert _members(listed), f"{listed} is public and has no __all__"
            for member in _members(listed):
                found.update(_homes(listed, member))
        else:
            found.update(_homes(module, name))
    return frozenset(found)


def names_taken(tree: ast.Module) -> set[str]:
    """Returns the full names that a module takes from other modules of the package."""
    taken, modules = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in _modules():
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in _modules():
                    modules[alias.asname or alias.name] = full
                else:
                    taken.add(full)
        elif isinstance(node, ast.Import):
            taken.update(alias.name for alias in node.names if alias.name.startswith("manualpar."))
    for node in ast.walk(tree):
        owner = node.value if isinstance(node, ast.Attribute) else None
        if isinstance(owner, ast.Name) and owner.id in modules:
            taken.add(f"{modules[owner.id]}.{node.attr}")
    return taken


def private_names(tree: ast.Module) -> list[str]:
    """Returns the names that a module takes from the library although they are not public."""
    names = sorted(names_taken(tree) - public_names())
    return [name.removeprefix("manualpar.") for name in names if name.split(".")[1] in LIBRARY]


def test_applications_take_only_public_names_from_the_library():
    trees = [tree for name, tree in _modules().items() if name.split(".")[1:2]]
    applications = [
        tree for name, tree in _modules().items() if name.partition(".")[2].startswith(APPLICATIONS)
    ]
    assert 50 < len(applications) < len(trees)
    found = sorted({name for tree in applications for name in private_names(tree)})
    assert found == list(NOT_PUBLIC)
    assert len(NOT_PUBLIC) <= MOST_NOT_PUBLIC, "this list only shrinks"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from manualpar.core.mesh.mesh import make_mesh", []),
        ("from manualpar.strategies.registry import StrategyKind", []),
        (
            "from manualpar.core.mesh.mesh import arrange_in_torus",
            ["core.mesh.mesh.arrange_in_torus"],
        ),
        ("from manualpar.core.mesh import mesh as m\nm.NAMES", ["core.mesh.mesh.NAMES"]),
        ("from manualpar.core.mesh import mesh\nmesh.make_mesh", []),
        ("def f():\n    from manualpar.core.summary import SHOWN", ["core.summary.SHOWN"]),
        ("import manualpar.core.mesh.mesh", ["core.mesh.mesh"]),
        ("from manualpar.training.task import SPLIT_AXIS", []),
    ],
)
def test_a_private_name_is_noticed(source: str, found: list[str]):
    assert private_names(ast.parse(source)) == found
