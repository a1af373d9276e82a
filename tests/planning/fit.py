"""The constants of `tools/analysis/planning/reached.py`, fitted to the published runs.

    python -m tests.planning.fit            # constants and errors; about two minutes of a core

The constants make the sum of two kinds of absolute log errors of a step's seconds least: those of
the data sheet alone, and those with a factor for each software stack, the median of its runs. The
seconds of each run are split once into terms that are proportional to a constant or to its inverse
(`terms_of`), so a fit needs no further prediction. Constants outside of `LIMITS` are not physical.

Errors are printed in sample and held out: each model's runs are predicted with constants that were
fitted without them, and a factor of software is that of the runs of other models.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from tests.planning.backtest import Errors, Published, errors_of, published_runs
from tools.analysis.planning import reached
from tools.analysis.planning.reached import assumptions_of
from tools.analysis.planning.seconds.assumptions import Assumptions

Numbers = NDArray[np.float64]

# in the order of a vector of constants
NAMES = (
    *("Ampere", "Hopper", "Blackwell"),
    *("ATTENTION", "EXPERTS", "EXPERT_ROWS", "FP8", "BANDWIDTH", "LAYER"),
    *("HIDDEN", "EXPOSED", "LINKS"),
)
LIMITS: Mapping[str, tuple[float, float]] = {
    "Ampere": (0.3, 1.0),
    "Hopper": (0.3, 1.0),
    "Blackwell": (0.3, 1.0),
    "ATTENTION": (0.1, 1.0),
    "EXPERTS": (0.2, 1.0),
    "EXPERT_ROWS": (1.0, 1000.0),
    "FP8": (0.3, 1.0),
    "BANDWIDTH": (0.2, 1.0),
    "LAYER": (0.0, 1e-3),
    "HIDDEN": (0.0, 0.39),  # no more runs beside products of backward passes
    "EXPOSED": (0.0, 1.0),
    "LINKS": (0.3, 1.0),
}
SMALL = 0.02  # by which a constant is changed to find its term
ROUNDS = 30  # of a fit, each with a step half as long as three rounds before
DIRECTIONS = 40  # of a round, at random beside the axes
SEED = 0


def published_constants() -> Numbers:
    """Return the constants of `reached.py`."""
    by_name = {**reached.PRODUCTS}
    for name in NAMES[3:]:
        by_name[name] = getattr(reached, name)
    return np.array([by_name[name] for name in NAMES])


@dataclass(frozen=True)
class Terms:
    """Seconds of runs by the constant that they depend on, at the constants of `reached.py`.

    Each is an array with a number for each run.

    architecture: the place of the run's constant of products in `NAMES`.
    plain: of products in bf16 but for experts.
    fp8: of products in FP8 but for experts.
    experts, experts_fp8: of products of experts, in bf16 and in FP8.
    rows: the part of the time of experts, 0 to 1, that grows with `EXPERT_ROWS`.
    traffic: of what is waited for in the passes, the part that `HIDDEN` takes off, less than 0.
    replicas: of what is waited for of replicas.
    links: of all that is waited for.
    rest: of what depends on no constant.
    measured: of the whole step.
    """

    architecture: NDArray[np.int64]
    plain: Numbers
    fp8: Numbers
    experts: Numbers
    experts_fp8: Numbers
    rows: Numbers
    attention: Numbers
    moved: Numbers
    layers: Numbers
    traffic: Numbers
    replicas: Numbers
    links: Numbers
    rest: Numbers
    measured: Numbers

    def seconds(self, constants: Numbers) -> Numbers:
        """Return the predicted seconds of the runs by other constants."""
        ratios = constants / published_constants()
        products = ratios[self.architecture]
        attention, experts, rows, fp8, bandwidth, layer = ratios[3:9]
        hidden, exposed, links = ratios[9:]
        filled = 1 - self.rows + self.rows * rows
        of_experts = (self.experts + self.experts_fp8 / fp8) * filled / experts
        multiplied = self.plain + self.fp8 / fp8 + of_experts + self.attention / attention
        waited = self.links + self.traffic * (hidden - 1) + self.replicas * (exposed - 1)
        return (
            multiplied / products
            + self.moved / bandwidth
            + self.layers * layer
            + waited / links
            + self.rest
        )


def terms_of(runs: Sequence[Published]) -> Terms:
    """Return the terms of runs: how much longer a step is with a constant a little different."""
    rows = [_terms_of_run(run) for run in runs]
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    architecture = [NAMES.index(run.gpu.architecture) for run in runs]
    measured = [run.seconds for run in runs]
    return Terms(np.array(architecture), measured=np.array(measured), **columns)


def _terms_of_run(run: Published) -> dict[str, float]:
    """Return the terms of one run, by name."""
    assumed = assumptions_of(run.gpu, run.config.plan)
    assert assumed is not None
    whole = run.predicted(assumed).seconds

    def term(**changes: float) -> float:
        """Return the seconds that shrink or grow with constants, of which `changes` makes all
        speeds slower, or times longer, by `SMALL`."""
        changed: Assumptions = replace(assumed, **changes)
        return (run.predicted(changed).seconds - whole) / SMALL

    slower = 1 / (1 + SMALL)
    longer = 1 + SMALL
    products = term(efficiency=assumed.efficiency * slower)
    attention = term(attention=assumed.attention * slower)
    experts = term(experts=assumed.experts * slower) if run.config.model.experts else 0.0
    growing = term(half_rows=assumed.half_rows * longer) if run.config.model.experts else 0.0
    narrow = run.config.plan.fp8 is not None
    fp8 = term(fp8_efficiency=assumed.fp8_efficiency * slower) if narrow else 0.0
    moved = term(bandwidth=assumed.bandwidth * slower)
    layers = term(layer=assumed.layer * longer)
    # None is hidden of software without overlap, and with all of it by the constant's multiple, so
    # the term is one of the constant alone.
    overlaps = run.overlap != "none"
    traffic = term(hidden=assumed.hidden * longer) if overlaps else 0.0
    replicas = term(exposed=assumed.exposed * longer)
    links = term(fast=assumed.fast * slower, slow=assumed.slow * slower)
    of_constants = products + moved + layers + links
    return {
        "plain": products - attention - (fp8 if narrow else experts),
        "fp8": fp8 - experts if narrow else 0.0,
        "experts": 0.0 if narrow else experts,
        "experts_fp8": experts if narrow else 0.0,
        "rows": growing / experts if experts else 0.0,
        "attention": attention,
        "moved": moved,
        "layers": layers,
        "traffic": traffic,
        "replicas": replicas,
        "links": links,
        "rest": whole - of_constants,
    }


@dataclass(frozen=True)
class Fit:
    """The published runs, ready to be fitted.

    stacks, models: of each run.
    """

    terms: Terms
    stacks: Sequence[str]
    models: Sequence[str]

    def log_errors(self, constants: Numbers) -> Numbers:
        """Return the logarithm of predicted by measured seconds of all runs."""
        return np.log(self.terms.seconds(constants) / self.terms.measured)

    def loss(self, constants: Numbers, groups: Sequence[NDArray[np.int64]]) -> float:
        """Return the sum of absolute log errors, with a factor for each stack and without. groups:
        the runs of each stack."""
        errors = self.log_errors(constants)
        total = 0.0
        for group in groups:
            of_stack = errors[group]
            total += np.abs(of_stack).sum()
            total += np.abs(of_stack - np.median(of_stack)).sum()
        return total

    def constants(self, without: str = "") -> Numbers:
        """Return the constants with the least loss. without: a model whose runs are left out.

        From those of `reached.py` each round tries a step along every axis and along directions
        drawn at random, and keeps what is better.
        """
        groups: list[NDArray[np.int64]] = []
        for stack in sorted(set(self.stacks)):
            pairs = zip(self.stacks, self.models, strict=True)
            kept = [
                run for run, pair in enumerate(pairs) if pair[0] == stack and pair[1] != without
            ]
            if kept:
                groups.append(np.array(kept))
        low, high = np.array([LIMITS[name] for name in NAMES]).T
        best = published_constants()
        best_loss = self.loss(best, groups)
        random = np.random.default_rng(SEED)
        axes = np.eye(len(NAMES))
        for number in range(ROUNDS):
            length = 0.2 / 2 ** (number / 3)
            drawn = random.normal(size=(DIRECTIONS, len(NAMES))) / len(NAMES) ** 0.5
            for direction in (*axes, *-axes, *drawn):
                tried = np.clip(best * np.exp(length * direction), low, high)
                loss = self.loss(tried, groups)
                if loss < best_loss:
                    best, best_loss = tried, loss
        return best

    def errors(self, constants: Numbers, model: str) -> Iterator[tuple[float, float | None]]:
        """Yield the errors of tokens a second of a model's runs: plain, and with the median factor
        of other models of the same software; None if there are none."""
        logs = self.log_errors(constants)
        for run, stack in enumerate(self.stacks):
            if self.models[run] != model:
                continue
            others = [
                logs[other]
                for other, other_stack in enumerate(self.stacks)
                if other_stack == stack and self.models[other] != model
            ]
            # too many seconds are too few tokens a second
            plain = float(np.exp(-logs[run]) - 1)
            factored = float(np.exp(median(others) - logs[run]) - 1) if others else None
            yield plain, factored


@dataclass(frozen=True)
class Held:
    """Errors, plain and with a factor of software, of runs that had no part in the fit.

    constants: those that were fitted without each model.
    runs: the place of each error's run.
    """

    errors: Sequence[tuple[float, float | None]]
    constants: Sequence[Numbers]
    runs: Sequence[int]


def fit_of(runs: Sequence[Published]) -> Fit:
    """Return the fit of runs."""
    return Fit(terms_of(runs), [run.row["stack"] for run in runs], [run.model for run in runs])


def held_out(fit: Fit) -> Held:
    """Return the errors of each model's runs by constants that were fitted without them."""
    errors: list[tuple[float, float | None]] = []
    without: list[Numbers] = []
    runs: list[int] = []
    for model in sorted(set(fit.models)):
        constants = fit.constants(model)
        without.append(constants)
        errors.extend(fit.errors(constants, model))
        runs.extend(run for run, other in enumerate(fit.models) if other == model)
    return Held(errors, without, runs)


