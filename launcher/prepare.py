"""Turn text into a corpus that pretrain.py and eval.py read.

Examples:
  python launcher/prepare.py --source stdlib --tokenizer train-bpe:8192 --output corpora/stdlib
  python launcher/prepare.py --source book.txt --tokenizer byte --output corpora/book
  python launcher/prepare.py --source 'dumps/*.jsonl.gz' more.parquet --tokenizer hf:gpt2 --output corpora/web
  python launcher/prepare.py --source hf:roneneldan/TinyStories --tokenizer train-unigram:8192 --output corpora/stories
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--source",
        nargs="+",
        required=True,
        help="a file, folder or glob (.jsonl[.gz] and .parquet: a document per row; any other file is one document), "
        "hf:NAME[:CONFIG[:SPLIT]], or stdlib (Python's own source code)",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        help="byte, train-bpe:N, train-unigram:N, hf:NAME, or a folder with a transformers tokenizer",
    )
    parser.add_argument("--output", type=Path, required=True, help="the corpus folder to make, usually corpora/NAME")
    parser.add_argument("--text-key", default="text", help="field that holds the text of a row (default: text)")
    parser.add_argument(
        "--document-separator",
        metavar="TEXT",
        help=r"cut plain-text files into documents wherever this stands; \n and \t are understood",
    )
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=0.02,
        help="share of the text to hold out: whole documents, and where these are few or large, the end of each large "
        "one (default: 0.02)",
    )
    parser.add_argument("--seed", type=int, default=0, help="chooses which documents are held out (default: 0)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--workers",
        type=int,
        default=cores,
        help=f"processes; the corpus is the same for any number (default: {cores})",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace another corpus of the same name, and nothing else"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")
    return parser.parse_args()


if __name__ == "__main__":
    parse_arguments()  # ahead of the imports below, which take seconds: --help and mistakes are answered at once


from plumbline.data.prepare import Request, Result, prepare
from plumbline.data.sources import Sources
from plumbline.launcher.runtime.system.log import LOG


def main() -> int:
    """Run the command; 0 if the corpus is there, 2 if the request cannot be met."""
    arguments = parse_arguments()
    separator = arguments.document_separator
    if separator is not None:
        separator = separator.replace("\\n", "\n").replace("\\t", "\t")
    try:
        if separator == "":
            raise ValueError("--document-separator is empty; leave it out to make each file one document")
        request = Request(
            sources=Sources(tuple(arguments.source), arguments.text_key, separator),
            tokenizer=arguments.tokenizer,
            output=arguments.output,
            validation_fraction=arguments.validation_fraction,
            seed=arguments.seed,
            workers=arguments.workers,
            overwrite=arguments.overwrite,
        )
        result = prepare(request)
    except (ValueError, OSError) as error:
        LOG.error(error)
        return 2
    except KeyboardInterrupt:
        LOG.error("interrupted; nothing was kept")
        return 130
    summary = _summary(result)
    print(json.dumps(summary, indent=2) if arguments.json else _readable(summary))
    return 0


def _summary(result: Result) -> dict[str, Any]:
    manifest = result.manifest
    tokens = sum(counts.tokens for counts in manifest.splits.values())
    source_bytes = sum(counts.source_bytes for counts in manifest.splits.values())
    overrides = f"run.name={result.output.name} 'data.train=[{{path: {result.output}}}]'"
    return {
        "status": "already prepared" if result.seconds is None else "prepared",
        "output": str(result.output),
        "splits": {name: counts.model_dump() for name, counts in manifest.splits.items()},
        "vocab_size": manifest.vocab_size,
        "bytes_per_token": source_bytes / tokens,
        "unigram_entropy": manifest.unigram_entropy,
        "skipped": manifest.skipped,
        "seconds": result.seconds,
        "tokens_per_second": tokens / result.seconds if result.seconds else None,
        "next": f"deepspeed launcher/pretrain.py --config configs/quickstart.yaml {overrides}",
    }


def _readable(summary: dict[str, Any]) -> str:
    lines = [f"{summary['status']}: {summary['output']}"]
    for name, counts in summary["splits"].items():
        lines.append(
            f"  {name + '.bin':<15} documents {counts['documents']:>9,}   tokens {counts['tokens']:>13,}   "
            f"text {counts['source_bytes'] / 1e6:>9,.2f} MB"
        )
    lines.append(
        f"  {summary['vocab_size']:,} token ids, {summary['bytes_per_token']:.2f} bytes per token; "
        f"a model must score below {summary['unigram_entropy']:.3f} nats per token (token frequencies alone)"
    )
    if summary["seconds"] is not None:
        lines.append(f"  {summary['seconds']:.1f} s, {summary['tokens_per_second']:,.0f} tokens per second")
    return "\n".join([*lines, f"next: {summary['next']}"])


if __name__ == "__main__":
    sys.exit(main())
