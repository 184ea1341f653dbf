"""A comparison of variants: each at its best point, complete ones only, as a table and as a figure."""

import json
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from scipy import stats

from plumbline.launcher.runtime.sweep.comparison import ComparisonConfig, Merit, check, lines, summarize
from plumbline.launcher.runtime.sweep.comparison_plot import PLAIN, THOUGHTS, draw
from plumbline.launcher.runtime.sweep.kinds import KINDS
from plumbline.launcher.runtime.sweep.result import Label, Outliers, Result, RunOutcome
from tests.launcher.runtime.sweep.conftest import make_result

SETTINGS = ComparisonConfig(variants="block")


def cell(block: str, lr: float, seed: int, loss: float | None, kurt: float | None = None) -> Result:
    outliers = None if kurt is None else Outliers(kurt, 2 * kurt, None, 0.5, None, 100.0)
    return make_result({"block": block, "lr": lr}, seed, RunOutcome(loss=loss, outliers=outliers))


RESULTS = [
    cell("a", 0.1, 1, 2.0, kurt=5.0),
    cell("a", 0.1, 2, 2.2, kurt=7.0),
    cell("a", 0.2, 1, 1.0, kurt=1.0),
    cell("a", 0.2, 2, None),  # it diverged, so this point is out, however good its other seed is
    cell("b", 0.1, 1, 1.9, kurt=2.0),
    cell("b", 0.1, 2, 1.9, kurt=2.0),
    cell("b", 0.2, 1, 1.6),
    cell("b", 0.2, 2, 1.8),
    cell("c", 0.1, 1, None),
]


def test_each_variant_is_read_at_its_best_complete_point() -> None:
    found = summarize(SETTINGS, RESULTS).tables["all"]
    assert {name: variant.best for name, variant in found.items()} == {"a": "lr=0.1", "b": "lr=0.2", "c": None}
    assert found["a"].points["lr=0.1"] == {
        "loss": (pytest.approx(2.1), pytest.approx(0.1)),
        "kurt": (6.0, pytest.approx(1.0)),
        "kurt_peak": (12.0, pytest.approx(2.0)),
        "corr": (0.5, 0.0),
        "tokens_per_second": (100.0, 0.0),
    }
    assert found["a"].points["lr=0.2"] is None
    assert set(found["b"].points["lr=0.2"] or {}) == {"loss"}, "without diagnostics the loss alone"


def test_the_best_variant_comes_first() -> None:
    text = list(lines(summarize(SETTINGS, RESULTS)))
    assert [line.split()[0] for line in text[1:]] == ["b", "a", "c"]
    assert "1.7 ± 0.1" in text[1]
    assert "6 ± 1" in text[2]
    assert text[3].split(maxsplit=1)[1] == "no point is complete  left out: lr=0.1 (1 of 1 pending)"


def tuned(lr: float, seed: int, loss: float | None, status: str = "finished", width: int = 64) -> Result:
    return make_result({"block": "a", "lr": lr, "width": width}, seed, RunOutcome(status, loss=loss))


def test_a_row_says_what_its_best_point_was_not_chosen_from() -> None:
    results = [tuned(0.1, 1, 3.0), tuned(0.1, 2, 3.1), tuned(0.2, 1, 2.0), tuned(0.2, 2, None, "diverged")]
    waiting = [tuned(0.1 * step, seed, None, "pending") for step in (3, 4, 5) for seed in (1, 2)]
    summary = summarize(SETTINGS, [*results, *waiting])
    (_, row) = lines(summary)
    assert "left out: lr=0.2 width=64 (1 of 2 diverged), " in row
    assert "lr=0.4 width=64 (2 of 2 pending) and 1 more  lr is the smallest of its grid" in row
    assert summary.to_json()["all"]["a"]["notes"] == summary.tables["all"]["a"].notes


