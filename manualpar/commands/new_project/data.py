"""The data: points on the arms of a spiral, each labelled with its arm."""

import numpy as np

from manualpar import Batch


class Spiral:
    """Examples by number: any object with `len` and `[i]` is data that a run can train on."""

    def __init__(self, number: int, seed: int, num_arms: int = 3) -> None:
        """Draws `number` points."""
        random = np.random.default_rng(seed)
        self.labels = random.integers(num_arms, size=number).astype(np.int32)
        radius = random.uniform(0.1, 1.0, size=number)
        angle = 5 * radius + 2 * np.pi * self.labels / num_arms + random.normal(0, 0.1, size=number)
        points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
        self.points = points.astype(np.float32)

    def __len__(self) -> int:
        """Returns the number of points."""
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        """Returns example `index`; the mask lets a run pad the last batch of an evaluation."""
        return Batch(self.points[index], self.labels[index], np.float32(1))
