"""`pip install .` builds a wheel that contains the package and its types, and nothing else."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.paths import ROOT


def _run(*command: str | Path, cwd: Path) -> str:
    process = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
    return process.stdout


def _can_build_here() -> bool:
    """Returns whether the installed setuptools can build wheels, without a download by pip."""
    try:
        major = importlib.metadata.version("setuptools").split(".")[0]
    except importlib.metadata.PackageNotFoundError:
        return False
    return int(major) >= 77


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds a wheel from a copy of the sources, because building writes into their folder."""
    source = tmp_path_factory.mktemp("source")
    for name in ("manualpar", "tests", "configs", "experiments", "benchmarks"):
        if (ROOT / name).exists():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("wheel")
    isolation = ["--no-build-isolation"] if _can_build_here() else []
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", *isolation]
    _run(*pip, "--wheel-dir", target, source, cwd=target)
    [path] = target.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "manualpar").rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    configs = [path for path in (ROOT / "configs").rglob("*") if path.suffix in (".py", ".toml")]
    expected |= {f"manualpar/{path.relative_to(ROOT).as_posix()}" for path in configs}
    assert inside == expected
    assert "manualpar/py.typed" in inside
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_every_folder_of_the_package_is_a_package():
    folders = {path.parent for path in (ROOT / "manualpar").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_every_public_name_can_be_imported():
    import manualpar

    missing = [name for name in manualpar.__all__ if not hasattr(manualpar, name)]
    assert missing == []
    assert len(set(manualpar.__all__)) == len(manualpar.__all__)


def test_the_lower_bounds_are_the_tried_ones(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("METADATA")]
        metadata = archive.read(name).decode()
    bounds = dict(re.findall(r"^Requires-Dist: ([\w-]+)>=([\d.]+)", metadata, re.MULTILINE))
    tried = dict(
        re.findall(
            r"^([\w-]+)==([\d.]+)$",
            (ROOT / "constraints" / "minimum.txt").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
    not_tried = {name: bound for name, bound in bounds.items() if tried.get(name) != bound}
    assert "jax" in bounds
    assert not_tried == {}, f"bounds {bounds}, tried {tried}"


STEP = """
import jax, jax.numpy as jnp, flax.linen as nn, optax
import manualpar

def loss_fn(params, apply_fn, batch, rng):
    error = apply_fn({"params": params}, batch.inputs) - batch.labels
    return (error**2).mean(), {"loss": ((error**2).sum(), jnp.float32(error.size))}

batch = manualpar.Batch(jnp.ones((4, 3)), jnp.ones((4, 2)))
mesh = manualpar.make_mesh({"data": -1})
program = manualpar.fsdp(nn.Dense(2), optax.sgd(0.1), loss_fn, mesh=mesh, batch=batch)
state, metrics = program.train_step(program.init(jax.random.key(0)), batch)
manualpar.print_metrics(metrics)
print(manualpar.__file__)
"""


@pytest.mark.slow
def test_the_package_alone_trains_a_step_and_names_the_extra_for_more(wheel: Path, tmp_path: Path):
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = "Scripts" if sys.platform == "win32" else "bin"
    python = tmp_path / "venv" / binaries / "python"
    _run(python, "-I", "-m", "pip", "install", wheel, cwd=tmp_path)
    loss, location = _run(python, "-I", "-c", STEP, cwd=tmp_path).splitlines()
    assert loss.startswith("loss: ")
    assert "site-packages" in Path(location).parts
    assert Path(location).is_relative_to(tmp_path / "venv")
    packages = _run(python, "-I", "-m", "pip", "list", cwd=tmp_path).lower()
    optional = "grain ml_collections tensorboardx scikit-learn tokenizers matplotlib pytest"
    assert [name for name in optional.split() if re.search(rf"^{name} ", packages, re.M)] == []
    command = (python, "-I", "-c", "import manualpar.training")
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    sentence = "needs grain and ml-collections and tensorboardX, which are not installed: "
    assert f"{sentence}pip install 'manualpar[train]'" in refused.stderr.splitlines()[-1]
    _run(python, "-I", "-m", "pip", "install", f"{wheel}[train]", cwd=tmp_path)
    _run(
        python,
        "-I",
        "-c",
        "import manualpar.commands.train_command, manualpar.models",
        cwd=tmp_path,
    )
    command = tmp_path / "venv" / binaries / "manualpar"
    assert "fsdp_lm " in _run(command, "configs", cwd=tmp_path)
    small = ("--data.source=synthetic", "--training.num_steps=2", "--optimizer.warmup_steps=1")
    _run(command, "new", "mine", cwd=tmp_path)
    few = ("--training.num_steps=2", "--optimizer.warmup_steps=1")
    assert "test accuracy: " in _run(python, "train.py", *few, cwd=tmp_path / "mine")
    shown = _run(command, "train", "dp", *small, "--workdir=run", cwd=tmp_path)
    assert "test accuracy: " in shown
    assert (tmp_path / "run" / "metrics.jsonl").exists()
