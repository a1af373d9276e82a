"""The plan of a run's data, before anything is read: samples, tokens and epochs of each data set,
of the whole run and of each phase of its blend."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from megaprec.tokens.blend import Blend
from tools.config.rules.derived import blend_phases
from tools.config.run_file import RunConfig
from tools.training.corpus import Corpus
from tools.training.data_sources import training_sources

# repetitions up to which text is about as good as new text: "Scaling data-constrained language
# models", 2023
GOOD_EPOCHS = 4
MAX_PHASES = 8  # lines about phases


class SetPlan(NamedTuple):
    """The part of a run that a data set gives. share: of all samples. available: samples of an
    epoch."""

    name: str
    share: float
    samples: int
    tokens: int
    available: int

    @property
    def epochs(self) -> float:
        """Return how often each sample comes, on average."""
        return self.samples / self.available


class PhasePlan(NamedTuple):
    """A phase of a run. begin, end: samples of the run. samples: those of each data set."""

    begin: int
    end: int
    samples: tuple[int, ...]

    @property
    def shares(self) -> list[float]:
        """Return the share of each data set."""
        return [samples / (self.end - self.begin) for samples in self.samples]


def set_plans(config: RunConfig, corpus: Corpus) -> list[SetPlan]:
    """Return the part of the whole run of each data set, in the order of the run file."""
    total = config.total_samples
    plans = list[SetPlan]()
    read = zip(training_sources(config), corpus.training_parts, _taken(corpus, total), strict=True)
    for source, part, samples in read:
        plans.append(
            SetPlan(
                name=source.name,
                share=samples / total,
                samples=samples,
                tokens=samples * config.train.seq_length,
                available=len(part),
            )
        )
    return plans


def phase_plans(config: RunConfig, corpus: Corpus) -> list[PhasePlan]:
    """Return the phases that the run reaches."""
    total = config.total_samples
    begins = [begin for begin in blend_phases(config.data).begins if begin < total]
    plans = list[PhasePlan]()
    for begin, end in pairwise([*begins, total]):
        before = _taken(corpus, begin)
        after = _taken(corpus, end)
        samples = [later - earlier for earlier, later in zip(before, after, strict=True)]
        plans.append(PhasePlan(begin, end, tuple(samples)))
    return plans


def blend_lines(config: RunConfig, corpus: Corpus) -> list[str]:
    """Return the lines about a blend at the start of a run: its data sets, and its phases if the
    weights change."""
    phases = blend_phases(config.data)
    # of weights that hold for the whole run the share that was asked for
    total_weight = sum(phases.first_weights)
    wanted = [weight / total_weight for weight in phases.first_weights]
    lines = [f"blended from {len(corpus.datasets)}"]
    for plan, wanted_share in zip(set_plans(config, corpus), wanted, strict=True):
        share = plan.share if phases.changes else wanted_share
        lines.append(
            f"           {share:.4g} of the samples from {plan.name}: {plan.samples:,} of "
            f"{plan.available:,} samples, {plan.tokens:,} tokens, {plan.epochs:.2f} epochs in "
            f"{config.train.steps} steps"
        )
    if phases.changes:
        names = [source.name for source in training_sources(config)]
        lines += [f"           {line}" for line in _phase_lines(config, corpus, names)]
    return lines


def _phase_lines(config: RunConfig, corpus: Corpus, names: Sequence[str]) -> list[str]:
    """Return a line for each phase, or for the first ones and the last if there are many."""
    lines = list[str]()
    for plan in phase_plans(config, corpus):
        shares = zip(plan.shares, names, strict=True)
        described = ", ".join(f"{share:.4g} {name}" for share, name in shares)
        lines.append(f"samples {plan.begin + 1:,} to {plan.end:,}: {described}")
    if len(lines) > MAX_PHASES:
        left_out = len(lines) - MAX_PHASES
        lines = [*lines[: MAX_PHASES - 1], f"and {left_out:,} more phases, then", lines[-1]]
    return lines


def _taken(corpus: Corpus, samples: int) -> list[int]:
    """Return how many of the first samples of the run each data set gives."""
    if isinstance(corpus.train, Blend):
        return corpus.train.samples_taken(samples)
    return [samples]
