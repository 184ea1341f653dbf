"""Find the best value of a hyperparameter on loss curves, interpolating between the values tried.

Curves are interpolated by parabolas in log2 of the value. `optima` and `losses_at` take many curves over one grid, as
needed by a bootstrap; `fit` and `loss_at` do the same for one.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Curve = dict[float, float]  # value -> loss of one seed, without values that diverged
OCTAVE = 1.0 + 1e-6  # half-width of the window of a fit, in log2 of the value, with room for rounding
Array = npt.NDArray[np.float64]


def optima(x: Array, losses: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Return where each curve of losses [curves, values] is lowest, and whether its best point is at an end of x.

    A least-squares parabola goes through the best point and its neighbours within an octave.
    """
    best = losses.argmin(1)
    places, edges = x[best].copy(), (best == 0) | (best == len(x) - 1)
    for index in range(1, len(x) - 1):
        chosen = np.flatnonzero(best == index)
        if not len(chosen):
            continue
        near = np.abs(x - x[index]) <= OCTAVE
        near[[index - 1, index + 1]] = True  # on a grid coarser than octaves
        a, b, _ = np.polyfit(x[near] - x[index], losses[np.ix_(chosen, near)].T, 2)
        bends = a > 0  # otherwise a fit to noise
        vertex = np.where(bends, -b / (2 * np.where(bends, a, 1.0)), 0.0)
        places[chosen] = np.clip(x[index] + vertex, x[near].min(), x[near].max())
    return places, edges


def losses_at(x: Array, losses: Array, places: Array) -> Array:
    """Interpolate each curve of losses [curves, values] at its place, by a parabola through the 3 nearest points."""
    nearest = np.sort(np.argsort(np.abs(x[None] - places[:, None]), axis=1, kind="stable")[:, :3], axis=1)
    points, near = x[nearest], np.take_along_axis(losses, nearest, 1)  # (curves, 3)
    total = np.zeros(len(places))
    for i in range(3):
        weight = np.ones(len(places))
        for j in {0, 1, 2} - {i}:
            weight *= (places - points[:, j]) / (points[:, i] - points[:, j])
        total += weight * near[:, i]
    return total


def is_within(x: Array, places: Array) -> npt.NDArray[np.bool_]:
    """Return which places lie within the grid, ends included, up to rounding."""
    return np.asarray((x[0] - 1e-9 <= places) & (places <= x[-1] + 1e-9), np.bool_)


def fit(curve: Curve) -> tuple[float, bool]:
    """Return log2 of the value at the minimum of one seed's curve, and whether the best point is at an end."""
    x, losses = _grid(curve)
    (place,), (edge,) = optima(x, losses[None])
    return float(place), bool(edge)


def loss_at(curve: Curve, place: float) -> float | None:
    """Return a seed's loss at log2(value) = place, or None outside the grid or with fewer than three values."""
    x, losses = _grid(curve)
    places = np.array([place])
    if len(x) < 3 or not is_within(x, places).all():
        return None
    return float(losses_at(x, losses[None], places)[0])


def _grid(curve: Mapping[float, float]) -> tuple[Array, Array]:
    values = sorted(curve)
    return np.log2(np.array(values)), np.array([curve[value] for value in values])
