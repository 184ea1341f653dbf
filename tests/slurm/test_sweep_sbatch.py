"""slurm/sweep.sbatch on the two-node cluster, with a probe in place of sweep.py: what becomes of a task that fails."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.slurm.probe import REPOSITORY, SLURM_FOLDER, decisions

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

PROBE = """
import json, os, sys
from pathlib import Path
task, attempt = os.environ["SLURM_ARRAY_TASK_ID"], int(os.environ.get("SLURM_RESTART_COUNT", "0"))
assert sys.argv[1:5] == ["--workers", "1", "--share", f"{task}/2"], sys.argv
runs = Path(sys.argv[sys.argv.index("--plan") + 1]).parent / "name" / "runs"
*words, code = os.environ[f"ENDINGS_{task}"].split("; ")[attempt].split()
for word in words:
    run, what = word.split(":")
    (runs / run / what).parent.mkdir(parents=True, exist_ok=True)
    (runs / run / what).mkdir(exist_ok=True) if what.startswith("checkpoints") else (runs / run / what).touch()
sys.exit(int(code))
"""


def test_a_task_is_requeued_as_long_as_its_own_runs_advance(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "sweep.py").write_text(PROBE)
    (tmp_path / "launcher" / "requeue.py").symlink_to(REPOSITORY / "launcher" / "requeue.py")
    shutil.copytree(SLURM_FOLDER, tmp_path / "slurm")
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"sweep": {"name": "name", "root": str(tmp_path)}, "runs": ["a", "b", "c", "d"]}))
    variables = {
        "PLUMBLINE_ROOT": str(tmp_path),
        # a and c are task 0's; what it does to b is what another task may do meanwhile
        "ENDINGS_0": "a:checkpoints/step_00000005 85; a:result.json 1; b:result.json 137; 1",
        "ENDINGS_1": "1; d:diverged.json 1; 0",
    }
    cluster = replace(cluster, environment={**cluster.environment, **variables})
    job = (str(SLURM_FOLDER / "sweep.sbatch"), "--plan", str(plan))
    array = cluster.run("sbatch", "--parsable", "--array=0-1", *job, cwd=tmp_path)

    ended = [cluster.wait_end(f"{array}_{task}") for task in range(2)]
    logs = [Path(facts["StdOut"]).read_text() for facts in ended]
    facts = [(facts["JobState"], facts["ExitCode"], facts["Restarts"]) for facts in ended]
    assert facts == [("FAILED", "1:0", "3"), ("COMPLETED", "0:0", "2")], "\n".join(logs)
    none, a_saved, done = (
        f"{finished} finished runs and {steps} steps of others" for finished, steps in ((0, 0), (0, 5), (1, 0))
    )
    assert decisions(logs[0]) == [
        f"exit code 85, what is saved went from {none} to {a_saved}: back into the queue",
        f"exit code 1, what is saved went from {a_saved} to {done}: back into the queue",
        f"exit code 137, nothing saved after {done}, fruitless attempt 1 of 2 in a row: back into the queue",
        f"exit code 1, nothing saved after {done}, fruitless attempt 2 of 2 in a row: not requeued",
    ]
    assert decisions(logs[1]) == [
        f"exit code 1, nothing saved after {none}, fruitless attempt 1 of 2 in a row: back into the queue",
        f"exit code 1, what is saved went from {none} to {done}: back into the queue",
        "exit code 0, complete: not requeued",
    ]
    assert [path.name for path in (tmp_path / "name" / "slurm").iterdir()] == ["attempts-0-of-2.json"]
