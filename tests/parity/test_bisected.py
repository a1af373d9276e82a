"""`megaprec bisect` names planted faults where they arise, bit by bit and in float64, and accuses
no clean pair."""

from pathlib import Path

import pytest

from tests.parity.bisected import HOW, located, named
from tests.parity.fault_table import FAULTS
from tests.parity.test_bugs import PROOF, SAMPLE

CHOSEN = [*SAMPLE, *PROOF]
# silent faults of composition that Megatron-LM's issue #7452 reports -> their counterparts here
REPORTED = {
    "near 8, a parameter of the tp ranks left out of the norm": "a stage is left out of the norm",
    "9: each rank divides the loss by its own tokens": "the loss is divided by a replica's tokens",
    "10: the router's loss counts tokens of all tp ranks twice": "each tp rank adds the router's losses",
    "11: a norm's gradient is not summed over tp": "one norm is not summed over the sequence",
}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CHOSEN)
def test_a_planted_fault_is_named_where_it_arises(name: str, how: str, tmp_path: Path) -> None:
    assert named(name, how, tmp_path) == ""


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("how", HOW)
def test_tensors_that_only_one_run_has_are_named(how: str, tmp_path: Path) -> None:
    assert named("a layer is on no stage", how, tmp_path) == ""


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("name", REPORTED.values(), ids=REPORTED)
def test_a_fault_that_others_had_is_named_where_it_arises(name: str, tmp_path: Path) -> None:
    assert named(name, "bits", tmp_path) == ""


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("run", "layout"), sorted({(fault.run, fault.layout) for fault in FAULTS.values()})
)
def test_a_clean_pair_is_not_accused(run: str, layout: str, how: str, tmp_path: Path) -> None:
    assert located(run, layout, how, tmp_path)["verdict"] == "proven"


@pytest.mark.slow
def test_the_replica_and_micro_batch_of_the_first_difference_are_named(tmp_path: Path) -> None:
    name = "a stage sends the micro-batch before"  # which the first micro-batch has not
    fault = FAULTS[name]
    first = located(fault.run, fault.layout, "bits", tmp_path, name)["first"]
    assert (first["replica"], first["microbatch"], first["ranks"]) == (0, 1, [1])
