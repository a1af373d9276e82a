"""Predictions of `megaprec plan` for training runs whose speed others have published.

    python -m tests.planning.backtest            # the tables of docs/planning.md

`published.toml` has the runs: model, layout, GPU, speed and source. What a run file cannot say is
left out of the run that is planned. FSDP is planned as ZeRO-3, but for pipelines. Facts of a run's software (`tests.planning.facts`) that are not those of this project change what its
prediction rests on (`Published._rests_on`). Of these some have a source and some are assumed: the
errors are printed with all of them, and with those alone that have one.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from statistics import correlation, median
from typing import Any

from models.estimate.gpus import GPU, gpu_named
from tests.planning.facts import Doubt, Fact, facts_of, read_doubts, read_facts
from tools.analysis.planning.memory import PlannedPasses
from tools.analysis.planning.reached import assumptions_of
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.seconds.attention import causal_share
from tools.analysis.planning.seconds.traffic import elements_of_pipeline, replica_bytes
from tools.analysis.planning.speed import Prediction, passes_of, predict_passes
from tools.config.run_file import RunConfig, load_run

TABLE = Path(__file__).parent / "published.toml"
# The speed of flash attention's second generation on Hopper by that of cuDNN's kernel, which this
# project takes there: `models.attention.backends`. 370 and 600 TFLOP/s of heads of 128, from 8,192
# tokens on (arXiv 2407.08608, figure 5). On other GPUs they are as fast.
FLASH_ON_HOPPER = 370 / 600
# The speed of FlexAttention by that of flash attention's second generation: 90 % forward, 85 %
# backward, which is 2.5 times as long (pytorch.org/blog/flexattention).
FLEX = 3.5 / (1 / 0.9 + 2.5 / 0.85)
# Bytes that attention without a fused kernel moves for each score, in half precision: scores are
# written, read and written by the softmax, by dropout with its mask, and read again (13); backward
# 19. Here by pass, of which the backward pass has 2.5 (`seconds.attention`) and recomputation one.
UNFUSED_BYTES = 10
# Of ten transfers of a layer's blocks those of the backward pass that begin before a product that
# does not need them: two sums of input gradients, and two inputs that are gathered once more.
BESIDE_BACKWARD = 0.4


@dataclass(frozen=True)
class Published:
    """A published run: its row of the table, the facts of its software by kind, its run file, the
    passes of a step, and whether its speed is in doubt."""

    row: Mapping[str, Any]
    facts: Mapping[str, Fact]
    config: RunConfig
    passes: PlannedPasses
    in_doubt: bool = False

    @classmethod
    def of(
        cls, row: Mapping[str, Any], facts: Sequence[Fact], doubts: Sequence[Doubt] = ()
    ) -> "Published":
        """Return the run of a row, by those of the facts and doubts that are of it. Raises
        FactError."""
        of_run = facts_of(row, facts)
        config = _config(row, of_run)
        in_doubt = any(doubt.holds_for(row) for doubt in doubts)
        return cls(row, of_run, config, passes_of(config), in_doubt)

    @property
    def gpu(self) -> GPU:
        """The GPU that the run had."""
        gpu = gpu_named(self.row["gpu"])
        assert gpu is not None
        if fact := self.facts.get("bandwidth"):
            gpu = replace(gpu, bandwidth=float(fact.value))
        return gpu

    @property
    def overlap(self) -> str | float:
        """The traffic beside products: that of backward passes, all, or none."""
        return self._fact("overlap", "backward")

    def _fact(self, kind: str, otherwise: str) -> str | float:
        """Return the value of a fact, or that of this project."""
        return self.facts[kind].value if kind in self.facts else otherwise

    def by_sources(self) -> "Published":
        """Return the run without the facts that are assumed: there its software is taken to be as
        this project."""
        sourced = {kind: fact for kind, fact in self.facts.items() if fact.source}
        return replace(self, facts=sourced, config=_config(self.row, sourced))

    @property
    def model(self) -> str:
        """The model, whatever its layout and the precision: what is held out together."""
        return repr(sorted(self.row["model"].items()))

    @property
    def seconds(self) -> float:
        """The measured seconds of a step."""
        speed = self.row["tokens_per_s"] * self.row["gpus"]
        return self.config.tokens_per_step / speed

    def predicted(self, assumed: Assumptions) -> Prediction:
        """Return the predicted step, with state spread evenly over the pipeline."""
        config = self.config
        elements = sum(elements_of_pipeline(config)) / config.parallel.pipeline
        plan = config.plan
        gradients = elements * plan.gradients.itemsize
        weights = elements * plan.parameters.itemsize
        sent = replica_bytes(config, gradients, weights)
        return predict_passes(config, self.passes, sent, elements, self._rests_on(assumed))

    def _rests_on(self, assumed: Assumptions) -> Assumptions:
        """Return what a prediction rests on by the facts of the run's software."""
        kernel = self._fact("attention", "cuDNN")
        if kernel in ("flash", "flex") and self.gpu.architecture == "Hopper":
            assumed = replace(assumed, attention=FLASH_ON_HOPPER * assumed.attention)
        if kernel == "flex":
            assumed = replace(assumed, attention=FLEX * assumed.attention)
        if kernel == "unfused":
            assumed = replace(assumed, attention=self._unfused_speed(assumed))
        if self.overlap == "all":
            assumed = replace(assumed, hidden=min(1.0, assumed.hidden / BESIDE_BACKWARD))
        if self.overlap == "none":
            assumed = replace(assumed, hidden=0.0)
        rows_once = self._fact("rows", "each") == "machine"
        # rows on their way to experts go beside products too
        return replace(assumed, hidden_rows=assumed.hidden, rows_once=rows_once)

    def _unfused_speed(self, assumed: Assumptions) -> float:
        """Return the speed of attention by that of products whose time is that of the scores that
        it moves, all of the square."""
        model = self.config.model
        share = causal_share(model, self.config.train.seq_length)
        # a score is a product of a query and a key, and weighs a value
        flops_of_byte = 4 * model.head_dim / UNFUSED_BYTES
        flops = flops_of_byte * assumed.bandwidth * 1e9
        return share * flops / (assumed.tflops * 1e12 * assumed.efficiency)


