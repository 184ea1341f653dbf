"""Write a checkpoint as a Hugging Face folder, and prove it: reload with stock transformers and compare.

The folder appears under its final name only when the proof holds.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from plumbline.data.tokenizers import FILES as TOKENIZER_FILES
from plumbline.data.workspace import FolderKind, check_replaceable, is_free, new_folder
from plumbline.launcher.runtime.models.open import LoadedModel, load_tokenizer, native_classes, quiet_transformers
from plumbline.model.attention.context import LayerCache
from plumbline.model.decoder import CausalLM
from plumbline.model.export import native, thinker
from plumbline.model.export.stock import Headroom
from plumbline.model.export.targets import TARGETS, resolved, to_hugging_face
from plumbline.model.lookahead.generation import Trigger, generate_thinking, think
from plumbline.model.objectives.latent_lookahead import LatentLookahead
from plumbline.model.objectives.objective import TrainedLM
from plumbline.model.quantization.layers import rounded_weights
from plumbline.model.quantization.precision import PrecisionConfig

RELATIVE_TOLERANCE = 1e-5  # of fp32 logits: max |difference| / max |logit|
GREEDY_TOKENS = 32
THINK_EVERY = 3
CHECK_BATCH, CHECK_LENGTH = 2, 64
EXPORT = FolderKind(
    name="an export",
    marks=("config.json", "README.md", "model*.safetensors"),
    others=(
        "generation_config.json",
        "model.safetensors.index.json",
        thinker.FILE,
        *(file.name for file in (*native.CODE, thinker.CODE)),
        "__pycache__/*.pyc",
        *TOKENIZER_FILES,
    ),
)
OBJECTIVE = "objective."  # with which names of tensors begin that are not the plain model's


class ExportError(ValueError):
    """The exported folder does not compute what the model computes, or cannot be written."""


@dataclass(frozen=True)
class LookaheadReport:
    """How the thoughts of the folder's own code compare with the run's."""

    relative_error: float
    """max |logit difference| / max |logit| of a thought's slots, fp32."""
    greedy_tokens: int
    """Greedy tokens that agree, with a thought at every `THINK_EVERY`-th."""
    left_out: str | None
    """Why the folder cannot think after all; None: it can."""

    def __str__(self) -> str:
        """In one line."""
        if self.left_out is not None:
            return f"left out: {self.left_out}"
        return f"slots' logits within {self.relative_error:.1e}, {self.greedy_tokens} greedy tokens equal"


@dataclass(frozen=True)
class ExportReport:
    """What was written and how it compares."""

    folder: str
    architecture: str
    relative_error: float
    """max |logit difference| / max |logit|, fp32."""
    greedy_tokens: int
    """Greedy tokens that agree, all of those compared."""
    own_code: bool = False
    """Whether the folder brings the code of its class, which a user must trust."""
    headroom: Headroom | None = None
    """Of constant channels, where the target has them."""
    lookahead: LookaheadReport | None = None
    """Of a run that was trained with latent lookahead."""
    only_with_thoughts: str | None = None
    """The objective, if it trained predictions with thoughts alone, which the class in the folder does not make."""


