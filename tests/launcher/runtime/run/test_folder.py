"""What a start writes into a run folder, and what it puts aside there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.folder import prepare_run_folder
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.run.starts import STARTS
from plumbline.launcher.runtime.run.status_file import RESULT

ALONE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))


def test_a_run_starts_again_from_a_corpus_that_is_read_only(tiny_config: Path, corpus: Path, tmp_path: Path) -> None:
    theirs = Path(shutil.copytree(corpus, tmp_path / "theirs"))
    for path in [theirs, *theirs.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    config = load_config(tiny_config, [f"run.root={tmp_path}", f"data.train=[{{path: {theirs}}}]"])
    inputs, folder = open_inputs(config, ALONE), config.run.folder
    prepare_run_folder(config, inputs, ALONE)
    copy = folder / "tokenizer"
    assert {path.name for path in copy.iterdir()} == {path.name for path in (theirs / "tokenizer").iterdir()}
    assert all(path.stat().st_mode & 0o200 for path in [copy, *copy.iterdir()])

    damaged = copy / "tokenizer.json"
    damaged.write_text("{")
    prepare_run_folder(config, inputs, ALONE, step=1)
    assert damaged.read_bytes() == (theirs / "tokenizer" / "tokenizer.json").read_bytes()


def test_a_start_that_cannot_copy_the_tokenizer_is_not_noted(tiny_config: Path, tmp_path: Path) -> None:
    config = load_config(tiny_config, [f"run.root={tmp_path}"])
    config.run.folder.mkdir()
    (config.run.folder / "tokenizer").write_text("a file")
    with pytest.raises(FileExistsError):
        prepare_run_folder(config, open_inputs(config, ALONE), ALONE)
    assert not (config.run.folder / STARTS).exists()


def test_a_result_is_there_only_while_the_run_is_complete(tiny_config: Path, tmp_path: Path) -> None:
    """Made longer, a run has the scores of its earlier end under another name."""
    config, longer = (load_config(tiny_config, [f"run.root={tmp_path}", f"train.steps={n}"]) for n in (20, 40))
    inputs, folder = open_inputs(config, ALONE), config.run.folder
    prepare_run_folder(config, inputs, ALONE)
    (folder / RESULT).write_text(json.dumps({"step": 20}))
    prepare_run_folder(config, inputs, ALONE, step=20)
    assert (folder / RESULT).exists(), "it is this run's, whose record of the end is written once more"
    prepare_run_folder(longer, inputs, ALONE, step=20)
    assert not (folder / RESULT).exists()
    assert json.loads((folder / "result-20.json").read_text()) == {"step": 20}
