"""Fine-tuning of a native export, as transformers' Trainer does it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from plumbline.launcher.runtime.export.hugging_face import export
from plumbline.launcher.runtime.models.open import load_model
from plumbline.model.decoder import CausalLM
from tests.model.conftest import loaded

MakeModel = Callable[..., CausalLM]


def gradient(model: Any) -> Tensor:
    """Return the gradient of all weights, and forget it."""
    found = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    model.zero_grad()
    return found


def test_a_step_is_the_same_in_any_number_of_micro_batches(make_model: MakeModel, tmp_path: Path) -> None:
    """Trainer tells a model with keyword arguments how many labels the whole step has, and divides by nothing else."""
    export(loaded(make_model(), tmp_path), tmp_path / "out", "native")
    model: Any = load_model(tmp_path / "out", torch.device("cpu")).module
    rows = torch.randint(61, (8, 16), generator=torch.Generator().manual_seed(1))
    labels = rows.masked_fill(torch.arange(16) < torch.arange(8)[:, None], -100)  # unequally many
    count = (labels[:, 1:] >= 0).sum()
    whole = model(input_ids=rows, labels=labels).loss
    whole.backward()
    expected = gradient(model)
    total = 0.0
    for part, of_part in zip(rows.split(2), labels.split(2), strict=True):
        loss = model(input_ids=part, labels=of_part, num_items_in_batch=count).loss
        loss.backward()
        total += loss.item()
    torch.testing.assert_close(torch.tensor(total), whole.detach())
    torch.testing.assert_close(gradient(model), expected, rtol=1e-3, atol=1e-5)


def test_trainer_evaluates_it(make_model: MakeModel, tmp_path: Path) -> None:
    """Trainer adds the loss to the outputs that the configuration says to leave out."""
    export(loaded(make_model(), tmp_path), tmp_path / "out", "native")
    model: Any = load_model(tmp_path / "out", torch.device("cpu")).module
    rows = torch.randint(61, (4, 16), generator=torch.Generator().manual_seed(1))
    options = TrainingArguments(str(tmp_path / "trainer"), report_to=[], use_cpu=True, disable_tqdm=True)
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, options, eval_dataset=data)
    expected = model(input_ids=rows, labels=rows)
    found = trainer.predict(data)
    assert abs(trainer.evaluate()["eval_loss"] - expected.loss.item()) < 1e-4
    torch.testing.assert_close(torch.tensor(found.predictions), expected.logits.detach(), rtol=1e-4, atol=1e-4)
