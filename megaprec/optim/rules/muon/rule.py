"""Muon: momentum orthogonalized by Newton-Schulz, for the matrices of hidden layers, and AdamW for
the rest.

This is the rule as settings and formulas, and the moments that it keeps of each parameter. Whole
logical matrices are brought together and updated by `megaprec.optim.rules.muon.matrix_updates`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn

from megaprec.comm.layout import Part, layout_of
from megaprec.errors import Problem, UserError
from megaprec.kinds import is_number
from megaprec.optim.rules.muon.newton_schulz import PUBLISHED, Coefficients, MatrixStack
from megaprec.optim.rules.update_rules import AdamW, Stateless, Step, UpdateRule

MUON_MOMENTUM = "muon_momentum"
"""Name of Muon's moment in checkpoints; SGD's momentum is another average of gradients."""
NOT_HIDDEN = ("embedding.*", "positions.*", "head.*", "*_convolution.weight")
"""Logical names of the matrices that are not hidden layers of a model of ours, and of convolutions,
whose features do not mix."""

Scale = Literal["moonshot", "keller-jordan"]


@dataclass(frozen=True)
class Muon(Stateless):
    """Momentum orthogonalized by Newton-Schulz for logical matrices, AdamW for all other tensors.

    With gradient G of a logical matrix [m, n], momentum B and weights W, in a step of learning rate
    r and decay d:

        B  <-  momentum * B + (1 - momentum) * G
        O   =  orthogonalized(momentum * B + (1 - momentum) * G), without nesterov orthogonalized(B)
        W  <-  (1 - r * d) * W - r * factor * O

    Products of `orthogonalized` are rounded to `ns_dtype`: bf16, fp32, fp64, or "" for bf16, which
    is fp64 if the masters are FP64. scale: name of the factor, "moonshot" for 0.2 * sqrt(max(m, n))
    or "keller-jordan" for sqrt(max(1, m / n)); see FACTORS. by_adamw: patterns of logical names of
    matrices that `adamw` updates, as it updates every tensor that has not two dims. The rule is
    elementwise only in B; `update_` is that of `adamw`.

    per_head: the rows of each head (`Part.heads`) are a matrix [m, n] of their own, in O and in the
    factor, so that no head's update depends on how large the gradients of others are. Projections
    to queries, keys, values, their gates, and from latents to these have heads; that from heads to
    the output is a whole, as in Kimi K3 (arXiv 2607.24653, section 2.5) and GLM-5 (arXiv
    2602.15763).
    """

    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: Coefficients = PUBLISHED
    ns_steps: int = 5
    ns_eps: float = 1e-7
    ns_dtype: str = ""
    scale: Scale = "moonshot"
    per_head: bool = False
    by_adamw: tuple[str, ...] = NOT_HIDDEN
    adamw: AdamW = AdamW()

    def __post_init__(self) -> None:
        # A run file gives lists, and tuples are compared. A frozen dataclass is set like this.
        object.__setattr__(self, "by_adamw", _require_texts("by_adamw", self.by_adamw))
        object.__setattr__(
            self,
            "ns_coefficients",
            _require_three_numbers("ns_coefficients", self.ns_coefficients),
        )
        problems = list(self._problems())
        if problems:
            raise UserError(*problems)

    def _problems(self) -> Iterator[Problem]:
        """Yield a problem for each setting that is out of its range."""
        # options come from a run file, whose values have no types
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            yield Problem.of("optimizer.muon_momentum", momentum=self.momentum)
        if not isinstance(self.nesterov, bool):
            yield Problem.of("optimizer.muon_nesterov", nesterov=self.nesterov)
        if type(self.ns_steps) is not int or not 1 <= self.ns_steps < 100:
            yield Problem.of("optimizer.muon_steps", ns_steps=self.ns_steps)
        if not is_number(self.ns_eps) or self.ns_eps <= 0:
            yield Problem.of("optimizer.muon_eps", ns_eps=self.ns_eps)
        if self.ns_dtype not in ("", *_ITERATION_DTYPES):
            yield Problem.of("optimizer.muon_dtype", ns_dtype=self.ns_dtype)
        if self.scale not in tuple(FACTORS):
            scales = " or ".join(FACTORS)
            yield Problem.of("optimizer.muon_scale", scale=self.scale, scales=scales)
        if not isinstance(self.per_head, bool):
            yield Problem.of("optimizer.muon_per_head", per_head=self.per_head)

    @property
    def names(self) -> tuple[str, ...]:
        return (MUON_MOMENTUM, *self.adamw.names)

    def orthogonalizes(self, part: Part) -> bool:
        """Return True if this logical tensor is updated by orthogonalized momentum, False if by
        `adamw`."""
        if len(part.shape) != 2:
            return False
        return not any(fnmatchcase(part.name, pattern) for pattern in self.by_adamw)

    def matrices_of(self, part: Part) -> MatrixStack:
        """Return a logical matrix as the matrices that are orthogonalized each by itself: those of
        its heads with `per_head`, otherwise the whole."""
        rows, columns = part.shape
        count = part.heads if self.per_head else 1
        return MatrixStack(count, rows // count, columns)

    def factor(self, shape: Sequence[float]) -> float:
        """Return the factor of the learning rate for an orthogonalized matrix of this shape."""
        rows, columns = shape
        return FACTORS[self.scale](rows, columns)

    def iteration_dtype(self, masters: torch.dtype) -> torch.dtype:
        """Return the dtype to which the products of the iteration are rounded."""
        default = torch.float64 if masters == torch.float64 else torch.bfloat16
        return _ITERATION_DTYPES.get(self.ns_dtype, default)

    def update_(self, weights: Tensor, grads: Tensor, state: Sequence[Tensor], step: Step) -> None:
        # of the tensors that are not orthogonalized; `MatrixUpdates` updates the others
        self.adamw.update_(weights, grads, state, step)


FACTORS: dict[str, Callable[[float, float], float]] = {
    "moonshot": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "keller-jordan": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
}
"""Factors of Muon's learning rate for a matrix [rows, columns], by name.

