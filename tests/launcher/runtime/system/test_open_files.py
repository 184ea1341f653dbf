"""As many open files as the system allows."""

import resource

import pytest

from plumbline.launcher.runtime.commands import cli
from plumbline.launcher.runtime.system.open_files import MANY_FILES, allow_many_files


@pytest.mark.parametrize(
    ("soft", "hard", "asked"),
    [
        (1024, 2**20, [(MANY_FILES, 2**20)]),
        (1024, resource.RLIM_INFINITY, [(MANY_FILES, resource.RLIM_INFINITY)]),
        (1024, 4096, [(4096, 4096)]),
        (4096, 4096, []),
        (2**20, 2**20, []),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
    ],
)
def test_as_many_files_as_ranks_need_where_that_is_allowed(
    soft: int, hard: int, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _which, limits: found.append(limits))
    allow_many_files()
    assert found == asked


def test_every_command_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = min(limits[1], MANY_FILES) - 1 if limits[1] != resource.RLIM_INFINITY else 1024
    monkeypatch.setattr(cli, "interrupts", lambda: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
        cli.begin(lambda: None)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > few
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
