# PYTHON_ARGCOMPLETE_OK
r"""Turn text into a corpus that pretrain.py and eval.py read; check, enlarge and merge corpora.

Examples:
  python launcher/prepare.py --source stdlib --tokenizer train-bpe:8192 --output corpora/stdlib
  python launcher/prepare.py --source book.txt --tokenizer byte --output corpora/book
  python launcher/prepare.py --source 'dumps/*.jsonl.gz' more.parquet --tokenizer hf:gpt2 --output corpora/web \
      --shard-size 4GB --deduplicate exact --on-bad-record skip
  python launcher/prepare.py --source hf:roneneldan/TinyStories --tokenizer train-unigram:8192 --output corpora/stories
  python launcher/prepare.py --source pages.jsonl --tokenizer hf:gpt2 --output s3://bucket/corpora/pages
  python launcher/prepare.py --source exam.txt --tokenizer runs/web/tokenizer --output corpora/exam \
      --validation-fraction 1
  python launcher/prepare.py --tokens train.bin --validation-tokens val.bin --tokenizer hf:gpt2 --output corpora/owt
  python launcher/prepare.py --append june.jsonl.zst --output corpora/web
  python launcher/prepare.py --merge corpora/web corpora/code --output corpora/both
  python launcher/prepare.py --verify corpora/web
"""

import argparse
import json
import os
import shlex
from pathlib import Path
from typing import Any

from plumbline.data.paths import is_url
from plumbline.data.sizes import in_units, parse_size
from plumbline.launcher.runtime.commands import cli

