"""Time prepare.py against tokenizers.encode_batch, which holds all text in memory, on the same cores in the same run.

    python tests/benchmarks/prepare_speed.py --megabytes 64

Prints one JSON document: text per second of prepare.py (which reads from disk twice, splits, tokenizes, writes and
starts its processes), of encode_batch in threads of the tokenizers library on all cores, their ratio, that of the
processor time both take, which other work on the machine hardly changes, and the peak memory of any process of
prepare.py. The text is the standard library's source, repeated, in one file of JSON Lines;
the tokenizer is a byte-level BPE trained on it before the clock starts. Repeats alternate, and the best of each counts.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Linux counts what a process held before it became another program: started from here, prepare.py would be charged with
# all text. So a small interpreter starts it, and tells the peak, in KiB, of what it waited for.
MEASURED = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64, help="text to tokenize (default: 64)")
    parser.add_argument("--repeats", type=int, default=3, help="times each is run (default: 3)")
    parser.add_argument("--vocab-size", type=int, default=8192, help="of the tokenizer (default: 8192)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="cores (default: all)")
    return parser.parse_args()


def command(*arguments: object) -> list[str]:
    """Return a call of prepare.py."""
    return [sys.executable, str(ROOT / "launcher" / "prepare.py"), *map(str, arguments)]


def write_text(path: Path, size: int) -> list[str]:
    """Write documents of `size` bytes together as JSON Lines, and return them."""
    import sysconfig

    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts: list[str] = []
    total = 0
    with path.open("w") as lines:
        while total < size:
            for file in files:
                text = file.read_bytes().decode(errors="ignore")
                if text.strip() and "site-packages" not in file.parts and total < size:
                    lines.write(json.dumps({"text": text}) + "\n")
                    texts.append(text)
                    total += len(text.encode())
    return texts


def time_prepare(source: Path, tokenizer: Path, output: Path, workers: int) -> tuple[float, float, float]:
    """Return seconds, seconds of processors, and the peak memory in MB of the largest process of the command."""
    started = time.monotonic()
    prepare = command("--source", source, "--tokenizer", tokenizer, "--output", output, "--workers", workers)
    with subprocess.Popen([sys.executable, "-c", MEASURED, *prepare], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        peak = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - started
    if status:
        raise SystemExit("prepare.py failed")
    shutil.rmtree(output)
    return seconds, usage.ru_utime + usage.ru_stime, int(peak) / 1024


def main() -> None:
    """Run both, in turns, and print what they took."""
    arguments = parse_arguments()
    os.environ["RAYON_NUM_THREADS"] = str(arguments.workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from tokenizers import Tokenizer

    with tempfile.TemporaryDirectory(dir=ROOT) as name:
        folder = Path(name)
        texts = write_text(folder / "text.jsonl", arguments.megabytes * 1_000_000)
        size = sum(len(text.encode()) for text in texts)
        make = ("--tokenizer", f"train-bpe:{arguments.vocab_size}", "--output", folder / "c")
        subprocess.run(command("--source", "stdlib", *make), check=True, capture_output=True)
        tokenizer = folder / "c" / "tokenizer"
        library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        ours: list[float] = []
        theirs: list[float] = []
        our_processors: list[float] = []
        their_processors: list[float] = []
        peak = 0.0
        for _ in range(arguments.repeats):
            seconds, busy, memory = time_prepare(folder / "text.jsonl", tokenizer, folder / "out", arguments.workers)
            ours.append(seconds)
            our_processors.append(busy)
            peak = max(peak, memory)
            started, busy = time.monotonic(), time.process_time()
            library.encode_batch(texts, add_special_tokens=False)
            theirs.append(time.monotonic() - started)
            their_processors.append(time.process_time() - busy)
    print(
        json.dumps(
            {
                "megabytes": size / 1e6,
                "workers": arguments.workers,
                "prepare_mb_per_second": size / 1e6 / min(ours),
                "encode_batch_mb_per_second": size / 1e6 / min(theirs),
                "ratio": min(theirs) / min(ours),
                "ratios": [their / our for our, their in zip(ours, theirs, strict=True)],
                "ratio_of_processor_time": min(their_processors) / min(our_processors),
                "peak_megabytes_of_a_process": peak,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
