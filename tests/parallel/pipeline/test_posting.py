"""Receives posted ahead of their use: no schedule deadlocks, even if each blocks its rank from
there on."""

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from parallel.pipeline import posting
from parallel.pipeline.executor import Executor, StageHooks
from parallel.pipeline.instructions import RECEIVES, SENDS, Channel, Instruction, Message, Op
from parallel.pipeline.kinds import KINDS, schedule
from parallel.pipeline.posting import moved, posts
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.simulation import RefusedSchedule, sends_under_way, simulate

SIZES = [(2, 4), (4, 8), (3, 7)]


def made(kind: str, ranks: int, microbatches: int) -> Schedule:
    count = microbatches + -microbatches % ranks if kind == "interleaved" else microbatches
    return schedule(kind, ranks, count)


def runs(one: Schedule) -> None:
    simulate(
        one, communicator=lambda m: Channel.of(m, one.rank_of_stage), sends=sends_under_way(one)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_a_schedule_whose_receives_block_from_where_they_are_posted_runs_to_its_end(
    kind: str, ranks: int, microbatches: int
) -> None:
    one = made(kind, ranks, microbatches)
    runs(moved(one))
    for program, after, places in zip(one.programs, moved(one).programs, posts(one), strict=True):
        assert sorted(map(str, program)) == sorted(map(str, after))
        assert [i for i in program if i not in places] == [i for i in after if i not in places]
        assert [i for i in program if i in places] == [i for i in after if i in places], (
            "receives keep their order"
        )
        assert places.keys() == {i for i in program if i.op in RECEIVES}
        assert all(places[i] <= program.index(i) for i in places)


class Waits(NamedTuple):
    """Of the receives of a schedule by its simulated times.

    beside: computing time beside which a posted receive waits for its message, of all of it.
    most: the longest of these waits, in computations.
    travelling: receives whose message travels beside a computation.
    """

    beside: float
    most: int
    travelling: set[tuple[int, Instruction]]


def waits_of(one: Schedule, places: list[dict[Instruction, int]]) -> Waits:
    spans = {(span.rank, span.instruction): span for span in simulate(one)}
    sent = {Message.of(i): span.start for (_, i), span in spans.items() if i.op in SENDS}
    computing = sum(span.end - span.start for (_, i), span in spans.items() if not Message.of(i))
    waiting = 0.0
    most = 0
    travelling = set[tuple[int, Instruction]]()
    for rank, program in enumerate(one.programs):
        for receive, at in places[rank].items():
            between = program[at : program.index(receive)]
            beside = [spans[rank, i] for i in between if Message.of(i) is None]
            due = sent[Message.of(receive)]
            waited = [min(span.end, due) - span.start for span in beside if span.start < due]
            waiting += sum(waited)
            most = max(most, len(waited))
            if any(span.end > due for span in beside):
                travelling.add((rank, receive))
    return Waits(waiting / computing, most, travelling)


def as_early_as_is_safe(one: Schedule) -> list[dict[Instruction, int]]:
    """The places of receives that are posted wherever a host that blocks does no harm."""
    order = posting._global_order(one)
    sends = {Message.of(i): position for (_, i), position in order.items() if i.op in SENDS}
    places = []
    for rank, program in enumerate(one.programs):
        orders = [order[rank, i] for i in program]
        places.append(posting._safe_posts(program, orders, sends))
    return places


# the part of computing time beside which a receive may wait; posted as early as is safe, receives
# wait beside 20 to 85 %
MOST_BESIDE = {
    "gpipe": 0,
    "1f1b": 0,
    "interleaved": 0.02,
    "zb-h1": 0,
    "zb-h2": 0,
    "zb-v": 0.02,
    "dualpipe-v": 0.06,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 16), (8, 32)])
def test_a_receive_waits_beside_few_computations_and_no_message_travels_later(
    kind: str, ranks: int, microbatches: int
) -> None:
    one = made(kind, ranks, microbatches)
    early = waits_of(one, as_early_as_is_safe(one))
    now = waits_of(one, posts(one))
    assert now.beside <= MOST_BESIDE[kind]
    assert now.most <= 1, "a message is due within the computation beside which a receive waits"
    assert now.travelling == early.travelling
    assert early.beside > 0.15


def test_one_receive_at_most_is_outstanding() -> None:
    for kind in KINDS:
        one = made(kind, 4, 8)
        for program, places in zip(one.programs, posts(one), strict=True):
            uses = {program.index(receive): place for receive, place in places.items()}
            in_order = sorted(uses)
            for before, after in pairwise(in_order):
                assert uses[after] > before, kind


def test_a_receive_that_is_posted_before_what_its_message_needs_is_found() -> None:
    one = made("1f1b", 2, 4)
    text = Instruction.parse("rG0.0")
    # before the activation that the gradient needs
    first = tuple(sorted(one.programs[0], key=lambda i: i != text))
    with pytest.raises(RefusedSchedule):
        runs(Schedule((first, *one.programs[1:]), one.rank_of_stage))


class Link:
    """The links of one rank, which note what is asked of them, and carry zeros."""

    def __init__(self, axis: Axis, stages: int, posts_early: bool) -> None:
        self.axis = axis
        self.stages = stages
        self.posts_early = posts_early
        self.asked: list[str] = []

    def post_recv(self, instruction: Instruction) -> None:
        self.asked.append(f"post {instruction}")

    def receive(self, instruction: Instruction) -> Tensor:
        self.asked.append(f"receive {instruction}")
        return torch.zeros(1)

    def send(self, instruction: Instruction, tensor: Tensor) -> None:
        pass

    def finish(self) -> None:
        pass


class Scales(StageHooks):
    """Each stage multiplies what it receives, or one."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.weight = torch.ones(1, requires_grad=True)

    def forward(self, stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        self.link.asked.append("compute")
        output = self.weight * (1 if received is None else received)
        return output.sum() if stage == self.link.stages - 1 else output

    def reduce(self, stage: int) -> None:
        pass


def asked_of_links(one: Schedule, rank: int, posts_early: bool) -> list[str]:
    """What a rank asks of its links, in order, with its forward passes."""
    link: Any = Link(Axis("pp", rank, len(one.programs)), len(one.rank_of_stage), posts_early)
    program = one.programs[rank]
    Executor(program, link, Scales(link), posts=posts(one)[rank]).run()
    return link.asked


@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
def test_each_receive_is_posted_once_and_the_first_at_once(kind: str) -> None:
    one = made(kind, 3, 4)
    for rank, program in enumerate(one.programs):
        receives = [str(i) for i in program if i.op in RECEIVES]
        asked = asked_of_links(one, rank, posts_early=True)
        assert asked[0] == f"post {receives[0]}"
        assert [text for text in asked if text.startswith("post")] == [
            f"post {text}" for text in receives
        ]


def test_receives_that_may_block_are_posted_where_the_schedule_says() -> None:
    one = made("1f1b", 2, 4)
    for rank, (program, places) in enumerate(zip(one.programs, posts(one), strict=True)):
        asked = asked_of_links(one, rank, posts_early=False)
        for receive, place in places.items():
            computed = asked[: asked.index(f"post {receive}")].count("compute")
            assert computed == sum(i.op is Op.FORWARD for i in program[:place])
