"""Write the README of an exported folder."""

from plumbline.data.damage import read_object
from plumbline.launcher.runtime.export.report import OBJECTIVE, ExportReport
from plumbline.launcher.runtime.models.open import LoadedModel, beside
from plumbline.launcher.runtime.run.status_file import RESULT
from plumbline.model.export import thinker


def model_card(model: LoadedModel, report: ExportReport) -> str:
    """Return the README of the exported folder: the run's facts."""
    config = model.config
    assert config is not None
    rule, shape = config.parameterization, config.model
    file = beside(model.source, RESULT)
    result = {} if file is None else read_object(file)
    # An average or an earlier checkpoint has different scores from the run's end
    scores = result if model.average is None and result.get("step") == model.step else {}
    parameters = sum(p.numel() for name, p in model.module.named_parameters() if not name.startswith(OBJECTIVE))
    rows = [
        ("Architecture", f"{report.architecture}: {shape.num_hidden_layers} layers, width {shape.hidden_size}"),
        ("Parameters", f"{parameters:,}"),
        ("Training", f"{model.tokens:,} tokens in {model.step:,} steps, context {config.data.sequence_length}"),
        *([] if model.average is None else [("Weights", model.average)]),
        *([] if config.precision.weights is None else [("Rounded", f"{config.precision}, as in training")]),
        ("Data", ", ".join(source.label for source in config.data.train)),
        ("Parameterization", f"{rule.rule} (base width {rule.base_hidden_size}, depth {rule.base_num_hidden_layers})"),
        ("Peak learning rate", f"{config.optimizer.lr:g} at the base"),
        *(
            (_score_name(key), f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
            for key, value in scores.items()
            if key.startswith("eval/") and isinstance(value, (int, float))
        ),
        ("Export check", report.agreement),
    ]
    if report.headroom is not None:
        room = report.headroom
        rows.append(("Stream", f"sum of squares up to {room.largest:.1e} in the check; at most {room.limit:.1e}"))
    if report.lookahead is not None:
        when = "" if report.rounded_error is None else ", before the weights were rounded"
        rows.append(("Thoughts", f"{report.lookahead}{when}"))
    trust = ", trust_remote_code=True" if report.own_code else ""
    names, reading = "AutoModelForCausalLM", ""
    if model.tokenizer_path is not None:
        names += ", AutoTokenizer"
        reading = f'tokenizer = AutoTokenizer.from_pretrained("{report.folder}"{trust})\n'
    cautions = "".join(f"\n\n**{words}.**" for words in report.cautions)
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {config.run.name}

A causal language model pretrained with Plumbline. {_how(report)}{cautions}

| | |
|---|---|
{table}

```python
from transformers import {names}

model = AutoModelForCausalLM.from_pretrained("{report.folder}"{trust})
{reading}```
{_how_to_think(report, trust, model.tokenizer_path is not None)}"""


def _score_name(key: str) -> str:
    """Return the words for a score of result.json."""
    name = key.removeprefix("eval/")
    corpus = name.removesuffix("/w8a8_delta")
    return name if corpus == name else f"{corpus}, loss added by int8 weights and activations, nats per token"


def _how_to_think(report: ExportReport, trust: str, reads_text: bool) -> str:
    """Return instructions for a model that can think, or "" for others."""
    if report.lookahead is None or report.lookahead.left_out is not None:
        return ""
    imports, ids, shown = (
        ("import sys", 'tokenizer("...", return_tensors="pt").input_ids', "tokenizer.decode(tokens)")
        if reads_text
        else ("import sys\n\nimport torch", "torch.tensor([[...]])  # tokens of its task", "tokens.tolist()")
    )
    return f"""
It was trained with latent lookahead (arXiv 2603.20219). To let it think ahead at every eighth token, with the code in
`{thinker.CODE.name}` and the tensors in `{thinker.FILE}`:

```python
{imports}

sys.path.insert(0, "{report.folder}")
from lookahead import Lookahead

ids = {ids}
model = Lookahead.from_pretrained("{report.folder}"{trust})
(tokens,) = model.generate(ids, max_new_tokens=64, think="every:8")
print({shown})
```
"""


def _how(report: ExportReport) -> str:
    """Return in which sense the folder is the trained model."""
    if report.own_code:
        return "Its class is in this folder; all multipliers of training are folded into the weights."
    if report.headroom is not None:
        return (
            f"Its blocks have no norms. {report.headroom.constant_channels} channel(s) of the stream hold a large "
            "constant that makes the norms of the stock class constant: for inference in bfloat16 or float32, not for "
            "training or float16."
        )
    exactly = "exactly" if report.rounded_error is None else "up to the rounding of its weights to bf16"
    return (
        "The parameterization's multipliers are folded into the weights (Granite keeps them in its configuration), so "
        f"the stock class computes the trained function {exactly}."
    )
