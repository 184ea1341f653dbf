"""Track by TensorBoard: event files in the run folder, `tensorboard --logdir runs`."""

from collections.abc import Mapping
from typing import Any

from plumbline.launcher.runtime.trackers.kind import TrackedRun, Tracker


class TensorBoard(Tracker):
    """Write an event file for each attempt; TensorBoard discards steps of earlier attempts from its start on."""

    package = "tensorboard"
    rewinds = True

    def __init__(self, run: TrackedRun, run_id: str | None, step: int) -> None:
        from plumbline.launcher.runtime.trackers.event_file import EventFile

        self.run_id, self.where = run_id or run.folder.name, None
        self._file = EventFile(run.folder / "tensorboard", step)
        self._has_layout = False

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add points; before the first diagnostics, define charts that show a quantity of all blocks together."""
        if not self._has_layout and (layout := _charts(values)):
            self._file.add_layout(layout)
            self._has_layout = True
        self._file.add(step, values)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _charts(values: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Return category -> chart -> its lines, for quantities that each block has: keys KIND/QUANTITY/BLOCK."""
    charts: dict[str, dict[str, Any]] = {}
    for key in sorted(values):
        kind, *rest = key.split("/")
        if len(rest) > 1 and kind != "eval":
            charts.setdefault(kind, {})[f"{kind}/{rest[0]}"] = ["Multiline", [f"{kind}/{rest[0]}/"]]
    return charts
