"""Declare the configuration's sections that belong to the run itself; others stand beside what they configure."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt, WithJsonSchema
from pydantic import model_validator as validator

from plumbline.data.paths import HomePath
from plumbline.launcher.runtime.optim.duration import Duration
from plumbline.launcher.runtime.trackers import TrackerName


class RunConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Say where a run lives and what makes it repeatable."""

    name: str = Field(min_length=1, pattern=r"^[\w.+-]*[\w+-][\w.+-]*$")
    """Name of the run and of its folder: letters, digits, _ . + and -, not dots alone."""
    root: HomePath = Field(default="runs", min_length=1)
    """Folder in which run folders lie. It is made if need be."""
    seed: NonNegativeInt = Field(default=1, json_schema_extra={"shapes": "run"})
    """Seed of the initial weights, the order of the data and dropout."""
    deterministic: bool = Field(default=False, json_schema_extra={"shapes": "course"})
    """Compute every step to the last bit again when it is repeated, on GPUs as well, with kernels that are slower
    (docs/runs.md)."""
    reproducible: Literal["any_ranks"] | None = Field(default=None, json_schema_extra={"shapes": "course"})
    """any_ranks: write the same losses and weights to the last bit on 1, 2, 4, ... ranks, as many as a power of two
    divides the micro-batches of a step (docs/proofs.md); deterministic is on with it. None: the same up to the order of
    summation, and to the last bit on as many ranks."""

    @property
    def repeats(self) -> bool:
        """Return whether a step that is repeated is to have the same bits, on a GPU as well."""
        return self.deterministic or self.reproducible is not None

    @property
    def folder(self) -> Path:
        """Return the folder of the run, root/name."""
        return Path(self.root) / self.name


class ProfileConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Say which steps are traced."""

    start: PositiveInt
    """First step that is. The first steps of a start are slower than others: choose a later one."""
    steps: PositiveInt = 3
    """How many are."""


class TrainConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Say how long to train and how often to look."""

    steps: PositiveInt | None = None
    """Length of the run in optimizer steps. Give this or tokens."""
    tokens: PositiveInt | None = None
    """Length of the run in training tokens, rounded up to whole steps. Give this or steps."""
    log_interval: PositiveInt = 1
    """Steps from one line of metrics.jsonl to the next."""
    eval_interval: PositiveInt | None = None
    """Steps from one evaluation on held-out text to the next. None: only at the end."""
    eval_batches: PositiveInt | None = 16
    """Held-out micro-batches of one evaluation, over all ranks: another data.micro_batch_size scores other text. None:
    all of the held-out text."""
    initialize_from: HomePath | None = Field(default=None, json_schema_extra={"shapes": "run"})
    """Start from the weights of a model of a class that export.py writes: a Hugging Face folder, or hf:NAME. The model
    section may then be left out. None: weights are drawn."""
    sample_prompts: list[str] = []
    """Texts that the final model continues, into samples.txt."""
    ema_half_life_tokens: PositiveInt | None = None
    """Also keep an exponential moving average of the weights, in which a state's share halves in this many tokens
    (docs/averages.md). None: no average."""
    activation_checkpointing: Literal["none", "selective", "full", "auto"] | PositiveInt = "none"
    """What the backward pass computes again instead of keeping it. none: nothing; selective: all of a block but matrix
    products and attention; full: every block, about a third more computation; n: every n-th block; auto: the least that
    the memory of a GPU asks for, by an estimate (docs/performance.md)."""
    compile: bool | None = None
    """Compile every block with torch.compile: the first step takes long, later ones are quicker. None: on GPUs."""
    block_masks: bool = True
    """Where blocks are compiled on a GPU in bf16, let FlexAttention skip what documents and windows mask in training
    (docs/performance.md). false: masks are written out, as they are everywhere else."""
    profile: ProfileConfig | None = Field(default=None, json_schema_extra={"shapes": "nothing"})
    """Trace some steps on rank 0, into profile/ of the run folder: a trace and a table (docs/performance.md). None:
    none."""
    hang_minutes: PositiveFloat | None = Field(default=20.0, json_schema_extra={"shapes": "nothing"})
    """Minutes without a step, a batch of an evaluation, the next part of a start or of a checkpoint that is waited for,
    after which the run ends with exit code 86 and the stacks of all ranks in its folder. None: never."""

    @validator(mode="before")
    @classmethod
    def _read_earlier(cls, values: Any) -> Any:
        """Read `activation_checkpointing: true` or `false`, as run folders and checkpoints of before have it."""
        if not isinstance(values, dict) or not isinstance(values.get("activation_checkpointing"), bool):
            return values
        return {**values, "activation_checkpointing": "full" if values["activation_checkpointing"] else "none"}

    @validator(mode="after")
    def _check(self) -> "TrainConfig":
        _ = self.length
        return self

    @property
    def length(self) -> Duration:
        """Return the length of training, in steps or in tokens; of a branch, its parent's."""
        return Duration.one_of(steps=self.steps, tokens=self.tokens)


