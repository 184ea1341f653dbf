"""Train register tokens (MuToR, arXiv 2505.10518): a register beside each token predicts one of the next few.

A register at token i has position i + d - 1, sees the text up to its token and no other register, and predicts token i
+ d; d is drawn for each sequence. Text never sees registers, so they are dropped after training.

    loss = (1 - a) mean CE(next token) + a mean CE(registers)
"""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.lookahead.anchors import Anchors, labels_ahead, uniform
from plumbline.model.lookahead.masks import attention_mask, slot_entries, text_entries, text_of
from plumbline.model.lookahead.thoughts import run_slots, run_text
from plumbline.model.objectives.objective import Batch, Losses, Objective, ObjectiveSettings, Work
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.parameterization.tensors import TensorRule


class RegistersConfig(ObjectiveSettings):
    """Put a register beside every token."""

    name: Literal["registers"] = "registers"
    """Which objective."""
    horizon: PositiveInt = 4
    """Largest distance d that a register predicts ahead."""
    weight: float = Field(default=0.3, ge=0, le=1)
    """a: weight of the registers' loss."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of logsumexp(logits)^2, for text and registers."""

    def make(self, model: ModelConfig, _multipliers: Multipliers, seed: int) -> "Registers":
        """Return the objective."""
        return Registers(self, model, seed)

    def work(self, _length: int) -> Work:
        """Count the text and as many registers."""
        return Work(blocks=2, head=2)


class Registers(Objective):
    """Run the text pass, and one pass of all registers."""

    terms = ("next_token", "registers")
    reports = ("registers/loss",)
    tensors = (TensorRule("register", "embedding"),)  # initialised like an embedding

    def __init__(self, config: RegistersConfig, model: ModelConfig, seed: int) -> None:
        super().__init__()
        self.config, self.seed = config, seed
        self.register = nn.Parameter(torch.empty(model.hidden_size))

    def _distance(self, batch: Batch) -> Tensor:
        """Return d of each sequence, 1 to `horizon`, [B]."""
        draws = uniform(self.seed, batch["sample_index"], 1)[:, 0]
        return 1 + (draws * self.config.horizon).long()

    def _labels(self, batch: Batch) -> Tensor:
        """Return the label of each register, [B, T]."""
        ahead = labels_ahead(batch["labels"], batch["document_ids"], self.config.horizon)
        place = (self._distance(batch) - 1)[:, None, None].expand(-1, ahead.size(1), 1)
        return ahead.gather(2, place)[:, :, 0]

    def targets(self, batch: Batch) -> Tensor:
        """Count the valid labels of the text and of the registers."""
        return torch.stack(((batch["labels"] >= 0).sum(), (self._labels(batch) >= 0).sum()))

    def forward(self, model: CausalLM, batch: Batch, _step: int) -> Losses:
        """See `Objective`."""
        decoder, text, weight = model.model, text_of(model.config, batch), self.config.weight
        states, memory = run_text(decoder, batch["input_ids"], text)
        loss, cross_entropy = model.lm_head(states, batch["labels"], self.config.z_loss)
        place = torch.arange(states.size(1), device=states.device).expand(states.shape[:2])
        everywhere = Anchors(place, torch.ones_like(place, dtype=torch.bool))
        query = slot_entries(text, everywhere, range(1))
        query = replace(query, position=query.position + self._distance(batch)[:, None] - 1)
        mask = attention_mask(model.config, query, text_entries(text).then(query), bidirectional=True)
        x = (self.register * decoder.embedding_multiplier).to(states.dtype).expand_as(states)
        x, _ = run_slots(decoder, x, query.position, mask, memory)
        labels = self._labels(batch)
        ahead, nats = model.lm_head(x, labels, self.config.z_loss)
        reports = torch.stack((nats, (labels >= 0).sum()))[None]
        return Losses(torch.stack(((1 - weight) * loss, weight * ahead)), cross_entropy, reports)
