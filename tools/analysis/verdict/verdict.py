"""The verdict on a run: how good its held-out loss is, whether it falls, and what more steps would
bring. Made of the files of the run folder alone."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.analysis.verdict.forecast import Forecast, forecast
from tools.analysis.verdict.measure import find_yardsticks
from tools.analysis.verdict.student import quantile
from tools.analysis.verdict.trend import (
    CERTAINTY,
    FEWEST_PIECES,
    Evaluation,
    Trend,
    judge,
    losses_of,
)
from tools.console.units import counted
from tools.journal.invariant_records import InvariantFinding, broken_ones, read_findings
from tools.journal.records import HELD_OUT_LOSS, read_all_events, read_evaluations, read_metrics
from tools.journal.yardsticks import Yardsticks

LARGEST_EXPONENT = 700.0  # math.exp overflows above 709
NO_SAMPLES = "the run has not recorded the losses of its samples"
NO_DATA = "the data of the run is not there"
OTHER_SAMPLES = "the newest evaluation is of other samples than run.toml says"


@dataclass(frozen=True)
class Verdict:
    """The facts that are known of a run's newest held-out loss.

    step, loss: of the newest evaluation. margin: half of the interval, in nats, that the loss on
    all text like this is in with 95 in 100 certainty; NaN if it is not known. tokens, learned:
    that were read and learned up to the end of the records. invariants: what is known of each.
    """

    step: int
    loss: float
    margin: float
    samples: int
    tokens: int
    learned: int
    yardsticks: Yardsticks | None
    trend: Trend
    after_twice: Forecast
    invariants: Mapping[str, InvariantFinding]

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss) if self.loss < LARGEST_EXPONENT else math.inf

    @property
    def is_measured(self) -> bool:
        """True if the yardsticks are of the samples that were evaluated, as far as is known."""
        sizes = self.yardsticks
        return sizes is not None and self.samples in (0, sizes.samples)

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits over the bytes of the text; None if these are not known."""
        sizes = self.yardsticks
        if sizes is None or not sizes.nbytes or not self.is_measured:
            return None
        return self.loss * sizes.tokens / math.log(2) / sizes.nbytes

    @property
    def tokens_per_parameter(self) -> float | None:
        """Learned tokens of each parameter; None if these are not known."""
        if self.yardsticks is None or not self.yardsticks.parameters:
            return None
        return self.learned / self.yardsticks.parameters

    @property
    def epochs(self) -> float | None:
        """The number of times that the training text was read; None if its length is not known."""
        return None if self.yardsticks is None else self.tokens / self.yardsticks.epoch_tokens


def read_verdict(folder: Path) -> Verdict | None:
    """Return the verdict on the run in a folder; None if it has no held-out loss."""
    records = read_metrics(folder)
    evaluated = [record for record in records if _is_finite(record.get(HELD_OUT_LOSS))]
    if not evaluated:
        return None
    newest = evaluated[-1]
    of_text, samples = _comparable(read_evaluations(folder), newest)
    rates = _rates(of_text, records)
    return Verdict(
        step=newest["step"],
        loss=newest[HELD_OUT_LOSS],
        margin=_margin(of_text),
        samples=samples,
        tokens=_whole(records[-1].get("tokens")),
        learned=_whole(records[-1].get("learned_tokens")),
        yardsticks=find_yardsticks(folder),
        trend=judge(of_text, rates) if of_text else Trend("not known", NO_SAMPLES),
        after_twice=_forecast(of_text, rates),
        invariants=read_findings(read_all_events(folder)),
    )


def _comparable(
    records: Sequence[Mapping[str, Any]], newest: Mapping[str, Any]
) -> tuple[list[Evaluation], int]:
    """Return the evaluations of the same samples as the newest one, oldest first, and how many
    samples these are; [] and 0 if the newest was not recorded."""
    comparable = list[Evaluation]()
    num_samples = 0
    for record in records:
        evaluation = _read_evaluation(record)
        if evaluation is None:
            continue
        samples = _whole(record.get("samples"))
        is_of_other_samples = samples != num_samples
        if comparable and (is_of_other_samples or not _is_of_same_text(comparable[-1], evaluation)):
            comparable.clear()
        comparable.append(evaluation)
        num_samples = samples
    if not comparable or comparable[-1].step != newest["step"]:
        return [], 0
    return comparable, num_samples


def _read_evaluation(record: Mapping[str, Any]) -> Evaluation | None:
    """Return the evaluation of the held-out text that a record is of; None if it is of another
    text, not finite, or damaged."""
    if record.get("set") != HELD_OUT_LOSS:
        return None
    try:
        losses = np.array(record["losses"], np.float64)
        tokens = np.array(record["tokens"], np.float64)
    except (TypeError, ValueError):
        return None
    is_sound = losses.ndim == 1 and losses.shape == tokens.shape and len(losses) > 0
    if not is_sound or not np.isfinite(losses).all() or not tokens.sum() > 0:
        return None
    return Evaluation(record["step"], losses, tokens)


def _is_of_same_text(before: Evaluation, after: Evaluation) -> bool:
    """Return True if both evaluations are of texts whose pieces have as many tokens."""
    return np.array_equal(before.tokens, after.tokens)


def _margin(evaluations: Sequence[Evaluation]) -> float:
    """Return `Verdict.margin` of the newest evaluation; NaN of too few pieces."""
    if not evaluations or len(evaluations[-1].tokens) < FEWEST_PIECES:
        return math.nan
    newest = evaluations[-1]
    return quantile(CERTAINTY, len(newest.tokens) - 1) * newest.error


