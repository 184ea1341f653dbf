"""The summary of a learning-rate transfer sweep, on losses whose optimum is known."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plumbline.launcher.runtime.sweep.lr_transfer import LrTransferConfig, check, lines, summarize
from plumbline.launcher.runtime.sweep.lr_transfer_plot import plot
from plumbline.launcher.runtime.sweep.optimum import fit, loss_at
from plumbline.launcher.runtime.sweep.result import Label, Result, RunOutcome
from tests.launcher.runtime.sweep.conftest import make_result

SETTINGS = LrTransferConfig(curves="rule")
OCTAVES = [2.0**x for x in range(-12, -4)]
HALVES = [2.0 ** (x / 2) for x in range(-24, -9)]
Loss = Callable[[float, int, int, int], float | None]  # (log2 lr, width, depth, seed) -> loss; None: diverged


def results(loss: Loss, lrs: list[float] = OCTAVES, seeds: int = 3, rule: str = "sp") -> list[Result]:
    """Return a width family 64, 128, 256 and a depth family 2, 8 around the base 64 x 2."""
    found = []
    for width, depth in ((64, 2), (128, 2), (256, 2), (64, 8)):
        for seed in range(1, seeds + 1):
            for lr in lrs:
                value = loss(math.log2(lr), width, depth, seed)
                labels: dict[str, Label] = {"rule": rule, "size": f"{width}x{depth}"}
                outcome = RunOutcome("diverged", diverged=True) if value is None else RunOutcome("finished", loss=value)
                signature = f"{rule}-{width}-{depth}-{seed}-{lr}"
                sizes = {"hidden_size": width, "num_hidden_layers": depth}
                found.append(make_result(labels, seed, outcome, signature=signature, lr=lr, **sizes))
    return found


def parabola(x: float, best: float, curvature: float = 0.05) -> float:
    return 3.0 + curvature * (x - best) ** 2


@pytest.mark.parametrize("lrs", [OCTAVES, HALVES], ids=["octaves", "half-octaves"])
def test_the_optimum_of_a_parabola_is_found_between_grid_points(lrs: list[float]) -> None:
    best, edge = fit({lr: parabola(math.log2(lr), -8.3) for lr in lrs})
    assert best == pytest.approx(-8.3, abs=1e-9)
    assert not edge


def test_only_points_within_an_octave_of_the_best_one_are_fitted() -> None:
    """A wall two octaves away does not pull the optimum."""
    curve = {lr: parabola(math.log2(lr), -8.2) + (10.0 if math.log2(lr) > -6.9 else 0.0) for lr in HALVES}
    assert fit(curve)[0] == pytest.approx(-8.2, abs=1e-9)


def test_a_grid_coarser_than_octaves_uses_the_neighbours() -> None:
    assert fit({2.0**x: parabola(x, -8.3) for x in (-12, -10, -8, -6)})[0] == pytest.approx(-8.3, abs=1e-9)


@pytest.mark.parametrize("best", [-14.0, -2.0], ids=["below", "above"])
def test_an_optimum_outside_of_the_grid_is_the_edge(best: float) -> None:
    found, edge = fit({lr: parabola(math.log2(lr), best) for lr in OCTAVES})
    assert found == pytest.approx(-12 if best < -12 else -5)
    assert edge


def test_a_curve_is_read_between_its_points_and_not_outside() -> None:
    curve = {lr: parabola(math.log2(lr), -8.3) for lr in OCTAVES}
    assert loss_at(curve, -9.7) == pytest.approx(parabola(-9.7, -8.3))
    assert loss_at(curve, -12.0) == pytest.approx(parabola(-12.0, -8.3))
    assert loss_at(curve, -12.1) is None
    assert loss_at(curve, -4.9) is None


def test_noise_moves_the_optimum_by_about_its_error_bar() -> None:
    """Over 40 sweeps of 5 seeds each the truth is within 2.78 errors (95 % of Student's t) in most."""
    generator = np.random.default_rng(0)
    inside = 0
    for _ in range(40):
        noisy = results(lambda x, *_: parabola(x, -8.3) + float(generator.normal(0, 0.004)), seeds=5)
        size = summarize(SETTINGS, noisy).families["width"]["sp"].sizes[64]
        assert size.best.optimum is not None
        assert size.best.optimum_error is not None
        assert abs(size.best.optimum + 8.3) < 0.2
        inside += abs(size.best.optimum + 8.3) < 2.78 * size.best.optimum_error
    assert inside >= 34


def test_the_shift_is_from_the_base_to_the_largest_size_paired_by_seed() -> None:
    """The optimum halves with each doubling of width and stays with depth; each seed has an offset of its own."""
    moving = results(lambda x, width, _, seed: parabola(x, -7.0 - math.log2(width / 64) + 0.2 * seed))
    families = summarize(SETTINGS, moving).families
    shift, of_depth = (families[family]["sp"].shift for family in ("width", "depth"))
    assert shift is not None
    assert (shift.base, shift.largest, shift.edge) == (64, 256, False)
    assert shift.octaves == pytest.approx(-2.0, abs=1e-6)
    assert shift.octaves_error == pytest.approx(0.0, abs=1e-6), "the offset of a seed is in both sizes"
    assert shift.per_doubling == pytest.approx(-1.0, abs=1e-6)
    assert of_depth is not None
    assert of_depth.octaves == pytest.approx(0.0, abs=1e-6)
    best = families["width"]["sp"].sizes[64].best
    assert best.optimum == pytest.approx(-6.6, abs=1e-6)
    assert best.optimum_error == pytest.approx(0.2 / math.sqrt(3), abs=1e-6)


def test_the_families_share_the_base_and_nothing_else() -> None:
    families = summarize(SETTINGS, results(lambda x, *_: parabola(x, -8.0))).families
    assert list(families["width"]["sp"].sizes) == [64, 128, 256]
    assert list(families["depth"]["sp"].sizes) == [2, 8]


def test_the_penalty_is_what_the_bases_learning_rate_costs() -> None:
    """Two octaves off a parabola of curvature 0.05 is 0.2 nats; the seeds differ in curvature, so there is an error."""
    moving = results(lambda x, width, _, seed: parabola(x, -7.0 - math.log2(width / 64), 0.05 * (1 + 0.1 * (seed - 2))))
    sizes = summarize(SETTINGS, moving).families["width"]["sp"].sizes
    here, there = sizes[64].penalty, sizes[256].penalty
    assert here is not None
    assert there is not None
    assert here.nats == pytest.approx(0.0, abs=1e-9)
    assert here.error == pytest.approx(0.0, abs=1e-9)
    assert there.nats == pytest.approx(0.2, abs=1e-6)
    assert there.error == pytest.approx(0.02 / math.sqrt(3), abs=1e-6)
    assert sizes[256].best.loss == pytest.approx(3.0, abs=1e-6)


def test_a_diverged_seed_takes_its_learning_rate_out_of_the_mean_and_is_named() -> None:
    unstable = results(lambda x, width, _, seed: None if width == 256 and seed == 2 and x > -6.5 else parabola(x, -8.0))
    size = summarize(SETTINGS, unstable).families["width"]["sp"].sizes[256]
    losses = {point.lr: point.loss for point in size.points}
    assert losses[2.0**-6] is None
    assert losses[2.0**-5] is None
    assert losses[2.0**-7] == pytest.approx(3.05)
    assert size.diverged == {2.0**-6: [2], 2.0**-5: [2]}
    assert size.unfinished == {}
    assert size.best.optimum == pytest.approx(-8.0)
    assert not size.best.edge


def test_rates_that_are_not_finished_are_named_beside_those_that_diverged() -> None:
    cells = results(lambda x, width, _, seed: None if width == 256 and seed == 2 and x > -5.5 else parabola(x, -8.0))
    pending = [
        replace(cell, outcome=RunOutcome("failed")) if (cell.lr, cell.seed) in {(2.0**-6, 1), (2.0**-6, 3)} else cell
        for cell in cells
    ]
    summary = summarize(SETTINGS, pending)
    assert summary.families["width"]["sp"].sizes[256].unfinished == {2.0**-6: [1, 3]}
    row = next(line for line in lines(summary) if line.strip().startswith("256 sp"))
    assert row.endswith("  diverged: 0.03125 (seeds 2)  not finished: 0.015625 (seeds 1, 3)")


def test_an_optimum_beside_divergence_is_unresolved() -> None:
    """The best learning rate is the largest that trains: there is a shift, but no penalty to compute."""
    unstable = results(lambda x, width, *_: None if width == 256 and x > -9.5 else parabola(x, -8.0))
    curve = summarize(SETTINGS, unstable).families["width"]["sp"]
    size = curve.sizes[256]
    assert (size.best.optimum, size.best.edge, size.best.resolved, size.penalty) == (-10.0, True, False, None)
    assert curve.shift is not None
    assert curve.shift.edge
    assert curve.sizes[128].penalty is not None


def test_one_seed_has_no_error_and_no_results_no_optimum() -> None:
    one = summarize(SETTINGS, results(lambda x, *_: parabola(x, -8.0), seeds=1)).families["width"]["sp"]
    assert one.shift is not None
    assert (one.sizes[64].best.optimum_error, one.shift.octaves_error) == (None, None)
    pending = [replace(result, outcome=RunOutcome()) for result in results(lambda x, *_: parabola(x, -8.0))]
    none = summarize(SETTINGS, pending)
    assert none.families["width"]["sp"].sizes[64].best.optimum is None
    assert none.families["width"]["sp"].shift is None
    assert "no finished run" in "\n".join(lines(none))


def test_the_document_has_the_keys_it_always_had() -> None:
    """The optimum is at 0.5 for width 64 and at 0.25 for width 128, which diverges at 1.0."""
    cells = []
    for width, best in ((64, -1.0), (128, -2.0)):
        for lr in (0.125, 0.25, 0.5, 1.0):
            loss = None if (width, lr) == (128, 1.0) else parabola(math.log2(lr), best, curvature=1.0)
            outcome = RunOutcome("finished", loss=loss) if loss else RunOutcome("diverged", diverged=True)
            cells.append(make_result({"rule": "sp"}, 1, outcome, lr=lr, hidden_size=width))
    written = json.dumps(summarize(SETTINGS, cells).to_json())
    rounded = json.dumps(json.loads(written, parse_float=lambda text: round(float(text), 9) + 0.0))
    assert rounded == DOCUMENT.replace("BASE", OF_64).replace("OTHER", OF_128)


# As it was written before summaries were dataclasses
DOCUMENT = (
    '{"base": {"width": 64, "depth": 2}, "families": {"width": {"sp": {"sizes": {"64": BASE, "128": OTHER}, '
    '"shift": {"from": 64, "to": 128, "octaves": -1.0, "octaves_error": null, "per_doubling": -1.0, '
    '"per_doubling_error": null, "edge": false}}}, "depth": {"sp": {"sizes": {"2": BASE}, "shift": null}}}}'
)
OF_64 = (
    '{"points": [{"lr": 0.125, "loss": 7.0, "error": null}, {"lr": 0.25, "loss": 4.0, "error": null}, '
    '{"lr": 0.5, "loss": 3.0, "error": null}, {"lr": 1.0, "loss": 4.0, "error": null}], "seeds": {"1": {"0.125": 7.0, '
    '"0.25": 4.0, "0.5": 3.0, "1.0": 4.0}}, "diverged": {}, "unfinished": {}, "optimum": -1.0, "optimum_error": null, '
    '"optimum_of_seed": {"1": -1.0}, "edge": false, "optimum_of_mean": -1.0, "loss": 3.0, "loss_error": null, '
    '"resolved": true, "penalty": {"nats": 0.0, "error": null}}'
)
OF_128 = (
    '{"points": [{"lr": 0.125, "loss": 4.0, "error": null}, {"lr": 0.25, "loss": 3.0, "error": null}, '
    '{"lr": 0.5, "loss": 4.0, "error": null}, {"lr": 1.0, "loss": null, "error": null}], "seeds": {"1": {"0.125": 4.0, '
    '"0.25": 3.0, "0.5": 4.0}}, "diverged": {"1.0": [1]}, "unfinished": {}, "optimum": -2.0, "optimum_error": null, '
    '"optimum_of_seed": {"1": -2.0}, "edge": false, "optimum_of_mean": -2.0, "loss": 3.0, "loss_error": null, '
    '"resolved": true, "penalty": {"nats": 1.0, "error": null}}'
)


def test_the_table_says_what_the_summary_holds() -> None:
    both = [
        *results(lambda x, width, *_: parabola(x, -7.0 - math.log2(width / 64))),
        *results(lambda x, *_: parabola(x, -8.0), rule="completep"),
    ]
    text = "\n".join(lines(summarize(SETTINGS, both)))
    assert "sp: -2.00 ± 0.00 octaves from 64 to 256, -1.00 ± 0.00 per doubling" in text
    assert "completep: +0.00 ± 0.00 octaves from 64 to 256" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("256 sp"))
    assert row.split()[2:] == ["0.00195", "-9.00", "±", "0.00", "3.0000", "±", "0.0000", "0.2000", "±", "0.0000"]


