"""The launcher of this process as its ranks see it, and errors that follow from the end of another
rank.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megaprec.resources import cores

OURS = "megaprec_"  # prefix of the run id of ranks that this launcher has started
RESTARTED = "MEGAPREC_RESTARTED"  # set for ranks that this launcher has started again
# Errors of gloo, NCCL and the store when another rank is gone.
LOST_CONNECTION = re.compile(
    r"connection (closed|reset|refused|was)|broken pipe|socket|timed out|pair closure|peer|abort",
    re.I,
)


def under_torchrun() -> bool:
    """Return True if a launcher on torch's elastic agent, as torchrun, has started this rank."""
    return not os.environ.get("TORCHELASTIC_RUN_ID", OURS).startswith(OURS)


def was_restarted(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if this rank's launcher has started the ranks before. A checkpoint may then be
    their own.

    Variables that a shell has left in the environment of a process that no launcher has started do
    not count.
    """
    launcher = environ.get("TORCHELASTIC_RUN_ID", "")
    if launcher.startswith(OURS):
        return RESTARTED in environ
    return bool(launcher) and environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def prints_own_failure() -> bool:
    """Return True if this process prints its own failure, False if a launcher prints it after all
    ranks have ended.
    """
    if is_local_rank():
        return False
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK") == "0"


def is_local_rank() -> bool:
    """Return True if `start_ranks` has started this process as a rank."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(OURS)


def lost_connection(message: str) -> bool:
    """Return True if an error with this text follows from the loss of another rank or the link."""
    return LOST_CONNECTION.search(message) is not None


def is_consequence(error: BaseException) -> bool:
    """Return True if an error of torch's communication follows from the end of another rank, which
    has the reason.
    """
    return isinstance(error, RuntimeError) and lost_connection(str(error))


@dataclass(frozen=True)
class LostRank:
    """The first rank that failed.

    exitcode: -n if signal n ended it. message: the line that names rank and reason.
    """

    rank: int
    exitcode: int
    message: str


# returns the number of ranks to start after a failure, 0 to end the run
OnLostRank = Callable[[LostRank], int]


def share_of_cores(ranks: int) -> int:
    """Return the CPU threads per local rank: OMP_NUM_THREADS if it is set, otherwise cores / ranks,
    at least 1.
    """
    # A list has a number for each level of nested parallel regions: the outermost counts.
    outermost, _, _ = os.environ.get("OMP_NUM_THREADS", "").partition(",")
    outermost = outermost.strip()
    if outermost.isdecimal() and int(outermost):  # commands refuse others (`require_threads`)
        return int(outermost)
    return max(1, cores() // ranks)
