# PYTHON_ARGCOMPLETE_OK
"""Run all stages on a small real corpus: prepare, pretrain, evaluate, sample, export.

    make quickstart                     creates the environment first
    python launcher/quickstart.py       in an existing environment

Each stage is the command a user would type, printed before it runs. If you run it again, finished stages are skipped
with a message and training resumes where it stopped; nothing is trained twice.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from plumbline.launcher.runtime.commands import cli


def parse_arguments() -> None:
    """Answer --help; there are no other options."""
    cli.Parser(__doc__).parse_args()


if __name__ == "__main__":
    cli.begin(parse_arguments)  # ahead of the imports below, which take seconds


import torch

from plumbline.launcher.runtime.commands.interrupts import interrupts
from plumbline.launcher.runtime.config.yaml_files import read_yaml
from plumbline.launcher.runtime.ranks.world import emulates_bf16, free_port
from plumbline.launcher.runtime.system.installation import ROOT, as_typed, is_checkout
from plumbline.launcher.runtime.system.log import LOG

CORPUS, RUN, EXPORT, CONFIG = "corpora/stdlib", "runs/quickstart", "exports/quickstart", "configs/quickstart.yaml"
PROMPT = "def read_config(path):\n"


def main() -> int:
    """Run the stages; the exit code is that of the first stage that fails."""
    parse_arguments()
    if is_checkout():  # so that commands can be typed as in the README, whichever folder this one was started in
        os.chdir(ROOT)
    # The DeepSpeed launcher starts a rank for every GPU, or without GPUs for every NUMA node
    gpus = torch.cuda.device_count()
    count = rank_count(gpus or len(os.sched_getaffinity(0)))
    ranks = [] if count == gpus else ["--num_accelerators", str(count)]
    precision = ["deepspeed.precision=fp32"] if emulates_bf16() else []
    prepare, pretrain, evaluate, generate, export = (
        as_typed(f"launcher/{name}.py") for name in ("prepare", "pretrain", "eval", "generate", "export")
    )
    training = [pretrain, "--config", as_typed(CONFIG), *precision]
    stages = [
        ["python", prepare, "--source", "stdlib", "--tokenizer", "train-bpe:4096", "--output", CORPUS],
        ["deepspeed", "--quiet", "--master_port", str(free_port()), *ranks, *training],
        ["python", evaluate, "--model", RUN, "--data", CORPUS, "--max-batches", "64"],
        ["python", generate, "--model", RUN, "--prompt", PROMPT, "--max-new-tokens", "120"],
    ]
    if not Path(EXPORT).exists():
        stages.append(["python", export, "--model", RUN, "--output", EXPORT])
    # Find programs in this interpreter's environment even if it is not activated; DeepSpeed also looks for ninja there
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **({} if gpus else {"DS_ACCELERATOR": "cpu"})}
    for stage in stages:
        print(f"\n$ {shlex.join(stage)}", flush=True)
        code = exit_status_of(subprocess.Popen(stage, env=environment))
        if code:
            LOG.error(f"{stage[0]} ended with code {code}; the same command goes on from here")
            return code
    print(what_comes_next())
    return 0


def exit_status_of(stage: "subprocess.Popen[bytes]") -> int:
    """Return the exit code of a stage, as shells count; Ctrl-C reaches the stage too, which decides how to end."""
    while True:
        try:
            code = stage.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            interrupts().answered()


def rank_count(devices: int) -> int:
    """Return as many ranks as devices, or the next smaller number that shares the batch evenly."""
    batch_size = read_yaml(ROOT / CONFIG).data.global_batch_size
    return max(ranks for ranks in range(1, devices + 1) if batch_size % ranks == 0)


def what_comes_next() -> str:
    """Return a text that lists what was made, and what to type next."""
    config = as_typed(CONFIG)
    training = f"{as_typed('launcher/pretrain.py')} --config {config}"
    submission = f"{as_typed('launcher/submit.py')} --config {as_typed('configs/completep-base.yaml')}"
    return f"""
{CORPUS:<21} tokenized corpus, with its tokenizer
{RUN:<21} configuration, metrics.jsonl, TensorBoard, checkpoints, samples.txt
{EXPORT:<21} Hugging Face folder: AutoModelForCausalLM.from_pretrained("{EXPORT}")

Next, in the environment ({"source .venv/bin/activate" if is_checkout() else "of this command"}):
  tensorboard --logdir runs
      the curves
  python {as_typed("launcher/plan.py")} --config {config} --parameters
      what CompleteP does to each tensor
  python {as_typed("launcher/prepare.py")} --source YOUR_TEXT --tokenizer train-bpe:8192 --output corpora/mine
  deepspeed --quiet {training} run.name=mine 'data.train=[{{path: corpora/mine}}]'
      the same on your text (on CPUs: deepspeed --num_accelerators N ...; the ranks share batches evenly)
  python {submission} --nodes 4 --gpus-per-node 8 --cpus-per-task 12
      on a Slurm cluster
"""


if __name__ == "__main__":
    cli.run(main)
