"""The manifest notices every change."""

import os

import pytest

from manualpar.checkpoints.manifest import (
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
    (folder / f"{MANIFEST}.tmp").write_text("half a")
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


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "1", '{"files": []}', " ", "{"])
def test_other_texts_are_no_manifest(folder, text):
    (folder / MANIFEST).write_text(text)
    with pytest.raises(DamagedError, match=r"manifest\.json is not as it was written"):
        read_manifest(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(DamagedError, match=r"manifest\.json is missing"):
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
