"""Think ahead with the model in this folder before it speaks: latent lookahead (arXiv 2603.20219).

    sys.path.insert(0, FOLDER)
    from lookahead import Lookahead

    thinker = Lookahead.from_pretrained(FOLDER)
    ids = thinker.generate(input_ids, max_new_tokens=64, think="every:8")

A thought at token i has slots 1 to `horizon`. Slot j has the position of token i + j - 1, its final state predicts
token i + j, and its input is a state: slot 1 takes that of token i, slot j + 1 the final state of slot j. Slots attend
to the text up to token i and to their own thought. The folder's model class runs them unchanged, through
`inputs_embeds`; after the thought they are dropped from the cache. This file needs torch, transformers and safetensors,
and attention that takes a mask (eager, sdpa).
"""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

FILE = "lookahead.safetensors"
THINK = re.compile(r"first|verify|every:[1-9]\d*|probability:([01](\.0*)?|0?\.\d+)|entropy:\d*\.?\d+")


@dataclass(frozen=True)
class Settings:
    """Hold how thoughts were trained: the metadata of lookahead.safetensors."""

    horizon: int
    """Slots of a thought."""
    growth: str
    """grow: one more slot in each pass. fixed: all slots in each of `passes` passes."""
    passes: int
    """Number of passes with growth fixed."""
    within: str
    """bidirectional: a slot sees the later ones of its thought. causal: it does not."""
    commit: str
    """none: thoughts are dropped. thoughts: later tokens see the thoughts before them."""
    window: int | None
    """Sliding window, in positions."""
    norm_eps: float | None
    """eps of the RMS norm of a state before it enters a slot, or None if the model's final norm suffices."""


class Stream:
    """Hold a cache and the positions of its entries."""

    def __init__(self, model: Any, window: int | None) -> None:
        self.model, self.window = model, window
        takes = inspect.signature(model.base_model.forward).parameters
        self.argument = "cache" if "cache" in takes else "past_key_values"  # since transformers 5.24, and before
        self.cache = DynamicCache()  # without the model's config, so that layers with a window drop nothing
        self.positions = torch.empty(0, dtype=torch.int64, device=model.device)

    def run(self, positions: Tensor, causal: bool = True, **inputs: Tensor) -> Tensor:
        """Run input_ids [1, n] or inputs_embeds [1, n, width] after the cached entries; return states [1, n, width]."""
        held = len(self.positions)
        self.positions = torch.cat((self.positions, positions))
        seen = torch.ones(len(positions), len(self.positions), dtype=torch.bool, device=positions.device)
        if causal:
            seen = seen.tril(held)
        if self.window is not None:
            seen &= positions[:, None] - self.positions < self.window
        mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=seen.device)
        mask = mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
        # Slots beyond the last position predict nothing that is used
        places = positions.clamp_max(self.model.config.max_position_embeddings - 1)
        output = self.model.base_model(
            **inputs,
            position_ids=places[None],
            attention_mask=mask[None, None],
            **{self.argument: self.cache},
            use_cache=True,
        )
        states: Tensor = output.last_hidden_state
        return states

    def read(self, input_ids: Tensor, position: int) -> Tensor:
        """Read tokens [1, n] of text, the first at `position`; return final states [1, n, width]."""
        places = torch.arange(position, position + input_ids.size(1), device=input_ids.device)
        return self.run(places, input_ids=input_ids)

    def forget(self, count: int) -> None:
        """Drop the last `count` tokens or slots."""
        if count:
            self.cache.crop(-count)
            self.positions = self.positions[:-count]

    def take_over(self, other: "Stream", count: int) -> None:
        """Append the last `count` entries of another stream."""
        for number, layer in enumerate(other.cache.layers):
            self.cache.update(layer.keys[:, :, -count:], layer.values[:, :, -count:], number)
        self.positions = torch.cat((self.positions, other.positions[-count:]))