def test_the_table_says_where_a_fit_is_rough() -> None:
    """Rates two octaves apart leave more than the fit can know: what was measured stands beside it."""
    fine = results(lambda x, *_: parabola(x, -7.0))
    coarse = results(lambda x, *_: parabola(x, -7.5), lrs=[2.0**-10, 2.0**-8, 2.0**-6], rule="completep")
    text = list(lines(summarize(SETTINGS, [*fine, *coarse])))
    rough = "  a rough fit, of rates over an octave apart: the lowest measured is 3.0125 at 0.00390625"
    assert all(line.endswith(rough) == ("completep " in line) for line in text if line.strip()[:1].isdigit())


@pytest.mark.parametrize(
    ("shapes", "shown"),
    [
        ([(64, 2), (128, 2)], ["width"]),
        ([(64, 2), (64, 8)], ["depth"]),
        ([(64, 8), (64, 16)], ["depth"]),
        ([(64, 2)], ["width"]),
        ([(64, 2), (128, 2), (64, 8)], ["width", "depth"]),
    ],
)
def test_a_family_without_several_sizes_is_not_shown(shapes: list[tuple[int, int]], shown: list[str]) -> None:
    cells = results(lambda x, *_: parabola(x, -8.0))
    kept = [cell for cell in cells if (cell.hidden_size, cell.num_hidden_layers) in shapes]
    if (64, 16) in shapes:  # of depths that were all trained, none is the base's
        kept += [replace(cell, num_hidden_layers=16) for cell in kept]
    summary = summarize(SETTINGS, kept)
    assert list(summary.shown) == shown
    assert [line.split()[0] for line in lines(summary) if "best lr" in line] == shown
    assert set(summary.families) == {"width", "depth"}, "the document has both"
    assert [line.split()[0] for line in lines(replace(summary, axis="horizon.tau")) if "best value" in line] == shown


