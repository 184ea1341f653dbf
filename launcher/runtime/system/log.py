"""Log what people read on the terminal: progress, warnings and errors, by rank.

    LOG.info("left out: ...")         left out: ...                 standard error; answers are on standard output
    LOG.warning("... passed over")    warning: ... passed over      standard error
    LOG.error("...")                  error: ...                    standard error; on rank 3: error on rank 3: ...
    TRAINING.info("saved ...")        saved ...                     standard output; training has no other answer

On a terminal, lines pass above a progress bar, and the words warning and error have a colour (not with NO_COLOR).

Progress and warnings are about the whole run: every rank may log them, and only rank 0 prints them. A fact that only
one rank knows has to be gathered before rank 0 can warn of it. Each rank prints its own errors.

`data/` and `model/` do not import the launcher. They use `logging.getLogger(__name__)`, which is a child of LOG, since
all our modules are imported as `plumbline.*`.

Once training has begun, each line has a date and time if it is not shown on a terminal, as in the log of a job
(`stamp_lines`). All messages of a rank are in its own file (`rank_log.py`).
"""

import logging
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

LOG = logging.getLogger("plumbline")
TRAINING = logging.getLogger("plumbline.training")
"""Logger for the progress of a training run."""
YELLOW, RED, PLAIN = "\033[33m", "\033[31m", "\033[0m"


class Terminal(logging.Handler):
    """Print records on the current standard streams, which workers of sweeps and tests redirect."""

    stamps = False
    """Whether lines that are not shown on a terminal have the time."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, unless only rank 0 should print it."""
        if own_rank() != "0" and record.levelno < logging.ERROR:
            return
        if getattr(record, "in_bar", False):  # the terminal shows it already
            return
        is_report = record.name == TRAINING.name and record.levelno < logging.WARNING
        try:
            stream, text = sys.stdout if is_report else sys.stderr, self.format(record)
            if self.stamps and not stream.isatty():
                now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
                text = "\n".join(f"{now} {line}" for line in text.split("\n"))
            if record.levelno >= logging.WARNING and _shows_colours(stream):
                level, colon, message = text.partition(":")
                text = f"{RED if record.levelno >= logging.ERROR else YELLOW}{level}{PLAIN}{colon}{message}"
            with _above_bars(stream):
                print(text, file=stream, flush=True)
        except Exception:
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        """Return the message, preceded by the level if it is a warning or an error."""
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text
        where = "" if own_rank() == "0" else f" on rank {own_rank()}"
        return f"{record.levelname.lower()}{where}: {text}"

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is the base class's
        """Ignore a closed terminal and a full disk, since neither may end a run. Report bugs."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _shows_colours(stream: TextIO) -> bool:
    """Return whether a stream is a terminal whose user has not disabled colours (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _above_bars(stream: TextIO) -> AbstractContextManager[None]:
    """Hide tqdm's bars on the terminal while something is printed; without tqdm there are none."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return nullcontext() if bars is None else bars.external_write_mode(file=stream)


def own_rank() -> str:
    """Return the rank of this process as set by its launcher or `read_world`, or 0 if neither has."""
    return os.environ.get("RANK", "0")


def stamp_lines() -> None:
    """Begin each line that is not shown on a terminal with date and time from now on."""
    Terminal.stamps = True


def _open_closed_streams() -> None:
    """Replace standard streams that are closed, as under some daemons, by the null device.

    Otherwise the next files that are opened would get their numbers, and what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor == number:
                setattr(sys, name, os.fdopen(number, "w" if number else "r"))
            else:  # something has taken the number by now
                os.close(descriptor)


_open_closed_streams()
LOG.addHandler(Terminal())
LOG.setLevel(logging.INFO)
LOG.propagate = False  # else libraries with a root handler would print everything twice
