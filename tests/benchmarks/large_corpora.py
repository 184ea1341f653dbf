"""Measure what a trillion tokens cost before training begins: opening, seeking, resuming, memory.

    python -m tests.benchmarks.large_corpora --corpus corpora/stdlib

The tokens are holes in files (zeros that take no disk); indices, manifests and order are real. `--corpus` lends its
tokenizer. Prints JSON: seconds, the best of three openings, and the growth of this process's memory in MB.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from plumbline.data.config import DataConfig
from plumbline.data.loader import TrainBatches
from tests.data.made import simulate

BATCH = {"sequence_length": 2048, "global_batch_size": 64, "micro_batch_size": 8}


def measure(sources: list[dict[str, Any]], seeks: int = 20) -> dict[str, float]:
    """Open a mixture, then read steps at the start, in the middle and near the end, as a resumed run does."""
    config = DataConfig.model_validate({"train": sources, **BATCH})
    before = memory()
    batches, first_open = timed(partial(TrainBatches, config, seed=1))
    grown = memory() - before
    steps = [number * 10**12 // (64 * 2048) // seeks for number in range(seeks)]
    seeks_seconds = [timed(partial(batches.micro_batches, step))[1] for step in steps]
    grown = max(grown, memory() - before)
    del batches

    def resume() -> None:
        next(TrainBatches(config, seed=1).iterate(steps[-1], steps[-1] + 1))

    return {
        "open_seconds": min(first_open, *(timed(partial(TrainBatches, config, seed=1))[1] for _ in range(2))),
        "seek_seconds_mean": sum(seeks_seconds) / seeks,
        "open_and_resume_seconds": min(timed(resume)[1] for _ in range(3)),
        "memory_mb": grown / 1e6,
    }


def alone(sources: list[dict[str, Any]]) -> dict[str, float]:
    """Measure in a process of its own, which has no memory to use again."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(measure, (sources,))


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def memory() -> int:
    """Return the resident memory that is this process's own, without mapped files."""
    info = psutil.Process().memory_info()
    return int(info.rss - info.shared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="any corpus, for its tokenizer")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        corpus = arguments.corpus.resolve()
        huge = simulate(corpus, Path(place) / "huge", 10_000, 10**8)
        result = {"10,000 shards of 10^8 tokens": alone([{"path": str(huge)}])}
        many = [simulate(corpus, Path(place) / f"source-{number}", 1, 10**9 + number) for number in range(1000)]
        result["1,000 sources of 10^9 tokens"] = alone([{"path": str(path)} for path in many])
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
