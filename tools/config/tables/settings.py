"""The tables of a run file but [model], [data], [precision] and [fp8]: every key with its type,
default, unit and help.

A key stands once; reading, checking, `megaprec keys` and the saved run file all come from these
fields. Defaults of the optimizer are read from its classes. `[model]` is
`models.config.ModelConfig`. Values are read strictly: 8.0 is not a whole number and "true" is not
true.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from megaprec.checkpoint.keeping import Keep
from megaprec.diagnose.spike_monitor import SpikeMonitor
from megaprec.one_of import one_of
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.lr import Kind, Tail, schedules_in_words
from megaprec.optim.rules.rule_table import RULES
from megaprec.optim.rules.update_rules import AdamW
from models.engine.options import QKClip
from parallel.activation_checkpoint import RecomputedModule
from parallel.pipeline.kinds import KINDS
from tools.config.tables.table import (
    MAX_RANKS,
    MAX_SIZE,
    MAX_STEPS,
    FilePath,
    Place,
    Table,
    bytes_of,
    checked_size,
    default_of,
)

HELD_OUT = "eval_loss"  # the field of the loss of the held-out part, before those of sets
# an evaluation, or weights of several
KeptBest = Annotated[
    Annotated[str, Tag("evaluation")]
    | Annotated[dict[str, Annotated[float, Field(gt=0)]], Field(min_length=1), Tag("weights")],
    # only what is wrong with the form that was meant is told
    Discriminator(lambda value: "weights" if isinstance(value, dict) else "evaluation"),
]
# consumed sequences, and the global batch from there on
BatchChange = Annotated[
    tuple[Annotated[int, Field(ge=0, le=MAX_STEPS)], Annotated[int, Field(gt=0, le=MAX_SIZE)]],
    Field(strict=False),
]

# consumed samples, and the length of sequences from there on
LengthChange = BatchChange


def _default_modules(values: dict[str, Any]) -> tuple[RecomputedModule, ...]:
    """Return the recomputed modules that follow from the keys of [parallel] before them."""
    return ("attention",) if values["recompute"] == "selective" else ()


def _default_fraction(values: dict[str, Any]) -> float:
    """Return the fraction of recomputed layers that follows from the keys of [parallel] before
    it."""
    return float(values["recompute"] == "full" and not values["recompute_layers"])


def _zero_stage(value: object) -> object:
    """Return the stages 0 and 1 as false and true, as they are written elsewhere."""
    return bool(value) if type(value) is int and value in (0, 1) else value


class Parallel(Table):
    """Layout: tensor x pipeline x context x data ranks, pipeline schedule, activation
    checkpointing, ZeRO."""

    # the axes of the mesh
    tensor: int = Field(
        default=1,
        gt=0,
        le=MAX_RANKS,
        description="Number of tensor-parallel ranks, which share each layer.",
    )
    pipeline: int = Field(
        default=1,
        gt=0,
        le=MAX_RANKS,
        description="Number of pipeline ranks, each with one or more stages of consecutive layers.",
    )
    data: int = Field(
        default=1,
        gt=0,
        le=MAX_RANKS,
        description="Number of data-parallel replicas of the model, each with its own samples. If "
        "a run file names neither this nor parallel.tensor nor parallel.pipeline, it is the number "
        "of ranks that torchrun or Slurm starts.",
    )
    context: int = Field(
        default=1,
        gt=0,
        le=MAX_RANKS,
        description="Number of context-parallel ranks, which share each sequence: each computes "
        "its part of the tokens.",
    )
    context_by: Literal["ring", "gather"] = Field(
        default="ring",
        description="Attention of sequences that parallel.context cuts. ring: keys and values go "
        "round the ranks; gather: each rank gathers those of the whole sequence, for one layer at "
        "a time.",
    )

    # experts: a mesh of their own over the data x tensor ranks of a stage
    expert: int = Field(
        default=1,
        gt=0,
        le=MAX_RANKS,
        description="Number of ranks over which the experts of each layer are spread, of the data "
        "x tensor ranks of a stage; tokens travel to their experts.",
    )
    expert_tensor: int = Field(
        default=0,
        ge=0,
        le=MAX_RANKS,
        description="Number of slices of each expert over tensor-parallel ranks, a divisor of "
        "parallel.tensor: with 1 experts are whole; 0: parallel.tensor.",
    )
    sequence: bool = Field(
        default=False,
        description="Sequence parallelism: shard activations along the sequence over the "
        "tensor-parallel ranks, outside of the matrix products. On GPUs it is on unless the run "
        "says otherwise, wherever the lengths allow it.",
    )
    async_tensor: bool = Field(
        default=False,
        description="Asynchronous tensor parallelism: fuse matrix products with the gathers and "
        "sums of parallel.sequence, by torch's symmetric memory. Sums over ranks are rounded "
        "otherwise.",
    )

    # the pipeline: its schedule and its stages
    schedule: Annotated[str, one_of(KINDS)] = Field(
        default="1f1b",
        description=f"Pipeline schedule: {', '.join(KINDS)}. interleaved is 1F1B with several "
        "stages per rank; zb-h1, zb-h2 and zb-v are the zero-bubble schedules, dualpipe-v is "
        "DeepSeek's DualPipeV.",
    )
    chunks: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="Number of stages per pipeline rank; 0: 2 for interleaved, zb-v and "
        "dualpipe-v, otherwise 1.",
    )
    schedule_file: FilePath = Field(
        default="",
        description="Text file with a pipeline schedule, used instead of parallel.schedule and "
        "parallel.chunks; empty: none.",
    )
    cuts: tuple[Annotated[int, Field(gt=0)], ...] = Field(
        default=(),
        strict=False,
        description="Number of layers of each stage, such as [3, 4, 4, 3]; empty: balanced by "
        "FLOPs.",
    )

    # activation checkpointing
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="Activation checkpointing. none: keep all activations; selective: recompute "
        "those of parallel.recompute_modules in every layer; full: recompute whole layers.",
    )
    recompute_modules: tuple[RecomputedModule, ...] = Field(
        default_factory=_default_modules,
        strict=False,
        description='Modules that parallel.recompute = "selective" recomputes in every layer, of '
        '["attention", "activation", "norm"]; default: ["attention"].',
    )
    recompute_layers: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="Number of layers, counted from the start of each stage, that "
        'parallel.recompute = "full" recomputes; 0: parallel.recompute_fraction decides.',
    )
    recompute_fraction: float = Field(
        default_factory=_default_fraction,
        ge=0,
        le=1,
        description="Fraction of the layers, counted from the start of each stage, that "
        'parallel.recompute = "full" '
        "recomputes; default: 1.0 unless parallel.recompute_layers is given.",
    )

    # the optimizer's state and its communication
    zero: Annotated[bool | Literal[2, 3], BeforeValidator(_zero_stage)] = Field(
        default=True,
        description="ZeRO-1: shard master weights and moments over the replicas, and over the "
        "context-parallel ranks of each; 2: ZeRO-2, shard gradients too, which are then reduced in "
        "each micro-batch; 3: ZeRO-3, shard weights too, which are then gathered layer by layer in "
        "each pass; false: each holds all. 1 and 0 are read as true and false.",
    )
    zero_keep: Annotated[int, Field(ge=0)] | Annotated[str, AfterValidator(checked_size)] = Field(
        default=default_of(ParallelAMPOptimizer, "keep_layers"),
        description="Under ZeRO-3, number of layers of each rank, its last ones, whose weights "
        "stay whole from their first pass in a step to the update: gathered once a step, and not "
        'twice for each micro-batch; a size such as "2GB": as many as it has room for.',
    )
    overlap: bool | Literal["auto"] = Field(
        default="auto",
        description="Overlap gradient reduction with the backward pass and weight gathering with "
        "the forward pass; auto: on GPUs, with several replicas.",
    )
    bucket: int = Field(
        default=default_of(ParallelAMPOptimizer, "bucket"),
        ge=0,
        description="Bucket size of gradient reduction and weight gathering, in elements; 0: 40 "
        "million, or a million for each replica if that is more.",
    )
    zero_size: int = Field(
        default=default_of(ParallelAMPOptimizer, "zero_size"),
        ge=0,
        le=MAX_RANKS,
        description="Number of neighboring ranks with equal weights (replicas, and the "
        "context-parallel ranks of each) over which ZeRO shards one copy of the optimizer state; "
        "0: all of them.",
    )

    # ranks that come, go or stand still
    elastic: bool = Field(
        default=False,
        description="Train in the largest layout that fits if fewer ranks are there than "
        "[parallel] needs, and in the given layout once enough are there again; false: refuse "
        "another number of ranks.",
    )
    timeout: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="Time limit of a step, in seconds beyond the slowest step so far; then the run "
        "ends and names the rank that hangs. Loading, the first step, evaluations and saves may "
        "take 10 minutes, or this if it is longer; a rank without a heartbeat ends them after "
        "this.",
    )

    def overlaps(self, device: str) -> bool:
        """Return True if replicas communicate during the passes. device: type of the ranks'
        devices.

        On a CPU the ranks compute and communicate on the same cores, so "auto" does not overlap
        there.
        """
        if self.overlap == "auto":
            return device == "cuda" and self.copies > 1
        return self.overlap

    @property
    def shards_gradients(self) -> bool:
        """Return True under ZeRO-2 and 3, if there are ranks to shard gradients over."""
        return self.zero in (2, 3) and self.copies > 1 and self.zero_size != 1

    @property
    def shards_weights(self) -> bool:
        """Return True under ZeRO-3, if there are ranks to shard weights over."""
        return self.zero == 3 and self.shards_gradients

    @property
    def keep_layers(self) -> int:
        """Return the layers that `zero_keep` counts; 0 if it is a size."""
        return self.zero_keep if isinstance(self.zero_keep, int) else 0

    @property
    def keep_bytes(self) -> int:
        """Return the bytes of whole layers for which `zero_keep` leaves room; 0 if it counts
        layers."""
        return 0 if isinstance(self.zero_keep, int) else bytes_of(self.zero_keep)

    @property
    def zero_stage(self) -> int:
        """Return the stage of ZeRO, 0 to 3, that has an effect in this layout."""
        if not self.zero or self.copies == 1:
            return 0
        if not self.shards_gradients:
            return 1
        return 3 if self.shards_weights else 2

    @property
    def copies(self) -> int:
        """The number of ranks with equal weights, over which gradients are summed: data x
        context."""
        return self.data * self.context

    @property
    def ranks(self) -> int:
        """The number of ranks of the layout."""
        return self.tensor * self.pipeline * self.copies


class OptimizerGroup(Table):
    """Parameters with another learning rate or weight decay than the rest."""

    pattern: str = Field(
        min_length=1,
        description="Pattern of logical names, with * and ?; the first pattern that matches "
        "counts.",
    )
    lr: float | None = Field(default=None, ge=0, description="Factor of the learning rate.")
    weight_decay: float | None = Field(
        default=None,
        ge=0,
        description="Factor of optimizer.weight_decay, of parameters with two or more dimensions.",
    )
    all_dims: bool = Field(
        default=False,
        description="Weight decay also of parameters with fewer than two dimensions, such as norms "
        "and biases.",
    )


class Optimizer(Table):
    """Update rule, weight decay, gradient clipping."""

    name: str = Field(
        default="adamw",
        min_length=1,
        description=(
            f"Update rule: {', '.join(RULES)}, or an elementwise optimizer class of torch.optim "
            "such as RAdam."
        ),
    )
    options: dict[str, Any] = Field(
        default={},
        description="Arguments of the rule that optimizer.name names, such as {momentum = 0.9}; "
        "adamw, also as a part of muon, has optimizer.betas and optimizer.eps instead.",
    )

    # what the rules of megaprec compute with
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=default_of(AdamW, "betas"),
        strict=False,
        description=(
            "Decay rates of AdamW's first and second moment, per step; of muon for what AdamW "
            "updates."
        ),
    )
    eps: float = Field(
        default=default_of(AdamW, "eps"),
        gt=0,
        description="AdamW's epsilon, added to the square root of the second moment.",
    )
    weight_decay: float = Field(
        default=default_of(ParallelAMPOptimizer, "weight_decay"),
        ge=0,
        description="Weight decay of parameters with two or more dimensions, of others by "
        "all_dims in optimizer.groups; adamw: decoupled, times the learning rate.",
    )

    # of some parameters, and of the gradients before the update
    groups: tuple[OptimizerGroup, ...] = Field(
        default=(),
        strict=False,
        description="Factors of learning rate and weight decay for parameters by pattern of names: "
        '[{pattern = "embedding.*", lr = 0.5, weight_decay = 0.0}].',
    )
    frozen: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        strict=False,
        description='Patterns of logical names of parameters that are not trained: ["embedding.*", '
        '"layers.0.*"]; they have no gradient and no state.',
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

    # after the update
    qk_clip: float = Field(
        default=0.0,
        ge=0,
        description="QK-clip, as in MuonClip: after a step with a larger attention logit than this "
        "the projections to queries and keys of its head are made smaller, so that it would have "
        "been this large (docs/optimizer.md#qk-clip); 0: none. 100 is usual.",
    )
    qk_clip_alpha: float = Field(
        default=default_of(QKClip, "alpha"),
        ge=0,
        le=1,
        description="Share of the queries in optimizer.qk_clip; the rest is that of the keys.",
    )

    # beside the weights
    ema: float = Field(
        default=default_of(ParallelAMPOptimizer, "ema"),
        ge=0,
        lt=1,
        description="Decay of an exponential moving average of the weights, such as 0.999, which "
        "checkpoints hold and evaluations also score; 0: none is kept.",
    )
    offload: Literal["none", "host"] = Field(
        default="none",
        description='Memory of masters, moments and the average. "host": the host\'s, from which '
        "they travel to the GPU and back for each update, with the same bits; none: the GPU's.",
    )


class LR(Table):
    """Learning-rate schedule."""

    peak: float = Field(
        default=3e-4, gt=0, description="Highest learning rate, reached at the end of the warmup."
    )
    schedule: Kind = Field(
        default="cosine",
        description=f"Shape of the decay from lr.peak to lr.final: {schedules_in_words()}.",
    )

    # the phases, in `unit`
    warmup: int = Field(
        default=0,
        ge=0,
        le=MAX_STEPS,
        description="Length of the linear warmup from lr.initial to lr.peak, in lr.unit; a "
        "fraction such as 0.1 is that part of the schedule, rounded up.",
    )
    initial: float = Field(
        default=0.0,
        ge=0,
        description="Learning rate of the first step of the warmup (Megatron-LM's "
        "lr_warmup_init); peak / (warmup + 1) gives the rates peak * (n + 1) / (warmup + 1).",
    )
    final: float = Field(
        default=0.0, ge=0, description="Learning rate at the end of the schedule, and after it."
    )
    decay: int = Field(
        default=0,
        ge=0,
        le=MAX_STEPS,
        description="Length of the decay of wsd at the end of the schedule, in lr.unit.",
    )
    wsd_decay: Tail = Field(
        default="exponential",
        description="Shape of the decay of wsd; with r, the part of it that is done, the rate is "
        "above lr.final by 2 * 0.5**r - 1 (exponential), 1 - r (linear), (cos(pi * r) + 1) / 2 "
        "(cosine) or 1 - sqrt(r) (sqrt) of the whole height.",
    )
    length: int = Field(
        default=0,
        ge=0,
        le=MAX_STEPS,
        description="Length of the schedule, warmup included, in lr.unit, after which the rate is "
        "lr.final; 0: the length of the run.",
    )
    unit: Literal["steps", "samples"] = Field(
        default="steps", description="Unit of lr.warmup, lr.decay and lr.length."
    )


class Train(Table):
    """Length of the run, batch sizes, first weights, evaluation, folder and device."""

    # what a step is
    steps: int = Field(
        gt=0, le=MAX_STEPS, description="Number of optimizer steps, skipped ones included."
    )
    global_batch: int = Field(
        gt=0,
        le=MAX_SIZE,
        description="Number of sequences per step, over all replicas; with train.batch_schedule "
        "its last batch.",
    )
    batch_schedule: tuple[BatchChange, ...] = Field(
        default=(),
        strict=False,
        description="Global batches that change: pairs of a number of consumed sequences, from 0 "
        "on, and the batch of the steps that begin there or later, such as [[0, 64], [1000000, "
        "128]]; empty: train.global_batch from the first step on.",
    )
    micro_batch: int = Field(
        gt=0, le=MAX_SIZE, description="Number of sequences per forward pass of one replica."
    )
    seq_length: int = Field(
        gt=0,
        le=MAX_SIZE,
        description="Sequence length, in tokens; with train.seq_schedule the longest.",
    )
    seq_schedule: tuple[LengthChange, ...] = Field(
        default=(),
        strict=False,
        description="Sequence lengths that change: pairs of a number of consumed samples of "
        "train.seq_length tokens, from 0 on, and the length of the sequences of the steps that "
        "begin there or later, such as [[0, 512], [100000, 2048]]. Each divides train.seq_length; "
        "samples are cut into pieces, so that a step keeps its tokens; empty: train.seq_length "
        "from the first step on.",
    )

    # how the run begins
    init_from: Place = Field(
        default="",
        description="Folder of a checkpoint, in any format that megaprec reads, from which the run "
        "takes its first weights, [model] and tokenizer; empty: random weights.",
    )
    branch_from: Place = Field(
        default="",
        description="Folder of a checkpoint of megaprec, or of a run, of which it is the newest: a "
        "run without a checkpoint of its own goes on from it, with weights, optimizer state, "
        "counters and place in the data, and takes its [model] if none is given; empty: it begins "
        "with step 1.",
    )
    grow_vocabulary: Literal["none", "mean", "zero", "random"] = Field(
        default="none",
        description="Rows of embedding and output head that the weights of train.init_from get for "
        "tokens of data.tokenizer, and for ids below model.vocab, that they have none for. mean: "
        "the mean of the rows of all tokens that they have; zero; random: drawn as initial weights "
        "are; none: such tokens are refused.",
    )
    seed: int = Field(
        default=1234, ge=0, description="Random seed of weights, dropout and sample order."
    )

    # steps whose loss or gradient norm leaves its band
    on_spike: Literal["note", "skip", "ignore"] = Field(
        default="note",
        description="A step whose loss or gradient norm is far above the band of the steps "
        "before (docs/spikes.md). note: name it in a line; skip: do not apply it, on any "
        "rank; ignore: look for none.",
    )
    spike_patience: int = Field(
        default=default_of(SpikeMonitor, "patience"),
        gt=0,
        description="Number of spikes skipped in a row after which the run stops.",
    )

    # which sums are taken in an order that does not depend on the layout
    numerics: Literal["fast", "canonical"] = Field(
        default="fast",
        description="Order of sums. fast: whatever is fastest in the layout; canonical: one order "
        "in every layout, so that all layouts give the same bits (docs/canonical.md).",
    )
    canonical_shards: int = Field(
        default=2,
        gt=0,
        le=1024,
        description="Number of pieces that every layer is cut into if train.numerics is canonical: "
        "a multiple of parallel.tensor in all layouts that are to be equal; 1 only serves layouts "
        "with parallel.tensor = 1.",
    )

    # evaluation, and checks of the hardware
    eval_every: int = Field(
        default=0,
        ge=0,
        description="Number of steps between evaluations on the held-out data, data.validation and "
        "data.lm_eval, which the last step has too; 0: never.",
    )
    eval_first: bool = Field(
        default=False,
        description="Evaluate before the first step too, with the first weights.",
    )
    eval_batches: int = Field(
        default=4,
        gt=0,
        le=MAX_SIZE,
        description="Number of global batches per evaluation, if train.eval_samples is 0.",
    )
    eval_samples: int = Field(
        default=0,
        ge=0,
        le=MAX_SIZE,
        description="Number of samples of each set per evaluation, whatever the batch size; 0: "
        "train.eval_batches global batches.",
    )
    sentinel: int = Field(
        default=0,
        ge=0,
        description="Number of steps between checks for hardware that computes wrongly: every such "
        "step, replicas compare their weights and compute one micro-batch of each other again; 0: "
        "never.",
    )

    # where and how ranks compute
    compile: Literal["auto", "off", "leaves", "block"] = Field(
        default="auto",
        description="Compilation by torch before the first step, which changes rounding. leaves: "
        "norms, rotary positions, gates, dropout, losses and on a GPU FP8 casts, each alone; "
        "block: all that lies between two matrix products of a layer in one, and the other leaves; "
        "both also the "
        "optimizer's statistics and AdamW's update on a GPU; off: all is computed operator by "
        'operator; auto: block on a GPU, off on a CPU, with numerics = "canonical" and '
        "with model.factory.",
    )
    deterministic: bool = Field(
        default=False,
        description="On a GPU: only kernels that compute the same bits whenever a step is "
        "repeated, flash attention in place of cuDNN's; slower. On a CPU all kernels do.",
    )
    folder: FilePath = Field(
        default="runs/default",
        min_length=1,
        description="Folder of the run: metrics, checkpoints and plots.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="Device; auto: cuda if each local rank has a CUDA device, otherwise cpu.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        description="CPU threads per rank; 0: the cores divided by the number of local ranks.",
    )
    restarts: int = Field(
        default=3,
        ge=0,
        description="Number of times that `megaprec train` starts its local ranks again, from the "
        "newest checkpoint, after one of them has crashed or was killed; 0: never. A fault that "
        "comes with certainty thus ends the run soon. For ranks of torchrun its --max-restarts "
        "counts.",
    )

    @property
    def evaluates(self) -> bool:
        """Return True if the run evaluates at all."""
        return self.eval_every > 0 or self.eval_first


class Checkpoint(Table):
    """Saving and resuming."""

    folder: Place = Field(
        default="",
        description='Folder or URL (s3://, gs://) of the checkpoints; empty: "checkpoints" in '
        "train.folder.",
    )
    every: int = Field(
        default=500,
        ge=0,
        description="Number of steps between checkpoints; 0: only at the end of the run.",
    )
    keep: Annotated[int, Field(gt=0)] | Literal["all"] = Field(
        default=2,
        description="Number of newest checkpoints to keep; older ones that this folder's runs have "
        'saved are deleted. "all": none is deleted.',
    )
    keep_every: int = Field(
        default=0,
        ge=0,
        description="Checkpoints of each multiple of this step are never deleted; 0: of none.",
    )
    keep_best: KeptBest = Field(
        default="",
        description="Evaluation, eval_loss or eval_loss/NAME of a set of data.validation: the "
        "checkpoint of the step after which it was lowest is never deleted; or weights of several, "
        "by NAME or eval_loss, such as {code = 0.7, prose = 0.3}, whose mean counts; empty: none.",
    )
    background: bool = Field(
        default=True,
        description="Write checkpoints beside the next steps, from a copy of the state in host "
        "memory; false: between steps, without a copy.",
    )
    export: Literal["none", "hf"] = Field(
        default="none",
        description="Format in which each checkpoint also has the model for other programs, in a "
        "folder of that name: hf, a Hugging Face folder with a model card; none: no such folder.",
    )
    export_ema: bool = Field(
        default=False,
        description="Let checkpoint.export write the moving average of the weights "
        "(optimizer.ema).",
    )
    resume: bool = Field(
        default=True,
        description="Resume from the newest checkpoint in train.folder; false: refuse to start if "
        "there is one from an earlier run.",
    )

    @property
    def kept(self) -> Keep:
        """Return the rule by which saves delete older checkpoints."""
        return Keep.of(self.keep, self.keep_every, self.best)

    @property
    def best(self) -> dict[str, float]:
        """The evaluations of keep_best by their field in metrics.jsonl, with their weights."""
        if isinstance(self.keep_best, str):
            return {self.keep_best: 1.0} if self.keep_best else {}
        fields = dict[str, float]()
        for name, weight in self.keep_best.items():
            field = name if name == HELD_OUT else f"{HELD_OUT}/{name}"
            fields[field] = weight
        return fields


class Log(Table):
    """Output of a run: log lines, trackers, plots, timeline, sample text."""

    every: int = Field(default=1, gt=0, description="Number of steps between log lines.")
    to: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        strict=False,
        description='Trackers that receive the numbers of every step, of ["tensorboard", "wandb", '
        '"mlflow", "trackio", "my_tracker.py:function"]; empty: metrics.jsonl alone.',
    )

    # files that the run writes besides metrics.jsonl
    plot: bool = Field(default=True, description="Draw training.png at the end of the run.")
    plot_over: Literal["steps", "tokens"] = Field(
        default="steps", description="Horizontal axis of training.png."
    )
    timeline: int = Field(
        default=0,
        ge=0,
        description=(
            "Number of the step whose pipeline timeline is written to timeline.json, for "
            "Perfetto; 0: none."
        ),
    )
    profile: tuple[Annotated[int, Field(gt=0)], ...] = Field(
        default=(),
        strict=False,
        max_length=2,
        description="First and last step that torch's profiler sees, such as [10, 12]: a trace for "
        "Perfetto and a table of operators, modules and kernels in profile/; empty: none.",
    )
    profile_ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(0,),
        strict=False,
        min_length=1,
        description="Ranks on which log.profile profiles.",
    )
    memory_history: bool = Field(
        default=False,
        description="On GPUs: remember what line of code allocated each tensor; a rank that runs "
        "out of memory then writes what held it to memory/.",
    )
    digests: int = Field(
        default=0,
        ge=0,
        description="Number of steps between digests of weights, moments and loss scaler by "
        "logical tensor in digests.jsonl, which are the same in every layout; 0: none.",
    )
    statistics: int = Field(
        default=0,
        ge=0,
        description="Number of steps between statistics in statistics.jsonl: mean, root mean "
        "square, largest magnitude, zeros and kurtosis of each weight, gradient and update, and "
        "the size of each layer's output; 0: none.",
    )

    attention_logits: bool = Field(
        default=False,
        description="Largest attention logit of each head in metrics.jsonl; it takes one more "
        "product of queries and keys in each layer's forward pass.",
    )

    # what a terminal shows
    progress: bool = Field(
        default=True, description="Show a progress line if the output is a terminal."
    )
    peak_tflops: float = Field(
        default=0.0,
        ge=0,
        description="Peak speed of a rank's device, in dense TFLOP/s, of which MFU is a fraction; "
        "0: that of the GPU's data sheet if it is known, otherwise no MFU.",
    )
    sample: str = Field(
        default="",
        description="Prompt from which the model generates text at the end of the run; empty: "
        "none.",
    )
