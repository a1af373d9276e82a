"""The probability of given tokens after a context, and whether the model would have chosen them.

These two numbers decide tasks of multiple choice: the likeliest answer is the model's.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megaprec.comm.layout import layout_of
from models.decoder.stages import Stage
from models.engine.relay import Relay
from tools.text.evaluation import LOGITS, batches, padded
from tools.text.windows import Window


@torch.no_grad()
def likelihoods(
    model: Relay, windows: Sequence[Window], report: Callable[[int], None]
) -> list[tuple[float, bool]]:
    """Return for each window the log probability of its targets that count, and if each is the
    likeliest token.

    windows: the same on all ranks, which return the same.
    report: called with the number of windows of each batch.
    """
    config = model.local_stage.config
    replicas = model.dp  # they share the batches
    # Of each window: the log probability, and how many targets are not the likeliest token.
    sums = _zero_sums(model, len(windows))
    rows = {id(window): number for number, window in enumerate(windows)}
    tokens = LOGITS // config.vocab  # of a batch
    same_length = config.rope_scaling.kind == "dynamic"
    all_batches = list(batches(windows, tokens, same_length))
    for number, batch in enumerate(all_batches):
        if number % replicas.size == replicas.rank:
            rows_of_batch = [rows[id(window)] for window in batch]
            sums[rows_of_batch] = _sums_of_batch(model, batch)
        report(len(batch))
    busy_replicas = len(all_batches) % replicas.size or replicas.size  # in the last round
    is_idle = replicas.rank >= busy_replicas
    if is_idle and model.local_stage.context.experts is not None:
        # Tokens of the busy replicas may travel to this rank's experts, so it computes too.
        _sums_of_batch(model, all_batches[0])
    totals = model.world.sum_(sums).tolist()
    return [(log_probability, not unlikely) for log_probability, unlikely in totals]


def _zero_sums(model: Relay, count: int) -> Tensor:
    """Return float64 [count, 2], on the model's device."""
    return torch.zeros(count, 2, dtype=torch.float64, device=model.device)


def _sums_of_batch(model: Relay, batch: list[Window]) -> Tensor:
    """Return [b, 2] on the first tensor rank of the last stage, zeros on others."""
    tokens, targets, counts = padded(batch, model)
    logits = model.logits(tokens)
    stage = model.last_stage
    if logits is None or stage is None:
        return _zero_sums(model, len(batch))
    losses = stage.losses(logits, targets).double()
    log_probabilities = (-losses * counts).sum(0)
    likeliest = _are_likeliest(stage, logits, targets)
    unlikely = (~likeliest & counts).double().sum(0)
    sums = torch.stack((log_probabilities, unlikely), dim=1)
    is_first = stage.context.tp.rank == 0  # other tensor ranks have the same sums
    return sums * is_first


def _are_likeliest(stage: Stage, logits: Tensor, targets: Tensor) -> Tensor:
    """Return which targets have the largest logit, bool [s, b]; max over the tensor axis. logits:
    [s, b, this rank's vocabulary]."""
    part = layout_of(stage.head).parts[0]
    rows = part.local[0]  # of the vocabulary, on this rank
    tp = stage.context.tp
    local_logits = logits[..., :rows].double()  # without padding
    largest = local_logits.amax(-1)
    # A target of another rank takes some logit of this one, which then does not count.
    local_targets = targets - part.start
    is_local = (local_targets >= 0) & (local_targets < rows)
    indices = local_targets.clamp(0, rows - 1).unsqueeze(-1)
    target_logits = local_logits.gather(-1, indices).squeeze(-1)
    target_logits = target_logits.masked_fill(~is_local, -torch.inf)
    return tp.max_(target_logits) >= tp.max_(largest)
