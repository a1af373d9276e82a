"""The start of the `megaprec` command, while its modules are read, and its end.

Reading the modules takes seconds, most of them for torch. Ctrl-C during that time ends the process
at once, without the traceback of an import. While the command runs it is Python's exception again,
which commands answer. Afterwards it ends the process at once again.

Modules make a million objects that live as long as the process. Python's garbage collector would
visit them again and again while they are read, and once more when the process ends: half a second
and a second of every command and rank. So it rests while they are read, and then leaves them out
(`gc.freeze`).
"""

import gc
import signal
import sys
from collections.abc import Sequence

gc.disable()
NORMAL = signal.getsignal(signal.SIGINT)
if NORMAL is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from tools import cli  # noqa: E402

first_reader = sys.modules.get(
    "megaprec.reading_modules"
)  # if megaprec was imported before this module
gc.freeze()
gc.enable()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit code."""
    try:
        signal.signal(signal.SIGINT, first_reader.NORMAL if first_reader else NORMAL)
        return cli.main(argv)
    except KeyboardInterrupt:  # before the command itself could answer it, or after
        return 130
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # all is said: what follows only frees memory
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        gc.collect()  # what the command has made, as Python would
        gc.freeze()  # modules that were imported later
