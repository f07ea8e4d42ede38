"""Beam search for one prompt, with the rules of transformers' `generate`.

Each step proposes the likeliest next tokens of every beam. The most likely continuations of all
beams together are kept. A continuation that ends, by a stop token, a stop string or its length, is
an answer if it is among the best `beams` continuations; its score is the sum of its tokens'
log-probabilities, divided by the number of its tokens to the power `length_penalty`.

The search ends when no running beam can become better than the worst of the `beams` best answers.
This is estimated: with `early_stopping="never"` from the longest answer that is possible, else from
the beam's present length. With `early_stopping=True` the search ends as soon as there are `beams`
answers.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from manualpar.models.generation.cached_steps import Proposed

NO_SCORE = np.float32(-1e9)  # The score of a beam that does not count, as in transformers.


class Search(NamedTuple):
    """The settings of a beam search.

    Attributes:
      beams: The number of beams.
      length_penalty: The exponent of the length that divides an answer's score; above 0 long
        answers are preferred to short ones.
      early_stopping: When the search ends, see `manualpar.models.generation.beams`.
    """

    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def width(self, num_stop_tokens: int) -> int:
        """Returns the number of continuations that each step proposes."""
        return max(2, 1 + num_stop_tokens) * self.beams

    def check(self, samples: int, temperature: float) -> None:
        """Refuses settings that do not go together.

        Args:
          samples: The number of answers to each prompt.
          temperature: The temperature of draws.

        Raises:
          ValueError: The settings do not go together.
        """
        if self.beams > 1 and temperature > 0:
            raise ValueError(
                f"generate: beams is {self.beams} and temperature is {temperature}, expected 0, "
                "because a beam search takes the likeliest tokens."
            )
        if self.beams > 1 and samples > self.beams:
            raise ValueError(
                f"generate: samples is {samples} and beams is {self.beams}, expected at most as "
                "many samples as beams."
            )
        if self.beams == 1 and samples > 1 and temperature == 0:
            raise ValueError(
                f"generate: samples is {samples} and temperature is 0, expected a temperature "
                "above 0 or beams, because all samples would be the likeliest tokens."
            )
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(
                f"generate: early_stopping is {self.early_stopping!r}, expected True, False or "
                "'never'."
            )


class Beam(NamedTuple):
    """The tokens of an answer, with the log-probability of each."""

    tokens: tuple[int, ...] = ()
    log_probabilities: tuple[float, ...] = ()


class BeamSearch:
    """The beams of one prompt.

    Attributes:
      is_done: Whether the search has ended.
    """

    def __init__(
        self, search: Search, max_tokens: int, width: int, ends: Callable[[Sequence[int]], bool]
    ) -> None:
        """Begins a search.

        Args:
          search: The settings.
          max_tokens: The most tokens of an answer.
          width: The number of continuations that a step keeps, see `Search.width`.
          ends: Returns whether an answer ends with its last token.
        """
        self._search, self._max_tokens, self._width, self._ends = search, max_tokens, width, ends
        beams = search.beams
        self._running = [Beam()] * beams
        # At first all beams are the same, so only one of them counts.
        self._running_scores: np.ndarray = np.full(beams, NO_SCORE)
        self._running_scores[0] = 0
        self._answers = [Beam()] * beams
        self._scores: np.ndarray = np.full(beams, NO_SCORE)
        self._is_answer = np.zeros(beams, bool)
        self._length = 0
        self.is_done = False

    def advance(
        self, tokens: np.ndarray, scores: np.ndarray, log_probabilities: np.ndarray
    ) -> tuple[list[int], list[int]]:
        """Takes the likeliest next tokens of each beam, with their scores, all `[beams, width]`.

        Returns:
          For each new beam, the number of the beam that it continues, and its latest token.
        """
        beams = self._search.beams
        sums = (scores + self._running_scores[:, None]).ravel()
        parents = np.repeat(np.arange(beams), tokens.shape[1])
        best = np.lexsort((tokens.ravel(), parents, -sums))[: self._width]
        sums, parents, own = sums[best], parents[best], tokens.ravel()[best]
        new = [
            Beam(
                (*self._running[parent].tokens, int(token)),
                (*self._running[parent].log_probabilities, float(log_probability)),
            )
            for parent, token, log_probability in zip(
                parents, own, log_probabilities.ravel()[best], strict=True
            )
        ]
        self._length += 1
        is_last = self._length == self._max_tokens
        ended = np.array([is_last or self._ends(beam.tokens) for beam in new])
        running = sums + ended * NO_SCORE
        kept = np.argsort(-running, kind="stable")[:beams]
        self._running, self._running_scores = [new[index] for index in kept], running[kept]
        self._finish(new, sums, ended & (np.arange(len(new)) < beams))
        self.is_done |= bool(ended.all()) or not self._can_improve()
        return parents[kept].tolist(), own[kept].tolist()

    def best(self, number: int) -> list[Beam]:
        """Returns the best answers, at most `number`."""
        return self._answers[:number]

    def _finish(self, new: list[Beam], sums: np.ndarray, are_answers: np.ndarray) -> None:
        sums = sums / np.float32(self._length**self._search.length_penalty)
        if self._is_answer.all() and self._search.early_stopping is True:
            sums = sums + NO_SCORE
        scores = np.concatenate([self._scores, sums + ~are_answers * NO_SCORE])
        best = np.argsort(-scores, kind="stable")[: self._search.beams]
        answers, flags = self._answers + new, np.concatenate([self._is_answer, are_answers])
        self._answers = [answers[index] for index in best]
        self._scores, self._is_answer = scores[best], flags[best]

    def _can_improve(self) -> bool:
        search = self._search
        if search.early_stopping is True and self._is_answer.all():
            return False
        longest = search.early_stopping == "never" and search.length_penalty > 0
        length = self._max_tokens if longest else self._length
        possible = self._running_scores[0] / np.float32(length**search.length_penalty)
        worst = np.where(self._is_answer, self._scores.min(), NO_SCORE)
        return bool((possible > worst).any())


def run_searches(
    searches: Sequence[BeamSearch],
    beams: int,
    proposed: Proposed,
    step: Callable[[np.ndarray, np.ndarray], Proposed],
    device_rows: int,
) -> None:
    """Runs searches of several prompts until all have ended.

    Args:
      searches: The searches; the beams of search `n` are the rows from `n * beams` on.
      beams: The number of beams of each search, which divides `device_rows`.
      proposed: The proposals after the prompts.
      step: Replaces rows by copies of other rows on their device, followed by a token, and returns
        the proposals for the next token.
      device_rows: The number of rows on a device.
    """
    while True:
        found = [np.asarray(x) for x in proposed]
        parents = np.arange(len(found[0]), dtype=np.int32) % device_rows
        tokens = np.zeros(len(parents), np.int32)
        for number, search in enumerate(searches):
            own = slice(number * beams, (number + 1) * beams)
            if not search.is_done:
                before, tokens[own] = search.advance(*(x[own] for x in found))
                parents[own] = parents[own][before]
        if all(search.is_done for search in searches):
            return
        proposed = step(parents, tokens)