def test_sizes_that_grow_in_both_directions_are_a_family_with_the_base() -> None:
    """The optimum falls by a quarter of an octave for each doubling of width x depth."""
    cells = results(lambda x, *_: parabola(x, -8.0))
    base = [cell for cell in cells if (cell.hidden_size, cell.num_hidden_layers) == (64, 2)]
    shapes = {(128, 4): -8.5, (256, 16): -9.25}
    grown = [
        replace(
            cell,
            signature=f"{cell.signature}-{width}",
            hidden_size=width,
            num_hidden_layers=depth,
            outcome=RunOutcome("finished", loss=parabola(math.log2(cell.lr), best)),
        )
        for (width, depth), best in shapes.items()
        for cell in base
    ]
    check(SETTINGS, [*cells, *grown])
    summary = summarize(SETTINGS, [*cells, *grown])
    assert list(summary.shown) == ["width", "depth", "width x depth"]
    curve = summary.families["width x depth"]["sp"]
    assert list(curve.sizes) == [128, 512, 4096]
    assert curve.shift is not None
    assert (curve.shift.base, curve.shift.largest) == (128, 4096)
    assert curve.shift.octaves == pytest.approx(-1.25)
    assert "sp: -1.25 ± 0.00 octaves from 128 to 4096, -0.25 ± 0.00 per doubling" in "\n".join(lines(summary))
    assert list(summarize(SETTINGS, [*base, *grown]).shown) == ["width x depth"]

    same = [replace(cell, hidden_size=256, num_hidden_layers=2 * 8, signature="a") for cell in grown[:1]]
    twin = [replace(cell, hidden_size=512, num_hidden_layers=8, signature="b") for cell in grown[:1]]
    with pytest.raises(ValueError, match=r"256 x 16, 512 x 8: width x depth tells two of these shapes apart no more"):
        check(SETTINGS, [*base, *same, *twin])


