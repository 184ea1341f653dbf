"""Open a trained model for evaluation, sampling or export: a run, one of its checkpoints, or a Hugging Face folder.

Code in the folder is never run, so it is safe to open untrusted models.
"""

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from plumbline.data.damage import read_object, reading
from plumbline.data.tokenizers import check_words, holds_tokenizer
from plumbline.launcher.runtime.checkpoint import store as checkpoint
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.build import build_model, without_objective
from plumbline.launcher.runtime.models.averages import open_weights
from plumbline.launcher.runtime.models.finite import check_finite
from plumbline.launcher.runtime.models.whole import check_causal, check_whole
from plumbline.launcher.runtime.scoring.scores import LossSums, loss_sums
from plumbline.launcher.runtime.system.log import LOG
from plumbline.model.decoder import CausalLM
from plumbline.model.export import thinker
from plumbline.model.export.native import MODEL_TYPE
from plumbline.model.generation import Reader, cached_reader, continue_together
from plumbline.model.linear_cross_entropy import IGNORED
from plumbline.model.lookahead.generation import Drafts, Trigger, generate_thinking, generate_verified
from plumbline.model.objectives.objective import Decoding, Objective, TrainedLM
from plumbline.model.parameterization.tensors import freeze
from plumbline.model.sampling import Sampling, check_room
from plumbline.model.stock_inputs import CACHE, cache_argument, stock_inputs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def device_named(name: str | None) -> torch.device:
    """Return the device that `--device` names, or without a name the first GPU, or the CPU if there is none.

    Raises:
        ValueError: there is no such device here.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # unknown, cannot compute, no CUDA, or no such GPU
        raise ValueError(f"--device {name}: is not here: {str(error).splitlines()[0]}; give another") from error
    return device


@dataclass(frozen=True)
class LoadedModel:
    """Hold a model in evaluation mode with what is needed to feed it."""

    module: nn.Module
    """Our CausalLM, or a stock transformers model."""
    source: Path
    """Checkpoint or Hugging Face folder."""
    tokenizer_path: Path | None
    config: Config | None
    """The run's configuration, or None for a Hugging Face folder."""
    step: int | None
    tokens: int | None
    average: str | None = None
    """Which average the weights are, in words, or None for the weights of one step."""

    @property
    def device(self) -> torch.device:
        """Return the device that the weights are on."""
        return next(self.module.parameters()).device

    @property
    def context_length(self) -> int | None:
        """Return the longest sequence that the model accepts, in tokens, or None if it sets no limit."""
        return getattr(self._text_config, "max_position_embeddings", None)

    @property
    def vocab_size(self) -> int:
        """Return the number of ids that the model has an embedding for."""
        return int(self._text_config.vocab_size)

    @property
    def _text_config(self) -> Any:
        """Return the configuration of the text part; a stock model may have other parts."""
        config: Any = self.module.config
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    @property
    def thinks(self) -> bool:
        """Return whether it was loaded with an objective that can predict with thoughts."""
        return isinstance(self.module, TrainedLM) and self.module.objective.thinks

    def warn_without_thoughts(self, remedy: str = "") -> None:
        """Warn of predictions without thoughts that its objective has not trained, and say what to do about it."""
        warning = None if self.config is None else self.config.objective.without_thoughts
        if warning is not None:
            LOG.warning(f"{warning}{remedy}")

    @torch.no_grad()
    def logits(self, batch: Mapping[str, Any], thinking: bool = False) -> Tensor:
        """Return fp32 logits [B, T, V] after each token, given the true ones before, with thoughts if `thinking`."""
        batch = self._to_device(batch)
        if thinking:
            return self._trained.thinking_logits(batch)
        if isinstance(self.module, CausalLM):
            return self.module.logits(batch)
        return self.module(**stock_inputs(self.module, batch)).logits.float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def evaluate(self, batch: Mapping[str, Any], thinking: bool = False) -> LossSums:
        """Return the sums of the loss on a batch, of predictions with thoughts if `thinking`."""
        batch = self._to_device(batch)
        labels = batch["labels"]
        if thinking:
            nats = self._trained.thinking_cross_entropy(batch)
        elif isinstance(self.module, CausalLM):
            nats = self.module.cross_entropy(batch)
        else:
            logits = self.logits(batch).flatten(0, 1)
            nats = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return loss_sums(nats, labels)

    def _to_device(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    @property
    def _trained(self) -> TrainedLM:
        """Return the module of a model that thinks."""
        assert isinstance(self.module, TrainedLM), "who asks for thoughts has asked `thinks` before"
        return self.module

    @property
    def decoding(self) -> Decoding:
        """Return how text is decoded with thoughts.

        Raises:
            ValueError: the model was not trained for it, or is an exported folder.
        """
        refuse_own_thinker(self.source)
        objective = self.module.objective if isinstance(self.module, TrainedLM) else None
        decoding = None if objective is None else objective.decoding
        if decoding is None:
            reason = Objective.undecodable if objective is None else objective.undecodable
            raise ValueError(f"{self.source}: {reason}")
        return decoding

    def continuation(
        self,
        prompt: list[int],
        max_new_tokens: int,
        *,
        think: Trigger | Drafts | None = None,
        sampling: Sampling,
        seed: int = 0,
        stop_at: int | None = None,
    ) -> Iterator[int]:
        """Yield the token ids that follow the prompt, until `stop_at` or max_new_tokens.

        Args:
            prompt: token ids.
            max_new_tokens: most tokens to yield.
            think: when to think, or the counters of verified drafts, which are greedy.
            sampling: how tokens are drawn; verified drafts are greedy.
            seed: seed of the sampling.
            stop_at: the last token.

        Raises:
            ValueError: see `continuations`, and `decoding` for thoughts.
        """
        if think is None:
            steps = self.continuations([prompt], max_new_tokens, sampling=sampling, seeds=[seed], stop_at=stop_at)
            yield from (token for said in steps for token in said if token is not None)
            return
        decoding = self.decoding  # raises where the module is not ours
        model, tokens = self._trained, torch.tensor([prompt], dtype=torch.int64, device=self.device)
        if isinstance(think, Drafts):
            stream = generate_verified(model, decoding.thinker, tokens, max_new_tokens, think)
        else:
            stream = generate_thinking(
                model,
                decoding.thinker,
                decoding.commits,
                tokens,
                max_new_tokens,
                think,
                sampling=sampling,
                generator=torch.Generator(self.device).manual_seed(seed),
            )
        for token in stream:
            yield int(token.item())
            if token == stop_at:
                return

    def continuations(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        seeds: Sequence[int],
        sampling: Sampling,
        stop_at: int | None = None,
    ) -> Iterator[list[int | None]]:
        """Continue several prompts together, step by step; see `model.generation.continue_together`.

        Each row has its own seed, so that it continues as it would alone, up to the rounding of larger products.

        Raises:
            ValueError: a prompt is empty, or a continuation would exceed the model's context.
        """
        for prompt in prompts:
            check_room(self.context_length, len(prompt), max_new_tokens)
        if isinstance(self.module, CausalLM):
            read = cached_reader(self.module, len(prompts), max(map(len, prompts)) + max_new_tokens)
        else:
            read = stock_reader(self.module)
        return continue_together(
            read,
            prompts,
            max_new_tokens,
            generators=[torch.Generator(self.device).manual_seed(seed) for seed in seeds],
            sampling=sampling,
            stop_at=stop_at,
        )


def refuse_own_thinker(folder: Path) -> None:
    """Refuse to think with an exported folder that has its own code for that.

    Raises:
        ValueError: the folder has such code.
    """
    if (folder / thinker.FILE).is_file():
        raise ValueError(
            f"{folder}: an exported folder thinks with its own lookahead.py, as its README.md shows; "
            "give --model the run to think here"
        )


def stock_reader(module: nn.Module) -> Reader:
    """Return a reader that uses a transformers model and its cache, or rereads all tokens if it has no cache."""
    keeps = "logits_to_keep" in inspect.signature(module.forward).parameters
    argument = cache_argument(module)
    options: dict[str, Any] = {"use_cache": True, **({"logits_to_keep": 1} if keeps else {})}
    seen: Tensor | None = None
    cache: Any = None

    def read(tokens: Tensor) -> Tensor:
        nonlocal seen, cache
        seen = tokens if seen is None else torch.cat((seen, tokens), dim=1)
        if cache is None:
            said = module(input_ids=seen, **options)
        else:
            said = module(input_ids=tokens, **{argument: cache}, **options)
        cache = next((held for name in CACHE if (held := getattr(said, name, None)) is not None), None)
        return said.logits[:, -1].float()  # type: ignore[no-any-return]

    return read


def load_model(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    average: str | None = None,
    with_objective: bool = False,
) -> LoadedModel:
    """Open a run folder (its newest whole checkpoint), a checkpoint folder, or a Hugging Face folder.

    Args:
        path: the folder.
        device: where the weights go; None means the first GPU, or the CPU if there is none.
        dtype: what they are rounded to.
        average: which weights to use instead of the checkpoint's own; see averages.py.
        with_objective: whether to load the parameters of its training objective, for decoding with thoughts.

    Raises:
        ValueError: there is nothing to open, a checkpoint is damaged, or a weight is not finite.
    """
    path, device = Path(path), device if isinstance(device, torch.device) else device_named(device)
    if is_ours(path):
        return _load_checkpoint(path, device, dtype, average, with_objective)
    if average is not None:
        raise ValueError(f"--average {average}: {path} is a Hugging Face folder; give a run or a checkpoint")
    return _load_hugging_face(path, device, dtype)


def is_ours(path: Path) -> bool:
    """Return whether a folder is a run or a checkpoint, and not a Hugging Face folder.

    Raises:
        ValueError: it is none of these.
    """
    if (path / checkpoint.MANIFEST).is_file() or (path / CHECKPOINTS).is_dir():
        return True
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{path}: neither a run (checkpoints/), nor a checkpoint ({checkpoint.MANIFEST}), nor a Hugging Face "
            "folder (config.json)"
        )
    return False


