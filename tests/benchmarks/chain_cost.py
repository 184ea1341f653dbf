"""Measure what the chain of a run costs: hashing a step's samples and writing its line, as a share of the step.

    python tests/benchmarks/chain_cost.py runs/quickstart [--rounds 50]

The share is of the median step_time in the run's metrics.jsonl, on a rank of as many as it had; seconds are processor
time, which other work on the machine does not lengthen. It prints one JSON object. The messages that add up the digests
over ranks (64 bytes a step, every 100 steps) are not in it.
"""

import argparse
import json
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.run.chain import ChainFile, Step, digest_of, in_hex


def main() -> None:
    """Time both on batches of the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    config = load_config(arguments.run / "config.yaml", [])
    ranks = json.loads((arguments.run / "environment.json").read_text(encoding="utf-8"))["world_size"]
    lines = [json.loads(line) for line in (arguments.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    step_time = statistics.median(line["step_time"] for line in lines if "step_time" in line)
    batches = TrainBatches(config.data, config.run.seed, 0, ranks)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        file = ChainFile(Path(folder), 0)
        for step, micro_batches in enumerate(islice(batches.iterate(0, arguments.rounds), arguments.rounds), start=1):
            begun = time.thread_time()
            file.add_step(Step(step, in_hex(digest_of(micro_batches)), 3.25, 0.5))
            seconds.append(time.thread_time() - begun)
        file.close()
    took = statistics.median(seconds)
    tokens = config.data.global_batch_size * config.data.sequence_length // ranks
    found = {"ranks": ranks, "tokens_per_rank": tokens, "step_time": step_time, "seconds": took}
    print(json.dumps({**found, "share": took / step_time, "tokens_per_second": tokens / took}))


if __name__ == "__main__":
    main()
