"""The guard of the table: an update has the size that the optimizer asks for, or somebody hears of it.

What sharded engines make of it is in test_diagnostics.py.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plumbline.data.damage import DamagedFileError
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.guards import TransferConfig
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.engine import pieces
from plumbline.launcher.runtime.engine.plain import PlainEngine
from plumbline.launcher.runtime.train.guards import transfer
from plumbline.launcher.runtime.train.guards.transfer import Transfer, read_base

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plumbline.launcher.runtime.config.schema import Config
    from plumbline.launcher.runtime.engine.base import Engine
    from plumbline.launcher.runtime.ranks.world import World
    from plumbline.launcher.runtime.run.inputs import Inputs

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "tests" / "benchmarks" / "transfer_alarm.py"
STEPS = 4


@pytest.fixture(scope="module")
def config(tiny_config: Path) -> Config:
    return load_config(tiny_config, [])


def train(engine: Engine, inputs: Inputs, guard: Transfer, first: int = 1) -> dict[int, dict[str, float]]:
    """Train some steps of the run; returns what the guard finds in each."""
    found = {}
    for step in range(first, first + STEPS):
        guard.before_step(step, 1)
        lr = engine.plan.lr_after(engine.plan.batch_plan.tokens_before(step - 1))
        made = engine.train_step(inputs.train.micro_batches(step - 1), step - 1, lr, [guard])
        guard.after_step(step, made.result)
        found[step] = guard.found(step)
    return found


@pytest.mark.parametrize(
    ("override", "matrices"),
    [
        ("optimizer.grad_clip=0.1", True),
        ("optimizer.weight_decay=30", True),  # moves as much as Adam does: forgotten, it would show
        ("optimizer.betas=[0.8, 0.99]", True),
        ("optimizer.name=muon", False),
        ("optimizer.name=soap", False),
    ],
    ids=["clip", "decay", "betas", "muon", "soap"],
)
def test_updates_have_the_size_that_is_asked_for(
    tiny_config: Path, world: World, inputs: Inputs, override: str, matrices: bool
) -> None:
    engine = PlainEngine(load_config(tiny_config, ["deepspeed.zero_stage=0", override]), world)
    found = train(engine, inputs, Transfer(engine, TransferConfig()))
    assert [step for step, sizes in found.items() if sizes] == [1, 2, 4]
    for step in (1, 2, 4):
        assert ("step_size/hidden_matrix" in found[step]) is matrices
        assert len(found[step]) >= 4
        assert found[step] == {role: pytest.approx(1.0, rel=0.01) for role in found[step]}


def test_no_more_is_copied_than_a_sample_of_each_tensor(
    tiny_config: Path, world: World, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of a whole share would not fit beside a model that fills its device."""
    monkeypatch.setattr(pieces, "SAMPLED", 100)
    engine = PlainEngine(load_config(tiny_config, ["deepspeed.zero_stage=0"]), world)
    guard = Transfer(engine, TransferConfig())
    copied: list[int] = []
    after_update = guard.after_update

    def counted() -> None:
        copied.extend(weight.numel() for weight in guard._before.values())
        after_update()

    monkeypatch.setattr(guard, "after_update", counted)
    found = train(engine, inputs, guard)
    assert max(copied) <= 100 < max(parameter.numel() for parameter in engine.model.parameters())
    for step in (1, 2, 4):
        assert found[step] == {role: pytest.approx(1.0, rel=0.01) for role in found[step]}


@pytest.mark.parametrize("skipped", [1, 2])
def test_what_was_skipped_is_not_counted(tiny_config: Path, world: World, inputs: Inputs, skipped: int) -> None:
    """Adam counts it neither: with a count too many, sizes were off by a third."""
    engine = PlainEngine(load_config(tiny_config, []), world)
    weight = engine.model.get_parameter("lm_head.weight")
    guard = Transfer(engine, TransferConfig())
    for step in range(1, skipped + 1):
        broken = weight.register_hook(lambda gradient, step=step: gradient * (math.inf if step == skipped else 1))
        guard.before_step(step, 1)
        result = engine.train_step(inputs.train.micro_batches(step - 1), step - 1, 1e-3, [guard]).result
        guard.after_step(step, result)
        broken.remove()
    assert not result.applied
    assert guard.found(skipped) == {}
    later = Transfer(engine, TransferConfig())
    later.restore(json.loads(json.dumps(guard.state)))
    found = train(engine, inputs, later, first=skipped + 1)
    assert len(found[4]) >= 5
    assert found[4] == {role: pytest.approx(1.0, rel=0.01) for role in found[4]}


