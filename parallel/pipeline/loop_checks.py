"""Checks of what a user's loop gives to `Pipeline`: its arguments, its batches and the losses of
its function.

Ranks that were given different schedules wait for each other forever, and ranks that compute one
micro-batch together from different samples train on numbers that belong to none of them. So what
must be equal is compared over all ranks: arguments when a pipeline is made, samples in the steps
number 1, 2, 4, 8 and so on, where it costs no time in the long run.
"""

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from megaprec.comm.gathered_texts import gather_texts
from megaprec.comm.layout import layout_of, parameters_of
from megaprec.errors import UserError
from megaprec.kinds import is_number, quoted
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.torch_wrappers import is_dtensor


def require_arguments(
    stages: Sequence[nn.Module],
    optimizer: ParallelAMPOptimizer,
    loss_fn: Callable[..., Any],
    microbatches: int,
    activation: Sequence[int],
    ignore_index: int,
) -> None:
    """Raise UserError, naming all that are wrong, for arguments of `Pipeline` of a wrong type, or
    without a meaning, and otherwise for an optimizer with canonical sums."""
    has_list = isinstance(stages, list | tuple | nn.ModuleList)
    has_modules = has_list and all(isinstance(stage, nn.Module) for stage in stages)
    # a class, such as nn.MSELoss, is callable too
    has_loss_fn = callable(loss_fn) and not isinstance(loss_fn, type)
    has_shape = isinstance(activation, list | tuple) and all(
        is_number(size, whole=True) and size > 0 for size in activation
    )
    # of each rule whether it holds, and the sentence that says it does not
    rules = (
        (
            has_modules,
            f"stages = {quoted(stages)}: must be a list of torch modules, as the optimizer's, "
            "like [model]",
        ),
        (
            isinstance(optimizer, ParallelAMPOptimizer),
            f"optimizer = {quoted(optimizer)}: must be a megaprec.ParallelAMPOptimizer over the "
            "same stages",
        ),
        (
            has_loss_fn,
            f"loss_fn = {quoted(loss_fn)}: must be a function of (output, targets), like "
            'nn.MSELoss(reduction="none")',
        ),
        (
            is_number(microbatches, whole=True),
            f"microbatches = {quoted(microbatches)}: must be a whole number, into how many a "
            "batch is cut",
        ),
        (
            has_shape,
            f"activation = {quoted(activation)}: must be the shape of what a stage sends to the "
            "next, like (sequence, 1, hidden)",
        ),
        (
            is_number(ignore_index),
            f"ignore_index = {quoted(ignore_index)}: must be a number",
        ),
    )
    broken = [sentence for holds, sentence in rules if not holds]
    if broken:
        raise UserError(*broken)
    if optimizer.canonical:
        raise UserError.of("pipeline.canonical_optimizer")


def require_same_chunks(stages: Sequence[nn.Module], optimizer: ParallelAMPOptimizer) -> None:
    """Raise UserError unless model chunk n of the optimizer has the parameters of stage n.

    Otherwise gradients would be reduced too early: those of a chunk are reduced when the schedule
    says that those of its stage are final.
    """
    same = "give the optimizer and the pipeline the same modules in the same order"
    if len(optimizer.buffers) < len(stages):
        raise UserError.of(
            "pipeline.parts_differ",
            num_stages=len(stages),
            num_buffers=len(optimizer.buffers),
            same=same,
        )
    if any(is_dtensor(parameter) for parameter in parameters_of(stages)):
        return  # fully_shard reduces their gradients by itself
    parameters_of_chunks: list[set[nn.Parameter]] = []
    for buffers in optimizer.buffers:
        parameters_of_chunk: set[nn.Parameter] = set()
        for buffer in buffers:
            parameters_of_chunk.update(buffer.parameters)
        parameters_of_chunks.append(parameters_of_chunk)
    # Parameters are compared, not modules: a stage may be wrapped. A stage may have more of them
    # than its chunk: a shared weight is in one chunk only.
    for number, stage in enumerate(stages):
        foreign = parameters_of_chunks[number].difference(stage.parameters())
        if foreign:
            name = layout_of(next(iter(foreign))).parts[0].name
            raise UserError.of("pipeline.part_elsewhere", name=name, number=number, same=same)
    trained = set(chain(*parameters_of_chunks))
    for number, stage in enumerate(stages):
        if any(parameter not in trained for parameter in parameters_of([stage])):
            raise UserError.of("pipeline.part_missing", number=number, same=same)


