"""Continue the prompts of a run with its final model."""

from pathlib import Path

import torch

from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.models.continuing import text_after, tokens_of
from plumbline.launcher.runtime.models.open import load_model, load_tokenizer
from plumbline.launcher.runtime.system.log import LOG
from plumbline.model.sampling import Sampling

SAMPLE_TOKENS = 200
SAMPLING = Sampling(temperature=0.8)


def write_samples(config: Config) -> None:
    """Write continuations of train.sample_prompts by the newest checkpoint to samples.txt; warn if that fails.

    A run is complete without samples, so no failure here may end it.
    """
    try:
        _write(config)
    except Exception as error:
        LOG.warning(f"the samples of train.sample_prompts were not written ({type(error).__name__}: {error})")


def _write(config: Config) -> None:
    folder = config.run.folder
    if not config.train.sample_prompts or not (folder / "tokenizer").is_dir():
        return
    model, tokenizer = load_model(folder, torch.device("cpu")), load_tokenizer(folder / "tokenizer")
    texts = []
    for prompt in config.train.sample_prompts:
        prompt_ids = tokens_of(tokenizer, prompt)
        room = config.model.max_position_embeddings - len(prompt_ids)
        new_ids = model.continuation(
            prompt_ids,
            min(SAMPLE_TOKENS, room),
            sampling=SAMPLING,
            seed=config.run.seed,
            stop_at=tokenizer.eos_token_id,
        )
        texts.append(f"=== {prompt!r}\n{prompt}{text_after(tokenizer, prompt_ids, list(new_ids))}\n")
    Path(folder / "samples.txt").write_text("\n".join(texts), encoding="utf-8")