def _rates(
    evaluations: Sequence[Evaluation], records: Sequence[Mapping[str, Any]]
) -> Sequence[float]:
    """Return the learning rate of the step of each evaluation, NaN where it is not known."""
    rate_of_step = {record["step"]: record.get("lr") for record in records}
    rates = list[float]()
    for evaluation in evaluations:
        rate = rate_of_step.get(evaluation.step)
        rates.append(float(rate) if isinstance(rate, int | float) else math.nan)
    return rates


def _forecast(evaluations: Sequence[Evaluation], rates: Sequence[float]) -> Forecast:
    if not evaluations:
        return Forecast(reason=NO_SAMPLES)
    steps = [evaluation.step for evaluation in evaluations]
    return forecast(steps, losses_of(evaluations), rates)


def verdict_lines(folder: Path) -> Iterator[str]:
    """Yield the lines of the verdict on the run in `folder`, none if it cannot be judged."""
    verdict = read_verdict(folder)
    if verdict:
        yield from lines(verdict)


def lines(verdict: Verdict) -> Iterator[str]:
    """Yield the lines of a verdict, each with a word before it."""
    yield f"held-out   {describe_loss(verdict)}"
    yield f"measured   {describe_yardsticks(verdict)}"
    yield f"amount     {describe_amount(verdict)}"
    yield f"verdict    {verdict.trend.kind}: {verdict.trend.reason}"
    yield f"twice      {describe_forecast(verdict)}"
    for line in broken_ones(verdict.invariants):
        yield f"WRONG      {line}"


def describe_loss(verdict: Verdict) -> str:
    """Return the loss, its perplexity and its bits per byte."""
    loss = f"loss {verdict.loss:.4f}"
    if not math.isnan(verdict.margin):
        loss += f" ± {verdict.margin:.4f}"
    bits = verdict.bits_per_byte
    if bits is not None:
        per_byte = f"{bits:.4f} bits per byte"
    else:
        per_byte = f"bits per byte not known ({_why_no_bytes(verdict)})"
    samples = f" of {counted(verdict.samples, 'sample')}" if verdict.samples else ""
    return (
        f"{loss}, perplexity {verdict.perplexity:.4g}, {per_byte}, after step "
        f"{verdict.step:,}{samples}"
    )


def _why_no_bytes(verdict: Verdict) -> str:
    sizes = verdict.yardsticks
    if sizes is None:
        return NO_DATA
    return sizes.no_bytes if verdict.is_measured else OTHER_SAMPLES


def describe_yardsticks(verdict: Verdict) -> str:
    """Return what the loss is compared with, and the last of these that it is better than, as it
    is than all before: a table of few tokens, or of chance, may be worse than guessing."""
    sizes = verdict.yardsticks
    if sizes is None:
        return f"not known: {NO_DATA}"
    if not verdict.is_measured:
        return f"not known: {OTHER_SAMPLES}"
    ladder = (
        ("guessing", sizes.guessing),
        ("counts of single tokens", sizes.unigram),
        ("counts of pairs", sizes.bigram),
    )
    losses = ", ".join(f"{name} {loss:.4f}" for name, loss in ladder)
    last_beaten = ""
    for name, loss in ladder:
        if not verdict.loss < loss:
            break
        last_beaten = name
    if not last_beaten:
        return f"{losses}: the model is worse than guessing"
    return f"{losses}: the model is better than {last_beaten}"


def describe_amount(verdict: Verdict) -> str:
    """Return how much text was learned."""
    ratio = verdict.tokens_per_parameter
    epochs = verdict.epochs
    for_each = "not known" if ratio is None else f"{ratio:.3g}"
    read = "not known" if epochs is None else f"{epochs:.3g}"
    return (
        f"{verdict.learned:,} tokens learned; tokens a parameter: {for_each}; epochs of the "
        f"training text: {read}"
    )


def describe_forecast(verdict: Verdict) -> str:
    """Return what twice the steps would bring."""
    expected = verdict.after_twice
    if expected.reason:
        return f"not known what twice the steps would bring: {expected.reason}"
    return (
        f"{2 * verdict.step:,} steps would bring a loss of {expected.loss:.3f}, nine times in ten "
        f"between {expected.low:.3f} and {expected.high:.3f}, by what the last doubling brought"
    )


def fields(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as a document."""
    sizes = verdict.yardsticks
    expected = verdict.after_twice
    return {
        "step": verdict.step,
        "loss": verdict.loss,
        "margin": _or_none(verdict.margin),
        "samples": verdict.samples or None,
        "perplexity": verdict.perplexity,
        "bits_per_byte": verdict.bits_per_byte,
        "guessing": sizes.guessing if sizes else None,
        "unigram": sizes.unigram if sizes else None,
        "bigram": sizes.bigram if sizes else None,
        "tokens_per_parameter": verdict.tokens_per_parameter,
        "epochs": verdict.epochs,
        "verdict": verdict.trend.kind,
        "why": verdict.trend.reason,
        "rises_since": verdict.trend.since or None,
        "after_twice_the_steps": _or_none(expected.loss),
        "band": None if expected.reason else [expected.low, expected.high],
        "not_predicted": expected.reason or None,
        "invariants": {name: finding._asdict() for name, finding in verdict.invariants.items()},
    }


def _or_none(number: float) -> float | None:
    return None if math.isnan(number) else number


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _whole(value: Any) -> int:
    return int(value) if _is_finite(value) else 0
