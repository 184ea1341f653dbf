"""The table of memory that plan.py prints."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.launcher.test_cli import answer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Command


@pytest.mark.parametrize(("width", "unit", "size"), [(32, "MiB", 2**20), (1024, "GiB", 2**30)])
def test_memory_is_in_units_that_say_something(
    command: Command, tiny_config: Path, width: int, unit: str, size: int
) -> None:
    asked = ("plan", "--config", tiny_config, f"model.hidden_size={width}")
    printed = command(*asked).stdout
    assert re.search(rf"^memory of one of 1 device\(s\) with 80 GiB, in {unit} \(", printed, re.MULTILINE)
    facts = answer(command(*asked, "--json"))
    for stage, memory in facts["memory_bytes"].items():
        row = re.search(rf"^ZeRO-{stage} (.*)", printed, re.MULTILINE)
        assert row is not None
        cells = [float(cell) for cell in row[1].split()[:8]]
        parts = ("weights", "gradients", "optimizer", "buffers", "activations", "update", "total")
        expected = [*(memory[part] for part in parts), facts["steps"][stage]["sent_bytes"]]
        assert cells == pytest.approx([each / size for each in expected], abs=0.005)
        assert cells[6] >= 0.1


@pytest.mark.parametrize(
    ("override", "stages"),
    [("run.seed=2", "0123"), ("run.reproducible=any_ranks", "012"), ("optimizer.name=soap", "0")],
)
def test_memory_is_that_of_stages_which_could_serve_the_run(
    command: Command, tiny_config: Path, override: str, stages: str
) -> None:
    asked = ("plan", "--config", tiny_config, "deepspeed.zero_stage=0", override)
    assert [*answer(command(*asked, "--json"))["memory_bytes"]] == [*stages]


def test_a_number_of_devices_that_training_would_refuse_is_refused(command: Command, tiny_config: Path) -> None:
    asked = ("plan", "--config", tiny_config, "run.reproducible=any_ranks", "--devices", 3)
    refused = command(*asked)
    assert refused.returncode == 2
    assert "run.reproducible = any_ranks: 3 ranks cannot share" in refused.stderr
