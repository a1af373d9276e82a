"""The end of ranks of which one or more were told to stop by a signal; their state is saved by now.

All ranks leave together, because a rank that exits early would abort the others. Each notes its
reason before: from then on it may die of another signal, such as one that reaches this rank later
than the others, and has still stopped as it was told.
"""

import sys
from typing import NoReturn

import torch

from megaprec.comm.axis import Axis
from tools.training.launch import note_failure
from tools.training.signals import Stopped


def stop_together(received: int, world: Axis, device: torch.device, step: int) -> NoReturn:
    """Raise Stopped on all ranks after `step`. Collective over the world.

    received: the signal that this rank received, 0 for none.
    """
    # Ranks may have received different signals: all stop by the highest.
    number = world.max_(torch.tensor(float(received), device=device))
    stopped = Stopped(int(number.item()))
    if world.rank == 0:
        print(
            f"{stopped} after step {step}, state saved: the same command goes on", file=sys.stderr
        )
    note_failure(stopped)
    world.barrier()
    raise stopped