@cache
def published_runs() -> tuple[Published, ...]:
    """Return all runs of the table. Raises FactError if a fact of one is missing or has neither a
    source nor a reason."""
    table = published_table()
    facts = read_facts(table["fact"])
    doubts = read_doubts(table["doubt"])
    return tuple(Published.of(row, facts, doubts) for row in table["run"])


def published_table() -> dict[str, Any]:
    """Return the table as it is written."""
    with TABLE.open("rb") as file:
        return tomllib.load(file)


def _config(row: Mapping[str, Any], facts: Mapping[str, Fact]) -> RunConfig:
    """Return the run file of a row."""
    return load_run(None, run_keys(row, facts)).on_device("cuda")


def run_keys(row: Mapping[str, Any], facts: Mapping[str, Fact]) -> Sequence[str]:
    """Return the keys of a row's run file, as on the command line, by the facts of its software."""
    layout = row["layout"]
    keys: dict[str, Any] = {f"model.{key}": value for key, value in row["model"].items()}
    for axis in ("tensor", "pipeline", "context", "data", "expert"):
        keys[f"parallel.{axis}"] = layout[axis]
    keys["parallel.sequence"] = layout["sequence"]
    keys["parallel.zero"] = layout["zero"]
    # in a pipeline FSDP keeps weights and whole gradients over a step, as ZeRO-1 does
    if layout["fsdp"] and layout["pipeline"] == 1:
        keys["parallel.zero"] = 3
    if layout["expert"] > 1:
        keys["parallel.expert_tensor"] = 1
    if layout["chunks"] > 1:
        keys["parallel.schedule"] = "interleaved"
        keys["parallel.chunks"] = layout["chunks"]
    keys |= RECOMPUTE[row["recompute"]]
    keys["precision.compute"] = "bf16"
    if row["precision"] == "fp8":
        keys |= {"fp8.kind": "delayed", "fp8.pad": True}
    if "compile" in facts:
        keys["train.compile"] = facts["compile"].value
    keys["train.seq_length"] = row["seq_length"]
    keys["train.global_batch"] = row["global_batch"]
    keys["train.micro_batch"] = row["micro_batch"]
    keys["train.steps"] = 10
    keys["data.vocab_size"] = 512
    return [f"{key}={_as_toml(value)}" for key, value in keys.items()]


RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "selective": {"parallel.recompute": "selective", "parallel.recompute_modules": ["attention"]},
    "full": {"parallel.recompute": "full", "parallel.recompute_fraction": 1.0},
    # torchtitan keeps every second product of a layer, and of the others makes it again
    # (pytorch/torchtitan@9dec370 torchtitan/parallelisms/parallelize_llama.py: _custom_policy)
    "ops": {"parallel.recompute": "full", "parallel.recompute_fraction": 0.5},
}


def _as_toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return "[" + ", ".join(map(_as_toml, value)) + "]"
    return repr(value)


@dataclass(frozen=True)
class Compared:
    """A published run and its prediction.

    error: of tokens a second, predicted by measured, less 1.
    calibrated: the same with the median factor of the runs of other models with the same software;
        None if there are none.
    """

    run: Published
    predicted: Prediction
    error: float
    calibrated: float | None


def compare(runs: Sequence[Published]) -> list[Compared]:
    """Return the predictions of all runs, with and without a factor of their software."""
    predictions: list[Prediction] = []
    factors: list[float] = []  # measured by predicted seconds
    for run in runs:
        assumed = assumptions_of(run.gpu, run.config.plan)
        assert assumed is not None
        prediction = run.predicted(assumed)
        predictions.append(prediction)
        factors.append(run.seconds / prediction.seconds)
    compared: list[Compared] = []
    for run, prediction, factor in zip(runs, predictions, factors, strict=True):
        others = [
            other_factor
            for other, other_factor in zip(runs, factors, strict=True)
            if other.row["stack"] == run.row["stack"] and other.model != run.model
        ]
        calibrated = factor / median(others) - 1 if others else None
        compared.append(Compared(run, prediction, factor - 1, calibrated))
    return compared


@dataclass(frozen=True)
class Errors:
    """The sizes of errors: of half of all, and of nine in ten, they are no larger."""

    median: float
    most: float
    runs: int


def errors_of(errors: Sequence[float]) -> Errors:
    """Return how large errors are."""
    sizes = sorted(map(abs, errors))
    return Errors(median(sizes), sizes[ceil(0.9 * len(sizes)) - 1], len(sizes))


def rank_correlations(compared: Sequence[Compared]) -> dict[str, float]:
    """Return Spearman's correlation of predicted and measured speed of the layouts of each model
    that has five or more of them on as many GPUs, in the same precision and software."""
    groups: dict[str, list[Compared]] = {}
    for one in compared:
        row = one.run.row
        name = f"{row['stack']}, {_model_name(row)}, {row['gpus']} {row['gpu']}, {row['precision']}"
        groups.setdefault(name, []).append(one)
    correlations: dict[str, float] = {}
    for name, group in groups.items():
        layouts = {str(one.run.row["layout"]) for one in group}
        if len(layouts) >= 5:
            measured = [one.run.row["tokens_per_s"] for one in group]
            predicted = [-one.predicted.seconds for one in group]
            correlations[name] = _spearman(measured, predicted)
    return correlations


def _model_name(row: Mapping[str, Any]) -> str:
    model = row["model"]
    return model.get("preset") or f"{model['layers']} x {model['hidden']}"


def _spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the correlation of ranks."""
    return correlation(_ranks(one), _ranks(other))


def _ranks(numbers: Sequence[float]) -> list[float]:
    """Return the place of each number; equal ones share theirs."""
    ordered = sorted(numbers)
    return [ordered.index(number) + ordered.count(number) / 2 for number in numbers]


def table_lines(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield the rows of the page."""
    yield "| run | GPUs | layout | tokens/s/GPU | predicted | error | with a factor |"
    yield "|---|---|---|---|---|---|---|"
    for one in compared:
        row = one.run.row
        predicted = row["tokens_per_s"] * (1 + one.error)
        calibrated = "" if one.calibrated is None else f"{one.calibrated:+.0%}"
        yield (
            f"| {row['id']} | {row['gpus']} {row['gpu']} | {_layout(row)} | "
            f"{row['tokens_per_s']:,.0f} | {predicted:,.0f} | {one.error:+.0%} | {calibrated} |"
        )


