"""Run the benchmarks that tell how fast a machine trains, one after another, and write what they found as one table.

    python tests/benchmarks/bench.py [--gpu] [--output bench] [--minutes 10] [--only PATTERN] [--rehearse]

A part is a command of this folder. Each runs by itself; what it printed goes to OUTPUT/NAME.json, and OUTPUT/README.md
has all of them as tables. The same command again runs what is missing, so that parts may be spread over several calls:
one that fails or that is cut off by --minutes is tried anew. Nothing is downloaded. --rehearse runs every part at the
smallest size on whatever device there is, to see that it works. Parts are forks of a process that has imported torch
and DeepSpeed once, or processes of their own where something keeps that one from being forked.
Exit codes: 0 every part is there; 1 one failed or had no time left.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from tests.fork_server import Forked, start_server

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._inductor.compile_fx",
    "plumbline.launcher.runtime.engine.make",
    "plumbline.launcher.runtime.train.loop",
)
"""What is imported once for all parts; nothing that imports torchao, which initializes CUDA."""


class Part(NamedTuple):
    """State a benchmark: its script and options, and those that make it as small as it can be."""

    command: str
    smallest: str


TINY = "--layers 1 --width 64 --length 32 --batch 2 --vocabulary 512 --steps 1 --rounds 2"
TINY_RUN = (
    "model.vocab_size=4096 model.hidden_size=64 model.num_hidden_layers=1 model.num_attention_heads=1 "
    "model.num_key_value_heads=1 model.intermediate_size=64 data.sequence_length=32 data.global_batch_size=4 "
    "data.micro_batch_size=2"
)
TINY_MASKS = "--length 64 --batch 1 --heads 4 --shared 2 --window 8 --rounds 2"
TINY_GENERATION = "--layers 1 --width 64 --vocabulary 512 --prompt 4 --tokens 4 --rounds 2"
CPU = {
    "train_6x384": Part("throughput.py --settings fp32:0,fp32:1,bf16:1", TINY),
    "train_4x128": Part(
        "throughput.py --layers 4 --width 128 --length 64 --batch 12 --steps 20 --settings fp32:0,fp32:1,bf16:1", TINY
    ),
    "hugging_face_trainer": Part("other_trainers.py --trainer hugging_face", TINY),
    "litgpt": Part("other_trainers.py --trainer litgpt", TINY),
    "loss_head": Part("loss_head.py --tokens 2048 --width 384 --vocabulary 8192", "--tokens 64 --rounds 2"),
    "attention_masks": Part("attention_masks.py --length 1024 --batch 2", TINY_MASKS),
    "optimizers": Part("optimizer_cost.py", f"--rounds 2 {TINY_RUN}"),
    "generation": Part("generation_speed.py", TINY_GENERATION),
    "determinism": Part("determinism_cost.py", f"--rounds 2 {TINY_RUN}"),
    "diagnostics": Part("diagnostics_cost.py", f"--rounds 2 {TINY_RUN}"),
    "lookahead": Part("lookahead_cost.py", "--width 64 --depth 1 --length 64 --anchors 2 --horizon 2 --rounds 2"),
    "checkpoint_stall": Part("checkpoint_stall.py", "--layers 1 --saves 2"),
    "start_up": Part("start_up.py", f"--starts 1 {TINY_RUN}"),
    "loader": Part("loader_speed.py --tokens 8000000", "--tokens 300000 --batch 4 --rounds 2"),
}
TRAIN_124M = "throughput.py --compile --layers 12 --width 768 --length 1024 --batch 32 --vocabulary 50304 --steps 10"
TRAIN_400M = "throughput.py --compile --layers 24 --width 1024 --length 1024 --batch 16 --vocabulary 50304 --steps 10"
TRAIN_1400M = "throughput.py --compile --layers 24 --width 2048 --length 2048 --vocabulary 50304 --steps 6 --rounds 4"
ACCUMULATED_1400M = f"{TRAIN_1400M} --batch 8 --accumulate 4 --steps 2 --alone"  # as a rank of 12 has in the ladder
TRAIN_7B = (
    "throughput.py --compile --layers 32 --width 4096 --length 2048 --batch 2 --vocabulary 50304 --steps 3 --alone"
)
# 2 micro-batches a step, as a rank has on 8 GPUs
STEP_124M = "--config configs/gpt2-124m.yaml model.vocab_size=50304 data.global_batch_size=60"
OTHERS_124M = TRAIN_124M.replace("throughput", "other_trainers") + " --setting bf16:1"
# What is asked for most comes first: a call may end before the last
GPU = {
    "train_124m": Part(f"{TRAIN_124M} --settings bf16:1", TINY),
    "train_124m_64": Part(f"{TRAIN_124M} --batch 64 --alone --settings bf16:1", TINY),
    "train_124m_gpt2": Part(f"{TRAIN_124M} --family gpt2 --batch 64 --alone --settings bf16:1", TINY),
    "train_1.4b": Part(f"{TRAIN_1400M} --batch 8 --alone --settings bf16:1", TINY),
    "train_1.4b_accumulated": Part(f"{ACCUMULATED_1400M} --settings bf16:1", TINY),
    "train_1.4b_float8": Part(  # beside train_1.4b_accumulated
        f"{ACCUMULATED_1400M} --settings bf16:1 precision.float8=tensorwise", f"{TINY} precision.float8_emulated=true"
    ),
    "hugging_face_trainer": Part(f"{OTHERS_124M} --trainer hugging_face", f"{TINY} --rounds 1"),
    "train_1.4b_beside_plain": Part(f"{TRAIN_1400M} --batch 3 --settings bf16:1", TINY),  # both fit 80 GiB
    "diagnostics": Part(f"diagnostics_cost.py {STEP_124M}", f"--rounds 2 {TINY_RUN}"),
    "start_up": Part(f"start_up.py {STEP_124M}", f"--starts 1 {TINY_RUN}"),
    "lookahead": Part(
        "lookahead_cost.py --compile --width 768 --depth 12 --batch 8",
        "--width 64 --depth 1 --length 64 --anchors 2 --horizon 2 --batch 1 --rounds 2",
    ),
    "attention_masks": Part("attention_masks.py --dtype bf16 --batch 16", TINY_MASKS),
    "determinism": Part(f"determinism_cost.py {STEP_124M}", f"--rounds 2 {TINY_RUN}"),
    "loss_head": Part("loss_head.py --tokens 16384 --dtype bf16", "--tokens 64 --rounds 2"),
    "litgpt": Part(f"{OTHERS_124M} --trainer litgpt", f"{TINY} --rounds 1"),
    "optimizers": Part(f"optimizer_cost.py {STEP_124M}", f"--rounds 2 {TINY_RUN}"),
    "generation": Part("generation_speed.py --layers 12 --width 768 --dtype bf16", TINY_GENERATION),
    "checkpoint_stall": Part("checkpoint_stall.py", "--layers 1 --saves 2"),
    "train_124m_stages": Part(f"{TRAIN_124M} --alone --settings bf16:0,bf16:2,bf16:3", TINY),
    "train_400m": Part(f"{TRAIN_400M} --settings bf16:1", TINY),
    "train_7b": Part(
        f"{TRAIN_7B} --rounds 3 --settings bf16:1 train.activation_checkpointing=auto", f"{TINY} --settings bf16:1"
    ),
    "loss_head_151936": Part(
        "loss_head.py --tokens 16384 --dtype bf16 --width 2048 --vocabulary 151936",
        "--tokens 64 --width 64 --vocabulary 512 --rounds 2",
    ),
    "attention_masks_shared": Part("attention_masks.py --dtype bf16 --length 8192 --batch 1 --shared 4", TINY_MASKS),
}


def run(part: Part, rehearse: bool, seconds: float, server: Path | None) -> dict[str, Any]:
    """Run a part; returns its command, how long it took, and what it printed or why there is nothing.

    Args:
        part: to run.
        rehearse: at its smallest.
        seconds: after which it is cut off.
        server: socket of a fork server; None: the part gets an interpreter of its own.
    """
    arguments = [*part.command.split(), *(part.smallest.split() if rehearse else ())]
    given = [str(ROOT / "tests" / "benchmarks" / arguments[0]), *arguments[1:]]
    found: dict[str, Any] = {"command": " ".join(["python", "tests/benchmarks/" + arguments[0], *arguments[1:]])}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process: Forked | subprocess.Popen[bytes]
        try:
            if server is not None:
                process = Forked(server, given, ROOT, environment(), out, err)
            else:
                with out.open("wb") as stdout, err.open("wb") as stderr:
                    command = [sys.executable, *given]
                    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=stdout, stderr=stderr)
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):  # they would keep their GPU memory
                    child.kill()
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # of a device that does not let go of it
                process.wait(10)
            return {**found, "error": f"cut off after {seconds:.0f} s"}
        except (OSError, ValueError) as error:  # what answers for the fork is gone
            return {**found, "error": f"the fork server has ended: {error}"}
        found["seconds"] = round(time.monotonic() - begun, 1)
        if code:
            return {**found, "error": (err.read_text() or out.read_text())[-2000:]}
        return {**found, "printed": last_json(out.read_text())}


def environment() -> dict[str, str]:
    """Return the variables of a part: ours, with what it takes to import this repository and to fork before CUDA."""
    path = os.pathsep.join(filter(None, [str(ROOT / "launcher"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def fork_server(folder: Path) -> Path | None:
    """Return the socket of a new fork server, or None where it does not start."""
    try:
        start_server(folder / "fork", os.getpid(), environment(), IMPORTS)
    except AssertionError as error:
        print(f"every part imports by itself: {(str(error).strip().splitlines() or ['?'])[-1]}", file=sys.stderr)
        return None
    return folder / "fork"


def last_json(text: str) -> Any:
    """Return the JSON document that a text ends with; libraries may have printed before it."""
    for match in re.finditer(r"^[\[{]", text, re.MULTILINE):
        try:
            return json.loads(text[match.start() :])
        except ValueError:
            continue
    return text


def as_table(name: str, found: dict[str, Any]) -> str:
    """Return a part as Markdown: its rows where it has some, else its numbers."""
    printed = found.get("printed", {"error": found.get("error")})
    if isinstance(printed, str):
        body = f"```\n{printed.strip()}\n```"
    else:
        ways = [{"way": name, **numbers} for name, numbers in printed.get("ways", {}).items()]
        flat = (
            printed.get("results") or ways or [{k: v for k, v in printed.items() if k not in ("config", "overrides")}]
        )
        names = list(dict.fromkeys(key for row in flat for key in row))
        lines = [names, ["---"] * len(names), *([shown(row.get(key)) for key in names] for row in flat)]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## {name}\n\n`{found['command']}`\n\n{body}\n"


def shown(value: Any) -> str:
    """Return a value as it stands in a table."""
    if isinstance(value, list):
        return " to ".join(map(shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("\n", " ").replace("|", "/")


def main() -> int:
    """Run what is missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the parts and sizes that are for a GPU")
    parser.add_argument("--output", type=Path, default=ROOT / "bench", help="folder (default: bench)")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no part after these (default: 60)")
    parser.add_argument("--only", default="", help="regular expression over names of parts")
    parser.add_argument("--rehearse", action="store_true", help="every part at its smallest")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    parts = {name: part for name, part in (GPU if arguments.gpu else CPU).items() if re.search(arguments.only, name)}
    arguments.output.mkdir(parents=True, exist_ok=True)
    tables, missing = [], 0
    with tempfile.TemporaryDirectory() as folder:
        server = fork_server(Path(folder))
        for name, part in parts.items():
            file = arguments.output / f"{name}.json"
            found = json.loads(file.read_text()) if file.exists() else {"error": "not begun"}
            left = deadline - time.monotonic()
            if "error" in found and left > 0:
                found = run(part, arguments.rehearse, left, server)
                file.write_text(json.dumps(found, indent=2) + "\n")
            missing += "error" in found
            print(f"{name}: {'failed' if 'error' in found else 'there'}", file=sys.stderr, flush=True)
            if "command" in found:
                tables.append(as_table(name, found))
    (arguments.output / "README.md").write_text("\n".join(tables))
    print("\n".join(tables))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
