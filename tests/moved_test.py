"""Old names of modules that have moved are understood for one more release."""

import importlib
import sys

import pytest

import manualpar
from manualpar._moved import MOVED


@pytest.fixture(autouse=True)
def forget_old_names():
    yield
    for name in MOVED:
        sys.modules.pop(f"manualpar.{name}", None)


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_name_gives_the_module_and_a_warning(old, new):
    spec = importlib.import_module(f"manualpar.{new}").__spec__
    # If its folder has moved too, the first warning is about the folder.
    with pytest.warns(DeprecationWarning, match=" now; the old name goes") as caught:
        module = importlib.import_module(f"manualpar.{old}")
    assert str(caught[-1].message).startswith(f"manualpar.{old} is manualpar.{new} now")
    assert module is importlib.import_module(f"manualpar.{new}")
    assert module.__spec__ is spec


@pytest.mark.parametrize(
    "source",
    [
        "from manualpar.pretrained import load_hf as found",
        "from manualpar import pretrained\nfound = pretrained.load_hf",
        "import manualpar.pretrained\nfound = manualpar.pretrained.load_hf",
        "import manualpar.pretrained.load\nfound = manualpar.pretrained.load.load_hf",
    ],
)
def test_the_warning_is_about_the_line_that_imports(source):
    vars(manualpar).pop("pretrained", None)
    sys.modules.pop("manualpar.pretrained.load", None)
    names = {}
    with pytest.warns(DeprecationWarning, match=r"manualpar\.pretrained") as caught:
        exec(compile(source, "users_file.py", "exec"), names)
    assert {warning.filename for warning in caught} == {"users_file.py"}
    assert names["found"] is importlib.import_module("manualpar.models.pretrained").load_hf


def test_other_names_are_missing_as_anywhere():
    with pytest.raises(AttributeError, match="module 'manualpar' has no attribute 'nothing'"):
        getattr(manualpar, "nothing")  # noqa: B009
    for name in ("manualpar.nothing", "manualpar.sharding.nothing", "manualpar.modes.manual.no"):
        with pytest.raises(ModuleNotFoundError, match=name.rpartition(".")[0]):
            importlib.import_module(name)
