"""The ends of a rank's program that are no crash, and their exit codes.

A run that ends because of wrong input, because it stopped itself or because of a signal would end
in the same way if it were started again. Launchers know such an end by the reason that the rank has
noted, "Type: message", also of a rank that they have stopped before it could exit with its code.
"""

import signal

from megaprec.durable import file_error
from megaprec.errors import UserError
from tools.training.signals import Stopped
from tools.training.silent_faults import FaultyHardware
from tools.training.skipped_steps import TrainingDiverged

CODES: dict[type[Exception], int] = {UserError: 2, TrainingDiverged: 3, FaultyHardware: 3}
ON_PURPOSE = (*CODES, Stopped)


def as_user_error(error: Exception) -> Exception:
    """Return the exception that the user is told.

    UserError for a file that cannot be read or written.

    Its type is one of ON_PURPOSE, or another that is a crash.
    """
    if isinstance(error, OSError) and error.filename is not None:
        return UserError(file_error(error))
    return UserError(*error.problems) if isinstance(error, UserError) else error


def ended_on_purpose(reason: str) -> bool:
    """Return True if a rank that has noted this reason ended on purpose."""
    return reason.startswith(tuple(f"{kind.__name__}: " for kind in ON_PURPOSE))


def code_of(reason: str, exitcode: int) -> int:
    """Return the exit code that belongs to a rank's reason, "" for none.

    exitcode: of its process, which the launcher may have stopped, by SIGTERM, before it exited by
        itself.
    """
    if reason.startswith(f"{Stopped.__name__}: "):
        return Stopped.named_by(reason).code
    for kind, code in CODES.items():
        if reason.startswith(f"{kind.__name__}: "):
            return code
    # A crash whose traceback was noted, and that the launcher was quicker to end.
    return 1 if reason and exitcode == -signal.SIGTERM else exitcode
