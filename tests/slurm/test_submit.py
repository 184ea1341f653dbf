"""launcher/submit.py: what it refuses, what it writes into the run folder, and that Slurm takes it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plumbline.launcher import submit
from plumbline.launcher.runtime.commands import cli
from plumbline.launcher.runtime.config.load import load_config, save_config
from plumbline.launcher.runtime.run.status import RunStatus

if TYPE_CHECKING:
    from plumbline.launcher.runtime.config.schema import Config
    from tests.slurm.conftest import Cluster

Submit = Callable[..., str]


@pytest.fixture
def run_submit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Submit:
    """Run the command in this process; returns its output, its errors where `fails`, both where `streams`."""

    def run(*arguments: str | Path, fails: bool = False, streams: bool = False) -> str:
        monkeypatch.setattr(sys, "argv", ["submit.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_code:
            cli.run(submit.main)
        printed = capsys.readouterr()
        assert exit_code.value.code == (2 if fails else 0), printed.err
        return printed.err if fails else printed.err + printed.out if streams else printed.out

    return run


def test_the_run_folder_holds_the_job_as_it_was_checked(run_submit: Submit, config: Path) -> None:
    options = ("--nodes", "2", "--gpus-per-node", "h100:4", "--time", "2:00:00", "--partition", "big", "--dry-run")
    printed = run_submit("--config", config, *options, "optimizer.lr=0.001", "data.micro_batch_size=2", streams=True)
    checked = load_config(config, ["optimizer.lr=0.001", "data.micro_batch_size=2"])
    config.write_text("edited while the job waits in the queue")

    folder = config.parent / "runs" / "tiny" / "slurm"
    assert load_config(folder / "config-1.yaml", []) == checked
    script = (folder / "submit-1.sh").read_text()
    assert script in printed
    subprocess.run(["bash", "-n", folder / "submit-1.sh"], check=True)
    asked = {line.strip(" \\") for line in script.splitlines() if line.startswith("    ")}
    assert {"--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=h100:4", "--time=2:00:00", "--partition=big"} <= asked
    assert f"--config={folder}/config-1.yaml || exit" in asked
    assert not any("account" in option or "cpus" in option for option in asked)
    assert "warning: --cpus-per-task was not given: " in printed


@pytest.mark.parametrize(("overrides", "stages"), [([], {1, 2, 3}), (["optimizer.name=soap"], {0})])
def test_a_job_chooses_its_stage_where_the_run_leaves_it_open(
    run_submit: Submit, config: Path, overrides: list[str], stages: set[int]
) -> None:
    run_submit("--config", config, "--tasks-per-node", "1", "--dry-run", "deepspeed.zero_stage=auto", *overrides)
    asked: list[Mapping[int, Config]] = []

    def choose(candidates: Mapping[int, Config]) -> int:
        asked.append(candidates)
        return max(candidates)

    found = load_config(config.parent / "runs" / "tiny" / "slurm" / "config-1.yaml", [], choose)
    assert set(asked[0]) == stages
    assert found == load_config(config, [f"deepspeed.zero_stage={max(stages)}", *overrides])


def test_a_second_submission_keeps_the_first(run_submit: Submit, config: Path) -> None:
    command = ("--config", config, "--tasks-per-node", "1", "--dry-run", "--json")
    first, second = (json.loads(run_submit(*command)) for _ in range(2))
    assert [Path(facts["script"]).name for facts in (first, second)] == ["submit-1.sh", "submit-2.sh"]
    assert first["job_id"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nodes", "3"), "data.global_batch_size 16 is not a multiple of the world size 3"),
        (("data.train=[{path: nowhere}]", "model.vocab_size=257"), "nowhere: no corpus here"),
        (("optimizer.lrr=1",), "did you mean lr?"),
        (("guards.transfer.base=nowhere",), "nowhere/metrics.jsonl is not there: name the folder of a run"),
    ],
    ids=["uneven-batch", "no-corpus", "unknown-key", "no-base"],
)
def test_what_would_fail_after_the_queue_is_refused_before_it(
    run_submit: Submit, config: Path, arguments: tuple[str, ...], words: str
) -> None:
    errors = run_submit("--config", config, "--tasks-per-node", "1", *arguments, fails=True)
    assert errors.startswith("error: ")
    assert words in errors
    assert not (config.parent / "runs").exists()


def test_what_the_site_is_asked_for_is_in_the_script(run_submit: Submit, config: Path) -> None:
    command = ("--config", config, "--tasks-per-node", "1", "--dry-run", "--chain", "3", "--notice", "900")
    site = {"partition": "a,b", "qos": "long", "constraint": "h100&ib", "reservation": "r", "exclude": "n[1-2]"}
    site |= {"account": "us", "mail-user": "us@here"}
    printed = run_submit(*command, *(word for option in site.items() for word in (f"--{option[0]}", option[1])))
    assert "for _ in {1..3}; do" in printed
    words = shlex.split(printed)
    assert {f"--{option}={value}" for option, value in site.items()} | {"--signal=USR1@900"} <= set(words)


def test_a_time_limit_too_short_to_train_in_is_refused(run_submit: Submit, config: Path) -> None:
    command = ("--config", config, "--tasks-per-node", "1", "--dry-run", "--time", "10:00", "--notice", "600")
    errors = run_submit(*command, fails=True)
    assert errors.startswith("error: --time 10:00 is less than 600 s of --notice")
    assert not (config.parent / "runs").exists()


def test_trackers_that_a_job_of_this_environment_cannot_use_are_a_warning(
    run_submit: Submit, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no error: slurm/cluster.env may name another environment, or log in."""
    monkeypatch.setitem(sys.modules, "trackio", None)
    command = ("--config", config, "--nodes", "1", "--tasks-per-node", "1", "--dry-run")
    assert "metrics.trackers" not in run_submit(*command, streams=True)
    printed = run_submit(*command, "metrics.trackers=[trackio]", streams=True)
    assert "warning: metrics.trackers = [trackio]: trackio cannot be imported: " in printed


