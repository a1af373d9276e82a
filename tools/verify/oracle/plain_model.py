"""A model of the plain decoder with given weights, as `TransformersModel` is transformers'."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megaprec.errors import UserError
from models.config import ModelConfig
from models.feed_forward.router import is_correction
from models.logical_shapes import is_never_trained
from tools.verify.oracle.batch import OracleBatch
from tools.verify.oracle.model import Tensors
from tools.verify.oracle.plain_decoder import ahead, hidden, mean_over_modules, of_head
from tools.verify.oracle.plain_feed_forward import Routing, router_loss

MOST_NAMED = 3  # weights in one line


class _NotedWeights(dict[str, nn.Parameter]):
    """Weights by logical name that note which of them were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> nn.Parameter:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def require_read(self) -> None:
        """Raise UserError if the decoder has no use of a weight that every forward pass needs.

        Experts may have no token, and modules of multi-token prediction are a pass of their own.
        """
        unread = [name for name in self if name not in self.read]
        needed = [name for name in unread if ".experts." not in name]
        unknown = [name for name in needed if "mtp." not in name]
        if unknown:
            names = ", ".join(unknown[:MOST_NAMED])
            raise UserError.of("parity.oracle_unread", names=names)


class PlainModel:
    """A plain decoder in one dtype.

    weights: by logical name; of the same dtype.
    name: of what computes.
    """

    name = "a plain decoder of torch.nn.functional"

    def __init__(self, config: ModelConfig, weights: Tensors) -> None:
        self.config = config
        first = next(iter(weights.values()))
        self.dtype = first.dtype
        self._weights = _NotedWeights()
        # how many tokens each expert was given, by the name of the router's correction
        self._loads: Tensors = {}
        for name, values in weights.items():
            is_trained = not is_correction(name) and not is_never_trained(name)
            own_values = values.clone()
            self._weights[name] = nn.Parameter(own_values, requires_grad=is_trained)

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context in which the model computes; it needs none."""
        return nullcontext()

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return logits [b, s, vocab]. tokens, positions: int64 [b, s]."""
        routings: list[Routing] = []
        x = hidden(self.config, self._weights, tokens, routings, positions)
        self._count(routings)
        logits = of_head(self.config, self._weights, x)
        self._weights.require_read()
        return logits

    def further_loss(self, batch: OracleBatch) -> Tensor:
        """Return the losses of routers and of modules of multi-token prediction, with their
        weights. Documents are not distinguished."""
        config = self.config
        router_weights = config.router_aux_loss + config.router_z_loss
        has_router_loss = config.experts and router_weights
        if not has_router_loss and not config.mtp_layers:
            return torch.zeros((), dtype=self.dtype)
        routings: list[Routing] = []
        x = hidden(config, self._weights, batch.tokens, routings, batch.positions)
        of_modules: list[Routing] = []
        losses = ahead(config, self._weights, x, batch.tokens, batch.targets, of_modules)
        self._count(of_modules)
        counts = batch.counts.to(self.dtype)
        mean = mean_over_modules(losses, counts)
        modules_loss = config.mtp_loss_weight * mean
        routers_loss = router_loss(config, routings + of_modules)
        return routers_loss + modules_loss

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters that a rule updates."""
        return [*self._trained().values()]

    def parameters_by_factors(
        self, factors: Mapping[str, tuple[float, float]]
    ) -> dict[tuple[float, float], list[nn.Parameter]]:
        """Return the parameters that share factors of learning rate and weight decay. factors: by
        logical name."""
        sharing: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, values in self._trained().items():
            parameters = sharing.setdefault(factors[name], [])
            parameters.append(values)
        return sharing

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that a rule updates, by logical name."""
        return {name: values for name, values in self._weights.items() if values.requires_grad}

    def weights(self) -> Tensors:
        """Return the weights by logical name, in the dtype of the model."""
        return {name: values.detach().clone() for name, values in self._weights.items()}

    def gradients(self) -> Tensors:
        """Return the gradients by logical name; those of corrections of routers are the tokens that
        their experts were given."""
        gradients: Tensors = {}
        for name, values in self._weights.items():
            gradient = self._loads[name] if is_correction(name) else values.grad
            # an expert without tokens, or what is not trained
            if gradient is None:
                gradient = torch.zeros_like(values)
            gradients[name] = gradient.clone()
        return gradients

    def moments(self, optimizer: torch.optim.Optimizer, kind: str) -> Tensors:
        """Return what an optimizer keeps of each parameter under the name `kind`, by logical
        name."""
        moments: Tensors = {}
        for name, values in self._trained().items():
            state = optimizer.state[values]
            moments[name] = state[kind].clone()
        return moments

    @torch.no_grad()
    def balance(self, speed: float) -> None:
        """Move the corrections of routers towards experts that were given fewer tokens than the
        others, and forget who was given what. speed: by which they move."""
        for name, counts in self._loads.items():
            lacking = counts.mean() - counts
            moved = speed * lacking.sign()
            self._weights[name].add_(moved)
        self._loads.clear()

    def _count(self, routings: list[Routing]) -> None:
        """Note what the experts of each router with a correction were given."""
        for name, values in self._weights.items():
            of_this_router = [routing for routing in routings if routing.correction is values]
            for routing in of_this_router:
                counts = routing.counts.to(self.dtype)
                before = self._loads.get(name, torch.zeros_like(counts))
                self._loads[name] = before + counts
