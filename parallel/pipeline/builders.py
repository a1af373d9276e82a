"""The builders of pipeline schedules: the order in which each rank runs the forwards and backwards
of its stages.

The zero-bubble kinds split a backward. The input gradient, which the stage before waits for, is
computed as early as possible. Weight gradients, which no stage waits for, fill the time in which a
rank would idle (Qi, Wan, Huang and Lin, "Zero bubble pipeline parallelism", 2023). They need enough
micro-batches: m >= p for zb-h1, m >= 2 p - 1 for the other two. In interleaved schedules the stages
are assigned to ranks round-robin (Narayanan et al., 2021). In zb-v they go down the ranks and up
again, so that the first and the last stage lie on rank 0. So they do in dualpipe-v, which has
phases of its own and splits some backwards only (DeepSeek-V3, arXiv 2412.19437; the V half of it is
of github.com/deepseek-ai/DualPipe).
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import chain
from math import inf

from parallel.pipeline.instructions import Cost, Instruction, Op
from parallel.pipeline.schedules import Schedule, complete

Order = list[Instruction]  # the forwards and backwards of one rank, without transfers
IsDone = Callable[[Instruction], bool]


def equal(instruction: Instruction) -> float:
    """Return 1: all forwards, input gradients and weight gradients take equally long."""
    return 1


def gpipe(
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    cost: Cost = equal,
) -> Schedule:
    """Return the GPipe schedule: every forward, then every backward. A rank holds all
    micro-batches' activations."""
    orders = [_alternate(rank, microbatches, warmup=microbatches) for rank in range(ranks)]
    return complete(orders, rank_of_stage=range(ranks))


def one_f_one_b(
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    cost: Cost = equal,
) -> Schedule:
    """Return the 1F1B schedule.

    It runs forwards until the pipeline is full, then one forward per backward, then the remaining
    backwards. It is as fast as GPipe, but rank r holds the activations of only min(microbatches,
    ranks - r) micro-batches.
    """
    orders = [_alternate(rank, microbatches, warmup=ranks - rank - 1) for rank in range(ranks)]
    return complete(orders, rank_of_stage=range(ranks))


def interleaved(
    ranks: int,
    microbatches: int,
    chunks: int,
    cost: Cost = equal,
) -> Schedule:
    """Return 1F1B over `chunks` stages on each rank, `ranks` apart: the pipeline fills in 1 /
    chunks of the time.

    A rank runs each group of micro-batches through one of its stages, then through its next stage.
    A group has at least as many micro-batches as there are ranks, so that the first one comes back
    to a rank as the last one leaves it.
    """
    groups = _group_sizes(ranks, microbatches)
    visits = _visits(groups, chunks)  # the same order on each rank
    # forwards of the warm-up that each rank runs more than the next one, as in Megatron-LM
    # (`get_pp_rank_microbatches`)
    warmup_a_rank = 1 if chunks == 1 else 2
    orders = []
    for rank in range(ranks):
        forwards = []
        backwards = []
        for chunk, microbatch in visits:
            forward_stage = chunk * ranks + rank
            # backwards go through the rank's stages from the last one to the first
            backward_stage = (chunks - 1 - chunk) * ranks + rank
            forwards.append(Instruction(Op.FORWARD, forward_stage, microbatch))
            backwards.append(Instruction(Op.BACKWARD, backward_stage, microbatch))
        ranks_behind = ranks - rank - 1
        warmup = ranks_behind * warmup_a_rank + (chunks - 1) * max(groups)
        orders.append(_interlace(forwards, backwards, warmup))
    return complete(orders, rank_of_stage=[*range(ranks)] * chunks)


def zb_h1(
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    cost: Cost = equal,
) -> Schedule:
    """Return 1F1B with split backwards; no rank holds more than rank 0 of 1F1B does, which is
    `ranks` micro-batches."""
    orders = [
        _alternate(rank, microbatches, warmup=ranks - rank - 1, backward=Op.BACKWARD_INPUT)
        for rank in range(ranks)
    ]
    rank_of_stage = range(ranks)  # one stage on each rank
    filled = fill(orders, rank_of_stage, limit=ranks, cost=cost)
    return complete(filled, rank_of_stage)