def test_a_row_says_where_its_best_point_is_at_an_end_of_a_tuned_axis() -> None:
    def notes(losses: list[float]) -> list[str]:
        results = [tuned(0.1 * step, 1, loss) for step, loss in enumerate(losses, start=1)]
        return summarize(SETTINGS, results).tables["all"]["a"].notes

    assert notes([3.0, 2.0, 2.5]) == []
    assert notes([3.0, 2.0, 1.5]) == ["lr is the largest of its grid"]
    assert notes([1.0, 2.0, 2.5]) == ["lr is the smallest of its grid"]
    assert notes([3.0]) == [], "nothing was tuned"
    narrow = [tuned(lr, 1, 3.0, width=64) for lr in (0.01, 0.1, 1.0)]
    wide = [tuned(lr, 1, loss, width=32) for lr, loss in ((0.1, 1.0), (0.2, 2.0))]
    assert summarize(SETTINGS, [*narrow, *wide]).tables["all"]["a"].notes == [
        "lr is the smallest of its grid",
        "width is the smallest of its grid",
    ], "beside it on an axis is what has all other labels of it"


def test_a_score_that_solves_is_counted_over_seeds_with_the_step_that_reached_it() -> None:
    def thinker(seed: int, *scores: float) -> Result:
        of_step = {500 * number: score for number, score in enumerate(scores, start=1)}
        known = RunOutcome(loss=1.0, exact_match=0.5, thinking_exact_match=scores[-1])
        return make_result(
            {"block": "thinks"},
            seed,
            replace(known, evaluations={"thinking_exact_match": of_step, "exact_match": {9: 1.0}}),
        )

    plain = RunOutcome(loss=1.0, exact_match=0.5, evaluations={"exact_match": {500: 0.96, 1000: 0.5}})
    results = [
        thinker(1, 0.5, 0.97, 0.99),
        thinker(2, 0.5, 0.5, 0.51),
        thinker(3, 0.95, 0.5, 0.95),
        make_result({"block": "guesses"}, 1, plain),
        make_result({"block": "loss alone"}, 1, RunOutcome(loss=2.0)),
    ]
    settings = ComparisonConfig(variants="block", by="thinking_exact_match", solved=0.95)
    check(settings, results)
    summary = summarize(settings, results)
    solved = {name: variant.solved for name, variant in summary.tables["all"].items() if variant.solved}
    thinks = solved["thinks"]
    assert (thinks.seeds, thinks.of, thinks.steps) == (2, 3, {1: 1000, 2: None, 3: 500})
    assert (thinks.low, thinks.high) == pytest.approx((0.2077, 0.9385), abs=1e-4)
    assert (solved["guesses"].seeds, solved["guesses"].steps) == (0, {1: 500}), "what it was on the way does not count"
    assert (solved["loss alone"].seeds, solved["loss alone"].steps) == (0, {1: None})
    assert any(
        line == "thinks: solved with 2 of 3 seeds (21% to 94%, 95 % Wilson interval), first in step (seed) 1000 (1), "
        "never (2), 500 (3)"
        for line in lines(summary)
    )
    assert json.loads(json.dumps(summary.to_json()))["all"]["thinks"]["solved"]["steps"] == {
        "1": 1000,
        "2": None,
        "3": 500,
    }
    with pytest.raises(ValueError, match=r"solved = 0\.95 is a share of right answers: by = 'loss' has none"):
        ComparisonConfig(variants="block", solved=0.95)


AGAINST = ComparisonConfig(variants="block", against=["b"])
PAIRS = [
    *(cell("a", 0.1, seed, loss, kurt=seed) for seed, loss in ((1, 2.0), (2, 2.3), (3, 2.1))),
    *(cell("a", 0.2, seed, 3.0, kurt=9.0) for seed in (1, 2, 3)),  # not its best point
    *(cell("b", 0.1, seed, loss, kurt=4.0) for seed, loss in ((1, 1.0), (2, 1.1), (3, 1.2), (4, 9.0))),
    cell("c", 0.1, 1, 1.5),
    cell("d", 0.1, 1, None),
]


