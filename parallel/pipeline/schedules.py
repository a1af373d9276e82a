"""Pipeline schedules as data: the instructions of every pipeline rank, in order.

A schedule is one program per rank and the rank of each stage. The simulation (`simulation.py`), the
proof (`verify.py`), the executor (`executor.py`) and the pictures all read the same schedule, so
they cannot disagree.

A kind of schedule (`builders.py`) decides only the order of forwards and backwards. `complete` adds
the instructions that this order implies: the transfers between ranks, and `REDUCE` where the
gradients of a stage are final.

As text, a schedule is one line per rank, which parses to the same schedule; blank lines and text
after a `#` are ignored. A text with computations alone is completed, so this is a whole custom
schedule:

    F0.0 F0.1 B0.0 B0.1     # rank 0
    F1.0 B1.0 F1.1 B1.1     # rank 1
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from megaprec.errors import Problem, UserError
from parallel.pipeline.instructions import (
    COMPUTATIONS,
    INPUT_GRADIENTS,
    NO_MICROBATCH,
    WEIGHT_GRADIENTS,
    Instruction,
    Op,
    Program,
)

SHOWN_AROUND = 4  # instructions before and after the current one in a picture
MOST_PROBLEMS = 5  # of a text that are told


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule.

    programs: by pipeline rank.
    rank_of_stage: the pipeline rank on which each stage lives.
    """

    programs: tuple[Program, ...]
    rank_of_stage: tuple[int, ...]

    @property
    def microbatches(self) -> int:
        """Return the number of micro-batches."""
        numbers = [instruction.microbatch for instruction in chain(*self.programs)]
        return 1 + max(numbers, default=NO_MICROBATCH)

    def __str__(self) -> str:
        lines = [" ".join(map(str, program)) for program in self.programs]
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Return the schedule with this text. Each stage lives on the first rank whose line names
        it.

        Raises UserError that lists, line by line, the first words that are no instruction, or the
        stages that no line names.
        """
        programs = _read_programs(text)
        rank_of_stage = _first_ranks(programs)
        stages = range(1 + max(rank_of_stage, default=0))
        _require_numbers(programs, rank_of_stage, stages)
        placement = tuple(rank_of_stage[stage] for stage in stages)
        # a text with any transfer is taken as it stands, to be checked
        instructions = chain(*programs)
        if all(instruction.op in COMPUTATIONS for instruction in instructions):
            return complete(programs, placement)
        return cls(tuple(programs), placement)


def _read_programs(text: str) -> list[Program]:
    """Return the program of each line of a schedule as text. Raises UserError that lists, by line,
    the words that are no instruction."""
    programs: list[Program] = []
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), 1):
        before_comment, _, _ = line.partition("#")
        words = before_comment.split()
        try:
            if words:
                program = tuple(map(Instruction.parse, words))
                programs.append(program)
        except UserError as error:
            problems += (problem.within(f"line {number}: ") for problem in error.problems)
    _require_none(problems, len(problems))
    return programs


def _require_numbers(
    programs: Sequence[Program], rank_of_stage: Mapping[int, int], stages: Sequence[int]
) -> None:
    """Raise UserError for stages and micro-batches that no line names, although lines name larger
    ones.

    rank_of_stage: of the stages that a line names. stages: those from 0 to the largest.
    """
    lacking = (stage for stage in stages if stage not in rank_of_stage)
    # One large number of a stage by mistake would make a problem of each stage below it.
    told = islice(lacking, MOST_PROBLEMS)
    problems = [Problem.of("pipeline.stage_without_line", stage=stage) for stage in told]
    problems += _unnamed_microbatch(programs)
    num_lacking = len(stages) - len(rank_of_stage)
    _require_none(problems, num_lacking)


def _require_none(problems: Sequence[Problem], count: int) -> None:
    """Raise UserError if there are problems. Of more than MOST_PROBLEMS it tells the first ones and
    how many more there are.

    problems: all of them, or the first ones. count: how many there are in all.
    """
    # a file of another kind has a problem in each of its lines
    num_further = count - MOST_PROBLEMS
    if num_further > 0:
        further = Problem.of("pipeline.further_problems", number=num_further)
        problems = [*problems[:MOST_PROBLEMS], further]
    if problems:
        raise UserError(*problems)


def _unnamed_microbatch(programs: Sequence[Program]) -> Iterator[Problem]:
    """Yield a problem if there is a micro-batch below the largest that no instruction names."""
    numbers = {instruction.microbatch for instruction in chain(*programs)}
    named = numbers - {NO_MICROBATCH}
    largest = max(named, default=-1)
    # they are numbered from 0
    if largest >= len(named):
        first_unnamed = next(number for number in range(largest) if number not in named)
        yield Problem.of("pipeline.microbatch_unnamed", microbatch=first_unnamed, largest=largest)


def _first_ranks(programs: Sequence[Program]) -> dict[int, int]:
    """Return the first rank whose program names each stage."""
    ranks: dict[int, int] = {}
    for rank, program in enumerate(programs):
        for instruction in program:
            ranks.setdefault(instruction.stage, rank)
    return ranks


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forwards of `schedule` and their transfers, for evaluation."""
    forward = {Op.RECV_ACTIVATION, Op.FORWARD, Op.SEND_ACTIVATION}
    programs: list[Program] = []
    for program in schedule.programs:
        forwards = tuple(instruction for instruction in program if instruction.op in forward)
        programs.append(forwards)
    return Schedule(tuple(programs), schedule.rank_of_stage)


