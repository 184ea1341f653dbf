"""A process group of one rank in the test's own process, for what needs a real engine but no second rank."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch

from launcher.runtime import distributed
from launcher.runtime.distributed import World


def set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


@pytest.fixture(scope="session")
def process_group() -> Iterator[tuple[World, dict[str, str]]]:
    """The group and its environment variables. Once for all tests: DeepSpeed keeps the first group it sees for ever."""
    before = dict(os.environ)
    found = replace(distributed.read_world(), device=torch.device("cpu"))
    distributed.start(found, timeout_minutes=1.0)
    during = dict(os.environ)
    set_environment(before)
    yield found, during
    distributed.stop()


@pytest.fixture(scope="module")
def world(process_group: tuple[World, dict[str, str]]) -> Iterator[World]:
    """The group, its environment variables in place for this module only: other tests start processes of their own."""
    before = dict(os.environ)
    set_environment(process_group[1])
    yield process_group[0]
    set_environment(before)
