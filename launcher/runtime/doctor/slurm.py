"""Check what Slurm will do to this job at its time limit, at a preemption and when a node dies."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from plumbline.launcher.runtime.cluster import nodes
from plumbline.launcher.runtime.cluster.deadline import NOTICE, read_notice
from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Facts, Finding, Place, Report
from plumbline.launcher.runtime.system.installation import ROOT

SHORT = 30
"""Seconds of KillWait, Slurm's default, below which a save after SIGTERM has little time."""
LONG = 1800
"""Seconds of SlurmdTimeout for which a dead node would keep a job waiting."""
FEW = 4
"""Cores per rank below which training, reading, checkpointing and compiling compete."""
BY_QOS = "preempt/qos"
"""PreemptType with which mode and grace time come from the job's QOS, not from its partition."""
NOTIFYING = {"PreemptParameters": "send_user_signal", "SlurmctldParameters": "preempt_send_user_signal"}
"""Parameters, in newer versions of Slurm and in older ones, under which a preemption sends the signal of --signal."""
ASK_QOS = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name,PreemptMode,GraceTime")
EARLY = 60
"""Seconds by which the notice before a time limit may come early (man sbatch, --signal)."""


def measure(place: Place) -> Facts:
    """Query the controller on rank 0, and this task's cores on all ranks."""
    facts: Facts = {
        "in a job": "SLURM_JOB_ID" in os.environ,
        "device": place.world.device.type,
        "cores": len(os.sched_getaffinity(0)),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "cores asked for": os.environ.get("SLURM_CPUS_PER_TASK", ""),
    }
    if place.world.is_main and shutil.which("scontrol") is not None:
        facts["configuration"] = settings(_ask("config"))
        if job := nodes.own_job():
            facts["job"] = nodes.read_fields(_ask("job", job))
            facts["partition"] = nodes.read_fields(_ask("partition", facts["job"].get("Partition", "")))
            if facts["configuration"].get("PreemptType") == BY_QOS:
                facts["qos"] = qos(_run(*ASK_QOS), facts["job"].get("QOS", ""))
            facts["notice"] = int(read_notice()) if os.environ.get(NOTICE) else notice()
    return facts


def _ask(*what: str) -> str:
    """Return the controller's answer, or "" if there is none."""
    return _run("scontrol", "--oneliner", "show", *filter(None, what))


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def qos(answer: str, name: str) -> dict[str, str] | None:
    """Return PreemptMode and GraceTime of a QOS from the answer to `ASK_QOS`, or None if it is not listed."""
    rows = (line.split("|") for line in answer.splitlines() if line.count("|") == 2)
    return next(({"PreemptMode": mode.upper(), "GraceTime": grace} for own, mode, grace in rows if own == name), None)


def settings(answer: str) -> dict[str, str]:
    """Return name -> value from the output of `scontrol show config`."""
    lines = (line.split("=", 1) for line in answer.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, value in lines}


def notice() -> int | None:
    """Return how many seconds before its time limit slurm/pretrain.sbatch requests a signal."""
    script = ROOT / "slurm" / "pretrain.sbatch"
    found = re.search(r"^#SBATCH --signal=\w+@(\d+)", script.read_text(), re.MULTILINE) if script.is_file() else None
    return None if found is None else int(found[1])


def seconds(text: str) -> float | None:
    """Return the seconds in `30 sec` or a time limit D-HH:MM:SS, or None if it is unlimited."""
    if found := re.fullmatch(r"(\d+) sec", text):
        return float(found[1])
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def judge(reports: Sequence[Report]) -> list[Finding]:
    """Warn of settings that would cost a checkpoint, a requeue or cores; none prevents a run from training."""
    main = reports[0]
    configuration = main.facts.get("configuration", {})
    if not configuration:
        return [Finding("ok", EVERYWHERE, "no Slurm: skipped")]
    found = _cluster(configuration)
    if configuration.get("PreemptType") == BY_QOS:
        found += _preemption_by_qos(configuration, main.facts.get("qos")) if "job" in main.facts else []
    else:
        found += _preemption(configuration, main.facts.get("partition", {}), "partition")
    found += _job(main.facts.get("job", {}), configuration, main.facts.get("notice"))
    findings = [Finding("warning", EVERYWHERE, text, remedy) for text, remedy in found]
    findings += [finding for report in reports for finding in _cores(report)]
    told = ", ".join(
        f"{name} {configuration[name]}" for name in ("KillWait", "JobRequeue", "SlurmdTimeout") if name in configuration
    )
    return findings or [Finding("ok", EVERYWHERE, told)]