def test_another_hyperparameter_takes_the_place_of_the_learning_rate() -> None:
    """The standard deviation's optimum halves with each doubling of width, at one learning rate."""
    settings = LrTransferConfig(curves="rule", axis="model.initializer_range", bootstrap=True)
    cells = [
        replace(cell, lr=0.01, labels={**cell.labels, "model.initializer_range": cell.lr})
        for cell in results(lambda x, width, *_: parabola(x, -7.0 - math.log2(width / 64)))
    ]
    check(settings, cells)
    curve = summarize(settings, cells).families["width"]["sp"]
    assert curve.shift is not None
    assert curve.shift.octaves == pytest.approx(-2.0)
    of_largest = curve.sizes[256].intervals
    assert of_largest is not None
    assert of_largest.penalty.high == pytest.approx(0.2)
    assert curve.sizes[64].intervals is None, "the base is not held against itself"
    text = "\n".join(lines(summarize(settings, cells)))
    same = "shift -2.00 to -2.00 octaves, lost 0.2000 to 0.2000"
    assert f"  {same}: nominal 95 % of a bootstrap  Student's t over 3 seeds, 95 %: {same}\n" in text
    wrong: tuple[dict[str, Label], ...] = ({"rule": "sp"}, {"rule": "sp", "model.initializer_range": "large"})
    for labels in wrong:
        with pytest.raises(ValueError, match=r"axis = 'model.initializer_range': .* has no positive number there"):
            check(settings, [replace(cells[0], labels=labels), *cells[1:]])


