"""Write curves for TensorBoard, with one file per attempt that sorts after those of earlier attempts.

TensorBoard reads the files of a folder in the order of their names, and an attempt that starts at step s discards later
steps read before. Names begin with the time. torch's SummaryWriter uses the clock's, so with a clock that is behind or
was set back, the new file comes first and the old one overrides the repeated steps. Here times never go back within a
folder, whatever the clock says.
"""

import mmap
import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import custom_scalars, scalar

NUMBER = re.compile(r"\.tfevents\.(\d+)")
LENGTH, CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")
BEFORE = LENGTH.size + CHECKSUM.size  # bytes of a record before its data, which another checksum follows


class EventFile:
    """Add curves to a folder, from the step at which an attempt starts.

    Args:
        folder: folder of the event files, including those of earlier attempts.
        step: first step that is written; TensorBoard ignores this and later steps in earlier files.
    """

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = max(folder.glob("*tfevents*"), key=lambda file: file.name, default=None)
        self._time = 0.0 if earlier is None else _last_time(earlier)
        number = max(int(self._now()), 0 if earlier is None else _number(earlier) + 1)
        name = f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter((folder / name).open("wb"))
        self._add(file_version="brain.Event:2")
        self._add(step=step, session_log=SessionLog(status=SessionLog.START))
        self._records.flush()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each of some curves, on disk when this returns."""
        for name, value in values.items():
            self._add(step=step, summary=scalar(name, value))
        self._records.flush()

    def add_layout(self, layout: Mapping[str, Any]) -> None:
        """Define which curves are drawn together: category -> chart -> kind and names, as for SummaryWriter."""
        self._add(summary=custom_scalars(layout))

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _add(self, **fields: Any) -> None:
        self._records.write(Event(wall_time=self._now(), **fields).SerializeToString())

    def _now(self) -> float:
        """Return the time, or that of the previous event if the clock is behind it."""
        self._time = max(self._time, time.time())
        return self._time


def _number(file: Path) -> int:
    """Return the number by which an event file is sorted."""
    found = NUMBER.search(file.name)
    return 0 if found is None else int(found[1])


def _last_time(file: Path) -> float:
    """Return the time of the last event of a file, found from record to record; 0 if it is damaged or there is none."""
    if file.stat().st_size == 0:
        return 0.0
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        place, after = slice(0), 0
        while after + BEFORE <= len(data):
            (length,) = LENGTH.unpack_from(data, after)
            first, after = after + BEFORE, after + BEFORE + length + CHECKSUM.size
            if not length or after > len(data):  # truncated by a kill, or never written
                break
            place = slice(first, first + length)
        event, checksum = data[place], data[place.stop : place.stop + CHECKSUM.size]
    is_whole = event and CHECKSUM.unpack(checksum) == (masked_crc32c(event),)
    return float(Event.FromString(event).wall_time) if is_whole else 0.0
