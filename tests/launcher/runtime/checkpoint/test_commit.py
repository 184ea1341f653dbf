"""Files of checkpoints whatever is killed when: what is under a final name is whole."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from plumbline.launcher.runtime.checkpoint import commit, store
from plumbline.launcher.runtime.config.sections import CheckpointConfig


class KilledError(BaseException):
    """Stand for SIGKILL, which nobody handles."""


def publish(root: Path, step: int) -> None:
    """Write a checkpoint without tensors."""
    staging = commit.staging_folder(root, step)
    commit.make_room(staging)
    commit.publish(staging, {"step": step}, commit.write_files({store.CONFIG: "{}", "state/x": "state"}, staging))


def test_a_kill_while_a_checkpoint_is_deleted_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt that follows may have nothing left to save: what is there is whole without another save."""
    for step in (1, 2, 3):
        publish(tmp_path, step)

    def die(folder: Path, **_options: Any) -> None:
        (folder / "state" / "x").unlink()
        raise KilledError

    keep = CheckpointConfig(keep_last=2)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", die)
        with pytest.raises(KilledError):
            commit.prune(tmp_path, 3, keep)
    found = store.checkpoints(tmp_path)
    assert [store.problems(folder, contents=True) for folder in found] == [[], []]
    commit.tidy(tmp_path, found[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000002", "step_00000003"]
