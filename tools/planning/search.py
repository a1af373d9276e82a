"""All layouts of a number of ranks that a run can have and that fit its device, fastest first.

Varied are tensor (within a machine), pipeline and data parallelism, context parallelism of long
sequences, the ranks over which experts are spread and their slices, sequence parallelism, and what
is recomputed; every other key of [parallel] stays as it is if it can. Layouts whose state alone
does not fit, by the bytes of a parameter, are not looked at more closely, and neither are those
that cannot be faster than the layouts that were found.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from megaprec.optim.muon import least_moments
from tools.config.checks import make_rule
from tools.config.expert_ranks import every_cut, sharing, slices
from tools.config.layouts import fitted
from tools.config.run_file import RunConfig
from tools.config.settings import Parallel
from tools.planning.device import Target
from tools.planning.memory import MemoryModel, RankBytes
from tools.planning.speed import Assumptions, Prediction, least_seconds, passes_of, predict

ORIGIN = "megaprec plan"
MOST = 10  # layouts that are found
# tokens of a sequence that each rank of parallel.context has at least, unless the run has shorter
# parts
LONG = 8192
NONE: dict[str, Any] = {"recompute_modules": (), "recompute_layers": 0, "recompute_fraction": 0.0}
RECOMPUTE: tuple[dict[str, Any], ...] = (
    {"recompute": "none", **NONE},
    {"recompute": "selective", **NONE, "recompute_modules": ("attention",)},
    {"recompute": "full", **NONE, "recompute_fraction": 1.0},
)


@dataclass(frozen=True)
class Planned:
    """A run in one layout: the bytes of each pipeline rank, and the predicted times; None if no
    peak speed is known."""

    config: RunConfig
    ranks: Sequence[RankBytes]
    prediction: Prediction | None

    @property
    def fullest(self) -> int:
        """Return the pipeline rank that needs most memory."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)

    @property
    def total(self) -> int:
        """Return the bytes that the fullest rank needs."""
        return self.ranks[self.fullest].total


@dataclass(frozen=True)
class Found:
    """The fastest layouts that fit, fastest first.

    slower: how many others cannot be faster. too_large: how many do not fit. smallest: the bytes of
    the one of those that needs least.
    """

    layouts: Sequence[Planned]
    slower: int
    too_large: int
    smallest: int


def plan_run(config: RunConfig, memory: MemoryModel, assumed: Assumptions | None) -> Planned:
    """Return the run in its own layout."""
    passes = passes_of(config)
    ranks = memory.of(config, passes)
    return Planned(config, ranks, predict(config, passes, ranks, assumed) if assumed else None)


def search(
    config: RunConfig,
    ranks: int,
    target: Target,
    assumed: Assumptions,
    progress: Callable[[int, int], None],
) -> Found:
    """Return the `MOST` fastest layouts of `ranks` ranks. progress: is told how many of how many
    are looked at."""
    memory = MemoryModel(target.device)
    found = list[Planned]()
    too_large = list[int]()
    slower = 0
    every = sorted(
        ((least_seconds(one, assumed), one) for one in candidates(config, ranks, assumed.machine)),
        key=lambda pair: pair[0],
    )
    for number, (least_time, one) in enumerate(every):
        progress(number, len(every))
        least = least_bytes(one)
        if target.verdict(least) == "does not fit":
            too_large.append(least)
        elif len(found) >= MOST and least_time > _rank(found[MOST - 1])[0]:
            slower += 1
        else:
            planned = plan_run(one, memory, assumed)
            if target.verdict(planned.total) == "does not fit":
                too_large.append(planned.total)
            else:
                found.append(planned)
                found.sort(key=_rank)
    progress(len(every), len(every))
    slower += max(0, len(found) - MOST)
    return Found(found[:MOST], slower, len(too_large), min(too_large, default=0))


def candidates(config: RunConfig, ranks: int, machine: int) -> Iterator[RunConfig]:
    """Yield the run in each layout of `ranks` ranks that its rules allow."""
    p = config.parallel
    own = {key: getattr(p, key) for key in RECOMPUTE[0]}
    seen = set[str]()
    for axes in _axes(config, ranks, machine):
        tensor = axes["tensor"]
        copies = axes["data"] * axes["context"]
        sequences = (p.sequence, True) if tensor > 1 else (p.sequence,)
        for experts in every_cut(p, config.model.experts, tensor, copies):
            for again, sequence in product((own, *RECOMPUTE), sequences):
                fitting = fitted(
                    config, {**axes, **experts, **again, "sequence": sequence, "schedule_file": ""}
                )
                if fitting and (said := _said(fitting.parallel)) not in seen:
                    seen.add(said)
                    yield config.with_parallel(fitting.parallel, ORIGIN)


def _axes(config: RunConfig, ranks: int, machine: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of tensor, pipeline, context and data that make `ranks` ranks and share the
    batch evenly."""
    p = config.parallel
    t = config.train
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    contexts = sorted({1, p.context, *(n for n in divisors if t.seq_length // n >= LONG)})
    for tensor, pipeline, context in product(divisors, divisors, contexts):
        shared = tensor * pipeline * context
        if ranks % shared or pipeline > config.model.layers or tensor > max(machine, p.tensor):
            continue
        if t.global_batch % (t.micro_batch * (ranks // shared)) == 0:
            yield {
                "tensor": tensor,
                "pipeline": pipeline,
                "context": context,
                "data": ranks // shared,
            }


def _said(parallel: Parallel) -> str:
    """Return a text that is the same for the same layout, however the slices of experts are
    said."""
    return parallel.model_copy(update={"expert_tensor": slices(parallel)}).model_dump_json()


def least_bytes(config: RunConfig) -> int:
    """Return the bytes of the mean rank's weights, gradients and optimizer state, by the bytes of a
    parameter."""
    p = config.parallel
    moments = least_moments(make_rule(config.optimizer))
    whole, sharded = config.plan.bytes_per_parameter(moments)
    in_fp8 = config.plan.bytes_per_parameter(moments, True) if config.plan.fp8 else (whole, sharded)
    least = min(whole, in_fp8[0]), min(sharded, in_fp8[1])
    over = (p.zero_size or p.copies) if p.zero else 1
    experts = config.sized_model.expert_parameters
    others = config.sized_model.num_parameters - experts
    parts = ((others, p.tensor, over), (experts, p.expert * slices(p), sharing(p)))
    held = (
        count / (cut * p.pipeline) * (least[0] + least[1] / shared) for count, cut, shared in parts
    )
    return int(sum(held))


def _rank(planned: Planned) -> tuple[float, int]:
    assert planned.prediction is not None
    return planned.prediction.seconds, planned.total
