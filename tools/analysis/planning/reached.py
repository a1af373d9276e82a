"""The fraction of a data sheet's figures that training runs reach.

Fitted to the published runs of `tests/planning/published.toml` by `tests.planning.fit`, together
with a factor for each software stack; docs/planning.md has all of them, and the errors. A GPU of
another architecture is taken to be as good as those of `OTHER`.
"""

from megaprec.precision.plan import PrecisionPlan
from models.estimate.gpus import GPU
from tools.analysis.planning.seconds.assumptions import Assumptions

# of the peak of matrix products, by architecture: larger ones are limited by power and memory
PRODUCTS = {"Ampere": 0.88, "Hopper": 0.69, "Blackwell": 0.58}
OTHER = 0.5
# the speed of attention's own products by that of others, of the causal half of scores
ATTENTION = 0.39
# products of experts by others, and the rows of an expert with which they reach half of that
EXPERTS = 0.67
EXPERT_ROWS = 80.0
# of FP8's peak, by the fraction that other products reach of theirs
FP8 = 0.98
# of the bandwidth of memory, by elementwise operators
BANDWIDTH = 0.49
# seconds of a layer's forward pass that no speed explains
LAYER = 0.36e-3
# the fraction of tensor, context and expert traffic that runs beside products
HIDDEN = 0.34
# the fraction of replicas' traffic that does not run beside the passes
EXPOSED = 0.24
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
        fast=gpu.link,
        slow=gpu.card,
        machine=gpu.domain,
        fp8_tflops=gpu.fp8,
        fp8_efficiency=FP8,
        attention=ATTENTION,
        experts=EXPERTS,
        half_rows=EXPERT_ROWS,
        bandwidth=gpu.bandwidth * BANDWIDTH,
        layer=LAYER,
        hidden=HIDDEN,
        exposed=EXPOSED,
        hop=HOP,
    )
