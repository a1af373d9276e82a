"""The table of parts that few uses need: a part's module is imported when the part is called.

A plain run loads neither the planner nor converters nor other systems' dialects, and knows all of
them by the names of this table.
"""

from importlib import import_module
from typing import Any

PARTS = {
    # of the command line
    "note_failure": "tools.training.stopping",
    # of reading a run file
    "other_owner": "tools.interop.foreign.whose",
    "unknown_key_problems": "tools.config.key_suggestions",
    "resolve_dialect": "tools.config.dialect_tables",
    # of train.init_from and train.branch_from
    "initial_model": "tools.convert.initial",
    "leaves_model_open": "tools.convert.initial",
    "model_of_branch": "tools.convert.initial",
    "open_initial": "tools.convert.initial",
    "start_from": "tools.convert.initial",
    "with_more_tokens": "tools.convert.initial",
    "saved_ids": "tools.convert.kept_ids",
    "Growth": "tools.convert.growth",
    "moved_tokens": "tools.convert.growth",
    "verified_models": "tools.training.verified_models",
    # of a text that has not been tokenized
    "open_text": "tools.training.open_texts",
    "build_texts": "tools.training.data_building",
    "build_validation_set": "tools.training.data_building",
    # of keys of the run file that ask for more than training
    "compile_leaves": "tools.training.compiling",
    "missed_lines": "tools.training.compiling",
    "Harness": "tools.training.harness",
    "require_harness": "tools.training.harness",
    "Feed": "tools.journal.trackers",
    "require_trackers": "tools.journal.trackers",
    # of the start and the end of a run
    "launch_local": "tools.training.launch",
    "print_plan": "tools.training.prediction",
    "measured_prediction": "tools.training.prediction",
    "sample_text": "tools.inference.sample",
    "plot_run": "tools.analysis.plots.training_plot",
    "plot_shadow": "tools.analysis.plots.shadow_plot",
    "make_yardsticks": "tools.analysis.verdict.measure",
    "verdict_lines": "tools.analysis.verdict.verdict",
    "export_run": "tools.commands.convert",
}
"""The modules that define functions and classes, by the name of each."""


def part(name: str) -> Any:
    """Return the function or class of a name in PARTS; import its module if that has not been
    done."""
    return getattr(import_module(PARTS[name]), name)
