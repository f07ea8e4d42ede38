"""The source keeps the rules of `source_rules`, and each rule notices code that breaks it."""

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from tests.house.source_rules import (
    CHAPTERS,
    READ,
    Check,
    find_followed_links,
    find_import_effects,
    find_imports_of_tests,
    find_lone_readers,
    find_misshapen_files,
    find_private_jax,
    find_stray_collectives,
    find_stray_writers,
    find_summaries_without_verb,
    find_unchecked_shard_maps,
    find_undocumented,
    find_upward_imports,
)
from tests.paths import ROOT

# The files that `manualpar new` writes, as short as a page's; no module of the package.
TEMPLATE = "new_project"


def _sources(*folders: str) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.parent.name == TEMPLATE:
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__"), path.read_text(encoding="utf-8")


PROGRAM = ("manualpar", "experiments", "benchmarks", "configs")
SCOPES: list[tuple[Check, tuple[str, ...]]] = [
    (find_upward_imports, PROGRAM),
    (find_private_jax, PROGRAM),
    (find_unchecked_shard_maps, PROGRAM),
    (find_import_effects, PROGRAM),
    (find_stray_collectives, PROGRAM),
    (find_stray_writers, ("manualpar", "experiments")),
    (find_undocumented, ("manualpar",)),
    (find_summaries_without_verb, ("manualpar",)),
    (find_misshapen_files, PROGRAM),
    (find_followed_links, ("manualpar",)),
    (find_imports_of_tests, ("tests",)),
]


