"""Wrong inputs meet the commands: a part of what tests/benchmarks/wrong_inputs.py tries, that which needs no model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.benchmarks.wrong_folder import make_files
from tests.benchmarks.wrong_inputs import CLEAR, Case, judge, read_cases, succeed
from tests.conftest import PATIENCE

TRAINED = ("runs/", "models/", "law/", "rows/", "sweeps/", "qwen3", "llama", "gpt2", "hf:")
"""What cases name that need more than files, or wait for a network."""
PART = 24
"""One in so many of those that are left is tried here."""


def tried_here() -> list[Case]:
    """Return the cases of this test, some of each kind."""
    cases = [case for case in read_cases(every=8) if not any(name in str(case) for name in TRAINED)]
    return cases[::PART]


@pytest.fixture(scope="module")
def folder(fork_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wrong") / "folder"
    make_files(place, lambda at, command: succeed(fork_server, at, command))
    return place


def test_wrong_inputs_get_one_clear_error_each(fork_server: Path, folder: Path) -> None:
    cases = tried_here()
    assert len(cases) > 30
    assert {case.command[0] for case in cases} > {"pretrain", "prepare"}
    with ThreadPoolExecutor(2) as pool:
        verdicts = [*pool.map(lambda case: judge(case, fork_server, folder, PATIENCE), cases)]
    told = [
        f"{verdict.kind}: {case}\n{verdict.errors}"
        for case, verdict in zip(cases, verdicts, strict=True)
        if verdict.kind != CLEAR
    ]
    assert not told, "\n\n".join(told)


def test_a_right_input_is_none_of_them(fork_server: Path, folder: Path) -> None:
    """So that what is called clear is an error, and not a folder that no command can use."""
    right = Case(("plan", "--config", "new.yaml", "data.train.0.weight=2", "train.tokens=1e6"), "")
    assert judge(right, fork_server, folder, PATIENCE).kind == "accepted"