def test_variants_are_subtracted_seed_by_seed_at_their_best_points() -> None:
    check(AGAINST, PAIRS)
    found = summarize(AGAINST, PAIRS).tables["all"]
    assert {name: [*variant.less] for name, variant in found.items()} == {"a": ["b"], "b": [], "c": ["b"], "d": []}
    less = found["a"].less["b"]
    assert less.keys() == {"loss", "kurt"}
    apart = np.array([1.0, 1.2, 0.9])  # of the seeds that both have
    interval = stats.t.interval(0.95, 2, apart.mean(), stats.sem(apart))
    assert astuple(less["loss"]) == pytest.approx((apart.mean(), *interval, 3))
    assert less["kurt"].mean == pytest.approx(-2.0)
    assert found["c"].less["b"] == {}, "one seed has no interval"


def test_differences_are_a_table_that_tells_of_a_choice_made_on_its_seeds() -> None:
    *_, head, columns, first, second = lines(summarize(AGAINST, PAIRS))
    assert head.startswith(
        "less b, paired by seed, with 95 % intervals by Student's t; the points were chosen on these"
    )
    assert columns.split() == ["loss", "kurtosis"]
    assert first.split() == ["c", "-", "-"], "in the order of the table above"
    assert second.split() == ["a", "1.03", "[0.654,", "1.41]", "-2", "[-4.48,", "0.484]"]
    *_, last = lines(summarize(AGAINST, [one for one in PAIRS if one.seed == 1]))
    assert last == "less b: two seeds have to be finished of both"
    alone = [one for one in PAIRS if one.labels["lr"] == 0.1]
    *_, head, _, _, _ = lines(summarize(AGAINST, alone))
    assert head == "less b, paired by seed, with 95 % intervals by Student's t", "nothing was chosen"


def test_thoughts_are_subtracted_from_what_does_not_think() -> None:
    def of(block: str, seed: int, right: float, thinking: float | None) -> Result:
        outcome = RunOutcome(loss=1.0, exact_match=right, thinking_exact_match=thinking)
        return make_result({"block": block}, seed, outcome)

    results = [
        *(of("thinks", seed, 0.0, right) for seed, right in ((1, 0.9), (2, 1.0))),
        *(of("deep", seed, right, None) for seed, right in ((1, 0.8), (2, 0.7))),
        *(of("plain", seed, right, None) for seed, right in ((1, 0.6), (2, 0.4))),
    ]
    settings = ComparisonConfig(variants="block", by="thinking_exact_match", against=["plain"])
    found = summarize(settings, results).tables["all"]
    assert found["thinks"].less["plain"]["thinking_exact_match"].mean == pytest.approx(0.45)
    assert found["deep"].less["plain"]["thinking_exact_match"].mean == pytest.approx(0.25)
    assert found["thinks"].less["plain"]["exact_match"].mean == pytest.approx(-0.5)


def test_only_a_label_of_the_compared_axis_can_be_subtracted() -> None:
    message = "against = 'e': block has no such label, only 'a', 'b', 'c', 'd'"
    with pytest.raises(ValueError, match=message):
        check(ComparisonConfig(variants="block", against=["b", "e"]), PAIRS)
    (table,) = summarize(ComparisonConfig(variants="block", against=["d"]), PAIRS).to_json().values()
    assert not any("less" in variant for variant in table.values()), "d has no best point"


def test_the_document_has_the_keys_it_always_had() -> None:
    found = summarize(SETTINGS, [cell("b", 0.1, 1, 1.5), cell("b", 0.1, 2, 2.5), cell("c", 0.1, 1, None)])
    assert json.dumps(found.to_json()) == (
        '{"all": {"b": {"best": "lr=0.1", "points": {"lr=0.1": {"loss": [2.0, 0.5]}}, "seeds": {"loss": {"1": 1.5, '
        '"2": 2.5}}}, "c": {"best": null, "points": {"lr=0.1": null}, "seeds": {}, '
        '"notes": ["left out: lr=0.1 (1 of 1 pending)"]}}}'
    )


