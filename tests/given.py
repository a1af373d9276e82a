"""Gradients that a test writes into the buffers itself."""

from megaprec.comm.main_grad import begin_accumulation
from megaprec.optim.optimizer import ParallelAMPOptimizer


def declare(optimizer: ParallelAMPOptimizer) -> None:
    """Says that what is in the buffers now are gradients of this step; else they would be taken for
    the last one's."""
    for parameter in (p for buffer in optimizer.all_buffers() for p in buffer.parameters):
        begin_accumulation(parameter)
