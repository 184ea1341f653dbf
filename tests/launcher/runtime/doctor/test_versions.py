"""Versions, sources and variables that differ are named with the node that differs, not with the others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from plumbline.launcher.runtime.doctor import versions
from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Place
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system.installation import ROOT

if TYPE_CHECKING:
    from tests.launcher.runtime.doctor.conftest import Reports

PLACE = Place(World(0, 0, 1, torch.device("cpu")), Path("runs/none"))


@pytest.mark.parametrize("name", ["python", *versions.PACKAGES, "plumbline's sources"])
@pytest.mark.parametrize("odd", [0, 2])
def test_the_one_that_differs_is_named(reports: Reports, name: str, odd: int) -> None:
    facts = [versions.measure(PLACE) for _ in range(3)]
    assert [finding.level for finding in versions.judge(reports(facts))] == ["ok"]
    facts[odd]["versions"][name] = "0.0.1"
    (found,) = versions.judge(reports(facts))
    assert (found.level, found.node) == ("bad", f"n{odd}")
    assert found.text.startswith(f"rank {odd}: {name} 0.0.1, {facts[1]['versions'][name]} on most ranks")


def test_variables_are_worth_a_warning(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    usual = versions.measure(PLACE)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")  # nodes may call their interfaces differently
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")  # the ranks of a node each have their own
    same = versions.measure(PLACE)
    assert [finding.level for finding in versions.judge(reports([usual, usual, same]))] == ["ok"]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("NCCL_ALGO")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    found = versions.judge(reports([usual, usual, versions.measure(PLACE)]))
    assert {(finding.level, finding.node) for finding in found} == {("warning", "n2")}
    texts = "\n".join(finding.text for finding in found)
    assert "NCCL_ALGO is not set, Ring on most ranks" in texts
    assert "OMP_NUM_THREADS is 7" in texts
    assert "CUDA_VISIBLE_DEVICES shows 1 GPU(s), 2 GPU(s) on most ranks" in texts


@pytest.mark.parametrize(("package", "version"), [("torch", "2.12.1"), ("deepspeed", "0.19.9")])
def test_versions_that_are_not_certified_are_worth_one_warning(reports: Reports, package: str, version: str) -> None:
    facts = [versions.measure(PLACE) for _ in range(2)]
    for each, build in zip(facts, ("+cpu", "+cu130"), strict=True):
        each["versions"] |= {"torch": f"2.13.0{build}", "deepspeed": "0.19.8"}
    assert {finding.level for finding in versions.judge(reports(facts[:1]))} == {"ok"}, "a build is not a version"
    assert {finding.level for finding in versions.judge(reports(facts[1:]))} == {"ok"}
    for each in facts:
        each["versions"][package] = version
    facts[0]["versions"]["torch"] = facts[1]["versions"]["torch"]
    (found,) = versions.judge(reports(facts))
    assert (found.level, found.node) == ("warning", EVERYWHERE)
    assert f"{package} {version}" in found.text


def test_the_page_lists_the_versions_that_are_certified() -> None:
    page = (ROOT / "docs" / "proofs.md").read_text(encoding="utf-8")
    assert (
        tuple(re.findall(r"^\| (\d+\.\d+\.\d+) \| (\d+\.\d+\.\d+) \| passed", page, re.MULTILINE)) == versions.CERTIFIED
    )


def test_the_checksum_is_that_of_every_source(tmp_path: Path) -> None:
    (tmp_path / "model" / "blocks").mkdir(parents=True)
    file = tmp_path / "model" / "blocks" / "block.py"
    seen = {versions.checksum_of_sources(tmp_path)}
    for change in (lambda: file.write_text("x = 1"), lambda: file.write_text("x = 2"),
                   lambda: file.rename(file.with_name("other.py"))):  # fmt: skip
        change()
        seen.add(versions.checksum_of_sources(tmp_path))
    assert len(seen) == 4
    (tmp_path / "model" / "notes.txt").write_text("no source")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.py").write_text("never imported by a run")
    assert versions.checksum_of_sources(tmp_path) in seen
