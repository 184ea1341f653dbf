"""Refuse ranks on which a run cannot have the bits that it has on one."""

from pathlib import Path

import pytest

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.rank_counts import check_ranks

ASKED = "run.reproducible=any_ranks"


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (["data.micro_batch_size=2"], (1, 2, 4)),
        (["data.micro_batch_size=8"], (1,)),
        (["data.global_batch_size=12", "data.micro_batch_size=1"], (1, 2, 4)),
        (["data.micro_batch_size=1", "data.batch_size_warmup=[{tokens: 64, global_batch_size: 2}]"], (1, 2)),
    ],
)
def test_only_powers_of_two_that_divide_every_step_are_taken(
    tiny_config: Path, overrides: list[str], ranks: tuple[int, ...]
) -> None:
    config = load_config(tiny_config, [ASKED, *overrides])
    for number in range(1, 17):
        if number in ranks:
            check_ranks(config, number)
        else:
            with pytest.raises(
                ConfigError, match=rf"{number} ranks cannot share .* use {' or '.join(map(str, ranks))} "
            ):
                check_ranks(config, number)
        check_ranks(load_config(tiny_config, overrides), number)


def test_a_micro_batch_that_would_depend_on_the_ranks_is_refused(tiny_config: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.micro_batch_size = 3 does not divide the 8 sequences of a step"):
        check_ranks(load_config(tiny_config, [ASKED, "data.micro_batch_size=3"]), 1)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("deepspeed.zero_stage=3", "zero_stage = 3 holds no whole gradient"),
        ("deepspeed.offload_optimizer=true", "offload_optimizer = true is not served"),
        ("deepspeed.communication_dtype=bf16", "communication_dtype = bf16 would not be heeded"),
    ],
)
def test_what_does_not_keep_the_order_of_sums_is_refused(tiny_config: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(tiny_config, [ASKED, override])
