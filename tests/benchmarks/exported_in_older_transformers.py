"""Compare exported folders in an older transformers with the installed one: fp32 logits on random tokens.

    pip install --target OLDER --no-deps transformers==4.57.3 huggingface_hub==0.36.0 tokenizers==0.22.1
    python tests/benchmarks/exported_in_older_transformers.py --older OLDER --model FOLDER ...

FOLDER is what `launcher/export.py` wrote. The script prints a JSON object: both versions, and for each folder the
largest difference of logits over the largest logit.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

LOGITS = """
import sys
import torch, transformers

found = {"version": transformers.__version__}
for folder in sys.argv[2:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    tokens = torch.randint(0, model.config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found[folder] = model(input_ids=tokens).logits
torch.save(found, sys.argv[1])
"""


def main() -> None:
    """Run both, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--older", type=Path, required=True, help="folder that holds the older transformers")
    parser.add_argument("--model", nargs="+", required=True, metavar="FOLDER")
    arguments = parser.parse_args()
    import torch

    with TemporaryDirectory() as place:
        found = []
        for number, path in enumerate(({}, {"PYTHONPATH": str(arguments.older)})):
            file = f"{place}/{number}"
            words = [sys.executable, "-c", LOGITS, file, *arguments.model]
            subprocess.run(words, env={**os.environ, **path}, stderr=subprocess.DEVNULL, check=True)
            found.append(torch.load(file))
    newer, older = found
    apart = {name: float((older[name] - newer[name]).abs().max() / newer[name].abs().max()) for name in arguments.model}
    print(json.dumps({"newer": newer["version"], "older": older["version"], "apart": apart}, indent=2))


if __name__ == "__main__":
    main()
