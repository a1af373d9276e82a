"""The compiled leaves and regions of a run (`train.compile`), decided by all ranks together before
the first step.

Each rank runs its stages on tensors without storage, which shows every call of a leaf or a region
in a training step. It compiles these calls, tries each and compares it with its function. Compiled
code rounds differently, and tensor ranks compute the same norms of the same numbers, so what one
rank cannot compile is compiled on none. torch keeps compiled code between runs, in the folder that
TORCHINDUCTOR_CACHE_DIR names.

A leaf is a function of tensors without matrix products and messages, such as a norm or a loss
(`parallel.leaves`); a region is a larger part of a layer (`parallel.regions`). A call is one of
them with the shapes, strides and dtypes of its tensors; its form is the function compiled for it.
"""

import importlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.reader import Store
from megaprec.comm.axis import Axis, device_of
from megaprec.comm.gathered_texts import gather_entries
from megaprec.comm.layout import Layout, Part, attach
from megaprec.optim.decision.one_pass import (
    LENGTHS,
    adamw_numbers,
    has_one_pass,
    squares_and_zeros,
    update_in_one_pass,
)
from megaprec.optim.rules.muon.rule import moments_of
from megaprec.optim.rules.update_rules import AdamW, Step, UpdateRule
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.precision.plan import PrecisionPlan
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.estimate.memory import StageMemory
from parallel.compiled_leaves import compiled, trial_difference
from parallel.leaves import PLAIN, LeafCall, Leaves
from parallel.regions import compiled_region, trial_difference_of_region
from tools.config.rules.derived import make_rule
from tools.config.run_file import RunConfig
from tools.console.units import counted
from tools.console.wrapped import say
from tools.training.changed_keys import NOT_EXACT_MARK

MAX_CHARACTERS = 160  # of a compiler's error


def compile_leaves(
    config: RunConfig, model: ModelConfig, mesh: DeviceMesh | None, resumed: Path | None = None
) -> Leaves:
    """Return the compiled forms of leaves that `train.compile` asks for, for the same leaves on
    every rank; PLAIN if it is off. Collective; rank 0 prints which leaves are compiled.

    model: with the size of its vocabulary. resumed: the checkpoint from which the run resumes.
    """
    world = Axis.world(mesh)
    device = device_of(mesh)
    mode = config.compile_mode(device.type)
    if mode == "off":
        if world.rank == 0:
            for line in _describe_change("", resumed):
                say(line)
        return PLAIN
    start = time.perf_counter()
    calls = leaf_calls(config, model, mesh, device)
    if world.rank == 0:
        say(
            f"compiling  {counted(len(calls), 'form')}: some seconds each at first, less in "
            "later runs"
        )
    forms, hindrances = try_calls(calls)
    # what one rank cannot compile is compiled on none
    own_names = dict.fromkeys((call.name for call in forms), "")
    compiled_names = gather_entries(own_names, world, device)
    reasons = {name: f"rank {world.rank}: {reason}" for name, reason in hindrances.items()}
    failures = gather_entries(reasons, world, device)
    leaf_names = ", ".join(sorted(compiled_names.keys() - failures.keys()))
    if world.rank == 0:
        seconds = time.perf_counter() - start
        for line in _describe_outcome(leaf_names, failures, seconds):
            say(line)
        for line in _describe_change(leaf_names, resumed):
            say(line)
    forms = {call: form for call, form in forms.items() if call.name not in failures}
    return Leaves(forms, leaf_names, by_region=mode == "block")


def missed_lines(leaves: Leaves, world: Axis, device: torch.device) -> list[str]:
    """Return a line for each compiled leaf that was also called in forms that are not compiled, in
    the steps of any rank. Collective over the world."""
    compiled_names = leaves.names.split(", ")
    misses = dict[str, str]()
    for name, count in leaves.misses.items():
        if name in compiled_names:
            misses[name] = f"{counted(count, 'call')} on rank {world.rank}"
    lines = list[str]()
    for name, calls in gather_entries(misses, world, device).items():
        lines.append(
            f"note       {name}: {calls} of the first step ran uncompiled, with other shapes or "
            "strides than the calls that were foreseen"
        )
    return lines


def _describe_outcome(
    leaf_names: str, failures: Mapping[str, str], seconds: float
) -> Iterator[str]:
    """Yield a line for the compiled leaves, and one for each reason why others are not."""
    if leaf_names:
        yield f"compiled   {leaf_names}: {seconds:.0f} s; torch keeps the code in {_folder()}"
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in failures.items():
        names_by_reason.setdefault(reason, []).append(name)
    for reason, affected in names_by_reason.items():
        leaves = ", ".join(sorted(affected))
        yield f"note       not compiled on any rank: {leaves}; the reason on {reason}"


