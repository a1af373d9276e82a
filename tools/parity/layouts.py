"""The layouts that a run is compared in: those that were asked for, as "tp=2,pp=2,schedule=zb-v",
or all that fit.

A layout is the given run with another [parallel] table. Keys of that table stay as they are if they
can; keys that cannot (a schedule file for another number of ranks, cuts into another number of
stages) are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from pydantic import ValidationError

from megaprec.errors import UserError, did_you_mean
from megaprec.parsing import parse_toml
from tools.config.layouts import AXES
from tools.config.layouts import fit_layout as layout_for
from tools.config.run_file import RunConfig
from tools.config.settings import Parallel

SHORT = {
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
}


@dataclass(frozen=True)
class Layout:
    """One layout. name: as a user would write it. parallel: the whole table. left_out: keys of the
    run that do not fit.
    """

    name: str
    parallel: Parallel
    left_out: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.parallel.ranks


def requested_layouts(texts: Sequence[str], own: Parallel) -> list[dict[str, Any]]:
    """Return the keys of [parallel] that each text names. Raises UserError with all problems."""
    found = []
    problems = list[str]()
    for text in texts:
        said: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            short, _, value = (x.strip() for x in part.partition("="))
            key = SHORT.get(short, short)
            if key not in Parallel.model_fields:
                hint = did_you_mean(short, [*SHORT, *Parallel.model_fields])
                problems.append(f'--layouts "{text}": no such key "{short}"{hint}')
            else:
                said[key] = _value(value)
        found.append(said)
        problems += _unreadable(text, {**own.model_dump(), **said})
    if problems:
        raise UserError(*problems)
    return found


def _value(text: str) -> Any:
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text


def _unreadable(text: str, table: Mapping[str, Any]) -> Iterator[str]:
    try:
        Parallel.model_validate(table)
    except ValidationError as error:
        for found in error.errors(include_url=False):
            if found["type"] != "extra_forbidden":
                yield (
                    f'--layouts "{text}": {found["loc"][0]}: '
                    f"{found['msg'].replace('Input should', 'must')}"
                )


def every(most: int) -> list[dict[str, Any]]:
    """Return all layouts of 2, 4, 8, ... ranks up to `most`, the smallest first.

    Sequences are cut over two ranks, alone and together with two ranks of each other axis.
    """
    powers = [1 << n for n in range(most.bit_length())]
    sizes = [
        s
        for s in product(powers, repeat=4)
        if 1 < prod(s) <= most and (s[3] == 1 or prod(s) <= 4 == s[3] * 2)
    ]
    sizes.sort(key=lambda s: (prod(s), s[3], s))
    axes = ("tensor", "pipeline", "data", "context")
    return [
        {axis: n for axis, n in zip(axes, s, strict=True) if n > 1 or axis != "context"}
        for s in sizes
    ]


def largest(said: Sequence[Mapping[str, Any]], key: str) -> int:
    """Return the largest size of one axis over these layouts."""
    return max((int(one.get(key, 1)) for one in said), default=1)


def fitted(config: RunConfig, said: Mapping[str, Any]) -> Layout:
    """Return the layout with the keys of `said`; see `tools.config.layouts.fitted`.

    A layout that the run cannot have keeps all keys, so that the reasons are those of the whole
    table.
    """
    if fitting := layout_for(config, said):
        return Layout(_name(said), fitting.parallel, fitting.left_out)
    return Layout(
        _name(said),
        Parallel.model_validate({**config.parallel.model_dump(), **dict.fromkeys(AXES, 1), **said}),
    )


def _name(said: Mapping[str, Any]) -> str:
    usual = {key: Parallel.model_fields[key].default for key in SHORT.values()}
    axes = [
        f"{short}={said[key]}"
        for short, key in SHORT.items()
        if said.get(key, usual[key]) != usual[key]
    ]
    others = [
        f"{k}={str(v).lower() if isinstance(v, bool) else v}"
        for k, v in said.items()
        if k not in SHORT.values()
    ]
    return ",".join([*axes, *others]) or "one process"
