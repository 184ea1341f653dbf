"""A sweep with no question of its own says what its losses are, and where its best lies at the end of its grid."""

from plumbline.launcher.runtime.sweep.grid import lines, summarize
from plumbline.launcher.runtime.sweep.result import Result, RunOutcome
from tests.launcher.runtime.sweep.conftest import make_result


def cell(loss: float | None, rate: float, width: int = 64, decay: str = "usual", seed: int = 1) -> Result:
    return make_result({"lr": rate, "width": width, "decay": decay}, seed, RunOutcome(loss=loss))


def test_points_stand_below_what_they_are_the_best_first() -> None:
    results = [cell(3.0, 0.1), cell(2.0, 0.2), cell(2.2, 0.2, seed=2), cell(2.5, 0.4), cell(None, 0.8)]
    heading, *points = lines(summarize(None, results))
    assert heading == "held-out loss, nats per token; of several seeds the mean and its standard error"
    assert [point.split("lr=")[1].split()[0] for point in points] == ["0.2", "0.4", "0.1", "0.8"]
    assert points[0].startswith("2.1000 ± 0.1000")


def test_a_best_at_the_end_of_its_grid_is_named() -> None:
    falling = [cell(3.0, 0.1), cell(2.5, 0.2)]
    assert list(lines(summarize(None, [*falling, cell(2.0, 0.4)])))[-1] == (
        "the best has the largest lr of its grid: a wider grid may hold a better one"
    )
    results = [cell(3.0, 0.4), cell(2.0, 0.2), cell(2.1, 0.2, decay="none"), cell(2.2, 0.2, 32), cell(2.5, 0.2, 128)]
    assert list(lines(summarize(None, results)))[-1] == (
        "the best has the smallest lr of its grid: a wider grid may hold a better one"
    )
    assert len(list(lines(summarize(None, [*results, cell(2.3, 0.1)])))) == 1 + 6
    assert len(list(lines(summarize(None, [*results, cell(None, 0.1)])))) == 1 + 6, "beyond it a run diverged"
    assert len(list(lines(summarize(None, [cell(None, 0.1), cell(None, 0.2)])))) == 1 + 2


def test_a_best_at_the_end_of_an_axis_that_another_grid_lacks_is_named() -> None:
    of_rates = [make_result({"lr": rate}, 1, RunOutcome(loss=loss)) for rate, loss in ((0.1, 3.0), (0.2, 2.5))]
    of_decays = [
        make_result({"lr": 0.2, "decay": decay}, 1, RunOutcome(loss=loss)) for decay, loss in ((0.1, 2.2), (0.2, 2.0))
    ]
    assert list(lines(summarize(None, [*of_rates, *of_decays])))[-1] == (
        "the best has the largest decay of its grid: a wider grid may hold a better one"
    )
