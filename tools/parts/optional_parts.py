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
    "working_directory_hint": "tools.config.relative_paths",
    "unknown_key_problems": "tools.config.key_suggestions",
    "resolve_dialect": "tools.config.dialect_tables",
    # of train.init_from and train.branch_from
    "initial_model": "tools.convert.initial",
    "leaves_model_open": "tools.convert.initial",
    "model_of_branch": "tools.convert.initial",
    "open_initial": "tools.convert.initial",
    "start_from": "tools.convert.initial",
    "with_more_tokens": "tools.convert.initial",
    "add_initial_model": "tools.config.initial_model",
    "growth_of": "tools.training.initial",
    "initial_event": "tools.training.initial",
    # of a run that goes on, or begins
    "resume_event": "tools.training.resume",
    "resumed_progress": "tools.training.resume",
    "with_kept_format": "tools.training.kept_format",
    "kept_format_note": "tools.training.kept_format",
    "expected_first_loss": "tools.training.first_loss",
    "saved_ids": "tools.convert.kept_ids",
    "VocabularyGrowth": "tools.convert.growth",
    "moved_tokens": "tools.convert.growth",
    "verified_models": "tools.training.verified_models",
    # of a text that has not been tokenized
    "open_text": "tools.training.open_texts",
    "build_texts": "tools.training.data_building",
    "build_validation_set": "tools.training.data_building",
    # of keys of the run file that few runs have
    "stage_maker": "models.decoder.own_model",
    "nvfp4_problems": "models.nvfp4_models",
    "check_fp8": "tools.training.fp8_summary",
    "fp8_lines": "tools.training.fp8_summary",
    "draw_weights": "models.engine.shared_drawing",
    "InitialWeights": "models.engine.shared_drawing",
    "run_shadow": "models.engine.fp8_shadow",
    "shadow_event": "tools.journal.shadow_records",
    "shadow_fields": "tools.journal.shadow_records",
    "write_timeline": "tools.journal.timeline_file",
    "TensorStatistics": "megaprec.diagnose.tensor_statistics",
    "statistics_event": "tools.journal.statistics_records",
    "HostMemory": "megaprec.optim.state.host_memory",
    "compile_leaves": "tools.training.compiling",
    "StepProfile": "tools.training.profiling",
    "missed_lines": "tools.training.compiling",
    "Harness": "tools.training.harness",
    "require_harness": "tools.training.harness",
    "Feed": "tools.journal.trackers",
    "require_trackers": "tools.journal.trackers",
    "Sentinel": "models.engine.sentinel",
    "SilentFault": "models.engine.sentinel",
    "in_pieces": "megaprec.tokens.pieces",
    "split_packed": "megaprec.tokens.packed_samples",
    "evaluated_packed": "megaprec.tokens.packed_samples",
    "source_fields": "tools.journal.source_records",
    "spike_event": "tools.journal.spike_records",
    "gpu_named": "models.estimate.gpus",
    "RouterMonitor": "megaprec.diagnose.router_monitor",
    "router_fields": "tools.journal.router_records",
    "attention_fields": "tools.journal.attention_records",
    "collapse_event": "tools.journal.router_records",
    "untested": "megaprec.tested_versions",
    "require_exportable": "tools.training.kept_exports",
    "require_exportable_tokenizer": "tools.training.kept_exports",
    "export_kept": "tools.training.kept_exports",
    "export_note": "tools.training.kept_exports",
    # of the first rank, or of the launcher
    "begin_notes": "tools.training.data_notes",
    "different_tokenizer_notes": "tools.training.data_notes",
    "loss_mask_notes": "tools.training.data_notes",
    "packing_notes": "tools.training.packing_notes",
    "tokenizer_notes": "tools.training.data_notes",
    "print_start": "tools.training.banner",
    "blend_lines": "tools.training.blend_plan",
    "print_marked": "tools.training.banner",
    "print_memory": "tools.training.banner",
    "print_outcome": "tools.training.banner",
    "print_skipped": "tools.training.banner",
    "launch_local": "tools.training.launch",
    "open_checked": "tools.training.prepare",
    "prepare": "tools.training.prepare",
    "verify_models": "tools.training.prepare",
    "write_yardsticks": "tools.training.prepare",
    "kernel_lines": "tools.training.kernel_lines",
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
