"""Files and lines that anybody may have written are read, or refused in a sentence, at once."""

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from manualpar.errors import printable
from manualpar.system.storage.untrusted import (
    MAX_DEPTH,
    NotAFileError,
    create_file,
    model_file,
    open_file,
    open_own_file,
    open_tensors,
    parse_object,
    read_file,
    read_model_object,
    read_object,
)


def nested(depth):
    return '{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


def test_what_could_rule_a_terminal_is_escaped():
    assert printable("\x1b]0;x\x07 ü\n\u202e\ud800 ok") == r"\x1b]0;x\x07 ü\n\u202e\ud800 ok"


def test_an_object_is_read(tmp_path, monkeypatch):
    value = {"a": [1, 2.5, None, "ü", {"b": True}], "wide": [[1]] * 200}
    (tmp_path / "file").write_text(json.dumps(value))
    (tmp_path / "link").symlink_to("file")
    assert read_object(tmp_path / "file") == value
    assert read_object(tmp_path / "link", follow_links=True) == value
    assert parse_object(nested(MAX_DEPTH))
    monkeypatch.setattr("manualpar.system.storage.untrusted.MAX_BYTES", 10)
    with pytest.raises(ValueError, match="has more than 10 bytes"):
        read_file(tmp_path / "file")


def others(folder):
    """One of everything that is not a file, with how it is called."""
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
    (folder / "file").write_text("{}")
    (folder / "link").symlink_to("file")
    (folder / "dangling").symlink_to("none")
    return [
        (folder / "folder", "a folder"),
        (folder / "fifo", "a FIFO"),
        (folder / "socket", "a socket"),
        (folder / "link", "a link"),
        (folder / "dangling", "a link"),
        ("/dev/zero", "a device"),
    ]


@pytest.mark.parametrize("open_one", [open_file, open_own_file])
def test_only_files_are_opened(open_one, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # The name of a socket is short.
    for path, kind in others(tmp_path.relative_to(tmp_path)):
        with pytest.raises(NotAFileError, match=f"^is {kind}, expected a file$"):
            open_one(Path(path))
    assert not Path("none").exists()


def test_a_file_is_changed_unless_it_has_a_second_name(tmp_path):
    for text in (b"old", b"new"):
        with open_own_file(tmp_path / "file") as file:
            file.write(text)
    with open_own_file(tmp_path / "file", appends=True) as file:
        file.write(b" and more")
    assert (tmp_path / "file").read_bytes() == b"new and more"
    with pytest.raises(FileNotFoundError):
        open_own_file(tmp_path / "none", create=False)
    (tmp_path / "second").hardlink_to(tmp_path / "file")
    with pytest.raises(NotAFileError, match=r"^has 2 names \(hard links\), expected one, because"):
        open_own_file(tmp_path / "file")


def test_a_link_that_takes_the_place_of_a_file_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "link").symlink_to("precious")
    a_file = os.stat(tmp_path / "precious")
    monkeypatch.setattr("manualpar.system.storage.untrusted.os.lstat", lambda path: a_file)
    with pytest.raises(OSError, match="symbolic links"):
        open_own_file(tmp_path / "link")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(NotAFileError, match="is a FIFO"):
        open_own_file(tmp_path / "fifo")


def test_a_file_of_tensors_has_a_header_of_some_length(tmp_path):
    for length, found in ((7, 7), (93, 0), (2**64 - 1, 0)):  # The file is shorter.
        (tmp_path / "file").write_bytes(length.to_bytes(8, "little") + bytes(84))
        file, header = open_tensors(tmp_path / "file")
        with file:
            assert (header, file.tell()) == (found, 0)
    (tmp_path / "file").write_bytes((80).to_bytes(8, "little") + bytes(84))
    with pytest.raises(ValueError, match=r"^has a header of 80 bytes, expected at most 79: store"):
        open_tensors(tmp_path / "file", most=79)
    (tmp_path / "file").unlink()
    os.mkfifo(tmp_path / "file")
    with pytest.raises(NotAFileError, match="is a FIFO"):
        open_tensors(tmp_path / "file")


