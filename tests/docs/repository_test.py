"""The repository's web address comes from a variable or from git, without credentials."""

import pytest

from docs.repository import (
    VARIABLE,
    file_address,
    find_repository,
    replace_links,
    web_address,
)


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](b.md)", "[a](new/b.md)"),
        ("[a\nb](b.md#part), `x`", "[a\nb](new/b.md#part), `x`"),
        ("[`x[0]`](../b.py) [c](#part)", "[`x[0]`](new/../b.py) [c](new/#part)"),
        ("![a](b.png) ![a](none.png)", "![a](new/b.png) a"),
        ("[a](none.md), [b](https://example.org)", "a, [b](https://example.org)"),
        ("`x[0](y)`, [a](b.md) `\n[c](d)`", "`x[0](y)`, [a](new/b.md) `\n[c](d)`"),
        ("```python\nx[0](y)\n```\n[a](b.md)", "```python\nx[0](y)\n```\n[a](new/b.md)"),
    ],
)
def test_links_outside_of_code_are_replaced(text, expected):
    def find_target(file, anchor):
        return "" if "none" in file else f"new/{file}{anchor}"

    assert replace_links(text, find_target) == expected
