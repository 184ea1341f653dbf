"""Latent lookahead as an objective: what it sums, what it leaves alone, and that it learns what lies ahead."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from plumbline.model.decoder import CausalLM
from plumbline.model.lookahead.masks import text_of
from plumbline.model.lookahead.thoughts import run_text
from plumbline.model.objectives.latent_lookahead import LatentLookahead, LatentLookaheadConfig
from plumbline.model.objectives.next_token import NextToken, NextTokenConfig
from tests.model.conftest import Counting, Enliven, MakeModel, count_by_two, packed_batch

ROWS, LENGTH = 3, 16
DOCUMENTS = torch.tensor([[0] * 16, [0] * 9 + [1] * 7, [0] * 4 + [1] * 12])


def batch_of(**changes: Tensor) -> dict[str, Tensor]:
    return {**packed_batch(DOCUMENTS, ignored=5), **changes}


def objective_of(model: CausalLM, enliven: Enliven, **keys: Any) -> LatentLookahead:
    config = LatentLookaheadConfig.model_validate({"anchors": 4, "horizon": 3, **keys})
    objective = config.make(model.config, model.multipliers, 7)
    enliven(objective, 1)
    assert isinstance(objective, LatentLookahead)
    return objective


def gradients(model: CausalLM, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


def thoughts_of(model: CausalLM, objective: LatentLookahead, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return final states of the slots [B, K, tau, D], and the anchors [B, K]."""
    text, anchors = text_of(model.config, batch), objective._anchors(batch)
    states, memory = run_text(model.model, batch["input_ids"], text)
    return objective.thinker(model.model, states, memory, text, anchors)[0], anchors.index


@pytest.mark.parametrize("masked", [True, False])
def test_without_weight_it_is_next_token_training(make_model: MakeModel, enliven: Enliven, masked: bool) -> None:
    model, batch = make_model(document_mask=masked), batch_of()
    (plain,), nats, _ = NextToken(NextTokenConfig(z_loss=0.01))(model, batch, 0)
    losses, same, reports = objective_of(model, enliven, weight=0.0, z_loss=0.01)(model, batch, 0)
    assert torch.equal(losses[0], plain)
    assert losses[1] == 0
    assert torch.equal(same, nats)
    assert (reports[:-1, 0] > 0).all(), "measured all the same"
    for found, expected in zip(gradients(model, losses.sum()), gradients(model, plain), strict=True):
        assert torch.equal(found, expected)


def test_losses_are_sums_over_the_tokens_ahead(make_model: MakeModel, enliven: Enliven) -> None:
    """At anchors that are the sequence's first tokens with labels: known without any draw."""
    model, batch = make_model(document_mask=True), batch_of()
    objective = objective_of(model, enliven, anchor_policy="sequential", weight=0.5)
    losses, _, reports = objective(model, batch, 0)
    anchors = [[5, 6, 7, 8], [0, 1, 2, 3], [0, 1, 2, 3]]
    ahead = [
        [row, anchor + number, number]
        for row in range(ROWS)
        for anchor in anchors[row]
        for number in range(3)
        if DOCUMENTS[row, anchor + number] == DOCUMENTS[row, anchor]
    ]
    assert objective.targets(batch).tolist() == [ROWS * LENGTH - 5, len(ahead)]
    assert reports[:, 1].tolist() == [sum(each[2] == number for each in ahead) for number in (0, 1, 2, 0)]
    assert len(ahead) == 12 + 12 + 9, "the third row's first document ends at 3"
    thoughts, _ = thoughts_of(model, objective, batch)
    nats = torch.zeros(3)
    for row, place, number in ahead:
        slot = thoughts[row, anchors[row].index(place - number), number]
        logits: Any = model.lm_head(slot[None, None], None, 0.0)
        nats[number] += cross_entropy(logits[0, 0], batch["labels"][row, place])
    torch.testing.assert_close(reports[:3, 0], nats, rtol=1e-5, atol=1e-5)
    logits = model(batch["input_ids"], document_ids=batch["document_ids"], positions=batch["positions"])
    plain = sum(
        cross_entropy(logits[row, place], batch["labels"][row, place]) for row, place, number in ahead if number == 0
    )
    torch.testing.assert_close(reports[3, 0], plain - nats[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses[1], 0.5 * nats.sum(), rtol=1e-5, atol=1e-5)


def test_lambda_grows_to_its_value() -> None:
    config = LatentLookaheadConfig(weight=0.4, weight_warmup_steps=3)
    assert [config.weight_at(step) for step in (0, 1, 2, 3, 100)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert LatentLookaheadConfig(weight=0.4).weight_at(0) == 0.4


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, None),
        ({"detach_states": True}, "detach_states = true"),
        ({"detach_states": True, "commit": "thoughts"}, "detach_states = true"),
        ({"detach_states": True, "passes": 1}, None),
        ({"detach_states": True, "horizon": 1}, None),
        ({"within": "causal"}, "within = causal"),
        ({"within": "causal", "passes": 2}, None),
        ({"within": "causal", "horizon": 1, "passes": 1}, None),
    ],
    ids=str,
)
def test_first_inputs_that_no_loss_reaches_are_told(
    make_model: MakeModel, enliven: Enliven, keys: dict[str, Any], told: str | None
) -> None:
    model = make_model()
    objective = objective_of(model, enliven, growth="fixed", **keys)
    cautions = [caution for caution in objective.config.cautions() if "no gradient" in caution]
    assert [told is not None and told in caution for caution in cautions] == ([] if told is None else [True])
    waiting = objective.thinker.waiting
    if waiting is None or not waiting.numel():
        assert told is None
        return
    (gradient,) = torch.autograd.grad(objective(model, batch_of(), 0)[0].sum(), [waiting], allow_unused=True)
    assert (gradient is None or not gradient.any()) is (told is not None)


