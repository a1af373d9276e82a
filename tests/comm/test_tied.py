"""Every pipeline rank learns of the sets of ranks that share parameters."""

import torch

from megaprec.comm.axis import Axis
from megaprec.comm.tied import _all_gather_sets

CPU = torch.device("cpu")


def test_a_set_may_have_any_rank_of_a_long_pipeline() -> None:
    pp = Axis("pp", size=100)  # without a group: it gathers this rank's sets alone
    assert _all_gather_sets(pp, [(0, 99), (3, 64)], CPU) == [(0, 99), (3, 64)]
