"""Refuse to replay micro-batches where bits need not be the same, or where no rank has all weights."""

from pathlib import Path

import pytest

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import load_config

ASKED = "guards.replay_interval=10"


@pytest.mark.parametrize(
    ("overrides", "remedies"),
    [
        ([], {"set run.deterministic=true"}),
        (["run.deterministic=true", "deepspeed.zero_stage=3"], {"set deepspeed.zero_stage=2"}),
        (["deepspeed.zero_stage=3"], {"set run.deterministic=true", "set deepspeed.zero_stage=2"}),
        (["run.deterministic=true", "deepspeed.zero_stage=2"], set()),
    ],
)
def test_replays_need_kernels_that_repeat_themselves_and_whole_weights(
    tiny_config: Path, overrides: list[str], remedies: set[str]
) -> None:
    assert load_config(tiny_config, overrides).guards.replay_interval is None
    if not remedies:
        assert load_config(tiny_config, [ASKED, *overrides]).guards.replay_interval == 10
        return
    with pytest.raises(ConfigError, match=r"guards.replay_interval = 10 ") as error:
        load_config(tiny_config, [ASKED, *overrides])
    all_remedies = {"set run.deterministic=true", "set deepspeed.zero_stage=2"}
    assert {remedy for remedy in all_remedies if remedy in str(error.value)} == remedies
