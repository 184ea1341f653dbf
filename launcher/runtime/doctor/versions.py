"""Compare versions, our sources and environment variables across ranks, and name the nodes that differ.

Versions of torch and DeepSpeed that are equal everywhere but not certified cause a warning.
"""

import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Facts, Finding, Place, Report, common
from plumbline.launcher.runtime.system.installation import ROOT

SOURCES = ("launcher", "model", "data")
PACKAGES = ("torch", "deepspeed", "transformers", "numpy")
CERTIFIED = (("2.15.0", "0.19.8"), ("2.14.1", "0.19.8"), ("2.13.0", "0.19.8"), ("2.11.0", "0.19.8"))
"""torch and DeepSpeed with which tests/benchmarks/engine_certificate.py passes: docs/proofs.md has its results."""
VARIABLES = ("OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Compared by value, like every NCCL_*, except names of interfaces, which may differ."""
MAY_DIFFER = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")


def measure(_place: Place) -> Facts:
    """Return versions, the checksum of our sources, and environment variables that affect speed or results."""
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
            "plumbline's sources": checksum_of_sources(ROOT),
        },
        "variables": {
            **{name: os.environ.get(name, "not set") for name in VARIABLES},
            **{
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith("NCCL_") and name not in MAY_DIFFER
            },
        },
        "visible GPUs": _count(os.environ.get("CUDA_VISIBLE_DEVICES")),
        "interpreter": sys.executable,
    }


def judge(reports: Sequence[Report]) -> list[Finding]:
    """Name each rank whose versions (bad) or variables (warning) differ from those of most ranks."""
    findings = []
    for name in reports[0].facts["versions"]:
        for report, here, usual in _outliers(reports, "versions", name):
            remedy = f"give {report.node} the same checkout and environment (it runs {report.facts['interpreter']})"
            text = f"rank {report.rank}: {name} {here}, {usual} on most ranks"
            findings.append(Finding("bad", report.node, text, remedy))
    for name in sorted({name for report in reports for name in report.facts["variables"]}):
        for report, here, usual in _outliers(reports, "variables", name):
            text = f"rank {report.rank}: {name} is {here}, {usual} on most ranks"
            findings.append(Finding("warning", report.node, text, f"export {name} for all ranks alike"))
    most = common([report.facts["visible GPUs"] for report in reports])
    for report in reports:
        if (here := report.facts["visible GPUs"]) != most:
            text = f"rank {report.rank}: CUDA_VISIBLE_DEVICES shows {here}, {most} on most ranks"
            findings.append(Finding("warning", report.node, text, "ask for as many GPUs on every node"))
    findings += _uncertified(reports)
    if findings:
        return findings
    versions = reports[0].facts["versions"]
    return [Finding("ok", EVERYWHERE, ", ".join(f"{name} {versions[name]}" for name in ("python", *PACKAGES)))]


def _uncertified(reports: Sequence[Report]) -> list[Finding]:
    """Warn if the combination of torch and DeepSpeed on most ranks was never compared with plain PyTorch."""
    torch, deepspeed = (
        common([report.facts["versions"][name].partition("+")[0] for report in reports])
        for name in ("torch", "deepspeed")
    )
    if (torch, deepspeed) in CERTIFIED:
        return []
    text = f"torch {torch} with deepspeed {deepspeed} has not been held to plain PyTorch (docs/proofs.md)"
    remedy = "run tests/benchmarks/engine_certificate.py, or install the pinned versions (constraints.txt)"
    return [Finding("warning", EVERYWHERE, text, remedy)]


def checksum_of_sources(checkout: Path) -> str:
    """Return a checksum of the names and contents of all Python files that a run may import."""
    checksum = hashlib.blake2b(digest_size=6)
    for folder in SOURCES:
        for file in sorted((checkout / folder).rglob("*.py")):
            content = file.read_bytes()
            checksum.update(f"{file.relative_to(checkout)} {len(content)}\n".encode())
            checksum.update(content)
    return checksum.hexdigest()


def _outliers(reports: Sequence[Report], section: str, name: str) -> list[tuple[Report, str, str]]:
    """Return each rank that differs from most, with its value and theirs."""
    values = [str(report.facts[section].get(name, "not set")) for report in reports]
    usual = common(values)
    return [(report, here, usual) for report, here in zip(reports, values, strict=True) if here != usual]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _count(devices: str | None) -> str:
    """Return how many devices a list names; which ones may differ between the ranks of a node under Slurm."""
    if devices is None:
        return "all GPUs"
    return f"{sum(bool(name.strip()) for name in devices.split(','))} GPU(s)"
