"""The tables of a run file: every key with its type, default, unit and one line of explanation.

A key stands here once; reading, checking, `megaprec keys` and the saved run file all come from these
fields. `[model]` is `models.config.ModelConfig`. Values are read strictly: 8.0 is not a whole number and
"true" is not true.
"""

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from megaprec.errors import UserError
from parallel.activation_checkpoint import Module

FilePath = Annotated[str, AfterValidator(os.path.expanduser)]


class Table(BaseModel):
    """What all tables share: frozen, no unknown keys, no conversions, no nan."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Blended(Table):
    """One text or data set of a blend."""

    source: FilePath = Field(min_length=1, description="as data.source")
    weight: float = Field(gt=0, description="its share, relative to the others'")


class Data(Table):
    """What is trained on."""

    source: FilePath = Field(
        default="python",
        min_length=1,
        description='"python" (the standard library\'s own source), a text file, a folder, a .jsonl file '
        "or the common prefix of a .bin and .idx pair",
    )
    blend: tuple[Blended, ...] = Field(
        default=(),
        strict=False,
        description='several in place of source: [{source = "a.jsonl", weight = 0.7}, {source = "b/", weight = 0.3}]',
    )
    text_field: str = Field(
        default="text", min_length=1, description="field of a .jsonl line, column of a .parquet file, with the text"
    )
    tokenizer: FilePath = Field(
        default="",
        description="SentencePiece .model or Hugging Face tokenizer.json; empty: PREFIX.model of a .bin and .idx pair "
        "if it is there, of a text one that is trained",
    )
    vocab_size: int = Field(default=4096, gt=0, description="tokens of the tokenizer that is trained")
    max_chars: int = Field(default=0, ge=0, description="characters of the source to use; 0: all")
    workers: int = Field(default=0, ge=0, description="processes that turn text into tokens; 0: one a core")
    held_out: float = Field(default=0.02, ge=0, lt=1, description="share of the text kept for evaluation")
    shuffle: bool = Field(default=True, description="false: samples in file order")
    reset_attention_mask: bool = Field(
        default=False, description="tokens attend to their own document only, of those that share a sample"
    )
    reset_position_ids: bool = Field(default=False, description="positions begin anew with each document")
    eod_mask_loss: bool = Field(
        default=False, description="the first token of a document is no target in the loss: nothing foretells it"
    )
    cache: FilePath = Field(
        default="", description="folder of tokenizer and token files; empty: data in the run's folder"
    )


class Parallel(Table):
    """How the model is spread over ranks: tensor x pipeline x data of them."""

    tensor: int = Field(default=1, gt=0, description="ranks that share each layer")
    pipeline: int = Field(default=1, gt=0, description="ranks that each hold one or more stages of consecutive layers")
    data: int = Field(default=1, gt=0, description="replicas, each on its own samples")
    sequence: bool = Field(
        default=False, description="cut the sequence over the tensor ranks between the layers' products"
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"] = Field(
        default="1f1b", description="order of a pipeline's micro-batches"
    )
    chunks: int = Field(default=0, ge=0, description="stages on each rank; 0: interleaved and zb-v 2, all others 1")
    schedule_file: FilePath = Field(
        default="", description="text file with a schedule of one's own, in place of schedule and chunks; empty: none"
    )
    cuts: tuple[Annotated[int, Field(gt=0)], ...] = Field(
        default=(), strict=False, description="layers of each stage, like [3, 4, 4, 3]; empty: by cost"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="activations made again in the backward pass, not kept: none, those of some modules of every "
        "layer, or whole layers",
    )
    recompute_modules: tuple[Module, ...] = Field(
        default_factory=lambda known: ("attention",) if known["recompute"] == "selective" else (),
        strict=False,
        description='of every layer, some of ["attention", "activation", "norm"]; default: selective attention',
    )
    recompute_layers: int = Field(
        default=0, ge=0, description="whole layers of each stage, the first so many; 0: see recompute_fraction"
    )
    recompute_fraction: float = Field(
        default_factory=lambda known: float(known["recompute"] == "full" and not known["recompute_layers"]),
        ge=0,
        le=1,
        description="share of each stage's layers, the first; default: full 1.0, if recompute_layers is 0",
    )
    zero: bool = Field(default=True, description="cut optimizer state over the replicas (ZeRO-1)")
    overlap: bool = Field(
        default=False, description="sum gradients and collect weights while the model computes; for GPUs"
    )
    bucket: int = Field(
        default=40_000_000, gt=0, description="weights, in elements, whose gradients are summed in one go"
    )
    zero_size: int = Field(default=0, ge=0, description="replicas that share one copy of optimizer state; 0: all")


def _not_fp8(compute: object) -> object:
    if compute == "fp8":
        raise UserError('compute = "fp8": products in FP8 are asked for by fp8.kind, beside precision.compute = "bf16"')
    return compute


class Precision(Table):
    """The numbers that are computed with: these keys, or one table of another system's own words."""

    compute: Annotated[Literal["fp32", "bf16", "fp16", "fp64"], BeforeValidator(_not_fp8)] = Field(
        default="fp32", description="dtype of products and activations; fp64 is for parity checks"
    )
    parameters: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        default_factory=lambda known: known["compute"],
        description="dtype in which layers hold weights; default: compute. Wider than it: cast for each product",
    )
    keep_fp32: tuple[str, ...] = Field(
        default=(), strict=False, description='parameters kept in fp32, by pattern: ["*norm.weight", "head.weight"]'
    )
    gradients: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="dtype in which gradients are added up over micro-batches"
    )
    reduce: Literal["fp32", "bf16", "fp16"] = Field(
        default_factory=lambda known: known["gradients"],
        description="dtype in which gradients are summed over ranks; default: gradients",
    )
    masters: Literal["fp32", "split", "none"] = Field(
        default="fp32",
        description="the optimizer's weights; split: a bf16 weight and the 16 bits it lacks; none: the layers' own",
    )
    masters_in_checkpoint: bool = Field(default=True, description="false: checkpoints hold the layers' weights only")
    moments: Literal["fp32", "bf16"] = Field(default="fp32", description="dtype of the optimizer's averages")
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest", description="of updated weights to the dtype in which layers hold them"
    )
    residual: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        default_factory=lambda known: known["compute"],
        description="dtype of the residual stream, to which each branch of a layer adds; default: compute",
    )
    pipeline: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        default_factory=lambda known: known["residual"],
        description="dtype of what pipeline stages send each other; default: residual",
    )
    attention: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        default_factory=lambda known: known["compute"],
        description="dtype in which query, key and value enter attention, after their positions; default: compute",
    )
    scores: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32",
        description="dtype that attention's scores and weights are rounded to; fp32: as a fused kernel has them",
    )
    buffers: Literal["fp32", "bf16", "fp16"] = Field(default="fp32", description="dtype of tables, as of rotary angles")
    output: Literal["fp32", "bf16", "fp16"] = Field(default="fp32", description="dtype of logits that are handed out")
    cast_inputs: Literal["none", "root", "inner", "all"] = Field(
        default="root", description="modules whose inputs are cast to their dtype: the model, those in it, or all"
    )
    tf32: bool = Field(default=False, description="fp32 products may be made in TF32")
    loss_scale: float = Field(default=0.0, ge=0, description="constant loss scale; 0: see scaling")
    scaling: Literal["none", "constant", "dynamic"] = Field(
        default_factory=lambda known: (
            "constant" if known["loss_scale"] else "dynamic" if known["compute"] == "fp16" else "none"
        ),
        description="of the loss; default: constant if loss_scale is given, dynamic for fp16, none otherwise",
    )
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
    on_nonfinite: Literal["skip", "raise", "ignore"] = Field(
        default="skip", description="what a step with non-finite gradients does; ignore: it is applied"
    )
    trace_overflows: bool = Field(
        default=True, description="run a skipped step again to find the micro-batch and the samples that broke it"
    )
    patience: int = Field(
        default=20,
        gt=0,
        description="the run stops after so many skips in a row at the lowest scale or with a bad loss",
    )


