"""Compare training tokens/s of the engine with those of another project's trainer on a model of the same shape.

    python tests/benchmarks/other_trainers.py [--trainer hugging_face] [--layers 6 --width 384 --length 256 --batch 8]
        [--steps 6 --rounds 3] [--setting fp32:0] [--compile] [section.key=value ...]

    hugging_face    Trainer of transformers on its stock class; needs the package accelerate
    litgpt          `fit` of litgpt's pretrain.py on its GPT; needs the packages litgpt and lightning, which are not
                    among ours (it pins others: pip install --no-deps, then what it misses, in another environment)

The setting is a precision and a ZeRO stage of the engine's. The other has AdamW, fused where it would be, clipping,
and bf16 by autocast. Each round is a whole call of its loop, timed from its second step to its last, and as many steps
of the engine; medians are compared. --compile compiles the other model as a whole, and the engine's blocks. Where a
package is missing it says so. The text is random. It prints one JSON object, last. One process.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

import torch

from plumbline.data.loader import TrainBatches
from plumbline.data.windows import Batch
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.world import World, read_world
from tests.benchmarks.step_cost import write_random_text
from tests.benchmarks.stock import stock_model
from tests.benchmarks.throughput import SIZES, engine_loop, make_config

Trainer = Callable[[], float]
"""Train on the given batches, the first one twice, and return the seconds of a step without the first."""


def hugging_face(config: Config, batches: list[Batch], compiled: bool) -> Trainer:
    """Return the Trainer of transformers."""
    import transformers

    class Times(transformers.TrainerCallback):  # type: ignore[misc]  # transformers gives it no type
        def __init__(self) -> None:
            self.begun: list[float] = []
            self.ended = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ended = time.perf_counter()

    model = stock_model(config.model)
    # It shifts labels by itself
    samples = [{"input_ids": row.long(), "labels": row.long()} for batch in batches for row in batch["input_ids"]]

    def train() -> float:
        times = Times()
        with tempfile.TemporaryDirectory() as folder:
            settings = transformers.TrainingArguments(
                output_dir=folder,
                max_steps=len(batches) + 1,
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
            transformers.Trainer(model, settings, train_dataset=samples, callbacks=[times]).train()
        return (times.ended - times.begun[1]) / len(batches)

    return train


def litgpt(config: Config, batches: list[Batch], compiled: bool) -> Trainer:
    """Return the loop of litgpt's pretraining."""
    import lightning
    from litgpt import GPT, pretrain
    from litgpt import Config as Shape
    from litgpt.args import EvalArgs, TrainArgs

    shape, length, rows = config.model, config.data.sequence_length, config.data.micro_batch_size
    bf16 = config.deepspeed.precision == "bf16"
    fabric = lightning.Fabric(devices=1, precision="bf16-mixed" if bf16 else "32-true")
    fabric.launch()
    with fabric.init_module():
        model: Any = GPT(
            Shape(
                block_size=length,
                n_layer=shape.num_hidden_layers,
                n_embd=shape.hidden_size,
                n_head=shape.num_attention_heads,
                n_query_groups=shape.num_key_value_heads,
                head_size=shape.head_dim,
                intermediate_size=shape.intermediate_size,
                vocab_size=shape.vocab_size,
                padded_vocab_size=shape.vocab_size,
                rotary_percentage=1.0,
                parallel_residual=False,
                bias=False,
                norm_qk=True,
                norm_class_name="RMSNorm",
                mlp_class_name="LLaMAMLP",
            )
        )
    model = fabric.setup(torch.compile(model) if compiled else model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fabric.device.type == "cuda")  # as pretrain.py has it
    optimizer = fabric.setup_optimizers(adamw)
    texts = [torch.cat([batch["input_ids"], batch["labels"][:, -1:]], 1).to(fabric.device) for batch in batches]

    class Texts:
        """Hand out the texts, and note when each is asked for: what is before it is done on a CPU."""

        def __init__(self) -> None:
            self.asked: list[float] = []

        def __iter__(self) -> Iterator[torch.Tensor]:
            for text in texts:
                if fabric.device.type == "cuda":
                    torch.cuda.synchronize()
                self.asked.append(time.perf_counter())
                yield text

    def train() -> float:
        given, steps = Texts(), len(texts) + 1
        limits = TrainArgs(
            global_batch_size=rows, micro_batch_size=rows, max_tokens=steps * rows * length, max_norm=1.0,
            lr_warmup_steps=0, log_interval=steps + 1, save_interval=None,
        )  # fmt: skip
        never = EvalArgs(interval=steps + 1, max_iters=1, initial_validation=False, final_validation=False)
        state = {"model": model, "optimizer": optimizer, "iter_num": 0, "step_count": 0}
        pretrain.fit(fabric, 1, state, given, texts[:1], Path(), None, limits, never)
        return (given.asked[-1] - given.asked[1]) / (len(given.asked) - 2)

    return train


TRAINERS = {"hugging_face": (hugging_face, "accelerate"), "litgpt": (litgpt, "litgpt")}
"""Name -> what makes it, and the package that it needs beside ours."""


def measure(arguments: argparse.Namespace, config: Config, world: World) -> dict[str, Any]:
    """Time both in alternating rounds; the first warms up."""
    batches = TrainBatches(config.data, 1, world.rank, world.size, gpu=world.device.index)
    given = [batches.micro_batches(step)[0] for step in range(arguments.steps)]
    engine, other = engine_loop(config, world), TRAINERS[arguments.trainer][0](config, given, arguments.compile)
    ours, theirs = [], []
    for _ in range(arguments.rounds + 1):
        start = time.perf_counter()
        for step, batch in enumerate(given):
            wait = engine([batch], step)
        wait()
        ours.append((time.perf_counter() - start) / arguments.steps)
        theirs.append(other())
    tokens = arguments.batch * arguments.length
    own, foreign = statistics.median(ours[1:]), statistics.median(theirs[1:])
    return {
        "trainer": arguments.trainer,
        "setting": arguments.setting,
        "tokens_per_second": round(tokens / own),
        "trainer_tokens_per_second": round(tokens / foreign),
        "ratio": round(foreign / own, 3),
    }


def main() -> None:
    """Measure one setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", choices=TRAINERS, default="hugging_face")
    for name, default in {**SIZES, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--setting", default="fp32:0", metavar="PRECISION:STAGE")
    parser.add_argument("--compile", action="store_true", help="compile both")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    arguments.family, arguments.accumulate = "qwen3", 1
    needed = TRAINERS[arguments.trainer][1]
    if importlib.util.find_spec(needed) is None:
        print(json.dumps({"results": [{"trainer": arguments.trainer, "ratio": f"needs the package {needed}"}]}))
        return
    world = read_world()
    process_group.join(world, timeout_minutes=10)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "random"
        write_random_text(corpus, arguments.vocabulary, tokens=1_000_000)
        found = measure(arguments, make_config(arguments, corpus, arguments.setting, world), world)
    print(json.dumps({"setting": vars(arguments), "device": world.device.type, "results": [found]}, indent=2))
    process_group.leave()


if __name__ == "__main__":
    main()
