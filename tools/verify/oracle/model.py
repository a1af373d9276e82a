"""A model that an oracle trains, whose tensors are read by logical name."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tools.verify.oracle.batch import OracleBatch

Tensors = dict[str, Tensor]


class OracleModel(Protocol):
    """A model in one dtype. name: of what computes, in a certificate."""

    name: str
    dtype: torch.dtype

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context in which the model computes."""
        ...

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return logits [b, s, vocab]. tokens, positions: int64 [b, s]."""
        ...

    def further_loss(self, batch: OracleBatch) -> Tensor:
        """Return what is trained besides the loss of the logits, with its weights."""
        ...

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return all parameters."""
        ...

    def parameters_by_factors(
        self, factors: Mapping[str, tuple[float, float]]
    ) -> dict[tuple[float, float], list[nn.Parameter]]:
        """Return the parameters that share factors of learning rate and weight decay. factors: by
        logical name."""
        ...

    def weights(self) -> Tensors:
        """Return the weights by logical name."""
        ...

    def gradients(self) -> Tensors:
        """Return the gradients by logical name; those of corrections of routers are the tokens that
        their experts were given."""
        ...

    def moments(self, optimizer: torch.optim.Optimizer, kind: str) -> Tensors:
        """Return what an optimizer keeps of each parameter under the name `kind`, by logical
        name."""
        ...

    def balance(self, speed: float) -> None:
        """Move the corrections of routers by `speed`, after a step."""
        ...
