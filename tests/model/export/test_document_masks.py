"""Exports of runs that masked documents: a folder keeps them apart as the run did, in every class."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plumbline.launcher.runtime.export import verify
from plumbline.launcher.runtime.export.hugging_face import export
from plumbline.launcher.runtime.export.report import ExportError
from plumbline.launcher.runtime.models.open import load_model
from plumbline.model.decoder import CausalLM
from plumbline.model.quantization.post_training.apply import quantize_model
from plumbline.model.quantization.post_training.recipes import named_recipe
from tests.model.conftest import loaded
from tests.model.export.test_export import EXPRESSIBLE

MakeModel = Callable[..., CausalLM]

CPU = torch.device("cpu")
CLASSES = {architecture: (target, shape) for target, architecture, shape in reversed(EXPRESSIBLE)}


def packed(*samples: list[int]) -> dict[str, Tensor]:
    """Return a batch of samples of equal length, each of documents of these lengths."""
    positions = torch.tensor([[place for length in each for place in range(length)] for each in samples])
    tokens = torch.randint(61, positions.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "positions": positions.int(), "document_ids": (positions == 0).cumsum(1).int() - 1}


BATCH = packed([13, 1, 10, 16], [40])


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


@pytest.mark.parametrize("architecture", CLASSES)
def test_an_export_masks_documents_as_its_run(make_model: MakeModel, tmp_path: Path, architecture: str) -> None:
    target, shape = CLASSES[architecture]
    model = make_model(**shape, document_mask=True)
    export(loaded(model, tmp_path), tmp_path / "out", target)
    opened = load_model(tmp_path / "out", CPU)
    assert type(opened.module).__name__ == architecture
    assert difference(opened.logits(BATCH), model.logits(BATCH)) < 2e-6
    labelled = {**BATCH, "labels": BATCH["input_ids"].roll(-1, 1)}
    assert opened.evaluate(labelled).nats == pytest.approx(model.cross_entropy(labelled).item(), rel=1e-5)
    assert difference(opened.logits({"input_ids": BATCH["input_ids"]}), model.logits(BATCH)) > 0.01


@pytest.mark.parametrize("architecture", CLASSES)
def test_so_does_one_whose_keys_and_values_are_rounded(
    make_model: MakeModel, tmp_path: Path, architecture: str
) -> None:
    """In transformers a cache rounds them, with which documents would see each other."""
    target, shape = CLASSES[architecture]
    model = make_model(**shape, document_mask=True, rule={"rule": "sp"})
    export(loaded(model, tmp_path), tmp_path / "out", target)
    opened = load_model(tmp_path / "out", CPU)
    exact = model.logits(BATCH)
    for module in (model, opened.module):
        quantize_model(module, named_recipe("kv4-token"), [])
    assert difference(model.logits(BATCH), exact) > 0.01
    assert difference(opened.logits(BATCH), model.logits(BATCH)) < 0.005
    alone = {"input_ids": BATCH["input_ids"][1:]}  # without positions, as of one document
    assert difference(opened.logits(alone), model.logits(alone)) < 0.005


def test_a_folder_that_does_not_say_so_sees_all_of_a_sample(make_model: MakeModel, tmp_path: Path) -> None:
    export(loaded(make_model(family="qwen3"), tmp_path), tmp_path / "out", "auto")
    assert "document_mask" not in json.loads((tmp_path / "out" / "config.json").read_text())
    opened = load_model(tmp_path / "out", CPU)
    assert torch.equal(opened.logits(BATCH), opened.logits({"input_ids": BATCH["input_ids"]}))


def test_a_class_that_mixes_documents_is_refused(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "stock_inputs", lambda _, batch: {"input_ids": batch["input_ids"]})
    with pytest.raises(ExportError, match="logits differ by"):
        export(loaded(make_model(family="qwen3", document_mask=True), tmp_path), tmp_path / "out", "auto")
    assert not (tmp_path / "out").exists()


def test_calibration_text_is_masked_as_in_training(make_model: MakeModel, tmp_path: Path) -> None:
    """GPTQ rounds by sums over the inputs of each layer, and a run and its export get to see the same ones."""

    def rounded(module: Any, samples: list[Any]) -> Tensor:
        quantize_model(module, named_recipe("gptq-w3"), samples)
        return torch.cat([layer.mlp.down_proj.weight.flatten() for layer in module.model.layers])

    model = make_model(family="llama", document_mask=True, rule={"rule": "sp"})
    export(loaded(model, tmp_path), tmp_path / "out", "auto")
    found = rounded(load_model(tmp_path / "out", CPU).module, [BATCH])
    unmasked = rounded(load_model(tmp_path / "out", CPU).module, [BATCH["input_ids"]])
    expected = rounded(model, [BATCH])
    assert difference(found, expected) < 1e-5
    assert difference(unmasked, expected) > 0.01
