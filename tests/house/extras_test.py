"""Importing the package loads no optional package; a function that needs one names its extra."""

import configparser
import importlib
import json
import subprocess
import sys

import pytest

import experiments
from manualpar.data import load_dataset, load_tokenizer
from manualpar.errors import MODULES, MissingExtraError, require
from tests.paths import ROOT

SCRIPT = """
import importlib.metadata, json, sys
import absl.flags, flax.linen, flax.nnx, jax, numpy, optax  # And all that they import.
before = set(sys.modules)
import manualpar
bare = sorted(name for name in sys.modules if name.startswith("manualpar."))
assert bare == [], "names are imported when they are used"
for name in manualpar.__all__:
    getattr(manualpar, name)
loaded = {name.split(".")[0] for name in sys.modules.keys() - before}
ours = sorted(name for name in sys.modules if name.startswith("manualpar."))
assert not [name for name in sys.modules if "splash_attention_k" in name], "imported when used"
import manualpar.data
new = {name.split(".")[0] for name in sys.modules.keys() - before}
optional = sorted(new & manualpar.errors.MODULES.keys())
known = importlib.metadata.packages_distributions().keys()
print(json.dumps([sorted(loaded & known), ours, optional]))
"""


def test_importing_the_package_loads_what_jax_and_flax_load_and_none_of_the_loop():
    output = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True)
    loaded, ours, optional = json.loads(output.stdout)
    assert optional == [], "manualpar.data imports what it needs when it needs it"
    assert "manualpar" in loaded
    assert set(loaded) <= {"absl", "flax", "jax", "jaxlib", "manualpar", "numpy", "optax"}
    rooms = {name.split(".")[1] for name in ours}
    assert "core" in rooms
    assert rooms & {"training", "data", "commands", "planner"} == set()


def test_the_command_s_help_needs_neither_jax_nor_flax():
    script = "import sys, manualpar.commands.main as m; m.usage(); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("module", MODULES)
def test_each_optional_module_is_in_the_extra_that_is_named(module, monkeypatch):
    extra, package = MODULES[module]
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert f"{package} >=" in setup["options.extras_require"][extra]
    assert package not in setup["options"]["install_requires"]
    monkeypatch.setitem(sys.modules, module, None)
    sentence = rf"^this needs {package}, which is not .*: pip install 'manualpar\[{extra}\]'$"
    with pytest.raises(MissingExtraError, match=sentence):
        require("this", module)


def test_what_needs_an_extra_asks_for_it(monkeypatch, tmp_path):
    training = importlib.import_module("manualpar.training")
    for module in ("grain", "sklearn", "tokenizers"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"manualpar\.training needs grain"):
        importlib.reload(training)
    with pytest.raises(MissingExtraError, match=r"`source='digits'` needs scikit-learn"):
        load_dataset("digits", seed=0)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(MissingExtraError, match=r"`tokenizer` needs tokenizers"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_command_without_its_extra_prints_one_sentence(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(SystemExit) as ended:
        importlib.reload(experiments)
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "error: python -m experiments needs grain, which is not installed: "
        "pip install 'manualpar[train]'\n"
    )
