"""Defines the allowed differences between a program of `random_programs` and one device.

`noise` is the change of a gradient if the parameters change by a few rounding errors. A gradient
may differ by several times this noise, and by a few rounding errors of each device's contribution.
In bfloat16 rounding errors are larger than in float32. If gradients are quantized in blocks, each
device may lose half a step of each number (a whole step with stochastic rounding). A step is at
most the block's largest number divided by the largest code.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.random_reference import Answer, perturb

LARGEST_CODE = {"int8": 127, "int4": 7, "bfloat16": 256}
Arrays = Mapping[str, np.ndarray]


class WrongError(Exception):
    """A result differs from one device; the message says which result, and by how much."""


@dataclasses.dataclass(frozen=True)
class Allowance:
    """The allowed differences of a program.

    Attributes:
      is_low: Whether something is stored, gathered or reduced in bfloat16.
      has_coded_weights: Whether parameters are quantized before they are gathered.
      code: The quantization of gradients; `None` if the comparison adds the residuals.
      reductions: How many times a device's gradient is quantized in a step.
      is_random: Whether quantization rounds stochastically.
      is_split: Whether devices add partial results of the same examples, as with a model axis.
      has_statistics: Whether a layer divides by the standard deviation of a few examples.
      has_learned_counts: Whether counts depend on parameters.
      has_coded_products: Whether activations are quantized, where roundings may change a code.
      parts: Into how many parts a context axis divides each example, if each part counts as one:
        if the loss is a scalar, without a count of its own.
    """

    is_low: bool = False
    has_coded_weights: bool = False
    code: str | None = None
    reductions: int = 1
    is_random: bool = False
    is_split: bool = False
    has_statistics: bool = False
    has_learned_counts: bool = False
    has_coded_products: bool = False
    parts: int = 1

    @property
    def is_rough(self) -> bool:
        """Whether even the loss may differ by more than rounding errors of float32."""
        return self.is_low or self.has_coded_weights

    def moved(self, params: Arrays) -> list[dict[str, Any]]:
        """Returns parameters changed at random, by as much as the program's rounding errors.

        Where a rounding error may change the code of an activation, or the statistics of a few
        examples, one change at random may meet none, so several are tried.
        """
        if not self.has_coded_weights:
            number = 8 if self.has_coded_products else 4 if self.has_statistics else 1
            size = 2.0**-8 if self.is_low else 2.0**-20
            return [perturb(params, size, seed) for seed in range(number)]
        random, moved = np.random.default_rng(0), {}
        for path, x in params.items():
            moved[path] = x
            is_float = jnp.issubdtype(x.dtype, jnp.floating)  # NumPy has no kind for bfloat16.
            if is_float and x.ndim and not path.endswith("_scales"):
                step = float(np.abs(x).max(initial=0)) / 127
                moved[path] = (x + random.uniform(-0.5, 0.5, x.shape) * step).astype(x.dtype)
        return [moved]

    def check_gradients(
        self, what: str, grads: Arrays, expected: Answer, noisy: Sequence[Answer]
    ) -> None:
        """Raises WrongError if a gradient differs more than allowed; names the worst gradient.

        `noisy` are one device's answers for the parameters that `moved` returned.
        """
        noises = {
            path: max(float(np.linalg.norm(answer.grads[path] - e)) for answer in noisy)
            for path, e in expected.grads.items()
        }
        total = math.sqrt(sum(float(np.square(g).sum()) for g in expected.grads.values()))
        total += math.hypot(*noises.values())
        worst, words = 1.0, ""
        for path, e in expected.grads.items():
            g = np.asarray(grads[path], np.float64)
            off, norm = float(np.linalg.norm(g - e)), float(np.linalg.norm(e))
            allowed = self._allowed(path, noises[path], expected, total)
            if not off <= allowed * worst:
                worst = off / (allowed or 1e-300)
                ratio = float(np.vdot(e, g) / norm**2) if norm else math.inf
                words = f"{path} ratio {ratio:.5g}, off {off / (norm or 1):.3g} of its norm"
        if words:
            raise WrongError(f"{what} gradient: {words} ({worst:.3g} x allowed)")

    def _allowed(self, path: str, noise: float, expected: Answer, total: float) -> float:
        spread = expected.spread[path]
        if self.has_coded_weights and self.has_statistics:
            return math.inf  # Two normalised examples may be -1 and 1, or 1 and -1.
        if self.has_coded_weights:
            allowed = 6 * noise + 0.02 * total
        elif self.is_low:
            allowed = 4 * noise + 2**-6 * spread + 2**-9 * total
        else:
            allowed = 6 * noise + 5e-6 * spread + 2e-7 * total
        if self.code:
            step = 1.05 * expected.contributions[path] / LARGEST_CODE[self.code]
            step *= self.reductions * (2 if self.is_random else 1) * (4 if self.is_split else 1)
            allowed += step * math.sqrt(expected.grads[path].size)
            # The contributions of devices may cancel in the sum (as for the biases of keys), but
            # their quantization errors remain.
            share = 0.1 if self.has_statistics else 0.02
            allowed += share * total if self.is_split else 0
        return allowed

    def check_metrics(
        self,
        what: str,
        metrics: Any,
        expected: Mapping[str, Any],
        *,
        noisy: Sequence[Answer] = (),
        by_chance: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Raises WrongError if the sum or the count of a metric differs.

        `noisy` are the answers of `check_gradients`. `by_chance` has each metric's mean over other
        dropout masks, and the allowed distance from it.
        """
        rtol = 0.05 if self.is_rough else 5e-3 if self.has_coded_products else 2e-5
        for name, pair in expected.items():
            total, count = (x * self.parts for x in pair)
            if name == "accuracy" and (self.is_rough or by_chance or self.has_coded_products):
                continue
            far = 0.0
            if by_chance:
                total, far = (x * self.parts for x in by_chance[name])
            got = metrics[name]
            if got[1] == 0 == count or not (math.isfinite(got[0]) or math.isfinite(total)):
                continue  # In a diverged model one may be infinite, and the other NaN.
            moved = self.by_roundings(name, pair, noisy)
            allowed = rtol * max(abs(total), abs(count)) + 1e-6 + far + self.parts * moved[0]
            of_count = 1e-5 * abs(count)
            if self.has_learned_counts:
                of_count = rtol * abs(count) + self.parts * moved[1]
            if abs(got[1] - count) > of_count or not abs(got[0] - total) <= allowed:
                raise WrongError(f"{what}: metric {name} is {got}, one device's {(total, count)}")

    def by_roundings(
        self, name: str, pair: tuple[float, float], noisy: Sequence[Answer]
    ) -> tuple[float, float]:
        """Returns how far roundings may move a metric's sum and count.

        They move them far where they change codes, statistics of few examples, or learned counts.
        `pair` is one device's answer, and `noisy` are the answers of `check_gradients`.
        """
        if not (self.has_coded_products or self.has_statistics or self.has_learned_counts):
            return 0.0, 0.0
        off = [np.abs(np.subtract(x.metrics[name], pair)) for x in noisy]
        total, count = 3 * np.max(off, axis=0, initial=0) if off else (0.0, 0.0)
        return (total, count) if np.isfinite(off).all() else (math.inf, math.inf)

    def check_norms(self, what: str, metrics: Any, grads: Arrays, after: Arrays) -> None:
        """Raises WrongError if a reported norm differs."""
        for name, arrays in (("gradient_norm", grads), ("parameter_norm", after)):
            squares = (float(np.square(np.float64(arrays[path])).sum()) for path in grads)
            norm = math.sqrt(sum(squares))
            if not abs(metrics[name][0] - norm) <= (0.01 if self.is_low else 1e-4) * norm + 1e-9:
                raise WrongError(f"{what}: {name} is {metrics[name]}, expected {norm}")


def check_same_bits(what: str, expected: Arrays, found: Arrays) -> None:
    """Raises WrongError if an array in `found` has another dtype or other bits than expected."""
    for path, e in expected.items():
        x = found[path]
        if e.dtype != x.dtype or np.asarray(e).tobytes() != np.asarray(x).tobytes():
            raise WrongError(f"{what}: {path} is not the same bits, but {ulps(e, x):.3g} ulps off")


def ulps(x: Any, y: Any) -> float:
    """Returns the largest difference of two arrays, in ulps of the largest number of `x`."""
    eps = float(jnp.finfo(x.dtype).eps) if jnp.issubdtype(x.dtype, jnp.floating) else 1.0
    x, y = (np.asarray(a, np.float64) for a in (x, y))
    return float(np.abs(x - y).max(initial=0) / (eps * np.abs(x).max(initial=0) or 1))