def test_what_is_kept_apart_gets_a_table_of_its_own() -> None:
    def of(task: str, block: str, lr: float, loss: float, exact_match: float | None) -> Result:
        labels: dict[str, Label] = {"task": task, "block": block, "lr": lr}
        return make_result(labels, 1, RunOutcome(loss=loss, exact_match=exact_match))

    results = [
        of("sums", "a", 0.1, 2.0, 0.5),
        of("sums", "a", 0.2, 3.0, 0.6),
        of("maps", "a", 0.1, 0.9, None),
        of("maps", "a", 0.2, 0.8, None),
    ]
    settings = ComparisonConfig(variants="block", within="task")
    check(settings, results)
    found = summarize(settings, results)
    assert {table: variants["a"].best for table, variants in found.tables.items()} == {
        "sums": "lr=0.1",
        "maps": "lr=0.2",
    }
    text = list(lines(found))
    assert [line.split()[0] for line in text] == ["sums", "loss", "a", "maps", "loss", "a"]
    assert "exact match" in text[1]
    assert "0.5" in text[2].split()
    assert "exact match" not in text[4], "nobody has it there"
    for wrong, message in (("rule", "within = 'rule': a grid has no such axis"), ("block", "that axis is compared")):
        with pytest.raises(ValueError, match=message):
            check(ComparisonConfig(variants="block", within=wrong), results)


def test_cells_without_the_axis_are_refused() -> None:
    with pytest.raises(ValueError, match="variants = 'rule': a grid has no such axis, only block, lr"):
        check(ComparisonConfig(variants="rule"), RESULTS)
    with pytest.raises(ValueError, match=r"`comparison: \{variants: AXIS\}`"):
        check(None, RESULTS)


def matched(variant: str, lr: float, seed: int, loss: float, exact: float, thinking: float | None) -> Result:
    outcome = RunOutcome(loss=loss, exact_match=exact, thinking_exact_match=thinking)
    return make_result({"objective": variant, "lr": lr}, seed, outcome)


MATCHED = [
    matched("plain", 0.1, 1, 0.3, 0.5, None),
    matched("plain", 0.1, 2, 0.3, 0.9, None),
    matched("plain", 0.2, 1, 0.4, 0.8, None),
    matched("plain", 0.2, 2, 0.4, 0.8, None),
    matched("thinker", 0.1, 1, 0.1, 0.6, 0.7),
    matched("thinker", 0.1, 2, 0.1, 0.6, 0.7),
    matched("thinker", 0.2, 1, 0.2, 0.2, 0.9),
    matched("thinker", 0.2, 2, 0.2, 0.2, 1.0),
]


@pytest.mark.parametrize(
    ("by", "best"),
    [
        ("loss", {"thinker": "lr=0.1", "plain": "lr=0.1"}),
        ("exact_match", {"plain": "lr=0.2", "thinker": "lr=0.1"}),
        ("thinking_exact_match", {"thinker": "lr=0.2", "plain": "lr=0.2"}),
    ],
)
def test_what_goes_by_chooses_points_and_orders_rows(by: Merit, best: dict[str, str]) -> None:
    summary = summarize(ComparisonConfig(variants="objective", by=by), MATCHED)
    assert [(name, variant.best) for name, variant in summary.tables["all"].items()] == list(best.items())
    assert [line.split()[0] for line in list(lines(summary))[1:]] == list(best)


def test_by_the_loss_with_thoughts_the_best_point_is_the_one_that_is_lowest_with_them() -> None:
    """Variants that do not think are placed by the loss that they have."""
    rows = [
        make_result({"objective": name, "lr": lr}, seed, RunOutcome(loss=loss, result=result))
        for name, lr, loss, result in (
            ("committed", 0.1, 1.0, {"eval/a/thinking_loss": 2.5, "eval/b/thinking_loss": 2.7}),
            ("committed", 0.2, 9.0, {"eval/a/thinking_loss": 1.5, "eval/b/thinking_loss": 1.7}),
            ("plain", 0.1, 1.7, {"eval/a/loss": 1.7}),
        )
        for seed in (1, 2)
    ]
    settings = ComparisonConfig(variants="objective", by="thinking_loss")
    summary = summarize(settings, rows)
    table = summary.tables["all"]
    assert [(name, variant.best) for name, variant in table.items()] == [("committed", "lr=0.2"), ("plain", "lr=0.1")]
    assert "thinking loss" in next(iter(lines(summary)))
    assert table["committed"].seeds["thinking_loss"] == {1: 1.6, 2: 1.6}
    (axes,) = draw(summary).axes
    assert marks(axes)["committed", THOUGHTS] == [1.6, 1.6, 1.6]
    with pytest.raises(ValueError, match="by = 'thinking_loss' has none"):
        ComparisonConfig(variants="objective", by="thinking_loss", solved=0.9)


