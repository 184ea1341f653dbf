"""Datasets of `datasets`, streamed or saved to disk, as sources."""

import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest

from plumbline.data.sources import Sources
from tests.data.reading import TEXTS, json_lines, read


def test_datasets_that_were_saved_to_disk(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": rows, "test": rows.select([2])}).save_to_disk(tmp_path / "two")
    assert read(f"hf:{tmp_path}/one")[0] == TEXTS
    assert read(f"hf:{tmp_path}/two")[0] == TEXTS
    assert read(f"hf:{tmp_path}/two::test")[0] == TEXTS[2:]


def test_what_a_saved_dataset_has_not_is_refused(tmp_path: Path) -> None:
    """A split of a dataset that has none would be the whole of it."""
    rows = datasets.Dataset.from_dict({"text": TEXTS}, split="validation")
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "two")
    assert read(f"hf:{tmp_path}/one::validation")[0] == TEXTS
    for named in ("one::test", "one::validation[:2]", "one:en"):
        with pytest.raises(
            ValueError, match=rf"/{re.escape(named)}: .*/one was written by save_to_disk: .*; give hf:.*/one$"
        ):
            read(f"hf:{tmp_path}/{named}")
    with pytest.raises(ValueError, match=r"it holds splits, and no configurations; give hf:.*/two::SPLIT"):
        read(f"hf:{tmp_path}/two:en")
    for name, form in (("one", "$"), ("two", " for its split train, or hf:.*/two::SPLIT$")):
        with pytest.raises(ValueError, match=rf"wrote with save_to_disk; give hf:.*/{name}{form}"):
            read(tmp_path / name)
    (tmp_path / "state.json").write_text("{}")  # of someone's own, among files to read
    (tmp_path / "a.txt").write_text("one")
    assert "one" in read(tmp_path / "a.txt")[0]


def test_a_dataset_of_several_files_is_several_units_in_order(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"train-{number}.jsonl").write_bytes(json_lines(*(f"{number} {text}" for text in TEXTS)))
    assert len(list(Sources((f"hf:{tmp_path}",)).listed().units())) == 3
    assert read(f"hf:{tmp_path}")[0] == [f"{number} {text}" for number in range(3) for text in TEXTS]


def test_hugging_face_datasets_stream(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(json_lines(*TEXTS))
    (tmp_path / "test.jsonl").write_bytes(json_lines("other split"))
    assert read(f"hf:{tmp_path}")[0] == TEXTS
    assert read(f"hf:{tmp_path}::test")[0] == ["other split"]
    with pytest.raises(ValueError, match=r"row 0: no field 'body' \(fields: text, id\); .*--text-key"):
        read(f"hf:{tmp_path}", text_key="body")
    with pytest.raises(ValueError, match="datasets cannot load it"):
        read(f"hf:{tmp_path}::nothing")
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").touch()
    with pytest.raises(ValueError, match="datasets cannot load it: Dataset scripts are no longer supported"):
        read(f"hf:{tmp_path}/scripted")


def test_a_dataset_that_fails_in_mid_stream_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines("one"))
    (tmp_path / "b.jsonl").write_text('{"text": "two", "other": 7}\n')
    start = f"source hf:{re.escape(str(tmp_path))}: datasets cannot read its rows"
    with pytest.raises(ValueError, match=rf"{start} \(Couldn't cast .* don't match\); mend it, or name its files"):
        read(f"hf:{tmp_path}")

    class Broken(list[object]):
        num_shards = 1

        def __iter__(self) -> Iterator[object]:
            raise datasets.exceptions.DatasetGenerationError("no\nrow")

    monkeypatch.setattr("plumbline.data.inputs.dataset.open_dataset", Broken)
    monkeypatch.setattr("plumbline.data.inputs.dataset._opened", Broken)
    with pytest.raises(OSError, match=rf"{start} \(no row\); .*: the same command goes on from here"):
        read(f"hf:{tmp_path}")


def test_an_error_of_datasets_alone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = datasets.exceptions.ManualDownloadError("by hand")
    monkeypatch.setattr("datasets.load_dataset", Mock(side_effect=error))
    with pytest.raises(ValueError, match=r"source hf:.*: datasets cannot load it: by hand"):
        list(Sources((f"hf:{tmp_path}",)).listed().units())


def test_a_dataset_that_cannot_be_reached_is_no_mistake_of_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ReadTimeoutError(Exception):
        """Stand for the errors of a library that asks the hub, which are none of the system's."""

    for error in (ConnectionError("timed out"), ReadTimeoutError("timed out")):
        monkeypatch.setattr("datasets.load_dataset", Mock(side_effect=error))
        with pytest.raises(OSError, match=r"source hf:.*: datasets cannot load it: timed out; see to the network"):
            list(Sources((f"hf:{tmp_path}",)).listed().units())
    monkeypatch.setattr("plumbline.data.inputs.dataset.is_reachable", lambda: False)
    with pytest.raises(OSError, match="source hf:some/text: the hub cannot be reached; give files"):
        list(Sources(("hf:some/text",)).listed().units())
