"""The speeds that a prediction rests on: a device's peaks, and what runs reach of them."""

import math
from dataclasses import dataclass

from models.estimate.storage import Device


@dataclass(frozen=True)
class Assumptions:
    """Speeds that a prediction rests on.

    The first six are known of every device; the others are those of `reached.py` for a GPU of the
    table, and by default take no time.

    tflops: a rank's peak, in the precision of most products.
    efficiency: the fraction of it that matrix products reach.
    fast, slow: GB/s in each direction within a machine, and of each rank's card between machines.
    machine: ranks of a machine.
    device: cpu or cuda; on a CPU, ranks compute and communicate on the same cores.
    fp8_tflops: the peak in FP8; 0: that of other products.
    fp8_efficiency: FP8's products reach this times `efficiency` of their own peak.
    attention: the speed of attention's own products, which are causal, divided by that of other
        products; 0.5 is as fast as others if all of the square of scores is computed.
    experts: the speed of products of routed experts, divided by that of others.
    half_rows: rows of an expert with which its products reach half of that speed.
    bandwidth: bytes of memory a second that elementwise operators reach, GB/s.
    host: GB/s between a device and pinned host memory, in each direction at the same time.
    layer: seconds of a layer's forward pass that no speed explains: launches, latency of its
        collectives, and waiting for the slowest rank. A backward pass has twice as many.
    launch: seconds in which a processor launches the kernels of a layer's forward pass, one by one;
        they run beside the kernels before them. A backward pass has twice as many.
    misaligned: the time of a head's products divided by that of an aligned one, if rows of its
        logits on a rank do not begin at multiples of 16 bytes.
    hidden: the fraction of traffic over tensor and context that runs beside products.
    hidden_rows: that of rows on their way to experts and back, which a layer here waits for.
    rows_once: a row goes once to a machine, however many of its experts are there; here it goes to
        each expert.
    exposed: the fraction of the replicas' traffic that does not run beside the passes, with
        parallel.overlap.
    hop: seconds that a collective takes for each rank or machine on its way.
    logit: seconds of the loss for each logit, forward and backward, where they were measured; 0:
        those of the bytes that it moves.
    factor: seconds that a run took divided by those predicted, from `--measured`; 1: not measured.
    crowd: ranks that share a core of a CPU, if they are more than its cores; speeds are those of a
        rank that has the core for itself. 1: each has one, or speeds are those of its share.
    """

    tflops: float
    efficiency: float
    fast: float
    slow: float
    machine: int
    device: Device = "cuda"
    fp8_tflops: float = 0.0
    fp8_efficiency: float = 1.0
    attention: float = 0.5
    experts: float = 1.0
    half_rows: float = 0.0
    bandwidth: float = math.inf
    host: float = math.inf
    layer: float = 0.0
    launch: float = 0.0
    misaligned: float = 1.0
    hidden: float = 0.0
    hidden_rows: float = 0.0
    rows_once: bool = False
    exposed: float = 0.0
    hop: float = 0.0
    logit: float = 0.0
    factor: float = 1.0
    crowd: float = 1.0