@pytest.mark.parametrize(
    ("check", "folders"), SCOPES, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_code_keeps_the_rule(check: Check, folders: tuple[str, ...]):
    sources = list(_sources(*folders))
    assert sources, f"nothing to check in {folders}"
    findings = [finding for module, source in sources for finding in check(module, source)]
    assert not findings, "\n".join(["", *findings])


BROKEN = [
    (
        find_followed_links,
        "manualpar.models.pretrained.architecture",
        "config = read_object(path, follow_links=True)",
        "architecture:1: read_object follows links; read the path of model_file",
    ),
    (
        find_followed_links,
        "manualpar.data.tokenizer",
        "import tokenizers\nread = tokenizers.Tokenizer.from_file(path)",
        "tokenizer:2: from_file follows links",
    ),
    (
        find_imports_of_tests,
        "tests.laws.codes_test",
        "from tests.laws import strategies_test",
        "codes_test:1: imports from a test file: tests.laws.strategies_test",
    ),
    (
        find_imports_of_tests,
        "tests.laws.codes_test",
        "from tests.laws.strategies_test import build",
        "imports from a test file",
    ),
    (
        find_upward_imports,
        "manualpar.core.program.program",
        "from manualpar.strategies.fsdp import fsdp",
        "may not import",
    ),
    (
        find_upward_imports,
        "manualpar.core.mesh.mesh",
        "import manualpar.core.state.metrics",
        "mesh may not import",
    ),
    (find_upward_imports, "manualpar.core.tricks.one", "", "no place in WINGS or CORE"),
    (
        find_upward_imports,
        "manualpar.core.modes.gradients",
        "from manualpar.core import program",
        "may not import",
    ),
    (find_upward_imports, "manualpar.models.mlp", "from manualpar import Batch", "may not import"),
    (find_upward_imports, "manualpar.training.trainer", "import configs.fsdp", "may not import"),
    (
        find_upward_imports,
        "manualpar.core.parameters.collectives",
        "def f():\n    from manualpar.core.modes.gradients import sync_gradients",
        "manualpar.core.parameters.collectives:2",
    ),
    (find_upward_imports, "manualpar.models.dense", "from . import ring", "relative import"),
    (find_upward_imports, "manualpar.tricks", "", "no place in WINGS"),
    (find_private_jax, "manualpar.core.mesh.mesh", "from jax._src import core", "jax._src"),
    (
        find_private_jax,
        "manualpar.core.mesh.mesh",
        "import jax\njax._src.core.f()",
        ":2: uses jax._src",
    ),
    (find_private_jax, "manualpar.core.mesh.mesh", "from jax import _src", "jax._src"),
    (
        find_private_jax,
        "manualpar.core.program.program",
        "from jax.experimental.shard_map import shard_map",
        "jax.experimental.shard_map",
    ),
    (
        find_unchecked_shard_maps,
        "manualpar.core.program.program",
        "import jax\njax.shard_map(f, mesh=mesh, in_specs=a, out_specs=b)",
        ":2: shard_map without",
    ),
    (
        find_unchecked_shard_maps,
        "manualpar.core.program.program",
        "from jax import shard_map as smap\nsmap(f, mesh=mesh, check_vma=check)",
        ":2: shard_map without",
    ),
    (
        find_unchecked_shard_maps,
        "manualpar.core.program.program",
        "from functools import partial\n@partial(jax.shard_map, mesh=mesh)\ndef f(): ...",
        ":2: shard_map without",
    ),
    (
        find_unchecked_shard_maps,
        "manualpar.layers.attention.unchecked",
        "# Far away.\n\njax.shard_map(f, check_vma=False)",
        ":3: check_vma=False without saying why",
    ),
    (
        find_unchecked_shard_maps,
        "manualpar.layers.attention.context",
        "# Pallas kernels have no types yet.\njax.shard_map(f, check_vma=False)",
        ":2: check_vma=False outside manualpar.layers.attention.unchecked",
    ),
    (
        find_import_effects,
        "manualpar",
        "import os\nos.environ['A'] = 'b'",
        ":2: changes os.environ",
    ),
    (find_import_effects, "manualpar", "import os\nos.environ.setdefault('A', 'b')", "os.environ"),
    (
        find_import_effects,
        "manualpar",
        "import os\nif True:\n    del os.environ['A']",
        ":3: changes",
    ),
    (find_import_effects, "manualpar", "import jax\njax.config.update('a', 1)", "jax.config"),
    (find_import_effects, "manualpar", "from jax import config\nconfig.a = 1", "jax.config"),
    (find_import_effects, "manualpar", "def f():\n    global a\n    a = 1", "global a"),
    (
        find_stray_collectives,
        "manualpar.core.program.program",
        "import jax\ndef f(x):\n    return jax.lax.psum(x, 'data')",
        ":3: jax.lax.psum outside",
    ),
    (
        find_stray_collectives,
        "experiments.fsdp",
        "from jax import lax\njax.tree.map(lax.pmean, x)",
        "jax.lax.pmean",
    ),
    (
        find_stray_collectives,
        "manualpar.strategies.fsdp",
        "from jax.lax import all_gather",
        "all_gather",
    ),
    *(
        (find_stray_writers, "manualpar.training.run", f"import os, io, shutil\nf = {code}", found)
        for code, found in {
            "open(path, 'a')": ":2: open outside manualpar.system.storage.untrusted",
            "open(path, mode='r+b')": "open outside",
            "path.open('xb')": "path.open outside",
            "io.open(path, 'w')": "io.open outside",
            "os.fdopen(os.open(path, flags), 'wb')": "os.open outside",
            "os.open(path, os.O_RDWR | os.O_CREAT)": "os.open outside",
            "(folder / name).write_text(text)": ".write_text outside",
            "path.write_bytes(data)": "path.write_bytes outside",
            "path.touch()": "path.touch outside",
            "os.truncate(path, 3)": "os.truncate outside",
            "shutil.copyfile(a, b)": "shutil.copyfile outside",
            "shutil.copytree(a, b)": "shutil.copytree outside",
            "figure.savefig(path)": "figure.savefig outside",
            "EventsWriter(path)": "EventsWriter outside",
            "save_file(tensors, path)": "save_file outside",
        }.items()
    ),
    (find_undocumented, "manualpar.core.mesh.splitting", "import jax", "no module docstring"),
    (
        find_undocumented,
        "manualpar.core.mesh.splitting",
        "'''Rng.'''\nclass A: ...",
        "A has no docstring",
    ),
    (
        find_undocumented,
        "manualpar.core.mesh.splitting",
        "def fold() -> None: ...",
        "fold has no docstring",
    ),
    (
        find_undocumented,
        "manualpar.core.mesh.splitting",
        "def f(a, b: int, *c, **d) -> int:\n    '''F.'''",
        "f leaves a, c, d unannotated",
    ),
    (
        find_undocumented,
        "manualpar.core.mesh.splitting",
        "class A:\n    '''A.'''\n    def m(self, x: int):\n        '''M.'''",
        "A.m leaves the result unannotated",
    ),
    (
        find_summaries_without_verb,
        "manualpar.core.mesh.splitting",
        "def _f():\n    'The key of a device.'",
        "_f begins with 'The', not a verb",
    ),
    (
        find_summaries_without_verb,
        "manualpar.core.mesh.splitting",
        "class A:\n    def f(self):\n        'Bytes of all arrays.'",
        "f begins with 'Bytes', not a verb",
    ),
    (find_misshapen_files, "manualpar.core.mesh.mesh", "\n" * 1201, "1201 lines"),
    (find_misshapen_files, "manualpar.training.utils", "", "says nothing"),
    (
        find_misshapen_files,
        "manualpar.launch",
        "if __name__ == '__main__':\n    main()\n\n\ndef late():\n    pass",
        "launch:1: definitions follow the call of main",
    ),
    (find_misshapen_files, "manualpar.mesh_helpers", "", "says nothing"),
]


@pytest.mark.parametrize(("check", "module", "source", "expected"), BROKEN)
def test_the_check_speaks(check: Check, module: str, source: str, expected: str):
    findings = check(module, source)
    assert any(expected in finding for finding in findings), findings


SOUND = [
    (
        "manualpar",
        "from manualpar.strategies.fsdp import fsdp\n"
        "from manualpar.core.mesh.splitting import fold_rng_over_axis",
    ),
    (
        "manualpar.training.trainer",
        "from manualpar.core.state.metrics import Metrics\nimport manualpar.core.mesh.mesh",
    ),
    (
        "manualpar.core.program.program",
        "from manualpar.core.modes import gradients\nimport jax.numpy as jnp",
    ),
    ("experiments.fsdp", "import manualpar\nfrom manualpar import Batch\nfrom absl import flags"),
    (
        "manualpar.core.program.program",
        "import jax\nstep = jax.shard_map(\n    f,\n    mesh=mesh,\n    check_vma=True,\n)",
    ),
    (
        "manualpar.layers.attention.unchecked",
        "jax.shard_map(\n    f,\n    # Pallas kernels have no types yet.\n    check_vma=False,\n)",
    ),
    ("manualpar.core.mesh.mesh", "import os\nimport jax\ndef _f():\n    jax.config.update('a', 1)"),
    (
        "manualpar.core.mesh.mesh",
        "import os\nHOME = os.environ.get('HOME')\nUSER = os.environ['USER']",
    ),
    (
        "manualpar.core.parameters.collectives",
        "import jax\ndef _f(x):\n    return jax.lax.psum(x, 'data')",
    ),
    ("manualpar.core.parameters.collectives", "from jax.lax import ppermute"),
    ("manualpar.core.program.program", "import jax\nindex = jax.lax.axis_index('data')"),
    (
        "manualpar.system.reports",
        "import os, shutil, sys\nopen(path)\nopen(path, 'rb')\npath.open(encoding='utf-8')\n"
        "os.open(path, os.O_RDONLY | os.O_NOFOLLOW)\nos.open(os.devnull, os.O_WRONLY)\n"
        "os.fdopen(sys.stdout.fileno(), 'wb')\nshutil.rmtree(path)\npath.rename(other)\n"
        "figure.savefig(memory, format='png')\ntensorstore.open(spec, create=True)",
    ),
    (
        "manualpar.core.mesh.splitting",
        "class A:\n    '''A.'''\n    def __init__(self, x: int):\n        self._f = lambda y: y\n"
        "    def _f(self, x): ...\n    @classmethod\n    def g(cls) -> int:\n        'Gets G.'\n"
        "    @property\n    def h(self) -> int:\n        'The H.'",
    ),
]


@pytest.mark.parametrize(("module", "source"), SOUND)
def test_the_checks_leave_sound_code_alone(module: str, source: str):
    for check, _ in SCOPES:
        text = source if check is not find_undocumented else f"'''A module.'''\n{source}"
        assert check(module, text) == []


def test_importing_everything_asks_for_no_device_and_changes_no_environment():
    # The first round imports other packages too, which may change jax's config. The second round
    # imports only this package again, and must change nothing.
    script = """
        import importlib, os, pkgutil, sys

        def import_everything():
            import manualpar
            for module in pkgutil.walk_packages(manualpar.__path__, "manualpar."):
                importlib.import_module(module.name)

        import_everything()
        for name in [name for name in sys.modules if name.split(".")[0] == "manualpar"]:
            del sys.modules[name]
        import jax
        environment, values = dict(os.environ), dict(jax.config.values)
        import_everything()
        assert dict(os.environ) == environment, "importing changed os.environ"
        assert dict(jax.config.values) == values, "importing changed jax.config"
        # JAX refuses this once its devices are initialised.
        jax.config.update("jax_num_cpu_devices", 3)
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr


def _closure(*starts: str) -> dict[str, str]:
    """Returns the sources of `starts` and of the package's modules that they import, by name."""
    sources = dict(_sources("manualpar"))
    found: dict[str, str] = {}
    pending = list(starts)
    while pending:
        module = pending.pop()
        if module in found:
            continue
        found[module] = sources[module]
        for node in ast.walk(ast.parse(sources[module])):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
            else:
                continue
            pending += [name for name in names if name in sources and name != "manualpar"]
    return found


def test_the_core_knows_neither_nnx_nor_pipelines():
    """NNX models register themselves, and pipelines reach the core through an interface."""
    closure = _closure("manualpar.core.program.program", "manualpar.strategies.fsdp")
    assert "manualpar.core.modes.manual" in closure
    rooms = ("manualpar.core.model.nnx", "manualpar.training", "manualpar.layers.pipeline")
    assert not [module for module in closure if module.startswith(rooms)]


def test_a_module_with_one_reader_belongs_to_its_reader():
    found = [
        finding.partition(":")[0] for finding in find_lone_readers(dict(_sources("manualpar")))
    ]
    assert found == [f"manualpar.{module}" for module in sorted(CHAPTERS)]
    samples = {"manualpar.a.one": "import manualpar.a.two", "manualpar.a.two": ""}
    assert find_lone_readers(samples) == [
        "manualpar.a.two: only manualpar.a.one reads it, and it belongs there"
    ]
    assert find_lone_readers(samples | {"manualpar.b.three": "from manualpar.a import two"}) == []


def test_the_page_ends_with_the_half_hour_that_it_promises():
    page = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    steps = re.findall(r"(?m)^\d+\. `(core/.*)\.py`: ", page)
    assert [step.replace("/", ".") for step in steps] == [f"core.{module}" for module in READ]
    assert all((ROOT / "manualpar" / f"{step}.py").exists() for step in steps)
