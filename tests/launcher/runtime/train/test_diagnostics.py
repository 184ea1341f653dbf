"""Diagnostics measure the tokens of text and of examples, not the padding behind them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plumbline.data.tasks.induction import InductionConfig
from plumbline.data.tasks.source import TaskStream
from plumbline.data.tasks.star_graph import StarGraphConfig
from plumbline.data.windows import gather
from plumbline.launcher.runtime.train.diagnostics import StepObserver, real_tokens
from plumbline.model.build import build_decoder
from plumbline.model.config import ModelConfig

LENGTH = 40


def examples(rows: int = 3, length: int = LENGTH) -> Any:
    """Return a batch of examples that are shorter than its rows, unless `length` is theirs."""
    numbers = np.arange(rows)
    return gather([star_graph()], np.zeros(rows, np.int64), numbers, numbers, length)


def star_graph() -> TaskStream:
    return TaskStream(StarGraphConfig(path_length=3, nodes=10), "train")


def test_padding_is_found_behind_every_example() -> None:
    batch, size = examples(), len(star_graph().read(0, LENGTH).inputs)
    assert 0 < size < LENGTH
    real = real_tokens(batch)
    assert real is not None
    assert real.equal((torch.arange(LENGTH) < size).expand(3, LENGTH))
    assert real_tokens(examples(length=size)) is None


def test_tokens_without_an_answer_are_no_padding() -> None:
    """The last ones of an example of induction may have none."""
    task = InductionConfig(symbols=20, length=LENGTH)
    numbers = np.arange(20)
    batch: Any = gather([TaskStream(task, "train")], np.zeros(20, np.int64), numbers, numbers, LENGTH)
    assert (batch["labels"][:, -1] < 0).any()
    assert real_tokens(batch) is None


@pytest.mark.parametrize("max_tokens", [3 * LENGTH, 2 * LENGTH, 15])
def test_a_step_is_observed_without_padding(max_tokens: int) -> None:
    """As if rows ended with their examples, under every cap on the tokens that are measured."""
    size = len(star_graph().read(0, LENGTH).inputs)
    rows = max(1, min(3, max_tokens // LENGTH))
    found = observe(examples(), max_tokens)
    assert found == pytest.approx(observe(examples(rows, size), rows * min(size, max_tokens)), rel=1e-5)


def observe(batch: Any, max_tokens: int) -> dict[str, float]:
    vocab = star_graph().task.vocab_size
    shape: dict[str, Any] = {"vocab_size": vocab, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = build_decoder(ModelConfig(**shape, max_position_embeddings=LENGTH), device="cpu").eval()
    engine: Any = SimpleNamespace(
        model=model,
        logits=lambda sample: model(sample["input_ids"], positions=sample["positions"]),
        plan=SimpleNamespace(rows=()),
        world=SimpleNamespace(device=torch.device("cpu")),
    )
    return StepObserver(engine, batch, max_tokens).observation.record()
