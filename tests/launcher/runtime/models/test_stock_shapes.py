"""Stock models whose configuration names no longest sequence, or names it for its text part alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from plumbline.launcher.runtime.export.verify import CHECK_LENGTH, check_tokens
from plumbline.launcher.runtime.harness.adapter import UNLIMITED, HarnessModel
from plumbline.launcher.runtime.models.facts import model_facts
from plumbline.launcher.runtime.models.held_out import LONGEST, window_length
from plumbline.launcher.runtime.models.open import load_model
from plumbline.model.sampling import GREEDY

PART = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": 53, "hidden_size": 16, "n_layer": 1, "n_head": 2},
    "mpt": {"vocab_size": 53, "d_model": 16, "n_layers": 1, "n_heads": 2},
    "mamba": {"vocab_size": 53, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    "gemma3": {
        "text_config": {
            **PART,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": 53,
            "max_position_embeddings": 40,
        },
        "vision_config": {**PART, "image_size": 16, "patch_size": 8},
        "mm_tokens_per_image": 4,
    },
}


@pytest.mark.parametrize("kind", SHAPES)
def test_it_is_opened_and_asked(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = AutoConfig.for_model(kind, **SHAPES[kind], **ids)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model, longest = load_model(tmp_path, torch.device("cpu")), 40 if kind == "gemma3" else None
    assert (model.context_length, model.vocab_size) == (longest, 53)
    assert model_facts(tmp_path).context_length == longest
    assert window_length(model, None) == (longest or LONGEST)
    if longest is None:
        assert window_length(model, 10**6) == 10**6
    else:
        with pytest.raises(ValueError, match="--sequence-length 41 exceeds the model's 40 positions"):
            window_length(model, 41)
    harness = HarnessModel(model, SimpleNamespace(bos_token_id=0, eos_token_id=1))
    assert harness.max_length == (longest or UNLIMITED)
    assert check_tokens(config.get_text_config()).size(1) == (longest or CHECK_LENGTH)
    assert len(list(model.continuation([5, 6, 7], 3, sampling=GREEDY))) == 3