@pytest.mark.parametrize(
    ("nodes", "path", "warned"), [("2", "file://{}", True), ("1", "file://{}", False), ("2", "{}", False)]
)
def test_one_cache_of_many_nodes_is_a_warning(
    run_submit: Submit,
    config: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: str,
    path: str,
    warned: bool,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(config.parent / "home"))
    command = ("--config", config, "--nodes", nodes, "--tasks-per-node", "1", "--dry-run")
    printed = run_submit(*command, f"data.train=[{{path: '{path.format(corpus)}'}}]", streams=True)
    assert ("data.cache.path is not set" in printed) == warned
    own = f"data.cache.path={config.parent / 'local'}"
    assert "data.cache.path is not set" not in run_submit(
        *command, f"data.train=[{{path: '{path.format(corpus)}'}}]", own, streams=True
    )


@pytest.mark.parametrize(("seconds", "warned"), [(149, False), (151, True)])
def test_a_notice_that_the_last_save_leaves_too_little_of_is_a_warning(
    run_submit: Submit, config: Path, seconds: float, warned: bool
) -> None:
    run = config.parent / "runs" / "tiny"
    run.mkdir(parents=True)
    with RunStatus(run) as status:
        status.saved(seconds)
        status.end(85, "stopped on request")
    command = ("--config", config, "--tasks-per-node", "1", "--dry-run")
    printed = run_submit(*command, streams=True)
    words = f"warning: the last save of {run} took {seconds} s, more than half of the 300 s of --notice"
    assert (words in printed) == warned
    assert ("give --notice 453" in printed) == warned
    assert "--signal=USR1@300" in printed


