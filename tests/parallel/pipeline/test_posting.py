"""Receives posted ahead of their use: no schedule deadlocks, even if each blocks its rank from
there on."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from parallel.pipeline.executor import Executor, StageHooks
from parallel.pipeline.instructions import RECEIVES, Channel, Instruction, Message, Op
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


def ahead(one: Schedule) -> float:
    """The part of the receives that is posted before at least one computation that comes before
    their use."""
    pairs = [(p, places) for p, places in zip(one.programs, posts(one), strict=True)]
    early = [
        any(Message.of(j) is None for j in p[at : p.index(i)])
        for p, places in pairs
        for i, at in places.items()
    ]
    return sum(early) / len(early)


def test_messages_travel_while_stages_compute() -> None:
    parts = {kind: ahead(made(kind, 4, 8)) for kind in KINDS}
    assert min(parts.values()) >= 0.5, parts


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
