"""What is asked of a cluster, as the options and the script that ask for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plumbline.launcher.runtime.cluster.slurm import Request, log_file, next_number, submit, write_script
from plumbline.launcher.runtime.system.installation import ROOT

ARRAY = Request(array=4, gpus_per_task="h100:2", time="8:00:00")


def asked(script: Path) -> list[str]:
    """Return the words of the one sbatch command of a script."""
    echoing = script.read_text().replace("sbatch --parsable", "printf '%s\\n'")
    done = subprocess.run(["bash", "-c", echoing], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_script_asks_for_what_is_known_and_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "submit-1.sh"
    write_script(script, "# why", {"job-name": "a b", **ARRAY.options}, "sweep.sbatch", ["--plan=it's.json"], 300)
    assert asked(script) == [
        "--job-name=a b",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--array=0-3",
        "--gpus-per-task=h100:2",
        "--time=8:00:00",
        "--signal=USR1@300",
        str(ROOT / "slurm" / "sweep.sbatch"),
        "--plan=it's.json",
    ]


CLUSTER = """\
srun() { while [[ "$1" == --* ]]; do shift; done; "$@"; }
sbcast() { cp "$2" "$3"; }
fail() { echo "$*" >&2; exit 2; }
script=pretrain.sbatch SLURM_NNODES=1
"""


def test_jobs_on_one_node_do_not_share_a_copy_of_the_environment(tmp_path: Path) -> None:
    """The example in cluster.env, without its comment signs, on a cluster of this machine."""
    lines = (ROOT / "slurm" / "cluster.env").read_text().splitlines()
    first = lines.index('#[[ -z "${script:-}" ]] || {')
    example = "\n".join(line.removeprefix("#") for line in lines[first : lines.index("#}", first) + 1])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("python")
    tar = tmp_path / "env.tar"
    subprocess.run(["tar", "-cf", tar, "-C", tmp_path, "bin"], check=True)
    words = [CLUSTER, example.replace("/project/env.tar", str(tar)), 'echo "$PLUMBLINE_PYTHON"']

    def python_of(job: str) -> Path:
        env = {**os.environ, "PLUMBLINE_NODE_FOLDER": str(tmp_path / "node"), "SLURM_JOB_ID": job}
        done = subprocess.run(["bash", "-euc", "\n".join(words)], env=env, capture_output=True, text=True, check=True)
        return Path(done.stdout.strip())

    running = python_of("7")
    running.write_text("in use")
    assert python_of("8").read_text() == "python"
    assert running.read_text() == "in use", "the other job has not replaced it"


def test_each_submission_has_its_number(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "slurm"
    assert next_number(folder) == 1
    write_script(folder / "submit-1.sh", "# first", ARRAY.options, "sweep.sbatch", [], 300)
    assert next_number(folder) == 2


def test_what_is_asked_of_the_site_is_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    site = {"partition": "a,b", "exclude": "n[1-2]", "mail-user": "a@b"}
    write_script(tmp_path / "submit.sh", "# why", Request(notice=60, site=site).options, "pretrain.sbatch", [], 60)
    handed = {"--signal=USR1@60", "--partition=a,b", "--exclude=n[1-2]", "--mail-user=a@b", "--mail-type=END,FAIL"}
    assert handed <= set(asked(tmp_path / "submit.sh"))
    assert "export PLUMBLINE_NOTICE=60\n" in (tmp_path / "submit.sh").read_text()  # for cluster/deadline.py


def told(script: Path, **variables: str) -> dict[str, str]:
    """Return what the shell of a script hands to its sbatch, of Slurm's variables and ours."""
    showing = script.read_text().replace("sbatch --parsable", "env; :")
    bare = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run(["bash", "-c", showing], env=bare, capture_output=True, text=True, check=True)
    pairs = (line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return {name: value for name, value in pairs if name.startswith(("SLURM_", "SBATCH_", "SRUN_", "PLUMBLINE_"))}


def test_a_job_takes_nothing_over_from_the_job_it_is_submitted_in(tmp_path: Path) -> None:
    write_script(tmp_path / "submit.sh", "# why", {}, "pretrain.sbatch", [], 300)
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_CLUSTERS": "main"}
    shape = {"SLURM_CPU_BIND": "mask_cpu:0x1", "SLURM_MEM_PER_CPU": "1", "SRUN_CPUS_PER_TASK": "2"}
    bare = told(tmp_path / "submit.sh", **kept)
    assert kept.items() <= bare.items()
    assert told(tmp_path / "submit.sh", **kept, **shape, SLURM_JOB_ID="7") == bare
    outside = told(tmp_path / "submit.sh", SLURM_TIME_FORMAT="standard")  # what a person has set counts
    assert outside["SLURM_TIME_FORMAT"] == "standard"


@pytest.mark.parametrize(
    ("site", "handed"),
    [
        (None, None),
        ("ALL,SITE", "ALL,SITE"),
        ("NONE", "PLUMBLINE_ROOT,PLUMBLINE_NOTICE,PLUMBLINE_PYTHON"),
        ("SITE", "SITE,PLUMBLINE_ROOT,PLUMBLINE_NOTICE,PLUMBLINE_PYTHON"),
    ],
)
def test_a_job_is_told_where_things_are_whatever_the_site_hands_on(
    tmp_path: Path, site: str | None, handed: str | None
) -> None:
    write_script(tmp_path / "submit.sh", "# why", {}, "pretrain.sbatch", [], 300)
    found = told(tmp_path / "submit.sh", **({} if site is None else {"SBATCH_EXPORT": site}))
    assert found.get("SBATCH_EXPORT") == handed
    assert found["PLUMBLINE_ROOT"] == str(ROOT)


@pytest.mark.parametrize("site", [None, "/site/python"])
def test_a_job_runs_the_python_that_submits_it_whatever_its_path_or_that_of_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str | None
) -> None:
    path = f"/it's/$(touch {tmp_path}/run)`touch {tmp_path}/run`/}}\"$HOME/python"
    monkeypatch.setattr(sys, "executable", path)
    write_script(tmp_path / "submit.sh", "# why", {}, "pretrain.sbatch", [], 300)
    found = told(tmp_path / "submit.sh", **({} if site is None else {"PLUMBLINE_PYTHON": site}))
    assert found["PLUMBLINE_PYTHON"] == (site or path)
    assert not (tmp_path / "run").exists()