class Lookahead:
    """Predict with thoughts: a model and its thinker."""

    def __init__(self, model: Any, settings: Settings, tensors: dict[str, Tensor]) -> None:
        self.model, self.settings = model.eval(), settings
        tensors = {name: tensor.to(model.device, model.dtype) for name, tensor in tensors.items()}
        self.gain, self.role = tensors["gain"], tensors["role"]
        self.waiting = tensors.get("waiting", self.role.new_empty(0, len(self.role)))  # for slots without a state
        self.projection = tensors.get("projection")

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> "Lookahead":
        """Load the folder; options (dtype, device_map, ...) go to `AutoModelForCausalLM.from_pretrained`."""
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        with safe_open(Path(folder) / FILE, "pt") as file:
            settings = Settings(**json.loads(file.metadata()["settings"]))
            return cls(model, settings, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118

    def generate(self, input_ids: Tensor, max_new_tokens: int, think: str = "first", **sampling: Any) -> Tensor:
        """Return prompt [1, T] and continuation, [1, T + n], until the end-of-text token; see `continuation`."""
        end = self.model.generation_config.eos_token_id
        ends = end if isinstance(end, list) else [end]
        new: list[int] = []
        for token in self.continuation(input_ids, max_new_tokens, think, **sampling):
            new.append(token)
            if token in ends:
                break
        return torch.cat((input_ids, input_ids.new_tensor([new])), dim=1)

    @torch.no_grad()
    def continuation(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        think: str = "first",
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> Iterator[int]:
        """Yield the next tokens one by one; after a thought, its first slot gives the next one.

        Args:
            input_ids: prompt [1, T].
            max_new_tokens: most tokens to yield.
            think: first: at the prompt's last token. every:N: there, and at each N-th token after it. probability:P: at
                each token with that chance. entropy:NATS: where the prediction's entropy is above that. verify: the
                plain greedy continuation, in fewer passes: slots draft, and the plain model checks.
            temperature: 0 is greedy.
            top_k: draw from the k likeliest tokens.
            top_p: draw from the likeliest tokens that hold this much probability.
            seed: seed of the sampling.

        Raises:
            ValueError: the request cannot be met.
        """
        self._check(input_ids, max_new_tokens, think, temperature)
        if think == "verify":
            yield from self._verified(input_ids, max_new_tokens)
            return
        generator = torch.Generator(self.model.device).manual_seed(seed)
        warpers = [TemperatureLogitsWarper(float(temperature))] if temperature else []
        warpers += [] if top_k is None else [TopKLogitsWarper(top_k)]
        warpers += [] if top_p is None else [TopPLogitsWarper(top_p)]
        text = Stream(self.model, self.settings.window)
        committed = Stream(self.model, self.settings.window) if self.settings.commit == "thoughts" else None
        tokens, position = input_ids, 0
        for number in range(max_new_tokens):
            states = text.read(tokens, position)[:, -1:]
            speaking = states if committed is None else committed.read(tokens, position)[:, -1:]
            logits = self.logits(speaking)[0]  # (1, V)
            if fires(think, number, logits[0], generator):
                logits = self.logits(self.think(text, states)[:, :1])[0]
                if committed is not None:
                    committed.take_over(text, self.settings.horizon)
                text.forget(self.settings.horizon)
            position += tokens.size(1)
            for warper in warpers:
                logits = warper(None, logits)
            tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator) if temperature else argmax(logits)
            yield int(tokens)

    def think(self, text: Stream, state: Tensor) -> Tensor:
        """Think at the last token of `text`, given its final state [1, 1, width].

        Returns the final states of the slots, [1, horizon, width]. The slots stay at the end of `text`.
        """
        horizon, causal = self.settings.horizon, self.settings.within == "causal"
        places = text.positions[-1] + torch.arange(horizon, device=text.positions.device)
        if self.settings.growth == "fixed":
            first = self.enter(state)
            states = text.run(places, causal, inputs_embeds=torch.cat((first, self.waiting[None]), dim=1))
            for _ in range(self.settings.passes - 1):
                text.forget(horizon)
                inputs = torch.cat((first, self.enter(states[:, :-1])), dim=1)
                states = text.run(places, causal, inputs_embeds=inputs)
            return states
        inputs, states = state[:, :0], state
        for slot in range(horizon):
            inputs = torch.cat((inputs, self.enter(states[:, -1:])), dim=1)
            start = slot if causal else 0  # slots that see the new one are recomputed
            text.forget(slot - start)
            run = text.run(places[start : slot + 1], causal, inputs_embeds=inputs[:, start:])
            states = torch.cat((states[:, :start], run), dim=1)
        return states

    def enter(self, states: Tensor) -> Tensor:
        """Turn final states into slot inputs: rescaled to the size of an embedding, and marked."""
        if self.projection is not None:
            states = states @ self.projection.T
        if self.settings.norm_eps is not None:
            states = F.rms_norm(states, states.shape[-1:], eps=self.settings.norm_eps)
        return states * self.gain + self.role

    def logits(self, states: Tensor) -> Tensor:
        """Return the fp32 logits [1, n, V] of final states [1, n, width]."""
        logits: Tensor = self.model.get_output_embeddings()(states).float()
        logits = logits / getattr(self.model.config, "logits_scaling", 1.0)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _verified(self, input_ids: Tensor, max_new_tokens: int) -> Iterator[int]:
        """Yield the greedy tokens: slots 2 to horizon draft, and one pass of the plain model verifies."""
        text = Stream(self.model, self.settings.window)
        states = text.read(input_ids, 0)[:, -1:]
        made = 0
        while made < max_new_tokens:
            draft = argmax(self.logits(states)[0])  # (1, n); its first token is the model's own
            room = min(self.settings.horizon, max_new_tokens - made)
            if room > 1:
                slots = self.think(text, states)
                text.forget(self.settings.horizon)
                draft = torch.cat((draft, argmax(self.logits(slots[:, 1:room])[0]).T), dim=1)
            states = text.read(draft, input_ids.size(1) + made)
            checked = argmax(self.logits(states)[0])[:-1, 0]  # the plain model's choice for each later token
            right = 1 + int((checked == draft[0, 1:]).cumprod(0).sum())
            yield from draft[0, :right].tolist()
            made += right
            text.forget(draft.size(1) - right)
            states = states[:, right - 1 : right]

    def _check(self, input_ids: Tensor, max_new_tokens: int, think: str, temperature: float) -> None:
        longest = self.model.config.max_position_embeddings
        if THINK.fullmatch(think) is None:
            raise ValueError(f"think = {think!r}: it is first, every:TOKENS, probability:P, entropy:NATS or verify")
        if think == "verify" and temperature:
            raise ValueError(f"think = 'verify' checks greedy drafts: leave temperature out (it is {temperature})")
        if input_ids.ndim != 2 or input_ids.size(0) != 1 or input_ids.size(1) == 0:
            raise ValueError(f"input_ids of shape {tuple(input_ids.shape)}: one prompt at a time, [1, T] with T > 0")
        if input_ids.size(1) + max_new_tokens > longest:
            raise ValueError(
                f"{input_ids.size(1)} prompt tokens + {max_new_tokens} new ones: the model has {longest} positions"
            )


def fires(think: str, number: int, logits: Tensor, generator: torch.Generator) -> bool:
    """Return whether to think before new token `number` (from 0), for which the plain model gives logits [V]."""
    kind, _, value = think.partition(":")
    if kind == "first":
        return number == 0
    if kind == "every":
        return number % int(value) == 0
    if kind == "probability":
        return bool(torch.rand((), generator=generator, device=logits.device) < float(value))
    return bool(torch.distributions.Categorical(logits=logits).entropy() > float(value))


def argmax(logits: Tensor) -> Tensor:
    """Return the likeliest tokens [n, 1] of logits [n, V]."""
    return logits.argmax(-1, keepdim=True)
