"""Malformed inputs of commands, fourth part: chat templates and tokenizers of models.

Chat templates and tokenizers are programs. Given an ordinary chat or text, the programs in this
file run without end or fill the memory.
"""

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.malformed_cases import Case

NAMESPACE = "{% set ns = namespace(x='a') %}"
NESTED = NAMESPACE + "{% set ns.x = [1] %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
TEMPLATES = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "doubling": NAMESPACE + "{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by +": NAMESPACE + "{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "times": "{{ 'a' * 10**9 }}",
    "times a message": "{{ messages[0].content * 10**9 }}",
    "list times": "{{ [1] * 10**10 }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "center": "{{ 'a'|center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "indent": "{{ 'a\\nb'|indent(10**10) }}",
    "indent of JSON": "{{ messages|tojson(indent=10**9) }}",
    "replace": "{{ (messages[0].content * 10**6).replace('', 'a' * 10**6) }}",
    "join": "{{ (['a' * 10**6] * 10**5)|join }}",
    "map": "{{ range(99999)|map('center', 10**7)|list|length }}",
    "batch": "{{ [1]|batch(10**9, 1)|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "power": "{{ 2**(2**40) }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "a large text": "{% for a in range(99999) %}{{ messages|length }}" + "a" * 99 + "{% endfor %}",
    "a list of itself": NESTED + "{% endfor %}{{ ns.x }}",
    "a list of itself as JSON": NESTED + "{% endfor %}{{ ns.x|tojson }}",
    "a deep list": NAMESPACE + "{% set ns.x = [] %}{% for a in range(90000) %}"
    "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "links": "{{ ('http://a.b ' * 10**6)|urlize }}",
    "loops that call themselves": "{% for a in [[1]] recursive %}{{ loop([a]) }}{% endfor %}",
    "calls": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "calls twice": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(99) }}",
    "blocks in blocks": "{% if true %}" * 3000 + "{% endif %}" * 3000,
    "parentheses": "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "not not": "{{" + "not " * 90000 + "1}}",
}


def words(*, unknown: str = "a", **parts: Any) -> dict[str, Any]:
    """Returns the content of a small `tokenizer.json`; `parts` replaces its entries."""
    vocabulary = {"<s>": 0, "a": 1}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added("<s>", 0)],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        **parts,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": unknown},
    }


def replacing(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    """Returns a tokenizer's normalizer or decoder that replaces `pattern` by `content`."""
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def splitting(pattern: str) -> dict[str, Any]:
    """Returns a pre-tokenizer that splits by a regular expression."""
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _added(content: str, number: int, *, normalized: bool = False) -> dict[str, Any]:
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized}
    return {"id": number, "content": content, "special": True, **options}


def _in_turn(steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": steps}


def _doubling_table(character: str) -> dict[str, Any]:
    """Returns a normalizer whose compiled table replaces a character of two bytes by two of it."""
    first, second = character.encode()
    # A trie as a double array: a node is reached by XOR of an offset (in bits 10 and above) and the
    # next byte (in bits 0 to 7). Bit 8 says that the text of this node begins at the node's value.
    trie = [0] * 0x301
    trie[0] = 0x100 << 10
    trie[0x100 ^ first] = (0x100 ^ first ^ 0x200) << 10 | first
    trie[0x200 ^ second] = (0x200 ^ second ^ 0x300) << 10 | 1 << 8 | second
    nodes = struct.pack(f"<{len(trie)}I", *trie)
    data = len(nodes).to_bytes(4, "little") + nodes + f"{character * 2}\0".encode()
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
_TOKENS = {"Sequence": {"id": "A", "type_id": 0}}
TWICE = {
    "type": "TemplateProcessing",
    "single": [_TOKENS, _TOKENS],
    "pair": [_TOKENS, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {},
}
TOKENIZERS: dict[str, dict[str, Any]] = {
    "exponential": {"pre_tokenizer": splitting("(a+)+$")},
    "exponential in letters": {"pre_tokenizer": splitting(r"(\p{L}+)+$")},
    "exponential in digits": {"pre_tokenizer": splitting(r"(\d+)+$")},
    "exponential alternatives": {"pre_tokenizer": splitting("(a|a)*$")},
    "exponential in a sequence": {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [splitting("((ab)+)+$")]}
    },
    "exponential normalizer": {"normalizer": replacing("(a+)+$", "b", "Regex")},
    "exponential decoder": {"decoder": replacing("(a+)+$", "b", "Regex")},
    "doubling": {"normalizer": _in_turn([replacing("a", "aa")] * 40)},
    "doubling by an expression": {"normalizer": _in_turn([replacing(".", "aa", "Regex")] * 40)},
    "doubling in turn": {
        "normalizer": _in_turn([replacing(chr(97 + n), chr(98 + n) * 2) for n in range(25)])
    },
    "doubling in sequences": {
        "normalizer": _in_turn([_in_turn([replacing("\u4e2d", "\u4e2d\u4e2d")] * 20)] * 20)
    },
    "doubling of nothing": {"normalizer": _in_turn([replacing("", "x")] * 40)},
    "long": {"normalizer": _in_turn([replacing("a", "a" * 10**6)] * 2)},
    "doubling by bytes": {"normalizer": _in_turn([{"type": "ByteLevel"}] * 40)},
    "doubling by bytes in words": {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 40}
    },
    "doubling of an added token": {
        "normalizer": _in_turn([{"type": "ByteLevel"}] * 40),
        "added_tokens": [_added("<s>", 0), _added("\u4e2d", 2, normalized=True)],
    },
    "doubling tokens": {"post_processor": {"type": "Sequence", "processors": [TWICE] * 40}},
    "doubling of nothing in a decoder": {
        "decoder": {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 40}
    },
    "doubling by a table": {"normalizer": _in_turn([_doubling_table("\xf1")] * 15)},
    "a table without its trie": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}
    },
    "ten megabytes": {"normalizer": {"type": "Prepend", "prepend": "a" * 10**7}},
    "a megabyte, often": {
        "normalizer": _in_turn([{"type": "Prepend", "prepend": "a" * 10**5}] * 9)
    },
    "many steps": {"normalizer": _in_turn([{"type": "NFC"}] * 10**4)},
    "doubling decoders": {"decoder": {"type": "Sequence", "decoders": [replacing("a", "aa")] * 40}},
}


def program_cases(folder: Path) -> Iterator[Case]:
    """Yields a case for each chat template, with a chat, and each tokenizer, with a text."""
    data = folder / "chats.jsonl"
    roles = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "a"})
    data.write_text((json.dumps({"messages": roles}) + "\n") * 99)

    def case(kind: str, name: str, directory: Path, source: str, names: str) -> Case:
        flags = (f"--input={data}", f"--output={directory}.made", f"--source={source}")
        tokenizer = f"--tokenizer={directory}"
        return Case(kind, name, "manualpar.data.tokenize", (*flags, tokenizer), names)

    for number, (name, template) in enumerate(TEMPLATES.items()):
        directory = folder / f"template_{number}"
        directory.mkdir()
        (directory / "tokenizer.json").write_text(json.dumps(words()))
        config = {"bos_token": "<s>", "eos_token": "<s>", "chat_template": template}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        yield case("templates", name, directory, "chat", f"{directory.name}/tokenizer_config.json")
    for number, (name, parts) in enumerate(TOKENIZERS.items()):
        directory = folder / f"program_{number}.json"
        directory.write_text(json.dumps(words(**parts)))
        yield case("tokenizers", name, directory, "jsonl", directory.name)
