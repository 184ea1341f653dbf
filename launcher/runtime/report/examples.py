"""Show pictures of held-out examples that the newest checkpoint of a run solves and fails."""

from collections.abc import Iterator

import numpy as np
import torch

from plumbline.data.loader import ValidationBatches
from plumbline.data.tasks.source import TaskSource, TaskStream
from plumbline.launcher.runtime.checkpoint.store import checkpoints
from plumbline.launcher.runtime.config.load import config_in
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.models.open import LoadedModel, load_model
from plumbline.launcher.runtime.report import pictures
from plumbline.launcher.runtime.report.history import History
from plumbline.launcher.runtime.report.html import Figure, Group
from plumbline.launcher.runtime.report.pictures import Answered
from plumbline.launcher.runtime.system.log import LOG

ROWS, BATCHES = 32, 8  # of examples to score, spread evenly over the held-out ones
SHOWN = 3  # of each kind


def solved_and_failed(history: History) -> Group | None:
    """Draw the first few examples of either kind, for the first drawable task on which a complete run is evaluated.

    Return None if there is no such task, or no checkpoint is left. If something cannot be opened, warn, since the rest
    of the report does not need it.
    """
    if not history.complete:
        return None
    try:
        if not checkpoints(history.folder / CHECKPOINTS):
            return None
        data = config_in(history.folder).data
        sources = data.held_out_tasks.values()
        task = next((source.task for source in sources if source.task and source.task.name in pictures.DRAW), None)
        if task is None:
            return None
        model = load_model(history.folder, torch.device("cpu"), with_objective=True)
    except (ValueError, OSError) as error:
        LOG.warning(f"no pictures of examples: {error}")
        return None
    examples = list(answered(model, TaskSource(task).held_out, data.sequence_length))
    solved, failed = ([example for example in examples if example.solved is wanted] for wanted in (True, False))
    thoughts = ", with thoughts" if model.thinks else ""
    text = (
        f"Step {model.step}: {len(solved)} of {len(examples)} held-out examples of {task.name} are solved{thoughts}. "
        f"Each token of an answer is predicted from the true ones before it. {pictures.LEGENDS[task.name]}"
    )
    image = pictures.draw(task, [solved[:SHOWN], failed[:SHOWN]])
    return Group("Examples", text, [Figure(f"{task.name}: solved above, failed below", "", image, full=True)])


def answered(model: LoadedModel, split: TaskStream, length: int) -> Iterator[Answered]:
    """Yield held-out examples with the likeliest answers, as exact match scores them (with thoughts if it thinks)."""
    for batch in ValidationBatches(split, length, ROWS, BATCHES):
        likeliest = model.logits(batch, model.thinks).argmax(-1).cpu().numpy()
        for number, row in zip(batch["sample_index"].tolist(), likeliest, strict=True):
            tokens, labels, _ = split.read(number, length)
            asked = labels >= 0
            yield Answered(number, tokens.astype(np.int64), labels[asked].astype(np.int64), row[: len(labels)][asked])
