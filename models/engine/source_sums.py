"""The loss of a training step by the data set that its samples come from, in a blend.

The losses of tokens are rounded to multiples of LOSS_UNIT before they are added, so that their sum
is exact in any order while it is less than 2^21: the same in every layout, if the losses are.
"""

import torch
from torch import Tensor

from megaprec.comm.axis import copy_to_device
from models.feed_forward.router_tally import round_to

LOSS_UNIT = 2.0**-32


class SourceSums:
    """The losses of one rank's tokens by data set, summed over the micro-batches of its share.

    numbers: int64 [samples], the data set of each sample of the share. count: the number of data
        sets.
    losses: float64 [data sets], the sums of the losses of tokens that count; 0 at first.
    """

    def __init__(self, numbers: Tensor, count: int, device: torch.device) -> None:
        self.numbers = copy_to_device(numbers, device)
        self.losses = torch.zeros(count, dtype=torch.float64, device=device)

    def add(self, losses: Tensor, rows: slice) -> None:
        """Add the losses of a micro-batch's tokens, [s, b], weighted as they count.

        rows: its samples within the share.
        """
        exact = round_to(LOSS_UNIT, losses.detach().to(torch.float64, copy=True))
        self.losses.index_add_(0, self.numbers[rows], exact.sum(0))

    def packed(self, mask: Tensor | None, length: int) -> Tensor:
        """Return the losses of all data sets, and then their numbers of tokens that count: float64
        [2 * data sets].

        mask: of this rank's tokens, [samples, s]; None: all count. length: tokens of a sample on
        this rank.
        """
        if mask is None:
            tokens_of_sample = self.losses.new_full(self.numbers.shape, length)
        else:
            tokens_of_sample = mask.sum(1, dtype=torch.float64)
        tokens = torch.zeros_like(self.losses).index_add_(0, self.numbers, tokens_of_sample)
        return torch.cat((self.losses, tokens))
