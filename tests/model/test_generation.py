"""Sampling: greedy is repeated argmax, cuts keep what they say, a seed repeats, batches say what single rows say."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plumbline.model.decoder import CausalLM
from plumbline.model.generation import cached_reader, continue_together, sample_token
from plumbline.model.sampling import GREEDY, Sampling
from tests.model.conftest import continued

MakeModel = Callable[..., CausalLM]

PROBABILITIES = torch.tensor([0.15, 0.5, 0.05, 0.3])


def prompts(rows: int = 2, length: int = 5) -> Tensor:
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(3))


def draws(count: int = 20_000, logits: Tensor | None = None, **options: Any) -> Tensor:
    """Frequency of each token over many draws."""
    logits = PROBABILITIES.log() if logits is None else logits
    tokens = sample_token(logits.expand(count, -1), Sampling(**options), torch.Generator().manual_seed(0))
    return torch.bincount(tokens, minlength=logits.numel()) / count


@pytest.mark.parametrize(
    "shape",
    [
        {"family": "qwen3", "num_key_value_heads": 2},
        {"family": "qwen3", "sliding_window": 4},
        {"family": "gpt2", "final_logit_softcapping": 5.0, "tie_word_embeddings": False},
        {"family": "llama", "document_mask": True},
    ],
)
def test_greedy_is_the_argmax_of_the_full_forward(make_model: MakeModel, shape: dict[str, Any]) -> None:
    model = make_model(**shape)
    sequence = prompts()
    for _ in range(20):
        with torch.no_grad():
            sequence = torch.cat((sequence, model(sequence)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(continued(model, prompts(), 20, temperature=0.0), sequence[:, 5:])
    assert len(sequence[:, 5:].unique()) > 3


def test_top_k_1_is_greedy(make_model: MakeModel) -> None:
    model = make_model()
    greedy = continued(model, prompts(), 15, temperature=0.0)
    assert torch.equal(continued(model, prompts(), 15, temperature=2.0, top_k=1), greedy)
    assert torch.equal(continued(model, prompts(), 15, temperature=2.0, top_p=1e-6), greedy)


def test_the_same_seed_draws_the_same_tokens(make_model: MakeModel) -> None:
    model = make_model()
    first, again, other = (continued(model, prompts(), 20, seed) for seed in (5, 5, 7))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_follow_the_temperature(temperature: float) -> None:
    expected = PROBABILITIES ** (1 / temperature)
    expected = expected / expected.sum()
    standard_error = (expected * (1 - expected) / 20_000).sqrt()
    assert ((draws(temperature=temperature) - expected).abs() < 4 * standard_error).all()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 3}, [0, 1, 3]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_p": 0.45}, [1]),
        ({"top_p": 0.6}, [1, 3]),  # 0.5 alone does not reach 0.6
        ({"top_p": 0.9}, [0, 1, 3]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"top_k": 3, "top_p": 0.7}, [1, 3]),
    ],
)
def test_cuts_keep_the_likeliest_tokens_in_proportion(options: dict[str, Any], kept: list[int]) -> None:
    expected = torch.zeros(4)
    expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    found = draws(**options)
    assert found.nonzero().flatten().tolist() == kept
    torch.testing.assert_close(found, expected, rtol=0, atol=0.015)


def test_top_p_sees_the_temperature() -> None:
    assert draws(top_p=0.6, temperature=0.5).nonzero().flatten().tolist() == [1]  # 0.25 of 0.365


def test_each_row_is_cut_by_its_own_probabilities() -> None:
    logits = torch.stack((PROBABILITIES.log(), PROBABILITIES.flip(0).log())).repeat(500, 1)
    tokens = sample_token(logits, Sampling(top_p=0.6), torch.Generator().manual_seed(0))
    assert tokens[0::2].unique().tolist() == [1, 3]
    assert tokens[1::2].unique().tolist() == [0, 2]


def test_generation_turns_dropout_off(make_model: MakeModel) -> None:
    noisy, quiet = make_model(dropout=0.5).train(), make_model()
    expected = continued(quiet, prompts(), 10, temperature=0.0)
    assert torch.equal(continued(noisy, prompts(), 10, temperature=0.0), expected)


def test_a_context_can_be_filled_to_its_end_and_no_further(make_model: MakeModel) -> None:
    model = make_model(family="gpt2")
    assert continued(model, prompts(length=40), 8).shape == (2, 8)
    with pytest.raises(ValueError, match="40 prompt tokens \\+ 9 new ones exceed max_position_embeddings = 48"):
        continued(model, prompts(length=40), 9)


def test_an_empty_prompt_is_refused(make_model: MakeModel) -> None:
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        continued(make_model(), prompts(length=0), 3)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.5},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 1e-30},
        {"top_k": 0},
        {"top_k": -3},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": math.nan},
    ],
    ids=str,
)
def test_a_sampling_option_out_of_range_is_refused(options: dict[str, Any]) -> None:
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=f"{name} = {value}: "):
        Sampling(**options)


def test_the_least_temperature_draws_the_likeliest_token() -> None:
    assert draws(logits=torch.tensor([-90.0, 300.0, 299.0]), temperature=1e-6).tolist() == [0.0, 1.0, 0.0]


RAGGED = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7], [1, 8, 2, 8, 1], [5, 3]]
SEEDS = [7, 8, 9, 7]


def together(
    model: CausalLM, prompts: list[list[int]], new: int, seeds: list[int], stop_at: int | None = None, **options: Any
) -> list[list[int]]:
    """Return what each prompt is continued with in one batch."""
    read = cached_reader(model, len(prompts), max(map(len, prompts)) + new)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    said: list[list[int]] = [[] for _ in prompts]
    for step in continue_together(
        read, prompts, new, generators=generators, sampling=Sampling(**options), stop_at=stop_at
    ):
        for row, token in zip(said, step, strict=True):
            row += [] if token is None else [token]
    return said


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.3, "top_k": 40, "top_p": 0.95}], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {"family": "qwen3", "num_key_value_heads": 2},
        {"family": "qwen3", "sliding_window": 4},
        {"family": "gpt2"},
        {"attention": "shaped"},
        {"attention": "mixing", "qk_norm": "none"},
        {"attention": "pruned", "pruning_rank": 4},
        {"value_residual": True},
        {"attn_logit_softcapping": 3.0},
    ],
    ids=str,
)
def test_a_batch_of_different_lengths_says_what_each_row_says_alone(
    make_model: MakeModel, shape: dict[str, Any], options: dict[str, Any]
) -> None:
    model = make_model(**shape).double()
    said = together(model, RAGGED, 12, SEEDS, **options)
    for prompt, seed, row in zip(RAGGED, SEEDS, said, strict=True):
        alone = continued(model, torch.tensor([prompt]), 12, seed, **options)
        assert row == alone[0].tolist()
    assert len({tuple(row) for row in said}) > 1


def test_a_row_ends_at_its_stop_and_the_others_go_on(make_model: MakeModel) -> None:
    model = make_model().double()
    free = together(model, RAGGED, 12, SEEDS, temperature=0.0)
    stop = free[1][4]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert len(expected[1]) < 12
    assert together(model, RAGGED, 12, SEEDS, temperature=0.0, stop_at=stop) == expected


def test_nothing_is_computed_after_all_rows_ended(make_model: MakeModel) -> None:
    model = make_model()
    read = cached_reader(model, 1, 20)
    lengths: list[int] = []

    def counted(tokens: Tensor) -> Tensor:
        lengths.append(tokens.size(1))
        return read(tokens)

    (first,) = together(model, [[3, 1, 4]], 1, [0], temperature=0.0)
    steps = continue_together(
        counted, [[3, 1, 4]], 9, generators=[torch.Generator()], sampling=GREEDY, stop_at=first[0]
    )
    assert list(steps) == [first]
    assert lengths == [3], "a prompt is read at once"


class Reads(TorchFunctionMode):
    """Count what brings values to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in {"tolist", "item", "__bool__", "__int__", "multinomial"}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 40, "top_p": 0.95}], ids=str)
