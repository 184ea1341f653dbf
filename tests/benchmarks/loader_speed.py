"""Time the loader against nanoGPT's random crops, and against other loaders where they are installed.

    python tests/benchmarks/loader_speed.py [--tokens 20000000] [--sequence-length 1024] [--batch 64] [--rounds 7]
    python tests/benchmarks/loader_speed.py --bucket [...]

All make batches of one shape from the same random tokens on the local disk. In each round each loader takes its turn,
right after nanoGPT's `get_batch`; what is printed is the median of its speed over that of `get_batch` beside it, by the
clock and by the time of the processor, which a busy machine disturbs less. Peers shuffle and, like nanoGPT, give tokens
alone; ours have documents, positions and numbers as well. Peers have no worker processes; a line says which are not
installed.

With `--bucket` all read once what an S3 server of this machine holds (moto's, a process of its own), with nothing kept
from before: in each round each loader in turn, ours first. Printed are the seconds to the first batch, from opening on,
and the speed of all batches by the clock, this and the others' speed over ours beside it.
"""

import argparse
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch

from plumbline.data.config import DataConfig
from plumbline.data.indexed import IndexedWriter, token_dtype
from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.ranks.world import free_port

BATCHES = 400  # of one turn
SHARD = 2**23  # bytes of a file of a peer that streams, as of our blocks
Batches = Iterator[Any]
Seconds = npt.NDArray[np.float64]
"""By the clock, and of the processor."""


