"""Train thoughts that predict further tokens besides the next one: latent lookahead (arXiv 2603.20219).

    loss = mean CE(next token) + lambda mean CE(slot j of a thought at i -> token i + j)

docs/lookahead.md explains our choices where the paper leaves them open.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic import model_validator as validator
from torch import Tensor

from plumbline.model.attention.block_sparse import refusal
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.linear_cross_entropy import LOGITS_AT_ONCE
from plumbline.model.lookahead.anchors import (
    AnchorPolicy,
    Anchors,
    choose_anchors,
    slot_labels,
    text_anchor_problems,
    uniform,
    whole_thoughts,
)
from plumbline.model.lookahead.masks import text_of
from plumbline.model.lookahead.thoughts import Masks, Thinker, ThoughtSettings, run_text, run_text_with_thoughts, speak
from plumbline.model.objectives.objective import Batch, Decoding, Losses, Objective, ObjectiveSettings, Work
from plumbline.model.parameterization.multipliers import Multipliers


class LatentLookaheadConfig(ObjectiveSettings):
    """Think in `horizon` slots at some tokens of each sequence, trained to predict the tokens that follow."""

    name: Literal["latent_lookahead"] = "latent_lookahead"
    """Which objective."""
    horizon: PositiveInt = 4
    """tau: slots of a thought, which is also how many tokens it looks ahead."""
    anchors: PositiveInt | None = None
    """K: thoughts per sequence. None: one for every 32 tokens."""
    anchor_policy: AnchorPolicy = "stratified"
    """stratified: a random one in each K-th of the tokens with labels; entropy: the same, drawn in proportion to the
    entropy of the prediction, among tokens with labels for a whole thought; response_start: where labels begin;
    sequential: the first K tokens with labels; random: the first, and random others."""
    anchor_probability: float = Field(default=1.0, gt=0, le=1)
    """anchor_policy random: chance of each token, of which the first K in random order are taken."""
    growth: Literal["grow", "fixed"] = "grow"
    """grow: pass s runs slots 1 to s and gives slot s + 1 its input. fixed: all slots in each of `passes` passes."""
    passes: PositiveInt | None = None
    """growth fixed: number of passes that refine the slots; 1 predicts in one pass. None: 3."""
    within: Literal["bidirectional", "causal"] = "bidirectional"
    """Whether a slot sees later ones of its thought. Causal growing thoughts cost one slot per pass instead of all."""
    commit: Literal["none", "thoughts"] = "none"
    """none: thoughts are dropped after use. thoughts: a second text pass, which sees earlier thoughts, predicts the
    next tokens; with one anchor that is the paper's model."""
    weight: NonNegativeFloat = 0.3
    """lambda: weight of the mean slot loss relative to the next token's. The paper's 1 seems to weigh the sum over a
    thought's slots, which would be `horizon` here."""
    weight_warmup_steps: NonNegativeInt = 0
    """Steps over which lambda grows from 0."""
    detach_states: bool = False
    """Stop gradients where a state, the anchor's or a slot's, becomes a slot's input. They still flow through keys and
    values. With growth fixed and more than one pass, the learned slot inputs then get no gradient and are not
    trained."""
    detach_text: bool = False
    """Stop gradients from thoughts into the text pass, so that training thoughts does not shape what they read."""
    masks: Masks = "dense"
    """Masks of slots in training on a GPU. dense: materialised; blocks: for FlexAttention, which skips masked blocks
    but does not support dropout, caps or sinks."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of logsumexp(logits)^2, for text and slots."""

    @validator(mode="after")
    def _check(self) -> "LatentLookaheadConfig":
        if self.passes is not None and self.growth != "fixed":
            raise ValueError(f"passes = {self.passes} belongs to growth: fixed; it is {self.growth}")
        if self.anchor_probability != 1.0 and self.anchor_policy != "random":
            raise ValueError(
                f"anchor_probability = {self.anchor_probability} belongs to anchor_policy: random; "
                f"it is {self.anchor_policy}"
            )
        return self

    def make(self, model: ModelConfig, _multipliers: Multipliers, seed: int) -> "LatentLookahead":
        """Return the objective."""
        return LatentLookahead(self, model, seed)

    def problems(self, model: ModelConfig, length: int, text: str | None) -> Iterator[str]:
        """Yield problems with anchors and masks, too; see `ObjectiveSettings`."""
        yield from super().problems(model, length, text)
        yield from text_anchor_problems(self.anchor_policy, text)
        reason = refusal(model) if self.masks == "blocks" else None
        if reason is not None:
            yield f"objective.masks = blocks: the kernel does not serve this model: {reason}; set dense"

    def cautions(self) -> Iterator[str]:
        """Warn of passes that change nothing, and of inputs of the first pass that get no gradient."""
        passes = self.thoughts.passes
        if self.growth != "fixed" or passes == 1:
            return
        if self.horizon == 1:
            yield (
                f"objective.growth = fixed with horizon = 1: each of the {passes} passes repeats the first, for a slot "
                "takes the state of the one before, and there is none; set passes: 1"
            )
            return
        if self.within == "causal" and passes >= self.horizon:
            yield (
                f"objective.growth = fixed with within = causal: slot j changes no more after pass j, so that {passes} "
                f"passes over {self.horizon} slots compute what growth: grow does in {self.horizon} slots, not "
                f"{passes * self.horizon}"
            )
            cut = f"within = causal, passes = {passes} and horizon = {self.horizon}"
            mended = "set fewer passes than slots"
        elif self.detach_states:
            cut, mended = "detach_states = true", "leave detach_states out, or set passes: 1"
        else:
            return
        yield (
            f"objective.growth = fixed with {cut}: no gradient reaches what slots start from in the first pass, so it "
            f"is not trained; {mended}"
        )

    def weight_at(self, step: int) -> float:
        """Return lambda after `step` steps."""
        return self.weight * min(1.0, (step + 1) / (self.weight_warmup_steps + 1))

    def anchors_in(self, length: int) -> int:
        """Return K for sequences of `length` tokens."""
        return min(length, self.anchors or max(1, length // 32))

    @property
    def thoughts(self) -> ThoughtSettings:
        """Return how thoughts grow."""
        return ThoughtSettings(
            horizon=self.horizon,
            growth=self.growth,
            passes=self.passes or 3,
            bidirectional=self.within == "bidirectional",
            detach_states=self.detach_states,
            detach_text=self.detach_text,
            masks=self.masks,
        )

    @property
    def text_sees_thoughts(self) -> bool:
        """Return whether thoughts are committed."""
        return self.commit == "thoughts"

    def work(self, length: int) -> Work:
        """Count the text, once or twice, and the slots in all passes; those of the last pass predict."""
        thoughts = self.anchors_in(length) / length
        text = 2 if self.text_sees_thoughts else 1
        return Work(text + thoughts * self.thoughts.slots_run, 1 + thoughts * self.horizon)


class LatentLookahead(Objective):
    """Run a text pass, the passes of all thoughts, and another text pass if thoughts are committed; then the losses."""

    terms = ("next_token", "lookahead")
    thinks = True

    def __init__(self, config: LatentLookaheadConfig, model: ModelConfig, seed: int) -> None:
        super().__init__()
        self.config, self.seed = config, seed
        each = tuple(f"lookahead/loss_{number}" for number in range(1, config.horizon + 1))
        self.reports = (*each, "lookahead/gain")
        self.thinker = Thinker(config.thoughts, model.hidden_size)

    @property
    def decoding(self) -> Decoding:
        """Return how text is decoded with its thoughts."""
        return Decoding(self.thinker, self.config.text_sees_thoughts)

    def targets(self, batch: Batch) -> Tensor:
        """Count the valid labels of the text and of all slots."""
        labels = batch["labels"]
        slots = slot_labels(self._anchors(batch), labels, batch["document_ids"], self.config.horizon)
        return torch.stack(((labels >= 0).sum(), (slots >= 0).sum()))

    def forward(self, model: CausalLM, batch: Batch, step: int) -> Losses:
        """See `Objective`."""
        labels = batch["labels"]
        states, thoughts, anchors = self._run(model, batch)
        loss, cross_entropy = model.lm_head(states, labels, self.config.z_loss)
        targets = slot_labels(anchors, labels, batch["document_ids"], self.config.horizon)
        slot_loss, nats = model.lm_head(thoughts, targets, self.config.z_loss)  # nats [tau]
        counts = (targets >= 0).sum((0, 1))
        gain = self._plain_nats(model, states, anchors, targets) - nats[0]
        reports = torch.stack((torch.cat((nats, gain[None])), torch.cat((counts, counts[:1]))), dim=1)
        return Losses(torch.stack((loss, self.config.weight_at(step) * slot_loss)), cross_entropy, reports)

    @torch.no_grad()
    def _plain_nats(self, model: CausalLM, states: Tensor, anchors: Anchors, targets: Tensor) -> Tensor:
        """Return the summed cross-entropy of the tokens after the anchors, as the text predicts them."""
        index = anchors.index[:, :, None].expand(-1, -1, states.size(2))
        nats: Tensor = model.lm_head(states.gather(1, index), targets[:, :, 0], 0.0)[1]
        return nats

    def thinking_states(self, model: CausalLM, batch: Batch) -> Tensor:
        """Return states in which a thought's first slot predicts the token after its anchor, as the paper decodes."""
        states, thoughts, anchors = self._run(model, batch)
        return speak(states, thoughts[:, :, 0], anchors)

    def _run(self, model: CausalLM, batch: Batch) -> tuple[Tensor, Tensor, Anchors]:
        """Return final states of the text [B, T, D] and of the slots [B, K, tau, D], and the anchors."""
        decoder, text = model.model, text_of(model.config, batch)
        states, memory = run_text(decoder, batch["input_ids"], text)
        anchors = self._anchors(batch, self._entropy(model, states))
        thoughts, thought_memory = self.thinker(decoder, states, memory, text, anchors)
        if self.config.text_sees_thoughts:
            horizon = self.config.horizon
            states = run_text_with_thoughts(decoder, batch["input_ids"], text, anchors, thought_memory, horizon)
        return states, thoughts, anchors

    def _anchors(self, batch: Batch, entropy: Tensor | None = None) -> Anchors:
        config, labels = self.config, batch["labels"]
        if config.anchor_policy == "entropy":  # its choices must not change the number of targets
            labels = whole_thoughts(labels, batch["document_ids"], config.horizon)
        draws = uniform(self.seed, batch["sample_index"], labels.size(1))
        count = config.anchors_in(labels.size(1))
        return choose_anchors(config.anchor_policy, count, labels, draws, config.anchor_probability, entropy)

    @torch.no_grad()
    def _entropy(self, model: CausalLM, states: Tensor) -> Tensor | None:
        """Return the entropy of the next-token prediction, [B, T] in nats, or None if no choice depends on it."""
        if self.config.anchor_policy != "entropy":
            return None
        chunks = states.flatten(0, 1).split(max(1, LOGITS_AT_ONCE // model.config.vocab_size))
        logs = (model.lm_head(chunk, None, 0.0).log_softmax(-1) for chunk in chunks)
        return torch.cat([-(log.exp() * log).sum(-1) for log in logs]).view(states.shape[:2])
