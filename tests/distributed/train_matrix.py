"""Train settings of one configuration as they are asked for; tests start this program on one or several ranks.

    train_matrix.py CONFIG FOLDER       each rank answers at the socket FOLDER/RANK, until its other end is closed

A request is a line of JSON: `name`, `overrides`, `groups`. The training loop itself trains it, into a run folder of its
own, and a line says that it is done. With `groups`, `groups.json` in that folder then holds the optimizer's groups as
the engine has them: before training, after it, and in a second engine that loaded the last checkpoint under other
hyperparameters.
"""

import gc
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from plumbline.launcher.runtime.checkpoint import resume
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.world import World, read_world
from plumbline.launcher.runtime.run.folder import prepare_run_folder
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.train.loop import Trainer
from tests.distributed.trainers import make_trainer

CHANGED = ["optimizer.lr=0.002", "optimizer.weight_decay=0.3", "optimizer.eps=1.0e-6", "optimizer.betas=[0.8, 0.9]"]


def main() -> None:
    config_file, folder = map(Path, sys.argv[1:])
    world = read_world()
    process_group.join(world, timeout_minutes=5.0)
    place = folder / str(world.rank)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}.new")
        listener.listen()
        Path(f"{place}.new").rename(place)  # it is there when it answers
        connection, _ = listener.accept()
    with connection, connection.makefile("rw", encoding="utf-8") as stream:
        for line in stream:
            request = json.loads(line)
            name = request["name"]
            overrides = [f"run.root={config_file.parent / 'runs'}", f"run.name={name}", *request["overrides"]]
            changed = load_config(config_file, [*overrides, *CHANGED]) if request["groups"] else None
            train(load_config(config_file, overrides), changed, world)
            gc.freeze()  # DeepSpeed asks for many collections, which would look at every engine there was
            print(name, file=stream, flush=True)
    process_group.leave()
    # DeepSpeed keeps gloo's threads alive; a Python that ends among those of so many engines has been seen to abort
    os._exit(0)


def train(config: Config, changed: Config | None, world: World) -> None:
    inputs = open_inputs(config, world)
    if world.is_main:
        prepare_run_folder(config, inputs, world)
    trainer = make_trainer(config, inputs, world)
    groups = {"before": dump(trainer)}
    assert trainer.run()
    trainer.close()
    if changed is None:
        return
    groups["after"] = dump(trainer)

    resumed = make_trainer(changed, inputs, world)
    found = resume.find(config.run.folder / "checkpoints", world)
    assert found is not None
    resumed.resume(found)
    groups["changed"] = dump(resumed)
    if world.is_main:
        (config.run.folder / "groups.json").write_text(json.dumps(groups), encoding="utf-8")


def dump(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the groups without their tensors."""
    return [{key: value for key, value in group.items() if key != "params"} for group in trainer.engine.groups]


if __name__ == "__main__":
    main()
