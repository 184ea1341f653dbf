"""Compare an exported folder in another runtime, CTranslate2, with transformers: fp32 logits and greedy tokens.

    pip install ctranslate2
    python tests/benchmarks/exported_in_ctranslate2.py --model FOLDER

FOLDER is what `launcher/export.py` wrote, with targets llama, qwen3 or compat. The script prints a JSON object.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import ctranslate2
import numpy as np
import torch
from ctranslate2.specs.common_spec import Activation
from transformers import AutoModelForCausalLM, AutoTokenizer

# The converter takes any Llama or Qwen3 for one with SiLU and does not look at hidden_act
ACTIVATIONS = {"silu": Activation.SWISH, "gelu": Activation.GELU, "relu": Activation.RELU}
PROMPT, NEW_TOKENS = 8, 32


def main() -> None:
    """Convert, run both, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    folder: Path = parser.parse_args().model
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.randint(0, len(tokenizer) - 1, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits.numpy()
        continued = model.generate(ids[:1, :PROMPT], max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
    with TemporaryDirectory() as converted:
        generator = convert(folder, model.config.hidden_act, converted)
        logits = np.array(generator.forward_batch(ids.tolist()))
        prompt = tokenizer.convert_ids_to_tokens(ids[0, :PROMPT].tolist())
        length = len(continued)
        greedy = {"max_length": length, "sampling_topk": 1, "include_prompt_in_result": True}
        result = generator.generate_batch([prompt], **greedy)[0]
    facts = {
        "class": model.config.architectures[0],
        "largest_difference": float(np.abs(logits - expected).max()),
        "largest_logit": float(np.abs(expected).max()),
        "greedy_tokens_equal": result.sequences_ids[0][:length] == continued,
    }
    print(json.dumps(facts, indent=2))


def convert(folder: Path, hidden_act: str, output: str) -> ctranslate2.Generator:
    """Return the folder as CTranslate2 runs it, with the activation that its config.json names."""
    converter = ctranslate2.converters.TransformersConverter(str(folder))
    load = converter._load

    def load_with_activation() -> ctranslate2.specs.ModelSpec:
        spec = load()
        spec.decoder.activation = np.int8(ACTIVATIONS[hidden_act])
        return spec

    converter._load = load_with_activation
    converter.convert(output, force=True)
    return ctranslate2.Generator(output, device="cpu", compute_type="float32")


if __name__ == "__main__":
    main()