def beside(checkpoint_folder: Path, name: str) -> Path | None:
    """Return a file or folder of the run that a checkpoint belongs to, or None if there is none.

    The checkpoint may be a link into a run, or the run's folder of checkpoints a link to another disk.
    """
    places = (path.parent.parent / name for path in (checkpoint_folder.resolve(), checkpoint_folder.absolute()))
    return next((place for place in places if place.exists()), None)


def tokenizer_beside(folder: Path) -> Path | None:
    """Return the tokenizer of the run that a checkpoint belongs to, or None."""
    return beside(folder, "tokenizer")


def tokenizer_within(folder: Path) -> Path | None:
    """Return a Hugging Face folder as that of its tokenizer, or None if it has none, like the export of a task."""
    return folder if holds_tokenizer(folder) else None


def _load_checkpoint(
    path: Path, device: torch.device, dtype: torch.dtype, average: str | None, with_objective: bool
) -> LoadedModel:
    opened = open_weights(path, average)
    check_finite(opened.weights, opened.folder, "the run had diverged by then: give an earlier checkpoint")
    config, weights, manifest = opened.config, opened.weights, checkpoint.read_manifest(opened.folder)
    with reading(opened.folder):
        module = build_model(config if with_objective else without_objective(config), torch.device("meta"))
        if not with_objective:
            weights = {name: weight for name, weight in weights.items() if not name.startswith("objective.")}
        if config.model.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        module.load_state_dict(weights, assign=True)
    module.tie_weights()
    freeze(module, config.model)
    return LoadedModel(
        module=module.to(device, dtype).eval(),
        source=opened.folder,
        tokenizer_path=tokenizer_beside(opened.folder),
        config=config,
        step=manifest["step"],
        tokens=manifest["tokens"],
        average=opened.average,
    )


