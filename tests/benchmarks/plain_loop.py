"""Train a configuration with thirty lines of plain PyTorch, and compare with what the engine made of it.

    python tests/benchmarks/plain_loop.py --config configs/quickstart.yaml --run runs/NAME [section.key=value ...]

Same initial weights, same batches in the same order, AdamW with the parameter table's groups, fp32, one process; no
DeepSpeed. `--run` names the finished run to compare with: trained from the same configuration, under any launcher, with
deepspeed.precision=fp32. It prints one JSON object: final held-out losses, and how the difference between the training
losses grows.

Training amplifies the last bit, so some growth is inevitable. `control` shows how much: the plain loop against itself
with micro-batches of half the size, which differs in nothing but the order of summation. `same_loss` is the plain loop
with our chunked loss instead of PyTorch's cross-entropy on full logits, which leaves the engine as the only difference.
"""

import argparse
import json
from pathlib import Path

import torch

from plumbline.data.loader import TrainBatches, ValidationBatches
from plumbline.data.opening import evaluated_sources
from plumbline.launcher.runtime.commands import cli
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import multipliers


def train(config: Config, chunked: bool = False) -> tuple[list[float], float]:
    """Train, and return every step's training loss and the final held-out loss of the first corpus, nats."""
    rows = plan_run(config).rows
    model = CausalLM(config.model, multipliers(config.model, config.parameterization))
    initialize(model, rows, config.run.seed)
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [parameters[r.name]], "weight_decay": r.weight_decay, "eps": r.eps, "lr_multiplier": r.lr_multiplier}
        for r in rows
    ]
    betas = (config.optimizer.betas[0], config.optimizer.betas[1])
    optimizer = torch.optim.AdamW(groups, lr=config.optimizer.lr, betas=betas, fused=True)
    losses, data = [], TrainBatches(config.data, config.run.seed)
    for step, batches in enumerate(data.iterate(0, plan_run(config).total_steps)):
        for group in optimizer.param_groups:
            factor = plan_run(config).schedule.factor(config.data.batch_plan.tokens_before(step))
            group["lr"] = config.optimizer.lr * factor * group["lr_multiplier"]
        loss = torch.zeros(())
        for batch in batches:
            if chunked:
                part = model(batch["input_ids"], batch["labels"])[0] / batch["labels"].numel()
            else:
                part = torch.nn.functional.cross_entropy(
                    model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
                )
            (part / len(batches)).backward()
            loss += part.detach() / len(batches)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    split = next(iter(evaluated_sources(config.data, data.corpora).values())).held_out
    held_out = ValidationBatches(
        split, config.data.sequence_length, config.data.micro_batch_size, config.train.eval_batches
    )
    with torch.no_grad():
        sums = sum(
            torch.stack((model(b["input_ids"], b["labels"])[1], (b["labels"] >= 0).sum().float())).double()
            for b in held_out
        )
    assert isinstance(sums, torch.Tensor)
    return losses, float(sums[0] / sums[1])


def main() -> None:
    """Train and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    config = load_config(arguments.config, arguments.overrides)
    losses, held_out = train(config)
    halved = config.data.model_copy(update={"micro_batch_size": config.data.micro_batch_size // 2})
    same_loss, held_out_same_loss = train(config, chunked=True)
    control, held_out_control = train(config.model_copy(update={"data": halved}))
    records = [json.loads(line) for line in (arguments.run / "metrics.jsonl").read_text().splitlines()]
    engine = [record["loss"] for record in records if "loss" in record]
    final = json.loads((arguments.run / "result.json").read_text())
    cli.print_json(
        {
            "steps": len(losses),
            "held_out_loss": {
                "engine": next(value for key, value in final.items() if key.endswith("/loss")),
                "plain": held_out,
                "same_loss": held_out_same_loss,
                "control": held_out_control,
            },
            "largest_difference_up_to_step": {
                step: {
                    "engine_to_same_loss": largest_gap(engine, same_loss, step),
                    "engine_to_plain": largest_gap(engine, losses, step),
                    "control_to_plain": largest_gap(control, losses, step),
                }
                for step in (1, 5, 10, 20, 50, 100, 200, 500)
                if step <= len(losses)
            },
        }
    )


def largest_gap(some: list[float], other: list[float], steps: int) -> float:
    """Return the largest difference between two loss curves over the first steps."""
    return max(abs(a - b) for a, b in zip(some[:steps], other[:steps], strict=True))


if __name__ == "__main__":
    main()
