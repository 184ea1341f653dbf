"""The speed is tokens over time."""

import time
from pathlib import Path

import pytest
import torch

from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.train.speed import SpeedMeter, known_tflops
from plumbline.model.flops import training_flops_per_token

WORLD = World(rank=0, local_rank=0, size=2, device=torch.device("cpu"))


def test_speed_is_tokens_over_time(tiny_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(tiny_config, ["metrics.peak_tflops=0.002"])
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    meter = SpeedMeter(config, WORLD)
    meter.restart(10)
    now = 104.0
    read = meter.read(12)
    assert read["tokens_per_second"] == 2 * 8 * 32 / 4.0
    flops = training_flops_per_token(config.model, 32, config.objective)
    assert read["mfu"] == pytest.approx(128.0 * flops / (2 * 0.002e12))
    now = 105.0
    assert meter.read(13)["tokens_per_second"] == 256.0, "counts from the last reading"
    now = 205.0
    meter.restart(13)  # an evaluation or a save took the time
    now = 206.0
    assert meter.read(14)["tokens_per_second"] == 256.0


def test_a_utilisation_above_one_is_not_stated_but_warned_of_once(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flops of 1000 steps in a second, of a device that is said to do those of 500."""
    config = load_config(tiny_config, ["metrics.peak_tflops=1"])
    flops = 8 * 32 * training_flops_per_token(config.model, 32, config.objective)
    config = load_config(tiny_config, [f"metrics.peak_tflops={500 * flops / WORLD.size / 1e12}"])
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    meter = SpeedMeter(config, WORLD)
    readings = []
    for step in (400, 1400, 2400, 2500):
        now += 1.0
        readings.append(meter.read(step))
    assert [reading["mfu"] for reading in readings] == [pytest.approx(0.8), None, None, None]
    assert [reading["tokens_per_second"] for reading in readings] == [400 * 256, 1000 * 256, 1000 * 256, 100 * 256]
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: mfu came out at 200%: ")
    assert "metrics.peak_tflops" in warning


def test_speed_counts_the_tokens_of_steps_that_differ_in_size(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of 2 sequences, then 8."""
    stages = "data.batch_size_warmup=[{tokens: 33, global_batch_size: 2}]"
    config = load_config(tiny_config, [stages, "metrics.peak_tflops=1"])
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    meter = SpeedMeter(config, WORLD)
    meter.restart(2)
    now = 101.0
    assert meter.read(5)["tokens_per_second"] == (2 * 2 + 8) * 32


def test_a_measured_peak_is_plausible(tiny_config: Path) -> None:
    config = load_config(tiny_config, ["metrics.peak_tflops=null"])
    assert 1e9 < SpeedMeter(config, WORLD).peak < 1e15


def test_the_peak_of_a_gpu_is_that_of_its_own_variant() -> None:
    names = ("NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA GB200", "NVIDIA B200", "NVIDIA H100 80GB HBM3", "NVIDIA T4")
    assert [known_tflops(name) for name in names] == [989, 835, 2500, 2250, 989, None]