def _load_hugging_face(folder: Path, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    from transformers import AutoModelForCausalLM

    with opening(folder), torch.no_grad():
        # A native export runs with our own code, not with the copy in the folder
        entries = read_object(folder / "config.json")
        kind = native_classes()[1] if entries.get("model_type") == MODEL_TYPE else AutoModelForCausalLM
        # By default, Gemma2's class in transformers 5.20 uses a kernel that ignores its cap
        attention = "eager" if entries.get("attn_logit_softcapping") else None
        module, found = kind.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention, output_loading_info=True, trust_remote_code=False
        )
        if hasattr(module, "ct_decompress_hook"):  # compressed-tensors unpacks in the first forward, with a bar
            module(input_ids=torch.zeros(1, 1, dtype=torch.int64))
    check_causal(module.config, folder)
    check_whole(module, found, folder)
    check_finite(module.state_dict(), folder, "copy the folder again, or give another model")
    return LoadedModel(module.to(device).eval(), folder, tokenizer_within(folder), None, None, None)


@contextmanager
def opening(folder: Path) -> Iterator[None]:
    """Open a Hugging Face folder quietly, and turn whatever fails into an error that names the folder.

    Raises:
        ValueError: the folder cannot be opened; says why.
    """
    try:
        with quiet_transformers():
            yield
    except ImportError as error:  # of the package that the folder's quantization needs
        raise ValueError(f"{folder}: {error} (pip install -e '.[quantize]' brings compressed-tensors)") from error
    except SafetensorError as error:
        raise ValueError(f"{folder}: a file of weights is cut short or damaged; copy it again ({error})") from error
    except Exception as error:  # unchecked values of a config.json can fail anywhere in transformers
        reason = "its model is Python code of its own (auto_map in config.json), which is not run here"
        reason = reason if "trust_remote_code" in str(error) else f"transformers cannot load this folder: {error}"
        raise ValueError(f"{folder}: {reason}") from error


def native_classes() -> tuple[Any, Any]:
    """Return the classes of configuration and model of native exports."""
    from plumbline.model.export.native.configuration_plumbline import PlumblineConfig
    from plumbline.model.export.native.modeling_plumbline import PlumblineForCausalLM

    return PlumblineConfig, PlumblineForCausalLM


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress bars of transformers and compressed-tensors, and the output of libraries that they import.

    Nothing is printed on standard output, which is reserved for --json: accelerate imports DeepSpeed, which logs there.
    Messages of transformers about the weights are still shown, because its log handler keeps the original standard
    error; not those about configurations, since it checks the defaults of a class that is saved, too. The bars and the
    loggers stay silent afterwards.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    for name in ("torchao", "torch.utils._pytree", "transformers.configuration_utils"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        yield


def load_tokenizer(path: Path) -> Any:
    """Return the Hugging Face tokenizer stored in a folder.

    Raises:
        DamagedFileError: it cannot be read.
    """
    from transformers import AutoTokenizer

    with reading(f"{path} (its tokenizer)"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        check_words(tokenizer)
    return tokenizer
