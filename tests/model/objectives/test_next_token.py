"""The objective hands everything in a batch to the model, and returns sums over valid labels."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import cross_entropy

from plumbline.model.decoder import CausalLM
from plumbline.model.objectives.next_token import NextToken, NextTokenConfig

MakeModel = Callable[..., CausalLM]


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_sums_over_the_valid_labels_of_packed_documents(make_model: MakeModel, z_loss: float) -> None:
    model = make_model(document_mask=True)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(61, (1, length), generator=generator) for length in (7, 5)]
    labels = torch.randint(61, (1, 12), generator=generator)
    labels[0, [2, 6]] = -100
    batch = {
        "input_ids": torch.cat(documents, dim=1),
        "labels": labels,
        "document_ids": torch.tensor([[0] * 7 + [1] * 5]),
        "positions": torch.tensor([[*range(7), *range(5)]]),
    }
    objective = NextToken(NextTokenConfig(z_loss=z_loss))
    (loss,), nats, _ = objective(model, batch, 0)
    assert objective.targets(batch).tolist() == [10]
    logits = torch.cat([model(document)[0] for document in documents])
    torch.testing.assert_close(nats, cross_entropy(logits, labels[0], reduction="sum"))
    torch.testing.assert_close(loss - nats, z_loss * logits.logsumexp(-1)[labels[0] >= 0].square().sum())
