"""The tables of a run file but [model], [precision] and [fp8]: every key with its type, default, unit and help.

A key stands once; reading, checking, `megaprec keys` and the saved run file all come from these fields. Defaults of
the optimizer are read from its classes. `[model]` is `models.config.ModelConfig`. Values are read strictly: 8.0 is not
a whole number and "true" is not true.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.update_rules import AdamW
from parallel.activation_checkpoint import Module
from tools.config.table import FilePath, Table, default_of

MOST = 2**31 - 1  # of a size that tensors have
MOST_RANKS = 2**20
MOST_STEPS = 2**53  # up to here a float holds every whole number


class Blended(Table):
    """One text or data set of a blend."""

    source: FilePath = Field(min_length=1, description="Text or data set, as in data.source.")
    weight: float = Field(gt=0, description="Share of the samples, relative to the sum of all weights.")


class Validated(Table):
    """One named set that the run evaluates."""

    name: str = Field(min_length=1, description="Name of the set in the log and in metrics.jsonl, as eval_loss/NAME.")
    source: FilePath = Field(min_length=1, description="Text or data set, as in data.source.")


class Data(Table):
    """Training data: text or token files, tokenizer, held-out part."""

    source: FilePath = Field(
        default="python",
        min_length=1,
        description='Training data: "python" (the source of Python\'s standard library), a text file, a folder, '
        "a .jsonl, .json or .parquet file, or the common prefix of a .bin and .idx pair.",
    )
    blend: tuple[Blended, ...] = Field(
        default=(),
        strict=False,
        description="Several data sets in place of data.source, each with the weight of its share: "
        '[{source = "a.jsonl", weight = 0.7}, {source = "b/", weight = 0.3}]; empty: data.source alone.',
    )
    text_field: str = Field(
        default="text",
        min_length=1,
        description="Name of the field of a .jsonl line or of an object in a .json list, or the column of a .parquet "
        "file, that holds the text.",
    )
    tokenizer: FilePath = Field(
        default="",
        description="Path of a SentencePiece .model or a Hugging Face tokenizer.json; empty: PREFIX.model beside a "
        ".bin and .idx pair if it exists; for text a tokenizer is trained.",
    )
    vocab_size: int = Field(
        default=4096, gt=0, le=MOST, description="Vocabulary size, in tokens, of the tokenizer that is trained."
    )
    max_chars: int = Field(default=0, ge=0, description="Number of characters of the text to use; 0: all of it.")
    workers: int = Field(default=0, ge=0, description="Number of processes that tokenize text; 0: one per CPU core.")
    held_out: float = Field(
        default=0.02, ge=0, lt=1, description="Fraction of the data kept out of training, for evaluation."
    )
    validation: tuple[Validated, ...] = Field(
        default=(),
        strict=False,
        description="Further sets to evaluate, each with a loss of its own: "
        '[{name = "wiki", source = "wiki.txt"}, {name = "code", source = "code/"}]; empty: the held-out part alone.',
    )
    shuffle: bool = Field(default=True, description="Shuffle the samples of each epoch; false: samples in file order.")
    reset_attention_mask: bool = Field(
        default=False,
        description="Restrict attention to the token's own document, where several documents share a sample.",
    )
    reset_position_ids: bool = Field(
        default=False, description="Restart position ids at 0 with each document of a sample."
    )
    eod_mask_loss: bool = Field(
        default=False,
        description="Leave the first token of each document out of the loss: the tokens before it belong to "
        "another document.",
    )
    cache: FilePath = Field(
        default="",
        description="Folder for the trained tokenizer and the token files; empty: the folder data in train.folder.",
    )


class Parallel(Table):
    """Layout: tensor x pipeline x data ranks, pipeline schedule, activation checkpointing, ZeRO-1."""

    tensor: int = Field(
        default=1, gt=0, le=MOST_RANKS, description="Number of tensor-parallel ranks, which share each layer."
    )
    pipeline: int = Field(
        default=1,
        gt=0,
        le=MOST_RANKS,
        description="Number of pipeline ranks, each with one or more stages of consecutive layers.",
    )
    data: int = Field(
        default=1,
        gt=0,
        le=MOST_RANKS,
        description="Number of data-parallel replicas of the model, each with its own samples. If a run file names "
        "neither this nor parallel.tensor nor parallel.pipeline, it is the number of ranks that torchrun or Slurm "
        "starts.",
    )
    sequence: bool = Field(
        default=False,
        description="Sequence parallelism: shard activations along the sequence over the tensor-parallel ranks, "
        "outside of the matrix products.",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"] = Field(
        default="1f1b",
        description="Pipeline schedule: gpipe, 1f1b, interleaved (1F1B with several stages per rank), or one of the "
        "zero-bubble schedules zb-h1, zb-h2 and zb-v.",
    )
    chunks: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="Number of stages per pipeline rank; 0: 2 for interleaved and zb-v, otherwise 1.",
    )
    schedule_file: FilePath = Field(
        default="",
        description="Text file with a pipeline schedule, used instead of parallel.schedule and parallel.chunks; "
        "empty: none.",
    )
    cuts: tuple[Annotated[int, Field(gt=0)], ...] = Field(
        default=(),
        strict=False,
        description="Number of layers of each stage, such as [3, 4, 4, 3]; empty: balanced by FLOPs.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="Activation checkpointing. none: keep all activations; selective: recompute those of "
        "parallel.recompute_modules in every layer; full: recompute whole layers.",
    )
    recompute_modules: tuple[Module, ...] = Field(
        default_factory=lambda known: ("attention",) if known["recompute"] == "selective" else (),
        strict=False,
        description='Modules that parallel.recompute = "selective" recomputes in every layer, of ["attention", '
        '"activation", "norm"]; default: ["attention"].',
    )
    recompute_layers: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description='Number of layers, counted from the start of each stage, that parallel.recompute = "full" '
        "recomputes; 0: parallel.recompute_fraction decides.",
    )
    recompute_fraction: float = Field(
        default_factory=lambda known: float(known["recompute"] == "full" and not known["recompute_layers"]),
        ge=0,
        le=1,
        description='Fraction of the layers, counted from the start of each stage, that parallel.recompute = "full" '
        "recomputes; default: 1.0 unless parallel.recompute_layers is given.",
    )
    zero: bool = Field(
        default=True,
        description="ZeRO-1: shard master weights and moments over the replicas; false: each replica holds all.",
    )
    overlap: bool = Field(
        default=default_of(ParallelAMPOptimizer, "overlap"),
        description="Overlap gradient reduction with the backward pass and weight gathering with the forward pass; "
        "meant for GPUs.",
    )
    bucket: int = Field(
        default=default_of(ParallelAMPOptimizer, "bucket"),
        gt=0,
        description="Bucket size of gradient reduction and weight gathering, in elements.",
    )
    zero_size: int = Field(
        default=default_of(ParallelAMPOptimizer, "zero_size"),
        ge=0,
        le=MOST_RANKS,
        description="Number of neighboring replicas over which ZeRO-1 shards one copy of the optimizer state; "
        "0: all replicas.",
    )
    elastic: bool = Field(
        default=False,
        description="Train in the largest layout that fits if fewer ranks are there than [parallel] needs, and in the "
        "given layout once enough are there again; false: refuse another number of ranks.",
    )
    timeout: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="Time limit of a step, in seconds beyond the slowest step so far; then the run ends and names the "
        "rank that hangs. Loading, the first step, evaluations and saves may take 10 minutes, or this if it is longer; "
        "a rank without a heartbeat ends them after this.",
    )


class Group(Table):
    """Parameters with another learning rate or weight decay than the rest."""

    pattern: str = Field(
        min_length=1, description="Pattern of logical names, with * and ?; the first pattern that matches counts."
    )
    lr: float | None = Field(default=None, ge=0, description="Factor of the learning rate.")
    weight_decay: float | None = Field(default=None, ge=0, description="Factor of optimizer.weight_decay.")


class Optimizer(Table):
    """Update rule, weight decay, gradient clipping."""

    name: str = Field(
        default="adamw",
        min_length=1,
        description="Update rule: adamw, sgd, or an elementwise optimizer class of torch.optim such as RAdam.",
    )
    options: dict[str, Any] = Field(
        default={},
        description="Arguments of the class that optimizer.name names, such as {momentum = 0.9}; adamw has "
        "optimizer.betas and optimizer.eps instead.",
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=default_of(AdamW, "betas"),
        strict=False,
        description="Decay rates of AdamW's first and second moment, per step.",
    )
    eps: float = Field(
        default=default_of(AdamW, "eps"),
        gt=0,
        description="AdamW's epsilon, added to the square root of the second moment.",
    )
    weight_decay: float = Field(
        default=default_of(ParallelAMPOptimizer, "weight_decay"),
        ge=0,
        description="Weight decay of parameters with two or more dimensions; adamw: decoupled, times the learning "
        "rate.",
    )
    groups: tuple[Group, ...] = Field(
        default=(),
        strict=False,
        description="Factors of learning rate and weight decay for parameters by pattern of names: "
        '[{pattern = "embedding.*", lr = 0.5, weight_decay = 0.0}].',
    )
    clip: float = Field(
        default=default_of(ParallelAMPOptimizer, "clip"),
        ge=0,
        description="Largest global gradient norm; 0: do not clip.",
    )
    norm: float = Field(
        default=default_of(ParallelAMPOptimizer, "norm"),
        ge=1,
        allow_inf_nan=True,
        description="Order p of the global gradient norm: 2.0, inf or any p from 1 on.",
    )
    native: bool = Field(
        default=default_of(ParallelAMPOptimizer, "native"),
        description="Run adamw with a C kernel where master weights are fp32; CPU only, needs a C compiler.",
    )
    validation: Literal["before", "after"] = Field(
        default="before",
        description="When ranks agree that a step is finite. before: before the update; after: during the next step, "
        "and the update is undone if it was wrong.",
    )


class LR(Table):
    """Learning-rate schedule."""

    peak: float = Field(default=3e-4, gt=0, description="Highest learning rate, reached at the end of the warmup.")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine",
        description="Shape of the decay from lr.peak to lr.final: constant (none), linear, cosine, or wsd (warmup, "
        "stable, decay).",
    )
    warmup: int = Field(
        default=0, ge=0, le=MOST_STEPS, description="Length of the linear warmup from 0 to lr.peak, in lr.unit."
    )
    final: float = Field(default=0.0, ge=0, description="Learning rate at the end of the schedule, and after it.")
    decay: int = Field(
        default=0, ge=0, le=MOST_STEPS, description="Length of the decay of wsd at the end of the schedule, in lr.unit."
    )
    length: int = Field(
        default=0,
        ge=0,
        le=MOST_STEPS,
        description="Length of the schedule, warmup included, in lr.unit, after which the rate is lr.final; 0: the "
        "length of the run.",
    )
    unit: Literal["steps", "samples"] = Field(default="steps", description="Unit of lr.warmup, lr.decay and lr.length.")


class Train(Table):
    """Length of the run, batch sizes, first weights, evaluation, folder and device."""

    steps: int = Field(gt=0, le=MOST_STEPS, description="Number of optimizer steps, skipped ones included.")
    global_batch: int = Field(gt=0, le=MOST, description="Number of sequences per step, over all replicas.")
    micro_batch: int = Field(gt=0, le=MOST, description="Number of sequences per forward pass of one replica.")
    seq_length: int = Field(gt=0, le=MOST, description="Sequence length, in tokens.")
    init_from: FilePath = Field(
        default="",
        description="Folder of a checkpoint, in any format that megaprec reads, from which the run takes its first "
        "weights, [model] and tokenizer; empty: random weights.",
    )
    seed: int = Field(default=1234, ge=0, description="Random seed of weights, dropout and sample order.")
    eval_every: int = Field(
        default=0,
        ge=0,
        description="Number of steps between evaluations on the held-out data and data.validation; 0: never.",
    )
    eval_batches: int = Field(default=4, gt=0, le=MOST, description="Number of global batches per evaluation.")
    sentinel: int = Field(
        default=0,
        ge=0,
        description="Number of steps between checks for hardware that computes wrongly: every such step, replicas "
        "compare their weights and compute one micro-batch of each other again; 0: never.",
    )
    folder: FilePath = Field(
        default="runs/default", min_length=1, description="Folder of the run: metrics, checkpoints and plots."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device; auto: cuda if each local rank has a CUDA device, otherwise cpu."
    )
    threads: int = Field(
        default=0, ge=0, description="CPU threads per rank; 0: the cores divided by the number of local ranks."
    )
    restarts: int = Field(
        default=3,
        ge=0,
        description="Number of times that `megaprec train` starts its local ranks again, from the newest checkpoint, "
        "after one of them has crashed or was killed; 0: never. A fault that comes with certainty thus ends the run "
        "soon. For ranks of torchrun its --max-restarts counts.",
    )


class Checkpoint(Table):
    """Saving and resuming."""

    every: int = Field(
        default=500, ge=0, description="Number of steps between checkpoints; 0: only at the end of the run."
    )
    keep: int = Field(default=2, gt=0, description="Number of newest checkpoints to keep; older ones are deleted.")
    background: bool = Field(
        default=True,
        description="Write checkpoints beside the next steps, from a copy of the state in host memory; false: between "
        "steps, without a copy.",
    )
    resume: bool = Field(
        default=True,
        description="Resume from the newest checkpoint in train.folder; false: refuse to start if there is one from an "
        "earlier run.",
    )


class Log(Table):
    """Output of a run: log lines, trackers, plots, timeline, sample text."""

    every: int = Field(default=1, gt=0, description="Number of steps between log lines.")
    to: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        strict=False,
        description='Trackers that receive the numbers of every step, of ["tensorboard", "wandb", '
        '"my_tracker.py:function"]; empty: metrics.jsonl alone.',
    )
    plot: bool = Field(default=True, description="Draw training.png at the end of the run.")
    plot_over: Literal["steps", "tokens"] = Field(default="steps", description="Horizontal axis of training.png.")
    timeline: int = Field(
        default=0,
        ge=0,
        description="Number of the step whose pipeline timeline is written to timeline.json, for Perfetto; 0: none.",
    )
    progress: bool = Field(default=True, description="Show a progress line if the output is a terminal.")
    peak_tflops: float = Field(
        default=0.0,
        ge=0,
        description="Peak speed of a rank's device, in dense TFLOP/s, of which MFU is a fraction; 0: that of the GPU's "
        "data sheet if it is known, otherwise no MFU.",
    )
    sample: str = Field(
        default="", description="Prompt from which the model generates text at the end of the run; empty: none."
    )
