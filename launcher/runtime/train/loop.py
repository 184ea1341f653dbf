"""Take training steps until the run is complete or asked to stop.

"Step s" is the state after s optimizer steps. Each iteration of the loop starts at some step, evaluates if that is due,
and ends the loop if it was the last; then it takes the next step and saves it if that is due. The results of a step are
read, logged and shown to the guards while the next one is in progress, or before its weights are used. The order of
data, the schedule, dropout and evaluation are pure functions of the step, so a run that was killed and resumed writes
the same numbers, to the last bit, as one that was never interrupted. A guard may send it back to a checkpoint.
"""

import math
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from plumbline.launcher.runtime.checkpoint import resume
from plumbline.launcher.runtime.checkpoint import store as checkpoint
from plumbline.launcher.runtime.checkpoint.local import LocalCheckpoints
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.engine.base import Engine, UpdateObserver
from plumbline.launcher.runtime.engine.build import compiles
from plumbline.launcher.runtime.engine.step_result import StepResult, StepUnderWay
from plumbline.launcher.runtime.ranks.collectives import from_main, main_works
from plumbline.launcher.runtime.run.inputs import Inputs
from plumbline.launcher.runtime.run.ledger import Bucket
from plumbline.launcher.runtime.run.metrics import MetricsLog
from plumbline.launcher.runtime.run.status import RunStatus
from plumbline.launcher.runtime.run.status_file import RESULT
from plumbline.launcher.runtime.run.tracking import open_feeds
from plumbline.launcher.runtime.scoring.scores import worse_than_guessing
from plumbline.launcher.runtime.system.files import write_json
from plumbline.launcher.runtime.system.log import LOG, TRAINING
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.launcher.runtime.train import garbage
from plumbline.launcher.runtime.train.chain import ChainWriter
from plumbline.launcher.runtime.train.diagnostics import StepObserver
from plumbline.launcher.runtime.train.evaluation import Evaluation, StoppedError
from plumbline.launcher.runtime.train.guards import engine_guards, make_guards
from plumbline.launcher.runtime.train.guards.guard import RollBack
from plumbline.launcher.runtime.train.profile import StepProfiler
from plumbline.launcher.runtime.train.rollback import Rollbacks
from plumbline.launcher.runtime.train.samples import write_samples
from plumbline.launcher.runtime.train.saving import Saver
from plumbline.launcher.runtime.train.speed import SpeedMeter
from plumbline.launcher.runtime.train.step_lines import MadeStep, StepLines
from plumbline.launcher.runtime.train.stragglers import Stragglers
from plumbline.launcher.runtime.train.watchdog import Watchdog
from plumbline.model.objectives.objective import Batch


