"""What a page says of a run beside its curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plumbline.launcher.runtime.config.load import load_config, save_config
from plumbline.launcher.runtime.config.run_files import CONFIG
from plumbline.launcher.runtime.report.facts import describe, read_facts
from plumbline.launcher.runtime.report.history import History, Series
from plumbline.launcher.runtime.run.starts import STARTS, TOLD, note_start


@pytest.fixture
def folder(tiny_config: Path, tmp_path: Path) -> Path:
    """Return the folder of a run of four starts, of which the second changed nothing."""
    facts: dict[str, Any] = {**dict.fromkeys(TOLD), "world_size": 1, "packages": {}}
    starts: Sequence[tuple[int, list[str]]] = (
        (0, ["train.steps=20"]),
        (10, ["train.steps=20"]),
        (20, ["train.steps=30", "optimizer.lr=0.5", "train.eval_interval=7"]),
        (30, ["train.steps=30", "optimizer.lr=0.5", "data.train=[{path: " + "x/" * 200 + "}]", "model.vocab_size=257"]),
    )
    for step, overrides in starts:
        config = load_config(tiny_config, [f"run.root={tmp_path}", "run.name=changed", *overrides])
        config.run.folder.mkdir(exist_ok=True)
        note_start(config, facts, step)
        save_config(config, config.run.folder / CONFIG)
    return config.run.folder


def test_what_later_starts_changed_is_told(folder: Path) -> None:
    """Not what has no part in the steps: the configuration shown is that of the last start."""
    known = read_facts(folder)
    assert known.changed[0].startswith("after step 20: ")
    assert "optimizer.lr 0.004 -> 0.5" in known.changed[0]
    assert "train.steps 20 -> 30" in known.changed[0]
    assert "eval_interval" not in known.changed[0]
    assert known.changed[1].startswith("after step 30: data.train")
    assert len(known.changed[1]) < 300, "sources have many keys"
    assert len(known.changed) == 2
    history = History(folder, None, {"loss": Series(np.ones(1), np.ones(1), np.ones(1))}, [])
    assert dict(describe(history, known))["changed"] == "; ".join(known.changed)


def test_a_damaged_list_of_starts_is_no_reason_to_show_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / STARTS).write_text("no JSON\n", encoding="utf-8")
    known = read_facts(folder)
    assert known.config is not None
    assert known.changed == ()
    assert "what later starts changed is not shown" in caplog.text