def export(model: LoadedModel, output: Path, target: str, overwrite: bool = False) -> ExportReport:
    """Export to `output`.

    Raises:
        ValueError: the output folder is in use or no export, no stock class computes this model, or it rounds what no
            class rounds.
        ExportError: the reloaded folder differs from the model.
    """
    if not isinstance(model.module, CausalLM) or model.config is None:
        raise ValueError(f"{model.source}: already a Hugging Face folder; --model takes a run or a checkpoint")
    check_replaceable(output, EXPORT)
    if not overwrite and not is_free(output):
        raise ValueError(f"--output {output}: exists; choose another folder or add --overwrite")
    _check_precision(model.config.precision)
    ours = model.module
    weights = {name: weight.detach().float() for name, weight in ours.named_parameters()}
    weights |= {f"model.layers.{name}": weight for name, weight in rounded_weights(ours.model.layers).items()}
    plain = {name: weight for name, weight in weights.items() if not name.startswith(OBJECTIVE)}
    target = resolved(target, ours.config)
    entries, stock_weights = to_hugging_face(target, ours.config, ours.multipliers, plain)
    room = _headroom(target, ours)

    with new_folder(output, EXPORT) as staging:
        end = _write_tokenizer(model, staging)
        with quiet_transformers():
            architecture = _write_model(entries, stock_weights, end, staging)
            own_code = bool(TARGETS[target].code)
            for file in TARGETS[target].code:
                shutil.copy(file, staging)
            report = replace(_verify(ours, staging, output, architecture, own_code), headroom=room)
            look = ours.objective if isinstance(ours, TrainedLM) else None
            if isinstance(look, LatentLookahead):
                settings, tensors = thinker.export_thinker(target, ours.config, ours.multipliers, look.config, weights)
                _write_thinker(settings, tensors, staging)
                report = replace(report, lookahead=_verify_thinker(ours, look, staging, own_code))
        if model.config.objective.text_sees_thoughts:
            report = replace(report, only_with_thoughts=str(model.config.objective))
        (staging / "README.md").write_text(model_card(model, report), encoding="utf-8")
    return report


def _check_precision(precision: PrecisionConfig) -> None:
    """Refuse what weights alone cannot hold."""
    for key in ("activations", "kv_cache"):
        found = getattr(precision, key)
        if found is not None:
            raise ValueError(
                f"precision.{key}: this run rounds them to {found}, and a Hugging Face class does not, so a folder "
                "would be another model; eval.py and generate.py round. A run that rounds weights alone can be "
                f"exported: branch from a checkpoint of this one with precision.{key}=null (docs/quantization.md)"
            )


def _write_tokenizer(model: LoadedModel, folder: Path) -> int | None:
    """Copy the run's tokenizer files; returns the end-of-text id."""
    if model.tokenizer_path is None:
        return None
    shutil.copytree(model.tokenizer_path, folder, dirs_exist_ok=True)
    end: int | None = load_tokenizer(model.tokenizer_path).eos_token_id
    return end


def _write_model(entries: dict[str, Any], weights: dict[str, Tensor], end: int | None, folder: Path) -> str:
    """Let transformers write config, weights and generation_config; returns the name of the class."""
    stock = _empty_model({**entries, "bos_token_id": end, "eos_token_id": end, "pad_token_id": None})
    tied = {"lm_head.weight"} if stock.config.tie_word_embeddings else set()
    expected = set(stock.state_dict()) - tied
    if expected != set(weights):
        raise ExportError(f"{type(stock).__name__} has other tensors: {sorted(expected ^ set(weights))[:4]}")
    stock.load_state_dict(weights, strict=False, assign=True)
    stock.tie_weights()
    stock.generation_config.bos_token_id = stock.generation_config.eos_token_id = end
    stock.save_pretrained(folder)
    return type(stock).__name__


def _write_thinker(settings: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / thinker.FILE, {"format": "pt", "settings": json.dumps(settings)})
    shutil.copy(thinker.CODE, folder)


def _empty_model(entries: dict[str, Any]) -> Any:
    """The class that config.json names, its tensors without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        if entries["model_type"] == native.MODEL_TYPE:
            config, model = native_classes()
            return model(config(**entries, dtype=torch.float32))
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**entries, dtype=torch.float32))


def check_tokens(config: Any) -> Tensor:
    """The random tokens that every check runs on, for a model's configuration, ours or one of transformers."""
    generator = torch.Generator().manual_seed(0)
    shape = (CHECK_BATCH, min(CHECK_LENGTH, config.max_position_embeddings))
    return torch.randint(config.vocab_size, shape, generator=generator)


