"""Rows of a law whose constants are known, what fit.py makes of them, and an entry point in this process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plumbline.launcher.runtime.commands import cli
from plumbline.model.scaling_laws.points import points
from plumbline.model.scaling_laws.published import KUMAR

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Command

    Run = Callable[..., tuple[int, str, str]]

ROW = {"parameters": 30e6, "tokens": 1e9, "weight_bits": 16, "activation_bits": 16, "kv_bits": 16, "loss": 3.0}


def synthetic() -> list[dict[str, Any]]:
    """Return checkpoints of three sizes, weights trained at several widths, bf16 ones rounded; 0.1 % of noise."""
    generator = np.random.default_rng(0)
    rows = []
    for size in (30_000_000, 100_000_000, 220_000_000):
        for tokens in (1_500_000_000, 6_000_000_000, 26_000_000_000):
            for bits in (16, 8, 6, 5, 4, 3):
                for post in (None, 3, 4, 5) if bits == 16 else (None,):
                    at = points(size, tokens, bits, post_bits=np.inf if post is None else post)
                    loss = float(KUMAR.loss(at)) * float(np.exp(generator.normal(0, 0.001)))
                    row = {"run": f"{size}-{tokens}-{bits}", "parameters": size, "tokens": tokens, "weight_bits": bits}
                    rows.append({**row, "activation_bits": 16, "kv_bits": 16, "post_bits": post, "loss": loss})
    return rows


def write(file: Path, rows: list[Any]) -> Path:
    """Write JSON Lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run an entry point in this process for exit code, standard output and error: its own would cost seconds."""

    def call(main: Callable[[], None], *arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["verb.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.run(main)
        assert isinstance(left.value.code, int)
        return left.value.code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def fitted(command: Command, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what fit.py says of a sweep's folder and a report's, and where it wrote."""
    folder = tmp_path_factory.mktemp("laws")
    rows = synthetic()
    unfinished = [
        {"status": "diverged", "diverged": True, "loss": None, **{key: ROW[key] for key in ("parameters", "tokens")}},
        {"status": "pending", "loss": None},
        {**ROW, "loss": None},
        {**ROW, "loss": float("nan")},
    ]
    plain = [row for row in rows if row["post_bits"] is None]
    write(folder / "sweep" / "results.jsonl", [*unfinished, *plain, plain[0]])
    write(folder / "report" / "rows.jsonl", [row for row in rows if row["post_bits"] is not None])
    options = ("--hold-out", "0.2", "--bootstrap", "6", "--json")
    done = command("fit", folder / "sweep", folder / "report", "--output", folder / "out" / "mine", *options)
    assert done.returncode == 0, done.stderr
    return {"facts": json.loads(done.stdout), "folder": folder / "out" / "mine", "stderr": done.stderr}
