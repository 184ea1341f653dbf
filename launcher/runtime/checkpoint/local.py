"""Keep the newest checkpoint on the nodes themselves, where saving is quick: `checkpoint.local`.

Each rank writes everything that it needs to resume to the storage of its own node, with its own manifest:

    PATH/NAME-HASH/run.json                              the run that it belongs to
                   rank_00003/step_00000050/             a checkpoint with a manifest, as in store.py
                              state/rank_00003.safetensors, config.yaml, state.json, manifest.json

No rank sees the files of other nodes. So such a checkpoint can be used only if every rank finds its own part undamaged,
all parts are of the same save, and the number of ranks and the settings are unchanged: after a crash or a hang, on the
same nodes. Otherwise the run resumes from the checkpoints in the run folder, which never depend on these.
"""

import json
import os
import shutil
import socket
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
import xxhash

from plumbline.data.disk import is_there, move
from plumbline.launcher.runtime.checkpoint.commit import Pace, write_on_all_ranks
from plumbline.launcher.runtime.checkpoint.publishing import (
    make_room,
    prune,
    publish,
    remove_staging_folders,
    staging_folder,
    write_files,
)
from plumbline.launcher.runtime.checkpoint.snapshot import Snapshot
from plumbline.launcher.runtime.checkpoint.store import (
    CheckpointError,
    FileFacts,
    Heartbeat,
    checkpoints,
    problems,
    read_manifest,
)
from plumbline.launcher.runtime.checkpoint.tensors import shard_name
from plumbline.launcher.runtime.config.identity import TRAINED, differences
from plumbline.launcher.runtime.config.load import config_in
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.config.sections import CheckpointConfig
from plumbline.launcher.runtime.ranks.collectives import from_main, gather_objects
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system.files import is_own_folder, write_json, write_whole

Result = TypeVar("Result")

MARKER = "run.json"
ID = "local_id"
"""File with a random id beside the checkpoints in the run folder. Deleting that folder to start from scratch deletes
it too, and checkpoints on the nodes then no longer belong to this run."""
KEEP = CheckpointConfig(keep_last=1)


