"""Patterns (`fnmatch`) of logical names. A pattern that matches no parameter on any rank is refused
as mistyped."""

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase

import torch

from megaprec.comm.axis import Axis
from megaprec.comm.gathered_texts import gather_entries
from megaprec.errors import Problem, UserError, did_you_mean

NORMS = ("*norm.weight", "*norm.bias")
"""Logical names of the parameters of norms, for PrecisionPlan.keep_fp32."""


def match_patterns(patterns: Sequence[str], names: Collection[str]) -> list[bool]:
    """Return, for each pattern, True if it matches at least one of the names."""
    matches: list[bool] = []
    for pattern in patterns:
        matches.append(any(fnmatchcase(name, pattern) for name in names))
    return matches


def unmatched_problems(
    key: str,
    patterns: Sequence[str],
    matches: Sequence[bool],
    names: Sequence[str],
) -> Iterator[str]:
    """Yield an error line for each pattern of `key` that matches no parameter of the whole model.

    The patterns of NORMS count as one: not every norm has a bias, so one match is enough for both.

    matches: for each pattern, True if it matches a parameter.
    names: of parameters, for the error.
    """
    matched: set[str] = set()
    for pattern, is_match in zip(patterns, matches, strict=True):
        if is_match:
            matched.add(pattern)
    examples = f"; names are like {names[0]} and {names[-1]}" if names else ""
    for pattern in patterns:
        norms_are_matched = pattern in NORMS and not matched.isdisjoint(NORMS)
        if pattern in matched or norms_are_matched:
            continue
        hint = did_you_mean(pattern, names)
        yield Problem.of(
            "precision.pattern_unmatched", key=key, pattern=pattern, examples=examples, hint=hint
        )


def require_used(
    key: str,
    patterns: Sequence[str],
    names: Collection[str],
    world: Axis,
    device: torch.device,
) -> None:
    """Raise UserError on every rank if a pattern matches no parameter on any rank. Collective over
    the world.

    names: logical names of this rank's parameters.
    """
    if not patterns:
        return
    local_matches = torch.tensor(
        match_patterns(patterns, names), dtype=torch.float32, device=device
    )
    matches = world.max_(local_matches).tolist()
    if any(unmatched_problems(key, patterns, matches, [])):
        # the names of other ranks are exchanged only to name them in the error
        all_names = list(gather_entries(dict.fromkeys(names), world, device))
        raise UserError(*unmatched_problems(key, patterns, matches, all_names))
