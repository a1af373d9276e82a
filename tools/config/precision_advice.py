"""Advice on a plan: rules that see the plan and, if there is one, its run.

A rule returns a line for the user, or "" if there is nothing to say. Advice never stops a run:
settings that are wrong, not only unwise, have been refused before.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megaprec.precision.plan import PrecisionPlan, dtype_name

HALVES = (torch.float16, torch.bfloat16)
MANY_TERMS = 8  # micro-batches, or ranks, whose sum in half precision loses something


@dataclass(frozen=True)
class PlanInRun:
    """A plan in a run with so many micro-batches and replicas; 1 of each if they are not known."""

    plan: PrecisionPlan
    microbatches: int = 1
    replicas: int = 1


def advice(scene: PlanInRun) -> list[str]:
    """Return a line for everything unwise."""
    return [line for rule in RULES if (line := rule(scene))]


def _unscaled_fp16(scene: PlanInRun) -> str:
    plan = scene.plan
    if torch.float16 not in (plan.compute, plan.parameters) or plan.scaling.kind != "none":
        return ""
    # 2**-24, the smallest number of fp16
    return "fp16 without loss scaling: gradients below 6e-8 become zero; scale the loss dynamically"


def _constant_scale(scene: PlanInRun) -> str:
    plan = scene.plan
    if plan.compute != torch.float16 or plan.scaling.kind != "constant":
        return ""
    return (
        f"constant loss scale {plan.scaling.initial:g}: it cannot follow gradients that grow or "
        "shrink"
    )


def _high_first_scale(scene: PlanInRun) -> str:
    scaling = scene.plan.scaling
    if (
        scaling.kind != "dynamic"
        or scaling.initial < 2.0**24
        or scene.plan.compute != torch.float16
    ):
        return ""
    return (
        f"the loss scale starts at {scaling.initial:g}: expect some skipped first steps until it "
        "has come down"
    )


def _narrow_sums(scene: PlanInRun) -> str:
    plan = scene.plan
    # a sum of a few terms is about as exact as they are
    if plan.gradients not in HALVES or scene.microbatches <= MANY_TERMS:
        return ""
    return (
        f"gradients are added up in {dtype_name(plan.gradients)} over {scene.microbatches} "
        "micro-batches: late ones are rounded away; add them up in fp32"
    )


def _narrow_reduction(scene: PlanInRun) -> str:
    plan = scene.plan
    if plan.reduce not in HALVES or scene.replicas <= MANY_TERMS:
        return ""
    consequence = "may overflow" if plan.reduce == torch.float16 else "loses bits"
    return (
        f"gradients are summed over {scene.replicas} replicas in {dtype_name(plan.reduce)}, which "
        f"{consequence}; reduce in fp32"
    )


def _no_masters(scene: PlanInRun) -> str:
    plan = scene.plan
    if plan.masters not in HALVES or plan.rounding == "stochastic":
        return ""
    # half a unit in the last place of a weight is at least so much of it
    share = 4096 if plan.masters == torch.float16 else 512
    return (
        f"no masters, and {dtype_name(plan.masters)} weights rounded to the nearest: updates below "
        f"1/{share} of a weight are lost; keep fp32 masters, or round bf16 stochastically"
    )


def _idle_stochastic_rounding(scene: PlanInRun) -> str:
    plan = scene.plan
    if plan.rounding == "nearest" or plan.masters in HALVES:
        return ""
    return "stochastic rounding beside fp32 masters only adds noise: masters lose nothing"


def _narrow_moments(scene: PlanInRun) -> str:
    if scene.plan.moments != torch.bfloat16:
        return ""
    # bf16 has 8 bits: a change of less than half a unit in the last place is rounded away
    return (
        "bf16 moments cannot hold a change of less than 1/512: with beta2 of 0.998 or more the "
        "second never falls"
    )


def _masters_not_saved(scene: PlanInRun) -> str:
    plan = scene.plan
    if plan.masters_in_checkpoint or plan.masters.itemsize <= plan.parameters.itemsize:
        return ""
    return (
        "checkpoints leave out the masters: a resumed run starts from "
        f"{dtype_name(plan.parameters)} weights"
    )


def _narrow_buffers(scene: PlanInRun) -> str:
    if scene.plan.buffers not in HALVES:
        return ""
    # bf16 tells whole numbers apart up to 256 only
    return (
        f"{dtype_name(scene.plan.buffers)} buffers: rotary angles of distant positions fall "
        "together; keep them fp32"
    )


def _wide_pipeline(scene: PlanInRun) -> str:
    plan = scene.plan
    if plan.pipeline.itemsize <= plan.parameters.itemsize:
        return ""
    return (
        f"stages send {dtype_name(plan.pipeline)} though layers hold "
        f"{dtype_name(plan.parameters)}: more traffic"
    )


def _narrow_pipeline(scene: PlanInRun) -> str:
    plan = scene.plan
    if plan.pipeline.itemsize >= plan.compute.itemsize:
        return ""
    return (
        f"stages send {dtype_name(plan.pipeline)}, narrower than the {dtype_name(plan.compute)} "
        "that they compute in"
    )


def _idle_tf32(scene: PlanInRun) -> str:
    plan = scene.plan
    if not plan.tf32 or plan.compute == torch.float32:
        return ""
    return (
        f"tf32 concerns fp32 products, and these are {dtype_name(plan.compute)}: it changes only "
        "what is kept in fp32"
    )


def _ignored_overflow(scene: PlanInRun) -> str:
    if scene.plan.on_nonfinite != "ignore":
        return ""
    return "steps with an inf or a NaN are applied: the weights will not recover from it"


def _short_history(scene: PlanInRun) -> str:
    recipe = scene.plan.fp8
    # only delayed scales have a history
    if (
        recipe is None
        or recipe.kind != "delayed"
        or (recipe.history_length > 1 and recipe.amax_algo == "max")
    ):
        return ""
    return (
        "FP8 scales follow the last pass alone: one quiet micro-batch lets the next saturate; "
        "look back further"
    )


def _uncast_inputs(scene: PlanInRun) -> str:
    plan = scene.plan
    # fp32 needs no cast
    if plan.cast_inputs != "none" or plan.compute == torch.float32:
        return ""
    return (
        "inputs are not cast: a model that is given fp32 has to cast it to "
        f"{dtype_name(plan.compute)} itself"
    )


RULES: tuple[Callable[[PlanInRun], str], ...] = (
    _unscaled_fp16,
    _constant_scale,
    _high_first_scale,
    _narrow_sums,
    _narrow_reduction,
    _no_masters,
    _idle_stochastic_rounding,
    _narrow_moments,
    _masters_not_saved,
    _narrow_buffers,
    _wide_pipeline,
    _narrow_pipeline,
    _idle_tf32,
    _ignored_overflow,
    _short_history,
    _uncast_inputs,
)