def test_a_job_for_a_complete_run_is_a_warning(run_submit: Submit, config: Path) -> None:
    run, checked = config.parent / "runs" / "tiny", load_config(config, [])
    run.mkdir(parents=True)
    save_config(checked, run / "config.yaml")
    command = ("--config", config, "--tasks-per-node", "1", "--dry-run")
    assert "is complete" not in run_submit(*command, streams=True)
    (run / "result.json").write_text(json.dumps({"step": checked.train.steps}))
    assert f"warning: {run} is complete: the job would end at once" in run_submit(*command, streams=True)


def test_a_dry_run_keeps_the_count_of_fruitless_attempts(run_submit: Submit, config: Path) -> None:
    tally = config.parent / "runs" / "tiny" / "slurm" / "attempts.json"
    tally.parent.mkdir(parents=True)
    tally.write_text('{"saved": [0], "fruitless": 2}')
    run_submit("--config", config, "--tasks-per-node", "1", "--dry-run")
    assert tally.exists()


def test_without_slurm_one_line_says_so(run_submit: Submit, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    errors = run_submit("--config", config, "--tasks-per-node", "1", fails=True)
    assert errors == "error: sbatch not found: run this on a login node of the Slurm cluster, or add --dry-run\n"


@pytest.fixture
def on_cluster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Slurm commands of this process go to the test cluster."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return cluster


def test_what_slurm_says_is_passed_on(run_submit: Submit, config: Path, on_cluster: Cluster) -> None:
    errors = run_submit("--config", config, "--tasks-per-node", "1", "--partition", "none", fails=True)
    assert "invalid partition specified: none" in errors


def test_a_second_job_of_a_run_waits_for_the_first(run_submit: Submit, config: Path, on_cluster: Cluster) -> None:
    on_cluster.run("scontrol", "update", "PartitionName=main", "State=DOWN")  # so that neither starts
    try:
        command = ("--config", config, "--tasks-per-node", "1", "--cpus-per-task", "2", "--json")
        first, second = (on_cluster.job(json.loads(run_submit(*command))["job_id"]) for _ in range(2))
        assert (first["Dependency"], second["Dependency"]) == ("(null)", "singleton(unfulfilled)")
        assert (first["NumCPUs"], first["JobName"]) == ("2", "tiny")
        assert first["StdOut"] == f"{config.parent}/runs/tiny/slurm/job-{first['JobId']}.log"
        on_cluster.run("scancel", first["JobId"], second["JobId"])
    finally:
        on_cluster.run("scontrol", "update", "PartitionName=main", "State=UP")


def test_a_job_above_the_limits_of_its_partition_is_a_warning(
    run_submit: Submit, config: Path, on_cluster: Cluster
) -> None:
    """Slurm takes it, and lets it wait for ever."""
    on_cluster.run("scontrol", "create", "PartitionName=short", "Nodes=ALL", "MaxTime=60", "MaxNodes=1", "State=UP")
    try:
        for words, asked in (
            ("short --time 90", "01:30:00 on 1"),
            ("short --time 60 --nodes 2", "01:00:00 on 2"),
            ("short --time 60", None),
            ("short,main --time 90 --nodes 2", None),
        ):
            command = ("--config", config, "--tasks-per-node", "1", "--partition", *words.split())
            printed = run_submit(*command, streams=True)
            (job,) = re.findall(r"scancel (\d+)$", printed, re.MULTILINE)
            on_cluster.run("scancel", job)
            on_cluster.wait_end(job)  # else the next job waits for this one
            told = rf"job {job} will not start, Partition\w+: it asks for {asked} node\(s\); partition short has "
            told += f"MaxTime 01:00:00, MaxNodes 1, TotalNodes 2; scancel {job}, then submit with another --time,"
            assert ("will not start" in printed) == (asked is not None), printed
            assert asked is None or re.search(told, printed), printed
    finally:
        on_cluster.run("scontrol", "delete", "PartitionName=short")
