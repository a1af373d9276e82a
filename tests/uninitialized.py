"""Memory that nobody has written to holds NaN in tests, so that no result can come from it unseen.

Otherwise it mostly holds zeros of the system, or numbers of the same kind that were freed just
before: what reads it by mistake passes.
"""

import torch
import torch.utils.deterministic as memory

from megaprec.optim.state.weight_buffer import WeightBuffer

_make_room = WeightBuffer.make_room


def spoil_uninitialized_memory() -> None:
    """Has torch fill what `torch.empty` and its like return: NaN, or the largest integer.

    torch does so only beside its deterministic algorithms. Those that it lacks are warned of, as
    any warning of a test.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    WeightBuffer.make_room = _make_spoilt_room


def _make_spoilt_room(self: WeightBuffer) -> None:
    """Gives weights that are to be gathered memory with NaN: torch fills no storage that grows."""
    _make_room(self)
    codes = self.whole.view(torch.uint8)
    codes.fill_(255)  # NaN in each floating-point format