moonshot: "Muon is Scalable for LLM Training" (arXiv 2502.16982): an update has the root mean square
    of a usual one by AdamW, so both have one learning rate.
keller-jordan: muon.py of github.com/KellerJordan/Muon.
"""
_ITERATION_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def _require_texts(key: str, values: object) -> tuple[str, ...]:
    """Return a list of texts as a tuple. Raises UserError for anything else."""
    if isinstance(values, list | tuple) and all(isinstance(value, str) for value in values):
        return tuple(values)
    raise UserError.of("optimizer.muon_patterns", key=key, values=values)


def _require_three_numbers(key: str, values: object) -> Coefficients:
    """Return a list of three numbers as a tuple. Raises UserError for anything else."""
    if isinstance(values, list | tuple) and len(values) == 3 and all(map(is_number, values)):
        first, second, third = map(float, values)
        return first, second, third
    raise UserError.of("optimizer.muon_numbers", key=key, values=values)


def moments_of(rule: UpdateRule, parameter: nn.Parameter) -> tuple[str, ...]:
    """Return the names of the moments that a rule keeps of a parameter.

    Raises UserError if Muon updates some of the logical tensors that are stacked in the parameter,
    and AdamW others.
    """
    if layout_of(parameter).balancing is not None:
        return ()  # a router's bias, which moves by a fixed speed and keeps no average
    if not isinstance(rule, Muon):
        return rule.names
    parts = layout_of(parameter).parts
    by_muon = [part.name for part in parts if rule.orthogonalizes(part)]
    if by_muon and len(by_muon) < len(parts):
        by_adamw = [part.name for part in parts if part.name not in by_muon]
        raise UserError.of(
            "optimizer.muon_shared_parameter",
            by_muon=" and ".join(by_muon),
            by_adamw=" and ".join(by_adamw),
        )
    # Muon's momentum is the first name, and AdamW's moments are the others
    return rule.names[:1] if by_muon else rule.names[1:]


def min_moments(rule: UpdateRule) -> int:
    """Return the smallest number of moments that a rule keeps of a parameter."""
    # Muon's own matrices have its momentum alone
    return 1 if isinstance(rule, Muon) else len(rule.names)
