"""The laws of loss scaling, against the rules of Megatron-LM written down again in plain floats."""

import json
import math
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaprec.errors import UserError
from megaprec.optim.decision.scaler import ConstantGradScaler, DynamicGradScaler, make_scaler
from megaprec.precision.plan import LossScaling
from tests.refusals import raises, sentence

DOCUMENT = Path(__file__).parents[2] / "docs" / "loss-scaling.md"

# found an inf or not -> scale, growth tracker, hysteresis tracker. Begins at 256; growth after 3,
# hysteresis 2.
MEGATRON = [
    (True, 256.0, 0, 1),  # tolerated
    (False, 256.0, 1, 1),  # a good step refills nothing
    (True, 128.0, 0, 0),
    (True, 64.0, 0, -1),  # nor does a back-off: every further inf backs off
    (False, 64.0, 1, -1),
    (False, 64.0, 2, -1),
    (False, 128.0, 0, 2),  # growth does
    (False, 128.0, 1, 2),
    (True, 128.0, 0, 1),  # good steps count in a row
    (False, 128.0, 1, 1),
    (False, 128.0, 2, 1),
    (True, 64.0, 0, 0),
]
SMALL: dict[str, Any] = {"initial": 256.0, "growth_interval": 3, "hysteresis": 2}
DEFAULTS: dict[str, Any] = {
    "minimum": 1.0,
    "maximum": None,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "hysteresis_refill": "growth",
}


def dynamic_scaler(**options: Any) -> DynamicGradScaler:
    return DynamicGradScaler(LossScaling("dynamic", **options))


def state(scaler: DynamicGradScaler) -> tuple[float, float, float]:
    return tuple(scaler.state_dict().values())  # type: ignore[return-value]


def update(scaler: DynamicGradScaler, found: bool) -> tuple[float, float, float]:
    scaler.update(torch.tensor(float(found)))
    return state(scaler)


def f32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", min(x, 2.0**127)))[0]


@dataclass
class Reference:
    """The rules, with `>=` where Megatron has `==` and a ceiling where it has none."""

    options: dict[str, Any]

    def __post_init__(self) -> None:
        self.scale = self.options["initial"]
        self.growth = 0
        self.hysteresis = self.options["hysteresis"]

    def update(self, found: bool) -> tuple[float, int, int]:
        o = self.options
        if found:
            self.growth = 0
            self.hysteresis = self.hysteresis - 1
            if self.hysteresis <= 0:
                self.scale = max(f32(self.scale * f32(o["backoff_factor"])), o["minimum"])
        else:
            self.growth += 1
            if o["hysteresis_refill"] == "good_step":
                self.hysteresis = o["hysteresis"]
            if self.growth >= o["growth_interval"]:
                self.growth = 0
                self.hysteresis = o["hysteresis"]
                self.scale = min(
                    f32(self.scale * f32(o["growth_factor"])), o["maximum"] or math.inf
                )
        return self.scale, self.growth, self.hysteresis


@st.composite
def all_options(draw: st.DrawFn) -> dict[str, Any]:
    low, initial, high = sorted(draw(st.tuples(*[st.integers(-126, 127)] * 3)))
    return {
        "initial": 2.0**initial,
        "minimum": 2.0**low,
        "maximum": draw(st.sampled_from([None, 2.0**high])),
        "growth_factor": draw(st.sampled_from([1.1, 2.0, 4.0, 2.0**60])),
        "backoff_factor": draw(st.sampled_from([0.9, 0.5, 0.25, 2.0**-60])),
        "growth_interval": draw(st.integers(1, 5)),
        "hysteresis": draw(st.integers(1, 4)),
        "hysteresis_refill": draw(st.sampled_from(["growth", "good_step"])),
    }


def require_megatron_trace() -> None:
    scaler = dynamic_scaler(**SMALL)
    for step, (found, *expected) in enumerate(MEGATRON, 1):
        assert update(scaler, found) == tuple(expected), f"step {step}"


def test_the_scale_takes_the_course_of_megatron() -> None:
    require_megatron_trace()
    reference = Reference({**DEFAULTS, **SMALL})
    assert [(found, *reference.update(found)) for found, *_ in MEGATRON] == MEGATRON, (
        "the reference is not Megatron"
    )


def test_refilled_by_good_steps_only_overflows_in_a_row_count() -> None:
    scaler = dynamic_scaler(**SMALL, hysteresis_refill="good_step")
    assert [update(scaler, found)[0] for found, *_ in MEGATRON] == [
        256,
        256,
        256,
        128,
        128,
        128,
        256,
        256,
        256,
        256,
        256,
        256,
    ]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(all_options(), st.lists(st.booleans(), min_size=40, max_size=120))
def test_the_scaler_follows_its_rules_and_stays_within_its_bounds(
    options: dict[str, Any], flags: list[bool]
) -> None:
    ours = dynamic_scaler(**options)
    reference = Reference(options)
    for found in flags:
        now = update(ours, found)
        assert now == reference.update(found)
        assert options["minimum"] <= now[0] <= (options["maximum"] or 2.0**127)


def test_a_shortened_interval_lets_the_scale_grow_at_once() -> None:
    scaler = dynamic_scaler(**SMALL)
    scaler.load_state_dict({"scale": 64.0, "growth_tracker": 900, "hysteresis_tracker": 1})
    assert update(scaler, False) == (128.0, 0, 2)