def test_a_step_that_was_made_before_the_skip_was_read_is_not_looked_at(
    tiny_config: Path, world: World, inputs: Inputs
) -> None:
    """The loop reads a step while the next one is under way."""
    engine = PlainEngine(load_config(tiny_config, []), world)
    guard = Transfer(engine, TransferConfig())
    broken = engine.model.get_parameter("lm_head.weight").register_hook(lambda gradient: gradient * math.inf)
    results = []
    for step in (1, 2):
        guard.before_step(step, 1)
        results.append(engine.train_step(inputs.train.micro_batches(step - 1), step - 1, 1e-3, [guard]).result)
        broken.remove()
    assert [result.applied for result in results] == [False, True]
    guard.after_step(1, results[0])
    guard.after_step(2, results[1])
    assert guard.found(2) == {}
    found = train(engine, inputs, guard, first=3)
    assert found[4] == {role: pytest.approx(1.0, rel=0.01) for role in found[4]}
    assert len(found[4]) >= 5


def base_of(folder: Path, sizes: Mapping[int, Mapping[str, float]]) -> TransferConfig:
    """Return settings that compare with a run of which these sizes are on record."""
    folder.mkdir()
    lines = [{"step": 1, "loss": 5.0}, *({"step": step, **found} for step, found in sizes.items() if found)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return TransferConfig(base=str(folder))


def test_a_role_that_leaves_its_band_is_told_once(
    tiny_config: Path, world: World, inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = PlainEngine(load_config(tiny_config, []), world)
    first, second = ({"step_size/embedding": size, "step_size/final_norm": 1.0} for size in (0.5, 1.0))
    settings = base_of(tmp_path / "base", {1: first, 3: second})
    guard = Transfer(engine, settings)
    found = train(engine, inputs, guard)
    assert found[1]["transfer/embedding"] == pytest.approx(2.0, rel=0.01)
    assert found[2]["transfer/embedding"] == pytest.approx(2.0, rel=0.01), "the newest of the base until then"
    assert found[4]["transfer/embedding"] == pytest.approx(1.0, rel=0.01)
    assert [key for key in found[1] if key.startswith("transfer/")] == ["transfer/embedding", "transfer/final_norm"]
    warning = capsys.readouterr().err
    assert warning.startswith("warning: step 1: sizes of updates are not those of the base run: embedding (2) times")
    assert warning.count("\n") == 1

    outside = Transfer(engine, base_of(tmp_path / "other", {1: first}))
    outside.restore({"skipped": 0, "outside": ["embedding"]})
    train(engine, inputs, outside, first=STEPS + 1)
    assert capsys.readouterr().err == "", "the log was told before the run was resumed"


def test_another_rank_is_told_what_the_main_one_read(
    tiny_config: Path, world: World, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "from_main", lambda _read, _world: {1: {"embedding": 0.5}})
    engine = PlainEngine(load_config(tiny_config, []), world)
    guard = Transfer(engine, TransferConfig(base="of which this rank sees nothing"))
    assert train(engine, inputs, guard)[1]["transfer/embedding"] == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (None, "metrics.jsonl is not there: name the folder of a run"),
        ('{"step": 1}\n', "has no step_size/ROLE"),
        ('{"step": "1", "step_size/embedding": 1.0}\n', "line 1: step = '1'"),
        ('{"step": 1}\n{"step": 1, "step_size/embedding": 0.0}\n', "step_size/embedding of step 1 is 0.0, not a size"),
    ],
    ids=["no run", "no sizes", "no step", "no size"],
)
def test_a_base_without_sizes_is_refused(tmp_path: Path, lines: str | None, words: str) -> None:
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    with pytest.raises((ConfigError, DamagedFileError), match=rf"{tmp_path}.*{words}"):
        read_base(TransferConfig(base=str(tmp_path)))


def test_a_check_reads_a_base_up_to_its_first_sizes(tmp_path: Path) -> None:
    """Every rank makes it, before ranks have met, and the log of a base may be long."""
    settings = base_of(tmp_path / "base", {1: {"step_size/embedding": 0.5}, 2: {"step_size/embedding": 0.0}})
    assert read_base(settings, most=1) == {1: {"embedding": 0.5}}
    with pytest.raises(DamagedFileError, match="not a size"):
        read_base(settings)


def test_what_is_wrong_is_heard_and_what_is_right_is_not() -> None:
    """Four times the width and depth of the base, one seed each; docs/guards.md has twenty."""
    command = [sys.executable, str(SCRIPT), "--seeds", "1", "--steps", "4"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "launcher")}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment).stdout
    heard = {line["way"]: line for line in map(json.loads, (line for line in shown.splitlines() if line[:1] == "{"))}
    assert len(heard) == 7
    right = heard.pop("as the table says")
    assert right["alarms"] == 0
    assert 0.9 < right["ratios"][0] <= right["ratios"][1] < 1.1
    assert {line["alarms"] for line in heard.values()} == {1}
    assert {line["at the latest in step"] for line in heard.values()} <= {1, 2}
