"""What makes a run the same run: each key has one mark, and the documentation says what it means."""

from pathlib import Path

import pytest

from plumbline.launcher.runtime.config.identity import MARKS, RESUMED, TRAINED, differences, mark_of, table
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config

RUNS = Path(__file__).parents[4] / "docs" / "runs.md"


@pytest.mark.parametrize("section", list(Config.model_fields))
def test_every_key_has_a_known_mark(tiny_config: Path, section: str) -> None:
    assert mark_of(section) in MARKS
    for key in type(getattr(load_config(tiny_config, []), section)).model_fields:
        assert mark_of(section, key) in MARKS, key


def test_the_table_of_the_documentation_is_generated() -> None:
    wanted, text = table(), RUNS.read_text(encoding="utf-8")
    assert wanted in text, f"{RUNS}: put this table in place of the one under Resuming:\n\n{wanted}\n"


@pytest.mark.parametrize(
    ("override", "kept_when_resumed", "kept_when_complete"),
    [
        ("model.intermediate_size=160", True, True),
        ("precision.float8=tensorwise", True, True),
        ("objective.z_loss=0.1", True, True),
        ("data.global_batch_size=16", True, True),
        ("data.validation=[{task: {name: retrieval, pairs: 4}}]", False, True),
        ("run.seed=2", True, True),
        ("run.deterministic=true", False, True),
        ("deepspeed.zero_stage=2", False, True),
        ("deepspeed.precision=bf16", True, True),
        ("deepspeed.bucket_size=1000", False, True),
        ("optimizer.name=muon", True, True),
        ("optimizer.lr=0.002", False, True),
        ("schedule.cooldown=cosine", False, True),
        ("train.log_interval=2", False, True),
        ("train.initialize_from=elsewhere", True, True),
        ("data.micro_batch_size=4", False, False),
        ("checkpoint.interval=3", False, False),
        ("metrics.diagnostics_interval=3", False, False),
        ("run.name=other", False, False),
    ],
)
def test_what_a_run_keeps(tiny_config: Path, override: str, kept_when_resumed: bool, kept_when_complete: bool) -> None:
    old = load_config(tiny_config, [])
    new = load_config(tiny_config, [override])
    assert bool(differences(old, new, RESUMED)) == kept_when_resumed
    assert bool(differences(old, new, TRAINED)) == kept_when_complete
    assert differences(old, new)
