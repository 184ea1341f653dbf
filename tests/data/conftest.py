"""Real corpora, made the way users make them."""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plumbline.data.config import DataConfig
from plumbline.data.corpus import Corpus, open_corpus
from plumbline.data.indexed import IndexedWriter, token_dtype
from plumbline.data.prepare import Request, prepare
from plumbline.data.remote import fetch
from plumbline.data.sources import Sources
from tests.data.made import shard
from tests.data.servers import Server, serve

MakePair = Callable[..., Corpus]
MakeConfig = Callable[..., DataConfig]


@pytest.fixture
def make_pair(tmp_path: Path) -> MakePair:
    """Write documents as a bare Megatron-LM pair, with token ids that tell every position of the stream apart."""

    def make(lengths: Sequence[int], name: str = "tokens") -> Corpus:
        prefix = tmp_path / name
        with IndexedWriter(prefix, token_dtype(1 << 20)) as writer:
            writer.add_documents(np.arange(sum(lengths)), lengths)
        return open_corpus(prefix)

    return make


@pytest.fixture
def make_config() -> MakeConfig:
    def make(
        *corpora: Corpus, weights: Sequence[float] = (), length: int = 8, batch: int = 8, micro: int = 2
    ) -> DataConfig:
        weights = weights or [1.0] * len(corpora)
        return DataConfig.model_validate(
            {
                "train": [{"path": str(c.path), "weight": w} for c, w in zip(corpora, weights, strict=True)],
                "sequence_length": length,
                "global_batch_size": batch,
                "micro_batch_size": micro,
            }
        )

    return make


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty small documents with indentation, accents, other scripts, emoji and Windows line ends."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    words = [
        "the",
        "model",
        "reads",
        "naïve",
        "text",
        "数据",
        "def",
        "if",
        "🎉",
        "x1",
        "=",
        "\t\r\n",
        "",
        "",
        "line\n\n",
    ]
    for number in range(60):
        text = " ".join(draw.choices(words, k=draw.randint(20, 400)))
        (folder / f"{number:02}.txt").write_bytes(f"document {number}\n{text}".encode())
    return folder


@pytest.fixture(scope="session")
def byte_corpus(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("corpora") / "bytes"
    prepare(Request(Sources((str(text_folder),)), "byte", output, validation_fraction=0.2))
    return output


@pytest.fixture(scope="session")
def sharded(byte_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cut the small corpus into three shards."""
    return shard(byte_corpus, tmp_path_factory.mktemp("remote") / "sharded", [7, 30])


@pytest.fixture
def server(sharded: Path) -> Iterator[Server]:
    with serve(sharded.parent) as running:
        yield running


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run a server that answers as S3 does, its address and credentials in the environment; give what writes to it."""
    server = pytest.importorskip("moto.server", reason="pip install -e .[dev]").ThreadedMotoServer("127.0.0.1", 0)
    import s3fs

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "public")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    fetch._file_system.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()
    yield s3fs.S3FileSystem()
    server.stop()
    fetch._file_system.cache_clear()
