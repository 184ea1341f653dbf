"""Check that the collectives of training compute correct results in every dtype that training uses.

Each element of an all-reduce gets a number from one rank and zero from all others. So the sum is exact in every dtype
for any number of ranks, and a wrong element tells whose contribution was lost or changed.
"""

import time
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Facts, Finding, Place, Report

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
}
"""Gradients and losses; weights and gradients; norms; flags; checksums."""
ELEMENTS = 2**20
REPEATS = 3


def measure(place: Place) -> Facts:
    """Reduce, scatter, gather and exchange known values, and count wrong elements by contributing rank."""
    wrong: dict[str, dict[str, int]] = {}
    fastest = float("inf")
    for name, dtype in DTYPES.items():
        expected, owner = known_values(place, dtype)
        for _ in range(REPEATS):
            summed = torch.where(owner == place.world.rank, expected, 0).to(dtype)
            _synchronize(place)
            began = time.perf_counter()
            dist.all_reduce(summed)
            _synchronize(place)
            if dtype == torch.float32:
                fastest = min(fastest, time.perf_counter() - began)
            _note(wrong, f"all-reduce in {name}", owner[summed != expected])
        gathered = [torch.empty_like(expected) for _ in range(place.world.size)]
        dist.all_gather(gathered, expected + place.world.rank % 3)
        for rank, part in enumerate(gathered):
            if not torch.equal(part, expected + rank % 3):
                _note(wrong, f"all-gather in {name}", torch.tensor([rank]))
        _scatter(place, dtype, f"reduce-scatter in {name}", wrong)
        _exchange(place, dtype, f"all-to-all in {name}", wrong)
    return {"wrong": wrong, "gigabytes_per_second": 4 * ELEMENTS / fastest / 1e9}


def _scatter(place: Place, dtype: torch.dtype, what: str, wrong: dict[str, dict[str, int]]) -> None:
    """Have each rank receive its share of a sum of known values."""
    rank, ranks = place.world.rank, place.world.size
    share = ELEMENTS // ranks
    expected, owner = (each[: share * ranks] for each in known_values(place, dtype))
    received = expected.new_empty(share)
    dist.reduce_scatter_tensor(received, torch.where(owner == rank, expected, 0).to(dtype))
    mine = slice(share * rank, share * (rank + 1))
    _note(wrong, what, owner[mine][received != expected[mine]])


def _exchange(place: Place, dtype: torch.dtype, what: str, wrong: dict[str, dict[str, int]]) -> None:
    """Have each rank receive a share of known values from every rank."""
    rank, ranks = place.world.rank, place.world.size
    share = ELEMENTS // ranks
    expected = known_values(place, dtype)[0][: share * ranks]
    received = torch.empty_like(expected)
    dist.all_to_all_single(received, expected + rank % 3)
    for sender, part in enumerate(received.split(share)):
        if not torch.equal(part, expected[share * rank : share * (rank + 1)] + sender % 3):
            _note(wrong, what, torch.tensor([sender]))


def known_values(place: Place, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the expected value of every element, and the rank that contributes it."""
    index = torch.arange(ELEMENTS, device=place.world.device)
    return (index % 7 + 1).to(dtype), index % place.world.size


def _synchronize(place: Place) -> None:
    if place.world.device.type == "cuda":
        torch.cuda.synchronize(place.world.device)


def _note(wrong: dict[str, dict[str, int]], what: str, owners: torch.Tensor) -> None:
    """Add the owners of wrong elements to the counts of one operation."""
    if owners.numel():
        counts = Counter(str(owner) for owner in owners.tolist())
        wrong[what] = dict(counts + Counter(wrong.get(what, {})))


def judge(reports: Sequence[Report]) -> list[Finding]:
    """Name the rank whose contribution is wrong on all ranks, else the ranks that receive different results."""
    names = {str(report.rank): report for report in reports}
    findings = []
    for what in sorted({what for report in reports for what in report.facts["wrong"]}):
        told = [set(report.facts["wrong"].get(what, {})) for report in reports]
        for rank in sorted(set.intersection(*told), key=int):
            culprit = names[rank]
            text = f"{what}: what rank {rank} contributes arrives changed on every rank"
            findings.append(Finding("bad", culprit.node, text, _exclude(culprit)))
        everywhere = set.intersection(*told)
        for report, ranks in zip(reports, told, strict=True):
            if ranks - everywhere:
                text = (
                    f"{what}: rank {report.rank} receives wrong values from rank(s) {', '.join(sorted(ranks, key=int))}"
                )
                findings.append(Finding("bad", report.node, text, _exclude(report)))
    if findings:
        return findings
    speed = min(report.facts["gigabytes_per_second"] for report in reports)
    text = f"collectives are right in {', '.join(DTYPES)}; all-reduce at {speed:.2f} GB/s over {len(reports)} rank(s)"
    return [Finding("ok", EVERYWHERE, text)]


def _exclude(report: Report) -> str:
    return f"leave {report.node} out (Slurm: --exclude={report.node}) and report it to its administrator"
