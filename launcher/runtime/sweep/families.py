"""Sort cells into families that differ from the base in width alone, in depth alone, or in both."""

from collections.abc import Sequence
from typing import Any

from plumbline.launcher.runtime.sweep.result import Result

SIZES = {"width": "hidden_size", "depth": "num_hidden_layers"}  # family -> the key in which its members differ
JOINT = "width x depth"  # the family of cells that differ in both, ordered by the product


def size_of(result: Result, family: str) -> int:
    """Return the size in which the members of a family differ."""
    width, depth = result.hidden_size, result.num_hidden_layers
    return {"width": width, "depth": depth, JOINT: width * depth}[family]


def base_of(result: Result, family: str) -> int | None:
    """Return the corresponding size of a cell's base."""
    return {"width": result.base_hidden_size, "depth": result.base_num_hidden_layers}[family]


def base_size(results: Sequence[Result]) -> dict[str, int]:
    """Return width and depth of the base.

    Raises:
        ValueError: the cells name no base, or several.
    """
    base = {}
    for family, key in SIZES.items():
        found = {base_of(result, family) for result in results}
        size = next(iter(found)) if len(found) == 1 else None
        if size is None:
            raise ValueError(
                f"parameterization.base_{key}: {', '.join(sorted(map(str, found)))}; sizes are compared with one base, "
                "so set it for all cells, sp included"
            )
        base[family] = size
    return base


def family_members(axis: str, results: Sequence[Result]) -> dict[str, dict[str, list[Result]]]:
    """Return family -> label of the axis -> cells whose other size equals the base's; the base is in both families.

    Raises:
        ValueError: a cell lacks the axis.
    """
    base = base_size(results)
    families: dict[str, dict[str, list[Result]]] = {family: {} for family in SIZES}
    for result in results:
        if axis not in result.labels:
            raise ValueError(f"curves = {axis!r}: a grid has no such axis, only {', '.join(result.labels)}")
        for family, members in families.items():
            cells = members.setdefault(str(result.labels[axis]), [])
            if all(size_of(result, other) == base[other] for other in SIZES if other != family):
                cells.append(result)
    return families


def joint_members(axis: str, results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return label of the axis -> the base and the cells that differ from it in width and depth, or {} if none do.

    Raises:
        ValueError: two shapes have the same product of width and depth.
    """
    base = base_size(results)
    differing = [sum(size_of(result, family) != base[family] for family in SIZES) for result in results]
    grown = [result for result, sizes in zip(results, differing, strict=True) if sizes == len(SIZES)]
    shapes = {(result.hidden_size, result.num_hidden_layers) for result in grown}
    if len({width * depth for width, depth in shapes}) < len(shapes):
        raise ValueError(
            f"{', '.join(f'{width} x {depth}' for width, depth in sorted(shapes))}: {JOINT} tells two of these shapes "
            "apart no more; keep them in sweeps of their own"
        )
    members: dict[str, list[Result]] = {}
    for result, sizes in zip(results, differing, strict=True) if grown else ():
        if sizes in (0, len(SIZES)):
            members.setdefault(str(result.labels[axis]), []).append(result)
    return members


def refuse_mixed(kind: str, curves: str, axis: str, results: Sequence[Result]) -> None:
    """Refuse two different runs at one point of a curve, of which only one would count.

    Args:
        kind: kind of the sweep.
        curves: axis whose labels get a curve each, which every cell has.
        axis: hyperparameter whose value is each result's `lr`.
        results: the cells.

    Raises:
        ValueError: two runs differ in none of curve, width, depth, that hyperparameter and seed.
    """
    points: dict[tuple[Any, ...], Result] = {}
    for result in results:
        place = (
            str(result.labels[curves]),
            *(size_of(result, family) for family in SIZES),
            result.lr,
            result.seed,
        )
        other = points.setdefault(place, result)
        if other.signature != result.signature:
            raise ValueError(
                f"{kind}: {other.labels} and {result.labels} differ in more than curve, width, depth, {axis} and seed; "
                "keep those in sweeps of their own"
            )


def without_curves(kind: str) -> str:
    """Return the error for a sweep that draws curves over sizes without naming their axis."""
    return (
        f"{kind}: missing; a sweep of this kind says `{kind}: {{curves: AXIS}}`, the axis whose labels get a curve "
        "each; one label will do, as in the axis rule: {completep: {parameterization.rule: completep}}"
    )