def in_sample(fit: Fit, constants: Numbers) -> Sequence[tuple[float, float | None]]:
    """Return the errors of all runs by the same constants."""
    errors: list[tuple[float, float | None]] = []
    for model in sorted(set(fit.models)):
        errors.extend(fit.errors(constants, model))
    return errors


def _describe(name: str, errors: Sequence[tuple[float, float | None]]) -> str:
    """Return a line with the errors."""
    plain = errors_of([error for error, _ in errors])
    factored = errors_of([error for _, error in errors if error is not None])
    return f"{name}: {_in_words(plain)}; with a factor {_in_words(factored)}"


def _in_words(errors: Errors) -> str:
    return f"median {errors.median:.1%}, nine in ten {errors.most:.1%}, {errors.runs} runs"


def main() -> None:
    """Print the constants and their errors."""
    runs = published_runs()
    fit = fit_of(runs)
    current = published_constants()
    fitted = fit.constants()
    held = held_out(fit)
    print("constant: in reached.py, fitted, least and most of those fitted without a model")
    for place, name in enumerate(NAMES):
        column = [constants[place] for constants in held.constants]
        numbers = (current[place], fitted[place], min(column), max(column))
        print(f"{name}: {', '.join(f'{number:.3g}' for number in numbers)}")
    print(_describe("in sample, constants of reached.py", in_sample(fit, current)))
    print(_describe("in sample, fitted", in_sample(fit, fitted)))
    print(_describe(f"held out, {len(held.constants)} models", held.errors))
    trusted = [
        error
        for place, error in zip(held.runs, held.errors, strict=True)
        if not runs[place].in_doubt
    ]
    print(_describe("held out, without those in doubt", trusted))


if __name__ == "__main__":
    main()
