"""Count the memory that the forward and backward pass of one micro-batch take, before a run.

Both passes run as in training, on tensors that have shapes but no values. So there are no formulas: every family,
objective, precision and way of recomputing is counted as it is.
"""

import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.build import blocks_of, build_model, compiles, masks_in_blocks
from plumbline.launcher.runtime.ranks.deepspeed_start import UNFUSED
from plumbline.model.attention.context import attention_context
from plumbline.model.attention.softmax import SoftmaxAttention
from plumbline.model.linear_cross_entropy import chunk_tokens
from plumbline.model.objectives.objective import TrainedLM
from plumbline.model.parameterization.tensors import freeze
from plumbline.model.recomputation import Recomputed, recompute


class LiveMemory(TorchDispatchMode):
    """Count the bytes of all live tensors that operators create, each storage once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                self.count(tensor.untyped_storage())
        return results

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed, unless it is counted already."""
        if storage._cdata in self._sizes:
            return
        self._sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


class _FusedNorm(torch.autograd.Function):
    """Save for an RMS norm's backward pass what the GPU kernel saves: its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        """Return a tensor like the norm of x."""
        ctx.save_for_backward(x, weight, x[..., :1].float())
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return tensors like the gradients."""
        _, weight, _ = ctx.saved_tensors
        return torch.empty_like(gradient), None if weight is None else torch.empty_like(weight)


def _fused_norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    if norm.weight is not None and norm.weight.dtype != x.dtype:  # as under autocast, where torch does not fuse
        return nn.functional.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)
    return _FusedNorm.apply(x, norm.weight)  # type: ignore[no-any-return, no-untyped-call]


def _like_compiled(logits: Tensor, *_unused: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors like the loss of a chunk of logits and its gradient: compiled code allocates nothing else."""
    cross_entropy = logits.new_empty(len(logits), dtype=torch.float32)
    return cross_entropy.sum(), cross_entropy, torch.empty_like(logits)


def _keep_as_on_gpu(model: TrainedLM) -> None:
    """Make modules save what they save on GPUs, where kernels save less but chunks of logits are larger."""
    model.lm_head.chunk = chunk_tokens(len(model.lm_head.weight), on_gpu=True)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            setattr(module, "forward", partial(_fused_norm, module))  # noqa: B010 - a method, to mypy
        elif isinstance(module, SoftmaxAttention):
            module.dropout = 0.0  # the flash kernel draws it again and saves no mask
            module.counts_for_gpu = True


@contextmanager
def _computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the default of new tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


PERIOD = 4
"""Blocks after which a deep model repeats itself, also where only every second or fourth block is recomputed."""


def activation_bytes(config: Config, micro_batch: int, stage: int, recomputed: Recomputed, on_gpu: bool) -> int:
    """Return the peak bytes of one micro-batch in the forward and backward pass, without weights and gradients.

    Blocks are counted uncompiled; compiled ones save less. The loss counts as compiled on a GPU that compiles it, and
    float8 layers count as bf16. For a deep model with one pass through its blocks, two shallow models are counted and
    extrapolated: each further PERIOD adds as much. An evaluation materializes masks, of which training has blocks that
    are negligible, and the logits of tasks. It may then take more.

    Args:
        config: the run.
        micro_batch: sequences of a rank's micro-batch.
        stage: ZeRO stage, which decides whether weights are bf16, or fp32 and rounded when used.
        recomputed: what the backward pass computes again.
        on_gpu: count what GPU kernels save, rather than CPU kernels.
    """
    in_blocks = on_gpu and masks_in_blocks(config, torch.device("cuda"))
    trained = _trained_bytes(_without_masks(config) if in_blocks else config, micro_batch, stage, recomputed, on_gpu)
    return max(trained, masks_written_out(config) + _logits_of_tasks(config))


def _trained_bytes(config: Config, micro_batch: int, stage: int, recomputed: Recomputed, on_gpu: bool) -> int:
    depth = config.model.num_hidden_layers
    more = depth % PERIOD + 2 * PERIOD
    # Other objectives pass through the blocks more than once, and the place of their peak may change with depth
    if depth <= more or not config.objective.is_plain:
        return count_activations(config, micro_batch, stage, recomputed, on_gpu)
    fewer, counted = (
        count_activations(_of_depth(config, layers), micro_batch, stage, recomputed, on_gpu)
        for layers in (more - PERIOD, more)
    )
    return counted + (counted - fewer) * (depth - more) // PERIOD


def _of_depth(config: Config, layers: int) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"num_hidden_layers": layers})})


def _without_masks(config: Config) -> Config:
    model = config.model.model_copy(update={"document_mask": False, "sliding_window": None})
    return config.model_copy(update={"model": model})


def masks_written_out(config: Config) -> int:
    """Return the peak bytes of an evaluated micro-batch's mask, while it is made or as the bf16 bias of kernels.

    Evaluation has `data.micro_batch_size` sequences, also where the ranks of a training step divide fewer.
    """
    memory = LiveMemory()
    with FakeTensorMode(), memory:
        numbers = torch.zeros(config.data.micro_batch_size, config.data.sequence_length, dtype=torch.int32)
        documents = numbers if config.model.document_mask else None
        mask = attention_context(config.model, numbers, 0, documents, torch.bfloat16).mask
        assert isinstance(mask, Tensor | None), "no blocks were asked for"
        return max(memory.peak, 0 if mask is None else 3 * mask.numel())  # itself and the bias


def _logits_of_tasks(config: Config) -> int:
    """Return the bytes of the logits of an evaluated task, in fp32 and as they are copied for the loss."""
    data = config.data
    if not data.held_out_tasks:
        return 0
    return 8 * data.micro_batch_size * data.sequence_length * config.model.vocab_size


def count_activations(config: Config, micro_batch: int, stage: int, recomputed: Recomputed, on_gpu: bool) -> int:
    """Return the same as `activation_bytes`, counted at the model's own depth."""
    bf16 = config.deepspeed.precision == "bf16"
    autocast: AbstractContextManager[object] = nullcontext()
    if bf16 and stage == 0:
        autocast = torch.autocast("cpu", torch.bfloat16)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=UNFUSED)
        model = build_model(config, _computing_in(torch.bfloat16 if bf16 and stage > 0 else torch.float32)).train()
        freeze(model, config.model)
        recompute(blocks_of(model), recomputed)
        if on_gpu:
            _keep_as_on_gpu(model)
        memory = LiveMemory()
        for parameter in model.parameters():
            memory.count(parameter.untyped_storage())
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        shape = (micro_batch, config.data.sequence_length)
        batch = {
            **{name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "labels")},
            **{name: torch.zeros(shape, dtype=torch.int32) for name in ("document_ids", "positions")},
            "sample_index": torch.zeros(micro_batch, dtype=torch.int64),
        }
        model.objective.on_step(model, 1)
        weights = memory.now
        if on_gpu and compiles(config, torch.device("cuda")):
            model.lm_head.on_chunk = _like_compiled
        with memory:
            with autocast:
                losses = TrainedLM.losses(model, batch, 1)
            losses.terms.sum().backward()
    return memory.peak - weights


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