class FP8(Table):
    """Products of linear layers in FP8."""

    kind: Literal["none", "delayed", "current", "rowwise", "blockwise", "mx"] = Field(
        default="none", description="what shares a scale, and when it is taken; none: no FP8"
    )
    format: Literal["hybrid", "e4m3"] = Field(
        default="hybrid", description="hybrid: gradients in E5M2, the rest in E4M3; e4m3: all in E4M3"
    )
    margin: int = Field(default=0, description="delayed scales are 2^margin lower than the largest magnitude asks for")
    history_length: int = Field(
        default=1024, gt=0, description="steps, or passes of micro-batches, that a delayed scale looks back on"
    )
    amax_algo: Literal["max", "most_recent"] = Field(default="max", description="which of them decides it")
    history: Literal["step", "te"] = Field(
        default="step",
        description="when delayed scales move on; te: with each micro-batch, as Transformer Engine's, not each step",
    )
    reduce_amax: bool = Field(default=True, description="ranks agree on delayed scales")
    reduce_over: Literal["world", "stage"] = Field(default="world", description="which ranks do")
    power_2_scales: bool = Field(default=False, description="scales are rounded down to powers of two")
    parameters: bool = Field(default=False, description="layers hold their weights in FP8 alone")
    weight_gradients: bool = Field(default=True, description="products of weight gradients are in FP8 too")
    dot_product_attention: bool = Field(default=False, description="the two products of attention are in FP8")
    multi_head_attention: bool = Field(default=False, description="so is what flows between them and the projections")
    first_layers: int = Field(default=0, ge=0, description="first layers that stay in precision.compute")
    last_layers: int = Field(default=0, ge=0, description="last layers that do")
    wide: tuple[str, ...] = Field(
        default=(), strict=False, description='weights whose products do, by pattern: ["layers.*.mlp.down.weight"]'
    )
    pad: bool = Field(default=False, description="weights of unfitting size are filled up with zeros; false: they do")
    calibrate: int = Field(default=0, ge=0, description="first steps that only record magnitudes, for delayed scales")
    calibrating: bool = Field(default=False, description="only record magnitudes, compute in precision.compute")
    backend: Literal["torch", "transformer_engine"] = Field(
        default="torch", description="who casts and multiplies; Transformer Engine: for delayed and current, on a GPU"
    )
    shadow_every: int = Field(
        default=0, ge=0, description="steps between micro-batches made again without FP8, to compare; 0: never"
    )
    shadow_loss_gap: float = Field(default=0.01, gt=0, description="relative gap between their losses that alarms")
    shadow_cosine: float = Field(
        default=0.9, gt=-1, lt=1, description="cosine of a weight's two gradients below which there is alarm"
    )


