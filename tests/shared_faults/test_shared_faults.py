"""Each fault that all layouts share is found by at least two gates, one of them fast, and the table
of CONTRIBUTING.md says which."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.ranks import run_ranks
from tests.shared_faults.faults import FAULTS
from tests.shared_faults.gates import (
    GATES,
    KILLED,
    Gate,
    oracle,
    parity_of_layouts,
    plain_oracle,
)
from tests.shared_faults.table import KILLS, gates_that_find, read_kills, shown_table, table

ROOT = Path(__file__).parents[2]
FAST = ("fast tests", "closed forms")  # gates whose laws `make test` tries
EXCEPTIONS: dict[str, str] = {}
CHEAP = ("fast tests", "oracle")
SAMPLE = 4
KILLED_BY_CHEAP = [
    name for name in FAULTS if set(CHEAP) <= set(gates_that_find(read_kills(KILLS), name))
]


def test_there_are_at_least_40_faults() -> None:
    assert len(FAULTS) >= 40


def test_the_table_of_contributing_is_that_of_the_verdicts() -> None:
    """Else: `python -m tests.shared_faults` writes it."""
    assert shown_table() == table(read_kills(KILLS))


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_by_two_gates_one_of_them_fast(name: str) -> None:
    found = gates_that_find(read_kills(KILLS), name)
    is_enough = len(found) >= 2 and any(gate in FAST for gate in found)
    assert is_enough != (name in EXCEPTIONS), f"{name}: {found}"


def test_the_plain_oracle_finds_what_transformers_finds() -> None:
    kills = read_kills(KILLS)
    found = {name: gates_that_find(kills, name) for name in FAULTS}
    missed = [name for name, by in found.items() if "oracle" in by and "plain oracle" not in by]
    assert not missed


def test_verdicts_are_of_faults_and_gates_that_there_are() -> None:
    kills = read_kills(KILLS)
    assert kills.keys() == FAULTS.keys()
    assert {gate for verdicts in kills.values() for gate in verdicts} <= GATES.keys()


def test_tests_that_are_there_for_a_fault_are_there() -> None:
    for fault in FAULTS.values():
        for test in fault.tests:
            path, _, name = test.partition("::")
            law = name.partition("[")[0]
            assert f"def {law}" in (ROOT / path).read_text(), test


def failures(mesh: DeviceMesh) -> dict[str, str]:
    """Why faults cannot be planted, by name."""
    found: dict[str, str] = {}
    for name, fault in FAULTS.items():
        try:
            fault.plant()
        except (AssertionError, AttributeError, TypeError) as error:
            found[name] = str(error)
    return found


def test_every_fault_replaces_something_that_is_called_alike() -> None:
    assert run_ranks(failures, {}) == [{}]


def first_of_each_run() -> list[str]:
    """Names of faults, each the first whose run is that of no other before."""
    chosen: dict[tuple[str, tuple[str, ...]], str] = {}
    for name, fault in FAULTS.items():
        chosen.setdefault((fault.family, fault.words), name)
    return list(chosen.values())


@pytest.mark.cases(0, sample=2)
@pytest.mark.parametrize("name", first_of_each_run())
@pytest.mark.parametrize("gate", [oracle, plain_oracle, parity_of_layouts])
def test_nothing_is_found_where_no_fault_is(name: str, gate: Gate, tmp_path: Path) -> None:
    verdict = gate(FAULTS[name], tmp_path)
    assert verdict.verdict != KILLED, verdict.by


@pytest.mark.slow
def test_a_sample_of_the_faults_is_found_by_the_cheap_gates(tmp_path: Path) -> None:
    faults = random.Random(0).sample(KILLED_BY_CHEAP, SAMPLE)
    kept = tmp_path / "kills.json"
    command = [sys.executable, "-m", "tests.shared_faults", "--kept", str(kept)]
    options = ["--gates", *CHEAP, "--faults", *faults]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads(kept.read_text())
    for fault in faults:
        said = {gate: verdicts[fault][gate]["verdict"] for gate in CHEAP}
        assert said == dict.fromkeys(CHEAP, KILLED), done.stdout