def test_a_chain_submits_as_many_jobs_and_ends_at_a_refusal(tmp_path: Path) -> None:
    write_script(tmp_path / "submit.sh", "# why", {}, "pretrain.sbatch", ["--config=a file"], 300, count=3)
    assert asked(tmp_path / "submit.sh") == [str(ROOT / "slurm" / "pretrain.sbatch"), "--config=a file"] * 3
    refusing = (tmp_path / "submit.sh").read_text().replace("sbatch --parsable", "echo asked; false")
    done = subprocess.run(["bash", "-c", refusing], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "asked\n")


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("takes", [True, False])
def test_who_submits_has_looked_at_what_failed(tmp_path: Path, takes: bool, count: int) -> None:
    """So fruitless attempts are counted anew, once Slurm has taken the job."""
    folder = tmp_path / "it's a run"
    folder.mkdir()
    counts = {"attempts.json", "attempts-0-of-2.json"}
    for name in (*counts, "config-1.json"):
        (folder / name).touch()
    write_script(folder / "submit.sh", "# why", {}, "pretrain.sbatch", [], 300, count)
    answering = (folder / "submit.sh").read_text().replace("sbatch --parsable", f"{str(takes).lower()} --parsable")
    done = subprocess.run(["bash", "-c", answering], check=False)
    left = {path.name for path in folder.iterdir()}
    assert (done.returncode, left - {"submit.sh", "config-1.json"}) == ((0, set()) if takes else (1, counts))
    assert "config-1.json" in left


def test_job_ids_are_read_among_what_a_site_prints(tmp_path: Path) -> None:
    script = tmp_path / "submit.sh"
    script.write_text("echo 'loading 12 modules'; echo 17; echo '18;main'")
    assert submit(script) == ["17", "18"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            "echo 17; echo '18;main'; echo QOSMaxSubmit >&2; exit 1",
            r"before it: 17, 18 \(scancel 17 18 takes back\): QOS",
        ),
        ("echo 'no such partition' >&2; exit 1", r"submit\.sh: no such partition"),
        ("echo Welcome", r"sbatch named no job; .*: 'Welcome'"),
    ],
)
def test_what_slurm_does_not_take_is_an_error_that_names_what_it_took(tmp_path: Path, answer: str, words: str) -> None:
    script = tmp_path / "submit.sh"
    script.write_text(answer)
    with pytest.raises(ValueError, match=words):
        submit(script)


@pytest.mark.parametrize("time", ["6", "6:59", "0:06:59", "0-0:6", "00-00:06:59"])
def test_a_time_limit_without_time_to_train_is_refused(time: str) -> None:
    words = f"--time {time} is less than 300 s of --notice and 120 s to start in: .* give --time 7 "
    with pytest.raises(ValueError, match=words):
        Request(time=time)
    Request(time=time, notice=240)


@pytest.mark.parametrize(
    "time", ["7", "7:00", "0:07:00", "0-1", "0-0:7", "1-00:00:00", "0", "UNLIMITED", "infinite", None]
)
def test_other_time_limits_are_taken(time: str | None) -> None:
    Request(time=time)


@pytest.mark.parametrize("time", ["1h", "24:00:00:00", "1-", ""])
def test_what_is_no_time_is_refused(time: str) -> None:
    with pytest.raises(ValueError, match=f"--time {time} is no time limit: give minutes, H:MM:SS or D-HH:MM:SS"):
        Request(time=time)


def test_a_submission_takes_no_number_that_was_taken(tmp_path: Path) -> None:
    """A queued job may still read the file of the highest, whatever was deleted below it."""
    assert next_number(tmp_path / "slurm") == 1
    for name in ("submit-7.sh", "config-9.yaml", "job-1234.log", "attempts.json"):
        (tmp_path / "slurm" / name).touch()
    assert next_number(tmp_path / "slurm") == 10


def test_only_the_name_of_a_log_holds_symbols_of_slurm(tmp_path: Path) -> None:
    assert log_file(Path("a%j/run"), "job-%j.log") == "a%%j/run/job-%j.log"
