"""The laws of each kind of schedule: complete, finishing, as fast and as lean as the formulas
say."""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from megaprec.errors import Problem, UserError
from parallel.pipeline.builders import dualpipe_v, gpipe, interleaved, one_f_one_b, zb_v
from parallel.pipeline.formulas import FormulaSizes
from parallel.pipeline.instructions import (
    INPUT_GRADIENTS,
    NO_MICROBATCH,
    WEIGHT_GRADIENTS,
    Channel,
    Instruction,
    Message,
    Op,
)
from parallel.pipeline.kinds import KINDS, equal, schedule, schedule_problems
from parallel.pipeline.schedules import Schedule, complete, forward_only
from parallel.pipeline.simulation import Span, bubble, idle, in_flight, sends_under_way, simulate
from parallel.pipeline.verify import check
from tests.parallel.pipeline.test_schedule import COSTS, EVERY, MICROBATCHES, RANKS, UNHURRIED
from tests.refusals import sentence, shows


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
        return [
            " ".join(str(i) for i in p if i.op in computations)
            for p in schedule(kind, 2, microbatches).programs
        ]

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
    assert lines("dualpipe-v", 4) == [
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 F0.3 B3.1 F3.2 B0.0 B3.2 F3.3 B0.1 B3.3 I0.2 W0.2 I0.3 W0.3",
        "F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 F2.2 B1.0 F1.3 B2.1 F2.3 B1.1 B2.2 B1.2 I2.3 I1.3 W2.3 W1.3",
    ]


def computations_of_torch(rank: int, ranks: int, microbatches: int) -> list[str]:
    """The computations of torch's DualPipeV on a rank; of two that it overlaps the forward comes
    first."""
    theirs = ScheduleDualPipeV.__new__(ScheduleDualPipeV)  # without stages and processes
    theirs.pp_group_size = ranks
    theirs._n_microbatches = microbatches
    actions: list[str] = []
    for action in theirs._calculate_single_rank_operations(rank):
        if action is not None:
            actions += map(str, action.sub_actions or [action])
    return actions


def as_torch_writes(instructions: Iterable[Instruction]) -> list[str]:
    """The computations among instructions, such as "3F0": the stage, what is computed of it, and
    the micro-batch."""
    names = {Op.FORWARD: "F", Op.BACKWARD: "B", Op.BACKWARD_INPUT: "I", Op.BACKWARD_WEIGHT: "W"}
    written: list[str] = []
    for instruction in instructions:
        if instruction.op in names:
            name = names[instruction.op]
            written.append(f"{instruction.stage}{name}{instruction.microbatch}")
    return written


@UNHURRIED
@given(st.integers(2, 8), st.integers(0, 12))
def test_dualpipe_v_is_that_of_torch(p: int, more: int) -> None:
    """torch refuses fewer micro-batches than stages."""
    m = 2 * p + more
    for rank, program in enumerate(dualpipe_v(p, m).programs):
        assert as_torch_writes(program) == computations_of_torch(rank, p, m)


@pytest.mark.cases(2, sample=1)
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
def test_micro_batches_keep_their_order_so_that_gradients_sum_in_the_same_order_in_every_schedule(
    kind: str,
) -> None:
    for _, p, m, v in (case for case in EVERY if case[0] == kind):
        for program in schedule(kind, p, m, v).programs:
            for stage in {i.stage for i in program}:
                for ops in ({Op.FORWARD}, INPUT_GRADIENTS, WEIGHT_GRADIENTS):
                    order = [i.microbatch for i in program if i.op in ops and i.stage == stage]
                    assert order == sorted(order)


@UNHURRIED
@given(st.sampled_from(["gpipe", "1f1b"]), RANKS, MICROBATCHES, COSTS, COSTS)
def test_the_bubble_is_that_of_the_formula(
    kind: str, p: int, m: int, forward: int, backward: int
) -> None:
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
def test_in_zb_h2_and_zb_v_no_rank_waits_between_its_first_and_its_last_instruction(
    p: int, more: int
) -> None:
    m = 2 * p - 1 + more
    for kind, stages_a_rank in (("zb-h2", 1), ("zb-v", 2)):
        spans = simulate(schedule(kind, p, m))
        assert bubble(spans) == 0
        # until the first forward has come to the last rank
        assert worked(spans) == 3 * stages_a_rank * m + p - 1


@UNHURRIED
@given(RANKS, st.integers(0, 20))
def test_dualpipe_v_has_half_of_the_bubble_of_zb_h1_and_ends_with_zb_v(p: int, more: int) -> None:
    m = 2 * p + more
    spans = simulate(schedule("dualpipe-v", p, m))
    assert bubble(spans) == pytest.approx((p - 1) / m / 6, abs=1e-12)
    assert worked(spans) == worked(simulate(schedule("zb-v", p, m)))


