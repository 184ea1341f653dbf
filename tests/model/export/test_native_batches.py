"""Prompts of several lengths, padded on the left, in a batch of `generate` with the code of a native export."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from plumbline.launcher.runtime.export.hugging_face import export
from plumbline.launcher.runtime.models.open import load_model
from plumbline.model.decoder import CausalLM
from tests.model.conftest import loaded

MakeModel = Callable[..., CausalLM]


@pytest.mark.parametrize("shape", [{"position_embedding": "learned"}, {"sliding_window": 6}], ids=["learned", "rope"])
def test_a_prompt_is_continued_in_a_batch_as_alone(
    make_model: MakeModel, tmp_path: Path, shape: dict[str, Any]
) -> None:
    export(loaded(make_model(**shape), tmp_path), tmp_path / "out", "native")
    model: Any = load_model(tmp_path / "out", torch.device("cpu")).module
    short, long = [5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    alone = [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :] for prompt in (short, long)]
    assert len(alone[0].unique()) > 3
    padding = len(long) - len(short)
    mask = torch.ones(2, len(long), dtype=torch.int64)
    mask[0, :padding] = 0
    batch = torch.tensor([[0] * padding + short, long])
    together = model.generate(batch, attention_mask=mask, **options)[:, len(long) :]
    assert together.tolist() == [tokens.tolist() for tokens in alone]


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
@torch.no_grad()
def test_earlier_tokens_are_read_by_either_name(make_model: MakeModel, tmp_path: Path, name: str) -> None:
    export(loaded(make_model(), tmp_path), tmp_path / "out", "native")
    model: Any = load_model(tmp_path / "out", torch.device("cpu")).module
    tokens = torch.arange(5, 17)[None]
    whole, cache = model(input_ids=tokens).logits, DynamicCache(config=model.config)
    pieces = [model(input_ids=piece, use_cache=True, **{name: cache}).logits for piece in tokens.split([7, 5], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["shaped", "mixing"])
@torch.no_grad()
def test_attention_that_counts_every_position_refuses_several_texts_in_a_row_and_static_caches(
    make_model: MakeModel, tmp_path: Path, kind: str
) -> None:
    """Softmax would keep packed documents apart by their positions; a mean over all earlier tokens would not."""
    export(loaded(make_model(attention=kind, qk_norm="none"), tmp_path), tmp_path / "out", "native")
    model: Any = load_model(tmp_path / "out", torch.device("cpu")).module
    tokens = torch.arange(5, 17)[None]
    positions = torch.tensor([[*range(5), *range(7)]])
    mask = torch.ones_like(tokens)
    mask[0, 0] = 0
    assert model(input_ids=tokens, position_ids=torch.arange(12)[None], use_cache=False).logits.isfinite().all()
    with pytest.raises(ValueError, match=f"attention = {kind} reads all that a cache holds, and a static one"):
        model(input_ids=tokens, past_key_values=StaticCache(config=model.config, max_cache_len=16))
    with pytest.raises(ValueError, match="leave out cache_implementation"):
        model.generate(tokens, max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    causal = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    for inputs in (
        {"position_ids": positions, "use_cache": False}, {"attention_mask": mask}, {"attention_mask": causal}
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"attention = {kind} counts every position: no padding, no mask"):
            model(input_ids=tokens, **inputs)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)


@torch.no_grad()
def test_mixing_refuses_more_tokens_than_it_has_weights_for(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model(attention="mixing", qk_norm="none")
    longest = model.config.max_position_embeddings
    export(loaded(model, tmp_path), tmp_path / "out", "native")
    opened: Any = load_model(tmp_path / "out", torch.device("cpu")).module
    tokens = torch.arange(longest + 1)[None] % 5 + 5
    assert opened(input_ids=tokens[:, 1:]).logits.isfinite().all()
    with pytest.raises(ValueError, match=f"has weights for {longest} tokens, and these are {longest + 1}: give fewer"):
        opened(input_ids=tokens)
    with pytest.raises(ValueError, match="give fewer"):
        opened.generate(tokens[:, 3:], max_new_tokens=4, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@torch.no_grad()
def test_eager_attention_takes_masks_of_either_kind(make_model: MakeModel, tmp_path: Path, dtype: torch.dtype) -> None:
    """Added to the logits, one of booleans would hide nothing."""
    export(loaded(make_model(attention_sink=True), tmp_path), tmp_path / "out", "native")
    model: Any = load_model(tmp_path / "out", torch.device("cpu")).module
    tokens = torch.arange(5, 17)[None]
    seen = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    mask = seen if dtype == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(dtype).min)
    torch.testing.assert_close(model(tokens, attention_mask=mask).logits, model(tokens).logits)
