"""Find the best value of a hyperparameter on one curve of losses, between the values that were tried."""

import math

import numpy as np

Curve = dict[float, float]  # value -> loss of one seed; a value that diverged is not there
OCTAVE = 1.0 + 1e-6  # half-width of the window of a fit, in log2 of the value, with room for rounding


def fit(curve: Curve) -> tuple[float, bool]:
    """Return log2 of the learning rate at the minimum of one seed's curve, and whether the best point is at an end."""
    lrs = sorted(curve)
    x, y = np.log2(lrs), np.array([curve[lr] for lr in lrs])
    best = int(y.argmin())
    if best in (0, len(x) - 1):
        return float(x[best]), True
    near = np.abs(x - x[best]) <= OCTAVE
    near[[best - 1, best + 1]] = True  # on a grid coarser than octaves
    a, b, _ = np.polyfit(x[near] - x[best], y[near], 2)
    if a <= 0:  # a fit to noise
        return float(x[best]), False
    low, high = x[near].min(), x[near].max()
    return float(np.clip(x[best] - b / (2 * a), low, high)), False


def loss_at(curve: Curve, x: float) -> float | None:
    """Return a seed's loss at log2(lr) = x, by the parabola through the three nearest points; None outside the grid."""
    lrs = np.array(sorted(curve))
    grid = np.log2(lrs)
    if len(grid) < 3 or not grid[0] - 1e-9 <= x <= grid[-1] + 1e-9:
        return None
    nearest = np.sort(np.argsort(np.abs(grid - x), kind="stable")[:3])
    points = grid[nearest]
    losses = [curve[lr] for lr in lrs[nearest]]
    return float(
        sum(
            loss * math.prod((x - points[j]) / (points[i] - points[j]) for j in range(3) if j != i)
            for i, loss in enumerate(losses)
        )
    )
