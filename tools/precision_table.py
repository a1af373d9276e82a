"""docs/precision.md: which feature of mixed precision each of five systems has, and what proves it of megaprec.

A row is a feature that one of their documentations names. megaprec has all of them; its column links the tests that
train or compute with each.
`python -m tools.precision_table` writes the page.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SYSTEMS = ("NxD", "SMP", "Colossal-AI", "InternEvo", "NeMo")
PAGE = Path(__file__).parent.parent / "docs" / "precision.md"
HEAD = """# Mixed precision in five systems' words

A run file says its precision natively (`megaprec keys`) or in the words of one other system: `[precision.nxd]`,
`[precision.smp]`, `[precision.colossalai.fp16]`, `[precision.internevo]` or `[precision.nemo]`. The docstrings of
`megaprec/dialects/` list their keys. Two commands help:

```sh
megaprec precision show run.toml                    # the plan it comes to, each field with the key that decided it
megaprec precision translate run.toml --to nemo     # the same plan in another system's words, and what they cannot say
```

Both also take a file as users of those systems have it: Python, which is read and never run, JSON or TOML.

Below: "yes" and "no" are what the system's documentation or code has, "part" what it has with restrictions, "?" what
was not looked at. The column of megaprec names tests that train or compute with the feature, and some that show how a
configuration which asks for it is understood. This page is made by `python -m tools.precision_table`.