def zb_h2(
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    cost: Cost = equal,
) -> Schedule:
    """Return zb-h1 with twice the warm-up: with enough micro-batches and equal costs, no rank waits
    between its first and its last instruction."""
    orders = [
        _alternate(rank, microbatches, warmup=2 * (ranks - rank - 1), backward=Op.BACKWARD_INPUT)
        for rank in range(ranks)
    ]
    rank_of_stage = range(ranks)  # one stage on each rank
    filled = fill(orders, rank_of_stage, limit=2 * ranks - 1, cost=cost)
    return complete(filled, rank_of_stage)


def zb_v(
    ranks: int,
    microbatches: int,
    chunks: int = 2,
    cost: Cost = equal,
) -> Schedule:
    """Return the V schedule, in which stages s and 2 * ranks - 1 - s share a rank.

    No rank waits, as in zb-h2, and it takes the memory of 1F1B.
    """
    orders = [_v_order(rank, ranks, microbatches) for rank in range(ranks)]
    rank_of_stage = [*range(ranks), *reversed(range(ranks))]
    # two stages a rank, each half as large: as much memory as `ranks` activations of 1F1B
    filled = fill(orders, rank_of_stage, limit=2 * ranks, cost=cost)
    return complete(filled, rank_of_stage)


def dualpipe_v(
    ranks: int,
    microbatches: int,
    chunks: int = 2,
    cost: Cost = equal,
) -> Schedule:
    """Return DualPipeV, in which stages s and 2 * ranks - 1 - s share a rank, as in zb-v.

    A steady rank runs a forward of one stage and a backward of the other in turn. DeepSeek's
    kernels run the two at the same time, so that the exchanges of one go on beside the products of
    the other; here the forward ends before the backward begins. The phases need as many
    micro-batches as there are stages. With fewer, the instructions of those that are not there are
    left out.
    """
    numbered = max(microbatches, 2 * ranks)
    orders: list[Order] = []
    for rank in range(ranks):
        order = _dualpipe_v_order(rank, ranks, numbered)
        present = [instruction for instruction in order if instruction.microbatch < microbatches]
        orders.append(present)
    rank_of_stage = [*range(ranks), *reversed(range(ranks))]
    return complete(orders, rank_of_stage)


def _alternate(
    stage: int,
    microbatches: int,
    warmup: int,
    backward: Op = Op.BACKWARD,
) -> Order:
    """Return the order of a rank with one stage: `warmup` forwards, then a forward and a backward
    in turn, then the remaining backwards. backward: the operation that stands for a backward."""
    forwards = [Instruction(Op.FORWARD, stage, number) for number in range(microbatches)]
    backwards = [forward._replace(op=backward) for forward in forwards]
    return _interlace(forwards, backwards, warmup)


def _interlace(
    forwards: Order,
    backwards: Order,
    warmup: int,
) -> Order:
    """Return `warmup` forwards, then forwards and backwards in turn, then the remaining
    backwards."""
    num_steady = max(0, len(forwards) - warmup)
    # the last backwards have no forward beside them
    steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return [*forwards[:warmup], *steady, *backwards[num_steady:]]