OUT = "leads to .*/secret, expected a file in the folder of the model"
LINKS = {
    # A link in a model's folder, its target (none: it is a file), and words if it is refused.
    "a file": ("config.json", None, ""),
    "a link within the folder": ("config.json", "other.json", ""),
    "a link out and back": ("config.json", "../{folder}/other.json", ""),
    "a link to a folder within": ("templates", "others", ""),
    "a link out": ("config.json", "{secret}", OUT),
    "a link up": ("config.json", "../secret", OUT),
    "a link by a link": ("config.json", "out.json", OUT),
    "a folder that is a link out": ("templates", "../private", "leads to .*/private/file, expect"),
    "a link to nothing": ("config.json", "none", "is a link that leads to nothing, expected a f"),
    "a link to itself": ("config.json", "config.json", "is a link that leads to nothing"),
    "a device": ("config.json", "/dev/zero", "leads to /dev/zero, expected a file in the folder"),
    "a folder": ("config.json", "others", "is a folder, expected a file"),
    "a FIFO": ("config.json", "fifo", "is a FIFO, expected a file"),
}


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("behind_a_link", [False, True])
def test_a_file_of_a_model_is_in_the_folder_of_the_model(tmp_path, name, behind_a_link):
    link, target, refused = LINKS[name]
    folder, given = tmp_path / "model", tmp_path / "given"
    (folder / "others").mkdir(parents=True)
    (tmp_path / "private").mkdir()
    given.symlink_to(folder)
    files = ("secret", "private/file", "model/other.json", "model/others/file")
    for file in files:
        (tmp_path / file).write_text(json.dumps(file))
    (folder / "out.json").symlink_to("../secret")
    os.mkfifo(folder / "fifo")
    if target is None:
        (folder / link).write_text("")
    else:
        (folder / link).symlink_to(target.format(folder="model", secret=tmp_path / "secret"))
    folder = given if behind_a_link else folder
    path = folder / link / "file" if link == "templates" else folder / link
    if not refused:
        assert path.samefile(model_file(path, folder))
        assert not model_file(path, folder).is_symlink()
        return
    with pytest.raises(NotAFileError, match=f"^{refused}"):
        model_file(path, folder)


def test_the_cache_of_hugging_face_has_links_to_the_files_of_the_same_model(tmp_path):
    models = [tmp_path / f"models--org--{name}" for name in ("ours", "theirs")]
    for model in models:
        (model / "blobs").mkdir(parents=True)
        (model / "blobs" / "123").write_text("{}")
        (model / "snapshots" / "main" / "inner").mkdir(parents=True)
    folder = models[0] / "snapshots" / "main"
    (folder / "config.json").symlink_to("../../blobs/123")
    (folder / "inner" / "config.json").symlink_to("../../../blobs/123")
    (folder / "theirs.json").symlink_to(models[1] / "blobs" / "123")
    (folder / "refs.json").symlink_to("../../refs")
    (models[0] / "refs").write_text("{}")
    for inner in (folder, folder / "inner"):
        assert read_model_object(inner / "config.json", inner) == {}
    for name in ("theirs.json", "refs.json"):
        with pytest.raises(NotAFileError, match="expected a file in the folder of the model"):
            model_file(folder / name, folder)
    # Without the cache's names, `blobs` is any folder.
    models[0].rename(tmp_path / "ours")
    folder = tmp_path / "ours" / "snapshots" / "main"
    with pytest.raises(NotAFileError, match="expected a file in the folder of the model"):
        model_file(folder / "config.json", folder)


def test_half_of_a_surrogate_pair_is_refused_by_its_key(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"a": "\U0001f600", "b": r"\ud800"}))
    assert read_model_object(path, tmp_path) == {"a": "\U0001f600", "b": r"\ud800"}
    for value, words in (
        ({"bos_token": "x\ud800"}, r"^has bos_token='x\\ud800', expected text in Unicode"),
        ({"a": [{"b": "\udfff"}]}, r"^has a\[0\]\.b='\\udfff', expected"),
        ({"a": {"\udfff": 1}}, r"^has such a key"),
    ):
        path.write_text(json.dumps(value))
        with pytest.raises(ValueError, match=words):
            read_model_object(path, tmp_path)


def test_a_fifo_that_takes_the_place_of_a_file_is_not_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("")
    a_file = os.stat(tmp_path / "file")
    monkeypatch.setattr(
        "manualpar.system.storage.untrusted.os.stat", lambda *args, **kwargs: a_file
    )
    caught = []

    def read():
        try:
            read_file(tmp_path / "fifo")
        except NotAFileError as error:
            caught.append(str(error))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(20)
    assert caught == ["is a FIFO, expected a file"]


def test_a_file_that_is_created_does_not_follow_links(tmp_path):
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "link").symlink_to("precious")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "new", "new"):
        with create_file(tmp_path / name) as file:
            file.write(b"draft")
        assert (tmp_path / name).read_text() == "draft"
        assert not (tmp_path / name).is_symlink()
    assert (tmp_path / "precious").read_text() == "keep"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        create_file(tmp_path / "folder")
