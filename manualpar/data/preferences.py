"""Encodes pairs of answers to the same prompt, for preference tuning.

Each pair has a `prompt`, and answers `chosen` and `rejected`. Either all three are texts, as in the
completions of the source `chat`; or the answers are lists of messages, the prompt is one too or is
missing, and a template turns them into texts. Then a pair may have `tools`, `documents` and
`chat_template_kwargs`, see `manualpar.data.chat`. Other fields are ignored.
"""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from manualpar.core.state.train_state import Batch
from manualpar.data.chat import ChatEncoder, standard_messages
from manualpar.data.dataset import SPLITS, LanguageDataset, make_fingerprint
from manualpar.data.document_files import BadRows, Rows, divide, find_document_files
from manualpar.data.packing import LongExamples, learned_of, tokens_of
from manualpar.data.token_parts import split_of_content
from manualpar.data.tokenizer import Notes, Tokenizer, load_tokenizer
from manualpar.system.storage.untrusted import parse_object

ANSWERS = ("chosen", "rejected")
OF_TEMPLATE = ("tools", "documents", "chat_template_kwargs")


@dataclasses.dataclass(frozen=True, repr=False)
class PreferencePairs:
    """Encoded pairs of answers, which are examples by number.

    Attributes:
      pairs: For each pair `inputs` and `labels`, `int32[2, S]`, and `mask`, `float32[2, S]`, which
        is 1 at the labels that are learned. The chosen answer comes first.
      tokens_per_byte: `None`, because the number of bytes of the learned text is unknown.
    """

    pairs: Sequence[Batch]
    tokens_per_byte: None = None

    @property
    def abstract_example(self) -> Batch:
        """The shapes and dtypes of any pair, as `jax.ShapeDtypeStruct`s."""
        shapes: Batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.pairs[0]
        )
        return shapes

    def __len__(self) -> int:
        """Returns the number of pairs."""
        return len(self.pairs)

    def __getitem__(self, index: int) -> Batch:
        """Returns the pair `index`."""
        return self.pairs[index]


def preference_examples(
    pairs: Iterable[Mapping[str, Any]],
    tokenizer: Tokenizer,
    sequence_length: int,
    *,
    template: str = "",
) -> PreferencePairs:
    """Encodes pairs of answers as examples for `preference_loss`.

    Args:
      pairs: Mappings with `prompt`, `chosen` and `rejected`.
      tokenizer: The model's tokenizer, from `load_tokenizer`.
      sequence_length: The number of positions, `S`, to which sequences are padded.
      template: The file of a chat template, or the name of one of the tokenizer's templates; "" for
        the tokenizer's template.

    Returns:
      The examples. Only labels of the answers are learned, from the first token in which the two
      sequences differ: what both begin with has no influence on the loss.

    Raises:
      ValueError: A pair lacks a field, has an answer that cannot be encoded or equals the other, or
        is longer than `sequence_length`. The message has the number of the pair.
    """
    encoder = ChatEncoder(tokenizer, 0.0, template)
    examples = []
    for number, pair in enumerate(pairs, 1):
        try:
            both = [encoder.example(_line(pair, name)) for name in ANSWERS]
            examples.append(_example(both, sequence_length))
        except ValueError as error:
            raise ValueError(f"preference_examples: pair {number} {error}") from error
    return PreferencePairs(tuple(examples))


def load_preferences(
    path: str,
    *,
    sequence_length: int,
    tokenizer: str,
    template: str,
    held_out: float,
    long_examples: LongExamples,
    parse_special: bool,
    bad_rows: BadRows,
) -> LanguageDataset:
    """Loads the source `preferences`: rows of JSON or Parquet with pairs, see `load_dataset`.

    All pairs are in memory. A hash of a pair's tokens decides its split.
    """
    if long_examples == "cut":
        raise ValueError(
            "`long_examples` is 'cut', expected 'error' or 'drop' for the source 'preferences', "
            "because the end of an answer is a part of it."
        )
    encodes = load_tokenizer(tokenizer, parse_special=parse_special)
    encoder, notes, dropped = ChatEncoder(encodes, 0.0, template), Notes(), 0
    encoder.notes = notes
    splits: dict[str, list[Batch]] = {split: [] for split in SPLITS}
    for part in divide("chat", find_document_files(path, "chat"), ""):
        rows = Rows(part, bad_rows, notes)
        for place, row in rows.objects():
            try:
                pair = parse_object(row) if isinstance(row, bytes) else row
                both = [encoder.example(_line(pair, name)) for name in ANSWERS]
                if long_examples == "drop" and max(map(len, both)) > sequence_length + 1:
                    dropped += 1
                    continue
                example = _example(both, sequence_length)
            except ValueError as error:
                if str(error).startswith("`"):
                    raise
                rows.refuse(place, error)
                continue
            rows.accept()
            splits[split_of_content(example.inputs.tobytes(), held_out)].append(example)
    also = [f"left out {dropped} pairs that are longer than sequence_length={sequence_length}"]
    for sentence in (*notes.sentences(), *also[: bool(dropped)]):
        warnings.warn(f"{path}: {sentence}.", stacklevel=3)
    if empty := [split for split in SPLITS if not splits[split]]:
        number = sum(map(len, splits.values()))
        raise ValueError(
            f"`held_out` is {held_out}, which leaves none of the {number} pairs for {empty[0]}; "
            "expected a larger share, or more pairs."
        )
    hashes = [
        make_fingerprint(x.inputs, x.labels, x.mask) for each in splits.values() for x in each
    ]
    return LanguageDataset(
        tokenizer=encodes,
        fingerprint=make_fingerprint("preferences", hashes),
        **{split: PreferencePairs(tuple(pairs)) for split, pairs in splits.items()},
    )


def _line(pair: Mapping[str, Any], answer: str) -> dict[str, Any]:
    """Returns the line of the source `chat` with one of the answers."""
    if missing := [name for name in ANSWERS if name not in pair]:
        raise ValueError(f"has no {missing[0]!r}, expected 'prompt', 'chosen' and 'rejected'")
    prompt, value = pair.get("prompt", []), pair[answer]
    if isinstance(prompt, list) and isinstance(value, list):
        given = {name: pair[name] for name in OF_TEMPLATE if name in pair}
        asked = standard_messages(prompt, "a prompt")
        return {**given, "messages": asked + standard_messages(value, answer)}
    return {"prompt": prompt, "completion": value}


def _example(both: list[np.ndarray], length: int) -> Batch:
    tokens = np.zeros((2, length + 1), np.int32)
    learned = np.zeros((2, length + 1), np.float32)
    for row, example in enumerate(both):
        if len(example) > length + 1:
            raise ValueError(
                f"has an answer that ends after {len(example) - 1} positions, expected at most "
                f"sequence_length={length}; leave the pair out, or raise sequence_length"
            )
        tokens[row, : len(example)] = tokens_of(example)
        learned[row, : len(example)] = learned_of(example) > 0
    shortest = min(map(len, both))
    unlike = tokens[0, :shortest] != tokens[1, :shortest]
    if not unlike.any() and len(both[0]) == len(both[1]):
        raise ValueError("has the same answer twice, expected two answers")
    learned[:, : int(unlike.argmax()) if unlike.any() else shortest] = 0
    if not learned[:, 1:].any(-1).all():
        raise ValueError("has an answer that is the beginning of the other, expected two ends")
    return Batch(tokens[:, :-1], tokens[:, 1:], learned[:, 1:])
