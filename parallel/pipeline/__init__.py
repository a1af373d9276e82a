"""Pipeline schedules as data: their construction, proof, simulation and execution.

plan = schedule("1f1b", ranks=4, microbatches=8)  # the instructions of each rank, in order
check(plan)             # raises unless each runs once and the schedule finishes
bubble(simulate(plan))  # the longest wait of a rank, over the time it computes
"""

from typing import TYPE_CHECKING

from megaprec.front_door import front_door

if TYPE_CHECKING:
    from parallel.pipeline.executor import Executor, StageHooks
    from parallel.pipeline.instructions import Instruction, Op
    from parallel.pipeline.kinds import KINDS, schedule
    from parallel.pipeline.p2p import P2P
    from parallel.pipeline.schedules import Schedule, forward_only, picture
    from parallel.pipeline.simulation import bubble, simulate
    from parallel.pipeline.timeline import Recording
    from parallel.pipeline.verify import check

__getattr__, __dir__ = front_door(__name__)

__all__ = [
    "KINDS",
    "P2P",
    "Executor",
    "Instruction",
    "Op",
    "Recording",
    "Schedule",
    "StageHooks",
    "bubble",
    "check",
    "forward_only",
    "picture",
    "schedule",
    "simulate",
]
