"""A comparison of variants: each at its best point, complete ones only."""

from typing import Any

import pytest

from launcher.runtime.sweep.comparison import ComparisonConfig, check, lines, summarize

SETTINGS = ComparisonConfig(variants="block")


def cell(block: str, lr: float, seed: int, loss: float | None, **outliers: float) -> dict[str, Any]:
    return {"labels": {"block": block, "lr": lr}, "seed": seed, "loss": loss, "outliers": outliers or None}


RESULTS = [
    cell("a", 0.1, 1, 2.0, kurt=5.0, mmr=3.0),
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
    found = summarize(SETTINGS, RESULTS)["all"]
    assert {variant: facts["best"] for variant, facts in found.items()} == {"a": "lr=0.1", "b": "lr=0.2", "c": None}
    assert found["a"]["points"]["lr=0.1"] == {
        "loss": [pytest.approx(2.1), pytest.approx(0.1)],
        "kurt": [6.0, pytest.approx(1.0)],
    }
    assert found["a"]["points"]["lr=0.2"] is None
    assert set(found["b"]["points"]["lr=0.2"]) == {"loss"}, "without diagnostics the loss alone"


def test_the_best_variant_comes_first() -> None:
    text = list(lines(summarize(SETTINGS, RESULTS)))
    assert [line.split()[0] for line in text[1:]] == ["b", "a", "c"]
    assert "1.7 ± 0.1" in text[1]
    assert "6 ± 1" in text[2]
    assert "no point is complete" in text[3]


def test_what_is_kept_apart_gets_a_table_of_its_own() -> None:
    def of(task: str, block: str, lr: float, loss: float, exact_match: float | None) -> dict[str, Any]:
        labels = {"task": task, "block": block, "lr": lr}
        return {"labels": labels, "seed": 1, "loss": loss, "exact_match": exact_match, "outliers": None}

    results = [
        of("sums", "a", 0.1, 2.0, 0.5),
        of("sums", "a", 0.2, 3.0, 0.6),
        of("maps", "a", 0.1, 0.9, None),
        of("maps", "a", 0.2, 0.8, None),
    ]
    settings = ComparisonConfig(variants="block", within="task")
    check(settings, results)
    found = summarize(settings, results)
    assert {table: variants["a"]["best"] for table, variants in found.items()} == {"sums": "lr=0.1", "maps": "lr=0.2"}
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