def require_alike(
    optimizer: ParallelAMPOptimizer,
    everywhere: dict[str, Any],
    in_replica: dict[str, Any],
) -> None:
    """Raise UserError on every rank if ranks were given different arguments. Collective over the
    world.

    everywhere: arguments that must be the same on all ranks, by name. in_replica: those that must
        be the same on the ranks of one replica.
    """
    # Of each argument its name, the replica in which it must be the same, -1 for all, and its text.
    own_arguments = [(name, -1, repr(value)) for name, value in everywhere.items()]
    own_arguments += [(name, optimizer.dp.rank, repr(value)) for name, value in in_replica.items()]
    # as texts: all ranks then see all, and each can name what differs
    texts = gather_texts(json.dumps(own_arguments).encode(), optimizer.world, optimizer.device)
    first_values: dict[tuple[str, int], str] = {}  # by name and replica
    for text in texts:
        for name, replica, value in json.loads(text):
            first_value = first_values.setdefault((name, replica), value)
            if value != first_value:
                raise UserError.of(
                    "pipeline.arguments_differ", key=name, seen=first_value, value=value
                )


def require_batch(
    inputs: Tensor,
    targets: Tensor,
    microbatches: int,
) -> None:
    """Raise UserError unless inputs and targets are tensors [sequence, samples, ...] of equally
    many samples, which can be cut into `microbatches` equal parts."""
    for name, value in (("inputs", inputs), ("targets", targets)):
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise UserError.of("pipeline.batch_shape", name=name, kind=kind)
        # [sequence, samples, ...]: micro-batches are cut along the second dimension
        if value.dim() < 2:
            shape = list(value.shape)
            raise UserError.of("pipeline.batch_shape", name=name, kind=shape)
        if value.device.type == "meta" or value.layout != torch.strided:
            raise UserError.of(
                "pipeline.batch_kind", name=name, device=value.device, layout=value.layout
            )
    if inputs.shape[1] % microbatches or inputs.shape[1] != targets.shape[1]:
        raise UserError.of(
            "pipeline.batch_sizes",
            num_inputs=inputs.shape[1],
            num_targets=targets.shape[1],
            microbatches=microbatches,
        )


def require_same_samples(
    inputs: Tensor,
    targets: Tensor,
    optimizer: ParallelAMPOptimizer,
) -> None:
    """Raise UserError on every rank if ranks of one replica were given different samples.
    Collective over the world."""
    if optimizer.pp.size * optimizer.tp.size == 1:
        return
    own_digests = {"inputs": _digest(inputs), "targets": _digest(targets)}
    own_text = json.dumps([optimizer.dp.rank, own_digests]).encode()
    texts = gather_texts(own_text, optimizer.world, optimizer.device)
    first_digests: dict[int, dict[str, str]] = {}  # those of the first rank of each replica
    for text in texts:
        replica, digests = json.loads(text)
        first = first_digests.setdefault(replica, digests)
        for name in own_digests:
            if digests[name] != first[name]:
                raise UserError.of("pipeline.samples_differ", different=name, replica=replica)


def _digest(values: Tensor) -> str:
    """Return a digest of a tensor's bytes. The host waits for them."""
    in_bytes = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return blake2b(in_bytes.numpy().tobytes(), digest_size=16).hexdigest()


def call_loss_fn(
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    output: Tensor,
    targets: Tensor,
) -> Tensor:
    """Return what a loss function returns. If it fails, the error says what it was given, and what
    it must return."""
    try:
        return loss_fn(output, targets)
    except (UserError, torch.OutOfMemoryError):
        raise  # they say what to do already
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        first_line = str(error).strip().partition("\n")[0]
        if isinstance(output, Tensor):
            kind = f"{list(output.shape)}, {output.dtype}"
        else:
            kind = f"a {type(output).__name__}"
        raise RuntimeError(
            f"loss_fn failed: {first_line}; it was given the last stage's output, {kind}, and "
            f"targets {list(targets.shape)}, {targets.dtype}, and must return the loss of each "
            "target, as of logits "
            "[sequence, samples, classes] "
            "nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), "
            'reduction="none").view(targets.shape)'
        ) from error


def require_losses(losses: Any, targets: Tensor) -> None:
    """Raise UserError unless a loss function returned the real loss of each target, with the
    gradient that it needs."""
    if not isinstance(losses, Tensor) or losses.shape != targets.shape:
        if isinstance(losses, Tensor):
            returned = f"{list(losses.shape)}"
        else:
            returned = f"a {type(losses).__name__}"
        raise UserError.of("pipeline.loss_shape", returned=returned, shape=list(targets.shape))
    if not losses.is_floating_point():
        raise UserError.of("pipeline.loss_not_real", dtype=losses.dtype)
    if torch.is_grad_enabled() and not losses.requires_grad:
        raise UserError.of("pipeline.loss_without_gradient")
