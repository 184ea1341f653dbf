"""The ZeRO stage that `auto` becomes: of what the configuration permits and the devices hold, the fastest."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.memory import USABLE, DeviceMemory
from plumbline.launcher.runtime.engine.network import Machine, StepTime
from plumbline.launcher.runtime.engine.stage import (
    StageEstimate,
    choose_stage,
    estimate_stages,
    fastest,
    preferred,
    shortage,
)
from plumbline.launcher.runtime.ranks.world import World
from tests.conftest import Command, Pretrain

AUTO = "deepspeed.zero_stage=auto"
LARGE = [
    "model.hidden_size=1024",
    "model.num_hidden_layers=16",
    "model.intermediate_size=3072",
    "data.micro_batch_size=1",
]
"""So that states outweigh the buffers of messages; nothing of it is allocated."""
FOUR_RANKS = World(rank=0, local_rank=0, size=4, device=torch.device("cpu"))


def test_the_fastest_stage_is_one_that_fits() -> None:
    facts = {0: (95.0, 1.0, 1.0), 1: (85.0, 2.0, 1.0), 2: (50.0, 1.0, 2.0)}
    estimates = {
        stage: StageEstimate("none", DeviceMemory(size, 0.0, 0.0, 0.0, 0.0), StepTime(0.0, arithmetic, messages))
        for stage, (size, arithmetic, messages) in facts.items()
    }
    assert fastest(estimates, 1000.0) == 0
    assert fastest(estimates, 100.0) == 1, "95 leaves no room for the allocator; of equals the lower stage"
    assert fastest(estimates, 90.0) == 2
    assert fastest(estimates, 10.0) is None


def test_the_first_stage_is_preferred_where_it_fits() -> None:
    facts = {1: (95.0, 5.0), 2: (50.0, 4.0), 3: (30.0, 3.0)}
    estimates = {
        stage: StageEstimate("none", DeviceMemory(size, 0.0, 0.0, 0.0, 0.0), StepTime(0.0, seconds, 0.0))
        for stage, (size, seconds) in facts.items()
    }
    assert [preferred(estimates, size) for size in (1000.0, 90.0, 40.0, 10.0)] == [1, 3, 3, 3]
    assert shortage(estimates, 1, 1000.0) is None
    assert (shortage(estimates, 1, 90.0) or "").endswith("ZeRO stage 2 or 3 does")
    assert "; no ZeRO stage does: " in (shortage(estimates, 3, 10.0) or "")
    estimates[3] = StageEstimate("none", estimates[3].memory, StepTime(0.0, 6.0, 0.0))
    assert [preferred(estimates, size) for size in (1000.0, 90.0, 40.0, 10.0)] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("overrides", "permitted"),
    [
        ([], {1, 2, 3}),
        (["deepspeed.offload_optimizer=true"], {1, 2, 3}),
        (["run.reproducible=any_ranks"], {1, 2}),
        (["optimizer.name=soap"], {0}),
    ],
    ids=["all", "offload", "any_ranks", "soap"],
)
def test_stages_are_those_that_the_configuration_permits(
    tiny_config: Path, overrides: list[str], permitted: set[int]
) -> None:
    seen: set[int] = set()

    def choose(candidates: Mapping[int, Config]) -> int:
        assert {stage: config.deepspeed.zero_stage for stage, config in candidates.items()} == {
            n: n for n in candidates
        }
        seen.update(candidates)
        return max(candidates)

    assert load_config(tiny_config, [AUTO, *overrides], choose).deepspeed.zero_stage == max(permitted)
    assert seen == permitted


def test_what_is_wrong_besides_is_told(tiny_config: Path) -> None:
    with pytest.raises(ConfigError, match=r"1 problem.*\n.*optimizer.lr = -1"):
        load_config(tiny_config, [AUTO, "optimizer.lr=-1"], min)
    with pytest.raises(ConfigError, match=r"optimizer\.name = soap needs whole matrices"):
        load_config(tiny_config, [AUTO, "optimizer.name=soap", "deepspeed.offload_optimizer=true"], min)


def test_who_does_not_know_the_devices_asks_for_a_number(tiny_config: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("deepspeed.zero_stage = auto is for one run")):
        load_config(tiny_config, [AUTO])


def test_less_memory_makes_a_higher_stage(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host's memory is what CPU ranks share; here it is as much as each stage just needs."""
    candidates = {stage: load_config(tiny_config, [*LARGE, f"deepspeed.zero_stage={stage}"]) for stage in (1, 2, 3)}
    rows, machine = plan_run(candidates[1]).rows, Machine(4, 1.0, 1.0)
    estimates = estimate_stages(candidates[1], rows, candidates, machine, 1e12, torch.device("cpu"))
    sizes = [estimates[stage].memory.total for stage in (1, 2, 3)]
    assert sizes[0] > sizes[1] > sizes[2]

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    room = [1.01 * size / USABLE for size in sizes]
    for device_bytes, stage in ((room[0], 1), (room[2], 3), (0.9 * sizes[2], 3)):
        memory = type("Memory", (), {"total": 4 * device_bytes})
        monkeypatch.setattr("psutil.virtual_memory", lambda memory=memory: memory)
        assert choose_stage(candidates, FOUR_RANKS, told=True) == stage
        shown = capsys.readouterr()
        assert f"stage    {stage}, of deepspeed.zero_stage = auto: an estimate in GiB is" in shown.out
        assert ("no ZeRO stage fits" in shown.err) is (device_bytes < sizes[2])


def test_what_is_expected_of_a_stage_is_not_of_the_one_that_the_configuration_has(tiny_config: Path) -> None:
    """Blocks that run more than once in a step are compiled below stage 3 alone, and then not recomputed in part."""
    asked = ["objective.name=registers", "train.activation_checkpointing=auto"]
    configs = [load_config(tiny_config, [*asked, f"deepspeed.zero_stage={stage}"]) for stage in (1, 3)]
    rows, machine, gpu = plan_run(configs[0]).rows, Machine(1, 1.0, 1.0), torch.device("cuda")
    first, third = (estimate_stages(config, rows, (1, 3), machine, 1e12, gpu) for config in configs)
    assert first == third
    room = 0.999 * first[3].memory.total / USABLE  # not enough to recompute nothing
    first, third = (estimate_stages(config, rows, (3,), machine, room, gpu) for config in configs)
    assert first[3].recomputed == third[3].recomputed == "selective"


def test_a_run_and_its_branch_choose_a_stage_and_remember_it(run_pretrain: Pretrain, tiny_config: Path) -> None:
    keys = [AUTO, "train.steps=4", "checkpoint.interval=2", "schedule.warmup=1 steps"]
    outcome = run_pretrain(tiny_config, "auto_stage", keys)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("stage    1, of deepspeed.zero_stage = auto") == 1
    assert load_config(outcome.run.folder / "config.yaml", []).deepspeed.zero_stage == 1
    parent = outcome.run.folder / "checkpoints" / "step_00000002"
    keys += [f"schedule.branch={{checkpoint: {parent}, steps: 1}}"]
    outcome = run_pretrain(tiny_config, "auto_branch", keys)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("stage    1, of deepspeed.zero_stage = auto") == 1


def test_a_configuration_that_is_printed_is_yaml_alone(command: Command, tiny_config: Path) -> None:
    done = command("pretrain", "--config", tiny_config, "--print-config", AUTO)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["deepspeed"]["zero_stage"] == 1
