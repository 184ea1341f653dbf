"""Make the folder that wrong inputs begin with: a corpus, runs, exported models, a sweep, rows and a law."""

import email
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml

CONFIG = """\
run: {name: NAME, root: runs}
model:
  {family: FAMILY, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: HEADS,
   intermediate_size: 48, vocab_size: 257}
parameterization: {rule: completep, base_hidden_size: 32, base_num_hidden_layers: 2}
data: {train: [{path: corpus}], sequence_length: 32, global_batch_size: 4, micro_batch_size: 4}
optimizer: {lr: 4.0e-3}
schedule: {warmup: 1 steps}
train: {steps: 2, eval_batches: 2}
deepspeed: {zero_stage: 1, precision: fp32}
checkpoint: {interval: 1}
metrics: {trackers: [], peak_tflops: 0.1, diagnostics_interval: null}
"""
SWEEP = """\
name: grid
root: sweeps
base: new.yaml
grids: [{axes: {optimizer.lr: [0.001, 0.002]}}]
"""
RECIPES = "[{name: mine, weights: {format: int4}}]\n"
WENT_BACK = {
    "time": "2026-01-01T00:00:00+00:00", "guard": "loss_spike", "message": "step 9 has a loss of 9", "first_step": 8,
    "last_step": 9, "back_to": 1, "skipped": [7, 9],
}  # fmt: skip
"""An intervention of later than these runs."""
CORPUS = "prepare --source email/*.py --tokenizer byte --workers 1 --validation-fraction 0.02 --output corpus"
MODELS = {"qwen3": 1, "llama": 1, "gpt2": 2}
"""Family -> its heads of keys and values."""


def make_folder(folder: Path, run: Callable[[Path, str], None]) -> None:
    """Fill a folder with files, and by the commands of `run` with what is made of them."""
    make_files(folder, run)
    for name in MODELS:
        run(folder, f"pretrain --config {name}.yaml")
        run(folder, f"export --model runs/{name} --output models/{name}")
    (folder / "runs" / "qwen3" / "interventions.jsonl").write_text(json.dumps(WENT_BACK) + "\n")
    _interrupt(folder / "runs" / "qwen3", folder / "runs" / "stopped")
    run(folder, "fit points.jsonl --output law --form chinchilla --bootstrap 0")
    run(folder, "sweep --config sweep.yaml --workers 1")
    run(folder, "quantize --model runs/qwen3 --data corpus --recipes rtn-w4 --output rows --max-batches 2")


def make_files(folder: Path, run: Callable[[Path, str], None]) -> None:
    """Fill a folder with what needs no training: configurations, text, a corpus, points of a law."""
    folder.mkdir(parents=True)
    shutil.copytree(Path(email.__file__).parent, folder / "email", ignore=shutil.ignore_patterns("__pycache__"))
    for name, (family, heads) in {"new": ("qwen3", 1), **{each: (each, MODELS[each]) for each in MODELS}}.items():
        text = CONFIG.replace("NAME", name).replace("FAMILY", family).replace("HEADS", str(heads))
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    whole = yaml.safe_load((folder / "new.yaml").read_text(encoding="utf-8"))
    (folder / "from.yaml").write_text(yaml.safe_dump({**whole, "model": {}}), encoding="utf-8")  # a model is named
    (folder / "sweep.yaml").write_text(SWEEP)
    (folder / "recipes.yaml").write_text(RECIPES)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"one two {each}"}) + "\n" for each in range(50)))
    (folder / "points.jsonl").write_text("".join(map(_point, range(30))))
    run(folder, CORPUS)
    (folder / "pairs").mkdir()
    for kind in ("bin", "idx"):
        shutil.copy(folder / "corpus" / f"train.{kind}", folder / "pairs")


def _interrupt(run: Path, stopped: Path) -> None:
    """Copy a run that stands at its first checkpoint."""
    shutil.copytree(run, stopped)
    (stopped / "result.json").unlink()
    shutil.rmtree(stopped / "checkpoints" / "step_00000002")
    config = (stopped / "config.yaml").read_text().replace("name: qwen3", "name: stopped", 1)
    (stopped / "config.yaml").write_text(config)


def _point(number: int) -> str:
    """Return a line that a law of 400 / N^0.34 + 410 / D^0.28 + 1.7 gives."""
    parameters, tokens = 10 ** (5 + number % 6 / 2), 10 ** (7 + number // 6 / 2)
    loss = 406 / parameters**0.34 + 410 / tokens**0.28 + 1.69 + 0.001 * math.sin(number)
    bits = dict.fromkeys(("weight_bits", "activation_bits", "kv_bits"), 16)
    return json.dumps({"parameters": parameters, "tokens": tokens, **bits, "loss": loss}) + "\n"
