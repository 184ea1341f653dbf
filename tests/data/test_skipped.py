"""Which data steps take once ranges of it are left out: a pure function, the same for every number of ranks."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.data.config import DataConfig, SourceConfig
from plumbline.data.loader import TrainBatches
from plumbline.data.skipped import NOTHING, SkippedData

if TYPE_CHECKING:
    from pathlib import Path


def taken(skipped: SkippedData, steps: int = 30) -> list[int]:
    return [skipped.data_step(step) for step in range(steps)]


def test_nothing_is_left_out_of_a_whole_run() -> None:
    assert taken(NOTHING) == list(range(30))


@pytest.mark.parametrize("ranges", [[(3, 5)], [(0, 1)], [(7, 9), (3, 5)], [(3, 6), (4, 9)], [(3, 5), (5, 6), (20, 21)]])
def test_a_step_takes_the_next_that_is_left(ranges: list[tuple[int, int]]) -> None:
    left_out = set(chain.from_iterable(range(first, stop) for first, stop in ranges))
    expected = [step for step in range(60) if step not in left_out][:30]
    skipped = SkippedData.of(ranges)
    assert taken(skipped) == expected
    assert [skipped.step_of(data_step) for data_step in expected] == list(range(30))
    assert all(skipped.step_of(data_step) is None for data_step in left_out)
    assert SkippedData.of(ranges[:1]) | SkippedData.of(ranges[1:]) == skipped
    assert SkippedData.from_json(json.loads(json.dumps(skipped.ranges))) == skipped


def test_there_is_one_way_to_say_what_is_left_out() -> None:
    """Or checkpoints of runs that left out the same, in another order, would differ."""
    assert SkippedData.of([(5, 6), (3, 5), (8, 9)]).ranges == ((3, 6), (8, 9))


@pytest.mark.parametrize("ranges", [[[3, 3]], [[-1, 2]], [[5, 2]], [3], [[1, 2, 3]], None, [["1", "2"]], [[0.0, 2.0]]])
def test_what_is_no_range_is_refused(ranges: Any) -> None:
    with pytest.raises(ValueError, match="skipped data"):
        SkippedData.from_json(ranges)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loader_reads_what_the_steps_take(corpus: Path, ranks: int) -> None:
    skipped = SkippedData.of([(3, 5), (9, 10)])
    data = DataConfig(
        train=[SourceConfig(path=str(corpus))], sequence_length=32, global_batch_size=8, micro_batch_size=2
    )
    for rank in range(ranks):
        batches = TrainBatches(data, seed=1, rank=rank, world_size=ranks)
        with closing(batches.iterate(2, 12, skipped)) as steps:
            for step, found in enumerate(steps, start=2):
                expected = batches.micro_batches(skipped.data_step(step))
                assert [batch["sample_index"].tolist() for batch in found] == [
                    batch["sample_index"].tolist() for batch in expected
                ]
                assert all(
                    (batch["input_ids"] == other["input_ids"]).all()
                    for batch, other in zip(found, expected, strict=True)
                )
