"""Mixtures that change: weights by steps and ramps, sources that end, and what a resume may alter."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from plumbline.data.config import DataConfig, SourceConfig
from plumbline.data.corpus import Corpus
from plumbline.data.loader import TrainBatches
from plumbline.data.mixture import CYCLE, RAMP_STEPS, Mixture, OrderedSource, step_changes
from plumbline.data.order import TrainOrder
from plumbline.data.past import entered_before, same_past

MakePair = Callable[..., Corpus]


def source(name: str, weight: float, windows: int = 1000, **more: Any) -> OrderedSource:
    return OrderedSource(name, f"tokens of {name}", windows, weight, **more)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    """Return one to four sources of which some change and some end; the first never does."""
    sources = [source("s0", draw(st.floats(0.5, 3)), changes=draw(changes(0.5)))]
    for number in range(1, draw(st.integers(1, 4))):
        limit = draw(st.none() | st.integers(1, 40_000))
        weight = draw(st.floats(0.1, 3))
        sources.append(source(f"s{number}", weight, changes=draw(changes(0)), limit=limit))
    return Mixture(sources)


def changes(lowest: float) -> st.SearchStrategy[tuple[tuple[int, float], ...]]:
    weights = st.floats(max(lowest, 0.1), 3) | (st.just(lowest) if lowest == 0 else st.nothing())
    return st.lists(st.tuples(st.integers(1, 30_000), weights), max_size=3, unique_by=lambda change: change[0]).map(
        lambda found: tuple(sorted(found))
    )


@settings(max_examples=60)
@given(mixture=mixtures(), data=st.data())
def test_every_sample_is_found_alone_and_each_source_is_counted_through(mixture: Mixture, data: st.DataObject) -> None:
    """The samples of a source are numbered 0, 1, 2, ... across all changes, from wherever they are asked for."""
    total = 60_000
    drawn, ordinals = mixture.draw(np.arange(total))
    for number in range(len(mixture.sources)):
        mine = ordinals[drawn == number]
        assert np.array_equal(mine, np.arange(len(mine)))
    for place in data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=5)):
        one, ordinal = mixture.draw(place)
        assert (int(one), int(ordinal)) == (drawn[place], ordinals[place])
        assert (
            mixture.drawn_before(place).tolist() == np.bincount(drawn[:place], minlength=len(mixture.sources)).tolist()
        )


@settings(max_examples=60)
@given(mixture=mixtures())
def test_weights_are_exact_in_every_cycle_of_a_segment_and_limits_are_kept(mixture: Mixture) -> None:
    drawn, _ = mixture.draw(np.arange(80_000))
    bounds = [segment.first_sample for segment in mixture.segments] + [80_000]
    before = np.zeros(len(mixture.sources), np.int64)
    for segment, end in zip(mixture.segments, bounds[1:], strict=True):
        start = segment.first_sample
        if start >= 80_000:
            break
        ended = [each.limit is not None and before[i] >= each.limit for i, each in enumerate(mixture.sources)]
        weights = [0 if end_ else each.weight_at(start) for each, end_ in zip(mixture.sources, ended, strict=True)]
        exact = np.array(weights) / sum(weights) * CYCLE
        for first in range(start, min(end, 80_000) - CYCLE + 1, CYCLE):
            counts = np.bincount(drawn[first : first + CYCLE], minlength=len(weights))
            assert np.abs(counts - exact).max() < 1
        within = np.bincount(drawn[start : min(end, 80_000)], minlength=len(weights))
        rest = (min(end, 80_000) - start) % CYCLE
        counts = np.bincount(drawn[min(end, 80_000) - rest : min(end, 80_000)], minlength=len(weights))
        assert np.abs(counts - exact * rest / CYCLE).max() < len(weights) + 1
        before = before + within
    for number, each in enumerate(mixture.sources):
        assert each.limit is None or before[number] <= each.limit


def test_what_a_source_leaves_goes_to_the_others_in_proportion() -> None:
    """`b` gives its 500 samples by sample 1999 or so; then `a` and `c` share as 2 to 1."""
    mixture = Mixture([source("a", 2), source("b", 1, limit=500), source("c", 1)])
    drawn, _ = mixture.draw(np.arange(50_000))
    last = int(np.flatnonzero(drawn == 1)[-1])
    assert Counter(drawn.tolist())[1] == 500
    assert 1990 < last < 2010
    assert mixture.segments[1].first_sample == last + 1
    later = Counter(drawn[last + 1 :][: 3 * CYCLE].tolist())
    assert abs(later[0] - 2 * CYCLE) <= 3
    assert abs(later[2] - CYCLE) <= 3


def test_a_mixture_of_limits_alone_ends() -> None:
    mixture = Mixture([source("a", 3, limit=700), source("b", 1, limit=900)])
    assert mixture.end == 1600
    assert mixture.drawn_before(10**6).tolist() == [700, 900]
    with pytest.raises(ValueError, match="sample 1600, but the sources end after 1600 samples"):
        mixture.draw([0, 1600])


@pytest.mark.parametrize("limit", [10**16, 2**62])
def test_a_limit_that_no_run_can_reach_is_none(limit: int) -> None:
    mixture = Mixture([source("a", 1, limit=limit), source("b", 1999)])
    assert len(mixture.segments) == 1


def test_a_source_must_begin_before_all_others_have_ended() -> None:
    late = source("late", 0.0, changes=((101, 1.0),))
    with pytest.raises(ValueError, match="no source is left after 100 samples, before late begins"):
        Mixture([source("short", 1.0, limit=100), late])
    Mixture([source("short", 1.0, limit=101), late])
    assert Mixture([source("short", 1.0, limit=100, changes=((500, 2.0),))]).end == 100


def test_a_ramp_goes_there_in_equal_steps() -> None:
    assert step_changes(1.0, [(100, 0, 3.0)]) == ((100, 3.0),)
    steps = step_changes(1.0, [(1000, 6400, 3.0), (10_000, 2, 0.0)])
    assert steps[0] == (1000, 1.0 + 2.0 * 0.5 / RAMP_STEPS)
    assert steps[RAMP_STEPS] == (7400, 3.0)
    assert np.allclose(np.diff([sample for sample, _ in steps[: RAMP_STEPS + 1]]), 100)
    assert steps[RAMP_STEPS + 1 :] == ((10_000, 2.25), (10_001, 0.75), (10_002, 0.0))


def test_a_ramp_begins_and_ends_at_the_first_sample_after_its_tokens() -> None:
    ramp = {"tokens": 15, "weight": 3.0, "over": 10}  # from within sample 1 to within sample 2, of 10 tokens each
    changing = SourceConfig.model_validate({"path": ["corpora/a"], "weight": 1.0, "weight_changes": [ramp]})
    assert changing.changes(10) == step_changes(1.0, [(2, 1, 3.0)])


def test_a_thousand_sources_are_one_computation() -> None:
    order = TrainOrder([source(f"s{number}", 1 + number % 7, 50 + number) for number in range(1000)], 0)
    located = order.locate(np.arange(CYCLE) + 10**12 * CYCLE)
    assert len(np.unique(located.source)) == 1000
    assert (located.window < 50 + located.source).all()
    alone = order.locate([10**12 * CYCLE + 4321])
    assert (int(alone.source[0]), int(alone.window[0])) == (located.source[4321], located.window[4321])


def data_of(*sources: dict[str, Any], **more: Any) -> DataConfig:
    values = {"sequence_length": 8, "global_batch_size": 4, "micro_batch_size": 4, **more}
    return DataConfig.model_validate({"train": list(sources), **values})


def test_weights_change_after_so_many_tokens_in_batches(make_pair: MakePair) -> None:
    """Sample 10 begins after 80 tokens: 75 tokens of training end within sample 9."""
    a, b = ({"path": str(make_pair([tokens], name).path)} for tokens, name in ((900, "a"), (901, "b")))
    config = data_of(
        a | {"weight_changes": [{"tokens": 75, "weight": 0.0}]},
        b | {"weight": 0.0, "weight_changes": [{"tokens": 75, "weight": 1.0}]},
    )
    batches = TrainBatches(config, seed=0)
    assert batches.order.locate(np.arange(20)).source.tolist() == [0] * 10 + [1] * 10
    assert batches.epochs(5) == {"a": 10 / 112, "b": 10 / 112}
    assert list(batches.notes(5))[:2] == [
        "mixture  from 0 tokens: a 100.00%",
        "mixture  from 80 tokens: b 100.00%",
    ]
    whole = [batch["sample_index"].tolist() for step in batches.iterate(0, 5) for batch in step]
    resumed = [batch["sample_index"].tolist() for step in batches.iterate(2, 5) for batch in step]
    assert whole[2:] == resumed


@settings(max_examples=20)
@given(start=st.integers(0, 60), world=st.sampled_from([1, 2, 4]))
def test_a_changing_mixture_resumes_anywhere_on_any_world_size(make_pair: MakePair, start: int, world: int) -> None:
    a = {"path": str(make_pair([300], "a").path), "max_epochs": 1.5}
    b = {
        "path": str(make_pair([900], "b").path),
        "weight": 0.5,
        "weight_changes": [{"tokens": 200, "weight": 2.0, "over": 400}],
    }

    def rows(world: int, first: int) -> list[set[tuple[int, int, int]]]:
        ranks = [
            TrainBatches(data_of(a, b, micro_batch_size=1), 3, rank, world).iterate(first, 64) for rank in range(world)
        ]
        return [
            {
                (int(number), int(tokens[0]), int(tokens[-1]))
                for step in steps
                for batch in step
                for number, tokens in zip(batch["sample_index"], batch["labels"], strict=True)
            }
            for steps in zip(*ranks, strict=True)
        ]

    assert rows(world, start) == rows(1, 0)[start:]


def test_a_corpus_is_read_no_more_than_forty_times_unless_it_is_asked_for(make_pair: MakePair) -> None:
    small, large = ({"path": str(make_pair([tokens], name).path)} for tokens, name in ((81, "small"), (8001, "large")))
    TrainBatches(data_of(small), 0).check_epochs(100)
    with pytest.raises(ValueError, match=r"101 steps read small 40\.4 times; .*\(about 100 steps\), .* set max_epochs"):
        TrainBatches(data_of(small), 0).check_epochs(101)
    TrainBatches(data_of(small | {"max_epochs": 50.0}), 0).check_epochs(125)
    with pytest.raises(ValueError, match="no source is left after 4,000 tokens, before the end of 126 steps"):
        TrainBatches(data_of(small | {"max_epochs": 50.0}), 0).check_epochs(126)
    both = TrainBatches(data_of(small | {"max_epochs": 2.0}, large), 0)
    both.check_epochs(1000)
    assert both.epochs(1000)["small"] == 2.0


def fingerprints(config: DataConfig) -> dict[str, str]:
    return {name: corpus.fingerprint for name, corpus in TrainBatches(config, seed=0).corpora.items()}


def past(old: DataConfig, new: DataConfig, step: int) -> bool:
    return same_past(old, new, step, fingerprints(old), fingerprints(new))


def test_the_past_of_a_mixture_is_what_a_resume_compares(make_pair: MakePair) -> None:
    a, b, c = ({"path": str(make_pair([900 + at], name).path)} for at, name in enumerate("abc"))
    plain = data_of(a, b)
    later = [{"tokens": 800, "weight": 3.0}]
    joined = c | {"weight": 0.0, "weight_changes": [{"tokens": 800, "weight": 1.0}]}
    assert past(plain, data_of(a | {"weight_changes": later}, b), 25)  # 25 steps of 4 x 8 tokens are 800
    assert past(plain, data_of(a, b, joined), 25)
    assert past(plain, data_of(a, b | {"max_epochs": 0.5}), 25)  # 56 windows of b, of which 50 are read by then
    assert not past(plain, data_of(a | {"weight_changes": later}, b), 26)
    assert not past(plain, data_of(a, b, joined), 26)
    assert not past(plain, data_of(a, b | {"max_epochs": 0.4}), 25)
    assert not past(plain, data_of(a, b, c), 25)
    assert not past(plain, data_of(a | {"weight": 2.0}, b), 25)


def test_a_source_that_was_to_join_later_may_be_left_out_and_be_gone(make_pair: MakePair, tmp_path: Path) -> None:
    a, b = ({"path": str(make_pair([900 + at], name).path)} for at, name in enumerate("ab"))
    waits = b | {"weight": 0.0, "weight_changes": [{"tokens": 800, "weight": 1.0}]}
    # A change of nothing to nothing begins the cycle anew, and so is part of the past
    changed = b | {"weight": 0.0, "weight_changes": [{"tokens": 8, "weight": 0.0}, {"tokens": 800, "weight": 1.0}]}
    old, new, drawn = data_of(a, waits), data_of(a), fingerprints(data_of(a, b))
    assert entered_before(old, 25, drawn) == entered_before(new, 25, fingerprints(new)) == fingerprints(new)
    assert entered_before(old, 26, drawn) == entered_before(data_of(a, changed), 25, drawn) == drawn
    assert not same_past(old, new, 26, drawn, fingerprints(new))
    move_pair(tmp_path / "b", tmp_path / "elsewhere" / "b")
    assert same_past(old, new, 25, drawn, fingerprints(new))
    with pytest.raises(ValueError, match=r"b \(.*/b\), which was trained on, cannot be opened"):
        same_past(old, new, 26, drawn, fingerprints(new))


def test_the_past_is_compared_where_the_batches_of_a_warm_up_fit_some_ranks_only(make_pair: MakePair) -> None:
    """On two ranks micro-batches of 6 fit the first batches of 12; on one, those of 8 do not."""
    a, b = ({"path": str(make_pair([900 + at], name).path)} for at, name in enumerate("ab"))
    shape = {
        "global_batch_size": 24,
        "micro_batch_size": 8,
        "batch_size_warmup": [{"tokens": 1000, "global_batch_size": 12}],
    }
    old = data_of(a, b, **shape)
    old.accumulation_steps(world_size=2)
    new = data_of(a | {"weight_changes": [{"tokens": 6000, "weight": 0.5}]}, b, **shape)
    ours = fingerprints(data_of(a, b))
    assert same_past(old, new, 16, ours, ours)
    assert not same_past(old, new, 99, ours, ours)


def move_pair(prefix: Path, to: Path) -> None:
    to.parent.mkdir()
    for ending in (".bin", ".idx"):
        prefix.with_suffix(ending).rename(to.with_suffix(ending))


def test_a_corpus_of_then_that_has_moved_is_the_same_by_its_name_and_tokens(
    make_pair: MakePair, tmp_path: Path
) -> None:
    make_pair([900], "a"), make_pair([901], "b")
    old = data_of({"path": str(tmp_path / "a")}, {"path": str(tmp_path / "b")})
    drawn = fingerprints(old)
    move_pair(tmp_path / "a", tmp_path / "moved" / "a")
    b, moved = {"path": str(tmp_path / "b")}, {"path": str(tmp_path / "moved" / "a")}
    same, renamed = data_of(moved, b), data_of(moved | {"name": "c"}, b)
    assert same_past(old, same, 25, drawn, fingerprints(same))
    assert not same_past(old, data_of(moved | {"weight": 2.0}, b), 25, drawn, fingerprints(same))
    with pytest.raises(
        ValueError, match=r"a \(.*/a\), which was trained on, cannot be opened, .*: put it back"
    ) as caught:
        same_past(old, renamed, 25, drawn, fingerprints(renamed))
    assert "or link it there; c has the tokens of a: give it name: a (" in str(caught.value)
    with pytest.raises(ValueError, match=r"put it back, or link it there \(.*/a: no corpus here"):
        same_past(old, data_of(b), 25, drawn, fingerprints(data_of(b)))


def test_corpora_that_moved_to_folders_of_one_name_are_told_apart_by_theirs(
    make_pair: MakePair, tmp_path: Path
) -> None:
    make_pair([900], "a"), make_pair([901], "b")
    old = data_of({"path": str(tmp_path / "a")}, {"path": str(tmp_path / "b")})
    drawn = fingerprints(old)
    moved = []
    for name in ("a", "b"):
        move_pair(tmp_path / name, tmp_path / f"in_{name}" / "text")
        moved.append({"path": str(tmp_path / f"in_{name}" / "text"), "name": name})
    new = data_of(*moved)
    assert same_past(old, new, 25, drawn, fingerprints(new))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weight": 0.0}, "weight = 0: never read"),
        ({"weight_changes": [{"tokens": 9, "weight": 1.0}, {"tokens": 5, "weight": 2.0}]}, r"\[1\].tokens = 5: begins"),
        ({"weight_changes": [{"tokens": 9, "weight": 1.0, "over": 9}, {"tokens": 17, "weight": 2.0}]}, "at 9 tokens"),
        ({"weight_changes": [{"tokens": 9, "weight": -1.0}]}, "greater than or equal to 0"),
        ({"weight_changes": [{"tokens": 9, "weight": 1e308}]}, "less than or equal to 10{18}"),
        ({"weight": 1e308}, "less than or equal to 10{18}"),
        ({"max_epochs": 0.0}, "greater than 0"),
        ({"path": []}, r"path = \[\]: names no corpus; give a folder"),
        ({"path": ["a", ""]}, r"path = \['a', ''\]: names no corpus"),
        ({"path": ""}, "path = '': names no corpus"),
        ({"name": ""}, "name = '': is no label; leave it out"),
    ],
)
def test_wrong_sources_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SourceConfig.model_validate({"path": "x", **values})


def test_a_mixture_that_begins_with_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="every weight is 0 at the start"):
        Mixture([source("a", 0.0, changes=((5, 1.0),))])