class Trainer:
    """Train with an engine from the current step on, evaluating, logging and saving when each is due.

    Args:
        engine: the engine, which knows the configuration and this process among all.
        inputs: the run's training and held-out batches.
        stop: set when the run is asked to stop.
        local: checkpoints on the nodes, if `checkpoint.local` enables them.
        status: status of the run.
        watchdog: watchdog of this process.
    """

    def __init__(
        self,
        engine: Engine,
        inputs: Inputs,
        stop: StopRequest,
        local: LocalCheckpoints | None,
        status: RunStatus,
        watchdog: Watchdog,
    ) -> None:
        config, world = engine.config, engine.world
        self.config, self.plan, self.inputs, self.world, self.engine = config, engine.plan, inputs, world, engine
        self.stop, self.status, self.watchdog = stop, status, watchdog
        self.evaluation = Evaluation(engine, inputs, stop, watchdog.beat)
        self.rollbacks = Rollbacks(config, self.plan, inputs, world, local)
        self.state = checkpoint.TrainState(0, 0, 0, inputs.fingerprints, self.rollbacks.skipped)
        self.local = local
        self.guards = make_guards(config.guards, self.plan, *engine_guards(config.guards, engine))
        self.stragglers = Stragglers(world)
        self.log: MetricsLog | None = None
        self.chain = ChainWriter(config.run.folder, world)
        self.saver = Saver(engine, local, self.guards, self.chain, status, watchdog.beat)
        self._meter = SpeedMeter(config, world)
        self._lines = StepLines(engine.model.objective.reports, self._meter)
        self._unread: MadeStep | None = None
        self._stopping = False

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        state = resume.load(self.engine, folder, partial(self.watchdog.beat, "reading the checkpoint"))
        skipped = state.skipped | self.rollbacks.skipped
        # From here on other sources may be read than the checkpoint knows
        self.state = replace(state, corpora=self.inputs.fingerprints, skipped=skipped)
        self.guards.restore(state.guards)
        if folder.parent == self.config.run.folder / CHECKPOINTS:  # neither on the nodes nor of a branch's parent
            self.saver.saved_step = state.step
        resume.tell(self.engine, folder, state)

    def run(self) -> bool:
        """Train, going back to a checkpoint when a guard asks for it. Returns whether the last step was evaluated."""
        from_main(self._open_log, self.world)
        self.chain.open(self.state.step)
        self.status.begin(self.state.step, self.state.tokens, self.plan.total_steps, self.plan.total_tokens)
        while True:
            try:
                return self._train()
            except RollBack as request:
                asked = request.with_traceback(None)  # its frames hold batches
            self._go_back(asked)

    def _go_back(self, asked: RollBack) -> None:
        """Go back to a checkpoint, and restore the log and the ledger of time to it."""
        self.status.enter("checkpoint")
        heartbeat = partial(self.watchdog.beat, "going back to a checkpoint")
        heartbeat()
        self._unread = None
        self.saver.finish()
        self.saver.saved_step = None  # only now: what was still being written may be deleted
        folder = self.rollbacks.go_back(asked, self.state.skipped, heartbeat)
        if self.log is not None:
            self.log.close()
        self.resume(folder)
        with checkpoint.ending_if_unwritable(self.config.run.folder):
            from_main(self._open_log, self.world)
        self.chain.open(self.state.step)
        self.status.went_back(self.state.step, self.state.tokens)

    def _train(self) -> bool:
        """Train from the current step to the end, or until asked to stop. Returns whether training is complete."""
        config, plan, total = self.config, self.plan, self.plan.total_steps
        # A complete run has a checkpoint in its folder, and a branch does not depend on what its parent deletes
        ends = (total, None if config.schedule.branch is None else config.schedule.branch.first_step)
        if self.state.step in ends and self.saver.saved_step is None:
            self.saver.save(self.state)
        meter = self._meter
        meter.restart(self.state.step)
        profiler = StepProfiler(config, self.world)
        bucket: Bucket = "compile" if compiles(config, self.world.device) else "steps"
        data = self.inputs.train.iterate(self.state.step, total, self.state.skipped)
        with garbage.left_alone(), profiler, closing(data) as batches:
            while True:
                if self._evaluation_due():
                    self._read_last_step()
                    finished = self._evaluate()
                    if not finished or self.state.step == total:
                        self.status.enter("shutdown")
                        break
                    meter.restart(self.state.step)

                self.watchdog.beat(f"making step {self.state.step + 1}")
                lr = plan.lr_after(self.state.tokens)
                self.status.enter("data_wait")
                profiler.before_step(self.state.step)
                with record_function("step: data"):
                    micro_batches = self.stragglers.wait_for(batches)
                self.status.enter(bucket)
                bucket = "steps"
                observer = self._observer(micro_batches[0])
                self.guards.before_step(self.state.step + 1, len(micro_batches))
                observers: list[UpdateObserver] = [self.guards, *([] if observer is None else [observer])]
                under_way = self.engine.train_step(
                    micro_batches, self.state.step, lr, observers, lambda: bool(self.stop)
                )
                self.chain.feed(micro_batches)
                with record_function("step: read the one before"):
                    self._read_last_step()  # while the device makes this one
                self._advance(under_way, lr)
                profiler.after_step(self.state.step)
                if observer is not None:
                    self._log_beside(observer.record())
                self._log_beside(self.stragglers.after_step(self.state.step))
                self._save_what_is_due()
                if self._stopping:
                    self.status.enter("shutdown")
                    return False

        self.status.enter("checkpoint")
        self.saver.finish()
        if self.saver.saved_step != self.state.step:  # asked to stop during an evaluation, before this step was saved
            self.saver.save(self.state)
        return finished

    def _open_log(self) -> None:
        config, total = self.config, self.plan.total_steps
        self.log = MetricsLog(
            config.run.folder,
            self.state.step,
            total,
            partial(open_feeds, config),
            self.plan.batch_plan.tokens_before,
            config.train.log_interval,
            self._evaluation_due(),
        )

    def give_up(self) -> None:
        """Finish writing what was saved, and close the engine, after a TrainingError, which all ranks raise."""
        self.status.enter("checkpoint")
        self.saver.writer.finish()
        self.chain.catch_up(self.saver.writer.written)
        self.engine.close()

    def close(self) -> None:
        """Flush the logs and end the watch, however training ended."""
        self.status.enter("shutdown")
        self.watchdog.stop()
        self.chain.close(self.saver.writer.written)
        if self.log is not None:
            self.log.close()

    def clean_up(self) -> None:
        """Close what writes checkpoints and the engine, after an orderly end; delete checkpoints on the nodes."""
        self.saver.writer.close()
        # Not after any error: this waits for the device, and a sum that others do not join never ends
        self.engine.close()
        if self.local is not None:
            self.local.clear()  # the run folder has the last step by now

    def _advance(self, under_way: StepUnderWay, lr: float) -> None:
        """Move to the next step, whose results are not known yet."""
        batches, step = self.plan.batch_plan, self.state.step + 1
        samples, tokens = batches.samples_before(step), batches.tokens_before(step)
        self.state = replace(self.state, step=step, samples=samples, tokens=tokens)
        self.status.reached(step, tokens)
        self._unread = MadeStep(step, tokens, lr, self.status.ledger.read(), under_way)
        garbage.collect(step)

    def _read_last_step(self) -> None:
        """Read the results of the last step, if they are unread: show them to the guards, log them, check for a stop.

        They are read once the next step is in progress, and before anything is evaluated, saved or logged after it.
        """
        if self._unread is None:
            return
        made, self._unread = self._unread, None
        result = made.under_way.result
        self._stopping = self._stopping or result.flagged
        self.chain.after_step(made.step, result)
        self.guards.after_step(made.step, result)
        if made.step % self.config.train.log_interval == 0 or made.step == self.plan.total_steps:
            self._log_step(made, result)
        self._log_beside(self.guards.found(made.step))

    def _log_step(self, made: MadeStep, result: StepResult) -> None:
        record = self._lines.line(made, result)
        self.stop.step_seconds = self._meter.step_seconds
        if (seconds := self.saver.writer.seconds) is not None:
            self.stop.save_seconds = max(self.stop.save_seconds, seconds)
            self.status.saved(seconds)
        if self.log is not None:
            self.log.write(record)
            self.log.progress(record)
        self.status.logged(record)
        worse = worse_than_guessing(record["loss"], self.config.model.vocab_size)
        if worse and made.step == self.plan.total_steps:
            LOG.warning(worse)

    def _log_beside(self, found: dict[str, Any]) -> None:
        """Log other values of the last step, in a line after its own."""
        if found:
            self._read_last_step()
            if self.log is not None:
                self.log.write({"step": self.state.step, "tokens": self.state.tokens, **found})

    def _observer(self, batch: Batch) -> StepObserver | None:
        """Return an observer for the next step, given its first micro-batch, or None if none is due."""
        settings = self.config.metrics
        if settings.diagnostics_interval is None or (self.state.step + 1) % settings.diagnostics_interval:
            return None
        return StepObserver(self.engine, batch, settings.diagnostics_tokens)

    def _evaluation_due(self) -> bool:
        step, interval = self.state.step, self.config.train.eval_interval
        return step == self.plan.total_steps or (interval is not None and step > 0 and step % interval == 0)

    def _evaluate(self) -> bool:
        """Evaluate on the held-out data of every corpus and task. Returns False if asked to stop meanwhile."""
        step = self.state.step
        garbage.collect()
        self.status.enter("evaluation")
        try:
            scores = self.evaluation.run(lambda message: TRAINING.info(f"step {step}: {message}"))
        except StoppedError:
            return False
        record = {"step": step, "tokens": self.state.tokens, **scores}
        if self.log is not None:
            self.log.write(record)
        self.guards.after_evaluation(record)
        if step == self.plan.total_steps:
            file = self.config.run.folder / RESULT
            with checkpoint.ending_if_unwritable(file):  # it marks the run as complete
                from_main(lambda: write_json(file, record), self.world)
            if self.config.train.sample_prompts:
                self._sample()
        return True

    def _sample(self) -> None:
        """Have rank 0 continue the prompts, within train.hang_minutes, after which waiting ranks would be stopped."""
        self.watchdog.suspend()
        end = time.monotonic() + 60 * (self.config.train.hang_minutes or math.inf)

        def is_enough() -> bool:
            return bool(self.stop) or time.monotonic() > end

        if not main_works(lambda: write_samples(self.config), self.world, is_enough):
            LOG.warning("the samples of train.sample_prompts were given up: the run is complete without them")
        self.watchdog.beat("ending")

    def _save_what_is_due(self) -> None:
        """Save the current step, to the run folder or on the nodes, if that is due or the run is to stop."""
        if self._stopping or self.saver.is_due(self.state.step):
            self._read_last_step()  # after this a guard may distrust the weights, or a stop be requested
            if self.saver.save_what_is_due(self.state, self._stopping):
                self._meter.restart(self.state.step)
