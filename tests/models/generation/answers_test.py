"""Text as tokens come: no half characters, nothing of a stop string, and all of it together."""

import pytest

from manualpar.data.tokenizer import ByteTokenizer
from manualpar.models.generation.answers import TextPieces

TOKENIZER = ByteTokenizer()


def _pieces(text, stops=(), prompt=(256, 65)):
    writer = TextPieces(TOKENIZER, prompt, stops)
    pieces = []
    for token in text if isinstance(text, bytes) else text.encode():
        pieces.append(writer.add(token))
        if writer.is_stopped:
            break
    return pieces, writer.finish(), writer


def test_a_character_comes_whole():
    pieces, rest, _ = _pieces("a€b🎈")
    assert pieces == ["a", "", "", "€", "b", "", "", "", "🎈"]
    assert rest == ""


def test_bytes_that_are_no_character_come_in_the_end_or_with_the_next_character():
    assert _pieces(b"a\xe2\x82")[:2] == (["a", "", ""], "�")
    assert _pieces(b"a\xe2b")[:2] == (["a", "", "�b"], "")


def test_what_may_begin_a_stop_string_is_held_back_and_given_when_it_does_not():
    pieces, rest, writer = _pieces("one\n\ttwo\n\nthree", ["\n\n"])
    assert "".join(pieces) + rest == "one\n\ttwo"
    assert writer.is_stopped
    assert pieces[3:5] == ["", "\n\t"]


def test_the_first_of_several_stop_strings_counts_and_the_rest_is_given_at_the_end():
    pieces, rest, writer = _pieces("abcdef", ["ef", "cd"])
    assert ("".join(pieces) + rest, writer.is_stopped) == ("ab", True)
    pieces, rest, writer = _pieces("abe", ["ef"])
    assert (pieces, rest, writer.is_stopped) == (["a", "b", ""], "e", False)


@pytest.mark.parametrize("prompt", [(), (256,), tuple("Prämie ".encode())])
def test_the_prompt_is_no_part_of_it(prompt):
    pieces, rest, _ = _pieces("äß x", prompt=prompt)
    assert "".join(pieces) + rest == "äß x"
