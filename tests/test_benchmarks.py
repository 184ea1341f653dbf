"""Every part of `make bench` and `make bench-gpu` runs, at its smallest, and its table has a row."""

import pytest

from tests.benchmarks.bench import CPU, GPU, as_table, run
from tests.conftest import PATIENCE

PARTS = [*(("cpu", *part) for part in CPU.items()), *(("gpu", *part) for part in GPU.items())]


@pytest.mark.parametrize(("device", "name", "part"), PARTS, ids=[f"{device}-{name}" for device, name, _ in PARTS])
def test_a_part_runs(device: str, name: str, part: tuple[str, str]) -> None:
    found = run(dict(CPU if device == "cpu" else GPU)[name], rehearse=True, seconds=PATIENCE)
    assert "error" not in found, found["error"]
    table = as_table(name, found)
    assert found["command"] in table
    assert len(table.splitlines()) > 5


def test_a_part_that_fails_says_why() -> None:
    found = run(CPU["loss_head"]._replace(command="loss_head.py --tokens none"), rehearse=False, seconds=PATIENCE)
    assert "invalid int value: 'none'" in found["error"]
    assert "invalid int value" in as_table("loss_head", found)
