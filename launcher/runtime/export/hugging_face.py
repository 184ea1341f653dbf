"""Write a checkpoint as a Hugging Face folder, and verify it: reload with stock transformers and compare.

The folder appears under its final name only if the verification succeeds.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from plumbline.data.damage import read_object
from plumbline.data.tokenizers import CONFIG as TOKENIZER_CONFIG
from plumbline.data.tokenizers import FILES as TOKENIZER_FILES
from plumbline.data.tokenizers import copy_tokenizer
from plumbline.data.workspace import FolderKind, check_replaceable, is_free, new_folder
from plumbline.launcher.runtime.export.card import model_card
from plumbline.launcher.runtime.export.report import OBJECTIVE, ExportError, ExportReport
from plumbline.launcher.runtime.export.rounding import round_to_bf16
from plumbline.launcher.runtime.export.verify import check_tokens, verify_plain, verify_thinker
from plumbline.launcher.runtime.models.open import LoadedModel, load_tokenizer, native_classes, quiet_transformers
from plumbline.launcher.runtime.system.files import write_json
from plumbline.launcher.runtime.system.log import LOG
from plumbline.model.decoder import CausalLM
from plumbline.model.export import native, thinker
from plumbline.model.export.older_readers import older_rope_entries, unread_entries
from plumbline.model.export.stock import Headroom
from plumbline.model.export.targets import TARGETS, resolved, to_hugging_face
from plumbline.model.objectives.objective import TrainedLM
from plumbline.model.quantization.layers import rounded_weights
from plumbline.model.quantization.precision import PrecisionConfig
from plumbline.model.stock_inputs import DOCUMENT_MASK

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
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


def export(
    model: LoadedModel, output: Path, target: str, overwrite: bool = False, in_bf16: bool = False
) -> ExportReport:
    """Export to `output`, in fp32, or rounded to bf16 after the verification.

    Raises:
        ValueError: the output folder is in use or not an export, no stock class can express this model, or it uses
            rounding that no class supports.
        ExportError: the reloaded folder differs from the model.
        FullDiskError: no space is left on the device.
    """
    check_output(output, overwrite)
    target = check_exportable(model, target)
    ours = model.module
    assert isinstance(ours, CausalLM), "checked above"
    assert model.config is not None, "every CausalLM comes from a run"
    weights = {name: weight.detach().float() for name, weight in ours.named_parameters()}
    weights |= {f"model.layers.{name}": weight for name, weight in rounded_weights(ours.model.layers).items()}
    plain = {name: weight for name, weight in weights.items() if not name.startswith(OBJECTIVE)}
    entries, stock_weights = to_hugging_face(target, ours.config, ours.multipliers, plain)
    entries |= {DOCUMENT_MASK: True} if ours.config.document_mask else {}
    room = _headroom(target, ours)

    with new_folder(output, EXPORT) as staging:
        if model.tokenizer_path is None and any(source.task is None for source in model.config.data.train):
            LOG.warning(f"{model.source}: is in no run folder with a tokenizer/, so the new folder gets none")
        special = _write_tokenizer(model.tokenizer_path, ours.config.max_position_embeddings, staging)
        with quiet_transformers():
            architecture = _write_model(entries, stock_weights, special, staging)
            own_code = bool(TARGETS[target].code)
            for file in TARGETS[target].code:
                shutil.copy(file, staging)
            report = replace(verify_plain(ours, staging, output, architecture, own_code), headroom=room)
            report = report if own_code else replace(report, unread=_unread_by_some(staging))
            decoding = ours.objective.decoding if isinstance(ours, TrainedLM) else None
            if decoding is not None:
                settings, tensors = thinker.export_thinker(target, ours.config, ours.multipliers, decoding, weights)
                _write_thinker(settings, tensors, staging)
                report = replace(report, lookahead=verify_thinker(ours, decoding, staging, own_code))
            elif own := sum(weight.numel() for name, weight in weights.items() if name.startswith(OBJECTIVE)):
                report = replace(report, left_out=f"{own:,} parameters of {model.config.objective.name}")
            if in_bf16:
                report = replace(report, rounded_error=round_to_bf16(staging, output, own_code))
        report = replace(report, only_with_thoughts=model.config.objective.without_thoughts)
        (staging / "README.md").write_text(model_card(model, report), encoding="utf-8")
    return report


def check_output(output: Path, overwrite: bool) -> None:
    """Refuse an output folder that is in use or, with `overwrite`, is not an export.

    Raises:
        ValueError: names the folder, and what to do.
    """
    check_replaceable(output, EXPORT)
    if not overwrite and not is_free(output):
        raise ValueError(f"--output {output}: exists; choose another folder or add --overwrite")


def check_exportable(model: LoadedModel, target: str) -> str:
    """Return the name of the target, with auto resolved, if it can express a model; its weights are not needed.

    Raises:
        ValueError: the model is no run's, rounds more than weights, or the target is unknown or cannot express it.
    """
    if not isinstance(model.module, CausalLM) or model.config is None:
        raise ValueError(f"{model.source}: already a Hugging Face folder; --model takes a run or a checkpoint")
    _check_precision(model.config.precision)
    return resolved(target, model.module.config)


def _check_precision(precision: PrecisionConfig) -> None:
    """Refuse rounding that weights alone cannot represent."""
    for key in ("activations", "kv_cache"):
        found = getattr(precision, key)
        if found is not None:
            raise ValueError(
                f"precision.{key}: this run rounds them to {found}, and a Hugging Face class does not, so a folder "
                "would be another model; eval.py and generate.py round. A run that rounds weights alone can be "
                f"exported: branch from a checkpoint of this one with precision.{key}=null (docs/quantization.md)"
            )


def _write_tokenizer(source: Path | None, positions: int, folder: Path) -> dict[str, int | None]:
    """Copy the run's tokenizer files, and return its special tokens under their keys in config.json."""
    if source is None:
        return dict.fromkeys(SPECIAL_TOKENS)
    copy_tokenizer(source, folder)
    limit_length(folder, positions)
    tokenizer = load_tokenizer(source)
    end = tokenizer.eos_token_id
    begin = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return dict(zip(SPECIAL_TOKENS, (begin, end, tokenizer.pad_token_id), strict=True))