READING = ("text_key", "text_template", "document_separator")
GROWING = ("output", *READING, "on_bad_record", "deduplicate", "shard_size")
USED_BY = {
    "source": (*GROWING, "tokenizer", "validation_fraction", "seed", "staging", "overwrite"),
    "tokens": ("output", "tokenizer", "validation_tokens", "overwrite"),
    "append": GROWING,
    "merge": ("output", "overwrite"),
    "verify": (),
}
"""Action -> the options that apply to it."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = cli.Parser(__doc__)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument(
        "--source",
        nargs="+",
        help="a file, folder or glob (.jsonl[.gz|.zst], .json.gz, .json.zst, .parquet and .arrow: a document per row; "
        "any other file is one document), hf:NAME[:CONFIG[:SPLIT]] (SPLIT: train), or stdlib (source of Python itself)",
    )
    task.add_argument(
        "--tokens",
        nargs="+",
        metavar="FILE",
        help="files and globs of token ids that other tools made: nanoGPT's train.bin, shards of llm.c, or .npy",
    )
    task.add_argument("--append", nargs="+", metavar="SOURCE", help="add the documents of these to the corpus --output")
    task.add_argument("--merge", nargs="+", metavar="CORPUS", help="make one corpus of several, which are kept")
    task.add_argument("--verify", metavar="CORPUS", help="check every byte of a folder or URL; exit code 1 if damaged")
    parser.add_argument(
        "--tokenizer",
        help="with --source: byte, train-bpe:N, train-unigram:N, hf:NAME, or a folder with a transformers tokenizer; "
        "with --tokens: the one that made the ids",
    )
    parser.add_argument(
        "--validation-tokens", nargs="+", metavar="FILE", help="with --tokens: files of ids that are held out"
    )
    parser.add_argument(
        "--output", help="the corpus folder to make, usually corpora/NAME; with --source a URL as well (s3://...)"
    )
    _add_reading(parser)
    _add_writing(parser)
    arguments = parser.parse_args()
    for name in ("source", "tokens"):
        if getattr(arguments, name) and not arguments.tokenizer:
            parser.error(f"--{name} needs --tokenizer")
    if arguments.tokens and not arguments.validation_tokens:
        parser.error("--tokens needs --validation-tokens, files of held-out ids of the same tokenizer")
    if not arguments.verify and not arguments.output:
        parser.error("--output is missing")
    task_name = next(name for name in USED_BY if getattr(arguments, name) is not None)
    for name, value in vars(arguments).items():
        if name not in (*USED_BY, *USED_BY[task_name], "json", "workers") and value != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} does nothing with --{task_name}")
    if arguments.text_key is not None and arguments.text_template is not None:
        parser.error("--text-key does nothing with --text-template, which names its fields")
    if arguments.staging != parser.get_default("staging") and not is_url(arguments.output):
        parser.error(f"--staging does nothing with --output {arguments.output}: a corpus for a URL alone is made there")
    return arguments


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text-key",
        help="field with the text of a row; a.b is field b of a (default: text); --append uses the settings of the "
        "corpus unless --text-key, --text-template or --document-separator is given",
    )
    parser.add_argument(
        "--text-template",
        metavar="TEMPLATE",
        help=r"combine several fields into the text, as in '{title}\n\n{text}', instead of --text-key",
    )
    parser.add_argument(
        "--document-separator",
        metavar="TEXT",
        help=r"split plain-text files into documents at each occurrence of TEXT, which may contain \n, \r and \t",
    )
    parser.add_argument(
        "--on-bad-record",
        choices=("fail", "skip"),
        default="fail",
        help="for a row that is not JSON or has no text, or the rest of a damaged file: end with an error that names "
        "file and line, or skip and count it (default: fail); empty text, text that is not UTF-8, binary files and "
        "archives in a folder are always skipped and counted",
    )
    parser.add_argument(
        "--deduplicate",
        choices=("exact", "near"),
        help="keep only the first of documents that differ at most in white space (exact), or that share most runs of "
        "five words (near; needs datasketch)",
    )


def _add_writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=0.02,
        help="share of the text to hold out: whole documents, or if these are few or large, the end of each large "
        "document (default: 0.02); 1 holds out everything, for a corpus used only for evaluation",
    )
    parser.add_argument("--seed", type=int, default=0, help="chooses which documents are held out (default: 0)")
    parser.add_argument(
        "--shard-size",
        type=cli.as_argument(parse_size),
        metavar="SIZE",
        help="text per shard, for example 4GB; its tokens take about half of that (default: one shard)",
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--workers",
        type=int,
        default=cores,
        help=f"processes; the corpus is the same for any number (default: {cores})",
    )
    parser.add_argument(
        "--staging",
        type=Path,
        default=Path("corpora"),
        help="folder in which a corpus for a URL is made before it is uploaded (default: corpora)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a corpus of the same name; other folders are never replaced"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


if __name__ == "__main__":
    cli.begin(parse_arguments)  # ahead of the imports below, which take seconds


from plumbline.data.inputs.reading import Reading, unescaped
from plumbline.data.preparation.making import adopt, enlarge, join, make
from plumbline.data.preparation.request import Request
from plumbline.data.preparation.verifying import verify
from plumbline.data.prepare import Result
from plumbline.data.sources import Sources
from plumbline.launcher.runtime.system.before_torch import has_gpus
from plumbline.launcher.runtime.system.installation import as_typed, training_on


def main() -> int:
    """Run the command, and return 0 if the corpus exists and is undamaged, 1 if it is damaged."""
    arguments = parse_arguments()
    if arguments.verify:
        return _verify(arguments)
    summary = _summary(_prepared(arguments))
    print(json.dumps(summary, indent=2) if arguments.json else _readable(summary))
    return 0


def _prepared(arguments: argparse.Namespace) -> Result:
    output, shard_bytes, deduplicate = arguments.output, arguments.shard_size, arguments.deduplicate
    if arguments.merge:
        return join(arguments.merge, output, arguments.overwrite)
    if arguments.tokens:
        return adopt(arguments.tokens, arguments.validation_tokens, arguments.tokenizer, output, arguments.overwrite)
    sources = Sources(
        tuple(arguments.source or arguments.append),
        Reading(
            "text" if arguments.text_key is None else arguments.text_key,
            unescaped(arguments.document_separator),
            unescaped(arguments.text_template),
        ),
    )
    skip_bad = arguments.on_bad_record == "skip"
    if arguments.append:
        reads_as_before = all(getattr(arguments, name) is None for name in READING)
        return enlarge(output, sources, arguments.workers, shard_bytes, deduplicate, skip_bad, reads_as_before)
    request = Request(
        sources=sources,
        tokenizer=arguments.tokenizer,
        output=Path(output),
        validation_fraction=arguments.validation_fraction,
        seed=arguments.seed,
        workers=arguments.workers,
        overwrite=arguments.overwrite,
        shard_bytes=shard_bytes,
        deduplicate=deduplicate,
        skip_bad=skip_bad,
    )
    return make(output, request, arguments.staging)


def _verify(arguments: argparse.Namespace) -> int:
    manifest, damaged = verify(arguments.verify)
    size = sum(record.size for record in manifest.files.values())
    if arguments.json:
        print(json.dumps({"corpus": arguments.verify, "files": len(manifest.files), "bytes": size, "damaged": damaged}))
    elif damaged:
        print("\n".join(f"damaged: {arguments.verify}/{damage}" for damage in damaged))
    else:
        print(f"whole: {arguments.verify}, {len(manifest.files)} token files of {in_units(size)} and the tokenizer")
    return 1 if damaged else 0


def _summary(result: Result) -> dict[str, Any]:
    manifest = result.manifest
    tokens = sum(counts.tokens for counts in manifest.splits.values())
    source_bytes = sum(counts.source_bytes for counts in manifest.splits.values())
    where = str(result.output)
    # On CPUs the launcher would start one rank for each NUMA node, and warn that it looked for a GPU
    start = "deepspeed --quiet" if has_gpus() else "DS_ACCELERATOR=cpu deepspeed --quiet --num_accelerators 2"
    trains = "train" in manifest.splits
    return {
        "status": "already prepared" if result.seconds is None else "prepared",
        "output": where,
        "splits": {name: counts.model_dump() for name, counts in manifest.splits.items()},
        "vocab_size": manifest.vocab_size,
        "bytes_per_token": source_bytes / tokens,
        "unigram_entropy": manifest.unigram_entropy if trains else None,
        "skipped": manifest.skipped,
        "bad_records": manifest.bad_records,
        "seconds": result.seconds,
        "next": f"{start} {as_typed('launcher/pretrain.py')} --config {as_typed('configs/quickstart.yaml')} "
        f"{training_on(where)}"
        if trains
        else f"python {as_typed('launcher/eval.py')} --model RUN --data {shlex.quote(where)}",
    }


def _readable(summary: dict[str, Any]) -> str:
    lines = [f"{summary['status']}: {summary['output']}"]
    for name, counts in summary["splits"].items():
        shards = f"   shards {len(counts['shards']):,}" if counts["shards"] else ""
        file = name if shards else f"{name}.bin"
        lines.append(
            f"  {file:<15} documents {counts['documents']:>9,}   tokens {counts['tokens']:>13,}   "
            f"text {in_units(counts['source_bytes']):>10}{shards}"
        )
    vocabulary = f"  {summary['vocab_size']:,} token ids, {summary['bytes_per_token']:.2f} bytes per token"
    if summary["unigram_entropy"] is not None:
        below = f"{summary['unigram_entropy']:.3f} nats per token (token frequencies alone)"
        vocabulary += f"; a model must score below {below}"
    lines.append(vocabulary)
    if summary["skipped"]:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(summary["skipped"].items()))
        lines.append(f"  left out: {reasons}")
    if summary["seconds"] is not None:
        lines.append(f"  {summary['seconds']:.1f} s")
    return "\n".join([*lines, f"next: {summary['next']}"])


if __name__ == "__main__":
    cli.run(main, "interrupted; the same command goes on from here")