def _check_prompt(model: CausalLM) -> tuple[Tensor, int]:
    """Some of them, to be continued, and by how many tokens."""
    room = model.config.max_position_embeddings
    prompt = check_tokens(model.config)[:1, : max(1, min(8, room - GREEDY_TOKENS))]
    return prompt, min(GREEDY_TOKENS, room - prompt.size(1))


def _headroom(target: str, ours: CausalLM) -> Headroom | None:
    """Return that of the target's constant channels, if it has any and it is enough."""
    found = TARGETS[target].headroom(ours, check_tokens(ours.config))
    if found is not None and not found.largest <= found.limit:
        raise ExportError(
            f"--target {target}: the stream's sum of squares reaches {found.largest:.1e}, and "
            f"{found.constant_channels} constant channel(s) hide at most {found.limit:.1e}: try --target native; "
            "nothing was exported"
        )
    return found


@torch.no_grad()
def _verify(ours: CausalLM, staging: Path, output: Path, architecture: str, own_code: bool) -> ExportReport:
    """Reload the folder as a user would; compare logits on random tokens, then greedy continuations."""
    from transformers import AutoModelForCausalLM

    stock: nn.Module = AutoModelForCausalLM.from_pretrained(
        staging, dtype=torch.float32, trust_remote_code=own_code
    ).eval()
    ours = ours.float().cpu().eval()
    tokens = check_tokens(ours.config)
    expected, found = ours(tokens), stock(input_ids=tokens).logits
    relative_error = float((expected - found).abs().max() / expected.abs().max())
    if not relative_error <= RELATIVE_TOLERANCE:
        raise ExportError(
            f"{output}: reloaded as {architecture}, logits differ by {relative_error:.1e} of the largest "
            f"(allowed {RELATIVE_TOLERANCE:.0e}); nothing was exported"
        )
    prompt, steps = _check_prompt(ours)
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
    return ExportReport(str(output), architecture, relative_error, steps, own_code)


@torch.no_grad()
def _verify_thinker(ours: CausalLM, look: LatentLookahead, folder: Path, own_code: bool) -> LookaheadReport:
    """Think with the folder's own code, as a user would; what differs is taken out of the folder again.

    Compared are the logits of one thought's slots, then greedy tokens, with a thought at each `THINK_EVERY`-th.
    """
    spec = spec_from_file_location("lookahead", folder / thinker.CODE.name)
    assert spec is not None, "a file of that name was just written"
    assert spec.loader is not None, "it ends in .py"
    code: Any = module_from_spec(spec)
    spec.loader.exec_module(code)
    theirs = code.Lookahead.from_pretrained(folder, dtype=torch.float32, trust_remote_code=own_code)

    prompt, steps = _check_prompt(ours)
    cache = cast(list[LayerCache], ours.new_cache(1, prompt.size(1)))
    slots, _ = think(ours, look.thinker, ours.model(prompt, cache=[*cache])[:, -1:], cache)
    text = code.Stream(theirs.model, theirs.settings.window)
    expected = ours.lm_head(slots[0], None, 0.0)
    found = theirs.logits(theirs.think(text, text.read(prompt, 0)[:, -1:]))
    relative_error = float((expected - found).abs().max() / expected.abs().max())

    trigger, commits = Trigger("every", THINK_EVERY), look.config.text_sees_thoughts
    stream = generate_thinking(ours, look.thinker, commits, prompt, steps, trigger, temperature=0.0)
    said = theirs.continuation(prompt, steps, f"every:{THINK_EVERY}")
    equal = _equal_at_start((int(token) for token in stream), said)
    left_out = None
    if not relative_error <= RELATIVE_TOLERANCE:
        left_out = f"its logits differ by {relative_error:.1e} of the largest (allowed {RELATIVE_TOLERANCE:.0e})"
    elif equal < steps:
        left_out = f"its greedy token {equal + 1} is another"
    if left_out is not None:
        for name in (thinker.FILE, thinker.CODE.name):
            (folder / name).unlink()
    return LookaheadReport(relative_error, equal, left_out)


