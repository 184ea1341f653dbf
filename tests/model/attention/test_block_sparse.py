"""Masks in blocks are the masks that are written out, and a compiled block takes them in one graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from plumbline.model.attention import softmax
from plumbline.model.attention.context import attention_context

if TYPE_CHECKING:
    from plumbline.model.decoder import CausalLM
    from tests.model.conftest import MakeConfig, MakeModel

LENGTH = 300
LONG = {"max_position_embeddings": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2}
DOCUMENTS = {
    "none": None,
    "one": [1],
    "few": [90, 60, 40],  # within blocks, over their borders
    "whole blocks": [128, 128],
    "many": [7] * 80,
    "counted down": [90, 60, 40],
}


def document_ids(name: str, length: int) -> Tensor | None:
    """Return two rows, the second of which has all documents a token earlier."""
    lengths = DOCUMENTS[name]
    if lengths is None:
        return None
    ends = torch.tensor(lengths).cumsum(0)
    places = torch.stack((torch.arange(length), torch.arange(length) + 1))
    ids = torch.bucketize(places, ends, right=True)
    return len(lengths) - ids if name == "counted down" else ids


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("window", [None, 2, 127, 128, 129, 260])
@pytest.mark.parametrize("length", [64, 256, LENGTH])
def test_the_blocks_are_those_of_the_mask_that_is_written_out(
    make_config: MakeConfig, length: int, window: int | None, documents: str
) -> None:
    config = make_config(family="llama", sliding_window=window, **LONG)
    ids, positions = document_ids(documents, length), torch.arange(length)[None]
    dense, blocks = (attention_context(config, positions, 0, ids, torch.float32, way).mask for way in (False, True))
    if dense is None:
        assert blocks is None, "plain causal attention has a kernel of its own"
        return
    assert isinstance(dense, Tensor)
    assert isinstance(blocks, BlockMask)
    expected = create_block_mask(lambda b, _, q, k: dense[b, 0, q, k], len(dense), None, length, length, device="cpu")
    assert blocks.shape == expected.shape
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, numbers = getattr(blocks, f"{kind}_num_blocks"), getattr(blocks, f"{kind}_indices")
        assert torch.equal(counts, getattr(expected, f"{kind}_num_blocks"))
        counted = torch.arange(numbers.size(-1)) < counts[..., None]
        assert torch.equal(numbers[counted], getattr(expected, f"{kind}_indices")[counted])


def seeing(model: CausalLM, ids: Tensor, in_blocks: bool) -> Tensor:
    """Return what a model in training makes of the same tokens in these documents."""
    tokens = torch.arange(ids.numel()).view(ids.shape) * 7 % model.config.vocab_size
    model.train().model.block_masks = in_blocks
    seen: Tensor = model.model(tokens, ids, torch.arange(ids.size(1)).expand_as(ids))
    return seen


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 100])
def test_a_model_computes_the_same_under_blocks(make_model: MakeModel, window: int | None) -> None:
    """Numbers of documents that come in no order, too: blocks that hold nothing are then only not skipped."""
    model = make_model(family="qwen3", document_mask=True, sliding_window=window, **LONG).double()
    ids = document_ids("few", LENGTH)
    assert ids is not None
    for each in (ids, ids * 5 % 4):
        torch.testing.assert_close(seeing(model, each, True), seeing(model, each, False), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_compiled_block_takes_any_documents_in_one_graph(make_model: MakeModel) -> None:
    model, graphs = make_model(family="qwen3", document_mask=True, **LONG), []

    def count(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    few, many = document_ids("few", LENGTH), document_ids("many", LENGTH)
    assert few is not None
    assert many is not None
    plain = [seeing(model, ids, False) for ids in (few, many)]
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=True, backend=count)
    for ids, expected in zip((few, many), plain, strict=True):
        torch.testing.assert_close(seeing(model, ids, True), expected, rtol=1e-5, atol=1e-5)
    assert [graph.code.count("ops.higher_order.flex_attention(") for graph in graphs] == [1], "one, of all blocks"
    torch._dynamo.reset()


def test_what_is_evaluated_has_its_masks_written_out(make_model: MakeModel) -> None:
    model = make_model(family="qwen3", document_mask=True, **LONG)
    model.model.block_masks = True
    ids, x = document_ids("few", LENGTH), torch.zeros(2, LENGTH, LONG["hidden_size"])
    kinds = [
        type(model.train(trains).model.context(x, torch.arange(LENGTH)[None], ids).mask) for trains in (True, False)
    ]
    assert kinds == [BlockMask, Tensor]


@torch.no_grad()
def test_heads_that_no_kernel_shares_have_keys_and_values_of_their_own(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family="qwen3", document_mask=True, **LONG).double()
    ids = document_ids("few", LENGTH)
    assert ids is not None
    shared = seeing(model, ids, False)
    monkeypatch.setattr(softmax.SoftmaxAttention, "counts_for_gpu", True)
    kernel = torch.nn.functional.scaled_dot_product_attention

    def own(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool, **options: object) -> Tensor:
        assert query.size(1) == key.size(1) == value.size(1)
        assert not enable_gqa
        return kernel(query, key, value, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", own)
    torch.testing.assert_close(seeing(model, ids, False), shared, rtol=1e-12, atol=1e-12)
