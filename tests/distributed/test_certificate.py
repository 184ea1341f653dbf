"""The engine computes what plain PyTorch computes, on generated models; and the comparison sees what is broken.

A few cases of tests/benchmarks/engine_certificate.py, which has all of them, and its mutants: docs/proofs.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Outcome, Start

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "engine_certificate.py"


def run(start: Start, folder: Path, *options: str, ranks: int = 2) -> tuple[Outcome, dict[str, Any]]:
    outcome = start(PROGRAM, options, folder, ranks=ranks).wait()
    assert outcome.stdout, outcome.stderr
    return outcome, json.loads(outcome.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def certificate(start: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the first nine cases of a seed gave."""
    outcome, found = run(start, tmp_path_factory.mktemp("certificate"), "--cases", "9", "--seed", "1")
    assert set(outcome.codes) <= {0, 1}, outcome.stderr
    return found


def test_the_engine_computes_what_plain_pytorch_computes(certificate: dict[str, Any]) -> None:
    assert [row["case"] for row in certificate["rows"] if row["exceeded"]] == []
    quantities = {"start", "loss", "gradient", "norm", "update", "state", "weights"}
    assert all(row["differences"].keys() == quantities for row in certificate["rows"])


def test_so_does_a_rank_alone(start: Start, tmp_path: Path) -> None:
    """It sums with nobody, and a tensor that no micro-batch has reached must have a gradient of zeros all the same."""
    outcome, found = run(start, tmp_path, "--cases", "9", "--seed", "3", ranks=1)
    assert set(outcome.codes) == {0}, [row["case"] for row in found["rows"] if row["exceeded"]]
    texts = [row["case"] for row in found["rows"]]
    for kind in ("stage 0", "stage 1, bf16"):
        assert any(kind in text and "resting" in text for text in texts), kind


def test_offloaded_states_are_updated_alike(start: Start, tmp_path: Path) -> None:
    """Those of tensors that get no gradient in a step among them, to which DeepSpeed 0.19.8 gives an old one."""
    outcome, found = run(start, tmp_path, "--cases", "51", "--seed", "1", "--offload")
    assert set(outcome.codes) == {0}, [row["case"] for row in found["rows"] if row["exceeded"]]
    texts = [row["case"] for row in found["rows"]]
    assert all("offloaded" in text for text in texts)
    assert all(any(f"stage {stage}" in text and "resting" in text for text in texts) for stage in (1, 2, 3))


def test_the_cases_are_of_every_kind(certificate: dict[str, Any]) -> None:
    texts = [row["case"] for row in certificate["rows"]]
    for kind in ("stage 0", "stage 1", "stage 2", "stage 3", "fp32", "bf16", "adamw", "muon", "1 micro-batches",
                 "3 micro-batches", "tied", "reused", "frozen", "resting", "checkpointed"):  # fmt: skip
        assert any(kind in text for text in texts), kind
    assert any("stage 3" in text and "resting" in text for text in texts), "where DeepSpeed 0.19.8 needs help"


def test_mutants_are_caught(start: Start, tmp_path: Path) -> None:
    """Four of the list, which takes minutes: what DeepSpeed keeps from the step before, and sums over ranks."""
    outcome, found = run(start, tmp_path, "--mutants", "BF16_Optimizer|by its last one", "--seed", "1")
    assert set(outcome.codes) == {0}, outcome.stderr
    assert (found["mutants"], found["trials"], found["caught"]) == (4, 5, 5)
    assert all("gradient" in row["caught_by"] for row in found["rows"])
