"""Carry out a guard's request: choose the checkpoint to go back to, and skip the data that broke the run.

The order is such that a kill between any two actions loses nothing but time: checkpoints of steps that are not trusted
are deleted, interventions.jsonl gets its line, and then the caller resumes from the checkpoint, as a new start would.
"""

from datetime import datetime
from pathlib import Path

from plumbline.data.skipped import SkippedData
from plumbline.launcher.runtime.checkpoint import resume
from plumbline.launcher.runtime.checkpoint.local import LocalCheckpoints
from plumbline.launcher.runtime.checkpoint.publishing import remove_after
from plumbline.launcher.runtime.checkpoint.store import Heartbeat, ending_if_unwritable, step_of
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.plan import RunPlan
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.ranks.collectives import from_main
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import Inputs
from plumbline.launcher.runtime.run.interventions import (
    INTERVENTIONS,
    Intervention,
    read_interventions,
    skipped_in,
    write_interventions,
)
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.train.guards.guard import RollBack, TrainingError
from plumbline.launcher.runtime.train.guards.non_finite import REMEDY


class Rollbacks:
    """Go back to checkpoints, and record it in the run folder. All ranks create one together, and call its methods.

    Args:
        config: the run.
        plan: what it will do.
        inputs: its data.
        world: this process among all; the process group must be up.
        local: its checkpoints on the nodes.

    Raises:
        ConfigError: interventions.jsonl skips data that this run cannot skip.
    """

    def __init__(
        self, config: Config, plan: RunPlan, inputs: Inputs, world: World, local: LocalCheckpoints | None
    ) -> None:
        self._config, self._plan, self._inputs, self._world, self._local = config, plan, inputs, world, local
        self._folder, self._most = config.run.folder, config.guards.max_rollbacks
        self.made = from_main(lambda: read_interventions(self._folder), world)
        if self.skipped.ranges and (problem := self._cannot_skip(self.skipped)):
            raise ConfigError(f"{self._folder / INTERVENTIONS}: {problem}; remove the file to train on all data")

    @property
    def skipped(self) -> SkippedData:
        """Return the data that the run skips."""
        return skipped_in(self.made)

    def go_back(self, asked: RollBack, skipped: SkippedData, heartbeat: Heartbeat) -> Path:
        """Delete newer checkpoints and return the one to resume from. Collective; no checkpoint may be being written.

        Args:
            asked: the guard's request.
            skipped: the data skipped so far.
            heartbeat: called for each part of a checkpoint that was read.

        Raises:
            TrainingError: the run cannot go back.
            UnsavedError: the run folder cannot be written.
        """
        left_out = skipped.data_step(asked.first - 1), skipped.data_step(asked.last - 1) + 1
        problem, root = self._refusal(skipped | SkippedData((left_out,))), self._folder / CHECKPOINTS
        found = None if problem else self._find(root, asked.first, heartbeat)
        if found is None:
            problem = problem or f"there is no whole checkpoint of a step before {asked.first}"
            raise TrainingError(
                f"step {asked.last}: {asked.message}, and the run does not go back: {problem}. {REMEDY}"
            )
        step = step_of(found)
        made = Intervention(
            time=datetime.now().astimezone().isoformat(timespec="seconds"),
            guard=asked.guard,
            message=asked.message,
            first_step=asked.first,
            last_step=asked.last,
            back_to=step,
            skipped=left_out,
        )
        self.made.append(made)
        if self._local is not None:
            self._local.tidy(found)

        def note() -> None:
            remove_after(root, step)
            write_interventions(self._folder, self.made)

        with ending_if_unwritable(self._folder):
            from_main(note, self._world)
        LOG.warning(f"{made} ({len(self.made)} of guards.max_rollbacks = {self._most})")
        return found

    def _find(self, root: Path, first: int, heartbeat: Heartbeat) -> Path | None:
        """Return the newest whole checkpoint before step `first`, including those of a branch's parent. Collective."""
        its = self._config.schedule.branch
        found = resume.find(root, self._world, self._local, before=first, heartbeat=heartbeat)
        if found is not None or its is None or its.first_step >= first:
            return found
        parents = Path(its.checkpoint)
        return None if resume.damage(parents, self._world, heartbeat) else parents

    def _refusal(self, skipped: SkippedData) -> str | None:
        """Return why the run may not go back and skip some data, or None if it may."""
        if len(self.made) >= self._most:
            return f"guards.max_rollbacks = {self._most}, and it went back {len(self.made)} time(s)"
        return self._cannot_skip(skipped)

    def _cannot_skip(self, skipped: SkippedData) -> str | None:
        """Return why the run cannot skip some data, or None if it can.

        A step then takes the data of a later one, which has another size during the warm-up of the batch size.
        """
        warmed_up = self._plan.batch_plan.stages[-1].first_step
        if skipped.ranges[0][0] < warmed_up:
            return f"no data is left out before step {warmed_up}, where the warm-up of the batch size ends"
        try:
            self._inputs.train.check_epochs(skipped.data_step(self._plan.total_steps - 1) + 1)
        except ValueError as error:
            return f"without data of {len(skipped.ranges)} window(s) there is too little: {error}"
        return None