class Case:
    """Hold the tokens that all loaders read, and the shape of a batch."""

    def __init__(self, folder: Path, tokens: int, length: int, rows: int) -> None:
        self.folder, self.length, self.rows = folder, length, rows
        draw = np.random.default_rng(0)
        self.tokens = draw.integers(0, 50_000, tokens).astype(np.uint16)
        self.corpora, self.weights = [folder / name for name in ("a", "b", "c")], (2.0, 1.0, 1.0)
        (folder / "shards").mkdir()
        shares = dict(zip(self.corpora, np.split(self.tokens, [tokens // 2, tokens * 3 // 4]), strict=True))
        shares |= {folder / "shards" / f"{at:02}": share for at, share in enumerate(np.array_split(self.tokens, 16))}
        for path, share in shares.items():
            lengths = np.clip(draw.lognormal(6, 1.2, len(share) // 400).astype(int), 1, None)  # of documents
            ends = np.cumsum(lengths)
            lengths = np.append(lengths[ends < len(share)], len(share) - ends[ends < len(share)][-1])
            with IndexedWriter(path, token_dtype(50_000)) as writer:
                writer.add_documents(share, lengths.tolist())

    @property
    def windows(self) -> np.ndarray[Any, Any]:
        """Return the tokens in rows of length + 1, for loaders that want rows."""
        width = self.length + 1
        return self.tokens[: len(self.tokens) // width * width].reshape(-1, width)

    def ours(
        self,
        packing: str = "concat",
        sources: int = 1,
        start: int = 0,
        url: str | None = None,
        cache: str | None = None,
    ) -> Batches:
        """Read as training does, in a background thread."""
        paths = [f"{url}/{path.name}" if url else str(path) for path in self.corpora[:sources]]
        return self._ours(dict(zip(paths, self.weights, strict=False)), packing, start, cache)

    def ours_in_shards(self) -> Batches:
        """Read a folder of pairs as one corpus."""
        return self._ours({str(self.folder / "shards"): 1.0})

    def _ours(
        self, weights: Mapping[str, float], packing: str = "concat", start: int = 0, cache: str | None = None
    ) -> Batches:
        config = {
            "train": [{"path": path, "weight": weight} for path, weight in weights.items()],
            "sequence_length": self.length,
            "global_batch_size": self.rows,
            "micro_batch_size": self.rows,
            "packing": packing,
            "cache": {"path": cache},
        }
        return TrainBatches(DataConfig.model_validate(config), seed=0).iterate(start, start + 10**9)

    def nanogpt(self) -> Batches:
        """Crop at random, as nanoGPT's train.py does."""
        while True:
            data = np.memmap(f"{self.corpora[0]}.bin", dtype=np.uint16, mode="r")
            starts = torch.randint(len(data) - self.length, (self.rows,))
            x = torch.stack([torch.from_numpy(data[i : i + self.length].astype(np.int64)) for i in starts])
            y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + self.length].astype(np.int64)) for i in starts])
            yield x, y

    def datasets(self, url: str | None = None, cache: str | None = None) -> Batches:
        """Read a shuffled Arrow table from its file; from a URL, stream Parquet with a buffer that shuffles."""
        datasets = import_module("datasets")
        datasets.disable_progress_bars()
        path = self.folder / "datasets"
        if not path.exists():
            kind = datasets.List(datasets.Value("uint16"), length=self.length + 1)
            rows = datasets.Dataset.from_dict({"tokens": list(self.windows)}, datasets.Features({"tokens": kind}))
            rows.save_to_disk(str(path))
            count = -(-self.tokens.nbytes // SHARD)
            for number in range(count):
                rows.shard(count, number).to_parquet(str(path / f"{number:05}.parquet"))
        if url:
            names = f"{url}/datasets/*.parquet"
            files = datasets.load_dataset("parquet", data_files=names, streaming=True, split="train", cache_dir=cache)
            for batch in files.shuffle(seed=0, buffer_size=1000).with_format("numpy").iter(self.rows):
                yield torch.from_numpy(batch["tokens"].astype(np.int64))
            return
        while True:
            for batch in datasets.load_from_disk(str(path)).shuffle(seed=0).with_format("numpy").iter(self.rows):
                yield torch.from_numpy(batch["tokens"].astype(np.int64))

    def grain(self) -> Batches:
        """Shuffle and batch rows of a memory-mapped array."""
        grain = import_module("grain")
        np.save(self.folder / "rows.npy", self.windows)
        rows = np.load(self.folder / "rows.npy", mmap_mode="r")
        for batch in iter(grain.MapDataset.source(rows).shuffle(seed=0).repeat().batch(self.rows).to_iter_dataset()):
            yield torch.from_numpy(batch.astype(np.int64))

    def litdata(self, url: str | None = None, cache: str | None = None) -> Batches:
        """Stream shuffled blocks of tokens from chunks."""
        litdata, path = import_module("litdata"), self.folder / "litdata"
        loader = import_module("litdata.streaming.item_loader").TokensLoader(block_size=self.length + 1)
        if not path.exists():
            make = import_module("litdata.streaming.writer").BinaryWriter
            writer = make(str(path), chunk_bytes=SHARD, item_loader=loader)
            for number, row in enumerate(np.array_split(self.tokens, 1000)):
                writer.add_item(number, torch.from_numpy(row))
            writer.done()
            writer.merge()
        where = f"{url}/litdata" if url else str(path)
        if url:  # which is no https
            import_module("litdata.streaming.downloader")._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
        data = litdata.StreamingDataset(where, cache_dir=cache, item_loader=loader, shuffle=True)
        while True:
            for batch in litdata.StreamingDataLoader(data, batch_size=self.rows, num_workers=0):
                yield batch.long()

    def streaming(self, url: str | None = None, cache: str | None = None) -> Batches:
        """Read shuffled samples from MDS shards."""
        streaming = import_module("streaming")
        path = self.folder / "streaming"
        if not path.exists():
            kind = {"tokens": f"ndarray:uint16:{self.length + 1}"}
            with streaming.MDSWriter(out=str(path), columns=kind, size_limit=SHARD) as writer:
                for row in self.windows:
                    writer.write({"tokens": row})
        where = f"{url}/streaming" if url else None
        data = streaming.StreamingDataset(
            remote=where, local=cache if url else str(path), shuffle=True, batch_size=self.rows
        )
        while True:
            for batch in torch.utils.data.DataLoader(data, batch_size=self.rows):
                yield batch["tokens"].long()


def seconds(batches: Batches, count: int) -> Seconds:
    """Return how long the next `count` batches take, by the clock and of all this process's threads."""
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(count):
        next(batches)
    return np.array([time.perf_counter() - clock, time.process_time() - processor])


def main() -> None:
    """Print each loader's speed over nanoGPT's, and what starting, resuming and memory cost ours; or those from S3."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64, help="rows of a batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket", action="store_true", help="read from a bucket of an S3 server")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        case = Case(Path(folder), arguments.tokens, arguments.sequence_length, arguments.batch)
        loaders: dict[str, Callable[..., Batches]] = {
            "concat, one corpus": case.ours,
            "concat, sixteen shards": case.ours_in_shards,
            "concat, three corpora": partial(case.ours, sources=3),
            "best_fit, one corpus": partial(case.ours, packing="best_fit"),
            "best_fit, three corpora": partial(case.ours, packing="best_fit", sources=3),
        }
        if arguments.bucket:
            loaders = {name: loader for name, loader in loaders.items() if "three" in name}
        for peer in (
            ("datasets", "litdata", "streaming") if arguments.bucket else ("datasets", "grain", "litdata", "streaming")
        ):
            if importlib.util.find_spec(peer) is None:
                print(f"{peer}: not installed")
            else:
                loaders[peer] = getattr(case, peer)
        next(loaders["best_fit, three corpora"]())  # pack first: it is done once for a corpus
        if arguments.bucket:
            from_s3(case, loaders, arguments.rounds)
        else:
            compare(case, loaders, arguments.rounds)
            starts(case)


def compare(case: Case, loaders: dict[str, Callable[[], Batches]], rounds: int) -> None:
    """Let all loaders take turns."""
    baseline, open_ = case.nanogpt(), {}
    for name, make in loaders.items():
        try:
            open_[name] = make()
            next(open_[name])
        except Exception as error:  # a peer whose interface has changed since
            print(f"{name}: {type(error).__name__}: {error}")
            del open_[name]
    ratios: dict[str, list[Seconds]] = {name: [] for name in open_}
    speeds: dict[str, list[float]] = {name: [] for name in ("nanoGPT's get_batch", *open_)}
    tokens = BATCHES * case.rows * case.length
    for _ in range(rounds):
        for name, batches in open_.items():
            beside, own = seconds(baseline, BATCHES), seconds(batches, BATCHES)
            ratios[name].append(beside / own)
            speeds[name].append(tokens / own[0])
            speeds["nanoGPT's get_batch"].append(tokens / beside[0])
    print(f"batches of {case.rows} x {case.length} tokens; median of {rounds} rounds (lowest to highest)")
    for name, measured in speeds.items():
        line = f"{name:24} {median(measured) / 1e6:7.1f} million tokens/s"
        if name in ratios:
            (low, low_own), (mid, mid_own), (high, high_own) = np.quantile(ratios[name], [0, 0.5, 1], axis=0)
            line += f", {mid:.2f} x ({low:.2f} to {high:.2f})"
            line += f"; by processor time {mid_own:.2f} x ({low_own:.2f} to {high_own:.2f})"
        print(line)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve what is in a folder by moto, in a process of its own; gives the URL of the bucket."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    for name in ("AWS_ENDPOINT_URL", "S3_ENDPOINT_URL"):
        os.environ[name] = address
    os.environ.update(AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret", AWS_DEFAULT_REGION="us-east-1")
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        store = import_module("s3fs").S3FileSystem()
        store.mkdir("bucket")
        store.put(f"{folder}/", "bucket/", recursive=True)
        yield "s3://bucket"
    finally:
        server.terminate()
        server.wait()


def from_s3(case: Case, loaders: dict[str, Callable[..., Batches]], rounds: int) -> None:
    """Let all loaders read everything once from S3, in turn, each time as if for the first time."""
    for name in list(loaders):
        try:
            next(loaders[name]())  # writes the files of a peer
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}")
            del loaders[name]
    count = len(case.windows) // case.rows
    firsts: dict[str, list[float]] = {name: [] for name in loaders}
    whole: dict[str, list[float]] = {name: [] for name in loaders}
    with served(case.folder) as url:
        for turn in range(-1, rounds):
            for name, make in loaders.items():
                with tempfile.TemporaryDirectory() as cache:
                    begun = time.perf_counter()
                    batches = make(url=url, cache=cache)
                    next(batches)
                    first = time.perf_counter() - begun
                    seconds(batches, count - 1)
                    if turn >= 0:  # before, all is imported and tried
                        firsts[name].append(first)
                        whole[name].append(time.perf_counter() - begun)
                    batches.close()  # type: ignore[attr-defined]
    size = count * case.rows * case.length
    print(
        f"{count} batches of {case.rows} x {case.length} tokens from S3; median of {rounds} rounds (lowest to highest)"
    )
    ours = next(iter(loaders))
    for name in loaders:
        low, middle, high = np.quantile(np.array(whole[ours]) / whole[name], [0, 0.5, 1])
        speed = f"{size / median(whole[name]) / 1e6:6.1f} million tokens/s, {middle:.2f} x ({low:.2f} to {high:.2f})"
        print(f"{name:24} first batch after {median(firsts[name]):.2f} s, {speed} {ours}")


def starts(case: Case) -> None:
    """Print what the first batch costs from an open on, at the start and far into a run, and memory."""
    for name, start in (("first batch", 0), ("resume at step 10^9", 10**9)):
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            batches = case.ours(sources=3, start=start)
            next(batches)
            times.append(time.perf_counter() - begun)
            batches.close()  # type: ignore[attr-defined]
        print(f"{name}: {1000 * median(times):.1f} ms from opening three corpora")
    before = psutil.Process().memory_full_info().uss
    batches = case.ours(sources=3)
    seconds(batches, BATCHES)
    grown = psutil.Process().memory_full_info().uss - before
    print(f"memory of its own: {grown / 2**20:.1f} MiB after {BATCHES} batches")


if __name__ == "__main__":
    main()
