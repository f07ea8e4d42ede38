"""Files of many documents give each document once in any parts, and what is wrong has a place."""

import numpy as np
import pytest

from manualpar.data import document_files
from manualpar.data.dataset import DamagedDataError
from manualpar.data.document_files import SUFFIXES, divide, find_document_files, read_documents
from tests.data.documents import DOCUMENTS, write_documents


def _read(path, source, field="text"):
    parts = divide(source, find_document_files(path, source), field)
    return parts, [document for part in parts for document in read_documents(part)]


@pytest.mark.parametrize("source", SUFFIXES)
@pytest.mark.parametrize("part_bytes", [1, 100, 2**25])
def test_every_document_is_in_one_part(tmp_path, monkeypatch, source, part_bytes):
    monkeypatch.setattr(document_files, "PART_BYTES", part_bytes)
    parts, documents = _read(write_documents(tmp_path, source), source)
    assert [document.decode() for document in documents] == DOCUMENTS
    assert (len(parts) == 1) == (part_bytes > 100)
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]


@pytest.mark.parametrize("source", SUFFIXES)
def test_documents_may_be_tokens_already(tmp_path, source):
    tokens = [[1, 2, 3], [], [65535, 0]]
    path = write_documents(tmp_path, source, tokens, "ids")
    _, documents = _read(path, source, "<u2" if source == "arrayrecord" else "ids")
    assert [document.tolist() for document in documents] == [tokens[0], tokens[2]]


def test_a_directory_is_searched_for_files_of_the_source(tmp_path):
    for name in ("b/x.jsonl", "a.ndjson", ".hidden.jsonl", "notes.txt", "empty.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "empty" in name else '{"text": "a"}\n')
    found = find_document_files(str(tmp_path), "jsonl")
    assert sorted(file.name for file in found) == ["a.ndjson", "b/x.jsonl"]
    assert [file.name for file in find_document_files(f"{tmp_path}/*.txt", "jsonl")] == [
        "notes.txt"
    ]
    with pytest.raises(ValueError, match=r"`path` is '.*', .*directory with \.parquet"):
        find_document_files(str(tmp_path), "parquet")


def _cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _garble(path):
    content = bytearray(path.read_bytes())
    content[100:1100] = b"\xff" * 1000
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_cut, _garble])
@pytest.mark.parametrize("source", ["parquet", "arrayrecord"])
def test_a_damaged_file_is_an_error_and_no_text(tmp_path, source, damage):
    rng = np.random.default_rng(0)
    documents = [bytes(rng.integers(32, 127, 500, np.uint8)).decode() for _ in range(300)]
    path = write_documents(tmp_path, source, documents)
    damage(tmp_path / path)
    read, message = [], ""
    try:
        _, read = _read(path, source)
    except DamagedDataError as error:
        message = str(error)
    if message or source == "parquet":
        assert message.startswith(path)
        assert "\n" not in message
    else:  # ArrayRecord reads on where nothing but unused space is damaged.
        assert [document.decode() for document in read] == documents
