"""The other objectives: what each predicts from what, and that none of them changes the plain model's own losses."""

from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.nn.functional import cross_entropy

from plumbline.model.attention import ATTENTIONS
from plumbline.model.decoder import CausalLM
from plumbline.model.objectives import ObjectiveConfig
from plumbline.model.objectives.next_token import NextTokenConfig
from plumbline.model.objectives.objective import Objective
from plumbline.model.objectives.registers import RegistersConfig
from tests.model.conftest import Enliven, MakeConfig, MakeModel, packed_batch

ROWS, LENGTH, VOCABULARY = 2, 12, 61
DOCUMENTS = torch.tensor([[0] * 12, [0] * 5 + [1] * 7])
CONFIGS: dict[str, dict[str, Any]] = {
    "multi_token": {"horizon": 3, "weight": 0.5},
    "sequential_mtp": {"horizon": 3, "weight": 0.5},
    "registers": {"horizon": 3, "weight": 0.4},
    "pause": {"horizon": 3, "anchor_policy": "response_start"},
    "coconut": {"horizon": 3, "anchor_policy": "response_start"},
}


def batch_of() -> dict[str, Tensor]:
    return packed_batch(DOCUMENTS, ignored=4)


def trained(make_model: MakeModel, enliven: Enliven, name: str, **shape: Any) -> tuple[CausalLM, Objective]:
    model = make_model(**{"document_mask": True, **shape})
    config: Any = TypeAdapter(ObjectiveConfig).validate_python({"name": name, **CONFIGS[name]})
    objective = config.make(model.config, model.multipliers, 7)
    enliven(objective, 1)
    return model, objective


def changed(batch: dict[str, Tensor], row: int, place: int) -> dict[str, Tensor]:
    tokens = batch["input_ids"].clone()
    tokens[row, place] = (tokens[row, place] + 1) % VOCABULARY
    return {**batch, "input_ids": tokens}


def only(batch: dict[str, Tensor], row: int, place: int) -> dict[str, Tensor]:
    """Return the batch with a single label: the token after this one."""
    labels = torch.full_like(batch["labels"], -100)
    labels[row, place] = batch["labels"][row, place]
    return {**batch, "labels": labels}


@pytest.mark.parametrize("name", ["multi_token", "sequential_mtp", "registers"])
def test_the_plain_model_predicts_as_without(make_model: MakeModel, enliven: Enliven, name: str) -> None:
    model, objective = trained(make_model, enliven, name)
    batch = batch_of()
    plain, nats = model(batch["input_ids"], batch["labels"], batch["document_ids"], batch["positions"])
    losses, same, _ = objective(model, batch, 0)
    assert torch.equal(same, nats)
    assert losses[0] == plain * (1 - 0.4 if name == "registers" else 1)
    assert objective.targets(batch)[0] == (batch["labels"] >= 0).sum()


@pytest.mark.parametrize(("name", "own"), [("multi_token", "heads"), ("sequential_mtp", "links")])
@pytest.mark.parametrize("family", ["qwen3", "shaped"])
@torch.no_grad()
def test_own_blocks_count_in_full_at_any_depth(
    make_model: MakeModel, enliven: Enliven, name: str, own: str, family: str
) -> None:
    """One block more does not become a thirty-second part of one because the trunk is deeper."""
    outputs = []
    for base in (3, 1):  # three blocks: a depth multiplier of 1, and of 3
        rule = {"rule": "completep", "base_hidden_size": 32, "base_num_hidden_layers": base}
        shape = {"family": family, "document_mask": family != "shaped"}
        model, objective = trained(make_model, enliven, name, rule=rule, **shape)
        module = getattr(objective, own)[0]
        x, positions = torch.ones(1, 4, 32), torch.arange(4)[None]
        block = module if own == "heads" else module.block
        outputs.append(block(x, model.model.context(x, positions)))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("shape", [{}, {"family": "gpt2"}, {"value_residual": True}])
@torch.no_grad()
def test_heads_share_the_trunk(make_model: MakeModel, enliven: Enliven, shape: dict[str, Any]) -> None:
    model, objective = trained(make_model, enliven, "multi_token", **shape)
    batch, decoder = batch_of(), model.model
    losses, _, reports = objective(model, batch, 0)
    entered: list[Tensor] = []
    hook = decoder.layers[2].register_forward_pre_hook(lambda _m, inputs: entered.append(inputs[0]))
    model(batch["input_ids"], None, batch["document_ids"], batch["positions"])
    hook.remove()
    positions = batch["positions"]
    context = decoder.context(decoder.embed(batch["input_ids"], positions), positions, DOCUMENTS)
    assert (context.first_values is not None) == ("value_residual" in shape)
    for number, head in enumerate(objective.heads, start=1):  # type: ignore[arg-type]
        logits: Any = model.lm_head(decoder.finish(head(entered[0], context)), None, 0.0)
        expected = [
            cross_entropy(logits[row, place], batch["labels"][row, place + number])
            for row in range(ROWS)
            for place in range(LENGTH - number)
            if DOCUMENTS[row, place] == DOCUMENTS[row, place + number] and batch["labels"][row, place + number] >= 0
        ]
        torch.testing.assert_close(reports[number - 1], torch.tensor([sum(expected), len(expected)]))
    torch.testing.assert_close(losses[1], 0.5 * 2 * reports[:, 0].sum())  # the sum of two heads' means
    assert objective.targets(batch)[1] == reports[:, 1].sum()


