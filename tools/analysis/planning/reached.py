"""The fraction of a data sheet's figures that training runs reach.

Fitted to the published runs of `tests/planning/published.toml` by `python -m tests.planning.fit`,
which prints them and their errors on runs that they were not fitted to (docs/planning.md), but for
`OTHER`, `LAUNCH`, `MISALIGNED`, `HOST` and `HOP`, which are chosen: products of a GPU of another
architecture reach `OTHER`.
"""

from megaprec.precision.plan import PrecisionPlan
from models.estimate.gpus import GPU
from tools.analysis.planning.seconds.assumptions import Assumptions

# of the peak of matrix products, by architecture: larger ones are limited by power and memory
PRODUCTS = {"Ampere": 0.77, "Hopper": 0.66, "Blackwell": 0.65}
OTHER = 0.5
# the speed of attention's own products divided by that of others, of the causal half of scores
ATTENTION = 0.46
# the speed of experts' products divided by that of others, and the rows of an expert with which
# they reach half of that
EXPERTS = 0.77
EXPERT_ROWS = 15.0
# of FP8's peak, by the fraction that other products reach of theirs
FP8 = 1.0
# of the bandwidth of memory, by elementwise operators
BANDWIDTH = 0.51
# GB/s of copies to and from pinned host memory by architecture: 0.8 of PCIe 4.0 or 5.0 with 16
# lanes. That is chosen, not measured, and takes no account of ranks that share the host's memory
HOST = {"Ampere": 25.0, "Ada": 25.0, "Hopper": 50.0, "Blackwell": 50.0, "CDNA 3": 50.0}
# seconds of a layer's forward pass that no speed explains
LAYER = 0.06e-3
# seconds of a layer's forward pass, at least, if its kernels are launched one by one: those of
# nanotron's runs of 2024 that took as long with half the tokens
LAUNCH = 2e-3
# the time of a head divided by that of one whose vocabulary is a multiple of 8 or more on each
# rank: threefold, as Netflix has measured it ("Scaling LLM post-training at Netflix", 2026)
MISALIGNED = 3.0
# of the bandwidth of links and network cards, by collectives
LINKS = 0.64
# the fraction of tensor and context traffic that runs beside products
HIDDEN = 0.33
# the fraction of replicas' traffic that does not run beside the passes
EXPOSED = 0.35
# seconds for each rank, or machine, that a collective passes
HOP = 1e-6


def assumptions_of(gpu: GPU, plan: PrecisionPlan) -> Assumptions | None:
    """Return what a prediction for a GPU rests on; None if the peak of the run's precision is not
    known."""
    tflops = gpu.tflops(plan)
    if not tflops:
        return None
    return Assumptions(
        tflops=tflops,
        efficiency=PRODUCTS.get(gpu.architecture, OTHER),
        fast=gpu.link * LINKS,
        slow=gpu.card * LINKS,
        machine=gpu.domain,
        fp8_tflops=gpu.fp8,
        fp8_efficiency=FP8,
        attention=ATTENTION,
        experts=EXPERTS,
        half_rows=EXPERT_ROWS,
        bandwidth=gpu.bandwidth * BANDWIDTH,
        host=HOST[gpu.architecture],
        layer=LAYER,
        launch=LAUNCH,
        misaligned=MISALIGNED,
        hidden=HIDDEN,
        exposed=EXPOSED,
        hop=HOP,
    )
