"""A sample of the damaged and hostile folders is survived, and the script sees what is not."""

import pytest

from benchmarks import checkpoint_faults
from benchmarks.checkpoint_fault_cases import GOES_ON, REFUSED, Case, at, cases, flip
from benchmarks.checkpoint_faults import make_reference, try_all

EVERY = 29  # Of all cases; a prime, so that the sample has some of each kind.


@pytest.fixture(scope="module")
def reference(tmp_path_factory, devices8):
    return make_reference(tmp_path_factory.mktemp("faults"))


@pytest.mark.slow
def test_a_sample_is_survived(reference, tmp_path, capsys):
    chosen = list(cases(reference.workdir, reference.outside))
    assert len(chosen) > 400
    assert len({case[:2] for case in chosen}) == len(chosen)
    outcomes = try_all(reference, chosen[::EVERY], tmp_path)
    assert capsys.readouterr().out == ""
    assert not any(map(any, outcomes.values()))


@pytest.mark.slow
def test_what_is_not_survived_is_seen(reference, tmp_path, monkeypatch):
    damage = at("throughput.jsonl", flip)
    chosen = [
        Case("a", "refused, but should not be", at(".lock", lambda path: path.mkdir()), GOES_ON),
        Case("a", "goes on, but should not", damage, REFUSED),
        Case("a", "another state", lambda workdir: None, GOES_ON, step=20),
        Case("a", "opens what is outside", lambda workdir: None, GOES_ON),
        Case("a", "another error", lambda workdir: None, REFUSED),
    ]
    found = try_all(reference, chosen[:3], tmp_path)["a"]
    open_files = checkpoint_faults.RunWriter

    def peek(*args, **kwargs):
        with (reference.outside / "file").open():
            return open_files(*args, **kwargs)

    monkeypatch.setattr(checkpoint_faults, "RunWriter", peek)
    found += try_all(reference, chosen[3:4], tmp_path)["a"]

    def fail(*args, **kwargs):
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(checkpoint_faults, "RunWriter", fail)
    found += try_all(reference, chosen[4:], tmp_path)["a"]
    for why, begin in zip(
        found, ("refused: ", "went on", "another state", "opened ", "KeyError"), strict=True
    ):
        assert why.startswith(begin), why
