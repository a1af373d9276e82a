"""Ends of a run that are no crash: the errors that stop it, and their exit codes.

A run that ends because of wrong input, because it stopped itself or because of a signal would end
in the same way if it were started again. Launchers know such an end by the reason that the rank has
noted, "Type: message", also of a rank that they have stopped before it could exit with its code.
"""

import signal

from megaprec.durable import OF_A_DISK, file_error
from megaprec.errors import UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Stopped(Exception):
    """The run ended because of a signal, with its state saved if it trains.

    exit_code: of the command, 128 + signal.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.exit_code = 128 + signal_number

    @classmethod
    def named_by(cls, reason: str) -> "Stopped":
        """Return the exception whose text, which ends with the signal's name, a rank has noted."""
        _, _, signal_name = reason.rpartition(" ")
        return cls(signal.Signals[signal_name])


class RanksFailed(Exception):
    """Local ranks that a command has started did not end well. The text is the lines that their
    launcher has printed.

    exit_code: of the command.
    """

    def __init__(self, lines: str, exit_code: int) -> None:
        super().__init__(lines)
        self.exit_code = exit_code


def require_not_stopped(exit_code: int) -> None:
    """Raise Stopped if the exit code of local ranks says that a signal has stopped them; their
    launcher has printed it."""
    signal_number = exit_code - 128
    if signal_number in SIGNALS:
        raise Stopped(signal_number)


class TrainingDiverged(Exception):
    """Training stopped itself because steps keep overflowing or must not overflow.

    The command exits with code 3.
    """


class FaultyHardware(Exception):
    """Training stopped itself because a rank holds or computes wrong numbers.

    The command exits with code 3.

    hosts: names of the machines to leave out of the next start, each once.
    """

    def __init__(self, message: str, hosts: tuple[str, ...]) -> None:
        super().__init__(message)
        self.hosts = hosts


EXIT_CODES: dict[type[Exception], int] = {UserError: 2, TrainingDiverged: 3, FaultyHardware: 3}


ON_PURPOSE = (*EXIT_CODES, Stopped)


def as_user_error(error: Exception) -> Exception:
    """Return the exception that the user is told: UserError for a file that cannot be read or
    written. Its type is one of ON_PURPOSE, or another that is a crash.
    """
    # what a library writes may fail without the name of its file
    if isinstance(error, OSError) and (error.filename is not None or error.errno in OF_A_DISK):
        return UserError(file_error(error))
    # A subclass of UserError is noted and printed under the name that EXIT_CODES has.
    if isinstance(error, UserError):
        return UserError(*error.problems)
    return error


def ended_on_purpose(reason: str) -> bool:
    """Return True if a rank that has noted this reason ended on purpose."""
    beginnings = tuple(f"{error_type.__name__}: " for error_type in ON_PURPOSE)
    return reason.startswith(beginnings)


def code_of(reason: str, exitcode: int) -> int:
    """Return the exit code that belongs to a rank's reason, "" for none.

    exitcode: of its process, which the launcher may have stopped, by SIGTERM, before it exited by
        itself.
    """
    if reason.startswith(f"{Stopped.__name__}: "):
        return Stopped.named_by(reason).exit_code
    for error_type, code in EXIT_CODES.items():
        if reason.startswith(f"{error_type.__name__}: "):
            return code
    # A crash whose traceback was noted, and that the launcher was quicker to end.
    return 1 if reason and exitcode == -signal.SIGTERM else exitcode


class RankHangs(Exception):
    """A rank hangs, and all leave. The message names the rank that hangs, not the one that has
    noticed it.
    """
