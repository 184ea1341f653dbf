"""Make corpora of many shards, and a tokenizer that begins texts; open what a configuration holds out."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, processors

from plumbline.data.config import DataConfig
from plumbline.data.corpus import open_corpus
from plumbline.data.indexed import IndexedWriter, token_dtype
from plumbline.data.opening import evaluated_sources, open_corpora
from plumbline.data.streams import WindowStream
from plumbline.data.tokenizer_making import build_tokenizer


def write_pairs(folder: Path, groups: Sequence[Sequence[int]], names: Sequence[str] = ()) -> list[Path]:
    """Write groups of documents as pairs, whose token ids go on from one pair to the next as in one stream."""
    folder.mkdir(exist_ok=True)
    first, prefixes = 0, []
    for number, lengths in enumerate(groups):
        prefixes.append(folder / (names[number] if names else f"part-{number:02}"))
        with IndexedWriter(prefixes[-1], token_dtype(1 << 20)) as writer:
            writer.add_documents(np.arange(first, first + sum(lengths)), lengths)
        first += sum(lengths)
    return prefixes


def shard(source: Path, folder: Path, cuts: Sequence[int], blocks: bool = True) -> Path:
    """Copy a corpus, its training documents cut into shards at these numbers of documents."""
    manifest = json.loads((source / "corpus.json").read_text())
    split = open_corpus(source).splits["train"]
    starts = [0, *split.indexed.document_starts(0, split.num_tokens).tolist(), split.num_tokens]
    shutil.copytree(source / "tokenizer", folder / "tokenizer")
    for name in ("validation.bin", "validation.idx"):
        (folder / name).write_bytes((source / name).read_bytes())
    del manifest["files"]["train.bin"], manifest["files"]["train.idx"]
    names = []
    for number, (first, last) in enumerate(zip([0, *cuts], [*cuts, split.num_documents], strict=True)):
        names.append(f"train-{number:05}")
        with IndexedWriter(folder / names[-1], token_dtype(manifest["vocab_size"])) as writer:
            tokens = split.indexed.read(starts[first], starts[last])
            writer.add_documents(tokens, np.diff(starts[first : last + 1]).tolist())
        for name, facts in writer.files.items():
            manifest["files"][name] = {"size": facts.size, "xxh3_64": facts.xxh3_64}
            if blocks:
                manifest["files"][name]["blocks"] = facts.blocks
    manifest["splits"]["train"]["shards"] = names
    (folder / "corpus.json").write_text(json.dumps(manifest))
    return folder


def simulate(source: Path, folder: Path, shards: int, tokens: int) -> Path:
    """Make a corpus of so many shards with so many tokens each, of which the disk holds the index alone."""
    folder.mkdir()
    (folder / "tokenizer").symlink_to(source / "tokenizer")
    with IndexedWriter(folder / "one", token_dtype(257)) as writer:
        writer.add_documents(np.empty(0, np.uint16), [tokens])
    (folder / "one.bin").unlink()
    with (folder / "one.bin").open("wb") as file:
        file.truncate(2 * tokens)  # a hole: all zeros
    index = writer.files["one.idx"]
    names = [f"train-{number:05}" for number in range(shards)]
    files = {}
    for number, name in enumerate(names):
        for ending, size, checksum in (("bin", 2 * tokens, f"{number:016x}"), ("idx", index.size, index.xxh3_64)):
            (folder / f"{name}.{ending}").hardlink_to(folder / f"one.{ending}")
            blocks = [f"{number:08x}{block:08x}" for block in range(-(-size // (8 << 20)))] if ending == "bin" else []
            files[f"{name}.{ending}"] = {"size": size, "xxh3_64": checksum, "blocks": blocks}
    manifest = json.loads((source / "corpus.json").read_text())
    train = {"documents": shards, "tokens": shards * tokens, "source_bytes": 4 * shards * tokens, "shards": names}
    (folder / "corpus.json").write_text(json.dumps({**manifest, "files": files, "splits": {"train": train}}))
    return folder


def begins_texts(folder: Path) -> Path:
    """Write a byte tokenizer that puts <s>, token 257, before every text, as Llama's does."""
    build_tokenizer("byte", [], folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<s>"}))
    return folder


def opened_splits(config: DataConfig) -> dict[str, WindowStream]:
    """Open what a configuration trains on, and return what it evaluates on."""
    evaluated = evaluated_sources(config, open_corpora(config.train, config.cache))
    return {name: source.held_out for name, source in evaluated.items()}
