"""What training reads is the same on every rank, or training does not begin."""

from pathlib import Path

from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.run.inputs import disagreement


def test_ranks_that_see_the_same_agree(tiny_config: Path) -> None:
    views = [(load_config(tiny_config, []), {"corpus": "0123"}) for _ in range(3)]
    assert disagreement(views) is None


def test_a_rank_that_sees_other_files_is_named_with_what_differs(tiny_config: Path) -> None:
    config = load_config(tiny_config, [])
    other = load_config(tiny_config, ["model.vocab_size=300"])
    found = disagreement([(config, {"a": "01", "b": "02"}), (config, {"a": "01", "b": "02"}), (other, {"a": "99"})])
    assert found is not None
    first, *lines = found.splitlines()
    assert first.startswith("rank 2 does not see what rank 0 does; ")
    assert lines == ["  model.vocab_size: 257 -> 300", "  fingerprint of a: 01 -> 99", "  fingerprint of b: 02 -> None"]
