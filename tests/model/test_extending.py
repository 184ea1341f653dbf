"""What a kind of somebody's own meets: rules that it must state, and what it would lose if it does not."""

from collections.abc import Iterator
from typing import Any, ClassVar, get_args

import pytest
import torch
from torch import nn

from plumbline.model.attention import ATTENTIONS
from plumbline.model.attention.kind import Attention
from plumbline.model.attention.softmax import SoftmaxAttention
from plumbline.model.blocks import BLOCKS
from plumbline.model.blocks.kind import Block
from plumbline.model.blocks.pre_norm import PreNormBlock
from plumbline.model.combinations import check_model
from plumbline.model.config import ModelConfig
from plumbline.model.export.targets import TARGETS
from plumbline.model.objectives.next_token import NextToken, NextTokenConfig
from plumbline.model.objectives.objective import Objective, ObjectiveSettings, TrainedLM
from plumbline.model.parameterization.skeleton import model_tensors
from plumbline.model.parameterization.tensors import TensorRule
from tests.model.conftest import MakeConfig, MakeModel


class Counting(SoftmaxAttention):
    """Keep a number that a checkpoint does not hold."""

    needs = ()
    persistent: ClassVar[bool] = True
    device: ClassVar[str | None] = None

    def __init__(self, config: ModelConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self.register_buffer("seen", torch.zeros((), device=self.device), persistent=self.persistent)


class Experts(SoftmaxAttention):
    """Hold matrices in one tensor."""

    needs = ()
    tensors = (*SoftmaxAttention.tensors, TensorRule("experts", "hidden_matrix"))

    def __init__(self, config: ModelConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self.experts = nn.Parameter(torch.empty(2, 32, 32))


class Adding(PreNormBlock):
    """Add branches to the stream without the parameterization's factor."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        del self.mlp_residual


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let kinds be added, and nothing be remembered of a model of that name."""
    model_tensors.cache_clear()
    yield monkeypatch
    model_tensors.cache_clear()


@pytest.mark.parametrize(
    ("persistent", "device", "refused"),
    [(True, None, True), (True, "cpu", True), (False, None, True), (False, "cpu", False)],
)
def test_a_buffer_that_would_be_lost_is_refused(
    mine: pytest.MonkeyPatch, make_config: MakeConfig, persistent: bool, device: str | None, refused: bool
) -> None:
    mine.setitem(ATTENTIONS, "softmax", Counting)
    mine.setattr(Counting, "persistent", persistent)
    mine.setattr(Counting, "device", device)
    if refused:
        with pytest.raises(ValueError, match=r"buffer 'model\.layers\.0\.self_attn\.seen': .*trains=lambda"):
            model_tensors(make_config())
    else:
        model_tensors(make_config())


def test_matrices_in_one_tensor_are_refused(mine: pytest.MonkeyPatch, make_config: MakeConfig) -> None:
    mine.setitem(ATTENTIONS, "softmax", Experts)
    with pytest.raises(ValueError, match=r"self_attn\.experts' is a hidden_matrix of shape \[2, 32, 32\]"):
        model_tensors(make_config())


def test_a_branch_joins_by_the_factor_of_the_table(mine: pytest.MonkeyPatch, make_config: MakeConfig) -> None:
    mine.setitem(BLOCKS, "pre_norm", Adding)
    with pytest.raises(ValueError, match=r"model\.layers\.0 \(Adding\) has no Residual named mlp_residual"):
        model_tensors(make_config())


def test_what_another_kind_can_do_is_not_taken_over() -> None:
    assert (PreNormBlock.rotates, Adding.rotates) == (True, False)
    assert [kind.no_native_code is None for kind in (Block, PreNormBlock, Adding)] == [False, True, False]
    assert (SoftmaxAttention.serves_slots, SoftmaxAttention.rounds_stored) == (True, True)
    assert (Experts.serves_slots, Experts.rounds_stored) == (False, False)
    assert [kind.no_native_code is None for kind in (Attention, SoftmaxAttention, Experts)] == [False, True, False]


class NoForward(PreNormBlock):
    """Wire nothing yet."""

    forward = nn.Module.forward


class NoMap(Attention):
    """Compute nothing yet."""

    needs = ()


class NoScale(NoMap):
    """Leave out what exports ask for."""

    needs = ()

    def forward(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        return x


class Unnamed(Objective):
    """Minimise nothing yet."""


class Uncounted(Unnamed):
    """Name a loss."""

    terms = ("next_token",)


@pytest.mark.parametrize(
    ("kinds", "name", "kind", "lacks"),
    [
        (BLOCKS, "pre_norm", NoForward, "forward"),
        (ATTENTIONS, "softmax", NoMap, "forward"),
        (ATTENTIONS, "softmax", NoScale, "scaled_module"),
    ],
)
def test_a_kind_half_written_is_refused_before_anything_runs(
    mine: pytest.MonkeyPatch, make_config: MakeConfig, kinds: dict[str, type], name: str, kind: type, lacks: str
) -> None:
    mine.setitem(kinds, name, kind)
    with pytest.raises(ValueError, match=rf"test_extending\.{kind.__name__} has no {lacks}: .*kind$"):
        model_tensors(make_config())


@pytest.mark.parametrize(
    ("make", "lacks"),
    [
        (ObjectiveSettings.make, "NextTokenConfig has no make"),
        (lambda *_: Unnamed(), "Unnamed has no terms"),  # type: ignore[abstract]
        (lambda *_: Uncounted(), "Uncounted has no targets"),  # type: ignore[abstract]
    ],
)
def test_an_objective_half_written_is_refused_before_anything_runs(
    mine: pytest.MonkeyPatch, make_config: MakeConfig, make: Any, lacks: str
) -> None:
    mine.setattr(NextTokenConfig, "make", make)
    with pytest.raises(ValueError, match=rf"{lacks}: a kind states its own, see Objective\w* in .*objective$"):
        model_tensors(make_config(), NextTokenConfig())


class NoValues(Attention):
    """Have nothing to hand on."""

    needs = ()


class NoInput(Block):
    """Have nothing to hand on either."""


@pytest.mark.parametrize(
    ("kinds", "kind", "message"),
    [
        (ATTENTIONS, NoValues, "attention = mine has no values"),
        (BLOCKS, NoInput, "block = mine has no attention_input"),
    ],
)
def test_first_values_want_somebody_who_has_them(
    mine: pytest.MonkeyPatch, make_config: MakeConfig, kinds: dict[str, type], kind: type, message: str
) -> None:
    mine.setitem(kinds, "mine", kind)
    switch = {"attention" if kinds is ATTENTIONS else "block": "mine"}
    config = make_config().model_copy(update={**switch, "value_residual": True})
    with pytest.raises(ValueError, match=message):
        check_model(config)


@pytest.mark.parametrize("base", [Attention, SoftmaxAttention])
def test_an_attention_states_which_switches_it_does_not_read(base: type) -> None:
    with pytest.raises(TypeError, match="Silent has no needs: state the switches"):
        type("Silent", (base,), {})


SWITCHES: dict[str, Any] = {
    "sliding_window": 4,
    "attention_sink": True,
    "attn_logit_softcapping": 1.0,
    "attention_gate": "head",
    "value_residual": True,
    "position_embedding": "learned",
}
"""Switches that change what attention computes; those of biases and rotary scaling have tests of their own."""


@pytest.mark.parametrize("switch", [*SWITCHES, "document_mask", "qk_norm", "frozen_qk"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_an_attention_computes_or_refuses_every_switch(
    make_config: MakeConfig, make_model: MakeModel, attention: str, switch: str
) -> None:
    shape: dict[str, Any] = {"attention": attention, "pruning_rank": 8} if attention == "pruned" else {}
    shape |= {"attention": attention, "qk_norm": "none"}
    value = {"qk_norm": "head", **SWITCHES}.get(switch, True)
    try:
        changed = make_config(**{**shape, switch: value})
    except ValueError as error:
        assert switch in str(error)  # noqa: PT017 - it may as well not be refused
        return
    if switch in ("frozen_qk", "qk_norm"):
        before, after = (
            {name: tensor.rule.trains(config) for name, tensor in model_tensors(config).items()}
            for config in (make_config(**shape), changed)
        )
        assert before != after
        return
    batch = {"input_ids": torch.arange(24).view(1, 24) % 61, "document_ids": torch.arange(24).view(1, 24) // 10}
    batch["positions"] = torch.arange(24).view(1, 24) % 10
    plain, other = (make_model(**{**shape, **keys}) for keys in ({}, {switch: value}))
    there = dict(plain.named_parameters())
    for name, parameter in other.named_parameters():  # what both have is the same, what one has is not zero
        if name in there:
            parameter.copy_(there[name])
    assert not torch.equal(plain.logits(batch), found := other.logits(batch))
    if other.model.embed_positions is not None:
        other.model.embed_positions.weight.zero_()
        rotates = ATTENTIONS[attention].scaled_module(plain.config) is not None  # queries and keys
        assert torch.equal(plain.logits(batch), other.logits(batch)) is not rotates
        assert not torch.equal(found, other.logits(batch))


@pytest.mark.parametrize("key", ["mlp", "norm", "position_embedding"])
def test_a_value_that_our_own_code_lacks_is_refused_and_those_of_the_schema_are_not(
    make_config: MakeConfig, key: str
) -> None:
    config, native = make_config(), TARGETS["native"]
    refusal = native.refusal(config.model_copy(update={key: "mine"}))
    assert refusal == f"cannot hold model.{key} = mine: model/export/native/modeling_plumbline.py lacks it"
    for value in get_args(ModelConfig.model_fields[key].annotation):
        assert native.refusal(config.model_copy(update={key: value})) is None


class Short(NextToken):
    """Return what would be broadcast: one loss for two terms."""

    terms: Any = ("next_token", "more")


def test_losses_are_as_many_as_terms(make_model: MakeModel) -> None:
    plain = make_model()
    trained = TrainedLM(plain.config, plain.multipliers, Short(NextTokenConfig()))
    trained.load_state_dict(plain.state_dict())
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.zeros(1, 4, dtype=torch.long)}
    with pytest.raises(TypeError, match=r"Short: terms of shape \[1\], expected \[2\]"):
        trained.losses({**batch, "document_ids": None, "positions": None}, 0)
