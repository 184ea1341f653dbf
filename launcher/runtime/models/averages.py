"""Open the weights of a run that `--average` selects.

(nothing)           those of the checkpoint
ema                 its exponential moving average, see moving_average.py
last:5              the uniform mean of it and the four checkpoints before it: latest weight averaging, LAWA
                    (arXiv 2209.14981)
steps:800,900,1000  the uniform mean of these checkpoints of the run
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from plumbline.data.damage import reading
from plumbline.launcher.runtime.checkpoint import store as checkpoint
from plumbline.launcher.runtime.checkpoint import tensors
from plumbline.launcher.runtime.checkpoint.saved_tensors import FOLDER
from plumbline.launcher.runtime.checkpoint.store import CheckpointError
from plumbline.launcher.runtime.config.identity import differences
from plumbline.launcher.runtime.config.load import config_in
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.config.schema import Config

Check = Callable[[Path], list[str]]  # what is wrong with a checkpoint


@dataclass(frozen=True)
class OpenedWeights:
    """Hold weights and their source."""

    weights: dict[str, Tensor]
    """fp32, under their Hugging Face names."""
    folder: Path
    """Newest checkpoint used."""
    config: Config
    """Configuration of the run in that checkpoint."""
    average: str | None
    """Which average the weights are, in words, or None for the weights of one step."""


def open_weights(path: Path, average: str | None) -> OpenedWeights:
    """Return the weights that `average` selects for a run folder, or a run opened at one of its checkpoints.

    Files are verified before they are read; in a run folder, damaged checkpoints are skipped.

    Raises:
        CheckpointError: the checkpoint `path` is damaged.
        ValueError: `average` cannot be read; the run has no such average or checkpoints; another checkpoint that takes
            part is damaged or of another model.
    """
    needed = (f"{FOLDER}/", checkpoint.CONFIG)
    folders = _window(
        path, average, partial(checkpoint.problems, contents=True, only=lambda name: name.startswith(needed))
    )
    config, *others = (_configuration(folder) for folder in folders)
    for folder, other in zip(folders[1:], others, strict=True):
        if changes := differences(config, other, ["model"]):
            raise ValueError(f"--average {average}: {folder} is of another model: {'; '.join(changes)}")
    if len(folders) > 1:
        names = ", ".join(folder.name for folder in reversed(folders))
        with reading(f"--average {average}"):
            return OpenedWeights(tensors.mean_model(folders), folders[0], config, f"mean of {names}")
    if average != "ema":
        with reading(folders[0]):
            return OpenedWeights(tensors.read_model(folders[0]), folders[0], config, None)
    if config.train.ema_half_life_tokens is None:
        raise ValueError(f"--average ema: {folders[0]} has no moving average; train with train.ema_half_life_tokens")
    words = f"exponential moving average, half-life {config.train.ema_half_life_tokens:,} tokens"
    with reading(folders[0]):
        return OpenedWeights(tensors.read_model(folders[0], tensors.AVERAGE), folders[0], config, words)


def _configuration(folder: Path) -> Config:
    """Return the configuration in a checkpoint, in which all values from corpora or other models are resolved."""
    with reading(folder):
        return config_in(folder)


def check_average(average: str | None) -> None:
    """Refuse what names no average.

    Raises:
        ValueError: says what is known.
    """
    if average is not None and not re.fullmatch(r"ema|last:[1-9]\d*|steps:\d+(,\d+)*", average):
        raise ValueError(f"--average {average}: unknown; known: ema, last:5, steps:800,900,1000 (numbers are examples)")


def _window(path: Path, average: str | None, check: Check) -> list[Path]:
    """Return the checkpoints to use, newest first, in none of which `check` finds a problem.

    Raises:
        CheckpointError: the checkpoint `path` is damaged.
        ValueError: `average` cannot be read, the run does not have these checkpoints, or one of them is damaged.
    """
    check_average(average)
    kind, _, numbers = (average or "").partition(":")
    if kind == "steps":
        return _whole(_at_steps(path, average, numbers), average, check)
    anchor = checkpoint_at(path, check)
    if kind != "last":
        return [anchor]
    newest, root = checkpoint.read_manifest(anchor)["step"], anchor.resolve().parent
    earlier = [folder for folder in checkpoint.checkpoints(root) if checkpoint.step_of(folder) < newest]
    if len(earlier) + 1 < int(numbers):
        raise ValueError(
            f"--average {average}: {root} holds {len(earlier) + 1} checkpoint(s) up to step {newest}; "
            "average fewer, or train with a larger checkpoint.keep_last (or with checkpoint.keep_every)"
        )
    return [anchor, *_whole(earlier[: int(numbers) - 1], average, check)]


def checkpoint_at(path: Path, check: Check, warn: bool = True) -> Path:
    """Return the checkpoint of a path: itself, or the newest whole one of a run folder; warn of those it skips.

    Raises:
        CheckpointError: the checkpoint `path` is damaged.
        ValueError: the run folder holds none that is whole.
    """
    if (path / checkpoint.MANIFEST).is_file():
        if problems := check(path):
            raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}")
        return path
    root = path / CHECKPOINTS
    folders = checkpoint.checkpoints(root)
    newest = checkpoint.newest_whole(folders, check, warn)
    if newest is None:
        if not warn:
            checkpoint.newest_whole(folders, check)  # which says why
        raise ValueError(
            f"{root}: holds no whole checkpoint; the first is written at checkpoint.interval or at the end"
        )
    return newest


def _at_steps(path: Path, average: str | None, numbers: str) -> list[Path]:
    """Return the checkpoints, at the steps `numbers`, of the run that a path belongs to; newest first."""
    root = path.resolve().parent if (path / checkpoint.MANIFEST).is_file() else path / CHECKPOINTS
    there = {checkpoint.step_of(folder): folder for folder in checkpoint.checkpoints(root)}
    steps = sorted({int(number) for number in numbers.split(",")}, reverse=True)
    missing = [step for step in steps if step not in there]
    if missing:
        raise ValueError(f"--average {average}: {root} has no checkpoint of step {missing[0]}; it has {sorted(there)}")
    return [there[step] for step in steps]


def _whole(folders: list[Path], average: str | None, check: Check) -> list[Path]:
    """Return the checkpoints if all are whole, or refuse the first damaged one."""
    for folder in folders:
        if problems := check(folder):
            raise ValueError(
                f"--average {average}: {folder} is damaged: {'; '.join(problems)}; leave it out with steps:A,B,..."
            )
    return folders
