"""Check that every activation keeps its size as the model grows, by comparing slopes over width and depth with gates.

A cell takes `train.steps` steps on the first batch of the data, at the constant peak learning rate, without clipping,
and records what model/diagnostics/coordinate_check.py observes. A slope is fitted seed by seed and then averaged. The
gates describe CompleteP. Other rules fail them, which shows how they scale, and that the check can fail.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from pydantic import BaseModel

from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.build import build_model, without_objective
from plumbline.launcher.runtime.optim.optimizer import group_settings, make_optimizer
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import Inputs
from plumbline.launcher.runtime.run.status import RunStatus
from plumbline.launcher.runtime.run.status_file import RESULT
from plumbline.launcher.runtime.sweep.families import base_size, family_members, refuse_mixed, size_of, without_curves
from plumbline.launcher.runtime.sweep.result import Result
from plumbline.launcher.runtime.sweep.seed_means import mean, standard_error
from plumbline.launcher.runtime.system.files import write_json
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.model.diagnostics.coordinate_check import GATES, Record, coordinate_check, slope
from plumbline.model.parameterization.initialization import initialize

RECORD_AT = (0, 1, 2, 4, 10)  # steps; those beyond train.steps are left out


class CoordinateCheckConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Configure how a coordinate check is evaluated. Sizes come from the cells themselves."""

    curves: str
    """The axis whose labels are compared, usually the parameterization's rule."""


@dataclass(frozen=True)
class Slope:
    """Hold how one quantity scales with size at one step."""

    slope: float
    """Slope of log2(value) against log2(size), mean over seeds; NaN if a value is zero or not finite."""
    error: float | None
    """Standard error over seeds, or None for one seed."""
    values: dict[int, float]
    """Size -> mean over seeds."""


@dataclass(frozen=True)
class GateResult:
    """Hold one gate and the measured slope."""

    quantity: str
    step: int
    low: float
    high: float
    slope: float | None
    """Measured slope, or None if a value is zero or not finite."""
    error: float | None
    """Standard error over seeds, or None for one seed."""
    passes: bool


@dataclass(frozen=True)
class CurveSummary:
    """Hold one curve of one family of sizes."""

    slopes: dict[str, dict[int, Slope]]
    """Quantity -> step -> slope."""
    gates: list[GateResult]


@dataclass(frozen=True)
class CoordinateCheckSummary:
    """Hold all curves of a coordinate check."""

    base: dict[str, int]
    """Family -> size of the base."""
    families: dict[str, dict[str, CurveSummary]]
    """Family -> label -> curve, without curves of fewer than two finished sizes."""
    failed: dict[str, dict[str, list[int]]]
    """Family -> label -> sizes at which a run failed."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with `failed` only if a run has."""
        document = asdict(self)
        if not any(self.failed.values()):
            del document["failed"]
        return document


def run(config: Config, inputs: Inputs, world: World, _stop: StopRequest, _status: RunStatus) -> bool:
    """Train and observe one cell, and write the record to result.json. It takes seconds and cannot be stopped."""
    batches = inputs.train.micro_batches(0)
    input_ids, labels = (
        torch.cat([batch[key] for batch in batches]).to(world.device) for key in ("input_ids", "labels")
    )
    config = without_objective(config)
    plan = plan_run(config)
    model = build_model(config).to(world.device)
    initialize(model, plan.rows, config.run.seed)
    groups = group_settings(plan.rows, config.optimizer, plan.settings.betas)
    optimizer = make_optimizer(model, groups, sharded=False)
    steps = [step for step in RECORD_AT if step <= plan.total_steps]
    result = {"step": plan.total_steps, "coordinates": coordinate_check(model, optimizer, input_ids, labels, steps)}
    write_json(config.run.folder / RESULT, result)
    return True


def check(settings: CoordinateCheckConfig | None, results: Sequence[Result]) -> None:
    """Refuse cells that cannot be sorted into curves and sizes.

    Raises:
        ValueError: no block coordinate_check, a cell without the axis of the curves, no common base size, several
            learning rates over one family of sizes, two different runs at one point of a curve, or a result of another
            kind of sweep.
    """
    if settings is None:
        raise ValueError(without_curves("coordinate_check"))
    for cell in results:
        if cell.outcome.result is not None and "coordinates" not in cell.outcome.result:
            raise ValueError(
                f"coordinate_check: {cell.run} was trained by a sweep of another kind, and its result has no "
                "coordinates; give this sweep a name of its own, or the rows of a coordinate check"
            )
    for family, curves in family_members(settings.curves, results).items():
        for cells in curves.values():
            _at_one_rate(cells, family)
    refuse_mixed("coordinate_check", settings.curves, "optimizer.lr", results)


def summarize(settings: CoordinateCheckConfig, results: Sequence[Result]) -> CoordinateCheckSummary:
    """Return, for each family and curve, the values and slopes of every quantity at every step, and the gates."""
    families: dict[str, dict[str, CurveSummary]] = {}
    failed: dict[str, dict[str, list[int]]] = {}
    for family, curves in family_members(settings.curves, results).items():
        shown = {label: _at_one_rate(cells, family) for label, cells in curves.items()}
        slopes = {label: _slopes(cells, family) for label, cells in shown.items()}
        families[family] = {
            label: CurveSummary(found, _gates(found, family)) for label, found in slopes.items() if found
        }
        sizes = {
            label: sorted({size_of(cell, family) for cell in cells if cell.outcome.status == "failed"})
            for label, cells in shown.items()
        }
        failed[family] = {label: found for label, found in sizes.items() if found}
    return CoordinateCheckSummary(base_size(results), families, failed)