def complete(
    computations: Sequence[Sequence[Instruction]], rank_of_stage: Sequence[int]
) -> Schedule:
    """Return a schedule of these forwards and backwards with the transfers and reductions that they
    imply.

    A receive stands directly before its use, and a send directly after the computation of its
    tensor. REDUCE follows the last weight gradient of a stage, but after the send of its input
    gradient, because the neighbour waits for that.
    """
    programs = []
    for program in computations:
        last_of_stage = last_weight_gradients(program)
        completed: list[Instruction] = []
        for instruction in program:
            completed += _with_transfers(instruction, rank_of_stage)
            # after the send, which the neighbour waits for
            if instruction == last_of_stage.get(instruction.stage):
                reduction = Instruction(Op.REDUCE, instruction.stage)
                completed.append(reduction)
        programs.append(tuple(completed))
    return Schedule(tuple(programs), tuple(rank_of_stage))


def last_weight_gradients(program: Sequence[Instruction]) -> dict[int, Instruction]:
    """Return, by stage, the instruction after which the stage's gradients are final."""
    last_of_stage: dict[int, Instruction] = {}
    for instruction in program:
        if instruction.op in WEIGHT_GRADIENTS:
            last_of_stage[instruction.stage] = instruction
    return last_of_stage


def _with_transfers(
    instruction: Instruction, rank_of_stage: Sequence[int]
) -> Iterator[Instruction]:
    """Yield the receive that `instruction` needs, `instruction`, and the send of its result."""
    stage = instruction.stage
    rank = rank_of_stage[stage]
    # stages on one rank hand their tensors over without a transfer
    last_stage = len(rank_of_stage) - 1
    from_other_rank = stage > 0 and rank_of_stage[stage - 1] != rank
    to_other_rank = stage < last_stage and rank_of_stage[stage + 1] != rank
    is_forward = instruction.op is Op.FORWARD
    is_backward = instruction.op in INPUT_GRADIENTS
    if from_other_rank and is_forward:
        yield instruction._replace(op=Op.RECV_ACTIVATION)
    if to_other_rank and is_backward:
        yield instruction._replace(op=Op.RECV_GRADIENT)
    yield instruction
    if to_other_rank and is_forward:
        yield instruction._replace(op=Op.SEND_ACTIVATION)
    if from_other_rank and is_backward:
        yield instruction._replace(op=Op.SEND_GRADIENT)


def picture(
    programs: Mapping[int, Sequence[Instruction]],
    at: Mapping[int, int],
    notes: Mapping[int, str],
) -> str:
    """Return lines of text, one per rank: its instruction number `at[rank]` in brackets, those
    around it, and the rank's note.

    programs, at, notes: by rank; a rank may have no note.
    """
    rows: list[tuple[str, str, str]] = []  # for each rank its name, and the words before and after
    for rank, program in programs.items():
        before, after = _words_around(program, at[rank])
        rows.append((f"rank {rank}:", before, after))
    # as wide as the longest of a column, so that the current instructions are below each other
    columns = zip(*rows, strict=True)
    name_width, before_width, after_width = (max(map(len, column)) for column in columns)
    lines: list[str] = []
    for rank, (name, before, after) in zip(programs, rows, strict=True):
        line = f"{name:<{name_width}}  {before:>{before_width}} {after:<{after_width}}"
        note = notes.get(rank)
        if note:
            line += f"  <-- {note}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def _words_around(program: Sequence[Instruction], index: int) -> tuple[str, str]:
    """Return as text the few instructions before number `index` of a program, and that one in
    brackets with the few after it. index: the program's length for its end."""
    words = [*map(str, program)]
    first = max(0, index - SHOWN_AROUND)
    stop = index + 1 + SHOWN_AROUND
    before = words[first:index]
    if first > 0:
        before.insert(0, "...")
    current = words[index] if index < len(words) else "end"
    words_after = words[index + 1 : stop]
    after = [f"[{current}]", *words_after]
    if stop < len(words):
        after.append("...")
    return " ".join(before), " ".join(after)