class LocalCheckpoints:
    """Save on this rank's node, and find a checkpoint to resume from. All ranks create one together.

    Args:
        config: the run, with `checkpoint.local`.
        world: this process among all; the process group must be up.
    """

    def __init__(self, config: Config, world: World) -> None:
        assert config.checkpoint.local is not None
        self._config, self._world = config, world
        self._whose = from_main(lambda: _identify(config.run.folder), world)
        name = f"{config.run.name}-{xxhash.xxh3_64_hexdigest(json.dumps(self._whose).encode())}"
        self._home = Path(config.checkpoint.local.path) / name
        self.folder = self._home / f"rank_{world.rank:05d}"
        """Where the checkpoints of this rank are."""
        hosts = gather_objects(socket.gethostname(), world)  # whose disk they share, whatever Slurm calls the node
        self._names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
        self._beside = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
        """Ranks on this node."""

    def save(self, snapshot: Snapshot, group: dist.ProcessGroup | None, pace: Pace) -> Path:
        """Write what this rank needs to resume, delete the previous checkpoint, and return the new folder. Collective.

        Args:
            snapshot: snapshot from which this rank can resume without the files of others.
            group: process group for the ranks to agree over: a separate one outside the training thread, else None.
            pace: updated with the progress of the save.

        Raises:
            CheckpointError: a rank could not write; the previous checkpoint of each rank is unchanged.
        """
        step = snapshot.facts["step"]
        staging = staging_folder(self.folder, step)
        save: str = gather_objects(uuid.uuid4().hex, self._world, group)[0]

        def write() -> dict[str, FileFacts]:
            self._claim()
            make_room(staging)
            return write_files(snapshot.files, staging, pace.beat)

        def agree(action: Callable[[], Result]) -> Result:
            return write_on_all_ranks(action, self.folder, self._names, self._world, group, pace)[self._world.rank]

        try:
            files = agree(write)
            final = agree(lambda: publish(staging, {**snapshot.facts, "save": save}, files))
        except CheckpointError:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        prune(self.folder, step, KEEP, pace.beat)  # only now that all ranks have the new one
        return final

    def candidates(self) -> list[Path]:
        """Return this rank's folder, existing or not, of each checkpoint of which any rank has a part. Collective."""
        mine: list[str] = []
        with suppress(OSError):  # of a broken disk: the run folder's checkpoints count, on all ranks
            mine = [folder.name for folder in checkpoints(self.folder)] if self._is_ours() else []
        names = {name for share in gather_objects(mine, self._world) for name in share}
        return [self.folder / name for name in names]

    def damage(self, folder: Path, heartbeat: Heartbeat) -> list[str]:
        """Return why the ranks cannot resume from a candidate, after reading every byte of it. Collective.

        Args:
            folder: the candidate.
            heartbeat: called for each part of a file that was read.
        """
        problem, save = self._read(folder, heartbeat)
        told = gather_objects((problem, save), self._world)
        found = [f"{name}: {problem}" for name, (problem, _) in zip(self._names, told, strict=True) if problem]
        if not found and len({save for _, save in told}) > 1:
            found = ["its parts are of several saves"]
        return found

    def tidy(self, kept: Path | None) -> None:
        """Delete all checkpoints on this node except `kept`, from which training resumes: the others are outdated.

        No rank may be saving: the ranks synchronize between this and the first save. What a broken disk does not let
        go of stays.
        """
        with suppress(OSError):
            self._tidy(kept)

    def _tidy(self, kept: Path | None) -> None:
        for leftover in self._home.parent.glob(f".{self._home.name}.*.staging"):
            shutil.rmtree(leftover, ignore_errors=True)
        if not self._is_ours():
            return
        remove_staging_folders(self.folder)
        unwanted = [folder for folder in checkpoints(self.folder) if folder != kept]
        if self._world.rank == min(self._beside):  # folders of ranks that ran here before and now run on other nodes
            ranks = [(rank.name.removeprefix("rank_"), rank) for rank in self._home.glob("rank_*")]
            unwanted += [rank for number, rank in ranks if number.isdigit() and int(number) not in self._beside]
        for folder in unwanted:
            shutil.rmtree(folder, ignore_errors=True)

    def clear(self) -> None:
        """Delete all files of the run on this node, once the run folder has a newer checkpoint."""
        if self._is_ours():
            shutil.rmtree(self._home, ignore_errors=True)

    def _read(self, folder: Path, heartbeat: Heartbeat) -> tuple[str | None, str | None]:
        """Return what is wrong with this rank's part, or None, and the id of the save that it belongs to."""
        try:
            if not self._is_ours() or not folder.is_dir():
                return "there is none", None
            found = problems(folder, contents=True, heartbeat=heartbeat)
            if found:
                return ", ".join(found), None
            manifest = read_manifest(folder)
            before = manifest["world_size"]
            if shard_name(self._world.rank) not in manifest["files"]:
                found = ["it is another rank's"]
            elif before != self._world.size:
                found = [f"written by {before} rank(s), read by {self._world.size}"]
            else:
                found = differences(config_in(folder), self._config, TRAINED)
            if "save" not in manifest:
                found = [*found, "it is no local checkpoint"]
            return ", ".join(found) or None, manifest.get("save")
        except (ValueError, OSError) as error:  # also of another version
            return str(error), None

    def _claim(self) -> None:
        """Create this rank's folder; raise FileExistsError if the path belongs to another user or run."""
        for folder in (self._home, self.folder):
            if not _is_free_or_own(folder):
                raise FileExistsError(
                    f"{folder} is a link, or not a folder of this user: set another checkpoint.local.path, where only "
                    "this user can write"
                )
        if not self._home.exists():
            made = self._home.with_name(f".{self._home.name}.{uuid.uuid4().hex[:8]}.staging")
            made.mkdir(mode=0o700, parents=True)
            write_json(made / MARKER, self._whose)
            try:
                move(made, self._home)
            except OSError:  # another rank of this node has created it
                shutil.rmtree(made, ignore_errors=True)
        if not self._is_ours():
            raise FileExistsError(
                f"{self._home} is not of this run: move it away, or set another checkpoint.local.path"
            )
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def _is_ours(self) -> bool:
        """Return whether this run wrote the folder; in /dev/shm others may have put links to this user's folders."""
        if not (is_own_folder(self._home) and _is_free_or_own(self.folder)):
            return False
        try:
            return bool(json.loads((self._home / MARKER).read_text(encoding="utf-8")) == self._whose)
        except (OSError, ValueError):
            return False


def _is_free_or_own(folder: Path) -> bool:
    return not os.path.lexists(folder) or is_own_folder(folder)


def _identify(run: Path) -> dict[str, str]:
    """Return facts that identify a run, even among runs that had the same folder before it."""
    file = run / CHECKPOINTS / ID
    if not is_there(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, uuid.uuid4().hex + "\n")
    return {"run": str(run.resolve()), "id": file.read_text(encoding="utf-8").strip()}
