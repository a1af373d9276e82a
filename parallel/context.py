"""What every parallel layer is told about where it runs, as one frozen value."""

from dataclasses import dataclass

from megaprec.comm import Axis
from megaprec.plan import PrecisionPlan


@dataclass(frozen=True)
class Context:
    """plan: dtypes of products, weights and sensitive operators.
    tp: the tensor-parallel axis. sequence: activations between blocks are cut along the sequence over tp.
    seed: of initial weights and dropout.
    """

    plan: PrecisionPlan
    tp: Axis = Axis("tp")
    sequence: bool = False
    seed: int = 0

    @property
    def cut_sequence(self) -> bool:
        """Whether activations between blocks are really cut."""
        return self.sequence and self.tp.size > 1
