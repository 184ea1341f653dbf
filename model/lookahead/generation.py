"""Decode with thoughts: the first slot gives the next token, or later slots draft and the plain model verifies."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from plumbline.model.attention.context import LayerCache
from plumbline.model.decoder import CausalLM
from plumbline.model.generation import sample_token
from plumbline.model.lookahead.anchors import Anchors
from plumbline.model.lookahead.masks import Entries, Text, attention_mask, slot_entries, text_entries
from plumbline.model.lookahead.thoughts import Memory, Thinker, join, run_text_behind
from plumbline.model.quantization.precision import scales_over_tokens
from plumbline.model.sampling import GREEDY, Sampling, check_room


@dataclass(frozen=True)
class Trigger:
    """Decide when to think."""

    kind: Literal["first", "every", "probability", "entropy"]
    """first: at the prompt's last token only. every: there, and at each `value`-th token after it. probability: at each
    token with that chance. entropy: where the entropy of the prediction exceeds `value` nats."""
    value: float = 1.0

    def fires(self, number: int, logits: Tensor, generator: torch.Generator | None) -> bool:
        """Return whether to think before new token `number` (from 0), for which the plain model gives logits [V]."""
        if self.kind == "first":
            return number == 0
        if self.kind == "every":
            return number % int(self.value) == 0
        if self.kind == "probability":
            return bool(torch.rand((), generator=generator, device=logits.device) < self.value)
        # Not validated: of logits that are nan or inf, `sample_token` has something better to say
        return bool(torch.distributions.Categorical(logits=logits, validate_args=False).entropy() > self.value)


@torch.no_grad()
def generate_thinking(
    model: CausalLM,
    thinker: Thinker,
    commits: bool,
    prompt: Tensor,
    max_new_tokens: int,
    trigger: Trigger,
    *,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield the continuation of prompt [1, T] token by token, each [1]; after a thought, its first slot predicts.

    Args:
        model: trained with latent lookahead.
        thinker: the thinker of its objective.
        commits: whether tokens see the thoughts before them, as with `commit: thoughts`.
        prompt: token ids to continue.
        max_new_tokens: most tokens to yield.
        trigger: when to think.
        sampling: how tokens are drawn.
        generator: random generator.

    Raises:
        ValueError: the prompt is empty, prompt and continuation exceed max_position_embeddings, or several sequences
            are given, which would think at different tokens.
    """
    cache = _cache_for(model, prompt, max_new_tokens)
    committed = _Committed(model) if commits else None
    tokens = prompt
    for number in range(max_new_tokens):
        states = model.model(tokens, cache=[*cache])[:, -1:]
        speaking = states if committed is None else committed.read(tokens)
        logits = _logits(model, speaking)
        if trigger.fires(number, logits[0], generator):
            slots, own = think(model, thinker, states, cache)
            logits = _logits(model, slots[:, 0, :1])
            if committed is not None:
                committed.add(own, cache[0].length)
        token = sample_token(logits, sampling, generator)
        yield token
        tokens = token[:, None]


def _cache_for(model: CausalLM, prompt: Tensor, max_new_tokens: int) -> list[LayerCache]:
    """Return an empty cache for the prompt [1, T] and its continuation, of a model that no longer trains."""
    check_room(model.config.max_position_embeddings, prompt.size(1), max_new_tokens)
    if prompt.size(0) != 1:
        raise ValueError(f"{prompt.size(0)} prompts: thoughts are for one sequence at a time")
    return cast(list[LayerCache], model.eval().new_cache(1, prompt.size(1) + max_new_tokens))


def think(model: CausalLM, thinker: Thinker, state: Tensor, cache: list[LayerCache]) -> tuple[Tensor, Memory]:
    """Think at the last token in the cache, given its final state [1, 1, D]; see `Thinker`."""
    text = Text(torch.arange(cache[0].length, device=state.device)[None], None)
    return thinker.think(model.model, state, _memory(cache), text, _last(text))


def _last(text: Text) -> Anchors:
    """Return the last token as an anchor."""
    index = text.positions[:, -1:]
    return Anchors(index, torch.ones_like(index, dtype=torch.bool))


