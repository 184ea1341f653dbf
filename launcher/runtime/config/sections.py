"""Declare the configuration's sections on the run itself; others are declared beside the code they configure."""

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt, WithJsonSchema, field_validator
from pydantic import model_validator as validator
from pydantic_core import PydanticCustomError

from plumbline.data.paths import HomePath
from plumbline.launcher.runtime.optim.duration import Duration
from plumbline.launcher.runtime.trackers import TrackerName

FolderName = Annotated[str, Field(min_length=1, pattern=r"^[\w.+-]*[\w+-][\w.+-]*$")]
"""Letters, digits, _ . + and -, not dots alone."""


class RunConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Define where a run is kept and what makes it repeatable."""

    name: FolderName
    """Name of the run and of its folder: letters, digits, _ . + and -, not dots alone."""
    root: HomePath = Field(default="runs", min_length=1)
    """Folder that contains the run folders. It is created if necessary."""
    seed: NonNegativeInt = Field(default=1, json_schema_extra={"shapes": "run"})
    """Seed of the initial weights, the order of the data and dropout."""
    deterministic: bool = Field(default=False, json_schema_extra={"shapes": "course"})
    """Make repeated steps identical to the last bit, on GPUs too, with slower kernels (docs/runs.md)."""
    reproducible: Literal["any_ranks"] | None = Field(default=None, json_schema_extra={"shapes": "course"})
    """any_ranks: write the same losses and weights to the last bit on 1, 2, 4, ... ranks, up to the largest power of
    two that divides the micro-batches of a step (docs/proofs.md); this implies deterministic. None: the same up to the
    order of summation, and to the last bit on the same number of ranks."""

    @property
    def repeats(self) -> bool:
        """Return whether repeated steps must have the same bits, on a GPU too."""
        return self.deterministic or self.reproducible is not None

    @property
    def folder(self) -> Path:
        """Return the folder of the run, root/name."""
        return Path(self.root) / self.name


class ProfileConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Choose the steps to trace."""

    start: PositiveInt
    """First traced step. The first steps of a start are slower than others: choose a later one."""
    steps: PositiveInt = 3
    """Number of traced steps."""


Recomputation = Literal["none", "selective", "full", "auto"]


class TrainConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Define how long to train, and how often to log and evaluate."""

    steps: PositiveInt | None = None
    """Length of the run in optimizer steps. Give this or tokens."""
    tokens: PositiveInt | None = None
    """Length of the run in training tokens, rounded up to whole steps. Give this or steps."""
    log_interval: PositiveInt = 1
    """Steps between lines of metrics.jsonl."""
    eval_interval: PositiveInt | None = None
    """Steps between evaluations on held-out text. None: only at the end."""
    eval_batches: PositiveInt | None = 16
    """Held-out micro-batches of one evaluation, over all ranks, so data.micro_batch_size affects which text is scored.
    None: all of the held-out text."""
    initialize_from: HomePath | None = Field(default=None, json_schema_extra={"shapes": "run"})
    """Start from the weights of a model of a class that export.py writes: a Hugging Face folder, or hf:NAME. The model
    section may then be omitted. None: weights are drawn at random."""
    sample_prompts: list[str] = []
    """Prompts whose continuations by the final model are written to samples.txt."""
    ema_half_life_tokens: PositiveInt | None = None
    """Half-life in tokens of an exponential moving average of the weights, kept in addition (docs/averages.md). None:
    no average."""
    activation_checkpointing: Recomputation | PositiveInt = "none"
    """What the backward pass recomputes instead of keeping it. none: nothing; selective: everything in a block except
    matrix products and attention; full: every block, about a third more computation; n: every n-th block; auto: the
    least that an estimate says fits the memory of a GPU (docs/performance.md)."""
    compile: bool | None = None
    """Compile every block with torch.compile: the first step takes long, later ones are faster. None: only on GPUs."""
    block_masks: bool = True
    """If blocks are compiled on a GPU in bf16, let FlexAttention skip what documents and windows mask in training
    (docs/performance.md). false: masks are materialized, as everywhere else."""
    profile: ProfileConfig | None = Field(default=None, json_schema_extra={"shapes": "nothing"})
    """Trace some steps on rank 0, and write a trace and a table to profile/ of the run folder (docs/performance.md).
    None: no trace."""
    hang_minutes: PositiveFloat | None = Field(default=20.0, json_schema_extra={"shapes": "nothing"})
    """Minutes without progress (a step, a batch of an evaluation, the next part of a start or of a checkpoint that is
    waited for) after which the run ends with exit code 86 and the stacks of all ranks in its folder. None: never."""

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _one_problem(cls, written: object) -> object:
        """Refuse what is neither, for which pydantic would name the two types in a line each."""
        if written in get_args(Recomputation) or (type(written) is int and written > 0):
            return written
        expected = f"{', '.join(get_args(Recomputation))}, or n for every n-th block"
        raise PydanticCustomError("literal_error", "it may be {expected}", {"expected": expected})

    @validator(mode="after")
    def _check(self) -> "TrainConfig":
        _ = self.length
        return self

    @property
    def length(self) -> Duration:
        """Return the length of training, in steps or in tokens; for a branch, its parent's."""
        return Duration.one_of(steps=self.steps, tokens=self.tokens)


