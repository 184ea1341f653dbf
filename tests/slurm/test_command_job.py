"""slurm/command.sbatch: programs of one process as jobs, from text to a number."""

from __future__ import annotations

import email
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.slurm.probe import SLURM_FOLDER

if TYPE_CHECKING:
    from tests.conftest import Pretrain
    from tests.slurm.conftest import Cluster


def submit(cluster: Cluster, folder: Path, *words: str, options: tuple[str, ...] = ()) -> str:
    return cluster.run("sbatch", "--parsable", *options, str(SLURM_FOLDER / "command.sbatch"), *words, cwd=folder)


def end(cluster: Cluster, job_id: str) -> tuple[tuple[str, str], str]:
    job = cluster.wait_end(job_id)
    return (job["JobState"], job["ExitCode"]), Path(job["StdOut"]).read_text()


def test_one_process_is_a_job(cluster: Cluster, tmp_path: Path) -> None:
    source, output = str(Path(email.__file__).parent / "*.py"), tmp_path / "corpora" / "email two"
    prepared = submit(
        cluster, tmp_path, "prepare", "--source", source, "--tokenizer", "byte", "--output", str(output),
        options=("--cpus-per-task=2",),
    )  # fmt: skip
    wrong = submit(cluster, tmp_path, "prepare", "--source", "nowhere", "--output", str(tmp_path / "no"))
    refused = [submit(cluster, tmp_path, *words) for words in (("pretrain", "--config", "a"), ("prepare.py",), ())]

    facts, log = end(cluster, prepared)
    assert facts == ("COMPLETED", "0:0"), log
    assert json.loads((output / "corpus.json").read_text())["vocab_size"] == 257
    facts, log = end(cluster, wrong)
    assert facts == ("FAILED", "2:0"), log
    assert "error: " in log
    for job_id, words in zip(refused, ("pretrain is not for this", "'prepare.py' is no", "'' is no"), strict=True):
        facts, log = end(cluster, job_id)
        assert facts == ("FAILED", "2:0"), log
        assert f"command.sbatch: error: {words}" in log


def test_a_run_is_scored_in_a_job(cluster: Cluster, run_pretrain: Pretrain, config: Path, corpus: Path) -> None:
    outcome = run_pretrain(config, "tiny", ["train.steps=2", "schedule.warmup=0steps"])
    assert outcome.code == 0, outcome.stderr
    words = ("eval", "--model", str(outcome.run.folder), "--data", str(corpus), "--max-batches", "1", "--json")
    facts, log = end(cluster, submit(cluster, config.parent, *words))
    assert facts == ("COMPLETED", "0:0"), log
    assert json.loads(log[log.index("{") :])["loss"] > 0
