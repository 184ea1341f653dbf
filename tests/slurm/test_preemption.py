"""A job of a partition that others may preempt, after a time of grace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.slurm import conftest
from tests.slurm.conftest import cluster_of
from tests.slurm.probe import decisions, install

if TYPE_CHECKING:
    from pathlib import Path

PREEMPTING = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=cheap Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


@pytest.mark.proof
def test_preemptions_before_a_first_checkpoint_end_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In GraceTime Slurm sends SIGTERM to the ranks, which end before they have saved anything: not by their fault."""
    monkeypatch.setattr(conftest, "SLURM_CONF", conftest.SLURM_CONF + PREEMPTING)
    with cluster_of("n1", "n2") as cluster:
        probe = install(cluster, tmp_path)
        job_id = probe.submit("--partition=cheap", "--nodes=2", endings="hang/hang/hang/0")
        for attempt in range(3):
            probe.wait_for_ranks(job_id, attempt=attempt)
            urgent = cluster.run(
                "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true", cwd=tmp_path
            )
            cluster.wait_end(urgent)
        facts, log = probe.end(job_id)
    assert facts == ("COMPLETED", "0:0", "3"), log
    assert decisions(log) == [
        *["exit code 143 of a job that Slurm preempts: back into the queue"] * 3, "exit code 0, complete: not requeued"
    ]  # fmt: skip
