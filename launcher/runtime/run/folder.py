"""Keep everything about a run in one folder, enough to understand it, resume it and publish it.

docs/run-folder.md lists its files.
"""

from pathlib import Path
from typing import Any

from plumbline.data.damage import read_object
from plumbline.data.disk import is_file, move
from plumbline.data.tokenizers import copy_tokenizer
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.identity import TRAINED, differences
from plumbline.launcher.runtime.config.load import config_in, save_config
from plumbline.launcher.runtime.config.plan import last_step
from plumbline.launcher.runtime.config.run_files import CONFIG
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.environment import environment
from plumbline.launcher.runtime.run.inputs import Inputs
from plumbline.launcher.runtime.run.starts import note_start
from plumbline.launcher.runtime.run.status_file import RESULT
from plumbline.launcher.runtime.system.files import read_key, remove_leftovers, write_json


def prepare_run_folder(config: Config, inputs: Inputs, world: World, step: int = 0) -> None:
    """Create the folder and write what is known before training starts from `step`; existing contents are kept.

    The result of a run that was made longer gets another name, because a run with a result is complete.
    """
    folder = config.run.folder
    folder.mkdir(parents=True, exist_ok=True)
    if (shorter := _step_of_result(folder)) not in (None, last_step(config)):
        move(folder / RESULT, folder / f"result-{shorter}.json")
    for name in (CONFIG, "environment.json", RESULT):
        remove_leftovers(folder / name)
    tokenizers = [corpus.tokenizer_path for corpus in inputs.train.corpora.values() if corpus.tokenizer_path]
    if tokenizers:
        copy_tokenizer(tokenizers[0], folder / "tokenizer")
    facts = environment(world)
    note_start(config, facts, step)
    save_config(config, folder / CONFIG)
    write_json(folder / "environment.json", facts)


def read_result(config: Config) -> dict[str, Any] | None:
    """Return the final scores of a run that has taken all steps of this configuration, else None.

    Raises:
        DamagedFileError: the file does not hold scores.
    """
    folder = config.run.folder
    return read_object(folder / RESULT) if _step_of_result(folder) == last_step(config) else None


def _step_of_result(folder: Path) -> int | None:
    path = folder / RESULT
    return read_key(read_object(path), "step", int, path) if is_file(path) else None


def finished_step(config: Config) -> int | None:
    """Return the last step of a complete run, or None if the run is not complete.

    Raises:
        ConfigError: it was trained with other values, so the requested run has not been done; names each.
    """
    result = read_result(config)
    if result is None:
        return None
    folder = config.run.folder
    if lines := differences(config_in(folder), config, TRAINED):
        raise ConfigError(
            f"{folder} is complete, and was trained with other values; give this run another run.name, or undo:\n  "
            + "\n  ".join(lines)
        )
    return int(result["step"])