class Group(Table):
    """Parameters that are treated otherwise than the rest."""

    pattern: str = Field(min_length=1, description="of logical names, with * and ?; the first that matches counts")
    lr: float | None = Field(default=None, ge=0, description="factor of the learning rate")
    weight_decay: float | None = Field(default=None, ge=0, description="factor of optimizer.weight_decay")


class Optimizer(Table):
    """How gradients change weights."""

    name: str = Field(
        default="adamw", min_length=1, description="adamw, sgd or an elementwise class of torch.optim such as RAdam"
    )
    options: dict[str, Any] = Field(
        default={}, description="arguments of that class, such as {momentum = 0.9}; adamw has betas and eps here"
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), strict=False, description="decay of the first and the second moment, per step"
    )
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(
        default=0.1, ge=0, description="of parameters of two or more dims; for adamw decoupled, times the learning rate"
    )
    groups: tuple[Group, ...] = Field(
        default=(),
        strict=False,
        description='factors by logical name, such as [{pattern = "embedding.*", lr = 0.5, weight_decay = 0.0}]',
    )
    clip: float = Field(default=1.0, ge=0, description="largest global gradient norm; 0: do not clip")
    norm: float = Field(
        default=2.0, ge=1, allow_inf_nan=True, description="which norm of the gradients: 2.0, inf or another"
    )
    native: bool = Field(
        default=False,
        description="adamw by a kernel in C where masters are fp32; CPU only, needs a C compiler",
    )
    validation: Literal["before", "after"] = Field(
        default="before",
        description="when all ranks agree on a step; after: stages go on with a guess and go back if it was wrong",
    )


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
        default="",
        description="folder of any format that is read whose weights, [model] and tokenizer begin a run; empty: random",
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
    timeline: int = Field(
        default=0, ge=0, description="step of which timeline.json records when each rank did what; 0: none"
    )
    progress: bool = Field(default=True, description="progress line on a terminal")
    sample: str = Field(default="", description="prompt of the text generated at the end; empty: none")
