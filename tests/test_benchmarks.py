"""Every part of `make bench` and `make bench-gpu` runs, at its smallest, and its table has a row."""

from pathlib import Path

import pytest

from tests.benchmarks import bench
from tests.benchmarks.bench import CPU, GPU, as_table, run
from tests.conftest import PATIENCE

PARTS = [*(("cpu", *part) for part in CPU.items()), *(("gpu", *part) for part in GPU.items())]


@pytest.mark.parametrize(("device", "name", "part"), PARTS, ids=[f"{device}-{name}" for device, name, _ in PARTS])
def test_a_part_runs(device: str, name: str, part: tuple[str, str], fork_server: Path) -> None:
    found = run(dict(CPU if device == "cpu" else GPU)[name], rehearse=True, seconds=PATIENCE, server=fork_server)
    assert "error" not in found, found["error"]
    table = as_table(name, found)
    assert found["command"] in table
    assert len(table.splitlines()) > 5


def test_a_part_that_fails_says_why(fork_server: Path) -> None:
    part = CPU["loss_head"]._replace(command="loss_head.py --tokens none")
    for server in (fork_server, None):
        found = run(part, rehearse=False, seconds=PATIENCE, server=server)
        assert "invalid int value: 'none'" in found["error"]
        assert "invalid int value" in as_table("loss_head", found)


def test_parts_fork_from_a_server_of_their_own(tmp_path: Path) -> None:
    server = bench.fork_server(tmp_path)
    assert server is not None
    found = run(CPU["train_6x384"], rehearse=True, seconds=PATIENCE, server=server)
    assert "error" not in found, found["error"]


def test_without_a_server_every_part_imports_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "IMPORTS", ("no_such_module",))
    assert bench.fork_server(tmp_path) is None
    assert "every part imports by itself: ModuleNotFoundError" in capsys.readouterr().err


def test_a_server_that_has_ended_fails_the_part(tmp_path: Path) -> None:
    found = run(CPU["loss_head"], rehearse=True, seconds=PATIENCE, server=tmp_path / "fork")
    assert found["error"].startswith("the fork server has ended")


def test_what_takes_too_long_is_cut_off(fork_server: Path) -> None:
    for server in (fork_server, None):
        found = run(CPU["generation"], rehearse=False, seconds=0.5, server=server)
        assert found["error"] == "cut off after 0 s"  # half a second, rounded
