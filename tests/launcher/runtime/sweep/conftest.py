"""Cells of sweeps that nobody trained, and a request to stop that nobody has made."""

import signal
from typing import Any

import pytest

from plumbline.launcher.runtime.sweep.result import Label, Result, RunOutcome
from plumbline.launcher.runtime.system.signals import StopRequest


def make_result(labels: dict[str, Label], seed: int, outcome: RunOutcome, **changes: Any) -> Result:
    """Return a cell of the base size, with other values where they are given."""
    values = {
        "signature": "",
        "run": "",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "base_hidden_size": 64,
        "base_num_hidden_layers": 2,
        "parameters": 1000,
        "weight_bits": 16,
        "activation_bits": 16,
        "kv_bits": 16,
        "weight_format": None,
        "lr": 0.1,
    }
    return Result(labels, seed, outcome=outcome, **{**values, **changes})


@pytest.fixture
def stop() -> StopRequest:
    """Yield a request that nobody has made; the handlers of this process stay what they were."""
    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    request = StopRequest()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return request
