"""Each message reaches the right stream once, whichever rank logs it and whatever else configures logging."""

import io
import logging
import subprocess
import sys

import pytest

from plumbline.launcher.runtime.system.log import LOG, TRAINING, Terminal
from tests.conftest import REPOSITORY, environment

OF_DATA = logging.getLogger("plumbline.data.prepare")


class Gone(io.StringIO):
    """Stand in for a terminal that was closed, or a log on a full disk."""

    def write(self, _text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def log_everything() -> None:
    for logger, name in ((LOG, "launcher"), (TRAINING, "training"), (OF_DATA, "data")):
        logger.info(f"{name} goes on, 100% of {{it}}")
        logger.warning(f"{name} is odd")
        logger.error(f"{name} has ended")


def test_only_what_training_tells_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    log_everything()
    printed = capsys.readouterr()
    assert printed.out == "training goes on, 100% of {it}\n"
    assert printed.err.splitlines() == [
        "launcher goes on, 100% of {it}", "warning: launcher is odd", "error: launcher has ended",
        "warning: training is odd", "error: training has ended",
        "data goes on, 100% of {it}", "warning: data is odd", "error: data has ended",
    ]  # fmt: skip


def test_other_ranks_print_errors_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    log_everything()
    assert capsys.readouterr().err.count("\n") == 8
    monkeypatch.setenv("RANK", "3")
    log_everything()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        f"error on rank 3: {name} has ended" for name in ("launcher", "training", "data")
    ]


def test_a_handler_of_the_root_logger_prints_nothing_of_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after logging.basicConfig(), which any library may call, and logging.warning() calls by itself."""
    theirs = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(theirs)])
    logging.getLogger("another.library").error("theirs")
    log_everything()
    assert theirs.getvalue() == "theirs\n"
    assert "theirs" not in capsys.readouterr().err


def test_a_terminal_that_is_gone_ends_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Gone())
    log_everything()
    assert capsys.readouterr().err.count("\n") == 8
    monkeypatch.setattr(sys, "stderr", Gone())
    log_everything()


def test_a_message_that_cannot_be_formatted_is_a_bug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOG, "handlers", [Terminal()])  # pytest's own would raise
    LOG.warning("%d steps", "three")
    assert "Logging error" in capsys.readouterr().err


def test_the_traceback_of_a_bug_follows_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise KeyError("lost")
    except KeyError:
        LOG.exception("unexpected")
    lines = capsys.readouterr().err.splitlines()
    assert (lines[0], lines[-1]) == ("error: unexpected", "KeyError: 'lost'")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_files_do_not_get_the_numbers_of_streams_that_are_closed(closed: str) -> None:
    """As some daemons start their processes: what is printed there would end up in a file of the run."""
    program = (
        "from plumbline.launcher.runtime.system.log import TRAINING; import sys\n"
        "file = open(sys.executable, 'rb')\n"
        "TRAINING.info('said'); sys.stdout.flush(); sys.stderr.flush(); print(sys.stdin.read())\n"
        "sys.exit(0 if file.fileno() > 2 else 9)"
    )
    command = ["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment({}), stdin=subprocess.DEVNULL, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
