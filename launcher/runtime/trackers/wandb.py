"""Track by Weights & Biases: one wandb run for each run folder, online or, with WANDB_MODE=offline, on disk.

The environment variables of wandb have their usual effect: WANDB_ENTITY, WANDB_BASE_URL, WANDB_TAGS, WANDB_RUN_GROUP
and so on.
"""

import secrets
from collections.abc import Mapping

from plumbline.launcher.runtime.trackers.kind import TrackedRun, Tracker


class WeightsAndBiases(Tracker):
    """Log rows to a run of wandb, which each attempt resumes by its id.

    The step is a column of its own and the x axis. wandb's internal step counts rows and may not go back, while the
    evaluation of a step can come an attempt after the step; and `wandb sync` appends offline attempts to each other.
    """

    package = "wandb"

    def __init__(self, run: TrackedRun, run_id: str | None, step: int) -> None:  # noqa: ARG002 - it cannot forget
        import wandb

        self.run_id = run_id or secrets.token_hex(4)
        self._run = wandb.init(
            project=run.project,
            id=self.run_id,
            name=run.folder.name,
            dir=str(run.folder),
            config=dict(run.config),
            resume="allow",
            allow_val_change=True,
            reinit="create_new",  # a worker of a sweep may still have an unfinished run open
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        files = f"{run.folder / 'wandb'}/offline-run-*-{self.run_id}"
        self.where = f"offline; send it by: wandb sync {files}" if self._run.offline else str(self._run.url)

    @classmethod
    def check(cls) -> None:
        """Refuse to start online without a login, for which wandb would ask on the terminal."""
        import wandb

        mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
        if mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
            raise ValueError(
                "metrics.trackers = wandb: nobody is logged in: run `wandb login`, set WANDB_API_KEY, or set "
                "WANDB_MODE=offline"
            )

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Log a row."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Wait until everything is uploaded, or on disk."""
        self._run.finish()
