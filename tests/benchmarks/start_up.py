"""Time how long a training takes from the launch of its process to its first step.

    python tests/benchmarks/start_up.py [--config configs/quickstart.yaml] [--starts 2] [section.key=value ...]

Every start is `pretrain.py` in a new interpreter, on random text, for two steps. The first one finds the compiler's
caches empty, the others what it has left there; of those the median is told. `start_up` are the seconds until the first
step begins, `compile` those of the first step where blocks are compiled, by the run's own ledger
(docs/run-folder.md). It prints one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from tests.benchmarks.step_cost import VOCABULARY, write_random_text

ROOT = Path(__file__).resolve().parents[2]
FIXED = (
    f"model.vocab_size={VOCABULARY}",
    "run.name=start",
    "train.steps=2",
    "schedule.warmup=1 steps",
    "train.eval_interval=null",
    "train.sample_prompts=[]",
    "metrics.diagnostics_interval=null",
)


def start(config: Path, overrides: list[str], folder: Path, number: int) -> dict[str, float]:
    """Train in a new interpreter, and return where the seconds went until its first step."""
    root = folder / f"runs{number}"
    given = [f"data.train=[{{path: {folder / 'random'}}}]", f"run.root={root}", *FIXED, *overrides]
    caches = {name: str(folder / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    command = [sys.executable, str(ROOT / "launcher" / "pretrain.py"), "--config", str(config), *given]
    done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    seconds = json.loads((root / "start" / "status.json").read_text())["attempt"]["seconds"]
    return {"start_up": seconds["start_up"], "compile": seconds["compile"]}


def main() -> None:
    """Start as often as was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--starts", type=int, default=2, help="after the first (default: 2)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random_text(folder / "random", VOCABULARY, tokens=500_000)
        first, *others = [
            start(arguments.config, arguments.overrides, folder, number) for number in range(arguments.starts + 1)
        ]
    warm = {key: round(statistics.median(each[key] for each in others), 2) for key in first}
    results: list[dict[str, Any]] = [{"cache": "empty", **first}, {"cache": "warm", **warm}]
    setting = {"config": str(arguments.config), "overrides": arguments.overrides, "cpus": os.cpu_count()}
    print(json.dumps({"setting": setting, "results": results}, indent=2))


if __name__ == "__main__":
    main()