def _at_one_rate(cells: Sequence[Result], family: str) -> list[Result]:
    """Return the cells at the learning rate with several sizes; the base, in both families, may have two rates.

    Raises:
        ValueError: there are several such rates, which one figure cannot show.
    """
    rates: dict[float, list[Result]] = {}
    for cell in cells:
        rates.setdefault(cell.lr, []).append(cell)
    several = {lr: found for lr, found in rates.items() if len({size_of(cell, family) for cell in found}) > 1}
    if len(several) > 1:
        raise ValueError(
            f"optimizer.lr: {', '.join(map(str, several))} for one {family} check; keep them in sweeps apart"
        )
    return next(iter(several.values()), [])


def _slopes(cells: Sequence[Result], family: str) -> dict[str, dict[int, Slope]]:
    """Return quantity -> step -> slope over sizes, its standard error over seeds, and the mean at each size.

    It is empty with fewer than two sizes, or if no seed has finished all of them.
    """
    seeds: dict[int, dict[int, dict[str, Record]]] = {}  # seed -> size -> step -> quantity -> value
    for cell in cells:
        if cell.outcome.result is not None:
            seeds.setdefault(cell.seed, {})[size_of(cell, family)] = cell.outcome.result["coordinates"]
    sizes = sorted({size_of(cell, family) for cell in cells})
    seeds = {seed: found for seed, found in seeds.items() if len(found) == len(sizes)}
    if len(sizes) < 2 or not seeds:
        return {}
    first = next(iter(seeds.values()))[sizes[0]]
    slopes: dict[str, dict[int, Slope]] = {}
    for step, record in first.items():
        for quantity in record:
            values = {seed: [at[size][step][quantity] for size in sizes] for seed, at in seeds.items()}
            fitted = [slope(sizes, row) for row in values.values()]
            # Changes are all zero at initialisation; later ones that are must not pass for want of a slope
            if int(step) > 0 or any(v != 0 for row in values.values() for v in row):
                slopes.setdefault(quantity, {})[int(step)] = Slope(
                    slope=mean(fitted),
                    error=standard_error(fitted),
                    values={size: mean([row[i] for row in values.values()]) for i, size in enumerate(sizes)},
                )
    return slopes


def _gates(slopes: Mapping[str, Mapping[int, Slope]], family: str) -> list[GateResult]:
    """Return every gate of the family with the measured slope."""
    gates = []
    for gate in GATES[family]:
        met = slopes.get(gate.quantity, {}).get(gate.step)
        if met is not None:
            gates.append(
                GateResult(
                    quantity=gate.quantity,
                    step=gate.step,
                    low=gate.low,
                    high=gate.high,
                    slope=None if math.isnan(met.slope) else met.slope,
                    error=met.error,
                    passes=gate.holds(met.slope),
                )
            )
    return gates


def lines(summary: CoordinateCheckSummary) -> Iterator[str]:
    """Yield a table per family, with gates as rows and curves as columns, and where runs failed."""
    for family, curves in summary.families.items():
        if curves:
            yield from _table(family, curves)
        for label, sizes in summary.failed[family].items():
            yield f"{family}: {label} is incomplete: a run of {family} {', '.join(map(str, sizes))} failed"
        if curves or summary.failed[family]:
            yield ""


def _table(family: str, curves: Mapping[str, CurveSummary]) -> Iterator[str]:
    yield f"{family + ': slope of log2(value) against log2(' + family + ')':<44} {'gate':>16}  " + "".join(
        f"{label:>18}" for label in curves
    )
    met = [{(row.quantity, row.step): row for row in curve.gates} for curve in curves.values()]
    for gate in GATES[family]:
        rows = [of_curve.get((gate.quantity, gate.step)) for of_curve in met]
        if any(rows):
            bounds = f"[{gate.low:g}, {gate.high:g}]"
            yield f"{gate.quantity:<34} step {gate.step:>4} {bounds:>16}  " + "".join(
                f"{_value(row):>18}" for row in rows
            )
    yield f"{'':<61}  " + "".join(f"{_verdict(family, curve):>18}" for curve in curves.values())


def _verdict(family: str, curve: CurveSummary) -> str:
    """Return whether a curve meets the gates of its family, if its runs were long enough for all of them."""
    if not all(row.passes for row in curve.gates):
        return "FAILS"
    recorded = {step for of_step in curve.slopes.values() for step in of_step}
    last = max(gate.step for gate in GATES[family])
    return "passes" if last in recorded else f"ends before {last}"


def _value(row: GateResult | None) -> str:
    if row is None:
        return "-  "
    if row.slope is None:
        return "no slope  x"
    error = "" if row.error is None else f"±{row.error:.2f}"
    return f"{row.slope:+.2f}{error} {' ' if row.passes else 'x'}"
