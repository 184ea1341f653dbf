"""Ranks that see different files are told so, all of them, or go by what rank 0 sees; none waits for the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import Start


def test_two_ranks_with_different_views(start: Start, tiny_config: Path, tmp_path: Path) -> None:
    program = Path(__file__).with_name("agree.py")
    outcome = start(program, [tiny_config, tmp_path], tmp_path, ranks=2).wait()
    assert outcome.codes == (0, 0), f"a complete run is complete for both\n{outcome.stderr}"
    assert outcome.stdout.count("is complete: step 20, nothing to do") == 1
    assert not (tmp_path / "1").exists()

    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["same"] is None
    assert first["other"].startswith("rank 1 does not see what rank 0 does; ")
    assert first["other"].endswith("\n  run.seed: 1 -> 2")
    assert first["fetch"].startswith("train.initialize_from = hf:no/such/name: not downloaded: rank 0: ")
    assert "rank 1" not in first["fetch"], "one rank of each host downloads"