@pytest.mark.parametrize(
    ("keys", "same", "told"),
    [
        ({"horizon": 1}, {"horizon": 1, "passes": 1}, "each of the 3 passes repeats the first"),
        ({"within": "causal", "passes": 4}, {"within": "causal", "growth": "grow"}, "does in 3 slots, not 12"),
        ({"within": "causal", "passes": 2}, {"within": "causal", "growth": "grow"}, None),
        ({"passes": 4}, {"passes": 3}, None),
    ],
    ids=str,
)
@torch.no_grad()
def test_passes_that_change_nothing_are_told(
    make_model: MakeModel, enliven: Enliven, keys: dict[str, Any], same: dict[str, Any], told: str | None
) -> None:
    """Those are the passes without which the losses are the same."""
    model, losses = make_model(), []
    for setting in (keys, same):
        objective = objective_of(model, enliven, **{"growth": "fixed", **setting})
        large = torch.tensor([1 / model.config.initializer_range])  # a state weighs as much as its mark
        objective.thinker.load_state_dict({"role": torch.ones(model.config.hidden_size), "gain": large}, strict=False)
        losses.append(objective(model, batch_of(), 0)[0])
    first, second = losses
    assert torch.allclose(first, second, rtol=1e-6) is (told is not None)
    config = objective_of(model, enliven, **{"growth": "fixed", **keys}).config
    found = [caution for caution in config.cautions() if "no gradient" not in caution]
    assert [told is not None and told in caution for caution in found] == ([] if told is None else [True])


def test_detaching_stops_gradients_where_it_says(make_model: MakeModel, enliven: Enliven) -> None:
    model, batch = make_model(), batch_of()

    def moved(**keys: Any) -> dict[str, bool]:
        objective = objective_of(model, enliven, **keys)
        losses, *_ = objective(model, batch, 0)
        names, tensors = zip(*[*model.named_parameters(), *objective.named_parameters()], strict=True)
        found = torch.autograd.grad(losses[1], tensors, allow_unused=True)
        return {
            name: gradient is not None and bool(gradient.any()) for name, gradient in zip(names, found, strict=True)
        }

    assert all(moved().values())
    detached = moved(detach_text=True)
    assert not detached["model.embed_tokens.weight"], "slots have no tokens"
    assert detached["model.layers.0.mlp.up_proj.weight"]
    assert moved(detach_states=True)["model.embed_tokens.weight"], "by way of keys and values"
    alone = moved(detach_states=True, detach_text=True, horizon=1)
    assert alone["thinker.gain"]
    assert not alone["model.embed_tokens.weight"]


def test_the_uncertain_tokens_get_thoughts(make_model: MakeModel, enliven: Enliven) -> None:
    model, batch = make_model(), batch_of(labels=torch.full((ROWS, LENGTH), 1), document_ids=DOCUMENTS * 0)
    objective = objective_of(model, enliven, anchor_policy="entropy", anchors=1, horizon=2)
    assert objective.targets(batch).tolist() == [ROWS * LENGTH, ROWS * 2]
    logits: Any = model(batch["input_ids"])
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    states = model.model(batch["input_ids"])
    torch.testing.assert_close(objective._entropy(model, states), entropy, rtol=1e-4, atol=1e-4)
    _, _, reports = objective(model, batch, 0)
    assert reports[:, 1].tolist() == [ROWS, ROWS, ROWS]


@pytest.mark.parametrize("growth", ["grow", "fixed"])
def test_slot_j_learns_what_comes_j_tokens_later(counting: Counting, growth: str) -> None:
    """On a sequence that counts by two, from anywhere."""
    model, batch = counting(growth), count_by_two(torch.Generator().manual_seed(1))
    assert isinstance(model.objective, LatentLookahead)
    reports = model.losses(batch, 0).reports
    assert (reports[:-1, 0] / reports[:-1, 1] < 0.5).all(), "chance is log 31"
    thoughts, anchors = thoughts_of(model, model.objective, batch)
    logits: Any = model.lm_head(thoughts.flatten(1, 2), None, 0.0)
    found = logits.argmax(-1).unflatten(1, (4, 3))
    expected = (batch["input_ids"].gather(1, anchors)[:, :, None] + 2 * torch.arange(1, 4)) % 31
    assert (found == expected).float().mean() > 0.9
