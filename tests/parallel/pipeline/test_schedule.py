"""The laws of schedules whatever their kind: their text, their timing, and what is refused."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaprec.errors import UserError
from parallel.pipeline import simulation
from parallel.pipeline.builders import gpipe, one_f_one_b
from parallel.pipeline.instructions import NO_MICROBATCH, Channel, Instruction, Op
from parallel.pipeline.kinds import KINDS, schedule
from parallel.pipeline.schedules import MOST_PROBLEMS, Schedule, complete, forward_only
from parallel.pipeline.simulation import (
    Mark,
    RefusedSchedule,
    Span,
    peak,
    sends_under_way,
    simulate,
)
from parallel.pipeline.verify import check
from tests.refusals import raises, sentence

KIND = st.sampled_from(sorted(KINDS))
RANKS = st.integers(1, 8)
MICROBATCHES = st.integers(1, 12)
COSTS = st.integers(1, 9)
UNHURRIED = settings(deadline=None, max_examples=50)
CHUNKS = {"interleaved": (1, 2, 3), "zb-v": (2,), "dualpipe-v": (2,)}
EVERY = [
    (k, p, m, v)
    for k in KINDS
    for p in (1, 2, 3, 4, 8)
    for v in CHUNKS.get(k, (1,))
    for m in range(1, 13)
]


def program(text: str) -> tuple[Instruction, ...]:
    return tuple(map(Instruction.parse, text.split()))


def placed(rank_of_stage: Sequence[int], *programs: str) -> Schedule:
    return Schedule(tuple(map(program, programs)), tuple(rank_of_stage))


@given(st.sampled_from(Op), st.integers(0, 99), st.integers(0, 999))
def test_an_instruction_is_read_back_from_its_text(op: Op, stage: int, microbatch: int) -> None:
    i = Instruction(op, stage, NO_MICROBATCH if op is Op.REDUCE else microbatch)
    assert Instruction.parse(str(i)) == i


@pytest.mark.parametrize(
    "text", ["", "F", "F0", "R0.1", "F0.", "F-1.0", "F01.2", "X0.1", "F0.1 ", "sB0.1", "f0.1"]
)
def test_other_text_is_refused(text: str) -> None:
    with raises("pipeline.instruction"):
        Instruction.parse(text)


@UNHURRIED
@given(KIND, RANKS, MICROBATCHES)
def test_a_schedule_is_read_back_from_its_text(kind: str, p: int, m: int) -> None:
    s = schedule(kind, p, m)
    assert Schedule.parse(str(s)) == s


def test_a_text_of_computations_alone_is_completed() -> None:
    text = """
        F0.0 F0.1 B0.0 B0.1     # rank 0: what follows is a comment

        F1.0 B1.0 F1.1 B1.1
    """
    assert str(Schedule.parse(text)).splitlines() == [
        "F0.0 sA0.0 F0.1 sA0.1 rG0.0 B0.0 rG0.1 B0.1 R0",
        "rA1.0 F1.0 B1.0 sG1.0 rA1.1 F1.1 B1.1 sG1.1 R1",
    ]


def test_all_that_is_wrong_in_a_text_is_told_with_its_line() -> None:
    with pytest.raises(UserError) as refusal:
        Schedule.parse("F0.0 X\n\nF2.0 B2\n")
    first, second = refusal.value.problems
    assert re.match("line 1: " + sentence("pipeline.instruction", text="X"), first)
    assert re.match("line 3: " + sentence("pipeline.instruction", text="B2"), second)
    with raises("pipeline.stage_without_line", stage=1):
        Schedule.parse("F0.0 B0.0\nF2.0 B2.0")


def test_of_a_file_that_is_no_schedule_the_first_lines_are_told_and_the_others_counted() -> None:
    with pytest.raises(UserError) as refused:
        Schedule.parse("no schedule\n" * 400)
    *first, last = refused.value.problems
    assert len(first) == MOST_PROBLEMS
    assert re.fullmatch(sentence("pipeline.further_problems", number=400 - MOST_PROBLEMS), last)


@pytest.mark.parametrize("text", ["F0." + "9" * 5000, "F" + "9" * 5000 + ".0", "F0.9999999999"])
def test_a_number_that_no_schedule_has_makes_no_instruction(text: str) -> None:
    with raises("pipeline.instruction"):
        Schedule.parse(text)


def test_a_large_number_of_a_micro_batch_is_told_at_once() -> None:
    with raises("pipeline.microbatch_unnamed", microbatch=1, largest=999_999_999):
        Schedule.parse("F0.0 B0.0 F0.999999999 B0.999999999")


def test_a_large_number_of_a_stage_is_told_in_few_lines_at_once() -> None:
    with pytest.raises(UserError) as caught:
        Schedule.parse("F0.0 B0.0 F999999999.0")
    *first, last = caught.value.problems
    assert len(first) == MOST_PROBLEMS
    lacking = 10**9 - 2 - MOST_PROBLEMS
    assert re.fullmatch(sentence("pipeline.further_problems", number=lacking), last)


def test_a_message_arrives_after_its_time_on_the_way_and_its_sender_goes_on() -> None:
    spans = simulate(
        one_f_one_b(2, 1),
        lambda i: {Op.FORWARD: 1, Op.BACKWARD: 2, Op.SEND_ACTIVATION: 5}.get(i.op, 0),
    )
    assert [
        (str(s.instruction), s.start, s.end) for s in sorted(spans, key=lambda s: s.end)[:4]
    ] == [
        ("F0.0", 0, 1),
        ("sA0.0", 1, 6),
        ("rA1.0", 0, 6),
        ("F1.0", 6, 7),
    ]


def test_one_communicator_for_two_ranks_would_hang_and_so_each_channel_has_its_own() -> None:
    s = one_f_one_b(4, 8)
    with pytest.raises(UserError, match="cannot finish"):
        simulate(s, communicator=lambda message: message.stage)  # both ways between two neighbours
    check(s)


def test_stages_may_lie_anywhere_and_neighbours_on_one_rank_need_no_transfer() -> None:
    s = complete(
        [program("F0.0 F3.0 B3.0 B0.0"), program("F1.0 F2.0 B2.0 B1.0")], rank_of_stage=(0, 1, 1, 0)
    )
    check(s)
    assert str(s).splitlines() == [
        "F0.0 sA0.0 rA3.0 F3.0 B3.0 sG3.0 R3 rG0.0 B0.0 R0",
        "rA1.0 F1.0 F2.0 sA2.0 rG2.0 B2.0 R2 B1.0 sG1.0 R1",
    ]


FAULTS = {
    "a backward before its forward": ("rA1.0 B1.0 F1.0 sG1.0 R1", "B1.0 comes before F1.0"),
    "a forward before its activation": ("F1.0 rA1.0 B1.0 sG1.0 R1", "F1.0 comes before rA1.0"),
    "a forward missing": ("rA1.0 sG1.0 R1", "F1.0 is missing"),
    "a forward twice": ("rA1.0 F1.0 F1.0 B1.0 sG1.0 R1", "F1.0 occurs here for the second time"),
    "a backward missing": ("rA1.0 F1.0 sG1.0 R1", "B1.0 is missing"),
    "a backward twice": ("rA1.0 F1.0 B1.0 B1.0 sG1.0 R1", "B1.0 occurs here for the second time"),
    "a send missing": ("rA1.0 F1.0 B1.0 R1", "sG1.0 is missing"),
    "a receive missing": ("F1.0 B1.0 sG1.0 R1", "rA1.0 is missing"),
    "a send to nobody": ("rA1.0 F1.0 sA1.0 B1.0 sG1.0 R1", "sA1.0 has no purpose here"),
    "a stage on two ranks": (
        "F0.0 rA1.0 F1.0 B1.0 sG1.0 R1",
        "F0.0 is for stage 0, which lives on rank 0",
    ),
    "a stage that is not there": (
        "rA1.0 F1.0 B1.0 sG1.0 R1 F2.0",
        "F2.0 is for a stage that does not exist",
    ),
    "half a backward": ("rA1.0 F1.0 I1.0 sG1.0 R1", "W1.0 is missing"),
    "the later half first": ("rA1.0 F1.0 W1.0 I1.0 sG1.0 R1", "W1.0 comes before I1.0"),
    "a backward and its halves": ("rA1.0 F1.0 I1.0 sG1.0 W1.0 B1.0 R1", "B1.0 has no purpose here"),
    "a gradient sent before it is made": (
        "rA1.0 F1.0 sG1.0 I1.0 W1.0 R1",
        "sG1.0 comes before I1.0",
    ),
    "REDUCE before the weights' gradient": (
        "rA1.0 F1.0 I1.0 sG1.0 R1 W1.0",
        "R1 comes before W1.0",
    ),
    "REDUCE missing": ("rA1.0 F1.0 B1.0 sG1.0", "R1 is missing"),
    "REDUCE early": ("rA1.0 F1.0 R1 B1.0 sG1.0", "R1 comes before B1.0"),
}


@pytest.mark.parametrize(("second_rank", "says"), FAULTS.values(), ids=FAULTS.keys())
def test_a_faulty_schedule_is_refused_with_a_picture(second_rank: str, says: str) -> None:
    with pytest.raises(UserError) as refusal:
        check(placed((0, 1), "F0.0 sA0.0 rG0.0 B0.0 R0", second_rank))
    *problems, first, second = refusal.value.problems
    assert f"rank 1: {says}" in problems
    assert f"<-- {problems[0].removeprefix('rank 1: ')}" in second
    assert first.startswith("rank 0:")


def test_a_refused_schedule_tells_what_would_run_and_where_each_rank_goes_wrong() -> None:
    with pytest.raises(RefusedSchedule) as refusal:
        check(placed((0, 1), "F0.0 sA0.0 rG0.0 B0.0 R0", "rA1.0 B1.0 F1.0 sG1.0 R1"))
    assert refusal.value.marks == {1: Mark(1, "B1.0 comes before F1.0")}
    assert {str(span.instruction) for span in refusal.value.spans} == {"F0.0", "sA0.0", "rA1.0"}


def test_memory_grows_and_shrinks_as_instructions_say() -> None:
    sizes = {Op.FORWARD: 10, Op.BACKWARD: -10, Op.BACKWARD_INPUT: -6, Op.BACKWARD_WEIGHT: -4}
    assert peak(gpipe(2, 3), lambda i: sizes.get(i.op, 0)) == [30, 30]
    halves = Schedule.parse("F0.0 I0.0 F0.1 I0.1 F0.2 I0.2 W0.0 W0.1 W0.2")
    assert peak(halves, lambda i: sizes.get(i.op, 0)) == [18]


def test_a_deadlock_is_drawn() -> None:
    first = "rG0.0 F0.0 sA0.0 B0.0 R0"
    with pytest.raises(UserError) as refusal:
        check(placed((0, 1), first, "rA1.0 F1.0 B1.0 sG1.0 R1"))
    assert refusal.value.problems == (
        "this schedule cannot finish",
        "rank 0:   [rG0.0] F0.0 sA0.0 B0.0 R0  <-- waits for sG1.0 of rank 1",
        "rank 1:   [rA1.0] F1.0 B1.0 sG1.0 R1  <-- waits for sA0.0 of rank 0",
    )


def test_what_is_sent_before_it_is_computed_is_refused() -> None:
    second = "rA1.0 F1.0 B1.0 sG1.0 R1"
    with pytest.raises(UserError, match=r"sA0\.0 comes before F0\.0"):
        check(placed((0, 1), "sA0.0 F0.0 rG0.0 B0.0 R0", second))
    with pytest.raises(UserError, match=r"sG1\.0 comes before B1\.0"):
        check(placed((0, 1), "F0.0 sA0.0 rG0.0 B0.0 R0", "rA1.0 F1.0 sG1.0 B1.0 R1"))


def test_a_stage_goes_back_after_the_next_one_on_its_rank() -> None:
    with pytest.raises(UserError, match=r"B0\.0 comes before B1\.0"):
        check(placed((0, 0), "F0.0 F1.0 B0.0 B1.0 R1 R0"))


def test_a_rank_waits_while_as_many_sends_are_under_way_as_may_be() -> None:
    """One: the second activation is sent when the first one is received, after a forward of 10
    seconds; all others take one."""
    first = "F0.0 sA0.0 F0.1 sA0.1 F0.2"
    second = "F2.0 rA1.0 F1.0 rA1.1 F1.1"
    spans = simulate(
        placed((0, 1, 1), first, second),
        cost=lambda i: {Op.FORWARD: 10.0 if i.stage == 2 else 1.0}.get(i.op, 0.0),
        communicator=lambda message: "one",
        sends=1,
    )
    starts = {str(span.instruction): span.start for span in spans}
    assert [starts[f"F0.{number}"] for number in range(3)] == [0.0, 1.0, 10.0]


def test_receives_in_another_order_than_the_sends_are_refused() -> None:
    s = forward_only(gpipe(2, 2))
    swapped = replace(s, programs=(s.programs[0], program("rA1.1 F1.1 rA1.0 F1.0")))
    with pytest.raises(UserError, match=r"waits for sA0\.1 of rank 0, behind sA0\.0"):
        check(swapped)


def test_as_many_sends_are_kept_under_way_as_a_schedule_needs() -> None:
    ahead = "F0.0 F3.0 F0.1 F0.2 F0.3 B3.0 B0.0 F3.1 B3.1 B0.1 F3.2 B3.2 B0.2 F3.3 B3.3 B0.3"
    in_turn = " ".join(f"F1.{m} F2.{m} B2.{m} B1.{m}" for m in range(4))
    s = complete([program(ahead), program(in_turn)], rank_of_stage=(0, 1, 1, 0))
    with pytest.raises(UserError, match=r"\[sA0.3\].*<-- waits for rank 1 to receive sA0\.1"):
        simulate(s, communicator=lambda message: Channel.of(message, s.rank_of_stage), sends=2)
    assert sends_under_way(s) == 3
    check(s)
    assert sends_under_way(one_f_one_b(4, 8)) == 2


def test_a_schedule_is_simulated_once_for_the_memory_of_all_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated = list[Schedule]()
    simulate_schedule = simulation.simulate

    def note_schedule(s: Schedule, *args: Any, **keys: Any) -> list[Span]:
        simulated.append(s)
        return simulate_schedule(s, *args, **keys)

    monkeypatch.setattr(simulation, "simulate", note_schedule)
    sends_under_way.cache_clear()
    peak(one_f_one_b(6, 9), lambda instruction: 1)
    assert len(simulated) == 1


def test_what_nobody_receives_is_named() -> None:
    with pytest.raises(UserError, match=r"no rank receives sA0\.0"):
        simulate(placed((0, 1), "F0.0 sA0.0", ""))