def _write_model(
    entries: dict[str, Any], weights: dict[str, Tensor], special: dict[str, int | None], folder: Path
) -> str:
    """Let transformers write config, weights and generation_config, and return the name of the class."""
    begin, end, pad = (special[name] for name in SPECIAL_TOKENS)
    # In most classes the embedding of pad_token_id gets no gradient, so it must not be a token that occurs in text
    stock = _empty_model({**entries, **special, "pad_token_id": None if pad in (begin, end) else pad})
    tied = {"lm_head.weight"} if stock.config.tie_word_embeddings else set()
    expected = set(stock.state_dict()) - tied
    if expected != set(weights):
        raise ExportError(f"{type(stock).__name__} has other tensors: {sorted(expected ^ set(weights))[:4]}")
    stock.load_state_dict(weights, strict=False, assign=True)
    stock.tie_weights()
    stock.generation_config.update(**special)
    stock.save_pretrained(folder)
    note_for_older_readers(folder)
    return type(stock).__name__


def limit_length(folder: Path, positions: int) -> None:
    """Make the tokenizer of a Hugging Face folder truncate to the model's number of positions."""
    path = folder / TOKENIZER_CONFIG
    write_json(path, read_object(path) | {"model_max_length": positions})


def note_for_older_readers(folder: Path) -> None:
    """Add the rotary keys from before transformers 5 to the config.json of a Hugging Face folder."""
    config = read_object(folder / "config.json")
    write_json(folder / "config.json", config | older_rope_entries(config))


def _unread_by_some(folder: Path) -> tuple[str, ...]:
    """Return what other engines than transformers may not read in the config.json of a stock class."""
    from transformers import AutoConfig

    config = read_object(folder / "config.json")
    return unread_entries(config, AutoConfig.for_model(config["model_type"]).to_dict())


def _write_thinker(settings: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / thinker.FILE, {"format": "pt", "settings": json.dumps(settings)})
    shutil.copy(thinker.CODE, folder)


def _empty_model(entries: dict[str, Any]) -> Any:
    """Return the model that config.json describes, with tensors on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        if entries["model_type"] == native.MODEL_TYPE:
            config, model = native_classes()
            return model(config(**entries, dtype=torch.float32))
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**entries, dtype=torch.float32))


def _headroom(target: str, ours: CausalLM) -> Headroom | None:
    """Return the headroom of the target's constant channels, if it has any; refuse if it is too small."""
    found = TARGETS[target].headroom(ours, check_tokens(ours.config))
    if found is not None and not found.largest <= found.limit:
        raise ExportError(
            f"--target {target}: the stream's sum of squares reaches {found.largest:.1e}, and "
            f"{found.constant_channels} constant channel(s) hide at most {found.limit:.1e}; nothing was "
            "exported: export.py --target native needs no such channels"
        )
    return found
