"""`pip install .` builds a wheel that contains the package and its types, and nothing else."""

import importlib.metadata
import json
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


ISOLATION = ["--no-build-isolation"] if _can_build_here() else []


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies the sources, because building writes into their folder."""
    source = tmp_path_factory.mktemp("source")
    for name in ("manualpar", "tests", "configs", "experiments", "benchmarks"):
        if (ROOT / name).exists():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", *ISOLATION]
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
        if path.suffix == ".py"
        or path.name == "py.typed"
        or (path.parent.name in ("templates", "new_project") and path.is_file())
    }
    configs = [path for path in (ROOT / "configs").rglob("*") if path.suffix in (".py", ".toml")]
    expected |= {f"manualpar/{path.relative_to(ROOT).as_posix()}" for path in configs}
    assert inside == expected
    assert "manualpar/py.typed" in inside
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_every_folder_of_the_package_is_a_package():
    folders = {path.parent for path in (ROOT / "manualpar").rglob("*.py")}
    folders.remove(ROOT / "manualpar" / "commands" / "new_project")  # What `manualpar new` writes.
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


@pytest.mark.long
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


TYPED = """
import flax.linen as nn
import jax
import optax
from flax import nnx

import manualpar
from manualpar import Batch, TrainState, inspect, make_mesh, print_metrics
from manualpar.data import load_dataset
from manualpar.training import Fields


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


class Own(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(x)


def loss_fn(params, apply_fn, batch, rng):
    logits = apply_fn({"params": params}, batch.inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


batch = Batch(jax.numpy.ones((64, 64)), jax.numpy.zeros(64, int))
mesh, tx = make_mesh({"replica": 1, "data": -1}), optax.adamw(1e-3)
program = manualpar.fsdp(Model(), tx, loss_fn, mesh=mesh, batch=batch, min_weight_size=1)
state: TrainState = program.init(jax.random.key(0))
state, metrics = program.train_step(state, batch)
print_metrics(metrics)
total, count = metrics["loss"]
print(float(total / count), state.params["Dense_0"]["kernel"].sharding, state.step.devices())
print(load_dataset("digits", seed=0).num_classes)
print(load_dataset("text", seed=0, sequence_length=32).tokenizer.vocab_size)
reveal_type(program)
reveal_type(manualpar.fsdp(Own, tx, loss_fn, mesh=mesh, batch=batch))
reveal_type(manualpar.data_parallel(Model(), tx, loss_fn, mesh=mesh, batch=batch))
reveal_type(manualpar.zero(Model(), tx, loss_fn, stage=1, mesh=mesh, batch=batch))
reveal_type(manualpar.hsdp(Model(), tx, loss_fn, mesh=mesh, batch=batch))
reveal_type(manualpar.diloco(Model(), tx, loss_fn, every=2, outer_tx=tx, mesh=mesh, batch=batch))
reveal_type(state)
reveal_type(inspect.ledger(program))
reveal_type(metrics)
reveal_type(program.eval_step(state, batch))
"""
REVEALED = [*["Program"] * 6, "TrainState", "Ledger", *["dict[str, tuple[Array, Array]]"] * 2]
MISTAKES = """
manualpar.fsdp(Model(), tx, loss_fn, mesh=mesh, batch=batch, min_wieght_size=1)
program.train_step(state)
fields: Fields = {"training.num_steps": 3, "training.num_stepz": 3}
"""


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("installed", ["wheel", "editable"])
def test_pyright_knows_the_types_in_a_users_script(
    installed: str, source: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("pyright", reason="needs pyright, of the extra interop")
    venv.create(tmp_path / "venv")
    binaries = "Scripts" if sys.platform == "win32" else "bin"
    python = tmp_path / "venv" / binaries / "python"
    site = _run(python, "-c", "import sysconfig as s; print(s.get_path('purelib'))", cwd=tmp_path)
    # The other packages are those of this environment.
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    Path(site.strip(), "others.pth").write_text("\n".join(others), encoding="utf-8")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "script.py").write_text(TYPED + MISTAKES, encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", python, "script.py"]

    def check() -> list[dict[str, str]]:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        diagnostics: list[dict[str, str]] = json.loads(done.stdout)["generalDiagnostics"]
        return diagnostics

    assert 'Import "manualpar" could not be resolved' in {x["message"] for x in check()}
    what = [wheel] if installed == "wheel" else ["--editable", source]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", *ISOLATION]
    _run(*pip, *what, cwd=tmp_path)
    found = check()
    revealed = [x["message"] for x in found if x["severity"] == "information"]
    assert [re.findall(r'is "(.*)"$', x)[0] for x in revealed] == REVEALED
    wrong, missing, field = [x["message"] for x in found if x["severity"] != "information"]
    assert 'No parameter named "min_wieght_size"' in wrong
    assert "Expected 1 more positional argument" in missing
    assert '"training.num_stepz" is an undefined item in type "Fields"' in field
