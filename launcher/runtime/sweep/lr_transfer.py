"""Tell whether the best learning rate stays where it is when the model grows, for each curve and direction.

The optimum of a size is found in log2 of the learning rate, seed by seed: a parabola through the
best point and its neighbours within one octave (least squares when they are more than three). Everything here is a
pure function of results.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel

from plumbline.launcher.runtime.sweep.families import SIZES, base_size, family_members, size_of
from plumbline.launcher.runtime.sweep.result import Result
from plumbline.launcher.runtime.sweep.statistics import mean, standard_error

Curve = dict[float, float]  # lr -> loss of one seed; a learning rate that diverged is not there
OCTAVE = 1.0 + 1e-6  # half-width of the window of a fit, in log2(lr), with room for rounding


class LrTransferConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Say how a learning-rate transfer sweep is read. Sizes and learning rates come from the cells themselves."""

    curves: str
    """The axis whose labels are compared, usually the parameterization's rule."""


def check(settings: LrTransferConfig | None, results: Sequence[Result]) -> None:
    """Refuse cells that cannot be sorted into curves, sizes and learning rates.

    Raises:
        ValueError: no block lr_transfer, a cell without the axis of the curves, no common base size, or two different
            runs at one point of a curve.
    """
    if settings is None:
        raise ValueError("lr_transfer: missing; a sweep of this kind says `lr_transfer: {curves: AXIS}`")
    family_members(settings.curves, results)
    points: dict[tuple[Any, ...], Result] = {}
    for result in results:
        place = (
            str(result.labels[settings.curves]),
            *(size_of(result, family) for family in SIZES),
            result.lr,
            result.seed,
        )
        other = points.setdefault(place, result)
        if other.signature != result.signature:
            raise ValueError(
                f"lr_transfer: {other.labels} and {result.labels} differ in more than curve, width, depth, "
                "optimizer.lr and seed; keep those in sweeps of their own"
            )


def summarize(settings: LrTransferConfig, results: Sequence[Result]) -> dict[str, Any]:
    """Return for each family and curve the optimum of each size, its shift from the base, the cost of not re-tuning."""
    base, families = base_size(results), family_members(settings.curves, results)
    return {
        "base": base,
        "families": {
            family: {label: _curve(cells, family, base[family]) for label, cells in members.items()}
            for family, members in families.items()
        },
    }


def _curve(results: Sequence[Result], family: str, base: int) -> dict[str, Any]:
    """Return all sizes of one curve of one family."""
    sizes = {
        size: _size([result for result in results if size_of(result, family) == size])
        for size in sorted({size_of(result, family) for result in results})
    }
    for facts in sizes.values():
        facts["penalty"] = penalty(facts, sizes.get(base))
    return {"sizes": {str(size): facts for size, facts in sizes.items()}, "shift": shift(sizes, base)}


def _size(results: Sequence[Result]) -> dict[str, Any]:
    """Return losses and optimum of one size of one curve."""
    seeds: dict[int, Curve] = {}
    diverged: dict[float, list[int]] = {}
    for result in results:
        curve = seeds.setdefault(result.seed, {})
        if result.outcome.loss is not None:
            curve[result.lr] = result.outcome.loss
        elif result.outcome.diverged:
            diverged.setdefault(result.lr, []).append(result.seed)
    return {"points": _points(results, seeds), "seeds": seeds, "diverged": diverged, **optimum(seeds)}


def _points(results: Sequence[Result], seeds: dict[int, Curve]) -> list[dict[str, Any]]:
    """Return the mean loss of each learning rate; None where a seed diverged or is not finished."""
    points = []
    for lr in sorted({result.lr for result in results}):
        losses = [curve[lr] for curve in seeds.values() if lr in curve]
        whole = len(losses) == len(seeds)
        error = standard_error(losses) if whole else None
        points.append({"lr": lr, "loss": mean(losses) if whole else None, "error": error})
    return points


def optimum(seeds: dict[int, Curve]) -> dict[str, Any]:
    """Return where the best learning rate is, in log2, and the loss there; None without any loss.

    optimum, optimum_error    mean over seeds of each seed's own, and its standard error
    edge                      the best point of some seed has no loss on one side: its true optimum may lie beyond it
    optimum_of_mean           of the seed-mean curve; loss and loss_error are read there
    resolved                  the best point of the seed-mean curve has a loss on both sides
    """
    fits = {seed: fit(curve) for seed, curve in seeds.items() if curve}
    common = _common(seeds)
    best, mean_edge = fit(_mean_curve(common)) if all(common.values()) else (None, True)
    losses = [] if best is None else [loss_at(curve, best) for curve in common.values()]
    known = [loss for loss in losses if loss is not None]
    values = [value for value, _ in fits.values()]
    return {
        "optimum": mean(values) if values else None,
        "optimum_error": standard_error(values),
        "optimum_of_seed": {seed: value for seed, (value, _) in fits.items()},
        "edge": any(edge for _, edge in fits.values()),
        "optimum_of_mean": best,
        "loss": mean(known) if known else None,
        "loss_error": standard_error(known),
        "resolved": not mean_edge,
    }


