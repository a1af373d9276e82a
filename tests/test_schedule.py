"""The laws of schedules: complete, finishing, as fast and as lean as the formulas say, and checked by their text."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaprec.errors import UserError
from parallel.check import check
from parallel.kinds import KINDS, gpipe, interleaved, one_f_one_b, schedule, zb_v
from parallel.schedule import (
    INPUT_GRADIENTS,
    NO_MICROBATCH,
    WEIGHT_GRADIENTS,
    Channel,
    Instruction,
    Message,
    Op,
    Schedule,
    complete,
    forward_only,
)
from parallel.simulate import Mark, Refused, Span, bubble, idle, in_flight, peak, sends_under_way, simulate
from parallel.textbook import TEXTBOOK, Sizes

KIND = st.sampled_from(sorted(KINDS))
RANKS = st.integers(1, 8)
MICROBATCHES = st.integers(1, 12)
COSTS = st.integers(1, 9)
UNHURRIED = settings(deadline=None, max_examples=50)
CHUNKS = {"interleaved": (1, 2, 3), "zb-v": (2,)}
EVERY = [(k, p, m, v) for k in KINDS for p in (1, 2, 3, 4, 8) for v in CHUNKS.get(k, (1,)) for m in range(1, 13)]


def program(text: str) -> tuple[Instruction, ...]:
    return tuple(map(Instruction.parse, text.split()))


def placed(rank_of_stage: Sequence[int], *programs: str) -> Schedule:
    return Schedule(tuple(map(program, programs)), tuple(rank_of_stage))


@given(st.sampled_from(Op), st.integers(0, 99), st.integers(0, 999))
def test_an_instruction_is_read_back_from_its_text(op: Op, stage: int, microbatch: int) -> None:
    i = Instruction(op, stage, NO_MICROBATCH if op is Op.REDUCE else microbatch)
    assert Instruction.parse(str(i)) == i


@pytest.mark.parametrize("text", ["", "F", "F0", "R0.1", "F0.", "F-1.0", "F01.2", "X0.1", "F0.1 ", "sB0.1", "f0.1"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no instruction"):
        Instruction.parse(text)


def test_1f1b_in_full() -> None:
    assert str(one_f_one_b(2, 3)).splitlines() == [
        "F0.0 sA0.0 F0.1 sA0.1 rG0.0 B0.0 F0.2 sA0.2 rG0.1 B0.1 rG0.2 B0.2 R0",
        "rA1.0 F1.0 B1.0 sG1.0 rA1.1 F1.1 B1.1 sG1.1 rA1.2 F1.2 B1.2 sG1.2 R1",
    ]


def test_gpipe_in_full() -> None:
    assert str(gpipe(2, 2)).splitlines() == [
        "F0.0 sA0.0 F0.1 sA0.1 rG0.0 B0.0 rG0.1 B0.1 R0",
        "rA1.0 F1.0 rA1.1 F1.1 B1.0 sG1.0 B1.1 sG1.1 R1",
    ]


def test_the_others_in_full() -> None:
    computations = {Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}

    def lines(kind: str, microbatches: int) -> list[str]:
        return [" ".join(str(i) for i in p if i.op in computations) for p in schedule(kind, 2, microbatches).programs]

    assert lines("interleaved", 2) == [
        "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
    ]
    assert lines("zb-h1", 3) == [
        "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2",
    ]
    assert lines("zb-h2", 3) == [
        "F0.0 F0.1 F0.2 I0.0 W0.0 I0.1 W0.1 I0.2 W0.2",
        "F1.0 I1.0 F1.1 I1.1 F1.2 I1.2 W1.0 W1.1 W1.2",
    ]
    assert lines("zb-v", 2) == [
        "F0.0 F0.1 F3.0 I3.0 F3.1 I3.1 I0.0 W3.0 I0.1 W3.1 W0.0 W0.1",
        "F1.0 F2.0 F1.1 F2.1 I2.0 I1.0 I2.1 I1.1 W2.0 W1.0 W2.1 W1.1",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_does_everything_once_and_cannot_hang(kind: str) -> None:
    for _, p, m, v in (case for case in EVERY if case[0] == kind):
        s = schedule(kind, p, m, v)
        check(s)
        check(forward_only(s))
        assert s.microbatches == m
        for program in s.programs:
            own = {i.stage for i in program}
            assert len(own) == v
            for ops in ({Op.FORWARD}, INPUT_GRADIENTS, WEIGHT_GRADIENTS, {Op.REDUCE}):
                done = [(i.stage, i.microbatch) for i in program if i.op in ops]
                numbers = [NO_MICROBATCH] if Op.REDUCE in ops else range(m)
                assert sorted(done) == [(stage, n) for stage in sorted(own) for n in numbers]


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_keep_their_order_so_that_gradients_sum_in_the_same_order_in_every_schedule(kind: str) -> None:
    for _, p, m, v in (case for case in EVERY if case[0] == kind):
        for program in schedule(kind, p, m, v).programs:
            for stage in {i.stage for i in program}:
                for ops in ({Op.FORWARD}, INPUT_GRADIENTS, WEIGHT_GRADIENTS):
                    order = [i.microbatch for i in program if i.op in ops and i.stage == stage]
                    assert order == sorted(order)


@UNHURRIED
@given(st.sampled_from(["gpipe", "1f1b"]), RANKS, MICROBATCHES, COSTS, COSTS)
def test_the_bubble_is_that_of_the_formula(kind: str, p: int, m: int, forward: int, backward: int) -> None:
    cost = {Op.FORWARD: forward, Op.BACKWARD: backward}
    spans = simulate(schedule(kind, p, m), lambda i: cost.get(i.op, 0))
    assert bubble(spans) == pytest.approx((p - 1) / m, abs=1e-12)
    assert idle(spans) == pytest.approx([(p - 1) / (m + p - 1)] * p, abs=1e-12)


@UNHURRIED
@given(RANKS, MICROBATCHES, st.integers(1, 3), COSTS, COSTS)
def test_interleaving_divides_the_bubble_by_the_chunks_even_if_the_ranks_do_not_divide_the_micro_batches(
    p: int, m: int, v: int, forward: int, backward: int
) -> None:
    m = m + p - 1
    cost = {Op.FORWARD: forward, Op.BACKWARD: backward}
    spans = simulate(interleaved(p, m, v), lambda i: cost.get(i.op, 0))
    assert bubble(spans) == pytest.approx((p - 1) / (v * m), abs=1e-12)


def worked(spans: Sequence[Span]) -> float:
    """The time from the first computation to the last of any rank."""
    return max(s.end for s in spans) - min(s.start for s in spans)


@UNHURRIED
@given(RANKS, st.integers(0, 20))
def test_zb_h1_has_a_third_of_the_bubble_of_1f1b(p: int, more: int) -> None:
    m = p + more
    spans = simulate(schedule("zb-h1", p, m))
    assert bubble(spans) == pytest.approx((p - 1) / m / 3, abs=1e-12)
    assert worked(spans) == 3 * m + p - 1


@UNHURRIED
@given(RANKS, st.integers(0, 20))
def test_in_zb_h2_and_zb_v_no_rank_waits_between_its_first_and_its_last_instruction(p: int, more: int) -> None:
    m = 2 * p - 1 + more
    for kind, stages_a_rank in (("zb-h2", 1), ("zb-v", 2)):
        spans = simulate(schedule(kind, p, m))
        assert bubble(spans) == 0
        assert worked(spans) == 3 * stages_a_rank * m + p - 1  # until the first forward has come to the last rank


@UNHURRIED
@given(RANKS, MICROBATCHES)
def test_no_schedule_holds_more_activations_than_its_formula_says(p: int, m: int) -> None:
    assert in_flight(one_f_one_b(p, m)) == [min(m, p - i) for i in range(p)]
    assert in_flight(gpipe(p, m)) == [m] * p
    assert in_flight(schedule("zb-h1", p, m)) == [min(m, p)] * p
    assert in_flight(schedule("zb-h2", p, m)) == [min(m, 2 * p - 1)] * p
    assert in_flight(zb_v(p, m)) == [2 * min(m, p)] * p  # of stages half as large
    for v in (2, 3):
        group = p if m % p == 0 else -(-m // max(1, m // p))
        assert max(in_flight(interleaved(p, m, v))) == min(m * v, 2 * (p - 1) + (v - 1) * group + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_ordered_channels_with_few_sends_under_way_cost_no_time(kind: str) -> None:
    for _, p, m, v in (case for case in EVERY if case[0] == kind):
        s = schedule(kind, p, m, v)
        channel = lambda message, s=s: Channel.of(message, s.rank_of_stage)  # noqa: E731
        ordered = simulate(s, communicator=channel, sends=sends_under_way(s))
        assert worked(ordered) == worked(simulate(s)), (kind, p, m, v)


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
    assert [problem.split(" is no ")[0] for problem in refusal.value.problems] == ["line 1: 'X'", "line 3: 'B2'"]
    with pytest.raises(UserError, match="no line has an instruction of stage 1"):
        Schedule.parse("F0.0 B0.0\nF2.0 B2.0")


def test_a_message_arrives_after_its_time_on_the_way_and_its_sender_goes_on() -> None:
    spans = simulate(one_f_one_b(2, 1), lambda i: {Op.FORWARD: 1, Op.BACKWARD: 2, Op.SEND_ACTIVATION: 5}.get(i.op, 0))
    assert [(str(s.instruction), s.start, s.end) for s in sorted(spans, key=lambda s: s.end)[:4]] == [
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
    s = complete([program("F0.0 F3.0 B3.0 B0.0"), program("F1.0 F2.0 B2.0 B1.0")], rank_of_stage=(0, 1, 1, 0))
    check(s)
    assert str(s).splitlines() == [
        "F0.0 sA0.0 rA3.0 F3.0 B3.0 sG3.0 R3 rG0.0 B0.0 R0",
        "rA1.0 F1.0 F2.0 sA2.0 rG2.0 B2.0 R2 B1.0 sG1.0 R1",
    ]


FAULTS = {
    "a backward before its forward": ("rA1.0 B1.0 F1.0 sG1.0 R1", "B1.0 stands before F1.0"),
    "a forward before its activation": ("F1.0 rA1.0 B1.0 sG1.0 R1", "F1.0 stands before rA1.0"),
    "a forward missing": ("rA1.0 sG1.0 R1", "F1.0 is missing"),
    "a forward twice": ("rA1.0 F1.0 F1.0 B1.0 sG1.0 R1", "F1.0 stands here for the second time"),
    "a backward missing": ("rA1.0 F1.0 sG1.0 R1", "B1.0 is missing"),
    "a backward twice": ("rA1.0 F1.0 B1.0 B1.0 sG1.0 R1", "B1.0 stands here for the second time"),
    "a send missing": ("rA1.0 F1.0 B1.0 R1", "sG1.0 is missing"),
    "a receive missing": ("F1.0 B1.0 sG1.0 R1", "rA1.0 is missing"),
    "a send to nobody": ("rA1.0 F1.0 sA1.0 B1.0 sG1.0 R1", "sA1.0 has no purpose here"),
    "a stage on two ranks": ("F0.0 rA1.0 F1.0 B1.0 sG1.0 R1", "F0.0 is for stage 0, which lives on rank 0"),
    "a stage that is not there": ("rA1.0 F1.0 B1.0 sG1.0 R1 F2.0", "F2.0 is for a stage that does not exist"),
    "half a backward": ("rA1.0 F1.0 I1.0 sG1.0 R1", "W1.0 is missing"),
    "the later half first": ("rA1.0 F1.0 W1.0 I1.0 sG1.0 R1", "W1.0 stands before I1.0"),
    "a backward and its halves": ("rA1.0 F1.0 I1.0 sG1.0 W1.0 B1.0 R1", "B1.0 has no purpose here"),
    "a gradient sent before it is made": ("rA1.0 F1.0 sG1.0 I1.0 W1.0 R1", "sG1.0 stands before I1.0"),
    "REDUCE before the weights' gradient": ("rA1.0 F1.0 I1.0 sG1.0 R1 W1.0", "R1 stands before W1.0"),
    "REDUCE missing": ("rA1.0 F1.0 B1.0 sG1.0", "R1 is missing"),
    "REDUCE early": ("rA1.0 F1.0 R1 B1.0 sG1.0", "R1 stands before B1.0"),
}


@pytest.mark.parametrize(("second_rank", "says"), FAULTS.values(), ids=FAULTS.keys())
def test_a_faulty_schedule_is_refused_with_a_picture(second_rank: str, says: str) -> None:
    with pytest.raises(UserError) as refusal:
        check(placed((0, 1), "F0.0 sA0.0 rG0.0 B0.0 R0", second_rank))
    *problems, picture = refusal.value.problems
    assert f"rank 1: {says}" in problems
    assert f"<-- {problems[0].removeprefix('rank 1: ')}" in picture.splitlines()[1]
    assert picture.startswith("rank 0:")


def test_a_refused_schedule_tells_what_would_run_and_where_each_rank_goes_wrong() -> None:
    with pytest.raises(Refused) as refusal:
        check(placed((0, 1), "F0.0 sA0.0 rG0.0 B0.0 R0", "rA1.0 B1.0 F1.0 sG1.0 R1"))
    assert refusal.value.marks == {1: Mark(1, "B1.0 stands before F1.0")}
    assert {str(span.instruction) for span in refusal.value.spans} == {"F0.0", "sA0.0", "rA1.0"}


@UNHURRIED
@given(
    st.sampled_from(["zb-h1", "zb-h2", "zb-v"]),
    st.integers(1, 4),
    MICROBATCHES,
    st.lists(st.tuples(COSTS, COSTS, COSTS), min_size=8, max_size=8),
)
def test_a_schedule_planned_by_cost_keeps_all_laws(
    kind: str, p: int, m: int, costs: list[tuple[int, int, int]]
) -> None:
    def cost(i: Instruction) -> float:
        forward, of_input, of_weight = costs[i.stage]
        return {Op.FORWARD: forward, Op.BACKWARD_INPUT: of_input, Op.BACKWARD_WEIGHT: of_weight}.get(i.op, 0)

    planned = schedule(kind, p, m, cost=cost)
    check(planned)
    check(forward_only(planned))
    assert worked(simulate(planned, cost)) <= worked(simulate(schedule(kind, p, m), cost))
    assert max(in_flight(planned)) <= {"zb-h1": p, "zb-h2": 2 * p - 1, "zb-v": 2 * p}[kind]


@pytest.mark.parametrize("costs", [(3, 5, 2), (2, 3, 2), (1, 2, 1)])
def test_zero_bubble_schedules_beat_1f1b_at_real_costs_too(costs: tuple[int, int, int]) -> None:
    """Of a layer whose attention is long, as models/costs.py counts it: F = w + a, I = w + 2 a, W = w."""
    forward, of_input, of_weight = costs
    times = {Op.FORWARD: forward, Op.BACKWARD: of_input + of_weight}
    times |= {Op.BACKWARD_INPUT: of_input, Op.BACKWARD_WEIGHT: of_weight}

    def seconds(kind: str) -> float:
        cost = lambda i: times.get(i.op, 0)  # noqa: E731
        spans = simulate(schedule(kind, 4, 12, cost=cost), cost)
        return worked(spans) / (2 if kind == "zb-v" else 1)  # its stages are half as large

    assert seconds("zb-v") <= seconds("zb-h2") <= seconds("zb-h1") < seconds("1f1b")


def test_planning_by_cost_fills_the_time_in_which_equal_stages_would_not_wait() -> None:
    """The last stage, on rank 0, has a head and takes half as long again."""

    def cost(i: Instruction) -> float:
        return 0 if Message.of(i) or i.op is Op.REDUCE else 3 if i.stage == 3 else 2

    plain, planned = (simulate(s, cost) for s in (schedule("zb-v", 2, 8), schedule("zb-v", 2, 8, cost=cost)))
    assert worked(planned) < worked(plain)


def test_memory_grows_and_shrinks_as_instructions_say() -> None:
    sizes = {Op.FORWARD: 10, Op.BACKWARD: -10, Op.BACKWARD_INPUT: -6, Op.BACKWARD_WEIGHT: -4}
    assert peak(gpipe(2, 3), lambda i: sizes.get(i.op, 0)) == [30, 30]
    halves = Schedule.parse("F0.0 I0.0 F0.1 I0.1 F0.2 I0.2 W0.0 W0.1 W0.2")
    assert peak(halves, lambda i: sizes.get(i.op, 0)) == [18]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("costs", [(1, 1, 1), (4, 4, 4), (3, 5, 2)])
def test_the_textbook_is_right_about_equal_stages(kind: str, costs: tuple[int, int, int]) -> None:
    if kind.startswith("zb") and len(set(costs)) > 1:
        pytest.skip("of zero-bubble schedules it speaks for F = I = W only")
    forward, of_input, of_weight = costs
    times = {Op.FORWARD: forward, Op.BACKWARD: of_input + of_weight}
    times |= {Op.BACKWARD_INPUT: of_input, Op.BACKWARD_WEIGHT: of_weight}
    for p, m in ((1, 4), (2, 6), (4, 8), (4, 16), (8, 24)):
        s = schedule(kind, p, m, cost=lambda i: times.get(i.op, 0))
        sizes = Sizes(p, m, len(s.rank_of_stage) // p, *costs)
        book = TEXTBOOK[kind]
        assert bubble(simulate(s, lambda i: times.get(i.op, 0))) == pytest.approx(book.bubble.value(sizes), abs=1e-12)
        assert max(in_flight(s)) / sizes.v == book.held.value(sizes)


def test_a_deadlock_is_drawn() -> None:
    first = "rG0.0 F0.0 sA0.0 B0.0 R0"
    with pytest.raises(UserError) as refusal:
        check(placed((0, 1), first, "rA1.0 F1.0 B1.0 sG1.0 R1"))
    assert refusal.value.problems == (
        "this schedule cannot finish",
        "rank 0:   [rG0.0] F0.0 sA0.0 B0.0 R0  <-- waits for sG1.0 of rank 1\n"
        "rank 1:   [rA1.0] F1.0 B1.0 sG1.0 R1  <-- waits for sA0.0 of rank 0",
    )


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


def test_what_nobody_receives_is_named() -> None:
    with pytest.raises(UserError, match=r"nobody receives sA0\.0"):
        simulate(placed((0, 1), "F0.0 sA0.0", ""))


def test_all_mistakes_of_the_user_are_told_together() -> None:
    with pytest.raises(UserError) as refusal:
        schedule("2f2b", 0, -1)
    assert refusal.value.problems == (
        "pipeline ranks must be at least 1, got 0",
        "micro-batches must be at least 1, got -1",
        "no schedule is called '2f2b': choose one of gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v",
    )


@pytest.mark.parametrize(
    ("kind", "chunks", "says"),
    [
        ("zb-v", 3, "zb-v goes down the ranks and up again, so each has 2 chunks, not 3"),
        ("1f1b", 2, "1f1b has one chunk a rank, not 2: interleaved may have any number"),
        ("interleaved", -1, "chunks must be at least 1, got -1"),
    ],
)
def test_chunks_that_a_kind_cannot_have_are_refused(kind: str, chunks: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        schedule(kind, 2, 4, chunks)


def test_a_shorter_last_group_would_hang_and_so_groups_are_made_alike() -> None:
    """What interleaving does where the ranks divide the micro-batches, carried on to 8 micro-batches on 6 ranks."""
    groups = [(0, range(6)), (1, range(6)), (0, range(6, 8)), (1, range(6, 8))]
    visits = [(chunk, m) for chunk, group in groups for m in group]
    orders = []
    for rank in range(6):
        forwards = [Instruction(Op.FORWARD, 6 * chunk + rank, m) for chunk, m in visits]
        backwards = [Instruction(Op.BACKWARD, 6 * (1 - chunk) + rank, m) for chunk, m in visits]
        warmup = 2 * (5 - rank) + 6
        steady = [i for pair in zip(forwards[warmup:], backwards, strict=False) for i in pair]
        orders.append([*forwards[:warmup], *steady, *backwards[max(0, 16 - warmup) :]])
    with pytest.raises(UserError, match="cannot finish"):
        check(complete(orders, [stage % 6 for stage in range(12)]))
    check(interleaved(6, 8, 2))
