"""Hold manifests of checkpoints to what this version writes: their checksum says nothing of who wrote them."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from plumbline.data.damage import DamagedFileError
from plumbline.launcher.runtime.checkpoint import store
from plumbline.launcher.runtime.checkpoint.resume import _data_steps_drawn, read_state
from plumbline.launcher.runtime.checkpoint.store import (
    CheckpointError,
    FormatError,
    UnreadError,
    checkpoints,
    read_manifest,
)

STATE = {"step": 3, "samples": 24, "tokens": 768, "corpora": {"text": "0" * 16}}
MANIFEST = {
    **STATE,
    "format": store.FORMAT,
    "world_size": 2,
    "zero_stage": 1,
    "files": {"state.json": {"bytes": 1, "xxh3": "0" * 16}},
}


def sealed(folder: Path, **changes: Any) -> Path:
    """Write a manifest with other values, None for a key that is not there, and a checksum that fits."""
    manifest = {key: value for key, value in {**MANIFEST, **changes}.items() if value is not None}
    whole = {**manifest, "checksum": store.manifest_checksum(manifest)}
    (folder / store.MANIFEST).write_text(json.dumps(whole))
    return folder


def test_a_good_manifest_is_read(tmp_path: Path) -> None:
    assert read_manifest(sealed(tmp_path)) == MANIFEST


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": "three"}, "step = 'three': expected a value of type int"),
        ({"step": None}, "step = None: expected a value of type int"),
        ({"step": -1}, "step = -1: less than 0"),
        ({"world_size": 0}, "world_size = 0: less than 1"),
        ({"files": [1]}, r"files = \[1\]: expected a value of type dict"),
        ({"files": {"state.json": 7}}, "files: state.json = 7: expected bytes and xxh3"),
        ({"files": {"../x": {"bytes": 1, "xxh3": ""}}}, r"files: \.\./x: not a file of this folder"),
        ({"files": {"/etc/passwd": {"bytes": 1, "xxh3": ""}}}, "files: /etc/passwd: not a file of this folder"),
        ({"corpora": 7}, "corpora = 7: expected a value of type dict"),
    ],
)
def test_a_sealed_manifest_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"manifest.json: {words}"):
        read_manifest(sealed(tmp_path, **changes))
    assert len(store.problems(tmp_path)) == 1


def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any = ".") -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(PermissionError):
        checkpoints(tmp_path)


def test_a_disk_that_is_away_does_not_make_a_checkpoint_damaged(tmp_path: Path) -> None:
    """What is damaged is passed over, with all steps since the one before. Linux reads nothing of the file here."""
    (tmp_path / store.MANIFEST).symlink_to("/proc/self/mem")
    with pytest.raises(UnreadError, match=rf"{tmp_path}/manifest.json could not be read \(\[Errno 5\]"):
        store.problems(tmp_path)


def test_without_a_folder_there_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "step_00000005").mkdir()
    assert checkpoints(tmp_path / "missing") == checkpoints(tmp_path / "file") == []
    assert checkpoints(tmp_path) == [tmp_path / "step_00000005"]


def test_another_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="checkpoint format 9, this version reads"):
        read_manifest(sealed(tmp_path, format=9))
    with pytest.raises(FormatError, match="checkpoint format None"):
        read_manifest(sealed(tmp_path, format=None))


@pytest.mark.parametrize("changes", [{"step": 4}, {"tokens": -1}, {"corpora": {}}, {"samples": "24"}])
def test_a_state_that_contradicts_the_manifest_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    (sealed(tmp_path) / store.STATE).write_text(json.dumps(STATE))
    assert read_state(tmp_path).facts == STATE
    (tmp_path / store.STATE).write_text(json.dumps({**STATE, **changes}))
    with pytest.raises(CheckpointError, match=f"state.json: {next(iter(changes))} = "):
        read_state(tmp_path)


@pytest.mark.parametrize(("skipped", "drawn"), [([], 3), ([[1, 4]], 6), ([[3, 4]], 3), ([[0, 2], [7, 9]], 5)])
def test_how_far_the_data_was_drawn_counts_what_was_left_out(tmp_path: Path, skipped: Any, drawn: int) -> None:
    (sealed(tmp_path) / store.STATE).write_text(json.dumps({**STATE, "skipped": skipped, "guards": {}}))
    assert _data_steps_drawn(tmp_path) == drawn


@pytest.mark.parametrize("changes", [{"skipped": [[4, 1]]}, {"skipped": 3}, {"guard": {}}, {"guards": 7}])
def test_a_state_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    (sealed(tmp_path) / store.STATE).write_text(json.dumps({**STATE, **changes}))
    with pytest.raises(DamagedFileError, match=r"state.json: cannot be read"):
        read_state(tmp_path)
