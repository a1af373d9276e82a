"""The command while its modules are read: see tools/start.py, which ends what begins here.

A command imports this module before torch. Other programs never do: they keep their garbage
collector and their Ctrl-C.
"""

import gc
import signal

gc.disable()
NORMAL = signal.getsignal(signal.SIGINT)  # what answers Ctrl-C afterwards
if NORMAL is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
