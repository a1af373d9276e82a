"""The tables of a run file: every key with its type, default, unit and one line of explanation.

A key stands here once; reading, checking, `megaprec keys` and the saved run file all come from these
fields. `[model]` is `models.config.ModelConfig`. Values are read strictly: 8.0 is not a whole number and
"true" is not true.
"""

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

FilePath = Annotated[str, AfterValidator(os.path.expanduser)]


class Table(BaseModel):
    """What all tables share: frozen, no unknown keys, no conversions, no nan."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Data(Table):
    """What is trained on."""

    source: FilePath = Field(
        default="python",
        min_length=1,
        description='"python" (the standard library\'s own source), a text file, a folder, a .jsonl file '
        "or the common prefix of a .bin and .idx pair",
    )
    text_field: str = Field(
        default="text", min_length=1, description="field that holds the text in each line of a .jsonl file"
    )
    tokenizer: FilePath = Field(
        default="",
        description="SentencePiece .model or Hugging Face tokenizer.json; empty: PREFIX.model of a .bin and .idx pair "
        "if it is there, of a text one that is trained",
    )
    vocab_size: int = Field(default=4096, gt=0, description="tokens of the tokenizer that is trained")
    max_chars: int = Field(default=0, ge=0, description="characters of the source to use; 0: all")
    held_out: float = Field(default=0.02, ge=0, lt=1, description="share of the text kept for evaluation")
    shuffle: bool = Field(default=True, description="false: samples in file order")
    cache: FilePath = Field(
        default="", description="folder of tokenizer and token files; empty: data in the run's folder"
    )


class Parallel(Table):
    """How the model is spread over ranks: tensor x pipeline x data of them."""

    tensor: int = Field(default=1, gt=0, description="ranks that share each layer")
    pipeline: int = Field(default=1, gt=0, description="stages of consecutive layers")
    data: int = Field(default=1, gt=0, description="replicas, each on its own samples")
    sequence: bool = Field(
        default=False, description="cut the sequence over the tensor ranks between the layers' products"
    )
    schedule: Literal["gpipe", "1f1b"] = Field(default="1f1b", description="order of a pipeline's micro-batches")
    zero: bool = Field(default=True, description="cut optimizer state over the replicas (ZeRO-1)")


class Precision(Table):
    """The numbers that are computed with."""

    compute: Literal["fp32", "bf16", "fp16", "fp64"] = Field(default="fp32", description="fp64 is for parity checks")
    loss_scale: float = Field(default=0.0, ge=0, description="constant loss scale; 0: dynamic for fp16, none otherwise")
    initial_scale: float = Field(default=2.0**32, gt=0, description="dynamic loss scale at the first step")
    min_scale: float = Field(default=1.0, gt=0, description="lowest dynamic loss scale")
    max_scale: float = Field(default=0.0, ge=0, description="highest dynamic loss scale; 0: 2^127")
    hysteresis_refill: Literal["growth", "good_step"] = Field(
        default="growth", description="what refills hysteresis: growth of the scale, as in Megatron, or a good step"
    )
    growth_factor: float = Field(
        default=2.0, gt=1, description="the scale grows by this after growth_interval good steps"
    )
    backoff_factor: float = Field(
        default=0.5, gt=0, lt=1, description="the scale shrinks by this when hysteresis is used up"
    )
    growth_interval: int = Field(
        default=1000, gt=0, description="steps in a row without overflow before the scale grows"
    )
    hysteresis: int = Field(default=2, gt=0, description="overflowing steps before the scale shrinks")
    on_nonfinite: Literal["skip", "raise"] = Field(
        default="skip", description="what a step with non-finite gradients does"
    )
    patience: int = Field(default=20, gt=0, description="skips in a row at the lowest scale after which the run stops")


class Optimizer(Table):
    """AdamW and gradient clipping."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), strict=False, description="decay of the first and the second moment, per step"
    )
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled, times the learning rate")
    clip: float = Field(default=1.0, ge=0, description="largest global gradient norm; 0: do not clip")


class LR(Table):
    """The learning rate over the run."""

    peak: float = Field(default=3e-4, gt=0, description="highest learning rate")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine", description="way from peak to final"
    )
    warmup: int = Field(default=0, ge=0, description="length of the linear rise from 0, in lr.unit")
    final: float = Field(default=0.0, ge=0, description="lowest learning rate")
    decay: int = Field(default=0, ge=0, description="length of the tail of wsd, in lr.unit")
    unit: Literal["steps", "samples"] = Field(default="steps", description="what warmup and decay are counted in")


class Train(Table):
    """How much is trained, and where."""

    steps: int = Field(gt=0, description="optimizer steps")
    global_batch: int = Field(gt=0, description="sequences per step, over all replicas")
    micro_batch: int = Field(gt=0, description="sequences per forward pass of one replica")
    seq_length: int = Field(gt=0, description="tokens per sequence")
    init_from: FilePath = Field(
        default="", description="Hugging Face folder whose weights, [model] and tokenizer to begin with; empty: random"
    )
    seed: int = Field(default=1234, ge=0, description="of weights, dropout and sample order")
    eval_every: int = Field(default=0, ge=0, description="steps between evaluations on the held-out text; 0: never")
    eval_batches: int = Field(default=4, gt=0, description="global batches per evaluation")
    folder: FilePath = Field(
        default="runs/default", min_length=1, description="run directory: metrics, checkpoints, plots"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda if there is one for each local rank"
    )
    threads: int = Field(default=0, ge=0, description="CPU threads per rank; 0: the cores shared by the local ranks")


class Checkpoint(Table):
    """What is kept of a run."""

    every: int = Field(default=500, ge=0, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(default=2, gt=0, description="newest checkpoints to keep")
    resume: bool = Field(default=True, description="go on from the newest checkpoint in the run directory")


class Log(Table):
    """What a run shows."""

    every: int = Field(default=1, gt=0, description="steps between log lines")
    tensorboard: bool = Field(default=True, description="write TensorBoard events, where it is installed")
    plot: bool = Field(default=True, description="draw loss, gradient norm and loss scale at the end")
    progress: bool = Field(default=True, description="progress line on a terminal")
    sample: str = Field(default="", description="prompt of the text generated at the end; empty: none")
