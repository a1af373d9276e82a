"""Checks, before each step, that the model is the one that the optimizer was built over.

The optimizer holds the parameters of the moment at which it was built. A parameter that is added or
unfrozen later would never be trained, and one that is frozen later would still be moved by its
moments and by weight decay. Nothing else would tell.
"""

from collections.abc import Sequence

from torch import nn

from megaprec.comm.layout import layout_of, parameters_of
from megaprec.errors import UserError

_REBUILD = (
    "build the model as it is to be trained and then a new ParallelAMPOptimizer over it; nothing "
    "was changed"
)


class TrainedModel:
    """The parts of a model, and the parameters that were to be trained when this was made."""

    def __init__(self, model_parts: Sequence[nn.Module]) -> None:
        self._model_parts = model_parts
        self._trained = dict.fromkeys(parameters_of(model_parts))

    def require_same(self) -> None:
        """Raise UserError, naming parameters, if others are to be trained now."""
        # compared without order: a part may be rebuilt around the same parameters
        current = dict.fromkeys(parameters_of(self._model_parts))
        if current.keys() == self._trained.keys():
            return
        paths: dict[nn.Parameter, str] = {}
        for model_part in self._model_parts:
            paths |= {parameter: path for path, parameter in model_part.named_parameters()}
        added = [
            path
            for parameter, path in paths.items()
            if parameter in current and parameter not in self._trained
        ]
        if added:
            raise UserError.of(
                "optimizer.unfrozen_later", format_names=_format_names(added), rebuild=_REBUILD
            )
        untrained = [parameter for parameter in self._trained if parameter not in current]
        frozen = [paths[parameter] for parameter in untrained if parameter in paths]
        if frozen:
            raise UserError.of(
                "optimizer.frozen_later", format_names=_format_names(frozen), rebuild=_REBUILD
            )
        removed = [layout_of(parameter).parts[0].name for parameter in untrained]
        raise UserError.of(
            "optimizer.removed_later", format_names=_format_names(removed), rebuild=_REBUILD
        )


def _format_names(names: Sequence[str]) -> str:
    others = len(names) - 1
    if not others:
        return names[0]
    return f"{names[0]} (and {others} other{'s' if others > 1 else ''})"