"""
Have = Literal["yes", "part", "no", "?"]


@dataclass(frozen=True)
class Feature:
    """systems: what each of SYSTEMS has, in order. proofs: tests as "file::function", without folder and ending."""

    name: str
    systems: tuple[Have, Have, Have, Have, Have]
    proofs: tuple[str, ...]


KEY = "test_dialect_keys::test_a_key_changes_what_it_decides_and_nothing_else"
TRAINS = "test_modes::test_a_mode_trains_in_a_layout_as_it_does_on_one_process"
RUNNING = "test_modes::test_the_tensors_of_a_running_model_have_the_dtypes_that_the_system_gives_them"
KEPT = "test_modes::test_what_is_kept_of_a_parameter_has_the_dtypes_that_the_system_gives_it"
FP8_MODE = "test_fp8_modes::test_a_mode_trains_on_four_ranks_in_the_formats_that_it_names"
FEATURES: tuple[Feature, ...] = (
    Feature(
        "FP16 parameters with FP32 masters",
        ("no", "yes", "yes", "yes", "yes"),
        ("test_amp::test_every_layout_skips_the_same_steps_at_the_same_scales",),
    ),
    Feature(
        "masters made from values that were not rounded",
        ("?", "yes", "no", "no", "no"),
        ("test_optimizer::test_masters_are_made_of_the_values_before_they_are_rounded",),
    ),
    Feature(
        "masters as the defaults follow ZeRO-1 (`use_master_weights`)",
        ("yes", "no", "no", "no", "no"),
        (KEPT, "test_precision_run::test_zero_of_the_run_is_zero_of_nxd", KEY),
    ),
    Feature(
        "weights without masters, stochastically rounded",
        ("yes", "no", "no", "no", "no"),
        ("test_state_precision::test_small_updates_of_bf16_weights_add_up_in_the_mean", TRAINS, KEY),
    ),
    Feature(
        "masters left out of checkpoints",
        ("yes", "no", "no", "no", "no"),
        (
            "test_rounded_checkpoint::test_a_run_goes_on_from_rounded_weights_as_if_its_masters_had_been_rounded",
            KEY,
        ),
    ),
    Feature(
        "autocast over FP32 parameters (TORCH, O1)",
        ("no", "no", "yes", "no", "no"),
        (
            "test_drop_in::test_torch_mode_is_autocast_gradscaler_and_fused_adamw_bit_for_bit",
            "test_dialects::test_colossalai_torch_defaults_are_those_of_torchs_gradient_scaler",
            "test_dialects::test_apex_levels",
        ),
    ),
    Feature(
        "optimization levels O0 to O3", ("no", "no", "yes", "no", "no"), (TRAINS, "test_dialects::test_apex_levels")
    ),
    Feature(
        "dynamic loss scaling with hysteresis",
        ("no", "no", "yes", "yes", "yes"),
        ("test_scaler::test_the_scale_takes_the_course_of_megatron",),
    ),
    Feature(
        "constant loss scale",
        ("no", "no", "yes", "no", "yes"),
        ("test_scaler::test_a_constant_scale_never_changes_and_neither_takes_nor_gives_state",),
    ),
    Feature(
        "bounds of the scale",
        ("no", "no", "yes", "yes", "part"),
        ("test_scaler::test_the_scaler_follows_its_rules_and_stays_within_its_bounds",),
    ),
    Feature(
        "one decision to skip over tensor, pipeline and data ranks",
        ("no", "part", "part", "part", "yes"),
        ("test_amp::test_one_bad_gradient_element_anywhere_makes_every_rank_skip_and_changes_nothing",),
    ),
    Feature(
        "clipping by the global norm, each element counted once",
        ("yes", "?", "part", "part", "yes"),
        ("test_optimizer::test_every_logical_element_is_counted_by_exactly_one_rank",),
    ),
    Feature("clipping asked for in the system's own key", ("part", "no", "yes", "yes", "no"), (TRAINS, KEY)),
    Feature(
        "ZeRO-1 (with and without it the same bits)",
        ("yes", "part", "yes", "yes", "yes"),
        ("test_optimizer::test_zero_on_and_off_and_overlap_train_the_same_model_bit_for_bit",),
    ),
    Feature("dtype of gradient accumulation", ("yes", "part", "no", "no", "yes"), (KEPT, KEY)),
    Feature(
        "dtype of gradient reduction, following from a recipe",
        ("no", "no", "no", "no", "yes"),
        (KEPT, "test_dialects::test_nemo_recipes"),
    ),
    Feature(
        "dtype of gradient reduction, following from that of the parameters",
        ("no", "yes", "no", "no", "no"),
        (KEPT, "test_dialects::test_fsdp1_reduces_in_the_dtype_of_parameters_unless_told_otherwise"),
    ),
    Feature(
        "dtype of the residual stream",
        ("no", "no", "no", "yes", "part"),
        (RUNNING, KEY),
    ),
    Feature(
        "attention in a narrower dtype than the model (`use_flash_attn` in FP32), its scores rounded",
        ("?", "?", "?", "yes", "?"),
        (RUNNING, "test_internevo_model::test_scores_and_weights_are_rounded_if_the_plan_says_so"),
    ),
    Feature("dtype of buffers", ("no", "yes", "no", "part", "no"), (RUNNING, KEY)),
    Feature(
        "which inputs are cast, dtype of outputs",
        ("no", "yes", "part", "part", "no"),
        (
            "test_wrap::test_a_planned_model_has_the_dtypes_of_its_plan",
            "test_wrap::test_inner_modules_cast_what_they_are_given_if_the_plan_says_so",
        ),
    ),
    Feature(
        "parts of a model kept in FP32, unrounded",
        ("part", "part", "part", "part", "part"),
        (
            "test_wrap::test_a_part_marked_fp32_keeps_its_values_and_computes_in_fp32",
            "test_marked::test_marks_hold_in_every_layout_and_train_what_one_process_trains",
            "test_state_precision::test_what_is_kept_in_fp32_is_trained_as_in_an_fp32_model_and_the_rest_as_without",
        ),
    ),
    Feature(
        "buffers averaged over an axis",
        ("no", "no", "yes", "yes", "no"),
        (
            "test_wrap::test_floating_buffers_are_averaged_over_their_axis_in_training_and_once_in_evaluation",
            "test_wrap::test_every_way_to_name_a_group_averages_over_that_group",
        ),
    ),
    Feature(
        "TF32 for the time of a run",
        ("no", "no", "no", "part", "no"),
        ("test_precision_run::test_tf32_is_on_for_the_time_of_a_run_that_asks_for_it",),
    ),
    Feature(
        "TF32's numbers without a GPU",
        ("no", "no", "no", "no", "no"),
        ("test_tf32::test_every_number_goes_to_the_nearest_tf32_and_ties_away_from_zero",),
    ),
    Feature(
        "a model in InternEvo's words",
        ("no", "no", "no", "yes", "no"),
        (
            "test_precision_run::test_a_run_in_internevos_words_trains_as_the_same_run_in_native_keys",
            "test_precision_run::test_a_model_in_internevos_words_is_the_model",
        ),
    ),
    Feature("FP8 with delayed scaling", ("no", "yes", "no", "no", "yes"), (FP8_MODE,)),
    Feature(
        "FP8 with current, block and MX scaling",
        ("no", "part", "no", "no", "yes"),
        ("test_fp8_training::test_a_layout_trains_as_one_process_does", FP8_MODE),
    ),
    Feature(
        "weights kept in FP8 (`fp8_params`)",
        ("no", "no", "no", "no", "yes"),
        ("test_fp8_weights::test_training_is_bit_for_bit_that_of_weights_kept_in_fp32",),
    ),
    Feature(
        "FP8 compared with no FP8 during a run",
        ("no", "no", "no", "no", "no"),
        ("test_fp8_shadow::test_training_is_bit_for_bit_the_same_with_and_without_a_shadow",),
    ),
    Feature(
        "every contradiction refused, with key, value and remedy",
        ("part", "?", "part", "part", "part"),
        ("test_dialects::test_what_cannot_be_is_refused_with_key_value_remedy_and_whose_rule_it_is",),
    ),
    Feature(
        "the same plan in another system's words",
        ("no", "no", "no", "no", "no"),
        ("test_dialect_translation::test_what_is_not_listed_as_unsaid_is_said",),
    ),
)


def table() -> str:
    """The page, as Markdown."""
    return HEAD + "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield f"| feature | {' | '.join(SYSTEMS)} | megaprec |"
    yield "|---" * (len(SYSTEMS) + 2) + "|"
    for feature in FEATURES:
        links = ", ".join(map(_link, feature.proofs))
        yield f"| {feature.name} | {' | '.join(feature.systems)} | {links} |"


def _link(proof: str) -> str:
    """The law that the test states, linked to its file."""
    file, _, function = proof.partition("::")
    return f"[{function.removeprefix('test_').replace('_', ' ')}](../tests/{file}.py)"


if __name__ == "__main__":
    PAGE.write_text(table(), encoding="utf-8")
