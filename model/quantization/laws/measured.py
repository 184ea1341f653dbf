"""Measured losses, and which of them are of one checkpoint."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.quantization.laws.points import Floats, Points


@dataclass(frozen=True)
class Measured:
    """Points and what they lost."""

    at: Points
    loss: Floats
    """Nats per token."""
    runs: NDArray[np.intp]
    """Number of each point's run: one checkpoint, however it was quantized afterwards."""

    def __getitem__(self, index: NDArray[np.bool_]) -> "Measured":
        """Some of the points."""
        return Measured(self.at[index], self.loss[index], self.runs[index])

    def checkpoints(self) -> NDArray[np.intp]:
        """Where the same run is without quantization after training; -1 for a point that is that, or has none."""
        rounded = np.isfinite(self.at.post_bits)
        plain = {run: index for index, run in enumerate(self.runs) if not rounded[index]}
        return np.array([plain.get(run, -1) if r else -1 for run, r in zip(self.runs, rounded, strict=True)], np.intp)

    def post_deltas(self) -> tuple["Measured", Floats]:
        """The points quantized after training whose checkpoint was measured, and how much more they lose than it."""
        checkpoints = self.checkpoints()
        paired = checkpoints >= 0
        return self[paired], self.loss[paired] - self.loss[checkpoints[paired]]
