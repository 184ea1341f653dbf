"""Sources that join a run when it resumes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from plumbline.data.indexed import IndexedWriter, token_dtype
from plumbline.launcher.runtime.checkpoint import resume
from plumbline.launcher.runtime.checkpoint.store import CheckpointError, read_manifest
from plumbline.launcher.runtime.config.load import config_in, load_config
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import open_inputs

if TYPE_CHECKING:
    from tests.conftest import Pretrain


def write_pair(prefix: Path, length: int) -> Path:
    """Write a corpus as a bare Megatron-LM pair of 4000 bytes, in documents of this length."""
    with IndexedWriter(prefix, token_dtype(257)) as writer:
        writer.add_documents(np.arange(4000) % 251, [length] * (4000 // length))
    return prefix


def test_a_source_that_joined_is_known_to_later_checkpoints(
    run_pretrain: Pretrain, tiny_config: Path, corpus: Path, world: World, tmp_path: Path
) -> None:
    """Of three starts, the second adds a source and the third another one."""
    places = {"more": write_pair(tmp_path / "more", 40), "third": write_pair(tmp_path / "third", 50)}

    def of(steps: int, **joining: int) -> list[str]:
        joins = [
            f", {{path: {places[name]}, weight: 0.0, weight_changes: [{{tokens: {tokens}, weight: 1.0}}]}}"
            for name, tokens in joining.items()
        ]
        return [f"data.train=[{{path: {corpus}}}{''.join(joins)}]", f"train.steps={steps}", "train.eval_interval=null"]

    for overrides in of(2), of(4, more=512):
        outcome = run_pretrain(tiny_config, "joined", overrides, ranks=1)
        assert outcome.code == 0, outcome.stderr
    folder = outcome.run.folder / "checkpoints" / "step_00000004"
    old, new = config_in(folder), load_config(tiny_config, of(6, more=512, third=1024))
    now = open_inputs(new, world).fingerprints
    assert list(read_manifest(folder)["corpora"]) == ["email", "more"]
    resume.check_resume(old, new, now, folder)
    with pytest.raises(CheckpointError, match=r"corpora: .*'more': '(?!0123)\w+'.* -> .*'more': '0123'}$"):
        resume.check_resume(old, new, now | {"more": "0123"}, folder)
    lost = load_config(tiny_config, of(6))
    with pytest.raises(CheckpointError) as caught:
        resume.check_resume(old, lost, open_inputs(lost, world).fingerprints, folder)
    assert "\n  data.train: ['email', 'more'] -> ['email']\n  corpora: {" in str(caught.value)
    assert "(weight_changes: [{tokens: 1024, weight: 0}] ends it here), and add others" in str(caught.value)


def test_a_source_that_was_to_join_later_may_be_left_out(
    run_pretrain: Pretrain, tiny_config: Path, corpus: Path, world: World, tmp_path: Path
) -> None:
    """The checkpoint is that of step 2, after 512 tokens."""
    joins = (
        f"{{path: {write_pair(tmp_path / 'more', 40)}, weight: 0.0, weight_changes: [{{tokens: 512, weight: 1.0}}]}}"
    )
    both = f"data.train=[{{path: {corpus}}}, {joins}]"
    outcome = run_pretrain(tiny_config, "waits", [both, "train.steps=2", "train.eval_interval=null"], ranks=1)
    assert outcome.code == 0, outcome.stderr
    folder = outcome.run.folder / "checkpoints" / "step_00000002"
    assert list(read_manifest(folder)["corpora"]) == ["email", "more"]
    old, new = config_in(folder), load_config(tiny_config, [f"data.train=[{{path: {corpus}}}]", "train.steps=4"])
    now = open_inputs(new, world).fingerprints
    for ending in (".bin", ".idx"):
        (tmp_path / "more").with_suffix(ending).unlink()
    resume.check_resume(old, new, now, folder)
    with pytest.raises(CheckpointError, match="corpora: "):
        resume.check_resume(old, new, {"email": "0123"}, folder)
