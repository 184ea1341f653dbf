"""Round by llm-compressor's GPTQ, for a comparison with ours on the same weights and calibration text.

llm-compressor wants an older transformers than the rest of the tests, so it has an environment of its own:
    pip install llmcompressor==0.14.0.1 xxhash
    python tests/benchmarks/gptq_by_llmcompressor.py --model exports/qs --data corpora/stdlib --output exports/llmc
and then, in ours, which reads what it wrote (gptq-3, gptq-4: a scale for each output channel, as gptq-w3 and gptq-w4):
    for bits in 3 4; do python launcher/eval.py --model exports/llmc/gptq-$bits --data corpora/stdlib; done
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from plumbline.data.config import SourceConfig
from plumbline.data.loader import calibration_batches
from plumbline.data.opening import open_source
from plumbline.launcher.runtime.commands import cli


def main() -> None:
    """Quantize and save, once for each number of bits."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--data", required=True, help="corpus: its training split calibrates")
    parser.add_argument("--sequence-length", type=cli.positive, default=128)
    parser.add_argument("--calibration-sequences", type=cli.positive, default=128)
    parser.add_argument("--bits", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--output", type=Path, required=True, help="folder of folders")
    arguments = parser.parse_args()
    source = open_source(SourceConfig(path=arguments.data))
    batches = calibration_batches(source, arguments.sequence_length, arguments.calibration_sequences)
    tokens = torch.cat([batch["input_ids"] for batch in batches])
    text = Dataset.from_dict({"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()})
    for bits in arguments.bits:
        weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel"}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        oneshot(
            model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
            tokenizer=str(arguments.model),
            dataset=text,
            recipe=GPTQModifier(config_groups=groups, ignore=["lm_head"], dampening_frac=0.01),
            max_seq_length=arguments.sequence_length,
            num_calibration_samples=len(tokens),
            output_dir=str(arguments.output / f"gptq-{bits}"),
        )


if __name__ == "__main__":
    cli.run(main)
