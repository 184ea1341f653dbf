"""Decoding with thoughts: cached as in training, checked drafts change nothing but the number of passes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from plumbline.model.decoder import CausalLM
from plumbline.model.lookahead.generation import Drafts, Trigger, generate_thinking, generate_verified
from plumbline.model.objectives.latent_lookahead import LatentLookahead, LatentLookaheadConfig
from plumbline.model.quantization.precision import PrecisionConfig, apply_precision
from plumbline.model.sampling import GREEDY, Sampling
from tests.model.conftest import Counting, Enliven, MakeModel, continued

PROMPT, NEW = 5, 7


def prompt_of(model: CausalLM, length: int = PROMPT) -> Tensor:
    return torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(2))


def thinking(model: CausalLM, enliven: Enliven, **keys: Any) -> LatentLookahead:
    config = LatentLookaheadConfig.model_validate({"horizon": 3, "anchor_policy": "sequential", **keys})
    objective = config.make(model.config, model.multipliers, 0)
    enliven(objective, 1)
    assert isinstance(objective, LatentLookahead)
    return objective


def decoded(model: CausalLM, look: LatentLookahead, trigger: Trigger, **options: Any) -> list[int]:
    commits = look.config.commit == "thoughts"
    sampling = Sampling(**{"temperature": 0.0, **options})
    stream = generate_thinking(model, look.thinker, commits, prompt_of(model), NEW, trigger, sampling=sampling)
    return [int(token) for token in stream]


@pytest.mark.parametrize("commit", ["none", "thoughts"])
@pytest.mark.parametrize("shape", [{}, {"family": "gpt2"}, {"sliding_window": 4}, {"family": "outlier_protected"}])
@pytest.mark.parametrize(("trigger", "anchors"), [(Trigger("first"), 1), (Trigger("every", 1), NEW)])
@torch.no_grad()
def test_cached_decoding_says_what_training_says(
    make_model: MakeModel,
    enliven: Enliven,
    commit: str,
    shape: dict[str, Any],
    trigger: Trigger,
    anchors: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(**shape)
    look = thinking(model, enliven, commit=commit, anchors=anchors)
    spoken: list[Tensor] = []

    def greedy(logits: Tensor, *_options: Any) -> Tensor:
        spoken.append(logits[0])
        return logits.argmax(-1)

    monkeypatch.setattr("plumbline.model.lookahead.generation.sample_token", greedy)
    new = decoded(model, look, trigger)
    tokens = torch.cat((prompt_of(model), torch.tensor([new])), dim=1)
    labels = tokens[:, 1:].clone()
    labels[:, : PROMPT - 1] = -100
    batch = {"input_ids": tokens[:, :-1], "labels": labels, "sample_index": torch.tensor([0])}
    logits = model.lm_head(look.thinking_states(model, batch), None, 0.0)[0, PROMPT - 1 :]
    assert logits.argmax(-1).tolist() == new
    torch.testing.assert_close(torch.stack(spoken), logits)
    plain = continued(model, prompt_of(model), NEW, temperature=0.0)[0].tolist()
    assert plain != new, "thinking makes a difference"


def test_without_thinking_it_is_the_plain_model(counting: Counting) -> None:
    """An objective's tensors beside the model change nothing."""
    model = counting("grow")
    plain = CausalLM(model.config, model.multipliers).eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("objective.")})
    tokens = prompt_of(model)
    with torch.no_grad():
        assert torch.equal(model(tokens), plain(tokens))
    one, other = (continued(each, tokens, NEW, temperature=0.0) for each in (model, plain))
    assert torch.equal(one, other)


def test_triggers_fire_when_they_say(make_model: MakeModel, enliven: Enliven, monkeypatch: pytest.MonkeyPatch) -> None:
    sure, unsure = torch.tensor([9.0, 0.0, 0.0]), torch.zeros(3)
    assert [Trigger("first").fires(n, unsure, None) for n in range(3)] == [True, False, False]
    assert [Trigger("every", 3).fires(n, unsure, None) for n in range(5)] == [True, False, False, True, False]
    assert [Trigger("entropy", 0.5).fires(0, logits, None) for logits in (sure, unsure)] == [False, True]
    generator = torch.Generator().manual_seed(0)
    assert sum(Trigger("probability", 0.3).fires(0, sure, generator) for _ in range(500)) == pytest.approx(150, abs=30)
    model = make_model()
    look = thinking(model, enliven)
    never = decoded(model, look, Trigger("entropy", 100.0))
    assert never == continued(model, prompt_of(model), NEW, temperature=0.0)[0].tolist()
    assert decoded(model, look, Trigger("entropy", 0.0)) == decoded(model, look, Trigger("every", 1))


