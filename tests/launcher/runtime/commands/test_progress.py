"""What takes long says in a log how far it has come, now and then."""

import time

import pytest

from plumbline.launcher.runtime.commands.progress import watched


def test_a_log_has_a_line_every_half_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for _ in watched(range(8), 8, "batch"):
        now += 10.0
    assert capsys.readouterr().err.splitlines() == ["batch 3/8, eta 0:50", "batch 6/8, eta 0:20"]


def test_what_is_quick_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(watched("abc", 3, "fit")) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")
