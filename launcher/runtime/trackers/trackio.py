"""Track by Trackio: on this machine (TRACKIO_DIR), or on the server of TRACKIO_SPACE_ID or TRACKIO_SERVER_URL."""

import secrets
from collections.abc import Mapping

from plumbline.launcher.runtime.trackers.kind import TrackedRun, Tracker


class Trackio(Tracker):
    """Log rows to a run of Trackio, which each attempt resumes by its unique name."""

    package = "trackio"

    def __init__(self, run: TrackedRun, run_id: str | None, step: int) -> None:  # noqa: ARG002 - it cannot forget
        import trackio

        self.run_id = run_id or f"{run.folder.name}-{secrets.token_hex(3)}"
        self._run = trackio.init(
            project=run.project, name=self.run_id, config=dict(run.config), resume="allow", embed=False
        )
        self.where = f"run {self.run_id}; see it by: trackio show --project {run.project}"

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Log a row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Wait until everything is written, for 30 seconds at most."""
        self._run.finish()
