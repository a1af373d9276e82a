"""All layouts of a number of ranks that a run can have and that fit its device, fastest first.

Varied are tensor (within a machine), pipeline and data parallelism, sequence parallelism, and what is recomputed; every
other key of [parallel] stays as it is if it can. Layouts whose state alone does not fit, by the bytes of a parameter,
are not looked at more closely, and neither are those that cannot be faster than the layouts that were found.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tools.config.checks import make_rule
from tools.config.layouts import fitted
from tools.config.run_file import RunConfig
from tools.planning.device import Target
from tools.planning.memory import MemoryModel, RankBytes
from tools.planning.speed import Assumptions, Prediction, least_seconds, passes_of, predict

ORIGIN = "megaprec plan"
MOST = 10  # layouts that are found
NONE: dict[str, Any] = {"recompute_modules": (), "recompute_layers": 0, "recompute_fraction": 0.0}
RECOMPUTE: tuple[dict[str, Any], ...] = (
    {"recompute": "none", **NONE},
    {"recompute": "selective", **NONE, "recompute_modules": ("attention",)},
    {"recompute": "full", **NONE, "recompute_fraction": 1.0},
)


@dataclass(frozen=True)
class Planned:
    """A run in one layout: the bytes of each pipeline rank, and the predicted times; None if no peak speed is known."""

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

    slower: how many others cannot be faster. too_large: how many do not fit. smallest: the bytes of the one of those
    that needs least.
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
    config: RunConfig, ranks: int, target: Target, assumed: Assumptions, progress: Callable[[int, int], None]
) -> Found:
    """Return the `MOST` fastest layouts of `ranks` ranks. progress: is told how many of how many are looked at."""
    memory, found, too_large, slower = MemoryModel(target.device), list[Planned](), list[int](), 0
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
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    seen = set[str]()
    for tensor, pipeline in product(divisors, divisors):
        if ranks % (tensor * pipeline) or pipeline > config.model.layers or tensor > max(machine, p.tensor):
            continue
        axes = {"tensor": tensor, "pipeline": pipeline, "data": ranks // (tensor * pipeline)}
        if config.train.global_batch % (config.train.micro_batch * axes["data"]):
            continue
        for again, sequence in product((own, *RECOMPUTE), (p.sequence, True) if tensor > 1 else (p.sequence,)):
            fitting = fitted(config, {**axes, **again, "sequence": sequence, "schedule_file": ""})
            if fitting and (said := fitting.parallel.model_dump_json()) not in seen:
                seen.add(said)
                yield config.with_parallel(fitting.parallel, ORIGIN)


def least_bytes(config: RunConfig) -> int:
    """Return the bytes of the mean rank's weights, gradients and optimizer state, by the bytes of a parameter."""
    p, names = config.parallel, make_rule(config.optimizer).names
    whole, sharded = config.plan.bytes_per_parameter(len(names))
    in_fp8 = config.plan.bytes_per_parameter(len(names), True) if config.plan.fp8 else (whole, sharded)
    over = (p.zero_size or p.data) if p.zero else 1
    each = min(whole, in_fp8[0]) + min(sharded, in_fp8[1]) / over
    return int(config.sized_model.num_parameters / (p.tensor * p.pipeline) * each)


def _rank(planned: Planned) -> tuple[float, int]:
    assert planned.prediction is not None
    return planned.prediction.seconds, planned.total