def _group_sizes(ranks: int, microbatches: int) -> list[int]:
    """Return the sizes of the groups of micro-batches: nearly equal, each at least `ranks` if there
    are that many."""
    num_groups = max(1, microbatches // ranks)
    size, num_larger = divmod(microbatches, num_groups)
    return [size + 1] * num_larger + [size] * (num_groups - num_larger)


def _visits(groups: Sequence[int], chunks: int) -> list[tuple[int, int]]:
    """Return the pairs (chunk, micro-batch) in the order in which a rank runs its forwards: one
    group of micro-batches through all chunks of the rank, then the next group.

    groups: the number of micro-batches of each group. chunks: stages of the rank.
    """
    visits = []
    first = 0
    for size in groups:
        for chunk in range(chunks):
            visits += [(chunk, microbatch) for microbatch in range(first, first + size)]
        first += size
    return visits


def _v_order(
    rank: int,
    ranks: int,
    microbatches: int,
) -> Order:
    """Return the forwards and input gradients of one rank of a V schedule, in order.

    The rank runs forwards of its downward stage until the first micro-batch returns on the upward
    stage, then forwards of both stages until the first gradient arrives. Gradients arrive at the
    upward stage first and at the downward stage last.
    """
    down = rank
    up = 2 * ranks - 1 - rank
    # until the first micro-batch has gone down the ranks behind this one and up again
    pattern = [(Op.FORWARD, down)] * (2 * (ranks - rank) - 1)
    # until its gradient comes back from the last stage, on rank 0
    pattern += [(Op.FORWARD, up), (Op.FORWARD, down)] * rank
    # until gradients have gone down to the last rank and arrive at the downward stage
    pattern += [(Op.FORWARD, up), (Op.BACKWARD_INPUT, up)] * (ranks - rank)
    steady = [
        (Op.FORWARD, down),
        (Op.BACKWARD_INPUT, down),
        (Op.FORWARD, up),
        (Op.BACKWARD_INPUT, up),
    ]
    # more than are needed, of which those of no micro-batch are left out below
    pattern += steady * microbatches
    order = []
    next_microbatch = Counter[tuple[Op, int]]()
    for op, stage in pattern:
        order.append(Instruction(op, stage, next_microbatch[op, stage]))
        next_microbatch[op, stage] += 1
    return [instruction for instruction in order if instruction.microbatch < microbatches]


def _dualpipe_v_order(
    rank: int,
    ranks: int,
    microbatches: int,
) -> Order:
    """Return the computations of one rank of DualPipeV in order, in the phases of DeepSeek's code.

    microbatches: at least as many as there are stages. The rank has a downward stage, `rank`, and
    an upward stage, which micro-batches reach after they have turned on the last rank. A weight
    gradient is that of the oldest input gradient which still lacks one.
    """
    forward_down = (Op.FORWARD, rank)
    forward_up = (Op.FORWARD, 2 * ranks - 1 - rank)
    backward_down = (Op.BACKWARD, rank)
    backward_up = (Op.BACKWARD, 2 * ranks - 1 - rank)
    input_down = (Op.BACKWARD_INPUT, rank)
    input_up = (Op.BACKWARD_INPUT, 2 * ranks - 1 - rank)
    weight = (Op.BACKWARD_WEIGHT, -1)  # of the stage of its input gradient
    behind = ranks - 1 - rank  # ranks that a micro-batch comes to before it turns
    # until the first micro-batch has gone down the ranks behind this one and up again
    pattern = [forward_down] * (2 * behind)
    pattern += [forward_down, forward_up] * (rank + 1)
    # until gradients come back to the downward stage: those that the rank before waits for
    pattern += [input_up, weight, forward_up] * behind
    # the pairs that DeepSeek overlaps
    num_steady = microbatches - 2 * ranks + rank + 1
    pattern += [forward_down, backward_up, forward_up, backward_down] * num_steady
    pattern += [backward_up, forward_up, backward_down] * behind
    # the second half is split, so that its input gradients reach the ranks before sooner
    half = rank + 1
    pattern += ([backward_up, backward_down] * half)[:half]
    pattern += ([input_up, input_down] * half)[half:]
    pattern += [weight, input_down] * behind
    pattern += [weight] * half
    return _numbered(pattern)


def _numbered(pattern: Sequence[tuple[Op, int]]) -> Order:
    """Return the instructions of a pattern of operations and stages: the n-th forward of a stage is
    that of micro-batch n, and so is its n-th backward, whole or input half.

    A weight gradient has the stage and the micro-batch of the oldest input gradient without one.
    """
    order: Order = []
    # by stage
    num_forwards = Counter[int]()
    num_backwards = Counter[int]()
    without_weight_gradient: deque[Instruction] = deque()
    for op, stage in pattern:
        if op is Op.BACKWARD_WEIGHT:
            input_gradient = without_weight_gradient.popleft()
            order.append(input_gradient._replace(op=op))
            continue
        counts = num_forwards if op is Op.FORWARD else num_backwards
        instruction = Instruction(op, stage, counts[stage])
        counts[stage] += 1
        order.append(instruction)
        if op is Op.BACKWARD_INPUT:
            without_weight_gradient.append(instruction)
    return order


def fill(
    orders: Sequence[Order],
    rank_of_stage: Sequence[int],
    limit: int,
    cost: Cost = equal,
) -> list[Order]:
    """Return each rank's order with its weight gradients, which are put wherever the rank would
    wait, by a simulation of all ranks.

    orders: the forwards and input gradients of each rank, whose order is kept.
    limit: a rank waits for another rank, or because it holds so many activations, each from its
        forward to its weight gradient.
    cost: the time of each instruction; use whole numbers, which compare exactly.
    """
    ranks = [_Filling(order, len(rank_of_stage) - 1, limit) for order in orders]
    now = 0.0
    free_at = [0.0] * len(ranks)  # the time at which each rank has ended its last instruction
    done_at: dict[Instruction, float] = {}  # the time at which an instruction ends

    def is_done(instruction: Instruction) -> bool:
        return done_at.get(instruction, inf) <= now

    while any(rank.order or rank.weight_gradients for rank in ranks):
        for number, rank in enumerate(ranks):
            if free_at[number] > now:
                continue
            instruction = rank.take(is_done)
            if instruction is not None:
                end = now + cost(instruction)
                free_at[number] = end
                done_at[instruction] = end
        assert max(free_at) > now, "every rank waits for another, or for memory"
        # the next moment at which a rank is free: nothing changes before
        now = min(end for end in free_at if end > now)
    return [rank.filled for rank in ranks]


class _Filling:
    """One rank in `fill`.

    order: its remaining forwards and input gradients.
    weight_gradients: those that can run at any time from now on.
    num_held_activations: of micro-batches, from the forward of each to its weight gradient.
    filled: what the rank has run so far, in order.
    """

    def __init__(
        self,
        order: Order,
        last_stage: int,
        limit: int,
    ) -> None:
        self.order = deque(order)
        self.last_stage = last_stage  # of the pipeline
        self.limit = limit
        self.weight_gradients: deque[Instruction] = deque()
        self.num_held_activations = 0
        self.filled: Order = []

    def take(self, is_done: IsDone) -> Instruction | None:
        """Return the instruction that this rank starts now, and note it; None if it must wait.

        It is the next forward or input gradient if that can run, otherwise a weight gradient.
        is_done: returns whether an instruction of any rank has ended.
        """
        if self.order and self._can_run(self.order[0], is_done):
            instruction = self.order.popleft()
        elif self.weight_gradients:
            instruction = self.weight_gradients.popleft()
        else:
            return None
        if instruction.op is Op.FORWARD:
            self.num_held_activations += 1
        elif instruction.op is Op.BACKWARD_INPUT:
            self.weight_gradients.append(instruction._replace(op=Op.BACKWARD_WEIGHT))
        elif instruction.op is Op.BACKWARD_WEIGHT:
            self.num_held_activations -= 1
        self.filled.append(instruction)
        return instruction

    def _can_run(self, instruction: Instruction, is_done: IsDone) -> bool:
        """Return True if a forward or an input gradient has the tensor of its neighbouring stage,
        and a forward also the memory that it needs."""
        stage = instruction.stage
        if instruction.op is Op.FORWARD:
            if self.num_held_activations >= self.limit:
                return False
            return stage == 0 or is_done(instruction._replace(stage=stage - 1))
        if not is_done(instruction._replace(op=Op.FORWARD)):
            return False
        return stage == self.last_stage or is_done(instruction._replace(stage=stage + 1))
