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

    windows: the same on all ranks, which return the same. report: called with the number of windows
        of each batch.
    """
    # log probability, other tokens
    found = torch.zeros(len(windows), 2, dtype=torch.float64, device=model.device)
    place = {id(window): n for n, window in enumerate(windows)}
    config = model.any.config
    every = [*batches(windows, LOGITS // config.vocab, config.rope_scaling.kind == "dynamic")]
    for number, batch in enumerate(every):
        if number % model.dp.size == model.dp.rank:
            found[[place[id(window)] for window in batch]] = _of_batch(model, batch)
        report(len(batch))
    if model.any.context.experts is not None and model.dp.rank >= (
        len(every) % model.dp.size or model.dp.size
    ):
        # tokens of replicas with a batch more may travel to this rank's experts
        _of_batch(model, every[0])
    return [(said, not others) for said, others in model.world.sum_(found).tolist()]


def _of_batch(model: Relay, batch: list[Window]) -> Tensor:
    """Return [b, 2] on the first tensor rank of the last stage, zeros on others."""
    tokens, targets, counts = padded(batch, model)
    logits = model.logits(tokens)
    if logits is None or model.last is None:
        return torch.zeros(len(batch), 2, dtype=torch.float64, device=model.device)
    losses = model.last.losses(logits, targets).double()
    others = ~_likeliest(model.last, logits, targets)
    sums = torch.stack(((-losses * counts).sum(0), (others & counts).double().sum(0)), dim=1)
    return sums * (model.last.context.tp.rank == 0)  # other tensor ranks have the same


def _likeliest(stage: Stage, logits: Tensor, targets: Tensor) -> Tensor:
    """Return which targets have the largest logit, bool [s, b]. logits: [s, b, own vocabulary]."""
    part = layout_of(stage.head).parts[0]
    tp = stage.context.tp
    own = logits[..., : part.local[0]].double()  # without padding
    local = targets - part.start
    here = (local >= 0) & (local < part.local[0])
    chosen = own.gather(-1, local.clamp(0, part.local[0] - 1)[..., None])[..., 0]
    return tp.max_(chosen.masked_fill(~here, -torch.inf)) >= tp.max_(own.amax(-1))
