"""Canonical runs under `megaprec parity` and `megaprec bisect`: equal bits, seen at every module of
every shard."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.parity import fault_table
from tests.parity.fault_table import FAULTS
from tests.parity.runs import PLAN, carried_out, outcome, ready
from tools.verify.bisect.replay import Replay, located_bits
from tools.verify.parity.layouts import fitted, requested_layouts
from tools.verify.parity.ranks import RecordedRun, run_alone
from tools.verify.parity.record import Record
from tools.verify.parity.runs import alone
from tools.verify.parity.summary import EQUAL_BITS, verdict


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "tp=2,dp=2"])
def test_a_canonical_run_has_equal_bits_at_every_border_of_its_modules(
    layout: str, tmp_path: Path
) -> None:
    made = outcome("canonical", layout, tmp_path / "run")
    assert verdict(made) == EQUAL_BITS, made
    compared = {name: quantity.get("compared", 0) for name, quantity in made["quantities"].items()}
    assert compared["activation"] >= 3 * 2 * 4, "steps, layers, borders of a layer"
    assert compared["activation gradient"] >= 3 * 2 * 4
    assert compared["weights"] and compared["moments"]


def located(folder: Path, fault: str = "") -> dict[str, Any]:
    """What bisect says of a canonical run: A has both virtual ranks in one process, B one in each,
    and the fault."""
    config = ready("canonical")
    (said,) = requested_layouts(["tp=2"], config.parallel)
    b = config.model_copy(update={"parallel": fitted(config, said).parallel})

    def take(run: RecordedRun) -> Record:
        if run.config.world_size == 1:
            return run_alone(run)
        run.folder.parent.mkdir(parents=True)
        return carried_out(run, (fault_table.__name__, fault) if fault else None)

    return located_bits(Replay(alone(config), b, PLAN, ("A", "B"), folder), take)


@pytest.mark.slow
def test_bisect_names_the_module_of_a_fault_across_canonical_layouts(tmp_path: Path) -> None:
    fault = "the scatter of a row-parallel output is a cut"
    assert located(tmp_path / "clean")["equal"]
    first = located(tmp_path / "planted", fault)["first"]
    assert re.fullmatch(FAULTS[fault].phase, first["phase"]), first
    assert re.fullmatch(FAULTS[fault].place, first["place"]), first
    assert (first["quantity"], first["microbatch"]) == ("activation", 0)
