"""A check that cannot be made is a finding; the bad ones come first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from plumbline.launcher.runtime.doctor.check import Check, Facts, Finding, Place, common, sort
from plumbline.launcher.runtime.ranks.world import World

if TYPE_CHECKING:
    from tests.launcher.runtime.doctor.conftest import Reports

PLACE = Place(World(0, 0, 1, torch.device("cpu")), Path("runs/none"))


def refuse(_place: Place) -> Facts:
    raise PermissionError(13, "Permission denied")


def test_a_rank_that_cannot_measure_is_named_in_place_of_a_judgement(reports: Reports) -> None:
    check = Check("name", refuse, lambda _: [Finding("ok", "all", "never said")])
    facts = check.take(PLACE)
    assert facts == {"failed": "PermissionError: [Errno 13] Permission denied"}
    (found,) = check.examine(reports([{}, facts]))
    assert (found.level, found.node, found.check) == ("bad", "n1", "name")
    assert found.text == "rank 1: PermissionError: [Errno 13] Permission denied"
    assert [one.text for one in check.examine(reports([{}, {}]))] == ["never said"]


def test_bad_findings_come_first() -> None:
    given = [Finding("ok", "a", ""), Finding("bad", "b", ""), Finding("warning", "c", ""), Finding("bad", "d", "")]
    assert [finding.node for finding in sort(given)] == ["b", "d", "c", "a"]


def test_of_equally_many_the_lowest_rank_decides() -> None:
    assert common(["b", "a", "a"]) == "a"
    assert common(["b", "a"]) == "b"
