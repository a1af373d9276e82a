"""The plan of a run's data, before anything is read: samples, tokens and epochs of each data set,
of the whole run and of each phase of its blend."""

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
    """The part of a run that a data set gives.

    name: in the fields of metrics.jsonl. source: as the run file has it. share: of all samples.
    available: samples of an epoch.
    """

    name: str
    source: str
    share: float
    samples: int
    tokens: int
    available: int

    @property
    def epochs(self) -> float:
        """Return how often each sample comes, on average."""
        return self.samples / self.available


class PhasePlan(NamedTuple):
    """A phase of a run.

    begin, end: samples of the run. samples: those of each data set. first_shares, last_shares: of
    each data set, as asked for where the phase begins and where it ends.
    """

    begin: int
    end: int
    samples: tuple[int, ...]
    first_shares: tuple[float, ...]
    last_shares: tuple[float, ...]

    @property
    def described_shares(self) -> list[str]:
        """Return the share of each data set in words."""
        words = list[str]()
        for first, last in zip(self.first_shares, self.last_shares, strict=True):
            words.append(f"{first:.4g}" if first == last else f"{first:.4g} to {last:.4g}")
        return words


def set_plans(config: RunConfig, corpus: Corpus) -> list[SetPlan]:
    """Return the part of the whole run of each data set, in the order of the run file."""
    total = config.total_samples
    plans = list[SetPlan]()
    sources = training_sources(config)
    # a single text has no name of its own
    names = config.data.blend_names or [source.name for source in sources]
    taken = _taken(corpus, total)
    for name, source, part, samples in zip(
        names, sources, corpus.training_parts, taken, strict=True
    ):
        plans.append(
            SetPlan(
                name=name,
                source=source.name,
                share=samples / total,
                samples=samples,
                tokens=samples * config.train.seq_length,
                available=len(part),
            )
        )
    return plans


def phase_plans(config: RunConfig, corpus: Corpus) -> list[PhasePlan]:
    """Return the plan of each phase that the run reaches."""
    total = config.total_samples
    phases = blend_phases(config.data)
    begins = [begin for begin in phases.begins if begin < total]
    plans = list[PhasePlan]()
    for begin, end in pairwise([*begins, total]):
        before = _taken(corpus, begin)
        after = _taken(corpus, end)
        samples = [later - earlier for earlier, later in zip(before, after, strict=True)]
        first_shares = tuple(map(float, phases.shares_at(begin)))
        last_shares = first_shares
        if phases.linear:
            last_shares = tuple(map(float, phases.shares_at(end)))
        plans.append(PhasePlan(begin, end, tuple(samples), first_shares, last_shares))
    return plans


def blend_lines(config: RunConfig, corpus: Corpus) -> list[str]:
    """Return the lines about a blend at the start of a run: its data sets, and its phases if the
    weights change."""
    phases = blend_phases(config.data)
    # Weights that hold for the whole run are told as asked for, not as the counted samples have it.
    total_weight = sum(phases.first_weights)
    wanted = [weight / total_weight for weight in phases.first_weights]
    lines = [f"blended from {len(corpus.datasets)}"]
    for plan, wanted_share in zip(set_plans(config, corpus), wanted, strict=True):
        share = plan.share if phases.changes else wanted_share
        lines.append(
            f"           {share:.4g} of the samples from {plan.source}: {plan.samples:,} of "
            f"{plan.available:,} samples, {plan.tokens:,} tokens, {plan.epochs:.2f} epochs in "
            f"{config.train.steps} steps"
        )
    if phases.changes:
        lines += [f"           {line}" for line in _phase_lines(config, corpus)]
    return lines


def _phase_lines(config: RunConfig, corpus: Corpus) -> list[str]:
    """Return a line for each phase, or for the first ones and the last if there are many."""
    lines = list[str]()
    for plan in phase_plans(config, corpus):
        shares = zip(plan.described_shares, config.data.blend_names, strict=True)
        described = ", ".join(f"{share} {name}" for share, name in shares)
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
