"""The settings of an engine."""

from dataclasses import dataclass, field

from megaprec.errors import Problem, UserError
from megaprec.kinds import NamedArguments, is_number
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.leaves import PLAIN, Leaves


@dataclass(frozen=True)
class QKClip:
    """The settings of QK-clip (`models.engine.attention_logits`).

    threshold: the largest attention logit that is left as it is.
    alpha: the share of the queries in a clip, 0 to 1; the rest is that of the keys.
    """

    threshold: float
    alpha: float = 0.5


@dataclass(frozen=True)
class EngineOptions(NamedArguments):
    """The settings of an engine, besides the precision plan and the sizes of the mesh: the cut of
    the model into stages, their layout and the way in which they are computed.

    micro_batch: samples of a micro-batch.
    seq_length: tokens of a sequence, before it is cut over ranks of cp.
    sequence: activations between blocks are sharded over tp along the sequence (sequence
        parallelism).
    async_tensor: products are fused with the transfers of sequence parallelism
        (`parallel.fused_products`).
    canonical_shards: the number of virtual tensor-parallel ranks (`models.decoder.virtual_stage`),
        so that all sums are the same bits on any number of processes; 0: as many as there are
        processes, and sums as they are fastest.
    layers: the number of layers of each stage; empty: decided by cost.
    recompute: the activations that the backward pass recomputes.
    expert: the number of ranks over which the experts of each layer are spread, of the dp x tp
        ranks of a stage.
    expert_tensor: the number of slices of each expert; 0: as many as there are tp ranks.
    ring: keys and values go round the ranks of cp (`models.attention.context_parallel`); False:
        each rank gathers those of a whole sequence.
    frozen: patterns of logical names of parameters that are not trained.
    seed: seed of initial weights and dropout.
    blank: initial weights are not drawn; the caller loads others before the first pass.
    trace: a skipped step is run again to find the micro-batch and the samples that broke it.
    attention_logits: reports have the largest attention logit of each head.
    qk_clip: projections to queries and keys are made smaller after steps whose logits were too
        large; None: they are not.
    leaves: the form in which norms, rotations, gates, dropout, losses and FP8 casts are computed.

    Raises UserError for sizes that are no whole numbers from 1 on.
    """

    micro_batch: int
    seq_length: int
    sequence: bool = False
    async_tensor: bool = False
    canonical_shards: int = 0
    layers: tuple[int, ...] = ()
    recompute: Recompute = KEEP
    expert: int = 1
    expert_tensor: int = 0
    ring: bool = True
    frozen: tuple[str, ...] = ()
    seed: int = 0
    blank: bool = False
    trace: bool = True
    attention_logits: bool = False
    qk_clip: QKClip | None = None
    leaves: Leaves = field(default=PLAIN, compare=False)

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        for name in ("micro_batch", "seq_length"):
            size = getattr(self, name)
            if not is_number(size, whole=True) or size < 1:
                problems.append(Problem.of("parallel.degree", name=name, degree=size))
        if problems:
            raise UserError(*problems)