@pytest.mark.parametrize("length", [1, 4])
def test_verified_drafts_are_the_greedy_continuation(counting: Counting, length: int) -> None:
    model = counting("fixed")
    assert isinstance(model.objective, LatentLookahead)
    tokens, drafts = torch.arange(3, 3 + 2 * length, 2)[None], Drafts()
    found = [int(token) for token in generate_verified(model, model.objective.thinker, tokens, 12, drafts)]
    assert found == continued(model, tokens, 12, temperature=0.0)[0].tolist()
    assert drafts.accepted > 0
    assert drafts.text_passes == 12 - drafts.accepted, "a right draft saves a pass"
    assert drafts.accepted <= drafts.drafted


def test_a_draft_that_ends_the_text_counts(counting: Counting) -> None:
    """Who listens stops at the end of text, and never asks for the rest."""
    model, drafts = counting("fixed"), Drafts()
    assert isinstance(model.objective, LatentLookahead)
    stream = generate_verified(model, model.objective.thinker, torch.arange(3, 11, 2)[None], 12, drafts)
    next(stream)  # the plain model's
    next(stream)  # the first draft, which is right
    assert drafts.accepted == 1


@pytest.mark.parametrize("seed", range(4))
def test_wrong_drafts_change_nothing(make_model: MakeModel, enliven: Enliven, seed: int) -> None:
    """An untrained model's slots are hardly ever right."""
    model = make_model(seed=seed)
    look, drafts = thinking(model, enliven, horizon=4), Drafts()
    found = [int(token) for token in generate_verified(model, look.thinker, prompt_of(model), 15, drafts)]
    assert found == continued(model, prompt_of(model), 15, temperature=0.0)[0].tolist()
    assert drafts.drafted > drafts.accepted


@pytest.mark.parametrize("rounding", [{"activations": 8}, {"kv_cache": 4}, {"activations": "nvfp4"}], ids=str)
def test_drafts_are_not_verified_where_they_change_the_rounding(
    make_model: MakeModel, enliven: Enliven, rounding: dict[str, Any]
) -> None:
    model = make_model()
    look = thinking(model, enliven)
    apply_precision(model.model.layers, PrecisionConfig.model_validate(rounding))
    with pytest.raises(ValueError, match=r"drafts cannot be verified: .* scales span several tokens"):
        next(generate_verified(model, look.thinker, prompt_of(model), 3, Drafts()))


@pytest.mark.parametrize("rounding", ["mxfp4", {"format": "int4", "granularity": "token"}], ids=str)
def test_verified_drafts_are_the_greedy_continuation_where_each_token_is_rounded_alone(
    make_model: MakeModel, enliven: Enliven, rounding: Any
) -> None:
    model = make_model()
    look = thinking(model, enliven, horizon=4)
    apply_precision(model.model.layers, PrecisionConfig.model_validate({"activations": rounding}))
    found = [int(token) for token in generate_verified(model, look.thinker, prompt_of(model), 15, Drafts())]
    assert found == continued(model, prompt_of(model), 15, temperature=0.0)[0].tolist()


def test_several_prompts_are_refused(make_model: MakeModel, enliven: Enliven) -> None:
    model = make_model()
    look, prompts = thinking(model, enliven), prompt_of(model).expand(2, -1)
    with pytest.raises(ValueError, match="one sequence at a time"):
        next(generate_thinking(model, look.thinker, False, prompts, 3, Trigger("first"), sampling=GREEDY))
    with pytest.raises(ValueError, match="one sequence at a time"):
        next(generate_verified(model, look.thinker, prompts, 3, Drafts()))


@pytest.mark.parametrize("trigger", [None, Trigger("first"), Trigger("entropy", 0.5)], ids=str)
def test_a_model_that_overflows_says_so_however_it_thinks(
    make_model: MakeModel, enliven: Enliven, trigger: Trigger | None
) -> None:
    """Also with verified drafts: they are the plain model's continuation, which does not exist."""
    model = make_model()
    look = thinking(model, enliven)
    with torch.no_grad():
        model.lm_head.weight.mul_(3e38)
    with pytest.raises(ValueError, match="the logits of the next token are nan or inf: the model overflows"):
        _ = (
            list(generate_verified(model, look.thinker, prompt_of(model), NEW, Drafts()))
            if trigger is None
            else decoded(model, look, trigger)
        )