STAGES = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 3}, {"const": "auto"}]}


class DeepSpeedConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Say what to ask of DeepSpeed. The rest of its configuration is generated, with every key explicit."""

    zero_stage: Annotated[int, Field(ge=0, le=3), WithJsonSchema(STAGES)] = 1
    """What is divided over the ranks. 0: nothing; 1: optimizer states; 2: gradients as well; 3: weights as well. auto:
    1 if it fits the devices that a run starts on, else of 2 and 3 that with the shorter step (docs/performance.md)."""
    precision: Literal["bf16", "fp32"] = Field(default="bf16", json_schema_extra={"shapes": "state"})
    """bf16: compute in bf16 with fp32 master weights and fp32 gradient accumulation; fp32: do all in fp32."""
    communication_dtype: Literal["fp32", "bf16"] = Field(default="fp32", json_schema_extra={"shapes": "course"})
    """In which precision gradients are summed over ranks; bf16 sends half of the bytes and rounds every partial sum
    (docs/performance.md)."""
    offload_optimizer: bool = False
    """Keep optimizer states in CPU memory and update there (stages 1 to 3)."""
    bucket_size: PositiveInt | None = Field(default=None, multiple_of=2)
    """Elements of one reduction or gather bucket, but no more than the model has; more make fewer, larger messages and
    take more memory. None: those of the largest block, but 2^24 at least. At stage 2 never fewer than the largest
    tensor has."""
    timeout_minutes: float = Field(default=30.0, gt=0, le=10_080)
    """Minutes that a collective waits for a slow rank before the job fails."""

    @validator(mode="after")
    def _check(self) -> "DeepSpeedConfig":
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer = true needs zero_stage 1, 2 or 3")
        return self


class LocalCheckpointConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Say where each node keeps a checkpoint of its own ranks, between those of the run folder."""

    path: HomePath
    """Absolute path of a folder on storage of the node's own (NVMe, /dev/shm), which outlives a job."""
    interval: PositiveInt
    """Steps from one checkpoint there to the next; below checkpoint.interval."""

    @validator(mode="after")
    def _check(self) -> "LocalCheckpointConfig":
        if not Path(self.path).is_absolute():
            raise ValueError(f"path = {self.path}: give the absolute path of a folder on each node's own storage")
        return self


class CheckpointConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Say when to save and what to keep. The last step is always saved."""

    interval: PositiveInt | None = None
    """Steps from one checkpoint to the next. None: only at the end, and when the job is asked to stop."""
    keep_last: PositiveInt = 2
    """How many of the newest checkpoints stay."""
    keep_every: PositiveInt | None = None
    """Checkpoints at multiples of this many steps stay for ever. None: none do."""
    background: bool = True
    """Write behind training, which then waits only for the copy to host memory; a second one waits for the first."""
    max_failures: PositiveInt = 10
    """Checkpoints in a row that could not be written, after which training ends with exit code 88."""
    local: LocalCheckpointConfig | None = None
    """Also save on the nodes, where it is quick: a resume on the same nodes goes on from there (docs/runs.md). None:
    only in the run folder."""

    @validator(mode="after")
    def _check(self) -> "CheckpointConfig":
        if self.local is not None and self.interval is not None and self.local.interval >= self.interval:
            raise ValueError(
                f"local.interval = {self.local.interval} is not below checkpoint.interval = {self.interval}, so that a "
                "local checkpoint would never be the newest: lower it"
            )
        return self


class MetricsConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Say where numbers go. metrics.jsonl is always written."""

    trackers: list[TrackerName] = ["tensorboard"]
    """Where else numbers go: tensorboard (files in the run folder), wandb, mlflow, trackio (docs/runs.md)."""
    project: str = Field(default="plumbline", min_length=1)
    """What wandb and trackio list the run under; to mlflow, its experiment."""
    peak_tflops: PositiveFloat | None = None
    """Peak of one device for MFU, in TFLOP/s. None: known GPUs by name, others measured (a matrix product)."""
    diagnostics_interval: PositiveInt | None = 100
    """Steps from one observation of activations, gradients and updates to the next (docs/diagnostics.md). None: never,
    and no int8 loss at evaluations."""
    diagnostics_tokens: int = Field(default=8192, ge=2)
    """Tokens per rank that an observation looks at, at most."""

    @validator(mode="before")
    @classmethod
    def _read_earlier(cls, values: Any) -> Any:
        """Read `tensorboard: true` or `false`, as run folders and checkpoints of before have it."""
        if not isinstance(values, dict) or not isinstance(values.get("tensorboard"), bool):
            return values
        others = {key: value for key, value in values.items() if key != "tensorboard"}
        return {"trackers": ["tensorboard"] if values["tensorboard"] else [], **others}
