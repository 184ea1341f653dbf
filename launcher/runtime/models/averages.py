"""What `--average` means: which weights of a run are opened.

(nothing)           those of the checkpoint
ema                 its exponential moving average, see moving_average.py
last:5              the uniform mean of it and the four checkpoints before it: latest weight averaging, LAWA
                    (arXiv 2209.14981)
steps:800,900,1000  the uniform mean of these checkpoints of the run
"""

import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from plumbline.launcher.runtime.checkpoint import store as checkpoint
from plumbline.launcher.runtime.checkpoint.store import CheckpointError
from plumbline.launcher.runtime.checkpoint.weights import mean_weights, read_weights
from plumbline.launcher.runtime.config.identity import differences
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config


@dataclass(frozen=True)
class OpenedWeights:
    """Weights and where they are from."""

    weights: dict[str, Tensor]
    """fp32, under their Hugging Face names."""
    folder: Path
    """The newest checkpoint that takes part."""
    config: Config
    """Its configuration."""
    average: str | None
    """Which average they are, in words; None for the weights of one step."""


def open_weights(anchor: Path, average: str | None) -> OpenedWeights:
    """The weights that `average` means for a run opened at the checkpoint `anchor`; what is read is verified first.

    Raises:
        CheckpointError: `anchor` is damaged.
        ValueError: `average` cannot be read; the run has no such average or checkpoints; another checkpoint that takes
            part is damaged or of another model.
    """
    folders = _window(anchor, average)
    files = []
    for folder in folders:
        try:
            files.append(_verified(folder, checkpoint.EMA_WEIGHTS if average == "ema" else checkpoint.WEIGHTS))
        except CheckpointError as error:
            if folder == anchor:
                raise
            raise ValueError(f"--average {average}: {error}; leave it out with steps:A,B,...") from error
    config, *others = (load_config(folder / "config.yaml", []) for folder in folders)
    for folder, other in zip(folders[1:], others, strict=True):
        if changes := differences(config, other, ["model"]):
            raise ValueError(f"--average {average}: {folder} is of another model: {'; '.join(changes)}")
    if len(files) > 1:
        names = ", ".join(folder.name for folder in reversed(folders))
        return OpenedWeights(mean_weights(files), folders[0], config, f"mean of {names}")
    if not files[0]:
        raise ValueError(f"--average ema: {anchor} has no moving average; train with train.ema_half_life_tokens")
    words = None
    if average == "ema":
        words = f"exponential moving average, half-life {config.train.ema_half_life_tokens:,} tokens"
    return OpenedWeights(read_weights(files[0]), folders[0], config, words)


def _window(anchor: Path, average: str | None) -> list[Path]:
    """The checkpoints that take part when a run is opened at the checkpoint `anchor`, newest first.

    Raises:
        CheckpointError: the manifest of `anchor` is damaged.
        ValueError: `average` cannot be read, or the run does not have these checkpoints.
    """
    if average is None or average == "ema":
        return [anchor]
    if not re.fullmatch(r"last:[1-9]\d*|steps:\d+(,\d+)*", average):
        raise ValueError(f"--average {average}: unknown; known: ema, last:5, steps:800,900,1000 (numbers are examples)")
    kind, _, numbers = average.partition(":")
    root = anchor.resolve().parent
    there = {int(folder.name[5:]): folder for folder in checkpoint.checkpoints(root)}
    if kind == "steps":
        steps = sorted({int(number) for number in numbers.split(",")}, reverse=True)
        missing = [step for step in steps if step not in there]
        if missing:
            raise ValueError(
                f"--average {average}: {root} has no checkpoint of step {missing[0]}; it has {sorted(there)}"
            )
        return [there[step] for step in steps]
    newest = checkpoint.read_manifest(anchor)["step"]
    earlier = [there[step] for step in there if step < newest]
    if len(earlier) + 1 < int(numbers):
        raise ValueError(
            f"--average {average}: {root} holds {len(earlier) + 1} checkpoint(s) up to step {newest}; "
            "average fewer, or train with a larger checkpoint.keep_last (or with checkpoint.keep_every)"
        )
    return [anchor, *earlier[: int(numbers) - 1]]


def _verified(folder: Path, prefix: str) -> list[Path]:
    """The weight files of a checkpoint, once they and its configuration are found undamaged."""
    names = sorted(name for name in checkpoint.read_manifest(folder)["files"] if name.startswith(f"{prefix}-"))
    problems = checkpoint.verify(folder, only=[*names, "config.yaml"])
    if problems:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(problems)}")
    return [folder / name for name in names]
