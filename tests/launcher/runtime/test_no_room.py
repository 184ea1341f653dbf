"""A full disk under the commands that write a model or need a scratch folder: one error, and nothing half written."""

import io
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from plumbline.data import tokenizer_making
from plumbline.data.disk import FullDiskError
from plumbline.launcher.quantize import main as quantize
from plumbline.launcher.runtime.export.hugging_face import export
from plumbline.launcher.runtime.models.held_out import prepared_text
from plumbline.launcher.runtime.models.open import LoadedModel
from plumbline.launcher.runtime.system.files import write_json
from tests.disks import fill, free, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as folder:
        yield folder


@pytest.mark.parametrize("room", [1, 3, 12], ids=["tokenizer", "config", "weights"])
def test_an_export_that_finds_no_room_leaves_the_old_one(model: LoadedModel, disk: Path, room: int) -> None:
    output = disk / "out"
    export(model, output, "native")
    before = {path: path.read_bytes() for path in output.iterdir()}
    fill(disk, room)
    with pytest.raises(FullDiskError, match=r"disk/out: no space left .* Free some space, or write to another disk$"):
        export(model, output, "auto", overwrite=True)
    assert {path: path.read_bytes() for path in output.iterdir()} == before
    assert {path.name for path in disk.iterdir()} == {"out", "filler"}
    free(disk)
    export(model, output, "auto", overwrite=True)
    assert json.loads((output / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize("room", [3, 12], ids=["plain", "quantized"])
def test_a_quantized_folder_is_there_whole_or_not_at_all(
    trained: Path, corpus: Path, disk: Path, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors")
    words = ["quantize.py", "--model", trained, "--data", corpus, "--recipes", "rtn-w8", "--save", disk / "out"]
    monkeypatch.setattr(sys, "argv", [*map(str, words), "--calibration-sequences", "2"])
    fill(disk, room)
    with pytest.raises(FullDiskError, match=r"disk/out: no space left .* or choose another --save$"):
        quantize()
    assert [path.name for path in disk.iterdir()] == ["filler"]


def test_a_scratch_folder_without_room_is_named_with_its_variable(
    trained: Path, exported_folder: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    tokenizer_making._adopted.cache_clear()
    fill(disk, 1)
    named = rf"^{disk}/\S+: no space left .* Free some space, or set TMPDIR to another folder$"
    with pytest.raises(FullDiskError, match=named), prepared_text(str(trained / "config.yaml"), trained / "tokenizer"):
        pass
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(bytes(100_000))))
    with pytest.raises(FullDiskError, match=named), prepared_text("-", trained / "tokenizer"):
        pass
    with pytest.raises(FullDiskError, match=named):
        tokenizer_making._adopted(str(exported_folder))
    assert [path.name for path in disk.iterdir()] == ["filler"]


def test_a_file_without_room_is_named(disk: Path) -> None:
    fill(disk)
    with pytest.raises(OSError, match=r"No space left on device: .*disk/page\.json'"):
        write_json(disk / "page.json", list(range(5000)))
    assert [path.name for path in disk.iterdir()] == ["filler"]
