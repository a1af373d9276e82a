"""`megaprec data plan RUN.toml`: what a run will read of each of its data sets.

It prints samples, tokens and epochs of each, and the shares in each phase of a blend whose weights
change. Data sets that are missing are built first, as `megaprec train` would build them. The
numbers are those of all steps of the run, of which a resumed one has taken some.
"""

import argparse
from typing import Any

from rich.table import Table

from tools.config.resolved_run import resolve_run
from tools.console.json_output import print_result
from tools.console.tables import print_table
from tools.console.units import counted
from tools.training.blend_plan import GOOD_EPOCHS, PhasePlan, SetPlan, phase_plans, set_plans
from tools.training.corpus import open_corpus
from tools.training.resume import other_tokens


def plan(args: argparse.Namespace) -> int:
    """Run `megaprec data plan`. Raises UserError for data that cannot be trained on."""
    config = resolve_run(args.file, args.overrides)
    corpus = open_corpus(config)
    # a note, for a run may accept them
    notes = [f"megaprec train refuses this run: {line}" for line in other_tokens(config, corpus)]
    sets = set_plans(config, corpus)
    phases = phase_plans(config, corpus)
    total = (
        f"{config.total_samples:,} samples of {counted(config.train.seq_length, 'token')} in "
        f"{counted(config.train.steps, 'step')}"
    )

    def show() -> None:
        for note in notes:
            print(f"note       {note}")
        print(total)
        print_table(_table_of_sets(sets))
        if config.data.blend_changes:
            print_table(_table_of_phases(sets, phases))

    return print_result(args, lambda: {**_document(sets, phases), "notes": notes}, show)


def _table_of_sets(sets: list[SetPlan]) -> Table:
    """Return what the whole run takes of each data set."""
    table = Table("data set", "source")
    for title in ("share", "samples", "tokens", "of an epoch", "epochs"):
        table.add_column(title, justify="right")
    for plan in sets:
        warning = f" (above {GOOD_EPOCHS})" if plan.epochs > GOOD_EPOCHS else ""
        table.add_row(
            plan.name,
            plan.source,
            f"{plan.share:.4g}",
            f"{plan.samples:,}",
            f"{plan.tokens:,}",
            f"{plan.available:,}",
            f"{plan.epochs:,.2f}{warning}",
        )
    return table


def _table_of_phases(sets: list[SetPlan], phases: list[PhasePlan]) -> Table:
    """Return the share of each data set in each phase."""
    table = Table("samples of the run")
    for plan in sets:
        table.add_column(plan.name, justify="right")
    for phase in phases:
        table.add_row(f"{phase.begin + 1:,} to {phase.end:,}", *phase.described_shares)
    return table


def _document(sets: list[SetPlan], phases: list[PhasePlan]) -> dict[str, Any]:
    """Return the plan for programs."""
    return {
        "sets": [{**plan._asdict(), "epochs": plan.epochs} for plan in sets],
        "phases": [phase._asdict() for phase in phases],
    }
