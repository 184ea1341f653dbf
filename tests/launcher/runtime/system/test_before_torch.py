"""What is said of a start ahead of the import of torch."""

from pathlib import Path

import pytest

from plumbline.launcher.runtime.system.before_torch import has_gpus


@pytest.mark.parametrize(("file", "found"), [("nvidia0", True), ("kfd", True), ("nvidiactl", False)])
def test_a_host_has_gpus_where_their_device_files_are(
    file: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not has_gpus(tmp_path)
    (tmp_path / file).touch()
    assert has_gpus(tmp_path) == found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not has_gpus(tmp_path), "they are hidden"
