"""Adapt a loaded model to lm-evaluation-harness: likelihoods of texts and continuations, greedy continuations.

Tokens, windows and truncation are those of lm_eval's own class for Hugging Face models, HFLM, so that a run and its
export get the same numbers from both. This module needs lm_eval, which is optional and slow to import; `tasks.py`
imports it when tasks are requested.
"""

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from plumbline.launcher.runtime.models.open import LoadedModel
from plumbline.model.sampling import GREEDY

Scored = tuple[object, list[int], list[int]]
"""Texts that lm_eval passes along, then the tokens of the context and of the continuation."""

UNLIMITED = 2048
"""Most tokens of a forward pass for a model without a limit, as in HFLM."""


class HarnessModel(TemplateLM):
    """Answer the requests of lm_eval's tasks; `loglikelihood` is inherited and calls `_loglikelihood_tokens`."""

    def __init__(self, model: LoadedModel, tokenizer: Any, batch_size: int = 8) -> None:
        """Wrap a model: any module that LoadedModel takes, including quantized ones.

        Args:
            model: the model to score.
            tokenizer: the model's own, of transformers.
            batch_size: sequences in one forward pass.

        Raises:
            ValueError: the tokenizer has no token to put before a text.
        """
        super().__init__()
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self._device = model.device
        prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if prefix is None:
            raise ValueError(
                f"{model.source}: its tokenizer has neither bos_token nor eos_token, and the first token of a text is "
                "predicted from one of them; set eos_token in tokenizer_config.json"
            )
        self._prefix: int = prefix

    @property
    def eot_token_id(self) -> int | None:
        """Return the token that ends a text."""
        return self.tokenizer.eos_token_id  # type: ignore[no-any-return]

    @property
    def prefix_token_id(self) -> int:
        """Return the token before a text, as lm_eval's own models choose it: beginning-of-text, else end-of-text."""
        return self._prefix

    @property
    def max_length(self) -> int:
        """Return the most tokens of one forward pass."""
        return self.model.context_length or UNLIMITED

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return token ids; by default with the tokenizer's own prefix if the text does not begin with it."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)  # type: ignore[no-any-return]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability (nats) of each whole text, in windows that share no predicted token."""
        windows: list[Scored] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += nats
        return totals

    def _loglikelihood_tokens(self, requests: Sequence[Scored], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability (nats) after its context, and whether it is the greedy one.

        If both are too long for the model, the beginning is cut.

        Raises:
            ValueError: a continuation alone is longer than the model's context, or has no tokens.
        """
        for texts, _, continuation in requests:
            if not continuation:  # it would be certain, and win against every other choice
                raise ValueError(
                    f"{texts!r}: the second text adds no token to the first, because it is empty or the tokenizer "
                    "joins the two; change the task's target_delimiter, or where its doc_to_text ends"
                )
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            raise ValueError(
                f"a continuation of {longest} tokens does not fit {self.model.source}, which sees {self.max_length}; "
                "choose tasks with shorter answers"
            )
        pairs = [(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
        # Longest first: rows of a batch have similar lengths, and running out of memory shows at once
        order = sorted(range(len(pairs)), key=lambda number: -sum(map(len, pairs[number])))
        scores: dict[int, tuple[float, bool]] = {}
        for start in tqdm(range(0, len(order), self.batch_size), unit="batch", disable=disable_tqdm or None):
            numbers = order[start : start + self.batch_size]
            batch = [pairs[number] for number in numbers]
            inputs = [(context + continuation)[-self.max_length - 1 : -1] for context, continuation in batch]
            for number, row, log_probs, (_, continuation) in zip(
                numbers, inputs, self._log_probs(inputs), batch, strict=True
            ):
                predicted = log_probs[len(row) - len(continuation) : len(row)]
                labels = torch.tensor(continuation, dtype=torch.int64, device=predicted.device)
                nats = predicted.gather(1, labels[:, None]).double().sum().item()
                scores[number] = (nats, bool((predicted.argmax(-1) == labels).all()))
        return [scores[number] for number in range(len(pairs))]

    def _log_probs(self, rows: Sequence[list[int]]) -> Tensor:
        """Return log-probabilities [B, T, V] after each token. Padding is on the right, where no token sees it."""
        inputs = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        positions = torch.arange(inputs.size(1)).expand_as(inputs)
        batch = {"input_ids": inputs, "document_ids": torch.zeros_like(inputs), "positions": positions}
        return self.model.logits(batch).log_softmax(-1)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy continuation of each text, cut before the first of its `until` strings."""
        texts = []
        for request in tqdm(requests, unit="text", disable=disable_tqdm or None):
            context, options = request.args
            texts.append(self._continue(context, normalize_gen_kwargs(options)))
        return texts

    def _continue(self, context: str, options: dict[str, Any]) -> str:
        """Return one continuation.

        Raises:
            ValueError: random sampling is requested, or there is no room for a context.
        """
        if options["do_sample"]:
            raise ValueError("a task asks for do_sample, and only greedy decoding is there; remove it from the task")
        new_tokens: int = options["max_gen_toks"]
        room = self.max_length - new_tokens
        if room < 1:
            raise ValueError(
                f"max_gen_toks {new_tokens} leaves no room for a context: {self.model.source} sees {self.max_length} "
                "tokens in all; lower max_gen_toks in the task's generation_kwargs"
            )
        prompt = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        until = [until] if isinstance(until := options.get("until") or [], str) else until
        tokens: list[int] = []
        text: str = ""
        for token in self.model.continuation(prompt, new_tokens, sampling=GREEDY, stop_at=self.eot_token_id):
            tokens.append(token)
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            ends = [text.index(string) for string in until if string and string in text]
            if ends:
                return text[: min(ends)]
            said = self.tokenizer.decode(tokens)  # special tokens included: <|im_end|> of a chat may be in `until`
            if any(string in said for string in until if string):
                return text
        return text
