"""The manifest notices every change."""

import hashlib
import json
import os

import pytest

from manualpar.training.checkpoints.manifest import (
    MANIFEST,
    DamagedError,
    Manifest,
    read_manifest,
    verify_files,
    write_manifest,
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "state" / "d").mkdir(parents=True)
    for name, size in (("a", 0), ("state/b", 10), ("state/d/c", 3000)):
        (tmp_path / name).write_bytes(bytes(i % 251 for i in range(size)))
    write_manifest(tmp_path, step=7, metrics={"loss": 0.5, "nan": float("nan")})
    return tmp_path


def test_it_lists_every_file_and_only_them(folder):
    manifest = read_manifest(folder)
    assert isinstance(manifest, Manifest)
    assert (manifest.step, manifest.metrics) == (7, {"loss": 0.5})
    assert {name: size for name, (size, _) in manifest.files.items()} == {
        "a": 0,
        "state/b": 10,
        "state/d/c": 3000,
    }
    # What `sha256sum` says of no bytes.
    assert manifest.files["a"][1].startswith("e3b0c44298fc1c149afbf4c8996fb924")
    verify_files(folder, manifest)
    assert sorted(os.listdir(folder)) == ["a", MANIFEST, "state"]


def test_a_manifest_that_was_left_behind_is_replaced(folder):
    (folder / "a").write_text("other")
    write_manifest(folder, step=8, metrics={})
    manifest = read_manifest(folder)
    assert manifest.step == 8
    assert set(manifest.files) == {"a", "state/b", "state/d/c"}
    verify_files(folder, manifest)


def test_every_byte_of_the_manifest_counts(folder):
    path = folder / MANIFEST
    text = path.read_bytes()
    for position in range(len(text)):
        data = bytearray(text)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        with pytest.raises(DamagedError, match=r"manifest\.json is not as it was written"):
            read_manifest(folder)


def test_every_file_is_some_process_s(folder):
    manifest = read_manifest(folder)
    for name in manifest.files:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data + b"!")
        for parts in (1, 2, 3, 5):
            found = []
            for part in range(parts):
                try:
                    verify_files(folder, manifest, part=part, parts=parts)
                except DamagedError as error:
                    found.append(str(error))
            assert found == [f"{name} has {len(data) + 1} bytes, expected {len(data)}"]
        (folder / name).write_bytes(data)


def test_an_error_while_reading_is_not_passed_over(folder, monkeypatch):
    def fail(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.scandir", fail)
    with pytest.raises(PermissionError):
        write_manifest(folder, step=7, metrics={})


DIGEST = "0" * 64
HOSTILE_NAMES = ["../x", "/etc/passwd", "a/../../x", "..", ".", "", "a/", "//a", "./a", "a//b"]
HOSTILE_NAMES += ["a\0b", "a\nb", "\udcff", "\ud800", MANIFEST]


def hostile(content):
    """Manifests whose checksum is right, and which no save writes."""
    for name in HOSTILE_NAMES:
        yield {**content, "files": {name: [0, DIGEST]}}
    entries = [None, 3, "x", [], [1], [1, DIGEST, 1], ["1", DIGEST], [-1, DIGEST], [1.0, DIGEST]]
    entries += [[True, DIGEST], [10**30, DIGEST], [1, None], [1, "x"], [1, DIGEST.upper() + "F"]]
    for entry in entries:
        yield {**content, "files": {"a": entry}}
    for step in (None, "7", 7.0, True, -1, [7], 10**30):
        yield {**content, "step": step}
    for metrics in (None, "loss", [1], {"loss": "x"}, {"loss": None}, {"loss": 10**400}):
        yield {**content, "metrics": metrics}
    for files in (None, "a", [["a", 1, DIGEST]], 3):
        yield {**content, "files": files}


def test_a_manifest_that_was_made_to_do_harm_is_refused(folder):
    content = json.loads((folder / MANIFEST).read_text())
    del content["sha256"]
    for forged in hostile(content):
        checksum = hashlib.sha256(json.dumps(forged, sort_keys=True).encode()).hexdigest()
        text = json.dumps({"sha256": checksum, **forged}, indent=1, sort_keys=True) + "\n"
        (folder / MANIFEST).write_text(text)
        with pytest.raises(DamagedError, match=r"^manifest\.json is not as it was written: ."):
            read_manifest(folder)


@pytest.mark.parametrize("name", [MANIFEST, "state/b", "state/d", "state/extra"])
def test_nothing_but_folders_and_files_is_looked_into(folder, tmp_path_factory, name):
    manifest, path = read_manifest(folder), folder / name
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    if path.exists():
        path.rename(elsewhere)
    else:
        elsewhere.write_text("")
    for kind in ("link", "FIFO"):
        if kind == "link":
            path.symlink_to(elsewhere)
        else:
            os.mkfifo(path)
        with pytest.raises(DamagedError, match=f"^{name} is a {kind}, expected a file$"):
            verify_files(folder, read_manifest(folder) if name == MANIFEST else manifest)
        path.unlink()
