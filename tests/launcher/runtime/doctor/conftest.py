"""What tests of checks share: reports of ranks, made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from plumbline.launcher.runtime.doctor.check import Report

Reports = Callable[..., list[Report]]


@pytest.fixture
def reports() -> Reports:
    """Return a function: facts of each rank -> reports of ranks on nodes n0, n1, ...; `per_node` ranks on each."""

    def make(facts: Sequence[dict[str, Any]], per_node: int = 1) -> list[Report]:
        return [Report(rank, f"n{rank // per_node}", dict(found)) for rank, found in enumerate(facts)]

    return make