STAGES = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 3}, {"const": "auto"}]}


class DeepSpeedConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Configure DeepSpeed. The rest of its configuration is generated, with every key explicit."""

    zero_stage: Annotated[int, Field(ge=0, le=3), WithJsonSchema(STAGES)] = 1
    """What is sharded over the ranks. 0: nothing; 1: optimizer states; 2: also gradients; 3: also weights. auto: 1 if
    it fits the devices that a run starts on, else the faster of 2 and 3 (docs/performance.md)."""
    precision: Literal["bf16", "fp32"] = Field(default="bf16", json_schema_extra={"shapes": "state"})
    """bf16: compute in bf16 with fp32 master weights and fp32 gradient accumulation; fp32: do all in fp32."""
    communication_dtype: Literal["fp32", "bf16"] = Field(default="fp32", json_schema_extra={"shapes": "course"})
    """Precision in which gradients are summed over ranks; bf16 sends half the bytes and rounds every partial sum
    (docs/performance.md)."""
    offload_optimizer: bool = False
    """Keep optimizer states in CPU memory and update there (stages 1 to 3)."""
    bucket_size: PositiveInt | None = Field(default=None, multiple_of=2)
    """Elements of one reduction or gather bucket, but no more than the model has; a larger value makes fewer, larger
    messages and takes more memory. None: those of the largest block, but at least 2^24. At stage 2 never fewer than the
    largest tensor has. At stage 1 in bf16 the least of a message, which has whole tensors."""
    timeout_minutes: float = Field(default=30.0, gt=0, le=10_080)
    """Minutes that a collective waits for a slow rank before the job fails."""

    @validator(mode="after")
    def _check(self) -> "DeepSpeedConfig":
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer = true needs zero_stage 1, 2 or 3")
        return self


class LocalCheckpointConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Define where each node keeps checkpoints of its own ranks, between those of the run folder."""

    path: HomePath
    """Absolute path of a folder on the node's own storage (NVMe, /dev/shm) that outlives a job."""
    interval: PositiveInt
    """Steps between checkpoints there; below checkpoint.interval."""

    @validator(mode="after")
    def _check(self) -> "LocalCheckpointConfig":
        if not Path(self.path).is_absolute():
            raise ValueError(f"path = {self.path}: give the absolute path of a folder on each node's own storage")
        return self


class CheckpointConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Define when to save and what to keep. The last step is always saved."""

    interval: PositiveInt | None = 1000
    """Steps between checkpoints. null: only at the end, and when the job is asked to stop; a crash loses the run."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Checkpoints at multiples of this many steps are kept forever. None: no others are kept."""
    background: bool = True
    """Write in the background of training, which then waits only for the copy to host memory; a second checkpoint waits
    for the first."""
    max_failures: PositiveInt = 10
    """Number of failed checkpoints in a row after which training ends with exit code 88."""
    local: LocalCheckpointConfig | None = None
    """Also save on the nodes, which is fast: a run on the same nodes resumes from there (docs/stopping.md). None: only
    in the run folder."""

    @validator(mode="after")
    def _check(self) -> "CheckpointConfig":
        if self.local is not None and self.interval is not None and self.local.interval >= self.interval:
            raise ValueError(
                f"local.interval = {self.local.interval} is not below checkpoint.interval = {self.interval}, so that a "
                "local checkpoint would never be the newest: lower it, or raise checkpoint.interval (null: the nodes "
                "alone keep checkpoints until the end)"
            )
        return self


class MetricsConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Define where metrics are written. metrics.jsonl is always written."""

    trackers: list[TrackerName] = ["tensorboard"]
    """Other destinations of metrics: tensorboard (files in the run folder), wandb, mlflow, trackio
    (docs/run-folder.md)."""
    project: str = Field(default="plumbline", min_length=1)
    """Project of the run in wandb and trackio; in mlflow, its experiment."""
    peak_tflops: PositiveFloat | None = None
    """Peak of one device for MFU, in TFLOP/s. None: by name for known GPUs, else measured with a matrix product."""
    diagnostics_interval: PositiveInt | None = 100
    """Steps between observations of activations, gradients and updates (docs/diagnostics.md). None: never, and no int8
    loss at evaluations."""
    diagnostics_tokens: int = Field(default=8192, ge=2)
    """Most tokens per rank in an observation."""