def _layout(row: Mapping[str, Any]) -> str:
    """Return the axes of a row that are not 1, in short."""
    layout = row["layout"]
    short = {"tensor": "t", "context": "c", "pipeline": "p", "chunks": "v", "expert": "e"}
    axes = [f"{letter}{layout[axis]}" for axis, letter in short.items() if layout[axis] > 1]
    return " ".join([*axes, f"d{layout['data']}"])


def summary_lines(groups: Mapping[str, Sequence[Compared]]) -> Iterator[str]:
    """Yield the errors of groups of runs."""
    yield "| runs | number | median | nine in ten | with a factor | nine in ten |"
    yield "|---|---|---|---|---|---|"
    for name, group in groups.items():
        plain = errors_of([one.error for one in group])
        yield f"| {name} | {plain.runs} | {plain.median:.1%} | {plain.most:.1%} |{_factored(group)}"


def groups_of(compared: Sequence[Compared]) -> dict[str, list[Compared]]:
    """Return all runs, those of each precision, and those of each software."""
    groups: dict[str, list[Compared]] = {"all": [*compared]}
    for one in compared:
        groups.setdefault(one.run.row["precision"], []).append(one)
    for one in compared:
        groups.setdefault(one.run.row["stack"], []).append(one)
    return groups


def by_what_is_known(runs: Sequence[Published]) -> dict[str, list[Compared]]:
    """Return runs by what is known of them: all, with facts of a source alone, those whose layout
    and batch were published, and those whose speed is not in doubt."""
    compared = compare(runs)
    groups = {"all facts": compared}
    groups["facts with a source"] = compare([run.by_sources() for run in runs])
    groups["nothing of the row assumed"] = [one for one in compared if "assumed" not in one.run.row]
    groups["not in doubt"] = [one for one in compared if not one.run.in_doubt]
    return groups


def fact_lines(facts: Sequence[Fact]) -> Iterator[str]:
    """Yield the facts of all software, each with its source or why it is assumed."""
    yield "| software | fact | is | source |"
    yield "|---|---|---|---|"
    for fact in facts:
        scope = ", ".join((fact.gpu, *fact.runs) if fact.gpu else fact.runs)
        name = f"{fact.kind} ({scope})" if scope else fact.kind
        source = fact.source or f"*assumed*: {fact.assumed}"
        yield f"| {fact.software} | {name} | {fact.value} | {source} |"


def doubt_lines(doubts: Sequence[Doubt]) -> Iterator[str]:
    """Yield the runs whose speed is in doubt, and why."""
    yield "| runs | why |"
    yield "|---|---|"
    for doubt in doubts:
        # an id that ends so is the beginning of several
        names = [f"{run}..." if run.endswith("-") else run for run in doubt.runs]
        reason = f"{doubt.why} ({doubt.source})" if doubt.source else doubt.why
        yield f"| {', '.join(names)} | {reason} |"


def _factored(group: Sequence[Compared]) -> str:
    """Return the last cells of a row: the errors with a factor."""
    known = [one.calibrated for one in group if one.calibrated is not None]
    if not known:
        return " - | - |"
    errors = errors_of(known)
    return f" {errors.median:.1%} | {errors.most:.1%} |"


def main() -> None:
    """Print the tables of docs/planning.md."""
    table = published_table()
    known = by_what_is_known(published_runs())
    compared = known["all facts"]
    tables = (
        summary_lines(known),
        fact_lines(read_facts(table["fact"])),
        doubt_lines(read_doubts(table["doubt"])),
        summary_lines(groups_of(compared)),
        table_lines(compared),
    )
    for lines in tables:
        print("\n".join([*lines, ""]))
    for name, value in rank_correlations(compared).items():
        print(f"{name}: {value:.2f}")


if __name__ == "__main__":
    main()
