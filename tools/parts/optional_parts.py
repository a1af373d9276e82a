"""The door to what few uses need: a function or class is loaded when it is asked for, and its
module with it.

A plain run loads neither the planner nor converters nor other systems' dialects, and knows all of
them by their names here: `optional_parts.print_plan(...)`.
"""

from typing import TYPE_CHECKING

from megaprec.front_door import front_door

if TYPE_CHECKING:
    from megaprec.diagnose.router_monitor import RouterMonitor
    from megaprec.diagnose.tensor_statistics import TensorStatistics
    from megaprec.optim.state.host_memory import HostMemory
    from megaprec.tested_versions import untested
    from megaprec.tokens.packed_samples import evaluated_packed, split_packed
    from megaprec.tokens.pieces import in_pieces
    from models.decoder.own_model import stage_maker
    from models.engine.fp8_shadow import run_shadow
    from models.engine.sentinel import Sentinel, SilentFault
    from models.engine.shared_drawing import InitialWeights, draw_weights
    from models.estimate.gpus import gpu_named
    from models.nvfp4_models import nvfp4_problems
    from tools.analysis.plots.shadow_plot import plot_shadow
    from tools.analysis.plots.training_plot import plot_run
    from tools.analysis.verdict.measure import make_yardsticks
    from tools.analysis.verdict.verdict import verdict_lines
    from tools.commands.convert import export_run
    from tools.config.dialect_tables import resolve_dialect
    from tools.config.initial_model import add_initial_model
    from tools.config.key_suggestions import unknown_key_problems
    from tools.config.relative_paths import working_directory_hint
    from tools.convert.growth import VocabularyGrowth, moved_tokens
    from tools.convert.initial import (
        initial_model,
        leaves_model_open,
        model_of_branch,
        open_initial,
        start_from,
        with_more_tokens,
    )
    from tools.convert.kept_ids import saved_ids
    from tools.inference.sample import sample_text
    from tools.interop.foreign.whose import other_owner
    from tools.journal.attention_records import attention_fields
    from tools.journal.router_records import collapse_event, router_fields
    from tools.journal.shadow_records import shadow_event, shadow_fields
    from tools.journal.source_records import source_fields
    from tools.journal.spike_records import spike_event
    from tools.journal.statistics_records import statistics_event
    from tools.journal.timeline_file import write_timeline
    from tools.journal.trackers import Feed, require_trackers
    from tools.training.banner import (
        print_marked,
        print_memory,
        print_outcome,
        print_skipped,
        print_start,
    )
    from tools.training.blend_plan import blend_lines
    from tools.training.compiling import compile_leaves, missed_lines
    from tools.training.data_building import build_texts, build_validation_set
    from tools.training.data_notes import (
        begin_notes,
        different_tokenizer_notes,
        loss_mask_notes,
        tokenizer_notes,
    )
    from tools.training.first_loss import expected_first_loss
    from tools.training.former_folder import notes_on_former_places, require_no_former_checkpoint
    from tools.training.fp8_summary import check_fp8, fp8_lines
    from tools.training.harness import Harness, require_harness
    from tools.training.initial import growth_of, initial_event
    from tools.training.kept_exports import (
        export_kept,
        export_note,
        require_exportable,
        require_exportable_tokenizer,
    )
    from tools.training.kept_format import kept_format_note, with_kept_format
    from tools.training.kernel_lines import kernel_lines
    from tools.training.launch import launch_local
    from tools.training.memory_history import memory_history
    from tools.training.open_texts import open_text
    from tools.training.packing_notes import packing_notes, padding_fields
    from tools.training.prediction import measured_prediction, print_plan
    from tools.training.prepare import open_checked, prepare, verify_models, write_yardsticks
    from tools.training.profiling import profile_of_steps
    from tools.training.resume import resume_event, resumed_progress
    from tools.training.stopping import note_failure
    from tools.training.verified_models import verified_models

__getattr__, __dir__ = front_door(__name__)
