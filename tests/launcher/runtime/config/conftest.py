"""A small configuration that is right, for tests that make it wrong."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import load_config

SMALL: dict[str, Any] = {
    "run": {"name": "small"},
    "model": {"vocab_size": 257, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    "parameterization": {"rule": "sp"},
    "data": {"train": [{"path": "nowhere"}], "sequence_length": 32, "global_batch_size": 8, "micro_batch_size": 2},
    "optimizer": {"lr": 1e-3},
    "train": {"steps": 10},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    """Return the lines of the error that loading must raise."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    return str(caught.value).splitlines()
