"""A program for tests to start on each rank: the doctor, or pretraining, with something wrong on this rank alone.

    examine_ranks.py SCRIPT RANK FAULT [ARGUMENTS OF THE SCRIPT]

FAULT is a function below. Faults of a node are put where the doctor looks; the ranks and all between them are real.
"""

import importlib
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from plumbline.launcher.runtime.doctor import clocks, collectives, versions

PATCHES = pytest.MonkeyPatch()


def nothing() -> None:
    """Leave everything as it is."""


def other_python() -> None:
    PATCHES.setattr(platform, "python_version", lambda: "3.9.1")


def other_variable() -> None:
    os.environ["NCCL_ALGO"] = "Ring"


def uncertified() -> None:
    PATCHES.setattr(versions, "CERTIFIED", ())


def slow() -> None:
    """Take three seconds for each message, over a hundred times as long as the others, and ten on a busy machine."""
    send: Callable[..., Any] = dist.send

    def late(*arguments: Any, **options: Any) -> Any:
        time.sleep(3.0)
        return send(*arguments, **options)

    PATCHES.setattr(dist, "send", late)


def wrong_sums() -> None:
    """Contribute one to everything that is summed."""
    reduce: Callable[..., Any] = dist.all_reduce

    def changed(tensor: Any, *arguments: Any, **options: Any) -> Any:
        if tensor.numel() == collectives.ELEMENTS:
            tensor[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])] += 1
        return reduce(tensor, *arguments, **options)

    PATCHES.setattr(dist, "all_reduce", changed)


def wrong_shares() -> None:
    """Contribute one to everything that is summed into shares."""
    reduce: Callable[..., Any] = dist.reduce_scatter_tensor

    def changed(output: Any, tensor: Any, *arguments: Any, **options: Any) -> Any:
        tensor[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])] += 1
        return reduce(output, tensor, *arguments, **options)

    PATCHES.setattr(dist, "reduce_scatter_tensor", changed)


def wrong_exchange() -> None:
    """Send each rank values that are off by one."""
    exchange: Callable[..., Any] = dist.all_to_all_single
    PATCHES.setattr(dist, "all_to_all_single", lambda output, tensor: exchange(output, tensor + 1))


def fast_clock() -> None:
    """Show this rank alone a clock that is two minutes ahead."""

    class Ahead:
        @staticmethod
        def time() -> float:
            return time.time() + 120.0

    PATCHES.setattr(clocks, "time", Ahead)


def dies_in_a_check() -> None:
    PATCHES.setattr(collectives, "known_values", lambda *_: os._exit(7))


def raises_in_a_check() -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("connection reset by peer")

    PATCHES.setattr(collectives, "known_values", refuse)


def waits_for_ever() -> None:
    """Do as NCCL does where a rank has left: wait in a collective, and say nothing."""
    PATCHES.setattr(collectives, "known_values", lambda *_: time.sleep(3600))


def never_arrives() -> None:
    os._exit(9)


def main() -> int:
    script, rank, fault = sys.argv[1:4]
    # Ranks of a test share a machine: let each say that it is on a node of its own
    os.environ["SLURMD_NODENAME"] = "broken" if os.environ["RANK"] == rank else f"good{os.environ['RANK']}"
    if os.environ["RANK"] == rank:
        globals()[fault]()
    sys.argv = [f"{script}.py", *sys.argv[4:]]
    code: int = importlib.import_module(f"plumbline.launcher.{script}").main()
    return code


if __name__ == "__main__":
    try:
        ended = main()
    except ValueError as error:
        print(error, file=sys.stderr)
        ended = 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)
