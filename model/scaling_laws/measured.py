"""Measured losses, and which of them are of one checkpoint."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plumbline.model.scaling_laws.points import Floats, Points


@dataclass(frozen=True)
class Measured:
    """Points and what they lost."""

    at: Points
    loss: Floats
    """Nats per token."""
    runs: NDArray[np.intp]
    """Number of each point's run: one checkpoint, however it was quantized afterwards."""
    scorings: NDArray[np.intp] | None = None
    """Number of what a point was scored on, where a run was on more than one text; None: the run's number."""

    def __getitem__(self, index: NDArray[np.bool_]) -> "Measured":
        """Some of the points."""
        scorings = None if self.scorings is None else self.scorings[index]
        return Measured(self.at[index], self.loss[index], self.runs[index], scorings)

    def checkpoints(self) -> NDArray[np.intp]:
        """Where a quantized point's run, scored alike, is as it was trained; -1 for other points, or if nowhere."""
        rounded = np.isfinite(self.at.post_bits)
        scorings = self.runs if self.scorings is None else self.scorings
        plain = {scoring: index for index, scoring in enumerate(scorings) if not rounded[index]}
        found = [plain.get(scoring, -1) if r else -1 for scoring, r in zip(scorings, rounded, strict=True)]
        return np.array(found, np.intp)

    def post_deltas(self) -> tuple["Measured", Floats]:
        """The points quantized after training whose checkpoint was measured, and how much more they lose than it."""
        checkpoints = self.checkpoints()
        paired = checkpoints >= 0
        return self[paired], self.loss[paired] - self.loss[checkpoints[paired]]
