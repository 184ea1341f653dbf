"""Stream a dataset of the Hugging Face hub or of a local folder."""

import json
import textwrap
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from plumbline.data.damage import in_words
from plumbline.data.hub import is_reachable
from plumbline.data.inputs.files import files_under
from plumbline.data.inputs.formats import ARROW
from plumbline.data.inputs.reading import Reading
from plumbline.data.inputs.records import Format, Record, Unit, record_of_row
from plumbline.data.inputs.source import Source

PREFIX = "hf:"
SAVED_SPLITS, SAVED_FILES, SAVED_FACTS = "dataset_dict.json", "state.json", "dataset_info.json"
"""Files that `datasets` writes with save_to_disk: the first for several splits, the others for each."""
MOST_SAID = 300
"""Most characters shown of an error of `datasets`, which lists all columns."""


class Dataset(Source):
    """Read one split of a dataset, hf:NAME[:CONFIG[:SPLIT]], where SPLIT is train if it is not given."""

    @classmethod
    def is_meant_by(cls, spec: str) -> bool:
        """Return whether an argument names a dataset."""
        return spec.startswith(PREFIX)

    @property
    def name(self) -> str:
        """Return the argument with all of its parts."""
        return PREFIX + ":".join(_parts_of(self.spec))

    def files(self) -> list[Path]:
        """Return the files of a local folder, which other splits may share; none for a dataset on the hub."""
        folder = Path(_parts_of(self.spec)[0])
        return files_under(folder) if folder.is_dir() else []

    def units(self, number: int) -> Iterator[Unit]:
        """Yield a unit for each part of the dataset.

        Raises:
            ValueError: `datasets` cannot load it, and trying again would not help.
            OSError: it cannot be reached at the moment.
        """
        folder, _, split = _parts_of(self.spec)
        saved = Path(folder) / split if (Path(folder) / SAVED_SPLITS).is_file() else Path(folder)
        if (saved / SAVED_FILES).is_file():  # written by save_to_disk: Arrow files, listed in order
            state = json.loads((saved / SAVED_FILES).read_text())
            self._check_saved(state.get("_split"))
            for entry in state["_data_files"]:
                yield Unit(number, ARROW, (str(saved / entry["filename"]),))
            return
        parts = open_dataset(self.spec).num_shards
        for part in range(parts):
            yield Unit(number, STREAMED, (self.spec,), part, parts)

    def _check_saved(self, own_split: str | None) -> None:
        """Refuse a configuration of a saved dataset, and a split of one without splits other than its own."""
        folder, config, split = _parts_of(self.spec)
        has_splits = (Path(folder) / SAVED_SPLITS).is_file()
        names_split = len(self.spec.removeprefix(PREFIX).split(":")) > 2
        if config or (not has_splits and names_split and split != own_split):
            kind = "splits, and no configurations" if has_splits else "one dataset, and neither those nor splits"
            raise ValueError(
                f"source {self.spec}: {folder} was written by save_to_disk: it holds {kind}; give "
                f"hf:{folder}{'::SPLIT' if has_splits else ''}"
            )


def is_saved(folder: Path) -> bool:
    """Return whether `datasets` wrote a folder with save_to_disk."""
    of_one = (folder / SAVED_FILES).is_file() and (folder / SAVED_FACTS).is_file()
    return of_one or (folder / SAVED_SPLITS).is_file()


def open_dataset(spec: str) -> Any:
    """Open a dataset for streaming.

    Raises:
        ValueError: `datasets` cannot load it, and trying again would not help.
        OSError: it cannot be reached at the moment.
    """
    import datasets  # slow to import, and only needed here

    name, config, split = _parts_of(spec)
    if not Path(name).is_dir() and not is_reachable():
        raise OSError(f"source {spec}: the hub cannot be reached; give files, or see to the network")
    try:
        return datasets.load_dataset(name, config or None, split=split, streaming=True)
    except MemoryError:
        raise
    except Exception as error:  # the hub's client has errors of its own
        text = f"source {spec}: datasets cannot load it: {in_words(error)}"
        # RuntimeError: it is a script, which `datasets` no longer runs
        if isinstance(error, ValueError | RuntimeError | datasets.exceptions.DatasetsError):
            raise ValueError(text) from error
        raise OSError(f"{text}; see to the network: the same command goes on from here") from error


_opened = lru_cache(maxsize=4)(open_dataset)  # once per process, since each call queries the hub


def _parts_of(spec: str) -> tuple[str, str, str]:
    """Return name, configuration and split of hf:NAME[:CONFIG[:SPLIT]]."""
    name, config, split = (*spec.removeprefix(PREFIX).split(":"), "", "")[:3]
    return name, config, split or "train"


def _read_dataset(reading: Reading, unit: Unit, _: int | None) -> Iterator[Record]:
    """Read one part of a dataset of `datasets`, always from its beginning."""
    (spec,) = unit.names
    rows = _opened(spec)
    if unit.stop > 1:
        rows = rows.shard(num_shards=unit.stop, index=unit.start)
    for number, row in enumerate(_streamed(spec, rows)):
        yield record_of_row(reading, row, f"{spec}: row {{row}}", number, None)


def _streamed(spec: str, rows: Iterable[Any]) -> Iterator[Any]:
    """Yield rows of a dataset; errors name it: ValueError if it would fail again, else OSError."""
    try:
        yield from rows
    except MemoryError:
        raise
    except Exception as error:  # datasets and its file readers have errors of their own
        problem = textwrap.shorten(str(error), MOST_SAID) or type(error).__name__
        text = f"source {spec}: datasets cannot read its rows ({problem}); "
        if isinstance(error, ValueError):
            raise ValueError(f"{text}mend it, or name its files as sources, whose columns may differ") from error
        raise OSError(f"{text}see to the dataset or the network: the same command goes on from here") from error


STREAMED = Format(_read_dataset)
