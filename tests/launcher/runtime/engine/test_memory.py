"""What `train.activation_checkpointing` may be, and what `auto` becomes."""

from pathlib import Path

import pytest
import torch

from plumbline.launcher.runtime.config.budget import ParameterCount
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.engine.memory import LEAST_FIRST, USABLE, Estimate, choose_recomputed
from plumbline.launcher.runtime.ranks.world import World

AUTO = [
    "train.activation_checkpointing=auto",
    "model.num_hidden_layers=8",
    "data.sequence_length=256",
    "data.micro_batch_size=8",
]
COUNT = ParameterCount(total=10_000, non_embedding=8_000, trained=10_000)


def estimate(file: Path) -> Estimate:
    return Estimate(load_config(file, AUTO), COUNT, ranks=1)


def test_auto_is_the_least_that_fits(tiny_config: Path) -> None:
    found = estimate(tiny_config)
    for choice in LEAST_FIRST:
        needed = found.memory(1, choice).total / USABLE
        least = next(each for each in LEAST_FIRST if found.memory(1, each).total <= USABLE * needed)
        assert found.recomputed(1, needed, compiled=False) == least
    assert found.recomputed(1, found.memory(1, "none").total, compiled=False) != "none", "a tenth is left free"
    assert found.recomputed(1, 1.0, compiled=False) == "full"
    enough = found.memory(1, "selective").total / USABLE
    assert found.recomputed(1, enough, compiled=False) == "selective"
    assert found.recomputed(1, enough, compiled=True) in (4, 2, "full")


def test_auto_counts_what_is_free_on_a_gpu(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not the whole of it, of which NCCL has had a part by then; no GPU is here, so its answers are made up."""
    world, config = World(0, 0, 1, torch.device("cuda", 0)), load_config(tiny_config, AUTO)
    needed = estimate(tiny_config).memory(1, "none").total / USABLE
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 1000)
    for free, chosen in ((needed, "none"), (needed - 2000, 4)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device, free=free: (free, 100 * needed))
        assert choose_recomputed(config, COUNT, world) == chosen
        assert f"activation checkpointing {chosen}: an estimate of" in capsys.readouterr().out


def test_selective_and_compiled_blocks_are_refused(tiny_config: Path) -> None:
    typed = ["train.activation_checkpointing=selective"]
    with pytest.raises(ConfigError, match=r"train\.compile = true: train\.activation_checkpointing = selective keeps"):
        load_config(tiny_config, [*typed, "train.compile=true"])
    assert load_config(tiny_config, typed).why_not_compiled is not None


def test_no_block_is_every_zeroth(tiny_config: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.activation_checkpointing"):
        load_config(tiny_config, ["train.activation_checkpointing=0"])
