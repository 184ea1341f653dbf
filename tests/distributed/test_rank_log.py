"""Each rank has a file with all it said, bounded and marked by attempt; the terminal hears of others' things once."""

from __future__ import annotations

import logging
import re
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from plumbline.launcher.runtime.ranks.rank_log import RankFile, rank_log
from plumbline.launcher.runtime.system.log import LOG, TRAINING, Terminal

if TYPE_CHECKING:
    from pathlib import Path

    from plumbline.launcher.runtime.ranks.world import World
    from tests.conftest import Start

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def say_everything() -> None:
    """Log as ours, DeepSpeed, another library and Python do."""
    from deepspeed.utils import logger

    LOG.info("ours")
    TRAINING.warning("ours is odd")
    logger.info("DeepSpeed talks")
    logger.warning("DeepSpeed is odd")
    logging.getLogger("another.library").warning("another is odd")
    odd = "Python is odd"  # by name: the line of source that asks for a warning is part of it
    warnings.warn(odd, UserWarning, stacklevel=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_file_has_all_and_the_terminal_what_rank_0_says(
    tmp_path: Path, world: World, rank: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    with warnings.catch_warnings(), rank_log(tmp_path / "logs", replace(world, rank=rank, size=2)):
        warnings.simplefilter("always")
        say_everything()
    written = (tmp_path / "logs" / f"rank_{rank:05d}.log").read_text()
    odd = ["ours is odd", "DeepSpeed is odd", "another is odd", "Python is odd"]
    assert re.match(rf"{TIME},\d+ INFO plumbline: attempt: rank {rank} of 2 on \S+, process \d+", written)
    assert [written.count(text) for text in ("plumbline: ours\n", *odd, "end of the attempt")] == [1] * 6
    assert "talks" not in written
    printed = capfd.readouterr()
    assert printed.out == ""
    assert [printed.err.count(text) for text in odd] == [1 - rank] * 4
    assert not logging.getLogger("DeepSpeed").handlers, "its own prints on every rank"


def test_nothing_is_left_of_it(tmp_path: Path, world: World) -> None:
    before = logging.getLogger().handlers[:], LOG.handlers[:], warnings.showwarning
    for _ in range(2):
        with rank_log(tmp_path, world):
            LOG.info("once")
    assert (logging.getLogger().handlers, LOG.handlers, warnings.showwarning) == before
    text = (tmp_path / "rank_00000.log").read_text()
    assert [text.count(part) for part in ("attempt: rank 0 of 1", "once", "end of the attempt")] == [2] * 3


def test_a_failure_is_there_with_its_traceback(
    tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4242")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    with pytest.raises(ValueError, match="lost"), rank_log(tmp_path, world):
        raise ValueError("lost")
    text = (tmp_path / "rank_00000.log").read_text()
    assert "Slurm job 4242, restart 3\n" in text
    assert "ERROR plumbline: the attempt failed\nTraceback" in text
    assert text.endswith("ValueError: lost\n")
    assert capsys.readouterr().err == "", "whoever takes the exception prints it"


def test_a_file_does_not_grow_without_end(tmp_path: Path) -> None:
    file = RankFile(tmp_path / "rank_00000.log", size=4000)
    for number in range(1000):
        file.note(f"message {number}")
    file.close()
    kept = sorted(tmp_path.iterdir())
    assert [path.name for path in kept] == ["rank_00000.log", "rank_00000.log.1"]
    assert all(path.stat().st_size <= 4000 for path in kept)
    assert kept[0].read_text().endswith("message 999\n")


@pytest.mark.parametrize("obstacle", ["full", "no folder"])
def test_a_disk_that_takes_nothing_ends_nothing(
    tmp_path: Path, world: World, obstacle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if obstacle == "full":
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "rank_00000.log").symlink_to("/dev/full")
    else:
        (tmp_path / "logs").touch()
    with rank_log(tmp_path / "logs", world):
        for _ in range(2000):  # more than buffers hold
            LOG.info("training goes on")
    printed = capsys.readouterr().err
    assert printed.count("training goes on") == 2000
    assert "Logging error" not in printed


def test_ranks_of_a_run_write_theirs_and_a_job_log_has_times(start_pretrain: Start, tiny_config: Path) -> None:
    """What is asked for wrongly is answered without: it is no part of a run."""
    short = ["train.steps=2", "train.eval_interval=null", "run.deterministic=true"]
    job = start_pretrain(tiny_config, "logged", short, ranks=2)
    outcome, printed = job.wait(), (job.logs / "0.out").read_text()
    assert outcome.code == 0, outcome.stderr
    lines = printed.splitlines()
    begun = next(number for number, line in enumerate(lines) if re.match(TIME, line))
    assert lines[0] == "starting: 2 ranks of 1 thread each"
    assert lines[1].startswith("run      ")
    assert lines[begun - 1] == "repeats  torch's deterministic algorithms"
    assert all(re.match(rf"{TIME} \S", line) for line in lines[begun:])
    assert re.search(rf"^{TIME} step 2/2  loss ", printed, re.MULTILINE)
    for rank in (0, 1):
        text = (outcome.run.folder / "logs" / f"rank_{rank:05d}.log").read_text()
        assert f"attempt: rank {rank} of 2" in text
        assert text.count("saved ") == 1
        assert "end of the attempt" in text
    again = start_pretrain(tiny_config, "logged", short, ranks=2).wait()
    assert again.stdout.splitlines()[-1].startswith(f"{outcome.run.folder} is complete: step 2"), "no attempt was made"
    assert text == (outcome.run.folder / "logs" / "rank_00001.log").read_text()


def test_a_terminal_shows_no_times(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Terminal, "stamps", True)
    monkeypatch.setenv("RANK", "0")
    LOG.warning("two\n  lines")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"{TIME} warning: two", first)
    assert re.fullmatch(rf"{TIME}   lines", second)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    LOG.warning("two\n  lines")
    assert capsys.readouterr().err == "warning: two\n  lines\n"
