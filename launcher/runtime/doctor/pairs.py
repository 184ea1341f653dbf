"""Measure the bandwidth between all pairs of nodes, or of ranks if they are few, and name the slow ones.

Pairs take turns so that no rank is in two at a time. A node is judged by its fastest pair: one bad node slows all its
pairs, but not the fastest pair of any other node. Pairs inside a node are compared among themselves.
"""

import time
from collections.abc import Mapping, Sequence
from statistics import median

import torch
import torch.distributed as dist

from plumbline.launcher.runtime.cluster.nodes import node_name
from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Facts, Finding, Level, Place, Report

FEW = 8
"""Most ranks of which all pairs are measured; with more, only one rank per node."""
BYTES = {"cpu": 2**24, "cuda": 2**26}
REPEATS = 3
SLOW, BROKEN = 0.5, 0.1
"""Fractions of the median below which a node or pair causes a warning, and counts as bad."""
WIDEST_TABLE = 16

Pair = tuple[int, int]


def measure(place: Place) -> Facts:
    """Return GB/s to each partner of a higher rank, and which ranks were measured."""
    world = place.world
    nodes: list[str] = [""] * world.size
    dist.all_gather_object(nodes, node_name())
    members = members_of(nodes)
    buffer = torch.zeros(BYTES[world.device.type], dtype=torch.uint8, device=world.device)
    speeds = {}
    for number, pairs in enumerate(turns(members)):
        for low, high in pairs:
            if world.rank in (low, high):
                seconds = _exchange(buffer, world.rank == low, high if world.rank == low else low)
                if world.rank == low:
                    speeds[str(high)] = 2 * buffer.numel() / seconds / 1e9
        place.meet(f"pairs/{number}")
    return {"members": members, "speeds": speeds}


def members_of(nodes: Sequence[str]) -> list[int]:
    """Return the ranks to measure, given all ranks' nodes: all, or the first of each node if there are many."""
    ranks = range(len(nodes))
    return list(ranks) if len(nodes) <= FEW else [rank for rank in ranks if nodes.index(nodes[rank]) == rank]


def turns(members: Sequence[int]) -> list[list[Pair]]:
    """Return all pairs as the turns of a round-robin tournament, with each member at most once per turn."""
    ring: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        facing = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def _exchange(buffer: torch.Tensor, is_first: bool, other: int) -> float:
    """Send the buffer back and forth a few times, and return the fastest time in seconds, without the first."""
    fastest = float("inf")
    for turn in range(1 + REPEATS):
        began = time.perf_counter()
        for sends in (is_first, not is_first):
            if sends:
                dist.send(buffer, other)
            else:
                dist.recv(buffer, other)
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)
        if turn > 0:
            fastest = min(fastest, time.perf_counter() - began)
    return fastest


def judge(reports: Sequence[Report]) -> list[Finding]:
    """Name the nodes whose fastest pair is slow compared with the median of all nodes, then other slow pairs."""
    nodes = {report.rank: report.node for report in reports}
    speeds = _speeds(reports)
    if not speeds:
        return [Finding("ok", EVERYWHERE, "one rank: no pairs to measure")]
    findings = []
    for inside in (False, True):
        kind = {pair: speed for pair, speed in speeds.items() if (nodes[pair[0]] == nodes[pair[1]]) == inside}
        findings += _slow(kind, {report.rank: report for report in reports})
    if findings:
        return findings
    span = f"{min(speeds.values()):.2f} to {max(speeds.values()):.2f} GB/s"
    return [Finding("ok", EVERYWHERE, f"bandwidth of {len(speeds)} pair(s): {span}")]


def _speeds(reports: Sequence[Report]) -> dict[Pair, float]:
    return {(report.rank, int(other)): speed for report in reports for other, speed in report.facts["speeds"].items()}


def _slow(speeds: Mapping[Pair, float], reports: Mapping[int, Report]) -> list[Finding]:
    """Return what is slow among pairs of one kind. A single pair has nothing to be compared with."""
    best: dict[int, float] = {}
    for pair, speed in speeds.items():
        for rank in pair:
            best[rank] = max(speed, best.get(rank, 0.0))
    if len(best) < 3:
        return []
    usual = median(best.values())
    findings, slow = [], set()
    for rank in sorted(best):
        if best[rank] < SLOW * usual:
            slow.add(rank)
            text = (
                f"rank {rank} exchanges {best[rank]:.2f} GB/s with any other at most, {best[rank] / usual:.2f} of the "
                "median"
            )
            node = reports[rank].node
            findings.append(Finding(_level(best[rank] / usual), node, text, f"leave {node} out, or look at its link"))
    for (low, high), speed in speeds.items():
        if speed < SLOW * usual and not {low, high} & slow:
            text = f"rank {low} and {reports[high].name} exchange {speed:.2f} GB/s, {speed / usual:.2f} of the median"
            findings.append(Finding(_level(speed / usual), reports[low].node, text, "look at the link between the two"))
    return findings


def _level(ratio: float) -> Level:
    return "bad" if ratio < BROKEN else "warning"


def table(reports: Sequence[Report]) -> list[str]:
    """Return a table of the GB/s of all pairs; empty for one rank or for more than fit on a screen."""
    speeds = _speeds(reports)
    members = reports[0].facts["members"]
    if not 2 <= len(members) <= WIDEST_TABLE:
        return []
    names = [f"{reports[rank].node}/{rank}" for rank in members]
    width = max(6, *(len(name) for name in names))
    lines = ["GB/s between ranks", " ".join(name.rjust(width) for name in ["", *names])]
    for name, row in zip(names, members, strict=True):
        cells = (speeds.get((min(row, column), max(row, column))) for column in members)
        lines.append(
            " ".join([name.rjust(width), *(f"{cell:.2f}".rjust(width) if cell else "-".rjust(width) for cell in cells)])
        )
    return lines