@torch.no_grad()
def test_a_link_is_fed_the_true_tokens_before_its_target(make_model: MakeModel, enliven: Enliven) -> None:
    """From token i, link k predicts token i + k + 1 and has been told the tokens up to i + k."""
    model, objective = trained(make_model, enliven, "sequential_mtp")
    for number in (1, 2):
        place = 9  # the one target, seen by link k from token place - k
        batch = only(batch_of(), 0, place)
        before = objective(model, batch, 0)[2][number - 1]
        assert before[1] == 1
        for other, matters in ((place + 1, False), (place, True), (place - number, True), (2, True)):
            after = objective(model, changed(batch, 0, other), 0)[2][number - 1]
            assert (after[0] != before[0]) == matters, (number, other)


@torch.no_grad()
def test_a_register_sees_text_up_to_its_token(make_model: MakeModel, enliven: Enliven) -> None:
    model, objective = trained(make_model, enliven, "registers")
    batch = {**batch_of(), "document_ids": DOCUMENTS * 0, "positions": torch.arange(LENGTH).expand(ROWS, -1)}
    distances = [int(each) for each in objective._distance(batch)]  # type: ignore[operator]
    assert sorted({int(d) for d in objective._distance({"sample_index": torch.arange(50)})}) == [1, 2, 3]  # type: ignore[operator]
    for row, distance in enumerate(distances):
        place = 9  # the one target, predicted by the register of token place - distance + 1
        one = only(batch, row, place)
        before = objective(model, one, 0)[2][0]
        assert before[1] == 1
        for other, matters in ((place - distance + 2, False), (place - distance + 1, True), (0, True)):
            after = objective(model, changed(one, row, other), 0)[2][0]
            assert (after[0] != before[0]) == matters, (row, other)


@torch.no_grad()
def test_a_window_counts_from_where_a_register_stands(make_model: MakeModel, enliven: Enliven) -> None:
    """One that stands d - 1 tokens ahead of its token sees as many fewer."""
    model, objective = trained(make_model, enliven, "registers", num_hidden_layers=1, sliding_window=3)
    batch = {**batch_of(), "document_ids": DOCUMENTS * 0, "positions": torch.arange(LENGTH).expand(ROWS, -1)}
    distance: Any = objective._distance
    drawn = distance({"sample_index": torch.arange(50)}).tolist()
    batch["sample_index"] = torch.tensor([drawn.index(2), drawn.index(3)])
    place = 9  # of the one target, where its register stands
    for row in range(ROWS):
        one = only(batch, row, place)
        before = objective(model, one, 0)[2][0]
        for other, matters in ((place - 2, True), (place - 3, False)):
            after = objective(model, changed(one, row, other), 0)[2][0]
            assert (after[0] != before[0]) == matters, (row, other)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_enters_the_first_block_has_been_dropped(make_model: MakeModel, enliven: Enliven, name: str) -> None:
    """Slots and registers as text: the same share of zeros."""
    model, objective = trained(make_model, enliven, name, dropout=0.5)
    entered: list[Tensor] = []
    model.model.layers[0].register_forward_pre_hook(lambda _m, inputs: entered.append(inputs[0]))
    torch.manual_seed(0)
    objective(model.train(), batch_of(), 0)
    for x in entered:
        assert (x == 0).float().mean() == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize("name", ["pause", "coconut"])
@torch.no_grad()
def test_the_last_slot_of_a_silent_thought_speaks(make_model: MakeModel, enliven: Enliven, name: str) -> None:
    """At the first label of a row alone; tokens before it are those of the plain model, tokens after see the slots."""
    model, objective = trained(make_model, enliven, name)
    batch = {**batch_of(), "document_ids": DOCUMENTS * 0, "positions": torch.arange(LENGTH).expand(ROWS, -1)}
    batch["labels"][1, :6] = -100
    plain: Any = model(batch["input_ids"], None, batch["document_ids"], batch["positions"])
    found: Any = model.lm_head(objective.thinking_states(model, batch), None, 0.0)
    for row, anchor in ((0, 4), (1, 6)):
        torch.testing.assert_close(found[row, :anchor], plain[row, :anchor], rtol=1e-4, atol=1e-4)
        assert ((found[row, anchor:] - plain[row, anchor:]).abs().amax(-1) > 1e-3).all()
    losses, nats, reports = objective(model, batch, 0)
    expected = cross_entropy(found.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    torch.testing.assert_close(losses, expected[None])
    torch.testing.assert_close(nats, expected)
    assert reports.shape == (0, 2)


def test_a_pause_knows_no_state(make_model: MakeModel, enliven: Enliven) -> None:
    """Coconut feeds states back; pause tokens are the same for every text."""
    names = {
        name: dict(trained(make_model, enliven, name)[1].named_parameters()).keys() for name in ("pause", "coconut")
    }
    assert names["pause"] == {"thinker.role", "thinker.waiting"}
    assert names["coconut"] == {"thinker.role", "thinker.gain"}


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_only_softmax_attention_serves_slots(make_config: MakeConfig, kind: str) -> None:
    config = make_config(attention=kind, qk_norm="none")
    needs = [f"objective.name = registers needs model.attention: softmax; it is {kind}, so train for next_token"]
    assert list(RegistersConfig().problems(config, 16, None)) == ([] if kind == "softmax" else needs)
    assert list(NextTokenConfig().problems(config, 16, None)) == []
