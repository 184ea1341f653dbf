"""Rehearse the start of a run up to its model: show where it would start from, and the text of its first batch."""

from contextlib import suppress
from itertools import islice
from pathlib import Path

from plumbline.data.skipped import SkippedData
from plumbline.launcher.runtime.checkpoint import branch, resume
from plumbline.launcher.runtime.checkpoint.store import step_of
from plumbline.launcher.runtime.config.plan import last_step
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.inspection.samples import decoders, of_batch
from plumbline.launcher.runtime.inspection.seen import places
from plumbline.launcher.runtime.inspection.text import sample_lines
from plumbline.launcher.runtime.ranks.collectives import from_main
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import Inputs, check_agreement
from plumbline.launcher.runtime.run.lock import RunLockedError, owner_of, refusal
from plumbline.launcher.runtime.system.log import TRAINING

SHOWN = 4
"""Samples of the first batch that are shown."""


def rehearse(config: Config, inputs: Inputs, world: World) -> None:
    """Run the checks of `train` that write nothing, read this rank's first batch, and show rank 0's. Collective.

    No model is built, and checkpoints on the nodes (checkpoint.local) are not looked for.

    Raises:
        ValueError: the run would not start.
    """
    check_agreement(config, inputs, world)
    from_main(lambda: _refuse_if_held(config.run.folder), world)
    found = resume.find(config.run.folder / CHECKPOINTS, world)
    if found is not None:
        resume.check_saved(found, config, inputs.fingerprints)
        TRAINING.info(f"would resume after step {step_of(found)} from {found}")
        resume.tell_changes(found, config)
    else:
        found = branch.start(config, world)
    step = 0 if found is None else step_of(found)
    if step < last_step(config):
        _show_batch(inputs, step, resume.skipped_data(config.run.folder, found))
    from_main(lambda: None, world)  # every rank has read its share
    TRAINING.info("dry run: nothing was trained and nothing written")


def _refuse_if_held(folder: Path) -> None:
    with suppress(OSError):  # a file system without locks
        if (owner := owner_of(folder)) is not None:
            raise RunLockedError(refusal(folder, owner))


def _show_batch(inputs: Inputs, step: int, skipped: SkippedData) -> None:
    """Read the batch of the step after `step`, and show rank 0's first samples."""
    batches = inputs.train.micro_batches(skipped.data_step(step))
    decoder_of = decoders(inputs.train.corpora)
    samples = (sample for batch in batches for sample in of_batch(batch, places(inputs.train, batch)))
    mine = sum(len(batch["sample_index"]) for batch in batches)
    TRAINING.info(f"step {step + 1} would train on these; {min(SHOWN, mine)} of the {mine} samples of rank 0:")
    for sample in islice(samples, SHOWN):
        TRAINING.info("\n".join(sample_lines(sample, decoder_of[sample.source], full=False)).replace(" (--full)", ""))
