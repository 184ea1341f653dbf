"""Real ranks compute each other's micro-batches: clean ones agree, and of a bit that turns the rank is named.

Three train as usual, four with run.reproducible=any_ranks.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.launcher.runtime.cluster.attempts import WRONG, accused
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.engine.plain import PlainEngine
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.system.exit_codes import CORRUPT
from plumbline.launcher.runtime.train.guards.guard import WrongNodeError
from plumbline.launcher.runtime.train.guards.replay import Replay
from tests.distributed.flip import MOMENTS, SETTINGS, Fault

if TYPE_CHECKING:
    from tests.conftest import Outcome, Start

HOST = socket.gethostname()


@pytest.fixture(scope="module", params=SETTINGS)
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def outcome(start: Start, tiny_config: Path, tmp_path_factory: pytest.TempPathFactory, ranks: int) -> Outcome:
    folder = tmp_path_factory.mktemp("flip")
    return start(
        Path(__file__).with_name("flip.py"), [tiny_config, folder], folder / "runs" / "flipped", ranks=ranks
    ).wait()


@pytest.fixture(scope="module")
def found(outcome: Outcome) -> dict[str, dict[str, Any]]:
    file = outcome.run.folder.parent.parent / "trials.json"
    assert file.exists(), outcome.stderr
    struck: dict[str, dict[str, Any]] = json.loads(file.read_text())
    return struck


def test_clean_replays_raise_no_alarm(found: dict[str, dict[str, Any]], ranks: int) -> None:
    assert list(found) == list(SETTINGS[ranks])
    assert [case["alarms"] for case in found.values() if case["alarms"]] == []
    assert {case["compared"] for case in found.values()} == {20 * ranks}


def test_every_bit_that_turns_is_caught_before_the_update_and_its_rank_named(
    found: dict[str, dict[str, Any]], ranks: int
) -> None:
    trials = [trial for case in found.values() for trial in case["trials"]]
    assert len(trials) == {3: 100, 4: 30}[ranks]
    assert {trial["moment"] for trial in trials} == set(MOMENTS)
    assert {trial["rank"] for trial in trials} == set(range(ranks))
    for trial in trials:
        assert trial["error"] is not None, trial
        who = f": rank {trial['rank']} on {HOST} got other bits than two ranks agree on, for a micro-batch of rank "
        assert who in trial["error"], trial
        owner = (trial["rank"] - (trial["moment"] == "while it replays")) % ranks
        assert trial["moment"] == "always" or f"micro-batch of rank {owner}: " in trial["error"], trial
    for case in found.values():
        assert case["updates"] == case["compared"] // ranks + len(case["trials"]), "the guard comes before the update"


def test_the_run_ends_and_accuses_the_node(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome.code == CORRUPT, outcome.stderr
    assert (
        "error: step 8: rank 1 on n1 got other bits than two ranks agree on, for a micro-batch of rank 1: model."
        in (outcome.stderr)
    )
    assert "The update was not made; the last checkpoint is from before" in outcome.stderr
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # as flip.py does for its ranks
    assert accused(outcome.run.folder / "slurm", ["n1", "n2"]) == {"n1": WRONG}
    assert outcome.run.checkpoints[-1] == "step_00000006"
    assert json.loads((outcome.run.folder / "status.json").read_text())["attempt"]["exit_code"] == CORRUPT


def test_one_rank_computes_again_by_itself(tiny_config: Path, world: World) -> None:
    config = load_config(tiny_config, ["data.global_batch_size=6"])
    inputs, engine = open_inputs(config, world), PlainEngine(config, world)
    guard, fault = Replay(engine, interval=2), Fault(engine)

    def make(step: int) -> None:
        micro_batches = inputs.train.micro_batches(step - 1)
        guard.before_step(step, len(micro_batches))
        engine.train_step(micro_batches, step - 1, 1e-3, [guard])

    for step in range(1, 7):  # each of the three micro-batches once
        make(step)
    fault.place, fault.moments = (0, 0, 3), {0, 1, 2}
    make(7)  # nobody looks
    fault.place, fault.moments, fault.computed = (0, 0, 3), {1}, 0  # in the micro-batch that step 8 looks at
    with pytest.raises(WrongNodeError, match=rf"step 8: rank 0 on {HOST} got different bits, and no two agree"):
        make(8)