class _Committed:
    """Hold the second stream of text, which sees thoughts: its keys and values and their positions."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.memory: Memory | None = None
        self.held: Entries | None = None
        self.length = 0  # tokens of text

    def read(self, tokens: Tensor) -> Tensor:
        """Read new tokens [1, n], and return the final state of the last one, [1, 1, D]."""
        end = self.length + tokens.size(1)
        places = torch.arange(end, device=tokens.device)[None]
        query = text_entries(Text(places, None)).map(lambda field: field[:, self.length :])
        self.held = query if self.held is None else self.held.then(query)
        mask = attention_mask(self.model.config, query, self.held, bidirectional=False)
        states, own = run_text_behind(self.model.model, tokens, query.position, mask, self.memory)
        self.memory = own if self.memory is None else join(self.memory, own)
        self.length = end
        return states[:, -1:]

    def add(self, thought: Memory, length: int) -> None:
        """Add a thought at token `length` - 1, which all later tokens see."""
        assert self.memory is not None, "text has been read"
        assert self.held is not None, "with its positions"
        text = Text(torch.arange(length, device=self.held.place.device)[None], None)
        self.held = self.held.then(slot_entries(text, _last(text), range(thought[0][0].size(2))))
        self.memory = join(self.memory, thought)


@dataclass
class Drafts:
    """Count drafted and accepted tokens."""

    drafted: int = 0
    """Tokens that slots proposed."""
    accepted: int = 0
    """Drafted tokens that the plain model would have chosen."""
    text_passes: int = 0
    """Passes of the plain model, each over a draft."""
    slot_passes: int = 0
    """Sequential passes of slots that made the drafts."""


def check_verifiable(model: nn.Module) -> None:
    """Refuse to verify drafts if reading them would change how the text before them is rounded.

    Raises:
        ValueError: names the quantizers whose scales span several tokens.
    """
    shared = scales_over_tokens(model)
    if shared:
        raise ValueError(
            f"drafts cannot be verified: with {', '.join(shared)} scales span several tokens, so a draft changes what "
            "the plain model says of the text before it; decode without thoughts, or train with a scale for each token"
        )


@torch.no_grad()
def generate_verified(
    model: CausalLM, thinker: Thinker, prompt: Tensor, max_new_tokens: int, drafts: Drafts
) -> Iterator[Tensor]:
    """Yield the plain model's greedy continuation of prompt [1, T], in fewer text passes.

    Slots 2 to tau propose the tokens after the next one, and one pass of the plain model over the proposal verifies it.
    A thought takes passes as well: tau if it grows, which gains nothing, or `passes` if all slots run at once (growth
    fixed).

    Args:
        model: trained with latent lookahead.
        thinker: the thinker of its objective.
        prompt: token ids to continue.
        max_new_tokens: most tokens to yield.
        drafts: counters to update.

    Raises:
        ValueError: as for `generate_thinking` and `check_verifiable`, or logits of a token are nan or inf.
    """
    check_verifiable(model)
    cache = _cache_for(model, prompt, max_new_tokens)
    states = model.model(prompt, cache=[*cache])[:, -1:]
    drafts.text_passes += 1
    made = 0
    while True:
        token = _likeliest(model, states)
        yield token
        made += 1
        if made == max_new_tokens:
            return
        proposal = token[:, None]
        room = min(thinker.settings.horizon, max_new_tokens - made) - 1
        if room > 0:
            slots, _ = think(model, thinker, states, cache)
            drafted = _logits(model, slots[0, 0, 1 : 1 + room, None]).argmax(-1)[None]
            proposal = torch.cat((proposal, drafted), dim=1)
            drafts.slot_passes += thinker.settings.passes_run
            drafts.drafted += drafted.size(1)
        before = cache[0].length
        read = model.model(proposal, cache=[*cache])
        drafts.text_passes += 1
        right = 0
        while right + 1 < proposal.size(1):
            if _likeliest(model, read[:, right : right + 1]) != proposal[:, right + 1]:
                break
            right += 1
            drafts.accepted += 1  # before yielding, since the caller may stop there
            yield proposal[:, right]
        made += right
        for layer in cache:  # drop what was wrong
            layer.length = before + 1 + right
        states = read[:, right : right + 1]


def _logits(model: CausalLM, states: Tensor) -> Tensor:
    """Map states [N, 1, D] to logits [N, V]."""
    logits: Tensor = model.lm_head(states, None, 0.0)[:, -1]
    return logits


def _likeliest(model: CausalLM, states: Tensor) -> Tensor:
    """Return the likeliest token [1] after a state [1, 1, D]."""
    return sample_token(_logits(model, states), GREEDY, None)


def _memory(cache: list[LayerCache]) -> Memory:
    return tuple((layer.keys[:, :, : layer.length], layer.values[:, :, : layer.length]) for layer in cache)
