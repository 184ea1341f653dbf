"""A program for tests to start on two ranks that see different files: what each raises, and how it ends.

    agree.py CONFIG FOLDER

Rank R writes what it was told to FOLDER/R.json. Then it calls pretraining on a run in FOLDER/R, which is complete on
rank 0 alone, and ends with its exit code.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from plumbline.launcher.runtime.config.load import load_config, save_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.models.from_stock import fetch
from plumbline.launcher.runtime.run.inputs import check_agreement, open_inputs
from plumbline.launcher.runtime.run.status_file import RESULT
from tests.distributed.rank_program import begin, leave, train


def error_of(action: Callable[[], None]) -> str | None:
    """Return what a user would be told."""
    try:
        action()
    except ValueError as error:
        return str(error)
    return None


def main() -> int:
    file, folder, world = begin()
    config, other = load_config(file, []), load_config(file, [f"run.seed={world.rank + 1}"])
    inputs = open_inputs(config, world)
    no_model = load_config(file, ["train.initialize_from=hf:no/such/name"])
    told = {
        "same": error_of(lambda: check_agreement(config, inputs, world)),
        "other": error_of(lambda: check_agreement(other, inputs, world)),
        "fetch": error_of(lambda: fetch(no_model, world)),
    }
    (folder / f"{world.rank}.json").write_text(json.dumps(told))

    root = f"run.root={folder / str(world.rank)}"
    if world.is_main:
        done = load_config(file, [root])
        done.run.folder.mkdir(parents=True)
        save_config(done, done.run.folder / "config.yaml")
        (done.run.folder / RESULT).write_text(json.dumps({"step": plan_run(done).total_steps}))
    return train(file, [root])


if __name__ == "__main__":
    leave(main())
