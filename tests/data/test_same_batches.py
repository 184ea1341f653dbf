"""Batches to the last bit as they have been: hashes from before reading was made faster."""

from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plumbline.data.config import DataConfig
from plumbline.data.corpus import open_corpus
from plumbline.data.indexed import IndexedWriter, token_dtype
from plumbline.data.loader import TrainBatches, ValidationBatches
from plumbline.data.windows import Batch

LENGTH, ROWS = 96, 12


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write pairs of both types of tokens, with documents of all lengths from none on, and a folder of several."""
    folder = tmp_path_factory.mktemp("pairs")
    draw = np.random.default_rng(7)
    (folder / "many").mkdir()
    for name, vocab in (("a", 50_000), ("b", 50_000), ("c", 100_000), *((f"many/{n}", 50_000) for n in range(5))):
        lengths = np.maximum(draw.lognormal(3.5, 1.3, 400).astype(int) - 2, 0)
        with IndexedWriter(folder / name, token_dtype(vocab)) as writer:
            writer.add_documents(draw.integers(0, vocab, lengths.sum()), lengths.tolist())
    return folder


def trained(folder: Path, sources: list[dict[str, Any]], packing: str, seed: int) -> list[Batch]:
    """Return some batches of a run, near its beginning and far from it."""
    config = DataConfig.model_validate(
        {
            "train": [{**each, "path": str(folder / each["path"])} if "path" in each else each for each in sources],
            "sequence_length": LENGTH,
            "global_batch_size": 2 * ROWS,
            "micro_batch_size": ROWS,
            "packing": packing,
        }
    )
    batches = TrainBatches(config, seed)
    return [batch for start in (0, 10**7) for step in islice(batches.iterate(start, start + 40), 4) for batch in step]


def digest(batches: list[Batch]) -> str:
    found = blake2b(digest_size=8)
    for batch in batches:
        for name in ("input_ids", "labels", "document_ids", "positions", "sample_index"):
            values = batch[name].numpy()
            found.update(f"{name} {values.dtype} {values.shape}".encode() + values.tobytes())
    return found.hexdigest()


ONE: list[dict[str, Any]] = [{"path": "a"}]
MIXTURE: list[dict[str, Any]] = [{"path": "a"}, {"path": "b", "weight": 2.0}, {"path": "c", "weight": 0.7}]
ALL: list[dict[str, Any]] = [
    *MIXTURE, {"path": "many", "weight": 1.5}, {"task": {"name": "retrieval", "pairs": 4}, "weight": 0.5},
]  # fmt: skip
SOURCES = {"one": ONE, "many": [{"path": "many"}], "mixture": MIXTURE, "all": ALL}


@pytest.mark.parametrize(("sources", "packing"), [(name, how) for name in SOURCES for how in ("concat", "best_fit")])
def test_batches_are_what_they_have_been(
    pairs: Path, tmp_path: Path, sources: str, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLUMBLINE_CACHE", str(tmp_path))
    found = [digest(trained(pairs, SOURCES[sources], packing, seed)) for seed in range(3)]
    assert found == EXPECTED[f"{sources} {packing}"]


def test_held_out_batches_are_what_they_have_been(pairs: Path) -> None:
    """The last row of all is short, and rows that pad the last batch follow."""
    split = open_corpus(pairs / "c").held_out
    batches = [batch for rank in range(3) for batch in ValidationBatches(split, LENGTH, ROWS, None, rank, 3)]
    assert digest(batches) == EXPECTED["held out"][0]


EXPECTED = {
    "one concat": ["dfc7800792df8b49", "7aabb5b50c4bef71", "74c0582d3238816c"],
    "one best_fit": ["c3e68131b4fbe289", "82ea4236cbf7a7bf", "24e1131619c893ea"],
    "many concat": ["76706528cfe32637", "3dde0b48a6b39509", "122e00e6ca29596c"],
    "many best_fit": ["b20fcc2e0aa68317", "a060ef7c3248849b", "0a7aed42018b02e7"],
    "mixture concat": ["cb1770a9ee0ed171", "abf79d4c372c7adb", "51865c5fe270fabb"],
    "mixture best_fit": ["ea420fc3b3bdf2be", "bfe2bb32aa9f5f6f", "c84006d1d70dd085"],
    "all concat": ["e953d12c9c800b72", "23ae6656ed6d4c9f", "42aabb8cc330d548"],
    "all best_fit": ["696d4aebee30431b", "397c2893756072c1", "0da291594979f505"],
    "held out": ["a32b7b55d7b503ce"],
}
