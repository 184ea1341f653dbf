"""Train thoughts without targets: a thought's last slot predicts the next token, and later text sees the slots.

pause     slots are learned vectors and one pass runs them (pause tokens, arXiv 2310.02226, as many as latent lookahead
          has slots)
coconut   a slot's input is the state of the one before (Coconut, arXiv 2412.06769, without its curriculum)
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.lookahead.anchors import choose_anchors, text_anchor_problems, uniform
from plumbline.model.lookahead.masks import text_of
from plumbline.model.lookahead.thoughts import Growth, Thinker, ThoughtSettings, run_text, run_text_with_thoughts, speak
from plumbline.model.objectives.objective import Batch, Losses, Objective, ObjectiveSettings, Work
from plumbline.model.parameterization.multipliers import Multipliers


class SilentThoughtsConfig(ObjectiveSettings):
    """Think in `horizon` slots, trained only through the tokens that see them."""

    name: Literal["pause", "coconut"]
    """Which objective."""
    horizon: PositiveInt = 4
    """Slots of a thought."""
    anchors: PositiveInt = 1
    """K: thoughts per sequence."""
    anchor_policy: Literal["response_start", "sequential", "random", "stratified"] = "stratified"
    """Where thoughts begin, as in latent_lookahead."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of logsumexp(logits)^2."""

    def make(self, model: ModelConfig, _multipliers: Multipliers, seed: int) -> "SilentThoughts":
        """Return the objective."""
        return SilentThoughts(self, model, seed)

    def problems(self, model: ModelConfig, length: int, text: str | None) -> Iterator[str]:
        """Yield problems with anchors, too; see `ObjectiveSettings`."""
        yield from super().problems(model, length, text)
        yield from text_anchor_problems(self.anchor_policy, text)

    @property
    def thoughts(self) -> ThoughtSettings:
        """Return how thoughts grow."""
        growth: Growth = "at_once" if self.name == "pause" else "grow"
        return ThoughtSettings(self.horizon, growth, passes=1, bidirectional=False)

    @property
    def text_sees_thoughts(self) -> bool:
        """Return True, since later text always sees them."""
        return True

    def work(self, length: int) -> Work:
        """Count two text passes and the slots, of which only the last of each thought predicts, in place of a token.

        With `pause` nothing reads what the last block of the first pass puts out, and its backward pass is counted all
        the same: too much, the more so the fewer blocks there are.
        """
        return Work(blocks=2 + min(self.anchors, length) * self.thoughts.slots_run / length)


class SilentThoughts(Objective):
    """Run the text pass, the thoughts, and a text pass that sees them."""

    terms = ("next_token",)
    thinks = True

    def __init__(self, config: SilentThoughtsConfig, model: ModelConfig, seed: int) -> None:
        super().__init__()
        self.config, self.seed = config, seed
        self.thinker = Thinker(config.thoughts, model.hidden_size)
        self.undecodable = (
            f"the thoughts of {config.name} are in evaluations alone (launcher/eval.py --thinking); without --think "
            "the plain model decodes, which was not trained alone"
        )

    def targets(self, batch: Batch) -> Tensor:
        """Count valid labels."""
        labels: Tensor = batch["labels"]
        return (labels >= 0).sum()[None]

    def forward(self, model: CausalLM, batch: Batch, _step: int) -> Losses:
        """See `Objective`."""
        loss, cross_entropy = model.lm_head(self.thinking_states(model, batch), batch["labels"], self.config.z_loss)
        return Losses(loss[None], cross_entropy, loss.new_empty(0, 2))

    def thinking_states(self, model: CausalLM, batch: Batch) -> Tensor:
        """Return the states [B, T, D] that predict each next token."""
        decoder, text, labels = model.model, text_of(model.config, batch), batch["labels"]
        states, memory = run_text(decoder, batch["input_ids"], text)
        draws = uniform(self.seed, batch["sample_index"], labels.size(1))
        anchors = choose_anchors(self.config.anchor_policy, min(self.config.anchors, labels.size(1)), labels, draws)
        thoughts, thought_memory = self.thinker(decoder, states, memory, text, anchors)
        states = run_text_with_thoughts(decoder, batch["input_ids"], text, anchors, thought_memory, self.config.horizon)
        return speak(states, thoughts[:, :, -1], anchors)
