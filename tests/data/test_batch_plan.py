"""Which samples a step takes, against counting them one step at a time."""

from collections.abc import Iterator
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from plumbline.data.batch_plan import BatchPlan, BatchStage
from plumbline.data.config import DataConfig

LENGTH = 8
STAGES = [(30, 2), (100, 4)]  # (tokens, batch size) ahead of a batch of 12


def plan_of(stages: list[tuple[int, int]], batch_size: int, length: int = LENGTH) -> BatchPlan:
    warmup = tuple(BatchStage(tokens=tokens, global_batch_size=size) for tokens, size in stages)
    return BatchPlan(batch_size, length, warmup)


def counted(stages: list[tuple[int, int]], batch_size: int, length: int) -> Iterator[tuple[int, int]]:
    """First sample and batch size of every step: the rule, followed step by step."""
    sizes = [size for _, size in stages] + [batch_size]
    consumed = begun = number = 0
    while True:
        yield consumed, sizes[number]
        consumed += sizes[number]
        while (
            number < len(stages)
            and (consumed - begun) * length >= stages[number][0]
            and consumed % sizes[number + 1] == 0
        ):
            number, begun = number + 1, consumed


def test_the_first_steps_of_a_plan() -> None:
    """30 tokens are 3.75 samples of 8: two steps of 2. 100 more are 12.5: they come to 17, and on to 24 = 2 x 12."""
    plan = plan_of(STAGES, 12)
    assert [plan.batch_size_at(step) for step in range(10)] == [2, 2, 4, 4, 4, 4, 4, 12, 12, 12]
    assert [plan.samples_before(step) for step in range(10)] == [0, 2, 4, 8, 12, 16, 20, 24, 36, 48]
    assert [plan.tokens_before(step) for step in (0, 2, 9)] == [0, 32, 384]
    assert [plan.steps_for(tokens) for tokens in (0, 1, 16, 17, 32, 33, 192, 193, 384)] == [0, 1, 1, 2, 2, 3, 7, 8, 9]
    assert plan.describe() == "2 to step 2, 4 to step 7, 12 sequences"


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int]:
    sizes = [draw(st.integers(1, 4))]
    for factor in draw(st.lists(st.integers(2, 4), max_size=3)):
        sizes.append(sizes[-1] * factor)
    tokens = [draw(st.integers(1, 500)) for _ in sizes[1:]]
    return list(zip(tokens, sizes[:-1], strict=True)), sizes[-1], draw(st.integers(1, 9))


@given(plans())
def test_a_plan_is_what_counting_step_by_step_gives(drawn: tuple[list[tuple[int, int]], int, int]) -> None:
    stages, batch_size, length = drawn
    plan = plan_of(stages, batch_size, length)
    expected = list(islice(counted(stages, batch_size, length), 300))
    assert [(plan.samples_before(step), plan.batch_size_at(step)) for step in range(300)] == expected
    for step, (first, size) in enumerate(expected[:-1]):
        assert first % size == 0, "a step takes a block of samples that a constant batch of its size would take"
        assert plan.samples_before(step + 1) == first + size, "no sample is left out or taken twice"
        assert plan.steps_for(plan.tokens_before(step)) == step
        assert plan.steps_for(plan.tokens_before(step) + 1) == step + 1
        assert plan.steps_for(plan.tokens_before(step + 1)) == step + 1


@given(plans(), st.integers(10**6, 10**12))
def test_far_away_steps_cost_nothing_and_differ_by_one_batch(
    drawn: tuple[list[tuple[int, int]], int, int], step: int
) -> None:
    stages, batch_size, length = drawn
    plan = plan_of(stages, batch_size, length)
    assert plan.samples_before(step + 1) - plan.samples_before(step) == batch_size
    assert plan.steps_for(plan.tokens_before(step)) == step


def test_a_constant_batch_is_multiplication() -> None:
    plan = BatchPlan(6, 7)
    assert [plan.samples_before(step) for step in (0, 1, 10**9)] == [0, 6, 6 * 10**9]
    assert [plan.steps_for(tokens) for tokens in (0, 1, 42, 43)] == [0, 1, 1, 2]
    assert plan.describe() == "6 sequences"


def config(*sizes: int, batch: int = 16, micro: int = 2) -> DataConfig:
    return DataConfig.model_validate(
        {
            "train": [{"path": "nowhere"}],
            "sequence_length": LENGTH,
            "global_batch_size": batch,
            "micro_batch_size": micro,
            "batch_size_warmup": [{"tokens": 100, "global_batch_size": size} for size in sizes],
        }
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([3], "batch_size_warmup[0].global_batch_size = 3: must be a smaller divisor of the next batch size, 16"),
        ([16], "batch_size_warmup[0].global_batch_size = 16: must be"),
        ([32], "batch_size_warmup[0].global_batch_size = 32: must be"),
        ([2, 8, 4], "batch_size_warmup[1].global_batch_size = 8: must be a smaller divisor of the next batch size, 4"),
    ],
)
def test_a_stage_that_does_not_divide_the_next_is_refused(sizes: list[int], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(*sizes)
    assert message in str(caught.value)


def test_a_stage_that_the_ranks_cannot_share_is_refused() -> None:
    assert config(4, 8).accumulation_steps(world_size=2) == 4
    with pytest.raises(
        ValueError, match=r"data\.batch_size_warmup\[0\]\.global_batch_size 4 is not a multiple of .* 8;"
    ):
        config(4, 8).accumulation_steps(world_size=4)


def test_the_configuration_makes_the_plan() -> None:
    plan = config(4, 8).batch_plan
    assert [stage.batch_size for stage in plan.stages] == [4, 8, 16]
    assert all(after.first_sample % after.batch_size == 0 for _, after in pairwise(plan.stages))
    assert config().batch_plan == BatchPlan(16, LENGTH)


def test_the_step_of_a_sample_is_the_one_that_takes_it() -> None:
    for plan in (config(4, 8).batch_plan, config().batch_plan):
        for step in range(60):
            taken = range(plan.samples_before(step), plan.samples_before(step + 1))
            assert {plan.step_of(sample) for sample in taken} == {step}
