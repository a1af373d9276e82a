"""Checks, before each step, that the model is the one that the optimizer was built over.

The optimizer holds the parameters of the moment at which it was built. A parameter that is added or
unfrozen later would never be trained, and one that is frozen later would still be moved by its
moments and by weight decay. Nothing else would tell.
"""

from collections.abc import Sequence

from torch import nn

from megaprec.comm.layout import layout_of, parameters_of
from megaprec.errors import UserError

ANEW = (
    "build the model as it is to be trained and then a new ParallelAMPOptimizer over it; nothing "
    "was changed"
)


class TrainedModel:
    """The parts of a model, and the parameters that were to be trained when this was made."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts
        self._trained = dict.fromkeys(parameters_of(parts))

    def require_same(self) -> None:
        """Raise UserError, naming parameters, if others are to be trained now."""
        now = dict.fromkeys(parameters_of(self._parts))
        if now.keys() == self._trained.keys():
            return
        paths = {p: name for part in self._parts for name, p in part.named_parameters()}
        news = [name for p, name in paths.items() if p in now and p not in self._trained]
        gone = [p for p in self._trained if p not in now]
        frozen = [paths[p] for p in gone if p in paths]
        left = [layout_of(p).parts[0].name for p in gone if p not in paths]
        if news:
            raise UserError(
                f"{_named(news)} is trained, but was added or unfrozen after the optimizer "
                f"was built: {ANEW}"
            )
        if frozen:
            raise UserError(
                f"{_named(frozen)} is frozen, but was trained when the optimizer was built, "
                "whose moments and weight "
                f"decay would still move it: {ANEW}"
            )
        raise UserError(
            f"{_named(left)} is no longer in the model that the optimizer was built over: {ANEW}"
        )


def _named(names: Sequence[str]) -> str:
    others = len(names) - 1
    return names[0] + (f" (and {others} other{'s' * (others > 1)})" if others else "")