def require_state_round_trip() -> None:
    """Through JSON, at every point of the trace, the rest of it is the same: all three numbers
    count."""
    for step in range(len(MEGATRON)):
        before = dynamic_scaler(**SMALL)
        after = dynamic_scaler(**SMALL)
        for found, *_ in MEGATRON[:step]:
            update(before, found)
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        for found, *expected in MEGATRON[step:]:
            assert update(after, found) == tuple(expected), f"taken up after step {step}"


def test_a_saved_search_goes_on_as_if_never_interrupted() -> None:
    require_state_round_trip()


def test_a_loaded_scale_is_kept_within_the_bounds() -> None:
    scaler = dynamic_scaler(initial=8.0, minimum=4.0, maximum=16.0)
    for saved, taken in ((1.0, 4.0), (8.0, 8.0), (math.inf, 16.0)):
        scaler.load_state_dict({"scale": saved, "growth_tracker": 0, "hysteresis_tracker": 1})
        assert scaler.scale.item() == taken


def test_a_constant_scale_never_changes_and_neither_takes_nor_gives_state() -> None:
    scaler = ConstantGradScaler(1024.0)
    scaler.update(torch.tensor(1.0))
    scaler.load_state_dict({"scale": 2.0, "growth_tracker": 1, "hysteresis_tracker": 1})
    assert (scaler.scale.item(), scaler.state_dict()) == (1024.0, {})
    dynamic = dynamic_scaler(**SMALL)
    dynamic.load_state_dict(scaler.state_dict())
    assert state(dynamic) == (256.0, 0, 2)


def test_the_first_scale_is_that_of_torch() -> None:
    """Megatron's 2**32 stays with whoever reads its settings."""
    torchs = torch.amp.GradScaler("cpu").get_scale()
    assert DynamicGradScaler(LossScaling("dynamic")).scale.item() == torchs


IMPOSSIBLE = [
    (
        {"minimum": 0.0},
        sentence("optimizer.scaler_range", initial="65536.0", minimum="0.0"),
    ),
    (
        {"minimum": 2.0**33},
        sentence("optimizer.scaler_range", initial="65536.0", minimum="8589934592.0"),
    ),
    (
        {"maximum": 2.0**15},
        sentence("optimizer.scaler_range", minimum="1.0", maximum="32768.0"),
    ),
    ({"minimum": 1e-45, "initial": 1.0}, sentence("optimizer.scaler_range", minimum="1e-45")),
    ({"growth_factor": 1.0}, sentence("optimizer.scaler_growth", growth_factor="1.0")),
    ({"backoff_factor": 1.0}, sentence("optimizer.scaler_backoff", backoff_factor="1.0")),
    ({"backoff_factor": 0.0}, sentence("optimizer.scaler_backoff", backoff_factor="0.0")),
    ({"growth_interval": 0}, sentence("optimizer.scaler_interval", growth_interval=0)),
    ({"hysteresis": 0}, sentence("optimizer.scaler_hysteresis", hysteresis=0)),
]


@pytest.mark.parametrize(
    ("options", "message"), IMPOSSIBLE, ids=lambda x: str(x) if isinstance(x, dict) else ""
)
def test_an_impossible_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        dynamic_scaler(**options)
    (problem,) = raised.value.problems
    assert re.search(message, problem)


@pytest.mark.parametrize(
    "options",
    [
        {"initial": 2.0, "minimum": 2.0},
        {"initial": 2.0, "maximum": 2.0},
        {"minimum": 2.0**-126},
        {"maximum": 2.0**127},
        {"growth_interval": 1},
        {"hysteresis": 1},
    ],
    ids=str,
)
def test_an_option_at_the_end_of_its_range_is_possible(options: dict[str, Any]) -> None:
    scaler = dynamic_scaler(**options)
    assert scaler.scale.item() == options.get("initial", LossScaling("dynamic").initial)


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**127])
def test_the_least_and_the_largest_constant_scale_are_possible(scale: float) -> None:
    assert ConstantGradScaler(scale).scale.item() == scale


def test_all_impossible_options_are_named_at_once() -> None:
    with pytest.raises(UserError) as raised:
        dynamic_scaler(
            initial=1.0,
            minimum=2.0,
            growth_factor=0.5,
            backoff_factor=1.5,
            growth_interval=0,
            hysteresis=0,
        )
    assert len(raised.value.problems) == 5


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 1e39, 1e-46])
def test_a_constant_scale_that_float32_cannot_hold_is_refused(scale: float) -> None:
    with raises("optimizer.loss_scale_range"):
        ConstantGradScaler(scale)


def test_a_plan_decides_the_kind_of_the_scaler() -> None:
    scaling = LossScaling("dynamic", 2.0**20)
    made = make_scaler(scaling)
    assert isinstance(made, DynamicGradScaler)
    assert made.scale.item() == 2.0**20
    assert make_scaler(replace(scaling, kind="constant")).scale.item() == 2.0**20
    assert make_scaler(replace(scaling, kind="none")).scale.item() == 1.0


@pytest.mark.parametrize("refill", ["growth", "good_step"])
def test_the_documented_trace_is_what_the_scaler_does(
    refill: Literal["growth", "good_step"],
) -> None:
    rows = [
        line.strip("| ").split(" | ")
        for line in DOCUMENT.read_text().splitlines()
        if line.startswith("| ")
    ]
    table = {row[0].strip("`"): row[1:] for row in rows}
    scaler = dynamic_scaler(initial=8.0, growth_interval=3, hysteresis=2, hysteresis_refill=refill)
    trace = []
    for step in table["step"]:
        scaler.update(torch.tensor(float(step.endswith("x"))))
        trace.append(f"{scaler.scale.item():g} ({scaler.hysteresis_tracker.item()})")
    assert len(trace) == 12
    assert trace == table[refill]