def _common(seeds: dict[int, Curve]) -> dict[int, Curve]:
    """Return the curves at the learning rates where every seed has a loss."""
    shared = set.intersection(*(set(curve) for curve in seeds.values()))
    return {seed: {lr: curve[lr] for lr in shared} for seed, curve in seeds.items()}


def _mean_curve(curves: dict[int, Curve]) -> Curve:
    lrs = next(iter(curves.values()))
    return {lr: mean([curve[lr] for curve in curves.values()]) for lr in lrs}


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


def penalty(size: dict[str, Any], base: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the nats lost by training a size at the base's best learning rate instead of its own.

    Every seed's curve is read at the same two places, the optima of the two seed-mean curves, so the mean is the
    difference on the seed-mean curve and the error that of a paired difference. None where an optimum is not resolved,
    or where the base's lies outside of this size's grid.
    """
    if base is None or not (base["resolved"] and size["resolved"]):
        return None
    places = (base["optimum_of_mean"], size["optimum_of_mean"])
    pairs = [[loss_at(curve, place) for place in places] for curve in _common(size["seeds"]).values()]
    differences = [there - here for there, here in pairs if there is not None and here is not None]
    if len(differences) < len(pairs):
        return None
    return {"nats": mean(differences), "error": standard_error(differences)}


def shift(sizes: dict[int, dict[str, Any]], base: int) -> dict[str, Any] | None:
    """Return the octaves between the optima of base and largest size, and the slope per doubling over all sizes.

    Paired by seed: the difference and the slope are taken seed by seed, then averaged.
    """
    largest = max(sizes, default=base)
    if base not in sizes or largest == base:
        return None
    of_seed = {size: facts["optimum_of_seed"] for size, facts in sizes.items()}
    both = [seed for seed in of_seed[base] if seed in of_seed[largest]]
    if not both:
        return None
    moved = [of_seed[largest][seed] - of_seed[base][seed] for seed in both]
    slopes = []
    for seed in both:
        known = [(math.log2(size), of_seed[size][seed]) for size in sizes if seed in of_seed[size]]
        x, y = zip(*known, strict=True)
        slopes.append(float(np.polyfit(x, y, 1)[0]))
    return {
        "from": base,
        "to": largest,
        "octaves": mean(moved),
        "octaves_error": standard_error(moved),
        "per_doubling": mean(slopes),
        "per_doubling_error": standard_error(slopes),
        "edge": any(sizes[size]["edge"] for size in sizes),
    }


def lines(summary: dict[str, Any]) -> Iterator[str]:
    """Yield the table, and one line for each curve of each family."""
    for family, curves in summary["families"].items():
        yield f"{family:>6} {'curve':<12} {'best lr':>10} {'log2':>15} {'loss there':>17} {'lost at base lr':>19}"
        for label, curve in curves.items():
            for size, facts in curve["sizes"].items():
                yield f"{size:>6} {label:<12} {_row(facts)}"
            if curve["shift"] is not None:
                yield f"       {label}: {_moved(curve['shift'])}"
        yield ""


def _moved(shift: dict[str, Any]) -> str:
    total, each = ((shift[key], shift[f"{key}_error"]) for key in ("octaves", "per_doubling"))
    return (
        f"{_with_error(*total, '+.2f')} octaves from {shift['from']} to {shift['to']}, "
        f"{_with_error(*each, '+.2f')} per doubling"
        + (" (unresolved: a best learning rate is the last of its grid)" if shift["edge"] else "")
    )


def _row(facts: dict[str, Any]) -> str:
    if facts["optimum"] is None:
        return "no finished run"
    loss, lost = facts["loss"], facts["penalty"]
    notes = ["last of the grid"] * facts["edge"]
    notes += [f"lr {lr:g} diverged (seeds {', '.join(map(str, seeds))})" for lr, seeds in facts["diverged"].items()]
    return (
        f"{2 ** facts['optimum']:>10.3g} {_with_error(facts['optimum'], facts['optimum_error'], '.2f'):>15} "
        f"{'-' if loss is None else _with_error(loss, facts['loss_error'], '.4f'):>17} "
        f"{'-' if lost is None else _with_error(lost['nats'], lost['error'], '.4f'):>19}"
        f"{''.join(f'  {note}' for note in notes)}"
    )


def _with_error(value: float, error: float | None, form: str) -> str:
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form.strip('+')}}")
