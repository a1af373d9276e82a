"""The start of the `megaprec` command, while its modules are read, and its end.

Reading the modules of a command can take seconds, most of them for torch. Ctrl-C during that
time ends the process at once, without the traceback of an import. While the command runs it is
Python's exception again, which commands answer. Afterwards it ends the process at once again.

Modules make a million objects that live as long as the process. Python's garbage collector would
visit them again and again while they are read, and once more when the process ends: half a second
and a second of a command and of each rank. So it rests while they are read, and then leaves them
out (`gc.freeze`).
"""

import gc
import signal
from collections.abc import Sequence

gc.disable()
NORMAL = signal.getsignal(signal.SIGINT)  # what answers Ctrl-C while a command runs
if NORMAL is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from tools import cli  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit code."""
    try:
        return cli.main(argv, _begin)
    except KeyboardInterrupt:  # before the command itself could answer it, or after
        return 130
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # all is said: what follows only frees memory
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        gc.collect()  # what the command has made, as Python would
        gc.freeze()  # modules that were imported later


def _begin() -> None:
    """Let Ctrl-C and the garbage collector work for the command, whose modules are read."""
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, NORMAL)
