"""Read the limits and the shape of a model from its folder before any weights are read."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from plumbline.data.damage import read_object, reading
from plumbline.launcher.runtime.checkpoint import store as checkpoint
from plumbline.launcher.runtime.config.load import config_in
from plumbline.launcher.runtime.engine.build import build_model, without_objective
from plumbline.launcher.runtime.models.averages import checkpoint_at
from plumbline.launcher.runtime.models.open import (
    LoadedModel,
    is_ours,
    native_classes,
    opening,
    quiet_transformers,
    tokenizer_beside,
    tokenizer_within,
)
from plumbline.model.export.native import MODEL_TYPE


@dataclass(frozen=True)
class ModelFacts:
    """Hold the limits against which a prompt or text is checked."""

    path: Path
    context_length: int | None
    """Tokens of the longest sequence, or None if the model sets no limit."""
    vocab_size: int
    tokenizer_path: Path | None

    @property
    def tokenizer(self) -> Path:
        """Return the folder of the tokenizer.

        Raises:
            ValueError: there is none.
        """
        if self.tokenizer_path is None:
            raise ValueError(
                f"{self.path}: has no tokenizer, so text cannot be turned into tokens; a model of a task is scored by "
                "launcher/eval.py --task"
            )
        return self.tokenizer_path


def model_facts(path: Path) -> ModelFacts:
    """Return the facts of a run folder, a checkpoint or a Hugging Face folder.

    Raises:
        ValueError: it is none of these, or its configuration cannot be read.
    """
    if is_ours(path):
        folder = _checkpoint(path)
        model = config_in(folder).model
        return ModelFacts(path, model.max_position_embeddings, model.vocab_size, tokenizer_beside(folder))
    from transformers import AutoConfig

    file = path / "config.json"
    with reading(file), quiet_transformers():
        kind = native_classes()[0] if read_object(file).get("model_type") == MODEL_TYPE else AutoConfig
        text = kind.from_pretrained(path, trust_remote_code=False).get_text_config()
        return ModelFacts(path, getattr(text, "max_position_embeddings", None), text.vocab_size, tokenizer_within(path))


def outline(path: Path) -> LoadedModel:
    """Return a model with its weights on the meta device, so that what it does not fit is refused before reading them.

    Raises:
        ValueError: it is no model, or its configuration cannot be read.
    """
    meta = torch.device("meta")
    if is_ours(path):
        folder = _checkpoint(path)
        config = config_in(folder)
        module = build_model(without_objective(config), meta)
        return LoadedModel(module.eval(), folder, tokenizer_beside(folder), config, None, None)
    from transformers import AutoConfig, AutoModelForCausalLM

    with opening(path), meta:
        if read_object(path / "config.json").get("model_type") == MODEL_TYPE:
            shape, kind = native_classes()
            return LoadedModel(kind(shape.from_pretrained(path)).eval(), path, tokenizer_within(path), None, None, None)
        entries = AutoConfig.from_pretrained(path, trust_remote_code=False)
        module = AutoModelForCausalLM.from_config(entries, trust_remote_code=False)
        return LoadedModel(module.eval(), path, tokenizer_within(path), None, None, None)


def _checkpoint(path: Path) -> Path:
    """Return the checkpoint of a path whose configuration is whole, its weights unread."""
    whole = partial(checkpoint.problems, only=checkpoint.CONFIG.__eq__)
    return checkpoint_at(path, whole, warn=False)  # whoever reads the weights warns
