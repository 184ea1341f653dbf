"""What is known of GPUs without one: what nvidia-smi answers, whom figures name, and whether a product is checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from plumbline.launcher.runtime.doctor import gpus
from plumbline.launcher.runtime.doctor.check import Place
from plumbline.launcher.runtime.ranks.world import World

if TYPE_CHECKING:
    from tests.launcher.runtime.doctor.conftest import Reports

CPU = torch.device("cpu")
# Written by hand, with the fields that are asked for: a good GPU, one with errors, one without ECC
ANSWER = """\
GPU-00000000-0000-0000-0000-000000000000, 0, No, Not Active
GPU-11111111-1111-1111-1111-111111111111, 3, Yes, Active
GPU-22222222-2222-2222-2222-222222222222, [N/A], [Not Supported], Not Active
"""


def gpu(number: int, **changes: Any) -> dict[str, Any]:
    facts = {"device": "cuda", "uuid": f"GPU-{number}", "model": "NVIDIA H100", "visible": 1, "free": 0.99}
    return {**facts, "right": True, "tflops": 700.0, "driver": {}, **changes}


def test_the_answer_of_the_driver_is_read() -> None:
    good, bad, plain = gpus.driver_facts(ANSWER).values()
    assert list(good.values()) == ["0", "No", "Not Active"]
    assert list(bad.values()) == ["3", "Yes", "Active"]
    assert list(plain.values()) == ["Not Active"]
    for answer in ("", 'Field "retired_pages.pending" is not a valid field to query.\n', "GPU-1, 0\n"):
        assert gpus.driver_facts(answer) == {}


def test_a_driver_that_fails_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.ask_driver() == ""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    program.chmod(0o755)
    assert gpus.ask_driver() == ""
    program.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\necho 'GPU-1, 0, No, Not Active'\n")
    assert gpus.driver_facts(gpus.ask_driver())["GPU-1"]["retired_pages.pending"] == "No"
    assert (tmp_path / "asked").read_text() == f"--query-gpu={','.join(gpus.QUERY)} --format=csv,noheader,nounits\n"


def test_without_gpus_it_is_skipped(reports: Reports) -> None:
    facts = gpus.measure(Place(World(0, 0, 1, CPU), Path("runs/none")))
    assert [finding.text for finding in gpus.judge(reports([facts, facts]))] == ["no GPU: skipped"]


def test_a_matrix_product_is_checked_in_every_element(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "REPEATS", 1)
    is_right, tflops = gpus.matrix_product(CPU, 256)
    assert is_right
    assert tflops > 0
    multiply = torch.matmul
    for row, column in ((0, 0), (255, 0), (17, 255)):

        def wrong(*factors: torch.Tensor, row: int = row, column: int = column, **options: Any) -> torch.Tensor:
            product = multiply(*factors, **options)
            product[row, column] += 1
            return product

        with monkeypatch.context() as patched:
            patched.setattr(torch, "matmul", wrong)
            assert not gpus.matrix_product(CPU, 256)[0]


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"right": False}, "bad", "rank 1, GPU-1: a matrix product comes out wrong"),
        ({"tflops": 500.0}, "warning", "rank 1, GPU-1: 500 TFLOP/s, 0.71 of the median"),
        ({"tflops": 300.0}, "bad", "rank 1, GPU-1: 300 TFLOP/s, 0.43 of the median"),
        ({"free": 0.5}, "warning", "rank 1, GPU-1: 50% of the memory is free before training"),
        ({"driver": {"retired_pages.pending": "Yes"}}, "warning", "rank 1, GPU-1: nvidia-smi says retired_pages"),
        ({"uuid": "GPU-0"}, "ok", "3 x NVIDIA H100"),
        ({"visible": 8}, "warning", "8 GPUs are visible, 1 rank(s) run here"),
        ({"device": "cpu"}, "bad", "rank 1 sees no GPU, others do"),
    ],
)
def test_a_gpu_that_stands_out_is_named(reports: Reports, changes: dict[str, Any], level: str, text: str) -> None:
    assert [finding.level for finding in gpus.judge(reports([gpu(0), gpu(1), gpu(2)]))] == ["ok"]
    (found,) = gpus.judge(reports([gpu(0), gpu(1, **changes), gpu(2)]))
    assert (found.level, found.node) == (level, "all" if level == "ok" else "n1")
    assert found.text.startswith(text)


def test_two_ranks_on_one_gpu_are_named(reports: Reports) -> None:
    (found,) = gpus.judge(reports([gpu(0), gpu(1), gpu(2), gpu(2)], per_node=2))
    assert (found.level, found.node, found.text) == ("bad", "n1", "ranks 2 and 3 are on one GPU, GPU-2")
