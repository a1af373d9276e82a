"""Patterns (`fnmatch`) of logical names. A pattern that matches no parameter on any rank is refused
as mistyped."""

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase

import torch

from megaprec.comm.axis import Axis
from megaprec.comm.everyones import everyones
from megaprec.errors import UserError, did_you_mean

NORMS = ("*norm.weight", "*norm.bias")
"""Logical names of the parameters of norms, for PrecisionPlan.keep_fp32."""


def matched(patterns: Sequence[str], names: Collection[str]) -> list[bool]:
    """Return, for each pattern, True if it matches at least one of the names."""
    return [any(fnmatchcase(name, pattern) for name in names) for pattern in patterns]


def unmatched(
    key: str, patterns: Sequence[str], found: Sequence[bool], names: Sequence[str]
) -> Iterator[str]:
    """Yield an error line for each pattern of `key` that matches no parameter of the whole model.

    The patterns of NORMS count as one: not every norm has a bias, so one match is enough for both.
    """
    norms = any(
        is_found for pattern, is_found in zip(patterns, found, strict=True) if pattern in NORMS
    )
    like = f"; names are like {names[0]} and {names[-1]}" if names else ""
    for pattern, is_found in zip(patterns, found, strict=True):
        if not is_found and not (norms and pattern in NORMS):
            yield (
                f'{key}: pattern "{pattern}" matches no '
                f"parameter{like}{did_you_mean(pattern, names)}"
            )


def require_used(
    key: str, patterns: Sequence[str], names: Collection[str], world: Axis, device: torch.device
) -> None:
    """Raise UserError on every rank if a pattern matches no parameter on any rank. Collective over
    the world.

    names: logical names of this rank's parameters.
    """
    if not patterns:
        return
    found = world.max_(
        torch.tensor(matched(patterns, names), dtype=torch.float32, device=device)
    ).tolist()
    if list(unmatched(key, patterns, found, [])):
        everywhere = list(everyones(dict.fromkeys(names), world, device))
        raise UserError(*unmatched(key, patterns, found, everywhere))
