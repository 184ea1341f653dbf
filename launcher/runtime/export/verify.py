"""Verify an export: reload the folder as a user would, and compare it with the model."""

from collections.abc import Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from plumbline.launcher.runtime.export.report import ExportError, ExportReport, LookaheadReport
from plumbline.model.attention.context import LayerCache
from plumbline.model.decoder import CausalLM
from plumbline.model.export import thinker
from plumbline.model.lookahead.generation import Trigger, generate_thinking, think
from plumbline.model.objectives.objective import Decoding
from plumbline.model.sampling import GREEDY
from plumbline.model.stock_inputs import stock_inputs

RELATIVE_TOLERANCE = 1e-5  # of fp32 logits: max |difference| / max |logit|
GREEDY_TOKENS = 32
THINK_EVERY = 3  # tokens from one thought to the next, in the check of thoughts
CHECK_BATCH, CHECK_LENGTH = 2, 64


def check_tokens(config: Any) -> Tensor:
    """Return the random tokens for all checks, for a configuration of ours or of transformers."""
    generator = torch.Generator().manual_seed(0)
    shape = (CHECK_BATCH, min(CHECK_LENGTH, getattr(config, "max_position_embeddings", CHECK_LENGTH)))
    return torch.randint(config.vocab_size, shape, generator=generator)


def _check_prompt(model: CausalLM) -> tuple[Tensor, int]:
    """Return some tokens of `check_tokens` as a prompt, and by how many tokens to continue it."""
    room = model.config.max_position_embeddings
    prompt = check_tokens(model.config)[:1, : max(1, min(8, room - GREEDY_TOKENS))]
    return prompt, min(GREEDY_TOKENS, room - prompt.size(1))


def _two_documents(tokens: Tensor) -> dict[str, Tensor]:
    """Return a batch whose sequences are two documents each."""
    places = torch.arange(tokens.size(1), dtype=torch.int32).expand(tokens.shape)
    half = max(1, tokens.size(1) // 2)
    second = (places >= half).int()
    return {"input_ids": tokens, "document_ids": second, "positions": places - half * second}


def _relative_error(ours: CausalLM, stock: nn.Module, batch: Mapping[str, Tensor]) -> float:
    """Return the largest |logit difference| over the largest |logit|."""
    expected, found = ours.logits(batch), stock(**stock_inputs(stock, batch)).logits
    return float((expected - found).abs().max() / expected.abs().max())


@torch.no_grad()
def verify_plain(ours: CausalLM, staging: Path, output: Path, architecture: str, own_code: bool) -> ExportReport:
    """Reload the folder as a user would; compare logits on random tokens, then greedy continuations.

    Logits of a run that masks documents are compared on two documents as well.
    """
    from transformers import AutoModelForCausalLM

    stock: nn.Module = AutoModelForCausalLM.from_pretrained(
        staging, dtype=torch.float32, trust_remote_code=own_code
    ).eval()
    ours = ours.float().cpu().eval()
    batches = [{"input_ids": check_tokens(ours.config)}]
    if ours.config.document_mask:
        batches.append(_two_documents(batches[0]["input_ids"]))
    relative_error = max(_relative_error(ours, stock, batch) for batch in batches)
    if not relative_error <= RELATIVE_TOLERANCE:
        raise ExportError(
            f"{output}: reloaded as {architecture}, logits differ by {relative_error:.1e} of the largest "
            f"(allowed {RELATIVE_TOLERANCE:.0e}); nothing was exported"
        )
    prompt, steps = _check_prompt(ours)
    sequences = [prompt, prompt]
    for step in range(steps):
        logits = ours(sequences[0]), stock(input_ids=sequences[1]).logits
        following = [values[:, -1].argmax(-1, keepdim=True) for values in logits]
        if not torch.equal(following[0], following[1]):
            raise ExportError(
                f"{output}: reloaded as {architecture}, greedy token {step + 1} is {following[1].item()} instead of "
                f"{following[0].item()}; nothing was exported"
            )
        sequences = [torch.cat((seen, new), dim=1) for seen, new in zip(sequences, following, strict=True)]
    return ExportReport(str(output), architecture, relative_error, steps, own_code=own_code)


@torch.no_grad()
def verify_thinker(ours: CausalLM, decoding: Decoding, folder: Path, own_code: bool) -> LookaheadReport:
    """Think with the code that was copied to the folder, as a user would; if it differs, remove it from there.

    We compare the logits of one thought's slots, then greedy tokens with a thought at each `THINK_EVERY`-th.
    """
    spec = spec_from_file_location("lookahead", thinker.CODE)  # not the copy, whose __pycache__ may be anyone's
    assert spec is not None, "a file of this repository"
    assert spec.loader is not None, "it ends in .py"
    code: Any = module_from_spec(spec)
    spec.loader.exec_module(code)
    theirs = code.Lookahead.from_pretrained(folder, dtype=torch.float32, trust_remote_code=own_code)

    prompt, steps = _check_prompt(ours)
    cache = cast(list[LayerCache], ours.new_cache(1, prompt.size(1)))
    slots, _ = think(ours, decoding.thinker, ours.model(prompt, cache=[*cache])[:, -1:], cache)
    text = code.Stream(theirs.model, theirs.settings.window)
    expected = ours.lm_head(slots[0], None, 0.0)
    found = theirs.logits(theirs.think(text, text.read(prompt, 0)[:, -1:]))
    relative_error = float((expected - found).abs().max() / expected.abs().max())

    trigger, commits = Trigger("every", THINK_EVERY), decoding.commits
    stream = generate_thinking(ours, decoding.thinker, commits, prompt, steps, trigger, sampling=GREEDY)
    said = theirs.continuation(prompt, steps, f"every:{THINK_EVERY}")
    equal = _equal_at_start((int(token) for token in stream), said)
    left_out = None
    if not relative_error <= RELATIVE_TOLERANCE:
        left_out = f"its logits differ by {relative_error:.1e} of the largest (allowed {RELATIVE_TOLERANCE:.0e})"
    elif equal < steps:
        left_out = f"its greedy token {equal + 1} is another"
    if left_out is not None:
        for name in (thinker.FILE, thinker.CODE.name):
            (folder / name).unlink()
    return LookaheadReport(relative_error, equal, left_out)


def _equal_at_start(one: Iterator[int], other: Iterator[int]) -> int:
    """Return how many tokens agree before the first difference."""
    count = 0
    for ours, theirs in zip(one, other, strict=True):
        if ours != theirs:
            break
        count += 1
    return count
