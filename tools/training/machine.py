"""The check that a run fits the machine that starts it: ranks, threads, workers and memory against
what there is.

A number with a digit too many would otherwise start thousands of processes, or fill the memory
until the system kills something. Only what cannot work is refused: memory is the least that
weights, gradients, optimizer state and logits take.
"""

from collections.abc import Iterator

import torch

from megaprec.errors import UserError
from megaprec.optim.muon import least_moments
from megaprec.resources import cores, memory_bytes, most_processes
from tools.config.checks import make_rule
from tools.config.expert_ranks import replicas
from tools.config.layouts import in_keys
from tools.config.run_file import RunConfig
from tools.console.units import counted


def check_machine(config: RunConfig, ranks: int, device: str) -> None:
    """Raise UserError if this machine cannot run `ranks` of the run's ranks. device: cpu or
    cuda."""
    if problems := [*_processes(config, ranks), *_memory(config, ranks, device)]:
        raise UserError(*problems)


def _processes(config: RunConfig, ranks: int) -> Iterator[str]:
    most = most_processes()
    here = f"this machine has {counted(cores(), 'core')}, and takes {most} at most"
    if ranks > most:
        yield (
            f"{in_keys(config.parallel)}: {ranks:,} local ranks, but {here}: make the layout "
            "smaller, or start the ranks on several machines"
        )
    for key in ("train.threads", "data.workers"):
        if config.get(key) > most:
            yield (
                f"{key} = {config.get(key)}, but {here}: use 0, which takes the cores that there "
                "are"
            )


def _memory(config: RunConfig, ranks: int, device: str) -> Iterator[str]:
    """Yield a problem if the least memory of the run's state is more than there is. Custom models
    are not estimated."""
    if config.model.factory:
        return
    model = config.sized_model
    p = config.parallel
    whole, sharded = config.plan.bytes_per_parameter(least_moments(make_rule(config.optimizer)))
    experts = model.expert_parameters
    copies = ((model.num_parameters - experts, p.copies), (experts, replicas(p)))
    state = sum(count * (whole * n + sharded * (1 if p.zero else n)) for count, n in copies)
    logits = p.data * config.train.micro_batch * config.train.seq_length * model.vocab * 2
    least = (state + logits) * ranks // config.world_size
    there = _bytes_there(device, ranks)
    if least > there:
        yield (
            f"the run needs at least {least / 2**30:,.1f} GiB of memory here "
            f"({model.num_parameters:,} parameters with gradients and optimizer state, and logits "
            f"of {config.train.micro_batch:,} x {config.train.seq_length:,} tokens), but there "
            f"are {there / 2**30:,.1f} GiB: make model.* or train.micro_batch smaller"
        )


def _bytes_there(device: str, ranks: int) -> int:
    """Return the memory of the devices of `ranks` ranks, or of this machine (of its container, if
    that has less)."""
    if device == "cuda":
        devices = range(min(ranks, torch.cuda.device_count()))
        return sum(torch.cuda.get_device_properties(number).total_memory for number in devices)
    return memory_bytes()
