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
from tools.config.layouts import barest_layout, fit_layout
from tools.config.run_file import RunConfig
from tools.config.tables.settings import Parallel

SHORT = {
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
}


@dataclass(frozen=True)
class ComparedLayout:
    """One layout. name: as a user would write it. parallel: the full table. left_out: keys of
    the run that do not fit.
    """

    name: str
    parallel: Parallel
    left_out: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.parallel.ranks


def requested_layouts(
    texts: Sequence[str], run_parallel: Parallel, option: str = "--layouts"
) -> list[dict[str, Any]]:
    """Return the keys of [parallel] that each text names. Raises UserError with all problems.

    run_parallel: the table of the run, of which a layout keeps the other keys. option: by which the
    texts were given.
    """
    layouts: list[dict[str, Any]] = []
    problems: list[str] = []
    for layout_text in texts:
        parallel_keys: dict[str, Any] = {}
        for assignment in layout_text.split(","):
            if not assignment.strip():
                continue
            given_name, _, key_value = assignment.partition("=")
            given_name = given_name.strip()
            axis_key = SHORT.get(given_name, given_name)
            if axis_key in parallel_keys:
                problems.append(f'{option} "{layout_text}": {axis_key} is given twice')
            elif axis_key in Parallel.model_fields:
                parallel_keys[axis_key] = _parse_value(key_value.strip())
            else:
                hint = did_you_mean(given_name, [*SHORT, *Parallel.model_fields])
                problems.append(f'{option} "{layout_text}": no such key "{given_name}"{hint}')
        # the other keys are those of the run, which may not fit these
        layouts.append(parallel_keys)
        table = run_parallel.model_dump() | parallel_keys
        problems += [f'{option} "{layout_text}": {problem}' for problem in _value_problems(table)]
    if problems:
        raise UserError(*problems)
    return layouts


def _parse_value(value_text: str) -> Any:
    """Return a value as TOML has it; text without quotes is a string."""
    try:
        return parse_toml(f"value = {value_text}")["value"]
    except ValueError:
        return value_text


def _value_problems(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the values of a table [parallel]: the key, and why."""
    try:
        Parallel.model_validate(table)
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            if problem["type"] != "extra_forbidden":  # `requested_layouts` names unknown keys
                message = problem["msg"].replace("Input should", "must")
                yield f"{problem['loc'][0]}: {message}"


def every(max_ranks: int) -> list[dict[str, Any]]:
    """Return all layouts of 2, 4, 8, ... ranks up to `max_ranks`, the smallest first, as keys of
    [parallel].

    Sequences are cut over two ranks, alone and together with two ranks of each other axis.
    """
    powers = [2**exponent for exponent in range(max_ranks.bit_length())]
    all_sizes: list[tuple[int, ...]] = []
    for sizes in product(powers, repeat=4):
        *_, context = sizes
        ranks = prod(sizes)
        # cutting sequences multiplies the layouts: with one other axis it shows its faults
        is_wanted = context == 1 or (context == 2 and ranks <= 4)
        if 1 < ranks <= max_ranks and is_wanted:
            all_sizes.append(sizes)

    def by_ranks_and_context(sizes: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        *_, context = sizes
        return prod(sizes), context, sizes

    # so that the cheapest layouts, which show most faults, are named first
    all_sizes.sort(key=by_ranks_and_context)
    layouts: list[dict[str, Any]] = []
    for tensor, pipeline, data, context in all_sizes:
        layout = {"tensor": tensor, "pipeline": pipeline, "data": data}
        if context > 1:
            layout["context"] = context
        layouts.append(layout)
    return layouts


def largest(layouts: Sequence[Mapping[str, Any]], axis_key: str) -> int:
    """Return the largest size of one axis over these layouts."""
    return max((int(layout.get(axis_key, 1)) for layout in layouts), default=1)


def fitted(config: RunConfig, parallel_keys: Mapping[str, Any]) -> ComparedLayout:
    """Return the layout with these keys of [parallel]; see `tools.config.layouts.fit_layout`.

    A layout that the run cannot have is without keys that may be left out, so that the reasons are
    those that remain.
    """
    name = _layout_name(parallel_keys)
    fitting = fit_layout(config, parallel_keys)
    if fitting:
        return ComparedLayout(name, fitting.parallel, fitting.left_out)
    return ComparedLayout(name, barest_layout(config, parallel_keys).parallel)


def _layout_name(parallel_keys: Mapping[str, Any]) -> str:
    """Return the layout as a user would write it: axes by their short names first."""
    name_parts: list[str] = []
    for short, axis_key in SHORT.items():
        default = Parallel.model_fields[axis_key].default
        if parallel_keys.get(axis_key, default) != default:
            name_parts.append(f"{short}={parallel_keys[axis_key]}")
    for axis_key, key_value in parallel_keys.items():
        if axis_key not in SHORT.values():
            value_text = str(key_value).lower() if isinstance(key_value, bool) else str(key_value)
            name_parts.append(f"{axis_key}={value_text}")
    return ",".join(name_parts) or "one process"