def _equal_at_start(one: Iterator[int], other: Iterator[int]) -> int:
    """How many tokens agree before the first that differ."""
    count = 0
    for ours, theirs in zip(one, other, strict=True):
        if ours != theirs:
            break
        count += 1
    return count


def model_card(model: LoadedModel, report: ExportReport) -> str:
    """The README of the exported folder: the run's facts."""
    config = model.config
    assert config is not None
    rule, shape = config.parameterization, config.model
    result_path = model.source.parent.parent / "result.json"
    own = model.average is None and result_path.is_file()  # an average has other scores than the run
    parameters = sum(p.numel() for name, p in model.module.named_parameters() if not name.startswith(OBJECTIVE))
    scores = json.loads(result_path.read_text(encoding="utf-8")) if own else {}
    rows = [
        ("Architecture", f"{report.architecture}: {shape.num_hidden_layers} layers, width {shape.hidden_size}"),
        ("Parameters", f"{parameters:,}"),
        ("Training", f"{model.tokens:,} tokens in {model.step:,} steps, context {config.data.sequence_length}"),
        *([] if model.average is None else [("Weights", model.average)]),
        *([] if config.precision.weights is None else [("Rounded", f"{config.precision}, as in training")]),
        ("Data", ", ".join(source.label for source in config.data.train)),
        ("Parameterization", f"{rule.rule} (base width {rule.base_hidden_size}, depth {rule.base_num_hidden_layers})"),
        ("Peak learning rate", f"{config.optimizer.lr:g} at the base"),
        *((key.removeprefix("eval/"), f"{value:.4f}") for key, value in scores.items() if key.startswith("eval/")),
        ("Export check", f"logits within {report.relative_error:.1e}, {report.greedy_tokens} greedy tokens equal"),
    ]
    if report.headroom is not None:
        room = report.headroom
        rows.append(("Stream", f"sum of squares up to {room.largest:.1e} in the check; at most {room.limit:.1e}"))
    if report.lookahead is not None:
        rows.append(("Thoughts", str(report.lookahead)))
    trust = ", trust_remote_code=True" if report.own_code else ""
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {config.run.name}

A causal language model pretrained with Plumbline. {_how(report)}{_without_thoughts(report)}

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{report.folder}"{trust})
tokenizer = AutoTokenizer.from_pretrained("{report.folder}")
```
{_how_to_think(report, trust)}"""


def _without_thoughts(report: ExportReport) -> str:
    """A warning where the plain model was not what training improved."""
    if report.only_with_thoughts is None:
        return ""
    return (
        f"\n\n**It was trained to predict with thoughts before the text ({report.only_with_thoughts}). What the stock "
        "class says without them was not trained.**"
    )


def _how_to_think(report: ExportReport, trust: str) -> str:
    """What the card of a model says that can think."""
    if report.lookahead is None or report.lookahead.left_out is not None:
        return ""
    return f"""
It was trained with latent lookahead (arXiv 2603.20219). To let it think ahead at every eighth token, with the code in
`{thinker.CODE.name}` and the tensors in `{thinker.FILE}`:

```python
import sys

sys.path.insert(0, "{report.folder}")
from lookahead import Lookahead

ids = tokenizer("...", return_tensors="pt").input_ids
model = Lookahead.from_pretrained("{report.folder}"{trust})
print(tokenizer.decode(model.generate(ids, max_new_tokens=64, think="every:8")[0]))
```
"""


def _how(report: ExportReport) -> str:
    """In which sense the folder is the trained model."""
    if report.own_code:
        return "Its class is in this folder; all multipliers of training are folded into the weights."
    if report.headroom is not None:
        return (
            f"Its blocks have no norms. {report.headroom.constant_channels} channel(s) of the stream hold a large "
            "constant that makes the norms of the stock class constant: for inference in bfloat16 or float32, not for "
            "training or float16."
        )
    return (
        "The parameterization's multipliers are folded into the weights (Granite keeps them in its configuration), so "
        "the stock class computes the trained function exactly."
    )
