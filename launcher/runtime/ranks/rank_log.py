"""Keep the log of each rank in its own file, to help find out how a run ended.

The terminal shows rank 0, for people. A rank's file also has what is not printed: messages of other ranks, which are
mostly the same, and warnings of Python, torch and DeepSpeed, which only rank 0 prints. Failures are logged with their
tracebacks. No problem with the file may end the run.
"""

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system.log import LOG, Terminal

BYTES = 8 * 2**20  # of a file, which is rotated once, so a rank keeps at most twice as many


class RankFile(RotatingFileHandler):
    """Append records with their times: our own from INFO on, and all others from WARNING on."""

    def __init__(self, path: Path, size: int = BYTES) -> None:
        super().__init__(path, maxBytes=size, backupCount=1, encoding="utf-8", delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.startswith(LOG.name))

    def note(self, message: str, failed: bool = False) -> None:
        """Write a message only to this file, with the exception being handled if something `failed`."""
        level, trace = (logging.ERROR, sys.exc_info()) if failed else (logging.INFO, None)
        self.handle(LOG.makeRecord(LOG.name, level, "", 0, message, (), trace))

    def _open(self) -> TextIOWrapper:
        """Open the file at the first record, when its folder exists."""
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is the base class's
        """Ignore a full or unavailable disk. Report bugs."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        """Close the file, if possible."""
        with suppress(OSError):
            super().close()


@contextmanager
def rank_log(folder: Path, world: World) -> Iterator[None]:
    """Log this rank's messages, and those of libraries in its process, to rank_N.log in a folder."""
    file = RankFile(folder / f"rank_{world.rank:05d}.log")
    terminal = Terminal(logging.WARNING)  # for libraries: a root logger without handlers prints on all ranks
    handlers = (LOG, file), (logging.getLogger(), file), (logging.getLogger(), terminal)
    for logger, handler in handlers:
        logger.addHandler(handler)
    logging.captureWarnings(True)
    job, restart = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    where = "" if job is None else f", Slurm job {job}, restart {restart}"
    file.note(f"attempt: rank {world.rank} of {world.size} on {socket.gethostname()}, process {os.getpid()}{where}")
    try:
        yield
        file.note("end of the attempt")
    except BaseException:
        file.note("the attempt failed", failed=True)
        raise
    finally:
        logging.captureWarnings(False)
        for logger, handler in handlers:
            logger.removeHandler(handler)
        file.close()
