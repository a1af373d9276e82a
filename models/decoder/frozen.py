"""Parameters that a run does not train, by patterns of logical names.

They are frozen before an optimizer is made over the stages, so they have no gradient, no state, no
part in norms, and no decay. Gradients of activations pass through them.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from megaprec.comm.layout import has_layout, layout_of
from megaprec.errors import UserError


def freeze(stages: Iterable[nn.Module], patterns: Sequence[str]) -> list[str]:
    """Freeze the parameters whose logical names match a pattern ("*" matches any characters);
    return the logical names of all parameters, frozen or not.

    Raises UserError if only some of the logical tensors that one parameter holds match, such as
    the queries of queries, keys and values.
    """
    names: list[str] = []
    for stage in stages:
        for parameter in filter(has_layout, stage.parameters()):
            parts = [part.name for part in layout_of(parameter).parts]
            names += parts
            frozen = [name for name in parts if _matches(name, patterns)]
            if not frozen:
                continue
            if len(frozen) < len(parts):
                trained = next(name for name in parts if name not in frozen)
                raise UserError.of("model.frozen_in_part", frozen=frozen[0], trained=trained)
            parameter.requires_grad_(False)
    return names


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
