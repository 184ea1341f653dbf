"""A rank that computes on its host keeps the memory that tensors free."""

import os
import subprocess
import sys

from tests.conftest import REPOSITORY

PROGRAM = """
import ctypes, resource, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: huge pages make few faults of many
from plumbline.launcher.runtime.ranks.memory import keep_freed_memory
{first}
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""
PAGES = 2**24 * 4 // 4096


def faults_of_a_second_tensor(first: str) -> int:
    program = PROGRAM.format(first=first)
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "launcher")},
    )
    return int(done.stdout)


def test_a_tensor_takes_the_place_of_one_that_was_freed() -> None:
    """In some of several processes: in others the place is too small, by what alignment takes."""
    assert any(faults_of_a_second_tensor("keep_freed_memory()") < PAGES / 100 for _ in range(30))
    assert faults_of_a_second_tensor("") > PAGES / 2, "which is not what happens by itself"