@pytest.mark.slow
@UNHURRIED
@given(RANKS, MICROBATCHES)
def test_no_schedule_holds_more_activations_than_its_formula_says(p: int, m: int) -> None:
    assert in_flight(one_f_one_b(p, m)) == [min(m, p - i) for i in range(p)]
    assert in_flight(gpipe(p, m)) == [m] * p
    assert in_flight(schedule("zb-h1", p, m)) == [min(m, p)] * p
    assert in_flight(schedule("zb-h2", p, m)) == [min(m, 2 * p - 1)] * p
    assert in_flight(zb_v(p, m)) == [2 * min(m, p)] * p  # of stages half as large
    assert max(in_flight(dualpipe_v(p, m))) == min(2 * m, 2 * p + 1)
    for v in (2, 3):
        group = p if m % p == 0 else -(-m // max(1, m // p))
        assert max(in_flight(interleaved(p, m, v))) == min(m * v, 2 * (p - 1) + (v - 1) * group + 1)


@pytest.mark.cases(5, sample=1)
@pytest.mark.parametrize("kind", KINDS)
def test_ordered_channels_with_few_sends_under_way_cost_no_time(kind: str) -> None:
    for _, p, m, v in (case for case in EVERY if case[0] == kind):
        s = schedule(kind, p, m, v)
        channel = lambda message, s=s: Channel.of(message, s.rank_of_stage)  # noqa: E731
        ordered = simulate(s, communicator=channel, sends=sends_under_way(s))
        assert worked(ordered) == worked(simulate(s)), (kind, p, m, v)


@UNHURRIED
@given(
    st.sampled_from([kind for kind in KINDS if KINDS[kind].splits_backward]),
    st.integers(1, 4),
    MICROBATCHES,
    st.lists(st.tuples(COSTS, COSTS, COSTS), min_size=8, max_size=8),
)
def test_a_schedule_planned_by_cost_keeps_all_laws(
    kind: str, p: int, m: int, costs: list[tuple[int, int, int]]
) -> None:
    def cost(i: Instruction) -> float:
        forward, of_input, of_weight = costs[i.stage]
        return {
            Op.FORWARD: forward,
            Op.BACKWARD: of_input + of_weight,
            Op.BACKWARD_INPUT: of_input,
            Op.BACKWARD_WEIGHT: of_weight,
        }.get(i.op, 0)

    planned = schedule(kind, p, m, cost=cost)
    check(planned)
    check(forward_only(planned))
    assert worked(simulate(planned, cost)) <= worked(simulate(schedule(kind, p, m), cost))
    most = {"zb-h1": p, "zb-h2": 2 * p - 1, "zb-v": 2 * p, "dualpipe-v": 2 * p + 1}
    assert max(in_flight(planned)) <= most[kind]


@pytest.mark.parametrize(
    ("kind", "p", "m", "costs"),
    [
        # placed as if all costs were equal, each of these ends a little earlier
        ("zb-h1", 4, 8, [(5, 2, 3), (1, 1, 3), (4, 5, 1), (3, 4, 3)]),
        ("zb-h2", 4, 4, [(1, 4, 1), (1, 4, 5), (5, 3, 4), (4, 5, 2)]),
        # placed by their costs
        ("zb-h1", 3, 6, [(1, 3, 5), (4, 4, 3), (4, 3, 5)]),
        ("zb-h2", 4, 8, [(5, 2, 3), (1, 1, 3), (4, 5, 1), (3, 4, 3)]),
    ],
)
def test_weight_gradients_are_placed_so_that_the_step_ends_earlier(
    kind: str, p: int, m: int, costs: list[tuple[int, int, int]]
) -> None:
    def cost(i: Instruction) -> float:
        forward, of_input, of_weight = costs[i.stage]
        times = {Op.FORWARD: forward, Op.BACKWARD: of_input + of_weight}
        times |= {Op.BACKWARD_INPUT: of_input, Op.BACKWARD_WEIGHT: of_weight}
        return times.get(i.op, 0)

    def end(of: Schedule) -> float:
        return max(span.end for span in simulate(of, cost))

    build = KINDS[kind].build
    ends = [end(build(p, m, 1, placed_by)) for placed_by in (cost, equal)]
    assert ends[0] != ends[1]
    assert end(schedule(kind, p, m, cost=cost)) == min(ends)


@pytest.mark.parametrize("costs", [(3, 5, 2), (2, 3, 2), (1, 2, 1)])
def test_zero_bubble_schedules_beat_1f1b_at_real_costs_too(costs: tuple[int, int, int]) -> None:
    """Of a layer whose attention is long, as models/estimate/flops.py counts it: F = w + a, I = w +
    2 a, W = w."""
    forward, of_input, of_weight = costs
    times = {Op.FORWARD: forward, Op.BACKWARD: of_input + of_weight}
    times |= {Op.BACKWARD_INPUT: of_input, Op.BACKWARD_WEIGHT: of_weight}

    def seconds(kind: str) -> float:
        cost = lambda i: times.get(i.op, 0)  # noqa: E731
        spans = simulate(schedule(kind, 4, 12, cost=cost), cost)
        return worked(spans) / KINDS[kind].chunks  # of two stages a rank each is half as large

    assert seconds("zb-v") <= seconds("zb-h2") <= seconds("zb-h1") < seconds("1f1b")
    assert seconds("zb-v") < seconds("dualpipe-v") < seconds("zb-h1")


def test_planning_by_cost_fills_the_time_in_which_equal_stages_would_not_wait() -> None:
    """The last stage, on rank 0, has a head and takes half as long again."""

    def cost(i: Instruction) -> float:
        if Message.of(i) or i.op is Op.REDUCE:
            return 0
        if i.stage == 3:
            return 3
        return 2

    plain, planned = (
        simulate(s, cost) for s in (schedule("zb-v", 2, 8), schedule("zb-v", 2, 8, cost=cost))
    )
    assert worked(planned) < worked(plain)


# of zero-bubble schedules the textbook speaks for F = I = W only
COSTS = [
    (1, 1, 1),
    (4, 4, 4),
    (3, 5, 2),
]


@pytest.mark.parametrize(
    ("kind", "costs"),
    [(k, c) for k in KINDS for c in COSTS if not KINDS[k].splits_backward or len(set(c)) == 1],
)
def test_the_textbook_is_right_about_equal_stages(kind: str, costs: tuple[int, int, int]) -> None:
    forward, of_input, of_weight = costs
    times = {Op.FORWARD: forward, Op.BACKWARD: of_input + of_weight}
    times |= {Op.BACKWARD_INPUT: of_input, Op.BACKWARD_WEIGHT: of_weight}
    for p, m in ((1, 4), (2, 6), (4, 8), (4, 16), (8, 24)):
        s = schedule(kind, p, m, cost=lambda i: times.get(i.op, 0))
        sizes = FormulaSizes(p, m, len(s.rank_of_stage) // p, *costs)
        book = KINDS[kind]
        assert bubble(simulate(s, lambda i: times.get(i.op, 0))) == pytest.approx(
            book.bubble.value(sizes), abs=1e-12
        )
        assert max(in_flight(s)) / sizes.v == book.held.value(sizes)


def test_all_mistakes_of_the_user_are_told_together() -> None:
    with pytest.raises(UserError) as refusal:
        schedule("2f2b", 0, -1)
    assert refusal.value.problems == (
        Problem.of("pipeline.count_below_one", name="pipeline ranks", count=0),
        Problem.of("pipeline.count_below_one", name="micro-batches", count=-1),
        Problem.of(
            "pipeline.no_such_kind",
            kind="2f2b",
            kinds="gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, dualpipe-v",
        ),
    )


@pytest.mark.parametrize(
    ("kind", "chunks", "says"),
    [
        ("zb-v", 3, sentence("pipeline.other_chunks", kind="zb-v", needed=2, chunks=3)),
        ("1f1b", 2, sentence("pipeline.other_chunks", kind="1f1b", needed=1, chunks=2)),
        ("interleaved", -1, sentence("pipeline.chunks_below_one", chunks=-1)),
    ],
)
def test_chunks_that_a_kind_cannot_have_are_refused(kind: str, chunks: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        schedule(kind, 2, 4, chunks)


def test_a_shorter_last_group_would_hang_and_so_groups_are_made_alike() -> None:
    """What interleaving does where the ranks divide the micro-batches, carried on to 8
    micro-batches on 6 ranks."""
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


@pytest.mark.parametrize(("ranks", "microbatches", "group"), [(2, 4, 2), (2, 5, 3), (4, 9, 5)])
def test_ranks_warm_up_for_the_largest_group(ranks: int, microbatches: int, group: int) -> None:
    """Two forwards for each rank behind, and a group for each further chunk, as in Megatron-LM."""
    chunks = 2
    for rank, program in enumerate(interleaved(ranks, microbatches, chunks).programs):
        computed = [i.op for i in program if i.op in (Op.FORWARD, Op.BACKWARD)]
        # the last forward before the first backward is that of the steady part
        assert computed.index(Op.BACKWARD) - 1 == 2 * (ranks - 1 - rank) + (chunks - 1) * group


def test_the_largest_clusters_fit_and_a_slip_of_a_digit_is_refused_before_anything_is_built() -> (
    None
):
    assert schedule_problems("1f1b", 64, 1024) == []
    (many,) = schedule_problems("1f1b", 1, 100_000)
    assert shows(many, "pipeline.too_many_microbatches", count=100_000)
    (long,) = schedule_problems("1f1b", 640, 1024)
    assert shows(long, "pipeline.too_many_passes", passes=655_360)
    assert schedule_problems("1f1b", 1, 16_384) == []
    assert len(schedule_problems("1f1b", 1, 16_385)) == 1
    (one_more,) = schedule_problems("1f1b", 64, 1025)
    assert shows(one_more, "pipeline.too_many_passes", limit=65_536)
