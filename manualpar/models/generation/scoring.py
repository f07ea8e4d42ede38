"""Computes the log-likelihood of given tokens, in nats.

Sequences are sorted by length and run in batches, padded to lengths from a short list, see
`manualpar.models.generation.generator.padded`. The score of a sequence does not depend on the other
sequences.

A document that is too long for the model is cut into windows. Each token is scored in one window.
The last window overlaps the window before it, so that the last tokens have as much context as
possible.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from manualpar.core.state.train_state import TrainState
from manualpar.models.generation.generator import Generator, padded


class Score(NamedTuple):
    """The score of some tokens.

    Attributes:
      log_likelihood: The logarithm of the tokens' probability, in nats.
      is_greedy: Whether each token is the likeliest, so that greedy decoding generates them.
      num_tokens: The number of tokens.
    """

    log_likelihood: float
    is_greedy: bool
    num_tokens: int


def score_completions(
    generator: Generator,
    state: TrainState,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_length: int = 0,
    packed: bool = False,
) -> list[Score]:
    """Computes the log-likelihood of completions, each after its context.

    Args:
      pairs: Pairs of the tokens of a context (at least one token) and of the completion.
      max_length: The most tokens in the model's context. The beginning of a longer sequence is left
        out. 0 for no limit.
      packed: Whether each BOS in a pair begins another document, as in a sequence of training data.
        By default a pair is one document.

    Returns:
      The score of each completion, in the order of `pairs`.

    Communication:
      For each batch, a forward pass as in training, and an all-gather of the scores.
    """
    sequences: list[list[int]] = []
    for index, (context, completion) in enumerate(pairs):
        if not len(context) or not len(completion):
            raise ValueError(
                f"score_completions: pair {index} has {len(context)} tokens of context and "
                f"{len(completion)} of completion, expected at least one each; begin with the "
                "token that documents begin with."
            )
        if 0 < max_length < len(completion):
            raise ValueError(
                f"score_completions: pair {index} has a completion of {len(completion)} tokens, "
                f"expected at most max_length={max_length}; score it as a document, which is cut "
                "into windows."
            )
        tokens = generator.encode([*context, *completion], index)
        sequences.append(tokens[-max_length - 1 :] if max_length else tokens)
    scores: list[Score | None] = [None] * len(pairs)
    order = sorted(range(len(pairs)), key=lambda index: len(sequences[index]))
    steps, size = generator.steps, generator.batch_size
    state = steps.adopt(state)
    for first in range(0, len(order), size):
        batch = order[first : first + size]
        length = padded(max(len(sequences[index]) for index in batch) - 1)
        inputs, _ = generator.pad([sequences[index][:-1] for index in batch], length)
        labels, lengths = generator.pad([sequences[index][1:] for index in batch], length)
        counts = np.zeros(len(inputs), np.int32)
        counts[: len(batch)] = [len(pairs[index][1]) for index in batch]
        places = np.arange(length)[None]
        marked = (places < lengths[:, None]) & (places >= (lengths - counts)[:, None])
        given = map(steps.put_rows, (inputs, labels, marked))
        found = steps.score(state.params, state.collections, *given, packed=packed)
        likelihoods, are_greedy = (x.tolist() for x in found)
        for index, *score in zip(batch, likelihoods, are_greedy, strict=False):
            scores[index] = Score(score[0], score[1], len(pairs[index][1]))
    return [score for score in scores if score is not None]


def score_documents(
    generator: Generator,
    state: TrainState,
    documents: Sequence[Sequence[int]],
    *,
    first_token: int,
    max_length: int,
) -> list[Score]:
    """Computes the log-likelihood of documents of any length.

    The score of an empty document is 0.

    Args:
      documents: The tokens of each document.
      first_token: The token that begins every document, and is added to those that lack it; it is
        not scored.

    Communication:
      The communication of `score_completions`.
    """
    windows, owners = [], []
    for index, tokens in enumerate(documents):
        given = list(map(int, tokens))
        whole = given if given[:1] == [first_token] else [first_token, *given]
        for window in cut_windows(whole, max_length):
            windows.append(window)
            owners.append(index)
    totals = [Score(0.0, True, 0) for _ in documents]
    scores = score_completions(generator, state, windows, max_length=max_length)
    for owner, score in zip(owners, scores, strict=True):
        total = totals[owner]
        totals[owner] = Score(
            total.log_likelihood + score.log_likelihood,
            total.is_greedy and score.is_greedy,
            total.num_tokens + score.num_tokens,
        )
    return totals


def cut_windows(tokens: list[int], max_length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields pairs (context, completion); each token but the first is in one completion."""
    for start in range(1, len(tokens), max_length):
        end = min(start + max_length, len(tokens))
        yield tokens[max(0, end - 1 - max_length) : start], tokens[start:end]
