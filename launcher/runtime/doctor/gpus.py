"""Check each rank's GPU: not shared, correct results, as fast as the others, not in use, no memory errors."""

import shutil
import subprocess
import time
from collections.abc import Sequence
from statistics import median

import torch

from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Facts, Finding, Place, Report

WIDTH = 4096
REPEATS = 20
WARM_UP = 0.2  # seconds of products before those that are timed: an idle GPU has a low clock
SLOW, BROKEN = 0.8, 0.5
"""Fractions of the median speed below which a GPU causes a warning, and counts as bad."""
MOSTLY_FREE = 0.9
QUERY = (
    "uuid",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "clocks_throttle_reasons.hw_slowdown",
)
"""Quantities queried from nvidia-smi, which answers [N/A] if a GPU does not support one."""


def measure(place: Place) -> Facts:
    """Compute on this rank's GPU, and query the driver about it."""
    device = place.world.device
    if device.type != "cuda":
        return {"device": device.type}
    free, total = torch.cuda.mem_get_info(device)
    right, tflops = matrix_product(device, WIDTH)
    properties = torch.cuda.get_device_properties(device)
    uuid = f"GPU-{properties.uuid}"
    return {
        "device": device.type,
        "uuid": uuid,
        "model": properties.name,
        "visible": torch.cuda.device_count(),
        "free": free / total,
        "right": right,
        "tflops": tflops,
        "driver": driver_facts(ask_driver()).get(uuid, {}),
    }


def matrix_product(device: torch.device, width: int) -> tuple[bool, float]:
    """Return whether a matrix product in bf16 is correct, and its TFLOP/s.

    Entries are -1, 0 and 1, mostly 0, so that all sums are exact in bf16. The CPU checks the product C = A B by C x = A
    (B x), which takes width^2 operations instead of width^3.
    """
    generator = torch.Generator().manual_seed(1)
    signs = torch.randint(0, 2, (2, width, width), generator=generator, dtype=torch.float64) * 2 - 1
    left, right = signs[0] * (torch.rand(width, width, generator=generator) < 0.25), signs[1]
    a, b = left.to(device, torch.bfloat16), right.to(device, torch.bfloat16)
    product = torch.matmul(a, b)
    weights = torch.arange(1, width + 1, dtype=torch.float64)
    is_right = torch.equal(product.to("cpu", torch.float64) @ weights, left @ (right @ weights))
    _synchronize(device)
    began = before = time.perf_counter()
    while True:
        for _ in range(REPEATS):
            torch.matmul(a, b, out=product)
        _synchronize(device)
        now = time.perf_counter()
        if now - began > WARM_UP:
            return is_right, 2 * width**3 * REPEATS / (now - before) / 1e12
        before = now


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ask_driver() -> str:
    """Return the output of nvidia-smi, or "" if it is missing or does not support the query."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def driver_facts(answer: str) -> dict[str, dict[str, str]]:
    """Parse the output of nvidia-smi into uuid -> quantity -> value, without unsupported quantities."""
    found = {}
    for line in answer.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(QUERY) and values[0].startswith("GPU-"):
            known = zip(QUERY[1:], values[1:], strict=True)
            found[values[0]] = {name: value for name, value in known if "N/A" not in value and "Not Supp" not in value}
    return found


def judge(reports: Sequence[Report]) -> list[Finding]:
    """Name each GPU that is shared, wrong, slower than the others, in use, or reports errors."""
    without = [report for report in reports if report.facts["device"] != "cuda"]
    if len(without) == len(reports):
        return [Finding("ok", EVERYWHERE, "no GPU: skipped")]
    if without:
        remedy = "look for its driver (nvidia-smi), and at CUDA_VISIBLE_DEVICES"
        return [Finding("bad", report.node, f"rank {report.rank} sees no GPU, others do", remedy) for report in without]
    usual = median(report.facts["tflops"] for report in reports)
    findings = [finding for report in reports for finding in _of_one(report, usual)]
    owners: dict[tuple[str, str], Report] = {}
    for report in reports:
        first = owners.setdefault((report.node, report.facts["uuid"]), report)
        if first is not report:
            text = f"ranks {first.rank} and {report.rank} are on one GPU, {report.facts['uuid']}"
            findings.append(Finding("bad", report.node, text, "start one rank for each GPU (--gpus-per-node)"))
    for node in sorted({report.node for report in reports}):
        ranks = [report for report in reports if report.node == node]
        visible = max(report.facts["visible"] for report in ranks)
        if visible not in (1, len(ranks)):
            text = f"{visible} GPUs are visible, {len(ranks)} rank(s) run here"
            findings.append(Finding("warning", node, text, "start one rank for each GPU"))
    speeds = [report.facts["tflops"] for report in reports]
    text = f"{len(reports)} x {reports[0].facts['model']}: {min(speeds):.0f} to {max(speeds):.0f} TFLOP/s in bf16"
    return findings or [Finding("ok", EVERYWHERE, text)]


def _of_one(report: Report, usual: float) -> list[Finding]:
    """Return what is wrong with one rank's GPU."""
    facts, node, who = report.facts, report.node, f"rank {report.rank}, {report.facts['uuid']}"
    replace = f"leave {node} out (Slurm: --exclude={node}) and report it to its administrator"
    findings = []
    if not facts["right"]:
        findings.append(Finding("bad", node, f"{who}: a matrix product comes out wrong", replace))
    ratio = facts["tflops"] / usual
    if ratio < SLOW:
        text = f"{who}: {facts['tflops']:.0f} TFLOP/s, {ratio:.2f} of the median"
        findings.append(Finding("bad" if ratio < BROKEN else "warning", node, text, replace))
    if facts["free"] < MOSTLY_FREE:
        text = f"{who}: {facts['free']:.0%} of the memory is free before training"
        findings.append(Finding("warning", node, text, "end what else runs on it (nvidia-smi lists processes)"))
    for name, value in facts["driver"].items():
        if value not in ("0", "No", "Not Active"):
            findings.append(Finding("warning", node, f"{who}: nvidia-smi says {name} = {value}", replace))
    return findings
