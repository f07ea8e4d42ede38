"""Lines are whole, files are whole, and errors are a sentence."""

import hashlib
import json
import os

import pytest

from manualpar.system.storage.durable_files import LineFile, WriteError, replace_file


def test_a_line_that_the_disk_takes_half_of_is_taken_back(tmp_path, limit_files):
    lines = LineFile(tmp_path / "lines")
    lines.append({"a": 1})
    limit_files(lines.size + 4)
    with pytest.raises(WriteError, match=r"written: .*/lines: File too large; name another folder"):
        lines.append({"a": 2})
    limit_files(100)
    lines.append({"a": 3})
    lines.close()
    written = (tmp_path / "lines").read_text().splitlines()
    assert [json.loads(line) for line in written] == [{"a": 1}, {"a": 3}]


def test_a_file_that_cannot_be_replaced_is_as_it_was(tmp_path, limit_files):
    replace_file(tmp_path / "file", "before")
    limit_files(3)
    with pytest.raises(WriteError, match="/file: File too large"):
        replace_file(tmp_path / "file", "afterwards")
    assert (tmp_path / "file").read_text() == "before"


def test_a_file_is_replaced_and_not_written_over(tmp_path):
    replace_file(tmp_path / "file", "before")
    (tmp_path / "link").hardlink_to(tmp_path / "file")
    replace_file(tmp_path / "file", "afterwards")
    assert (tmp_path / "file").read_text() == "afterwards"
    assert (tmp_path / "link").read_text() == "before", "half of the new content could be seen"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


def test_a_line_is_in_the_file_before_append_returns(tmp_path):
    lines = LineFile(tmp_path / "lines")
    lines.append({"text": "ü"})
    assert json.loads((tmp_path / "lines").read_text()) == {"text": "ü"}
    lines.sync()
    assert lines.size == len((tmp_path / "lines").read_bytes())
    lines.close()


def test_the_hash_is_that_of_the_file_whoever_wrote_it_and_after_a_cut(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n{"a": 2')  # As a killed process leaves it.
    lines = LineFile(path)
    lines.append({"a": 3})
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2\n{"a": 3}\n'
    for size in (100, 18, 9, 4):  # A cut within a line ends the line.
        lines.cut(size)
        lines.append({"a": 4})
        assert lines.size == path.stat().st_size
        assert lines.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.read_bytes() == b'{"a"\n{"a": 4}\n'
    lines.close()


@pytest.mark.parametrize(("size", "text"), [(3, "3 bytes, expected 9"), (20, "20 bytes, expe")])
def test_a_file_that_somebody_cuts_or_extends_is_missed_before_the_next_line(tmp_path, size, text):
    lines = LineFile(tmp_path / "lines")
    lines.append({"a": 1})
    os.truncate(tmp_path / "lines", size)
    for write in (lambda: lines.append({"a": 2}), lines.sync):
        with pytest.raises(WriteError, match=rf"/lines has {text}.*; start the same command again"):
            write()
    assert (tmp_path / "lines").stat().st_size == size
    lines.close()
