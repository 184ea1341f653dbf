"""A short run, opened, exported and made to predict by all it sees; likelihoods straight from the module."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from plumbline.launcher.runtime.export import hugging_face as hf_export
from plumbline.launcher.runtime.models.open import LoadedModel, load_model, load_tokenizer
from tests.conftest import CONFIG, once

if TYPE_CHECKING:
    from tests.conftest import Pretrain

CONTEXT, EOS = 32, 256
# Documents of any length: within the context, a multiple of it, beyond it; bytes are no characters
DOCUMENTS = ["import os\n", "é" * (CONTEXT // 2), "def parse(text):\n    return text.strip()\n" * 3, "", "x"]
QUESTIONS = [
    {"question": "def", "choices": ["main(", "zzzzzzzzzzzz", "self"]},
    {"question": "import re\nimport", "choices": ["一一一一", "QXZJ"]},  # likelier per byte, and per character
    {
        "question": "A question longer than what the model sees: raise",
        "choices": ["ValueError", "£", "the end"],
    },
    {"question": "", "choices": ["    return", "}", "=="]},
    {"question": "for x in", "choices": ["range(3):", "0000000000000000"]},
]


@pytest.fixture(scope="session")
def trained(run_pretrain: Pretrain, corpus: Path, shared_folder: Path) -> Path:
    """Return a finished run with checkpoints before its decay and at its end; tests of all workers read this one."""

    def train(folder: Path) -> None:
        folder.mkdir()
        config = folder / "tiny.yaml"
        config.write_text(CONFIG.format(root=folder, corpus=shared_folder / corpus.name), encoding="utf-8")
        outcome = run_pretrain(config, "trained", ["schedule.decay=40%"], launcher="python")
        assert outcome.code == 0, outcome.stderr

    return once(shared_folder / "trained", train) / "runs" / "trained"


@pytest.fixture(scope="session")
def model(trained: Path) -> LoadedModel:
    loaded = load_model(trained, torch.device("cpu"))
    assert loaded.context_length == CONTEXT
    return loaded


@pytest.fixture(scope="session")
def writer(model: LoadedModel) -> LoadedModel:
    """Return the model with large random weights: it predicts from all it sees, and its likeliest bytes differ."""
    module = copy.deepcopy(model.module)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=1.0 if "embed" in name else 2 * weight.size(1) ** -0.5, generator=generator)
        head = module.get_parameter("lm_head.weight")
        head[: ord("!")] = head[ord("~") :] = 0  # printable ones
    return replace(model, module=module)


@pytest.fixture(scope="session")
def exported_folder(model: LoadedModel, shared_folder: Path) -> Path:
    """Return the same model as a stock class of transformers would read it."""
    return once(shared_folder / "exported", lambda folder: hf_export.export(model, folder, "auto"))


@pytest.fixture(scope="session")
def exported(exported_folder: Path) -> LoadedModel:
    """Return the same model as a stock class of transformers."""
    return load_model(exported_folder, torch.device("cpu"))


@pytest.fixture(scope="session")
def tokenizer(trained: Path) -> Any:
    return load_tokenizer(trained / "tokenizer")


@pytest.fixture(scope="session")
def likeliest(model: LoadedModel) -> list[int]:
    """Return for each question the choice with the largest log-probability, computed without the adapter."""
    return [max(range(len(found)), key=found.__getitem__) for found in (choice_nats(model, q) for q in QUESTIONS)]


def asks(*arguments: object) -> Any:
    """Return a request as the harness makes it; the adapter reads its arguments only."""
    return SimpleNamespace(args=arguments)


def log_probs(model: LoadedModel, tokens: list[int]) -> Tensor:
    """Return [T, V] straight from the module: one row, nothing padded."""
    with torch.no_grad():
        return model.module(torch.tensor([tokens]))[0].double().log_softmax(-1)  # type: ignore[no-any-return]


def nats_of(model: LoadedModel, context: list[int], continuation: list[int]) -> float:
    """Log-probability of a continuation, one forward pass for each of its tokens."""
    whole = (context + continuation)[-CONTEXT - 1 :]
    first = len(whole) - len(continuation)
    return sum(log_probs(model, whole[:place])[-1, whole[place]].item() for place in range(first, len(whole)))


def choice_nats(model: LoadedModel, question: dict[str, Any]) -> list[float]:
    """Log-probability of each choice; an empty question is the end of another text."""
    context = list(question["question"].encode()) or [EOS]
    return [nats_of(model, context, list(f" {choice}".encode())) for choice in question["choices"]]


def document_nats(model: LoadedModel, text: str) -> float:
    """Log-probability of a text in windows of CONTEXT predicted tokens; the last one sees as far back as it can."""
    tokens = [EOS, *text.encode()]
    total = 0.0
    for begin in range(0, len(tokens) - 1, CONTEXT):
        end = min(begin + CONTEXT, len(tokens) - 1)
        seen = max(0, end - CONTEXT)
        found = log_probs(model, tokens[seen:end])
        total += sum(found[k - seen, tokens[k + 1]].item() for k in range(begin, end))
    return total