def test_the_host_waits_once_a_step_for_all_rows(make_model: MakeModel, options: dict[str, Any]) -> None:
    model = make_model()
    with Reads() as reads:
        together(model, [[3, 1, 4]] * 5, 7, [1, 2, 3, 4, 5], **options)
    assert reads.count == 7


def test_a_token_is_drawn_as_multinomial_draws_it() -> None:
    logits = torch.randn(50, 61, generator=torch.Generator().manual_seed(1))
    drawn = sample_token(logits, Sampling(), torch.Generator().manual_seed(2))
    expected = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(2))
    assert torch.equal(drawn, expected[:, 0])


@pytest.mark.parametrize("kind", ["softmax", "pruned"])
def test_the_cache_has_the_dtype_of_the_weights(make_model: MakeModel, kind: str) -> None:
    model = make_model(attention=kind, **({"pruning_rank": 4} if kind == "pruned" else {})).bfloat16()
    made: list[Any] = []
    new_cache = model.new_cache
    model.new_cache = lambda *size: made.extend(new_cache(*size)) or made  # type: ignore[method-assign, func-returns-value]
    together(model, RAGGED, 3, SEEDS)
    assert {tensor.dtype for cache in made for tensor in (cache.keys, cache.values)} == {torch.bfloat16}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_logits_that_overflow_are_refused_where_they_would_be_said(temperature: float, wrong: float) -> None:
    """Not those of a row whose prompt is still read."""

    def first_step(row: int) -> list[int | None]:
        logits = torch.zeros(2, 5)
        logits[row, 3] = wrong
        generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
        sampling = Sampling(temperature)
        return next(continue_together(lambda _: logits, [[1], [1, 2]], 1, generators=generators, sampling=sampling))

    assert first_step(1)[1] is None
    with pytest.raises(ValueError, match="the logits of the next token are nan or inf: the model overflows"):
        first_step(0)
