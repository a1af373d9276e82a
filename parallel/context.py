"""What every parallel layer is told about where it runs, as one frozen value."""

from dataclasses import dataclass, field

from megaprec.comm import Axis
from megaprec.gemm import Gemm
from megaprec.plan import PrecisionPlan
from parallel.deferred import Deferred
from parallel.recompute import KEEP, Recompute


@dataclass(frozen=True)
class Context:
    """plan: dtypes of products, weights and sensitive operators.
    tp: the tensor-parallel axis. sequence: activations between blocks are cut along the sequence over tp.
    seed: of initial weights and dropout. deferred: where layers leave weight gradients that can wait; the executor
    that runs a schedule with split backwards must be given the same. recompute: which activations are made again.
    """

    plan: PrecisionPlan
    tp: Axis = Axis("tp")
    sequence: bool = False
    seed: int = 0
    deferred: Deferred = field(default_factory=Deferred, compare=False)
    recompute: Recompute = KEEP

    def gemm(self, name: str) -> Gemm:
        """How products with the weight of this logical name are made. What comes out is activations."""
        return Gemm(self.plan.computes(name), self.plan.compute, self.plan.tf32)

    def gemm_of_head(self, name: str) -> Gemm:
        """The same for what comes out as logits, which stay in the dtype of the products."""
        dtype = self.plan.computes(name)
        return Gemm(dtype, dtype, self.plan.tf32)

    @property
    def cut_sequence(self) -> bool:
        """Whether activations between blocks are really cut."""
        return self.sequence and self.tp.size > 1
