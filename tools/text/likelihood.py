"""The probability of given tokens after a context, and whether the model would have chosen them.

These two numbers decide tasks of multiple choice: the likeliest answer is the model's.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megaprec.comm.layout import layout_of
from models.relay import Relay
from models.stages import Stage
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
    config = model.any.config
    replicas = model.dp
    # Of each window: the log probability, and how many targets are not the likeliest token.
    sums = torch.zeros(len(windows), 2, dtype=torch.float64, device=model.device)
    rows = {id(window): number for number, window in enumerate(windows)}
    same_length = config.rope_scaling.kind == "dynamic"
    all_batches = [*batches(windows, LOGITS // config.vocab, same_length)]
    for number, batch in enumerate(all_batches):
        if number % replicas.size == replicas.rank:
            rows_of_batch = [rows[id(window)] for window in batch]
            sums[rows_of_batch] = _sums_of_batch(model, batch)
        report(len(batch))
    busy_replicas = len(all_batches) % replicas.size or replicas.size  # in the last round
    if model.any.context.experts is not None and replicas.rank >= busy_replicas:
        # Tokens of the busy replicas may travel to this rank's experts, so it computes too.
        _sums_of_batch(model, all_batches[0])
    totals = model.world.sum_(sums).tolist()
    return [(log_probability, not unlikely) for log_probability, unlikely in totals]


def _sums_of_batch(model: Relay, batch: list[Window]) -> Tensor:
    """Return [b, 2] on the first tensor rank of the last stage, zeros on others."""
    tokens, targets, counts = padded(batch, model)
    logits = model.logits(tokens)
    if logits is None or model.last is None:
        return torch.zeros(len(batch), 2, dtype=torch.float64, device=model.device)
    losses = model.last.losses(logits, targets).double()
    log_probabilities = (-losses * counts).sum(0)
    unlikely = ~_are_likeliest(model.last, logits, targets) & counts
    sums = torch.stack((log_probabilities, unlikely.double().sum(0)), dim=1)
    return sums * (model.last.context.tp.rank == 0)  # other tensor ranks have the same


def _are_likeliest(stage: Stage, logits: Tensor, targets: Tensor) -> Tensor:
    """Return which targets have the largest logit, bool [s, b]; max over the tensor axis. logits:
    [s, b, this rank's vocabulary]."""
    part = layout_of(stage.head).parts[0]
    rows = part.local[0]  # of the vocabulary, on this rank
    tp = stage.context.tp
    local_logits = logits[..., :rows].double()  # without padding
    local_targets = targets - part.start
    is_local = (local_targets >= 0) & (local_targets < rows)
    clamped = local_targets.clamp(0, rows - 1)
    target_logits = local_logits.gather(-1, clamped[..., None])[..., 0]
    target_logits = target_logits.masked_fill(~is_local, -torch.inf)
    return tp.max_(target_logits) >= tp.max_(local_logits.amax(-1))
