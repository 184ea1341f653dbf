"""Compare training tokens/s of the engine with those of Hugging Face's Trainer on its stock class of the same shape.

    python tests/benchmarks/hugging_face_trainer.py [--layers 6 --width 384 --length 256 --batch 8 --steps 6 --rounds 3]
        [--setting fp32:0] [--compile] [section.key=value ...]

The setting is a precision and a ZeRO stage of the engine's; Trainer has fused AdamW, clipping, and bf16 by autocast.
Each round is a whole `train()` of Trainer's, timed by its callbacks from the second step to the last, and as many steps
of the engine; medians are compared. --compile compiles the stock model as a whole, and the engine's blocks. Without
`accelerate`, which Trainer needs, it says so. The text is random. It prints one JSON object. One process.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.system import startup
from plumbline.launcher.runtime.system.world import World, read_world
from plumbline.model.config import ModelConfig
from tests.benchmarks.step_cost import write_random_text
from tests.benchmarks.throughput import SIZES, engine_loop, make_config

Samples = list[dict[str, Any]]


class StepTimes(TrainerCallback):  # type: ignore[misc]  # transformers gives it no type
    """Note when steps begin and end."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.ended = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note the beginning of one more."""
        self.begun.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the end of the last so far."""
        self.ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Return the seconds of a step, without the first."""
        return (self.ended - self.begun[1]) / (len(self.begun) - 1)


def stock_model(model: ModelConfig) -> Qwen3ForCausalLM:
    """Return the stock class of our default family, of a shape."""
    shared = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
        "max_position_embeddings tie_word_embeddings"
    )
    return Qwen3ForCausalLM(Qwen3Config(**{name: getattr(model, name) for name in shared.split()}))


def trainer_seconds(model: Qwen3ForCausalLM, samples: Samples, config: Config, steps: int, compiled: bool) -> float:
    """Return the seconds of a step of Trainer."""
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=steps + 1,
            per_device_train_batch_size=config.data.micro_batch_size,
            learning_rate=1e-3,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            use_cpu=not torch.cuda.is_available(),
            bf16=config.deepspeed.precision == "bf16",
            torch_compile=compiled,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Trainer(model, settings, train_dataset=samples, callbacks=[times]).train()
    return times.seconds


def measure(arguments: argparse.Namespace, config: Config, world: World) -> dict[str, Any]:
    """Time both in alternating rounds; the first warms up."""
    batches = TrainBatches(config.data, 1, world.rank, world.size)
    engine, stock = engine_loop(config, world), stock_model(config.model)
    given = [batches.micro_batches(step)[0] for step in range(arguments.steps)]
    # Trainer shifts labels by itself
    samples = [{"input_ids": row.long(), "labels": row.long()} for batch in given for row in batch["input_ids"]]
    ours, theirs = [], []
    for _ in range(arguments.rounds + 1):
        start = time.perf_counter()
        for step, batch in enumerate(given):
            loss = engine(batch, step)
        loss.item()
        ours.append((time.perf_counter() - start) / arguments.steps)
        theirs.append(trainer_seconds(stock, samples, config, arguments.steps, arguments.compile))
    tokens = arguments.batch * arguments.length
    own, other = statistics.median(ours[1:]), statistics.median(theirs[1:])
    return {
        "setting": arguments.setting,
        "tokens_per_second": round(tokens / own),
        "trainer_tokens_per_second": round(tokens / other),
        "ratio": round(other / own, 3),
    }


def main() -> None:
    """Measure one setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {**SIZES, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--setting", default="fp32:0", metavar="PRECISION:STAGE")
    parser.add_argument("--compile", action="store_true", help="compile both")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    arguments.family = "qwen3"
    if importlib.util.find_spec("accelerate") is None:
        print(
            json.dumps({"results": [{"setting": arguments.setting, "ratio": "Trainer needs the package accelerate"}]})
        )
        return
    world = read_world()
    startup.start(world, timeout_minutes=10)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "random"
        write_random_text(corpus, arguments.vocabulary, tokens=1_000_000)
        found = measure(arguments, make_config(arguments, corpus, arguments.setting, world), world)
    print(json.dumps({"setting": vars(arguments), "device": world.device.type, "results": [found]}, indent=2))
    startup.stop()


if __name__ == "__main__":
    main()
