"""Smoke."""

from __future__ import annotations


def test_smoke(run_pretrain, start_pretrain, tiny_config, command) -> None:
    job = start_pretrain(tiny_config, "smoke", ["train.steps=2000", "train.log_interval=5"], ranks=2)
    job.wait_until(lambda: max(job.run.column("loss"), default=0) >= 300)
    print(command("status", job.run.folder).stdout)
    job.kill()
    print((job.run.folder / "status.json").read_text())
    print(command("status", job.run.folder).stdout)
    out = run_pretrain(tiny_config, "smoke", ["train.steps=400"], ranks=2)
    assert out.code == 0, out.stderr
    print(out.stdout, out.stderr)
    print(command("status", job.run.folder).stdout)
    print((job.run.folder / "status.json").read_text())
    print((job.run.folder / "attempts.jsonl").read_text())
    print(job.run.records[-3:])
