"""The record of what was done to a run: what is written comes back, and what is no record is named."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.data.damage import DamagedFileError
from plumbline.data.skipped import SkippedData
from plumbline.launcher.runtime.run.interventions import (
    INTERVENTIONS,
    Intervention,
    read_interventions,
    skipped_in,
    write_interventions,
)

if TYPE_CHECKING:
    from pathlib import Path

FIRST = Intervention("2026-01-01T00:00:00+00:00", "non_finite", "the norm is nan", 13, 14, back_to=10, skipped=(12, 14))
SECOND = Intervention("2026-01-02T00:00:00+00:00", "loss_spike", "the loss is 9", 5, 6, back_to=4, skipped=(4, 6))


def test_what_was_done_is_read_again(tmp_path: Path) -> None:
    assert read_interventions(tmp_path) == []
    write_interventions(tmp_path, [FIRST, SECOND])
    assert read_interventions(tmp_path) == [FIRST, SECOND]
    assert skipped_in([FIRST, SECOND]) == SkippedData(((4, 6), (12, 14)))
    assert str(FIRST) == (
        "step 14: non_finite: the norm is nan; went back to step 10, without the data of steps 13 to 14"
    )


@pytest.mark.parametrize("changes", [{"skipped": [6, 4]}, {"skipped": "4 to 6"}, {"skipped": None}, {"back_to": None}])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    item = {key: value for key, value in {**asdict(SECOND), **changes}.items() if value is not None}
    lines = [json.dumps(asdict(FIRST)), json.dumps(item)]
    (tmp_path / INTERVENTIONS).write_text("\n".join(lines) + "\n")
    with pytest.raises(DamagedFileError, match=r"interventions.jsonl, line 2: no intervention .*; correct or remove"):
        read_interventions(tmp_path)
