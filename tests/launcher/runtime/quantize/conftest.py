"""Share the command with the tests of rows and of saved folders."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.launcher.quantize import main

if TYPE_CHECKING:
    from collections.abc import Callable

    Quantize = Callable[..., Any]

SMALL = ("--calibration-sequences", "8", "--device", "cpu")


@pytest.fixture
def quantize(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], corpus: Path) -> Quantize:
    """Return a function that runs the command in this process, for what it prints with --json.

    Curves are left undrawn: matplotlib takes longer than the rounding, and test_damage.py looks at them.
    """
    monkeypatch.setattr("plumbline.launcher.runtime.quantize.report.draw_curves", lambda *given: given[-1].touch())

    def run(*arguments: str | Path) -> Any:
        scored = () if "--save" in arguments else ("--max-batches", "3")
        words = ["quantize.py", "--data", corpus, *SMALL, *scored, "--json", *arguments]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        assert main() == 0
        return json.loads(capsys.readouterr().out)

    return run
