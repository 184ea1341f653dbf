"""Predict tokens with a decoder: embedding -> blocks -> norm -> head.

Parameter names are those of Hugging Face's Llama and Qwen3.

Shapes: B batch, T new tokens, D hidden_size, V vocab_size.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plumbline.model.attention import attention_kind
from plumbline.model.attention.context import AttentionContext, KeptContext, attention_context
from plumbline.model.blocks import block_kind
from plumbline.model.blocks.kind import Block
from plumbline.model.config import ModelConfig
from plumbline.model.linear_cross_entropy import (
    LossesAndGradient,
    linear_cross_entropy,
    losses_and_gradient,
    soft_cap,
)
from plumbline.model.norms import make_norm
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.parameterization.tensors import TensorRule
from plumbline.model.recomputation import run_block


def _draw_orthogonal(shape: tuple[int, ...], _std: float, generator: torch.Generator) -> Tensor:
    """Draw an orthogonal matrix, which preserves lengths at every width."""
    return nn.init.orthogonal_(torch.empty(shape), generator=generator)


def _orthogonal_std(model: ModelConfig, _: float) -> float:
    """Return the root mean square of an orthogonal matrix's entries: its columns have length 1."""
    return 1 / math.sqrt(model.hidden_size)


class Decoder(nn.Module):
    """Turn token ids [B, T] into normalised hidden states [B, T, D]."""

    tensors = (
        TensorRule(r"embed_(tokens|positions)\.weight", "embedding"),
        TensorRule(r"(embed|output)_projection\.weight", "projection", std=_orthogonal_std, draw=_draw_orthogonal),
        TensorRule(r"norm\.weight", "final_norm", start=1.0),
        TensorRule(r"norm\.bias", "final_norm"),
        TensorRule(r"norm\.scale", "final_scalar", start=1.0),
    )

    def __init__(self, config: ModelConfig, multipliers: Multipliers) -> None:
        super().__init__()
        self.config = config
        self.embedding_multiplier = multipliers.embedding
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = (
            nn.Embedding(config.max_position_embeddings, config.hidden_size)
            if config.position_embedding == "learned"
            else None
        )
        projects = config.embedding_projection
        self.embed_projection = nn.Linear(config.hidden_size, config.hidden_size, bias=False) if projects else None
        self.layers = nn.ModuleList(block_kind(config)(config, multipliers, i) for i in range(config.num_hidden_layers))
        self.norm = make_norm(config) if config.final_norm else nn.Identity()
        self.output_projection = nn.Linear(config.hidden_size, config.hidden_size, bias=False) if projects else None
        self.block_masks = False
        """Whether training uses block masks; may be set by the code that compiles the blocks (block_sparse.py)."""

    def forward(
        self,
        input_ids: Tensor,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        cache: list[Any] | None = None,
        kept: KeptContext | None = None,
    ) -> Tensor:
        """Run the blocks; `document_ids` and `positions` [B, T] only matter if the config masks documents.

        `kept` collects the share of context that each pruning layer keeps.
        """
        past = cache[0].length if cache else 0
        if not self.config.document_mask:
            document_ids = positions = None
        if positions is None:
            positions = torch.arange(past, past + input_ids.size(1), device=input_ids.device)[None]  # (1, T)

        x = self.embed(input_ids, positions)
        context = replace(self.context(x, positions, document_ids, past), kept=kept)
        for i, layer in enumerate(self.layers):
            x = self.run(layer, x, context, cache[i] if cache else None)
        return self.finish(x)

    def run(self, layer: nn.Module, x: Tensor, context: AttentionContext, cache: Any = None) -> Tensor:
        """Run one block, with activation recomputation if configured."""
        return run_block(cast(Block, layer), layer, x, context, cache)  # type: ignore[no-any-return]

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the input of the first block, [B, T, D]; `positions` [B or 1, T] matter if they are learned."""
        x = self.embed_tokens(input_ids)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        if self.embedding_multiplier != 1.0:
            x = x * self.embedding_multiplier
        if self.embed_projection is not None:
            x = self.embed_projection(x)
        return F.dropout(x, self.config.dropout, self.training)

    def context(
        self, x: Tensor, positions: Tensor, document_ids: Tensor | None = None, past: int = 0
    ) -> AttentionContext:
        """Return what all blocks share for the first block's input x [B, T, D], after `past` cached tokens."""
        in_blocks = self.block_masks and self.training  # evaluation has other shapes, which would all be compiled
        context = attention_context(self.config, positions, past, document_ids, x.dtype, in_blocks)
        if not self.config.value_residual:
            return context
        first = cast(Block, self.layers[0])
        return replace(context, first_values=first.self_attn.values(first.attention_input(x)))

    def finish(self, x: Tensor) -> Tensor:
        """Return the output of the last block, prepared for the head."""
        x = cast(Tensor, self.norm(x))
        return x if self.output_projection is None else self.output_projection(x)


