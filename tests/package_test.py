"""What `pip install .` gives: a wheel with the whole package, its types, and nothing besides."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _run(*command: str | Path, cwd: Path) -> str:
    process = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
    return process.stdout


def _can_build_here() -> bool:
    """Whether this environment's setuptools builds wheels, so that pip need not fetch another."""
    try:
        major = importlib.metadata.version("setuptools").split(".")[0]
    except importlib.metadata.PackageNotFoundError:
        return False
    return int(major) >= 77


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources: building writes next to them."""
    source = tmp_path_factory.mktemp("source")
    for name in ("manualpar", "tests", "configs", "experiments", "benchmarks"):
        if (ROOT / name).exists():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("wheel")
    isolation = ["--no-build-isolation"] if _can_build_here() else []
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", *isolation]
    _run(*pip, "--wheel-dir", target, source, cwd=target)
    [path] = target.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "manualpar").rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
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


@pytest.mark.slow
def test_a_clean_environment_imports_the_installed_wheel(wheel: Path, tmp_path: Path):
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = "Scripts" if sys.platform == "win32" else "bin"
    python = tmp_path / "venv" / binaries / "python"
    _run(python, "-m", "pip", "install", wheel, cwd=tmp_path)
    script = "import manualpar, manualpar.training, manualpar.models; print(manualpar.__file__)"
    location = Path(_run(python, "-c", script, cwd=tmp_path).strip())
    assert "site-packages" in location.parts
    assert location.is_relative_to(tmp_path / "venv")
