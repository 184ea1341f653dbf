"""Three real ranks that keep what is whole on all of them equal; a bit that one has wrong is found, with its rank."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.launcher.runtime.system.exit_codes import CORRUPT
from tests.distributed.diverge import SETTINGS, STEPS

if TYPE_CHECKING:
    from tests.conftest import Outcome, Start

HOST = socket.gethostname()
Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def outcome(start: Start, tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("diverge")
    return start(
        Path(__file__).with_name("diverge.py"), [tiny_config, folder], folder / "runs" / "diverged", ranks=3
    ).wait()


@pytest.fixture(scope="module")
def found(outcome: Outcome) -> Found:
    file = outcome.run.folder.parent.parent / "compared.json"
    assert file.exists(), outcome.stderr
    compared: Found = json.loads(file.read_text())
    return compared


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_bit_that_one_rank_has_wrong_is_found_and_equal_ranks_are_silent(found: Found, setting: str) -> None:
    case = found[setting]
    assert case["clean"] == [None] * (STEPS + 1)
    wrong = f"step {STEPS}: rank 1 on {HOST} differs from the others in "
    for name, error in case["errors"].items():
        assert error is not None, name
        assert error.startswith(f"{wrong}{name}"), error
    assert case["nobody"].startswith(f"step {STEPS}: rank 0 on {HOST}, rank 1 on {HOST}, rank 2 on {HOST} differ in ")
    assert "no majority says which is right" in case["nobody"]
    assert case["rates"].startswith(f"step {STEPS}: rank 2 on {HOST} differs from the others in counts of steps and")


def test_what_is_whole_on_every_rank_is_compared(found: Found) -> None:
    compared = {setting: set(case["errors"]) for setting, case in found.items()}
    weights = {name for name in compared["0 fp32"] if name.endswith(".weight")}
    assert len(weights) > 20
    assert all(weights <= names for names in compared.values()), "the tiny model's tensors persist at stage 3"
    assert any("exp_avg_sq of" in name for name in compared["0 fp32"]), "states, which all keep at stage 0"
    assert any("average of" in name for name in compared["0 fp32"])
    assert any("basis_0 of" in name for name in compared["0 bf16, SOAP"])
    assert not any("exp_avg" in name for name in compared["1 bf16"]), "each rank has its own"


def test_a_diverged_state_is_not_saved(outcome: Outcome) -> None:
    assert outcome.code == CORRUPT, outcome.stderr
    assert f"error: step 20: rank 2 on {HOST} differs from the others in model." in outcome.stderr
    assert "the last checkpoint is from before. Leave the node out" in outcome.stderr
    assert [name for name in outcome.run.checkpoints if name.startswith("step_")] == ["step_00000010"]
