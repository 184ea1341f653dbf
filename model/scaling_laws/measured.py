"""Hold measured losses, and which of them belong to the same checkpoint."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plumbline.model.scaling_laws.points import Floats, Points


@dataclass(frozen=True)
class Measured:
    """Hold points and the losses measured at them."""

    at: Points
    loss: Floats
    """Nats per token."""
    runs: NDArray[np.intp]
    """Number of each point's run: one checkpoint, however it was quantized afterwards."""
    scorings: NDArray[np.intp] | None = None
    """Number of the text and weights with which a point was scored, or None for the run's number."""

    def __getitem__(self, index: NDArray[np.bool_]) -> "Measured":
        """Select some of the points."""
        scorings = None if self.scorings is None else self.scorings[index]
        return Measured(self.at[index], self.loss[index], self.runs[index], scorings)

    def checkpoints(self) -> NDArray[np.intp]:
        """Return, for each quantized point, the index of its run's unquantized point scored on the same text.

        The index is -1 for other points, and if no such point was measured.
        """
        rounded = np.isfinite(self.at.post_bits)
        scorings = self.runs if self.scorings is None else self.scorings
        plain = {scoring: index for index, scoring in enumerate(scorings) if not rounded[index]}
        indices = [plain.get(scoring, -1) if r else -1 for scoring, r in zip(scorings, rounded, strict=True)]
        return np.array(indices, np.intp)

    def post_deltas(self) -> tuple["Measured", Floats]:
        """Return the quantized points whose checkpoint was measured, and their increase in loss."""
        checkpoints = self.checkpoints()
        paired = checkpoints >= 0
        return self[paired], self.loss[paired] - self.loss[checkpoints[paired]]