def _describe_change(leaf_names: str, resumed: Path | None) -> Iterator[str]:
    """Yield a line if the checkpoint's run had other compiled leaves."""
    if resumed is None:
        return
    before = Store(resumed).index.get("compiled", "")
    if before != leaf_names:
        change = f"{before or 'none'} -> {leaf_names or 'none'}"
        yield f"changed    compiled code: {change}{NOT_EXACT_MARK}"


def leaf_calls(
    config: RunConfig, model: ModelConfig, mesh: DeviceMesh | None, device: torch.device
) -> list[LeafCall]:
    """Return the different calls of leaves in a training step of this rank, in the order of their
    first use."""
    noted = dict[LeafCall, None]()
    options = replace(
        config.engine_options,
        leaves=Leaves(recorded_calls=noted, by_region=config.compile_mode(device.type) == "block"),
    )
    # The estimate of memory runs each stage on tensors without storage, and so calls every leaf.
    memory = StageMemory(
        model,
        config.plan,
        options,
        tp=config.parallel.tensor,
        cp=config.parallel.context,
        tp_rank=Axis.of(mesh, "tp").rank,
        cp_rank=Axis.of(mesh, "cp").rank,
        device="cuda" if device.type == "cuda" else "cpu",
        halves=False,
        packed=config.data.reset_position_ids,
    )
    pp_rank = Axis.of(mesh, "pp").rank
    placement = config.schedule.rank_of_stage
    stage_cuts = cuts(
        model, len(placement), options.seq_length, options.layers, placement, options.recompute
    )
    for stage_cut in stage_cuts:
        if placement[stage_cut.stage] == pp_rank:
            memory.activation_bytes(stage_cut)
    if device.type == "cuda":
        noted |= dict.fromkeys(one_pass_calls(config.plan, make_rule(config.optimizer)))
    # Each once, in the order of their first use.
    return list(dict.fromkeys(call.on(device.type) for call in noted))


def one_pass_calls(plan: PrecisionPlan, rule: UpdateRule) -> list[LeafCall]:
    """Return the calls of leaves in the statistics of gradients and in AdamW's update.

    They are noted while both run on a buffer without storage, of each length that passes have.
    Weights held in FP8 are not tried.
    """
    noted = dict[LeafCall, None]()
    leaves = Leaves(recorded_calls=noted)
    step = Step(0.0, 0.0, *torch.ones(3, device="meta").unbind())
    # weights as the plan holds them, and weights that it keeps in FP32
    for plan_of_weights in (plan, replace(plan, keep_fp32=("*",))):
        longest, *_ = LENGTHS
        parameter = torch.nn.Parameter(torch.empty(longest, device="meta"))
        attach(parameter, Layout((Part("weight", (longest,)),)))
        state = moments_of(rule, parameter)
        meta = torch.device("meta")
        buffer = Buffer(
            parameters=[parameter],
            plan=plan_of_weights,
            dp=Axis("dp"),
            shards=Axis("zero"),
            pp_rank=0,
            device=meta,
            state=state,
        )
        for length in LENGTHS:
            tile = next(buffer.tiles(0, length, length))
            leaves(squares_and_zeros, tile.grads)
            if isinstance(rule, AdamW) and has_one_pass(tile, rule):
                numbers = adamw_numbers(rule, step)
                update_in_one_pass(leaves, tile, rule, numbers, lambda: None)
    return list(noted)


def try_calls(calls: list[LeafCall]) -> tuple[dict[LeafCall, Callable[..., Any]], dict[str, str]]:
    """Compile each call, and compare what it computes with the uncompiled function.

    Return the compiled forms, and by the name of each leaf that failed the first reason. Forms of
    a leaf that failed may be among the first.
    """
    forms = dict[LeafCall, Callable[..., Any]]()
    reasons = dict[str, str]()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of its own parts
        for call in calls:
            try:
                if call.region:
                    forms[call] = compiled_region(call)
                    reason = trial_difference_of_region(call, forms[call])
                else:
                    forms[call] = compiled(call)
                    reason = trial_difference(call, forms[call])
            except Exception as error:  # whatever a compiler that is missing or broken raises
                reason = _error_line(error)
            if reason:
                reasons.setdefault(call.name, reason)
    # what trials have used is free for the run
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return forms, reasons


def _error_line(error: Exception) -> str:
    """Return a compiler's error in one line: the first that tells of an error."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()] or [""]
    first_error = next((line for line in lines if "error:" in line.lower()), lines[0])
    return f"{type(error).__name__}: {first_error}"[:MAX_CHARACTERS]


def _folder() -> str:
    """Return the folder in which torch keeps compiled code."""
    runtime: Any = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    return str(runtime.cache_dir())
