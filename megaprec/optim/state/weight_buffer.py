"""The weights of a flat buffer, held whole or, under ZeRO-3, whole only while layers read them.

Without ZeRO-3 the weights of all parameters of the buffer lie in one flat tensor for good. Under
ZeRO-3 a rank keeps its own slice; the flat tensor has memory from the start of an all-gather until
it is given up. Parameters are views of it all the time; without its memory they are marked as
absent (`megaprec.optim.state.absent_weights`).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.optim.state.absent_weights import mark_absent, mark_present


class WeightBuffer:
    """The flat weights [size] of a buffer.

    parameters: those that are views of it, once the buffer has moved them in.
    own_range: this rank's slice of the elements.
    sharded: the whole is given up when no layer reads it.

    whole: the weights [size] of all parameters; under ZeRO-3 without memory at most times.
    own: this rank's slice [local] of the weights, a view of the whole or a tensor of its own.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        size: int,
        own_range: slice,
        dtype: torch.dtype,
        device: torch.device,
        sharded: bool,
    ) -> None:
        self.sharded = sharded
        self._parameters = parameters
        self.whole = torch.zeros(size, dtype=dtype, device=device)
        self._own_range = own_range
        self._num_bytes = self.whole.nbytes
        self._wait: Callable[[], object] | None = None  # of an all-gather that is under way
        self._has_memory = True
        own_part = self.whole[own_range]
        self.own = torch.zeros_like(own_part) if sharded else own_part

    def write(self, start: int, values: Tensor) -> None:
        """Write flat values, from element `start` of the whole on."""
        if self._has_memory:
            self.whole[start : start + len(values)].copy_(values)
        if not self.sharded:
            return
        own_start = max(start, self._own_range.start)
        own_stop = min(start + len(values), self._own_range.stop)
        if own_start < own_stop:
            offset = self._own_range.start
            own_values = values[own_start - start : own_stop - start]
            self.own[own_start - offset : own_stop - offset].copy_(own_values)

    def take_own(self) -> None:
        """Under ZeRO-3, make this rank's slice of the whole, which someone has written to, its own
        weights."""
        if self.sharded:
            self.wait()
            self.own.copy_(self.whole[self._own_range])

    def start_gather(self, shards: Axis, tag: int = 0) -> None:
        """Start to all-gather the whole over `shards`, unless it is there or on its way.

        tag: as in `Axis.start_gather_from`.
        """
        if self._has_memory:
            return
        self.make_room()
        own = bytes_if_codes(self.own)
        self._wait = shards.start_gather_from(own, bytes_if_codes(self.whole), tag)

    def make_room(self) -> None:
        """Give the whole memory; its values are undefined."""
        self.whole.untyped_storage().resize_(self._num_bytes)
        self._has_memory = True

    def wait(self) -> None:
        """Wait for an all-gather that is under way."""
        wait = self._wait
        self._wait = None
        if wait is not None:
            wait()
            mark_present(self._parameters)

    def free(self) -> None:
        """Under ZeRO-3, give up the whole."""
        if self.sharded and self._has_memory:
            self.wait()
            self.whole.untyped_storage().resize_(0)
            self._has_memory = False
            mark_absent(self._parameters)

    def lasting_bytes(self) -> int:
        """Return the bytes that are held between steps."""
        return self.own.nbytes if self.sharded else self.whole.nbytes


def bytes_if_codes(weights: Tensor) -> Tensor:
    """Return a view of weights that collectives know: FP8 codes travel as bytes."""
    is_codes = weights.dtype.itemsize == 1
    return weights.view(torch.uint8) if is_codes else weights
