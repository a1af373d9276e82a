"""The probability of given tokens after a context, and whether the model would have chosen them.

These two numbers decide tasks of multiple choice: the likeliest answer is the model's.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megaprec.comm.layout import layout_of
from models.decoder.stages import Stage
from models.engine.relay import Relay
from tools.inference.evaluation import LOGITS, batches, padded
from tools.inference.windows import Window

Likelihood = tuple[float, bool]  # log probability of targets, and if each is the likeliest token


@torch.no_grad()
def likelihoods(
    model: Relay, windows: Sequence[Window], report: Callable[[int], None]
) -> list[Likelihood]:
    """Return for each window the log probability of its targets that count, and if each is the
    likeliest token.

    windows: the same on all ranks, which return the same.
    report: called with the number of windows of each batch.
    """
    stage = model.local_stage
    config = stage.config
    replicas = model.dp  # they share the batches
    # Of each window: the log probability, and how many targets are not the likeliest token.
    sums = _zero_sums(model, len(windows))
    # The place of each window in `windows`, for batches are sorted by length. By identity: two
    # windows may be equal.
    place_of = {id(window): place for place, window in enumerate(windows)}
    tokens_per_batch = LOGITS // config.vocab
    # dynamic scaling depends on the length, which padding would change
    same_length = config.rope_scaling.kind == "dynamic"
    all_batches = list(batches(windows, tokens_per_batch, same_length))
    for number, batch in enumerate(all_batches):
        replica = number % replicas.size
        if replica == replicas.rank:
            places = [place_of[id(window)] for window in batch]
            sums[places] = _sums_of_batch(model, batch)
        report(len(batch))
    # In the last round the first replicas have a batch, and the others none.
    in_last_round = len(all_batches) % replicas.size
    is_idle = 0 < in_last_round <= replicas.rank
    has_experts = stage.context.experts is not None
    if is_idle and has_experts:
        # Tokens of the busy replicas may travel to this rank's experts, so it computes too.
        _sums_of_batch(model, all_batches[0])
    results = list[Likelihood]()
    # Zeros but on the first tensor rank of each replica's last stage, so no window is added twice.
    total_sums = model.world.sum_(sums).tolist()
    for log_probability, num_unlikely in total_sums:
        are_likeliest = not num_unlikely
        results.append((log_probability, are_likeliest))
    return results


def _zero_sums(model: Relay, count: int) -> Tensor:
    """Return float64 [count, 2], on the model's device."""
    return torch.zeros(count, 2, dtype=torch.float64, device=model.device)


def _sums_of_batch(model: Relay, batch: list[Window]) -> Tensor:
    """Return [b, 2]: of each window the log probability of its targets that count, and how many of
    them are not the likeliest token. Zeros but on the first tensor rank of the last stage."""
    tokens, targets, counts = padded(batch, model)
    logits = model.logits(tokens)
    stage = model.last_stage
    if logits is None or stage is None:
        return _zero_sums(model, len(batch))
    losses = stage.losses(logits, targets)
    # In float64, for sums over many tokens.
    counted_losses = losses.double() * counts
    log_probabilities = -counted_losses.sum(0)
    are_likeliest = _are_likeliest(stage, logits, targets)
    # Other tensor ranks have the same sums, and all ranks are added. Not before the maximum over
    # the tensor axis, which all of them take.
    if stage.context.tp.rank:
        return _zero_sums(model, len(batch))
    are_unlikely = ~are_likeliest & counts
    unlikely = are_unlikely.double().sum(0)
    return torch.stack((log_probabilities, unlikely), dim=1)


def _are_likeliest(stage: Stage, logits: Tensor, targets: Tensor) -> Tensor:
    """Return which targets have the largest logit, bool [s, b]; max over the tensor axis. logits:
    [s, b, this rank's vocabulary]."""
    part, *_ = layout_of(stage.head).parts
    rows, *_ = part.local  # of the vocabulary, on this rank
    last_row = rows - 1
    tp = stage.context.tp
    without_padding = logits[..., :rows]
    local_logits = without_padding.double()
    largest_logits = local_logits.amax(-1)
    # A target of another rank takes some logit of this one, which then does not count.
    local_targets = targets - part.start
    nearest_rows = local_targets.clamp(0, last_row)
    is_local = nearest_rows == local_targets
    indices = nearest_rows.unsqueeze(-1)
    target_logits = local_logits.gather(-1, indices)
    target_logits = target_logits.squeeze(-1)
    target_logits = target_logits.masked_fill(~is_local, -torch.inf)
    largest = tp.max_(largest_logits)
    of_targets = tp.max_(target_logits)
    return of_targets >= largest
