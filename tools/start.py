"""The start of the `megaprec` command, while its modules are read.

Reading them takes seconds, most of them for torch. Ctrl-C during that time ends the process at once, without the
traceback of an import. Once they are read it is Python's exception again, which commands answer.
"""

import signal

NORMAL = signal.getsignal(signal.SIGINT)
if NORMAL is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from tools.cli import main as main  # noqa: E402

signal.signal(signal.SIGINT, NORMAL)
