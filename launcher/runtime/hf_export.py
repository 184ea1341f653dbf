"""Write a checkpoint as a Hugging Face folder, and prove it: reload with stock transformers and compare.

The folder appears under its final name only when the proof holds.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from launcher.runtime.loading import LoadedModel, hide_progress_bars, load_tokenizer
from model.decoder import CausalLM
from model.export.targets import to_hugging_face

RELATIVE_TOLERANCE = 1e-5  # of fp32 logits: max |difference| / max |logit|
GREEDY_TOKENS = 32
CHECK_BATCH, CHECK_LENGTH = 2, 64


class ExportError(ValueError):
    """The exported folder does not compute what the model computes, or cannot be written."""


@dataclass(frozen=True)
class ExportReport:
    """What was written and how it compares."""

    folder: str
    architecture: str
    relative_error: float
    """max |logit difference| / max |logit|, fp32."""
    greedy_tokens: int
    """Greedy tokens that agree, all of those compared."""


def export(model: LoadedModel, output: Path, target: str, overwrite: bool = False) -> ExportReport:
    """Export to `output`.

    Raises:
        ValueError: the output folder is in use, or no stock class computes this model.
        ExportError: the reloaded folder differs from the model.
    """
    if not isinstance(model.module, CausalLM) or model.config is None:
        raise ValueError(f"{model.source}: already a Hugging Face folder; --model takes a run or a checkpoint")
    if output.exists() and not overwrite:
        raise ValueError(f"--output {output}: exists; choose another folder or add --overwrite")
    ours = model.module
    weights = {name: weight.detach().float() for name, weight in ours.named_parameters()}
    entries, stock_weights = to_hugging_face(target, ours.config, ours.multipliers, weights)

    hide_progress_bars()
    staging = output.with_name(f".{output.name}.staging")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        end = _write_tokenizer(model, staging)
        architecture = _write_model(entries, stock_weights, end, staging)
        report = _verify(ours, staging, output, architecture)
        (staging / "README.md").write_text(model_card(model, report), encoding="utf-8")
        if output.exists():
            shutil.rmtree(output)
        staging.rename(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return report


def _write_tokenizer(model: LoadedModel, folder: Path) -> int | None:
    """Copy the run's tokenizer files; returns the end-of-text id."""
    if model.tokenizer_path is None:
        return None
    shutil.copytree(model.tokenizer_path, folder, dirs_exist_ok=True)
    end: int | None = load_tokenizer(model.tokenizer_path).eos_token_id
    return end


def _write_model(entries: dict[str, Any], weights: dict[str, Tensor], end: int | None, folder: Path) -> str:
    """Let transformers write config, weights and generation_config; returns the name of the class."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**entries, bos_token_id=end, eos_token_id=end, pad_token_id=None)
    config.dtype = torch.float32
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(config)
    expected = set(stock.state_dict()) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    if expected != set(weights):
        raise ExportError(f"{type(stock).__name__} has other tensors: {sorted(expected ^ set(weights))[:4]}")
    stock.load_state_dict(weights, strict=False, assign=True)
    stock.tie_weights()
    stock.generation_config.bos_token_id = stock.generation_config.eos_token_id = end
    stock.save_pretrained(folder)
    return type(stock).__name__


@torch.no_grad()
def _verify(ours: CausalLM, staging: Path, output: Path, architecture: str) -> ExportReport:
    """Reload the folder with stock transformers; compare logits on random tokens, then greedy continuations."""
    from transformers import AutoModelForCausalLM

    stock: nn.Module = AutoModelForCausalLM.from_pretrained(staging, dtype=torch.float32).eval()
    ours = ours.float().cpu().eval()
    room = ours.config.max_position_embeddings
    generator = torch.Generator().manual_seed(0)
    shape = (CHECK_BATCH, min(CHECK_LENGTH, room))
    tokens = torch.randint(ours.config.vocab_size, shape, generator=generator)
    expected, found = ours(tokens), stock(input_ids=tokens).logits
    relative_error = float((expected - found).abs().max() / expected.abs().max())
    if not relative_error <= RELATIVE_TOLERANCE:
        raise ExportError(
            f"{output}: reloaded as {architecture}, logits differ by {relative_error:.1e} of the largest "
            f"(allowed {RELATIVE_TOLERANCE:.0e}); nothing was exported"
        )
    prompt = tokens[:1, : max(1, min(8, room - GREEDY_TOKENS))]
    steps = min(GREEDY_TOKENS, room - prompt.size(1))
    sequences = [prompt, prompt]
    for step in range(steps):
        logits = ours(sequences[0]), stock(input_ids=sequences[1]).logits
        following = [values[:, -1].argmax(-1, keepdim=True) for values in logits]
        if not torch.equal(following[0], following[1]):
            raise ExportError(
                f"{output}: reloaded as {architecture}, greedy token {step + 1} is {following[1].item()} instead of "
                f"{following[0].item()}; nothing was exported"
            )
        sequences = [torch.cat((seen, new), dim=1) for seen, new in zip(sequences, following, strict=True)]
    return ExportReport(str(output), architecture, relative_error, steps)


def model_card(model: LoadedModel, report: ExportReport) -> str:
    """The README of the exported folder: the run's facts."""
    config = model.config
    assert config is not None
    rule, shape = config.parameterization, config.model
    result_path = model.source.parent.parent / "result.json"
    own = model.average is None and result_path.is_file()  # an average has other scores than the run
    scores = json.loads(result_path.read_text(encoding="utf-8")) if own else {}
    rows = [
        ("Architecture", f"{report.architecture}: {shape.num_hidden_layers} layers, width {shape.hidden_size}"),
        ("Parameters", f"{sum(p.numel() for p in model.module.parameters()):,}"),
        ("Training", f"{model.tokens:,} tokens in {model.step:,} steps, context {config.data.sequence_length}"),
        *([] if model.average is None else [("Weights", model.average)]),
        ("Data", ", ".join(source.name or Path(source.path).name for source in config.data.train)),
        ("Parameterization", f"{rule.rule} (base width {rule.base_hidden_size}, depth {rule.base_num_hidden_layers})"),
        ("Peak learning rate", f"{config.optimizer.lr:g} at the base"),
        *((key.removeprefix("eval/"), f"{value:.4f}") for key, value in scores.items() if key.startswith("eval/")),
        ("Export check", f"logits within {report.relative_error:.1e}, {report.greedy_tokens} greedy tokens equal"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {config.run.name}

A causal language model pretrained with Plumbline. The parameterization's multipliers are folded into the weights
(Granite keeps them in its configuration), so the stock class computes the trained function exactly.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{report.folder}")
tokenizer = AutoTokenizer.from_pretrained("{report.folder}")
```
"""
