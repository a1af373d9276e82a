"""The laws of the executor: a pipeline computes what the plain model computes, and nothing stays
behind."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from parallel.linear import InputLayout, Linear
from parallel.pipeline.executor import Executor, StageHooks
from parallel.pipeline.instructions import Instruction, Op
from parallel.pipeline.kinds import KINDS, schedule
from parallel.pipeline.p2p import CPU, P2P, Match
from parallel.pipeline.schedules import Schedule, complete, forward_only
from parallel.pipeline.simulation import sends_under_way
from parallel.pipeline.timeline import Recording
from parallel.pipeline.verify import check
from parallel.weight_grad_queue import WeightGradQueue
from tests.ranks import on_ranks, run_ranks

ROWS = 3
WIDTH = 5
DTYPE = torch.float64


class Toy(StageHooks):
    """A model of `stages` stages and its batch, the same wherever it is made."""

    def __init__(self, stages: int, microbatches: int, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        new = lambda *shape: torch.randn(*shape, dtype=DTYPE, generator=random)  # noqa: E731
        self.weights = [nn.Parameter(new(WIDTH, WIDTH)) for _ in range(stages)]
        self.batch = new(microbatches, ROWS, WIDTH)
        self.losses: list[Tensor] = []
        self.reduced: list[int] = []

    def forward(self, stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        x = self.batch[microbatch] if received is None else received
        y = torch.tanh(x @ self.weights[stage])
        if stage < len(self.weights) - 1:
            return y
        loss = y.square().sum() / len(self.batch)
        self.losses.append(loss.detach())
        return loss

    def reduce(self, stage: int) -> None:
        assert self.weights[stage].grad is not None
        self.reduced.append(stage)

    def train_plainly(self) -> "Toy":
        for microbatch in range(len(self.batch)):
            x = None
            for stage in range(len(self.weights)):
                x = self.forward(stage, microbatch, x)
            assert x is not None
            x.backward()
        return self


class Forward(StageHooks):
    """Hooks of a forward function alone."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def forward(self, stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        return self.function(stage, microbatch, received)


def open_links(
    mesh: DeviceMesh | None, rank_of_stage: Sequence[int], match: Match | None = None
) -> P2P:
    return P2P.open(Axis.of(mesh, "pp"), rank_of_stage, (ROWS, WIDTH), DTYPE, CPU, match)


def train(s: Schedule, links: P2P, seed: int = 0) -> Toy:
    toy = Toy(links.stages, s.microbatches, seed)
    Executor(s.programs[links.axis.rank], links, toy).run()
    return toy


def require_plain_gradients(toy: Toy, links: P2P, seed: int = 0) -> None:
    """Bit for bit: a pipeline adds the same gradients in the same order."""
    plain = Toy(links.stages, len(toy.batch), seed).train_plainly()
    for stage, home in enumerate(links.rank_of_stage):
        ours = toy.weights[stage].grad
        expected = plain.weights[stage].grad
        if home != links.axis.rank:
            assert ours is None
        else:
            assert ours is not None and expected is not None and torch.equal(ours, expected)
    if links.rank_of_stage[-1] == links.axis.rank:
        assert toy.losses == plain.losses
    assert not any(links.pending.values())
    assert sorted(toy.reduced) == [
        s for s, home in enumerate(links.rank_of_stage) if home == links.axis.rank
    ]


def all_schedules_are_exact(mesh: DeviceMesh, matches: Sequence[Match]) -> None:
    ranks = Axis.of(mesh, "pp").size
    for match in matches:
        for kind in KINDS:
            links = open_links(mesh, schedule(kind, ranks, 1).rank_of_stage, match)
            for microbatches in (1, 2, 5):
                s = schedule(kind, ranks, microbatches)
                enough = replace(links, sends=sends_under_way(s))
                require_plain_gradients(train(s, enough), enough)


