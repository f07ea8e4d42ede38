"""The repository's web address comes from a variable or from git, without credentials."""

import pytest

from docs.repository import VARIABLE, file_address, find_repository, web_address


@pytest.mark.parametrize(
    ("remote", "expected"),
    [
        ("https://example.org/owner/name.git", "https://example.org/owner/name"),
        ("https://user:token@example.org/owner/name/", "https://example.org/owner/name"),
        ("git@example.org:owner/name.git", "https://example.org/owner/name"),
        ("ssh://git@example.org:2222/owner/name.git", "https://example.org/owner/name"),
        ("/srv/owner/name.git", ""),
        ("../name", ""),
        ("", ""),
    ],
)
def test_a_remote_becomes_a_web_address(remote, expected, monkeypatch):
    assert web_address(remote) == expected
    monkeypatch.setenv(VARIABLE, remote)
    assert find_repository() == expected


def test_a_file_has_an_address():
    address = file_address("https://example.org/owner/name", "docs/fsdp.md")
    assert address == "https://example.org/owner/name/blob/HEAD/docs/fsdp.md"
