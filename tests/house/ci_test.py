"""Continuous integration uses fixed versions: actions by commit, packages by version and hash."""

import configparser
import re

from tests.paths import ROOT


def test_actions_are_named_by_the_hash_of_a_commit():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    uses = re.findall(r"uses: (.*)", text)
    assert len(uses) == 7
    for use in uses:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", use)


def test_the_lock_has_each_dependency_once_with_a_version_and_a_hash():
    lines = (ROOT / "constraints" / "ci.txt").read_text().splitlines()[1:]
    found = [
        re.fullmatch(r"([\w.-]+)==[\w.+!]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines
    ]
    assert all(found)
    names = [re.sub(r"[_.-]+", "-", match[1]).lower() for match in found]
    assert len(names) == len(set(names))
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    brought = ("train", "examples", "pretrained", "data", "plots", "test", "lint")
    wanted = [setup["options"]["install_requires"], *(extras[name] for name in brought)]
    for line in "\n".join(wanted).split("\n"):
        if line and not line.startswith("manualpar["):
            assert re.split(r"[ \[><=~]", line)[0].lower() in names
