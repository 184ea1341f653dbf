"""Convert exported folders to GGUF with llama.cpp's own converter, and compare llama.cpp with transformers.

    pip install xllamacpp gguf                    # llama.cpp itself, built for CPUs; what its converter writes with
    python tests/benchmarks/exported_in_llama_cpp.py --llama-cpp CHECKOUT --model FOLDER ... [--output DIR]

CHECKOUT is a clone of llama.cpp. FOLDER is what `launcher/export.py` wrote. DIR keeps the files, FOLDER's name with
`.gguf`. The script prints a JSON object. Of each folder it holds the largest difference of log-probabilities after
prompts of random tokens and along 32 greedy tokens, how many of those transformers would have taken, and whether
llama.cpp cuts this repository's README.md into the same tokens; or why there is nothing to compare.
"""

import argparse
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PROMPTS = (1, 5, 17, 64)
NEW_TOKENS = 32
RARE = -30.0
"""Log-probabilities below this are not compared: sums of 32 bits hold no more digits of them."""
TEXT = (Path(__file__).parents[2] / "README.md").read_text() + "\n\t ünïcodé 🚀 中文 \r\n I'll don't 3333 x=1;  \n"

CONVERT = """
import runpy, sys
checkout = sys.argv.pop(1)
sys.path[:0] = [checkout, checkout + "/gguf-py"]
from conversion.base import TextModel

known = TextModel.get_vocab_base_pre

def rule_of(self, tokenizer):
    # Knows a byte-level tokenizer by the tokens that it cuts one text into, so none that was trained anew
    try:
        return known(self, tokenizer)
    except NotImplementedError:
        return "gpt-2"

TextModel.get_vocab_base_pre = rule_of
sys.argv[0] = checkout + "/convert_hf_to_gguf.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs the converter, and names the rule by which a tokenizer of `prepare.py` cuts text into words: that of GPT-2."""


def main() -> None:
    """Convert each folder, run both, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="a clone of llama.cpp")
    parser.add_argument("--model", type=Path, nargs="+", required=True, metavar="FOLDER")
    parser.add_argument("--output", type=Path, help="folder that keeps the .gguf files")
    parser.add_argument("--outtype", default="f32", help="the converter's: f32 (default), bf16, q8_0, ...")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(compare(arguments.model[0], arguments.output)))
        return
    with TemporaryDirectory() as temporary:
        output = arguments.output or Path(temporary)
        output.mkdir(parents=True, exist_ok=True)
        found = {str(folder): of(folder, arguments.llama_cpp, output, arguments.outtype) for folder in arguments.model}
        print(json.dumps(found, indent=2))


def of(folder: Path, checkout: Path, output: Path, outtype: str) -> dict[str, Any] | str:
    """Return what the comparison found, or what stopped the converter or llama.cpp, each in a process of its own."""
    file = output / f"{folder.resolve().name}.gguf"
    convert = ["-c", CONVERT, checkout, folder, "--outtype", outtype, "--outfile", file]
    ask = [__file__, "--llama-cpp", checkout, "--alone", "--model", folder, "--output", file]
    for what, words in (("converter", convert), ("llama.cpp", ask)):
        ran = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True)
        if ran.returncode:
            said = [line for line in ran.stderr.splitlines() if "rror" in line] or [f"exit code {ran.returncode}"]
            reasons = [line.rpartition("error loading model: ")[2] for line in said if "error loading model: " in line]
            return f"{what}: {[*said, *reasons][-1]}"
    return dict(json.loads(ran.stdout.splitlines()[-1]))


def compare(folder: Path, file: Path) -> dict[str, Any]:
    """Return how llama.cpp with the file differs from transformers with the folder."""
    import torch
    import xllamacpp
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    server = serve(xllamacpp, file)
    random = torch.Generator().manual_seed(0)
    facts = {"class": model.config.architectures[0], "largest_difference": 0.0, "greedy_tokens": 0, "equal": 0}
    for length in PROMPTS:
        prompt = torch.randint(0, len(tokenizer) - 1, (length,), generator=random).tolist()
        request = {"prompt": prompt, "n_predict": NEW_TOKENS, "temperature": 0.0, "n_probs": model.config.vocab_size}
        answer = server.handle_completions({**request, "samplers": ["temperature"], "cache_prompt": False})
        said = answer["choices"][0]["logprobs"]["content"]
        ids = prompt + [token["id"] for token in said]
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)[length - 1 :]
        for mine, theirs in zip(expected, said, strict=False):
            facts["greedy_tokens"] += 1
            facts["equal"] += int(mine.argmax() == theirs["id"])
            apart = [
                abs(mine[top["id"]].item() - top["logprob"]) for top in theirs["top_logprobs"] if top["logprob"] > RARE
            ]
            facts["largest_difference"] = max(facts["largest_difference"], *apart)
    cut = {"content": TEXT, "add_special": False, "parse_special": False}
    same = ask(server, "/tokenize", cut)["tokens"] == tokenizer(TEXT, add_special_tokens=False).input_ids
    return {**facts, "tokenizer": "equal" if same else "DIFFERS"}


def serve(xllamacpp: Any, file: Path) -> Any:
    """Return llama.cpp with the model, with keys and values in fp32 as the weights: it would have them in fp16."""
    options = xllamacpp.CommonParams()
    options.model.path = str(file)
    options.n_ctx, options.n_parallel, options.verbosity, options.warmup = 256, 1, 1, False
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(options)


def ask(server: Any, path: str, question: dict[str, Any]) -> Any:
    """Return the server's answer to a question over HTTP."""
    request = urllib.request.Request(f"{server.listening_address}{path}", json.dumps(question).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the server's threads do not end by themselves