Advice = tuple[str, str]


def _cluster(configuration: Mapping[str, str]) -> list[Advice]:
    found = []
    patience = seconds(configuration.get("KillWait", ""))
    if patience is not None and patience < SHORT:
        text = f"KillWait = {patience:.0f} s: what scancel or a preemption asks to stop is killed before it has saved"
        found.append((text, "save by `scancel --signal=USR1 JOBID`, or have KillWait raised"))
    timeout = seconds(configuration.get("SlurmdTimeout", ""))
    if timeout is not None and not 0 < timeout <= LONG:
        until = "is never noticed" if timeout == 0 else "is noticed late"
        found.append(
            (
                f"SlurmdTimeout = {timeout:.0f} s: a node that dies {until}, and the job not requeued till then",
                "watch the log of the run, or have SlurmdTimeout set to 300",
            )
        )
    return found


def _preemption_by_qos(configuration: Mapping[str, str], found: Mapping[str, str] | None) -> list[Advice]:
    """Return what a preemption would do under the settings of the job's QOS (None if sacctmgr does not show them)."""
    if found is None:
        text = f"jobs may be preempted (PreemptType {BY_QOS}); how could not be told: sacctmgr does not show the QOS"
        return [(text, f"ask for PreemptMode and GraceTime: `{' '.join(ASK_QOS)}`")]
    own = {} if found["PreemptMode"] in ("", "CLUSTER") else {"PreemptMode": found["PreemptMode"]}
    grace = {"GraceTime": "0"} if seconds(found["GraceTime"]) == 0 else {}
    return _preemption(configuration, {**own, **grace}, "QOS")


def _preemption(configuration: Mapping[str, str], kind: Mapping[str, str], name: str) -> list[Advice]:
    """Return what a preemption would do without warning the ranks, under the settings of a partition or QOS."""
    mode = kind.get("PreemptMode", configuration.get("PreemptMode", "OFF"))
    if configuration.get("PreemptType", "preempt/none") == "preempt/none" or mode in ("OFF", "GANG"):
        return []
    found = []
    if not any(word in configuration.get(name, "").split(",") for name, word in NOTIFYING.items()):
        text = f"jobs may be preempted (PreemptMode {mode}), and get no USR1 ahead of it"
        newer, older = (f"{name}={word}" for name, word in NOTIFYING.items())
        remedy = f"have {newer} (in older versions of Slurm {older}) set, or set checkpoint.interval small"
        found.append((text, remedy))
    if kind.get("GraceTime") == "0":
        text = f"jobs may be preempted (PreemptMode {mode}), with GraceTime 0: there is no time to save"
        found.append((text, f"have GraceTime of the {name} raised, or set checkpoint.interval small"))
    return found


def _job(job: Mapping[str, str], configuration: Mapping[str, str], ahead: int | None) -> list[Advice]:
    """Return which of the job's own settings are harmful."""
    found = []
    requeue = job.get("Requeue", configuration.get("JobRequeue", "1"))
    if requeue == "0":
        text = "this job may not be requeued: it ends at its time limit or with a dead node"
        found.append((text, "submit it with sbatch --requeue, as slurm/pretrain.sbatch does"))
    limit = seconds(job.get("TimeLimit", ""))
    if limit is not None and ahead is not None and limit <= 2 * (ahead + EARLY):
        text = f"a time limit of {limit:.0f} s, of which up to {ahead + EARLY} s are the notice ahead of it"
        found.append((text, "ask for more by --time"))
    return found


def _cores(report: Report) -> list[Finding]:
    """Warn of a rank that is bound to fewer cores than requested."""
    cores, findings = report.facts["cores"], []
    wanted = {"SLURM_CPUS_PER_TASK": report.facts["cores asked for"], "OMP_NUM_THREADS": report.facts["threads"]}
    for name, value in wanted.items():
        if value.isdigit() and int(value) > cores:
            text = f"rank {report.rank} is bound to {cores} core(s), {name} is {value}"
            findings.append(Finding("warning", report.node, text, "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"))
    if report.facts["device"] == "cuda" and cores < FEW:
        text = (
            f"rank {report.rank} has {cores} core(s) beside its GPU, for training, readers, checkpoints and compilers"
        )
        findings.append(Finding("warning", report.node, text, "ask for more by --cpus-per-task"))
    return findings
