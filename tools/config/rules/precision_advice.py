"""Advice on a plan: a line for each setting that is valid and unwise. It never stops a run."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megaprec.precision.plan import PrecisionPlan, dtype_name

HALVES = (torch.float16, torch.bfloat16)
MANY_TERMS = 8  # micro-batches, or ranks, whose sum in half precision loses something
HIGH_SCALE = 2.0**24  # a first loss scale that overflows in most models


@dataclass(frozen=True)
class PlanInRun:
    """A plan in a run with so many micro-batches and replicas; 1 of each if they are not known."""

    plan: PrecisionPlan
    microbatches: int = 1
    replicas: int = 1


def advice(planned_run: PlanInRun) -> list[str]:
    """Return a line for each unwise choice of a run's plan."""
    plan = planned_run.plan
    return [
        *_on_scaling(plan),
        *_on_sums(planned_run),
        *_on_state(plan),
        *_on_activations(plan),
        *_on_steps(plan),
    ]


def _on_scaling(plan: PrecisionPlan) -> Iterator[str]:
    """Yield lines on a loss scale that does not suit fp16."""
    scaling = plan.scaling
    # 2**-24, the smallest number of fp16
    if torch.float16 in (plan.compute, plan.parameters) and scaling.kind == "none":
        yield (
            "fp16 without loss scaling: gradients below 6e-8 become zero; scale the loss "
            "dynamically"
        )
    if plan.compute != torch.float16:
        return
    if scaling.kind == "constant":
        yield (
            f"constant loss scale {scaling.initial:g}: it cannot follow gradients that grow or "
            "shrink"
        )
    if scaling.kind == "dynamic" and scaling.initial >= HIGH_SCALE:
        yield (
            f"the loss scale starts at {scaling.initial:g}: expect some skipped first steps until "
            "it has come down"
        )


def _on_sums(planned_run: PlanInRun) -> Iterator[str]:
    """Yield lines on sums of many terms in half precision."""
    plan = planned_run.plan
    # a sum of a few terms is about as exact as they are
    if plan.gradients in HALVES and planned_run.microbatches > MANY_TERMS:
        yield (
            f"gradients are added up in {dtype_name(plan.gradients)} over "
            f"{planned_run.microbatches} micro-batches: late ones are rounded away; add them up in "
            "fp32"
        )
    if plan.reduce in HALVES and planned_run.replicas > MANY_TERMS:
        consequence = "may overflow" if plan.reduce == torch.float16 else "loses bits"
        yield (
            f"gradients are summed over {planned_run.replicas} replicas in "
            f"{dtype_name(plan.reduce)}, which {consequence}; reduce in fp32"
        )


def _on_state(plan: PrecisionPlan) -> Iterator[str]:
    """Yield lines on masters, their rounding, and moments."""
    has_half_masters = plan.masters in HALVES
    if has_half_masters and plan.rounding == "nearest":
        # half a unit in the last place of a weight is at least so much of it
        share = 4096 if plan.masters == torch.float16 else 512
        yield (
            f"no masters, and {dtype_name(plan.masters)} weights rounded to the nearest: updates "
            f"below 1/{share} of a weight are lost; keep fp32 masters, or round bf16 stochastically"
        )
    if not has_half_masters and plan.rounding == "stochastic":
        yield "stochastic rounding beside fp32 masters only adds noise: masters lose nothing"
    if plan.moments == torch.bfloat16:
        # bf16 has 8 bits: a change of less than half a unit in the last place is rounded away
        yield (
            "bf16 moments cannot hold a change of less than 1/512: with beta2 of 0.998 or more the "
            "second never falls"
        )
    has_masters = plan.masters.itemsize > plan.parameters.itemsize
    if has_masters and not plan.masters_in_checkpoint:
        yield (
            "checkpoints leave out the masters: a resumed run starts from "
            f"{dtype_name(plan.parameters)} weights"
        )


def _on_activations(plan: PrecisionPlan) -> Iterator[str]:
    """Yield lines on buffers, on what stages send, and on TF32."""
    pipeline = dtype_name(plan.pipeline)
    compute = dtype_name(plan.compute)
    if plan.buffers in HALVES:
        # bf16 tells whole numbers apart up to 256 only
        yield (
            f"{dtype_name(plan.buffers)} buffers: rotary angles of distant positions fall "
            "together; keep them fp32"
        )
    if plan.pipeline.itemsize > plan.parameters.itemsize:
        yield (
            f"stages send {pipeline} though layers hold {dtype_name(plan.parameters)}: more traffic"
        )
    if plan.pipeline.itemsize < plan.compute.itemsize:
        yield f"stages send {pipeline}, narrower than the {compute} that they compute in"
    if plan.tf32 and plan.compute != torch.float32:
        yield (
            f"tf32 concerns fp32 products, and these are {compute}: it changes only what is kept "
            "in fp32"
        )


def _on_steps(plan: PrecisionPlan) -> Iterator[str]:
    """Yield lines on steps that overflow, on FP8 scales, and on inputs that nothing casts."""
    if plan.on_nonfinite == "ignore":
        yield "steps with an inf or a NaN are applied: the weights will not recover from it"
    # only delayed scales have a history
    if plan.fp8 is not None and plan.fp8.scales.keeps_history:
        looks_back = plan.fp8.history_length > 1 and plan.fp8.amax_algo == "max"
        if not looks_back:
            yield (
                "FP8 scales follow the last pass alone: one quiet micro-batch lets the next "
                "saturate; look back further"
            )
    # fp32 needs no cast
    if plan.cast_inputs == "none" and plan.compute != torch.float32:
        yield (
            "inputs are not cast: a model that is given fp32 has to cast it to "
            f"{dtype_name(plan.compute)} itself"
        )