@pytest.mark.parametrize("by", ["exact_match", "thinking_exact_match"])
def test_where_nothing_is_matched_the_loss_decides(by: Merit) -> None:
    assert summarize(ComparisonConfig(variants="block", by=by), RESULTS) == summarize(SETTINGS, RESULTS)


def test_of_points_that_match_equally_often_the_one_of_less_loss_is_the_best() -> None:
    rows = [
        matched(variant, lr, seed, loss, 1.0, None)
        for variant, lr, loss in (("plain", 0.1, 2.5), ("plain", 0.2, 0.1), ("other", 0.1, 0.01))
        for seed in (1, 2)
    ]
    table = summarize(ComparisonConfig(variants="objective", by="exact_match"), rows).tables["all"]
    assert [(name, variant.best) for name, variant in table.items()] == [("other", "lr=0.1"), ("plain", "lr=0.2")]


def marks(axes: Axes) -> dict[tuple[str, str], list[float]]:
    """Return (row, colour) -> the place of the bar, then the dots."""
    found: dict[tuple[str, str], list[float]] = {}
    names = [label.get_text() for label in axes.get_yticklabels()]
    for line in sorted(axes.get_lines(), key=lambda line: str(line.get_marker()), reverse=True):
        places, heights = (np.asarray(values, float) for values in line.get_data())
        (height,) = set(heights.round())
        found.setdefault((names[int(height)], str(line.get_color())), []).extend(places.tolist())
    return found


def test_the_figure_has_a_dot_for_each_seed_and_a_bar_at_the_mean() -> None:
    figure = draw(summarize(ComparisonConfig(variants="objective", by="thinking_exact_match"), MATCHED))
    (axes,) = figure.axes
    assert axes.get_xlabel() == "exact match"
    assert marks(axes) == {
        ("thinker", PLAIN): [0.2, 0.2, 0.2],
        ("thinker", THOUGHTS): [pytest.approx(0.95), 0.9, 1.0],
        ("plain", PLAIN): [pytest.approx(0.8), 0.8, 0.8],
    }
    top, bottom = (tick.get_text() for tick in axes.get_yticklabels())
    assert (top, bottom) == ("thinker", "plain")
    assert axes.yaxis_inverted(), "the first row is the highest"
    legend = axes.get_legend()
    assert legend is not None
    assert "with thoughts" in [text.get_text() for text in legend.get_texts()]


def test_without_answers_the_figure_shows_the_loss() -> None:
    figure = draw(summarize(SETTINGS, RESULTS))
    (axes,) = figure.axes
    assert axes.get_xlabel() == "held-out loss (nats)"
    assert marks(axes) == {("b", PLAIN): [pytest.approx(1.7), 1.6, 1.8], ("a", PLAIN): [pytest.approx(2.1), 2.0, 2.2]}
    assert [text.get_text() for text in axes.texts] == ["no point is complete"]
    assert axes.get_legend() is None


def test_each_table_has_a_panel_and_the_sweep_writes_the_figure(tmp_path: Path) -> None:
    results = [
        replace(result, labels={**result.labels, "task": task}) for task in ("sums", "maps") for result in MATCHED
    ]
    settings = ComparisonConfig(variants="objective", within="task")
    summary = KINDS["comparison"].summarize(settings, results)
    assert [axes.get_title(loc="left") for axes in draw(summary).axes] == ["sums", "maps"]
    write = KINDS["comparison"].plot
    assert write is not None
    write(summary, tmp_path / "summary.png")
    assert (tmp_path / "summary.png").read_bytes().startswith(b"\x89PNG")
