"""`megaprec parity` finds faults that are planted in the ranks of a layout, and names where they
arise."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from models.engine.passes import Share
from tests.parity import fault_table
from tests.parity.fault_table import FAULTS
from tests.parity.faults import after_reduce
from tests.parity.runs import outcome, references
from tools.training.batches import Batches
from tools.verify.parity.borders import TOKENS_IN

SAMPLE = [  # one of each part of a step
    "a feed-forward's output is not summed",
    "the loss is divided by a replica's tokens",
    "a column-parallel input gradient is not summed",
    "tied gradients are summed twice",
    "a stage is left out of the norm",
    "the clip hangs on the rank",
    "weights are not collected",
]


def first_of_each() -> list[str]:
    """Names of faults, but for those of SAMPLE: each is the first of its run, layout, or phase that
    it is found in."""
    chosen = []
    seen = set[tuple[str, str]]()
    for name in [*SAMPLE, *FAULTS]:
        fault = FAULTS[name]
        kinds = {("run and layout", f"{fault.run} {fault.layout}"), ("phase", fault.phase)}
        if not kinds <= seen and name not in SAMPLE:
            chosen.append(name)
        seen |= kinds
    return chosen


PROOF = first_of_each()
RATIOS = {"tied gradients are summed twice": 2.0, "replicas are averaged": 0.5}


def require_named(name: str, folder: Path) -> None:
    fault = FAULTS[name]
    found = outcome(fault.run, fault.layout, folder, (fault_table.__name__, name))
    assert found["verdict"] == "wrong"
    first = found["first"]
    assert re.fullmatch(fault.phase, first["phase"]), first
    assert re.fullmatch(fault.place, first["place"]), first
    assert name not in RATIOS or first["ratio"] == pytest.approx(RATIOS[name], rel=1e-9)
    wrong = [stop["name"] for stop in found["way"] if stop["verdict"] == "wrong"]
    named = {first["name"], first["quantity"], f"{first['quantity']}s"}
    named |= {TOKENS_IN} if first["phase"] == "data" else set()  # other samples are other tokens
    assert not wrong or wrong[0] in named, "the page says the same"


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_fault_is_found_and_named_where_it_arises(name: str, tmp_path: Path) -> None:
    require_named(name, tmp_path / "run")


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("name", PROOF)
def test_a_fault_of_each_run_layout_and_phase_is_found_and_named(name: str, tmp_path: Path) -> None:
    require_named(name, tmp_path / "run")


@pytest.mark.campaign
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in SAMPLE + PROOF])
def test_each_of_the_planted_faults_is_found_and_named(name: str, tmp_path: Path) -> None:
    require_named(name, tmp_path / "run")


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("run", "layout"),
    [
        ("gpt2", "tp=2,sequence=true"),
        ("modules", "pp=2,schedule=zb-v"),
        ("gpt2", "pp=2,schedule=zb-v"),
        ("recompute", "dp=2"),
        ("changing", "tp=2,dp=2,sequence=true"),
        ("changing", "pp=2"),
    ],
)
def test_and_nothing_is_found_where_there_is_no_bug(run: str, layout: str, tmp_path: Path) -> None:
    found = outcome(run, layout, tmp_path / "run")
    assert found["verdict"] == "proven", found
    verdicts = {quantity: one["verdict"] for quantity, one in found["quantities"].items()}
    assert set(verdicts.values()) == {"proven"}, "each quantity was tried"
    assert {
        "activation",
        "activation gradient",
        "loss",
        "gradient",
        "weights",
        "moments",
        "scaler",
    } <= verdicts.keys()
    assert [step["outcome"] for step in references(run)[0].steps] == [
        "applied",
        "skipped_overflow",
        "applied",
    ]


@pytest.mark.slow
def test_a_fault_of_short_sequences_alone_is_found_in_the_step_that_has_them(
    tmp_path: Path,
) -> None:
    bug = (__name__, "pieces_are_numbered_as_samples")
    found = outcome("changing", "dp=2", tmp_path / "run", bug)
    assert found["verdict"] == "wrong"
    assert (found["first"]["phase"], found["first"]["step"]) == ("forward", 1)


def pieces_are_numbered_as_samples() -> None:
    right = Batches._read

    def read(self: Batches, *arguments: Any) -> Share:
        share = right(self, *arguments)
        return replace(share, first=share.first // share.pieces)

    planted = patch.object(Batches, "_read", read)
    planted.start()


def power(found: dict[str, Any]) -> float:
    """How many times its bound the first difference is."""
    return found["first"]["error"] / found["first"]["bound"]


def test_a_fault_of_a_millionth_is_far_outside_of_what_rounding_may_do(tmp_path: Path) -> None:
    found = outcome(
        "gpt2", "pp=2", tmp_path / "run", (__name__, "one_gradient_is_a_millionth_too_large")
    )
    assert found["first"]["phase"] == "gradients"
    assert found["first"]["name"] == "layers.2.attention.key.weight"
    assert power(found) > 1e5


one_gradient_is_a_millionth_too_large = after_reduce(
    lambda buffer: [
        buffer.grads[piece.start : piece.stop].mul_(1 + 1e-6)
        for piece in buffer.pieces
        if piece.part.name == "layers.2.attention.key.weight"
    ]
)
