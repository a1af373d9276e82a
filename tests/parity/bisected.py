"""Planted faults as `megaprec bisect` sees them: run B in a layout has one, run A has not.

`python -m tests.parity.bisected [PATTERN [bits|float64]]` (or `make campaign`) plants all faults of the table, once
where bits must be equal (A in the layout of B) and once between layouts (A on one process), and
prints for each how it was named.
"""

import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.parity import fault_table
from tests.parity.fault_table import FAULTS
from tests.parity.runs import PLAN, carried_out, ready
from tools.config.run_file import RunConfig
from tools.verify.bisect.replay import Replay, Take, located_bits, located_in_float64
from tools.verify.parity.layouts import fitted, requested_layouts
from tools.verify.parity.ranks import RecordedRun, run_alone
from tools.verify.parity.record import Record
from tools.verify.parity.runs import alone

HOW: dict[str, Callable[[Replay, Take], dict[str, Any]]] = {
    "bits": located_bits,
    "float64": located_in_float64,
}
PLANTED = {"b", "float64 1"}  # names of the runs of B


@cache
def clean(run: str, layout: str, how: str) -> dict[str, Record]:
    """The runs of a replay without a fault, by name."""
    replay = _replay(
        run, layout, Path(tempfile.mkdtemp(prefix="megaprec_test_")), of_a=how == "bits"
    )
    kept: dict[str, Record] = {}

    def take(one: RecordedRun) -> Record:
        kept[one.folder.parent.name] = _taken(one, None)
        return kept[one.folder.parent.name]

    HOW[how](replay, take)
    return kept


def located(run: str, layout: str, how: str, folder: Path, fault: str = "") -> dict[str, Any]:
    """The entry that a replay makes of run B with the fault, or without any."""
    bug = (fault_table.__name__, fault) if fault else None

    def take(one: RecordedRun) -> Record:
        name = one.folder.parent.name
        if name in PLANTED:
            return _taken(one, bug)
        return clean(run, layout, how)[name]

    return HOW[how](_replay(run, layout, folder, of_a=how == "bits"), take)


def _taken(one: RecordedRun, bug: tuple[str, str] | None) -> Record:
    one.folder.mkdir(parents=True, exist_ok=True)
    if one.config.world_size == 1:
        one.folder.rmdir()
        return run_alone(one)
    return carried_out(one, bug)


def _replay(run: str, layout: str, folder: Path, of_a: bool = True) -> Replay:
    config = ready(run)
    b = config.model_copy(update={"parallel": _parallel(config, layout)})
    return Replay(b if of_a else alone(config), b, PLAN, ("A", "B"), folder)


def _parallel(config: RunConfig, layout: str) -> Any:
    (said,) = requested_layouts([layout], config.parallel)
    return fitted(config, said).parallel


def named(name: str, how: str, folder: Path) -> str:
    """Empty if the fault is named where it arises; else what is said of it."""
    fault = FAULTS[name]
    found = located(fault.run, fault.layout, how, folder, name)
    if found["verdict"] != "wrong":
        return f"{name}, {how}: {found['verdict']}"
    first = found["first"]
    right = re.fullmatch(fault.phase, first["phase"]) and re.fullmatch(fault.place, first["place"])
    if right:
        return ""
    return f"{name}, {how}: {first['phase']}: {first['place']}, not {fault.phase}: {fault.place}"


def main(pattern: str = "", *ways: str) -> int:
    """Plant all faults whose name matches; returns 1 if one was named otherwise, or a clean pair
    was accused.

    ways: of HOW, default: all.
    """
    ways = ways or tuple(HOW)
    chosen = [name for name in FAULTS if re.search(pattern, name)]
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, how) in enumerate((name, how) for name in chosen for how in ways):
            if said := named(name, how, Path(folder) / str(number)):
                wrong.append(said)
            print(said or f"{name}, {how}: named", flush=True)
        pairs = sorted(
            {(FAULTS[name].run, FAULTS[name].layout, how) for name in chosen for how in ways}
        )
        for number, (run, layout, how) in enumerate(pairs):
            found = located(run, layout, how, Path(folder) / f"clean{number}")
            if found["verdict"] != "proven":
                wrong.append(f"{run}, {layout}, {how} is accused: {found['first']}")
                print(wrong[-1], flush=True)
    print(
        f"{len(ways) * len(chosen)} replays of {len(chosen)} faults: {len(wrong)} named "
        "otherwise or falsely accused"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