def test_an_interval_says_where_its_samples_reach_beyond_the_grid() -> None:
    settings = LrTransferConfig(curves="rule", bootstrap=True)
    inside, beyond = (
        "\n".join(lines(summarize(settings, results(lambda x, width, *_, d=d: parabola(x, -8.0 + d * (width > 64))))))
        for d in (1, 9)
    )
    assert "of samples" not in inside
    assert "octaves, lost" in beyond
    assert "to beyond the grid: nominal 95 % of a bootstrap  100.00 % of samples at the end of a grid" in beyond


def test_the_figure_is_drawn_whatever_is_missing(tmp_path: Path) -> None:
    def ragged(x: float, width: int, depth: int, seed: int) -> float | None:
        return None if x > -6.5 else parabola(x, -8.0) + (1e6 if x < -11.5 else 0.0)

    for name, found in (("some", results(ragged)), ("none", results(lambda *_: None))):
        plot(summarize(SETTINGS, found), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_is_drawn_where_only_one_curve_grows_both_ways(tmp_path: Path) -> None:
    found = results(lambda x, *_: parabola(x, -8.0))
    wider = [replace(cell, labels={"rule": "other"}) for cell in found if cell.hidden_size > 64]
    both = [replace(cell, num_hidden_layers=8) for cell in found if cell.hidden_size == 128]
    summary = summarize(SETTINGS, [*found, *wider, *both])
    assert list(summary.shown["width x depth"]) == ["sp"]
    plot(summary, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("settings", "change", "words"),
    [
        (None, {}, "lr_transfer: missing"),
        (
            LrTransferConfig(curves="rules"),
            {},
            "curves = 'rules': a grid has no such axis, only rule, size",
        ),
        (SETTINGS, {"base_hidden_size": None}, "parameterization.base_hidden_size"),
        (SETTINGS, {"base_num_hidden_layers": 4}, "parameterization.base_num_hidden_layers: 2, 4"),
        (SETTINGS, {"lr": OCTAVES[1]}, "differ in more than curve, width, depth"),
    ],
    ids=["no-settings", "no-such-axis", "no-base", "two-bases", "another-axis"],
)
def test_cells_that_make_no_curves_are_refused(settings: LrTransferConfig | None, change: Any, words: str) -> None:
    cells = results(lambda *_: None, seeds=1)
    check(SETTINGS, cells)
    cells[0] = replace(cells[0], **change)
    with pytest.raises(ValueError, match=r"lr_transfer|parameterization|curves") as caught:
        check(settings, cells)
    assert words in str(caught.value)