class Asked(Toy):
    """Keeps what each backward pass was told, and when a stage was reduced."""

    def __init__(self, stages: int, microbatches: int) -> None:
        super().__init__(stages, microbatches)
        self.told: list[tuple[int, bool | str]] = []

    def expect(self, stage: int, is_last: bool) -> None:
        self.told.append((stage, is_last))

    def reduce(self, stage: int) -> None:
        self.told.append((stage, "reduce"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_whole_backward_pass_of_a_stage_is_told_that_its_gradients_will_be_final(
    kind: str,
) -> None:
    s = schedule(kind, 1, 3)
    (program,) = s.programs
    toy = Asked(len(s.rank_of_stage), 3)
    Executor(program, open_links(None, s.rank_of_stage), toy).run()
    for stage in range(len(s.rank_of_stage)):
        told = [what for of_stage, what in toy.told if of_stage == stage]
        backwards = sum(i.op is Op.BACKWARD and i.stage == stage for i in program)
        last = [i.op for i in program if i.stage == stage][-2]
        ends = [True] if last is Op.BACKWARD else [False]
        assert told == [False] * (backwards - 1) + ends[:backwards] + ["reduce"]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_pipeline_trains_the_plain_model(ranks: int) -> None:
    run_ranks(
        all_schedules_are_exact,
        {"pp": ranks},
        matches=["tag", "order"] if ranks in (2, 3) else ["tag"],
    )


@pytest.mark.parametrize("match", ["tag", "order"])
@on_ranks(pp=2, tp=2)
def test_pipelines_side_by_side_train_models_of_their_own(mesh: DeviceMesh, match: Match) -> None:
    links = open_links(mesh, (0, 1), match)
    seed = Axis.of(mesh, "tp").rank
    require_plain_gradients(train(schedule("1f1b", 2, 4), links, seed), links, seed)


def computations(text: str) -> list[Instruction]:
    return list(map(Instruction.parse, text.split()))


@pytest.mark.parametrize(
    "rank_of_stage", [(0, 1, 1, 0), (0, 1, 0, 1)], ids=["v-shaped", "interleaved"]
)
@on_ranks(pp=2)
def test_stages_may_lie_anywhere(mesh: DeviceMesh, rank_of_stage: tuple[int, ...]) -> None:
    rows: list[list[Instruction]] = [[], []]
    for op, order in ((Op.FORWARD, range(4)), (Op.BACKWARD, reversed(range(4)))):
        for stage in order:
            rows[rank_of_stage[stage]] += [
                Instruction(op, stage, microbatch) for microbatch in range(3)
            ]
    s = complete(rows, rank_of_stage)
    check(s)
    links = open_links(mesh, rank_of_stage)
    require_plain_gradients(train(s, links), links)


@on_ranks(pp=2)
def test_messages_find_their_microbatch_though_received_in_another_order(mesh: DeviceMesh) -> None:
    s = complete([computations("F0.0 F0.1 B0.0 B0.1"), computations("F1.1 F1.0 B1.1 B1.0")], (0, 1))
    links = open_links(mesh, (0, 1), "tag")
    toy = train(s, links)
    plain = Toy(2, 2).train_plainly()
    stage = links.axis.rank
    torch.testing.assert_close(
        toy.weights[stage].grad, plain.weights[stage].grad, rtol=1e-12, atol=0
    )


@on_ranks(pp=2)
def test_evaluation_needs_forwards_alone_and_may_have_another_shape(mesh: DeviceMesh) -> None:
    links = open_links(mesh, (0, 1))
    toy = Toy(2, 3)
    plain = Toy(2, 3).train_plainly()
    toy.batch = toy.batch[:, :2]
    evaluation = forward_only(schedule("1f1b", 2, 3))
    with torch.no_grad():
        Executor(evaluation.programs[links.axis.rank], replace(links, shape=(2, WIDTH)), toy).run()
    assert all(weight.grad is None for weight in toy.weights)
    if links.axis.rank == 1:
        assert len(toy.losses) == 3
        assert all(ours < whole for ours, whole in zip(toy.losses, plain.losses, strict=True))


def one_process(stages: int, microbatches: int) -> tuple[Schedule, P2P]:
    """All stages on this one rank, which needs no process group."""
    forwards = [Instruction(Op.FORWARD, s, m) for m in range(microbatches) for s in range(stages)]
    backwards = [
        Instruction(Op.BACKWARD, s, m) for m in range(microbatches) for s in reversed(range(stages))
    ]
    s = complete([forwards + backwards], [0] * stages)
    return s, open_links(None, s.rank_of_stage)


def test_one_process_may_hold_all_stages() -> None:
    s, links = one_process(stages=3, microbatches=2)
    check(s)
    require_plain_gradients(train(s, links), links)


def remember(
    forward: Callable[..., Tensor], into: list[weakref.ref[Tensor]]
) -> Callable[..., Tensor]:
    def remembering(stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        output = forward(stage, microbatch, received)
        into.extend(weakref.ref(t) for t in (received, output) if t is not None)
        return output

    return remembering


def test_nothing_of_a_step_is_left() -> None:
    s, links = one_process(stages=3, microbatches=2)
    toy = Toy(3, 2)
    seen = []
    toy.forward = remember(toy.forward, seen)
    executor = Executor(s.programs[0], links, toy)
    executor.run()
    assert len(seen) == 10
    assert not any(tensor() is not None for tensor in seen)
    with pytest.raises(AssertionError, match="left over"):
        Executor(s.programs[0][:3], links, toy).run()


def test_an_output_is_not_held_until_its_backward() -> None:
    toy = Toy(2, 1)
    outputs = []
    s, links = one_process(stages=2, microbatches=1)

    def forward(stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        # a product by a number needs no output in its backward
        output = Toy.forward(toy, stage, microbatch, received) * 2
        outputs.append(weakref.ref(output))
        if stage == 1:
            assert outputs[0]() is None
        return output

    toy.forward = forward
    Executor(s.programs[0], links, toy).run()


def test_a_failure_names_the_instruction_and_the_rank() -> None:
    s, links = one_process(stages=2, microbatches=2)

    def forward(stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        if (stage, microbatch) == (1, 1):
            raise FloatingPointError("too much")
        return Toy(2, 2).forward(stage, microbatch, received)

    with pytest.raises(RuntimeError) as failure:
        Executor(s.programs[0], links, Forward(forward)).run()
    headline, picture = str(failure.value).split("\n")
    assert headline == "F1.1 failed on pipeline rank 0: FloatingPointError: too much"
    assert picture == "rank 0:  F0.0 F1.0 F0.1 [F1.1] B1.0 B0.0 B1.1 R1 ...  <-- failed here"
    assert isinstance(failure.value.__cause__, FloatingPointError)


def fail_on_the_second_rank(mesh: DeviceMesh) -> None:
    links = open_links(mesh, (0, 1))
    toy = Toy(2, 2)
    if links.axis.rank == 1:
        toy.weights[1].data = torch.zeros(1, dtype=DTYPE)
    Executor(schedule("1f1b", 2, 2).programs[links.axis.rank], links, toy).run()


def test_a_failure_on_one_rank_of_a_pipeline_is_the_one_that_is_seen() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"F1\.0 failed on pipeline rank 1"):
        run_ranks(fail_on_the_second_rank, {"pp": 2})


def test_a_loss_that_is_no_scalar_and_a_missing_reduce_are_named() -> None:
    s, links = one_process(stages=1, microbatches=1)
    wrong = Forward(lambda *_: torch.zeros(2, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"F0\.0 failed.*must return a scalar loss, not \[2\]"):
        Executor(s.programs[0], links, wrong).run()
    with pytest.raises(RuntimeError, match=r"R0 failed.*no `reduce` was given"):
        Executor(s.programs[0], links, Forward(Toy(1, 1).forward)).run()


def test_spans_tell_when_each_instruction_ran() -> None:
    s, links = one_process(stages=2, microbatches=2)
    toy = Toy(2, 2)
    recording = Recording.start(links.axis)
    Executor(s.programs[0], links, toy, observers=[recording]).run()
    assert tuple(span.instruction for span in recording.spans) == s.programs[0]
    times = [time for span in recording.spans for time in (span.start, span.end)]
    assert times == sorted(times)


def test_whoever_asks_is_called_after_each_instruction() -> None:
    s, links = one_process(stages=2, microbatches=2)
    toy = Toy(2, 2)
    called = list[Instruction]()
    toy.after = called.append
    Executor(s.programs[0], links, toy).run()
    assert tuple(called) == s.programs[0]


def test_weight_gradients_are_made_by_their_own_instruction_and_with_the_same_bits() -> None:
    weight = nn.Parameter(
        torch.randn(4, WIDTH, dtype=DTYPE, generator=torch.Generator().manual_seed(1))
    )
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    batch = torch.randn(2, ROWS, 1, WIDTH, dtype=DTYPE, generator=torch.Generator().manual_seed(2))
    deferred = WeightGradQueue()
    seen = list[Tensor]()

    def forward(stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        x = batch[microbatch].requires_grad_()
        return Linear.apply(x, weight, None, InputLayout.OWN, Axis("tp"), deferred).square().sum()

    def run(text: str) -> list[Tensor]:
        seen.clear()
        weight.main_grad.zero_()  # type: ignore[attr-defined]
        program = Schedule.parse(text).programs[0]
        hooks = Forward(forward)
        hooks.reduce = lambda stage: None
        hooks.after = lambda i: seen.append(weight.main_grad.clone())  # type: ignore[attr-defined]
        Executor(program, open_links(None, (0,)), hooks, deferred=deferred).run()
        return list(seen)

    whole = run("F0.0 B0.0 F0.1 B0.1")
    halves = run("F0.0 I0.0 F0.1 I0.1 W0.0 W0.1")
    assert not any(grad.any() for grad in halves[:4])
    assert torch.equal(halves[4], whole[1]) and halves[4].any()
    assert torch.equal(halves[5], whole[3])


def test_a_half_that_never_comes_is_noticed() -> None:
    program = [Instruction.parse(word) for word in ["F0.0", "I0.0"]]
    toy = Toy(1, 1)
    with pytest.raises(AssertionError, match="left over"):
        Executor(program, open_links(None, (0,)), toy).run()


@on_ranks(pp=2)
def test_a_recording_has_all_ranks_on_one_clock(mesh: DeviceMesh) -> None:
    s = schedule("zb-h1", 2, 3)
    links = open_links(mesh, s.rank_of_stage)
    arrived = perf_counter()
    toy = Toy(2, 3)
    recording = Recording.start(links.axis)
    Executor(s.programs[links.axis.rank], links, toy, observers=[recording]).run()
    spans = recording.gather(s, CPU)
    assert [(span.rank, span.instruction) for span in spans] == [
        (r, i) for r in (0, 1) for i in s.programs[r]
    ]
    began = links.axis.gather(torch.tensor([[arrived, recording.zero]], dtype=torch.float64))
    zeros = began[:, 1].tolist()  # by this machine's clock, which the processes share
    assert min(zeros) >= began[:, 0].max(), "no rank's time begins before all ranks are there"
    when = {
        span.instruction: (span.start + zeros[span.rank], span.end + zeros[span.rank])
        for span in spans
    }
    for microbatch in range(3):
        sent, received = (
            Instruction(op, n, microbatch)
            for n, op in enumerate((Op.SEND_ACTIVATION, Op.RECV_ACTIVATION))
        )
        assert zeros[0] <= when[sent][0] < when[received][1]


@on_ranks(pp=2)
def test_a_message_travels_while_the_stage_that_will_take_it_computes(mesh: DeviceMesh) -> None:
    """Rank 1 ends its first forward only when rank 0 knows that the second activation has
    arrived."""
    s = schedule("gpipe", 2, 2)
    links = open_links(mesh, s.rank_of_stage)
    toy = Toy(2, 2)
    aside = dist.new_group([0, 1])
    assert isinstance(aside, dist.ProcessGroup)

    def forward(stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        if (stage, microbatch) == (1, 0):
            dist.recv(torch.empty(1), src=0, group=aside)
        return Toy.forward(toy, stage, microbatch, received)

    def after(i: Instruction) -> None:
        if str(i) == "sA0.1":
            links.finish()
            dist.send(torch.ones(1), dst=1, group=aside)

    toy.forward = forward
    toy.after = after
    Executor(s.programs[links.axis.rank], links, toy).run()
    require_plain_gradients(toy, links)
    assert not any(links.expected.values())


@on_ranks(pp=2)
def test_matched_by_order_no_receive_is_begun_before_its_turn(mesh: DeviceMesh) -> None:
    """A kernel that waits for a message while others are launched can hold the host, and with it
    all ranks."""
    s = schedule("1f1b", 2, 4)
    links = open_links(mesh, s.rank_of_stage, "order")
    toy = Toy(2, 4)

    def forward(stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        assert not any(links.expected.values())
        return Toy.forward(toy, stage, microbatch, received)

    toy.forward = forward
    Executor(s.programs[links.axis.rank], links, toy).run()
    require_plain_gradients(toy, links)