class LanguageModelHead(nn.Module):
    """Compute logits with the unembedding [V, D], or the loss in chunks if labels are given.

    The loss is computed inside this module's forward because ZeRO-3 gathers a parameter only while the module that
    owns it runs.
    """

    tensors = (TensorRule("weight", "unembedding"),)

    def __init__(self, config: ModelConfig, multipliers: Multipliers) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.multiplier = multipliers.output
        self.cap = config.final_logit_softcapping
        self.on_chunk: LossesAndGradient = losses_and_gradient
        """Function applied to each chunk of logits in training; may be replaced by the code that compiles the
        blocks."""
        self.chunk: int | None = None
        """Tokens whose logits are in memory at once; None chooses a number that suits the device."""

    def forward(self, hidden: Tensor, labels: Tensor | None, z_loss: float) -> Tensor | tuple[Tensor, Tensor]:
        """Return fp32 logits [B, T, ..., V] of hidden [B, T, ..., D], or, with labels [B, T, ...], the loss.

        The loss is that of `linear_cross_entropy`, returned with the cross-entropy summed over B and T only: one number
        for labels [B, T].
        """
        if self.multiplier != 1.0:
            hidden = hidden * self.multiplier
        if labels is None:
            return soft_cap(F.linear(hidden, self.weight).float(), self.cap)
        tokens, width = labels.flatten(), hidden.size(-1)
        loss, nats = linear_cross_entropy(
            hidden.reshape(-1, width),
            self.weight,
            tokens,
            cap=self.cap,
            z_loss=z_loss,
            on_chunk=self.on_chunk,
            chunk=self.chunk,
        )
        return loss, nats.view(labels.shape).sum((0, 1))


class CausalLM(nn.Module):
    """Predict tokens with a decoder and its head. Weights are uninitialised until `initialize` fills them."""

    def __init__(self, config: ModelConfig, multipliers: Multipliers) -> None:
        super().__init__()
        self.config = config
        self.multipliers = multipliers
        self.model = Decoder(config, multipliers)
        self.lm_head = LanguageModelHead(config, multipliers)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Share the embedding's matrix with the head if the config says so; needed again after replacing either."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = cast(nn.Parameter, self.model.embed_tokens.weight)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return what `predict` does."""
        return self.predict(*inputs, **named)

    def predict(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        z_loss: float = 0.0,
        pruning_weight: float = 0.0,
        cache: list[Any] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return fp32 logits [B, T, V], or, with labels [B, T], (summed loss, summed cross-entropy) in nats.

        The loss of each valid label is cross-entropy + z_loss logsumexp(logits)^2 + pruning_weight x the share of
        context that its row keeps, averaged over layers.
        """
        kept = KeptContext([])
        hidden = self.model(input_ids, document_ids, positions, cache, kept)
        if labels is None or not kept.shares:
            return self.lm_head(hidden, labels, z_loss)  # type: ignore[no-any-return]
        loss, cross_entropy = self.lm_head(hidden, labels, z_loss)
        shares = torch.stack(kept.shares).mean(0)  # (B): per row, so that the price does not depend on the batching
        return loss + pruning_weight * ((labels >= 0).sum(1) * shares).sum(), cross_entropy

    def logits(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the logits [B, T, V] of a batch, of which only `input_ids` is required."""
        context: dict[str, Any] = {name: batch.get(name) for name in ("document_ids", "positions")}
        return cast(Tensor, self.predict(batch["input_ids"], **context))

    def cross_entropy(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the summed cross-entropy of a batch with its labels, in nats."""
        context = {name: batch[name] for name in ("labels", "document_ids", "positions")}
        return self.predict(batch["input_ids"], **context)[1]

    def new_cache(self, batch: int, capacity: int) -> list[Any]:
        """Return an empty cache, of the attention's kind, for sequences of up to `capacity` tokens."""
        kind = attention_kind(self.config)
        return [kind.new_cache(self.config, batch, capacity, self.lm_head.weight) for _ in self.model.layers]
